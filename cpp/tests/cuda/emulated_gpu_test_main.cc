// The emulated GPU: its memory has the reported size, streams run only when the host waits, graphs
// replay the captured work, and waiting throws the errors of the work.
#define TM_CUDA_NS cuda_emulated
#define TM_CUDA_EMULATED 1
#include <cmath>
#include <cstdio>

#include "cuda/emulated_gpu.h"
#include "cuda/gpu.h"
#include "tests/check.h"
#include "tests/cuda/emulator_kernels.h"

namespace turbomind::cuda_emulated {
namespace {

TM_KERNEL(32, 1) void add_to(const Arrays p) {
  wait_for_previous();
  const int i = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  if (i < p.n) store(p.y + i, load(p.y + i) + load(p.x + i));
}

void test_memory() {
  emulator::set_device_bytes(4096);
  const auto gpu = open_gpu(GpuKind::emulated, 0);
  DeviceBuffer a(*gpu, 4000);
  CHECK(gpu->free_bytes() == 96 && a.size() == 4000 && std::isnan(a.as<float>()[7]));
  CHECK(throws("asked for 97 bytes, 96 of 4096 are free", [&] { gpu->allocate(97); }));
  const GpuStream s(*gpu);
  CHECK(throws("8 bytes at offset 3996 of an allocation of 4000",
               [&] { gpu->fill(s.handle(), a.data() + 3996, 0, 8); }));
  a = DeviceBuffer(*gpu, 16);
  CHECK(gpu->free_bytes() == 4080 && !DeviceBuffer(*gpu, 0));
  CHECK(throws("device index: got 4", [] { open_gpu(GpuKind::emulated, 4); }));
  emulator::set_device_bytes(size_t{1} << 20);
}

// A stream runs only when the host waits; other streams wait by events.
void test_streams() {
  const auto gpu = open_gpu(GpuKind::emulated, 0);
  const GpuStream s(*gpu), other(*gpu);
  const PinnedBuffer in(*gpu, 256), out(*gpu, 256);
  const DeviceBuffer x(*gpu, 256), y(*gpu, 256);
  for (int i = 0; i < 64; ++i) in.as<float>()[i] = 1;
  gpu->copy(s.handle(), x.data(), in.data(), 256);
  gpu->fill(s.handle(), y.data(), 0, 256);
  in.as<float>()[0] = 100;  // too early: the copy reads it
  const Arrays p{x.as<float>(), y.as<float>(), 64, 0};
  launch<add_to>(s.handle(), dim3(2), 32, 0, p);
  const GpuEvent first(*gpu, true), second(*gpu, true);
  CHECK(first.query());  // never recorded
  first.record(s);
  gpu->wait(other.handle(), first.handle());
  gpu->copy(other.handle(), out.data(), y.data(), 256);
  second.record(other);
  CHECK(std::isnan(out.as<float>()[1]));  // not waited for
  CHECK(!first.query());
  second.synchronize();
  CHECK(out.as<float>()[0] == 100 && out.as<float>()[1] == 1);
  CHECK(first.query() && gpu->elapsed_ms(first.handle(), second.handle()) >= 0);
  // Memory that is not pinned is safe: the call waits.
  float plain[64];
  gpu->copy(s.handle(), plain, y.data(), 256);
  CHECK(plain[1] == 1);
}

void test_failing_stream() {
  const auto gpu = open_gpu(GpuKind::emulated, 0);
  const GpuStream s(*gpu);
  const DeviceBuffer y(*gpu, 256);
  launch<fail>(s.handle(), dim3(1), 64, 0, Arrays{});
  gpu->fill(s.handle(), y.data(), 0, 256);  // dropped
  const GpuEvent e(*gpu);
  e.record(s);
  CHECK(throws("fail: block (", [&] { s.synchronize(); }));
  CHECK(std::isnan(y.as<float>()[0]) && e.query());
  s.synchronize();
  CHECK(throws("not timed", [&] { gpu->elapsed_ms(e.handle(), e.handle()); }));
}

void test_graph() {
  const auto gpu = open_gpu(GpuKind::emulated, 0);
  const GpuStream s(*gpu);
  const PinnedBuffer in(*gpu, 256), out(*gpu, 256);
  const DeviceBuffer x(*gpu, 256), y(*gpu, 256);
  for (int i = 0; i < 64; ++i) in.as<float>()[i] = 1;
  Arrays p{x.as<float>(), y.as<float>(), 64, 0};
  const GpuGraph graph(s, [&] {
    gpu->copy(s.handle(), x.data(), in.data(), 256);
    launch<add_to>(s.handle(), dim3(2), 32, 0, p);
    gpu->copy(s.handle(), out.data(), y.data(), 256);
  });
  p.n = 0;  // the graph has its own copy
  gpu->fill(s.handle(), y.data(), 0, 256);
  s.synchronize();
  CHECK(std::isnan(out.as<float>()[0]));  // capturing ran nothing
  for (int round = 1; round <= 3; ++round) {
    in.as<float>()[5] = static_cast<float>(round);  // buffers are read at each replay
    graph.launch(s);
    s.synchronize();
    CHECK(out.as<float>()[0] == round && out.as<float>()[5] == round * (round + 1) / 2);
  }
  const auto captures = [&](auto&& f) { return [&s, f] { GpuGraph(s, f); }; };
  float plain[64];
  CHECK(throws("being captured", captures([&] { s.synchronize(); })));
  CHECK(throws("being captured", captures([&] { DeviceBuffer(*gpu, 16); })));
  CHECK(throws("not pinned",
               captures([&] { gpu->copy(s.handle(), x.data(), plain, sizeof plain); })));
  graph.launch(s);  // the stream is as it was
  s.synchronize();
}

}  // namespace
}  // namespace turbomind::cuda_emulated

int main(int argc, char** argv) {
  using namespace turbomind::cuda_emulated;
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_memory),
                                  TM_CASE(test_streams),
                                  TM_CASE(test_failing_stream),
                                  TM_CASE(test_graph),
                              });
}
