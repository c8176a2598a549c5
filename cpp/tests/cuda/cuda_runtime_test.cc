// Calls of the real Gpu to the CUDA runtime, on a stand-in that counts and computes nothing: the
// device of a thread, releases, captures of other libraries, a fork, lasting errors.
// tests/cpp/test_cuda_runtime.py builds it where the toolkit's headers are installed.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "core/error.h"
#include "cuda/launch_delay.h"
#include "cuda/make_gpu.h"
#include "cuda/probe_cuda.h"
#include "cuda/toolkit/launcher.h"
#include "tests/cuda/fake_cuda_runtime.h"

namespace turbomind {

namespace cuda {
extern const ProbeCuda kProbeCuda;
KernelSetup delay_setup;
const ProbeCuda kProbeCuda{
    nullptr, [](int major) { return major == 9; },
    [](StreamHandle stream, const DelayParams& params) {
      launch_kernel({&delay_setup, &params, stream, dim3(1), 32, 0, "launch<delay>"}, delay_setup);
    }};
}  // namespace cuda

namespace {

int failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

void in_a_thread(const std::function<void()>& f) {
  std::thread(f).join();
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing";
}

// Only the second device is started, in whichever thread its memory is released.
void test_threads(Gpu& gpu) {
  DeviceBuffer device(gpu, 100);
  PinnedBuffer pinned(gpu, 100);
  GpuStream stream(gpu);
  GpuEvent event(gpu);
  GpuGraph graph(stream, [] {});
  in_a_thread([&] { device = DeviceBuffer(); });
  in_a_thread([&] { pinned = PinnedBuffer(); });
  in_a_thread([&] { graph = GpuGraph(); });
  in_a_thread([&] { event = GpuEvent(); });
  in_a_thread([&] { stream = GpuStream(); });
  check(fake::machine.contexts == std::set<int>{1}, "a context on a device that is not used");
  check(fake::machine.owner.empty(), "not all was freed");
}

void test_captures_of_others(Gpu& gpu) {
  fake::machine.elsewhere_capturing = true;
  in_a_thread([&] {
    const GpuEvent event(gpu);
    const DeviceBuffer buffer(gpu, 10);
    check(event.query(), "an event while another library captures");
  });
  fake::machine.elsewhere_capturing = false;
}

void test_launches(Gpu& gpu) {
  static cuda::KernelSetup setup;
  const cuda::KernelLaunch launch{&setup, nullptr, {}, dim3(1), 32, 0, "launch<kernel>"};
  in_a_thread([&] {
    const std::string error = error_of([&] { cuda::launch_kernel(launch, setup); });
    check(error.find("made current by Gpu::make_current") != std::string::npos, error);
    gpu.make_current();
    cuda::launch_kernel(launch, setup);
    gpu.set_overlap(false);
    cuda::launch_kernel(launch, setup);
    gpu.set_overlap(true);
  });
  const auto& seen = fake::machine.launches;
  check(seen.size() == 2 && seen[0].device == 1 && seen[1].device == 1, "launched on the device");
  check(seen.size() == 2 && seen[0].overlap && !seen[1].overlap, "overlap as it was asked for");
  check(fake::machine.attributes == 1, "a kernel is set up once");
}

// A launch that may start early is preceded by one delay, and no other is.
void test_delays(Gpu& gpu) {
  static cuda::KernelSetup setup;
  const auto launches = [&](int microseconds, bool overlap) {
    gpu.set_overlap(overlap);
    set_launch_delay(microseconds);
    const size_t before = fake::machine.launches.size();
    cuda::launch_kernel({&setup, nullptr, {}, dim3(1), 32, 0, "launch<kernel>"}, setup);
    set_launch_delay(0);
    gpu.set_overlap(true);
    return fake::machine.launches.size() - before;
  };
  check(launches(100, true) == 2, "a delay before the kernel");
  check(launches(100, true) == 2, "a delay before the next kernel too");
  check(launches(0, true) == 1, "no delay that is not asked for");
  check(launches(100, false) == 1, "no delay where nothing starts early");
}

// The environment may forbid kernels that start early.
void test_overlap_switched_off() {
  setenv("TM_CUDA_OVERLAP", "0", 1);
  const auto gpu = cuda::make_gpu(1);
  unsetenv("TM_CUDA_OVERLAP");
  check(!gpu->set_overlap(true), "overlap is off however it is set");
  static cuda::KernelSetup setup;
  gpu->make_current();
  cuda::launch_kernel({&setup, nullptr, {}, dim3(1), 32, 0, "launch<kernel>"}, setup);
  check(!fake::machine.launches.back().overlap, "launched without overlap");
}

// Access is given once, from the device that uses it, and a second engine finds it there.
void test_access(Gpu& gpu) {
  const auto other = cuda::make_gpu(0);
  check(gpu.enable_access(gpu) && fake::machine.enabled.empty(), "a device has its own memory");
  fake::machine.peers = false;
  check(!gpu.enable_access(*other), "no access where devices have none");
  fake::machine.peers = true;
  in_a_thread([&] { check(gpu.enable_access(*other), "access"); });
  check(gpu.enable_access(*other), "access that was there");
  check(fake::machine.enabled == std::set<std::pair<int, int>>{{1, 0}}, "access of 1 to 0");
}

void test_errors(Gpu& gpu) {
  const std::string full = error_of([&] { gpu.allocate(800); });
  check(full == "out of device memory: asked for 800 bytes, 700 of 1000 are free", full);
  DeviceBuffer buffer(gpu, 10);
  fake::machine.failing = cudaErrorIllegalAddress;
  const std::string lasting = error_of([&] { gpu.free_bytes(); });
  check(lasting.find("cudaErrorIllegalAddress: a text; this process cannot use the GPU any more") !=
            std::string::npos,
        lasting);
  buffer = DeviceBuffer();  // no error: the runtime is gone, so there is nothing to release
  fake::machine.failing = cudaErrorInvalidValue;
  const std::string passing = error_of([&] { gpu.free_bytes(); });
  check(passing.find("another error: a text") != std::string::npos &&
            passing.find("any more") == std::string::npos,
        passing);
  fake::machine.failing = cudaSuccess;
}

void test_fork() {
  const pid_t child = fork();
  if (child == 0) {
    std::string why;
    const int count = cuda::count_gpus(&why);
    _exit(count == 0 && why.find("forked from one that had started CUDA") != std::string::npos ? 0
                                                                                               : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  check(status == 0, "a forked process gets the error that it has no GPU");
}

void test_all() {
  check(cuda::count_gpus(nullptr) == 2, "two devices");
  const auto gpu = cuda::make_gpu(1);
  test_threads(*gpu);
  test_captures_of_others(*gpu);
  test_launches(*gpu);
  test_delays(*gpu);
  test_overlap_switched_off();
  test_access(*gpu);
  test_errors(*gpu);
  test_fork();
  for (const std::string& what : fake::machine.wrong) check(false, what);
}

}  // namespace
}  // namespace turbomind

int main() {
  turbomind::test_all();
  std::printf(turbomind::failures ? "%d failures\n" : "passed\n", turbomind::failures);
  return turbomind::failures != 0;
}
