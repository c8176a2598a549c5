// Binds the list of GPUs and the checks of what they can run.
#include "cuda/gpu.h"

#include "bindings/bindings.h"
#include "cuda/gpu_context.h"
#include "model/decoder/check_ranks.h"
#include "model/device/device_limits.h"
#include "model/parallel/cut.h"

namespace turbomind::bindings {
namespace {

struct GpuDevice {
  GpuKind kind;
  int index;
  GpuInfo info;
};

std::vector<GpuDevice> gpu_devices() {
  std::vector<GpuDevice> devices;
  for (const GpuKind kind : {GpuKind::cuda, GpuKind::emulated})
    for (int i = 0; i < gpu_count(kind); ++i) devices.push_back({kind, i, gpu_info(kind, i)});
  return devices;
}

std::string cuda_status() {
  std::string why;
  const int count = gpu_count(GpuKind::cuda, &why);
  if (count == 0) return why;
  return std::to_string(count) + (count == 1 ? " CUDA device" : " CUDA devices");
}

// Returns why a GPU does not run this build's kernels, or an empty text if it does.
std::string gpu_fault(int index) {
  try {
    open_gpu(GpuKind::cuda, index);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Returns why a model does not run with a rank on each of the GPUs, by its config; empty: nothing.
std::string model_fault(const ModelConfig& config, const std::vector<GpuOptions>& gpus) {
  const int ranks = static_cast<int>(gpus.size());
  try {
    check_ranks(config, WeightPlace::gpu, ranks);
    for (int r = 0; r < ranks; ++r)
      check_device_limits(config_of(config, {r, ranks}), gpu_info(gpus[r].kind, gpus[r].index));
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

size_t gpu_free_bytes(const GpuOptions& options) {
  return open_gpu(options.kind, options.index)->free_bytes();
}

// Returns the path of the cuBLASLt that an engine would use, or why there is none.
std::string cublaslt_note(const std::vector<std::string>& folders) {
  std::string why;
  const auto library = CublasLt::open(folders, nullptr, 0, nullptr, &why);
  return library ? library->path() + ", version " + std::to_string(library->version()) : why;
}

}  // namespace

void bind_gpu(py::module_& m) {
  py::class_<GpuDevice>(m, "GpuDevice")
      .def_property_readonly("kind", [](const GpuDevice& d) { return gpu_kind_name(d.kind); })
      .def_readonly("index", &GpuDevice::index)
      .def_property_readonly("name", [](const GpuDevice& d) { return d.info.name; })
      .def_property_readonly("total_bytes", [](const GpuDevice& d) { return d.info.total_bytes; })
      .def_property_readonly("multiprocessors",
                             [](const GpuDevice& d) { return d.info.multiprocessors; })
      .def_property_readonly("compute_capability", [](const GpuDevice& d) {
        return py::make_tuple(d.info.major, d.info.minor);
      });
  m.def("gpu_devices", [] { return without_gil(gpu_devices); });
  m.def("cuda_status", [] { return without_gil(cuda_status); });
  m.def("gpu_fault", [](int index) { return without_gil([&] { return gpu_fault(index); }); });
  m.def("model_fault", [](const ModelConfig& config, const std::vector<GpuOptions>& gpus) {
    return without_gil([copy = config, gpus] { return model_fault(copy, gpus); });
  });
  m.def("gpu_free_bytes",
        [](const GpuOptions& gpu) { return without_gil([gpu] { return gpu_free_bytes(gpu); }); });
  m.def("cublaslt_note", [](const std::vector<std::string>& folders) {
    return without_gil([copy = folders] { return cublaslt_note(copy); });
  });
}

}  // namespace turbomind::bindings
