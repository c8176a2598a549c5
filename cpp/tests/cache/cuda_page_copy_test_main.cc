// Copies of pages between a CPU, the stored order and a GPU preserve every byte. On the emulated
// GPU, or with "--gpu" on the first real one.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cache/page_codec.h"
#include "cache/page_copy_cuda.h"
#include "core/error.h"
#include "cuda/emulator.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"

namespace turbomind {
namespace {

using Bytes = SharedVector<uint8_t>;

int failures = 0;

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
#define EXPECT(ok, what) ((ok) ? void() : fail(what))

Bytes random_bytes(size_t n, uint32_t seed) {
  std::mt19937 gen(seed + test_seed);
  Bytes v(n);
  for (uint8_t& x : v) x = static_cast<uint8_t>(gen());
  return v;
}

// Layers of different shapes, in the layout of a CPU.
std::vector<KvLayout> make_layers() {
  std::vector<KvLayout> layers;
  size_t offset = 0;
  for (const auto& [heads, k, v] : {std::array{2, 64, 64}, {1, 80, 96}, {3, 24, 8}}) {
    KvLayout l;
    l.kv_heads = heads, l.k_dim = k, l.v_dim = v, l.offset = offset;
    offset += l.layer_bytes();
    layers.push_back(l);
  }
  return layers;
}

struct GpuPage {
  GpuPage() : GpuPage(make_layers()) {}
  explicit GpuPage(const std::vector<KvLayout>& layouts) : shapes(page_layers_cuda(layouts)) {}

  std::vector<PageLayerCuda> shapes;
  SharedVector<PageLayerCuda> layers{shapes.begin(), shapes.end()};
  int64_t token_bytes = page_token_bytes(shapes);
  Bytes page = Bytes(static_cast<size_t>(kPageTokens * token_bytes), 0xff);

  PageTokensCuda job(int count, int stored) {
    return {page.data(), layers.data(), static_cast<int>(layers.size()), stored,
            count,       token_bytes,   stored_token_bytes(shapes)};
  }
  void read(Bytes& plain, int count) {
    read_page_tokens(kind(), nullptr, job(count, count), {{plain.data(), plain.size()}});
    finish_kernels();
  }
  Bytes read(int count) {
    Bytes plain(static_cast<size_t>(count * stored_token_bytes(shapes)), 0xee);
    read(plain, count);
    return plain;
  }
  void write(Bytes plain, int count, int stored) {
    write_page_tokens(kind(), nullptr, job(count, stored), {{plain.data(), plain.size()}});
    finish_kernels();
  }
};

// Returns the first `count` tokens of a payload of `stored` tokens, in stored order.
Bytes first_tokens(const PageCodec& codec, const Bytes& cpu_page, int count) {
  Bytes payload(codec.bytes(count));
  codec.read(cpu_page.data(), count, payload.data());
  return payload;
}

void check_tokens(int count, int stored) {
  const std::string name = std::to_string(count) + " of " + std::to_string(stored) + " tokens";
  const std::vector<KvLayout> layouts = make_layers();
  const PageCodec codec(layouts);
  Bytes cpu_page(layouts.back().offset + layouts.back().layer_bytes());
  const Bytes payload = random_bytes(codec.bytes(stored), 10 * count + stored);
  codec.write(cpu_page.data(), stored, payload.data(), stored);

  // CPU -> stored -> GPU -> stored.
  GpuPage gpu;
  EXPECT(static_cast<size_t>(gpu.token_bytes) == codec.bytes(1), name + ": sizes differ");
  emulator::reset_counters();
  gpu.write(payload, count, stored);
  const auto moved = emulator::counters("move_page_tokens");
  EXPECT(real != nullptr || moved.bytes_stored == count * gpu.token_bytes,
         name + ": not every byte once");
  // Beside them a layer's fields but the last by every thread.
  EXPECT(real != nullptr || moved.bytes_loaded == moved.bytes_stored + moved.blocks * 256 * 36,
         name + ": not every byte is read once");
  const Bytes want = first_tokens(codec, cpu_page, count);
  EXPECT(gpu.read(count) == want, name + ": differ after the GPU's page");
  // The rest of the page is unchanged.
  size_t unchanged = 0;
  for (uint8_t b : gpu.page) unchanged += b == 0xff;
  EXPECT(unchanged >= static_cast<size_t>((kPageTokens - count) * gpu.token_bytes),
         name + ": tokens after them were written");
  if (count == kPageTokens) EXPECT(gpu.page == payload, name + ": a full page is not as stored");

  // GPU -> stored -> CPU -> stored.
  Bytes back(cpu_page.size(), 0xff);
  const Bytes from_gpu = gpu.read(count);
  codec.write(back.data(), count, from_gpu.data(), count);
  EXPECT(first_tokens(codec, back, count) == want, name + ": differ after the CPU's page");
}

void check_all_tokens() {
  for (const auto& [count, stored] :
       {std::pair{64, 64}, {1, 1}, {1, 64}, {17, 40}, {63, 63}, {33, 64}})
    check_tokens(count, stored);
}

// A rank's layers: some of the heads, the last one, all, and heads that another rank reads.
std::vector<KvLayout> make_slices() {
  std::vector<KvLayout> layers = make_layers();
  const HeadSlice slices[] = {{1, 4, true}, {2, 3, true}, {0, 0, true}, {1, 5, false}};
  layers.push_back(layers[0]);
  layers[3].offset = layers[2].offset + layers[2].layer_bytes();
  for (int i = 0; i < 4; ++i) layers[i].slice = slices[i];
  return layers;
}

// The heads of a rank go to their places in the payload of all, and nothing else changes there.
void check_slices() {
  const std::vector<KvLayout> layouts = make_slices();
  const PageCodec codec(layouts);
  const std::vector<PageLayerCuda> shapes = page_layers_cuda(layouts);
  EXPECT(static_cast<size_t>(stored_token_bytes(shapes)) == codec.bytes(1), "sizes differ");
  for (const auto& [count, stored] : {std::pair{64, 64}, {1, 1}, {17, 40}, {33, 64}}) {
    const std::string name = std::to_string(count) + " of " + std::to_string(stored) + " tokens";
    Bytes payload = random_bytes(codec.bytes(stored), 7 * count + stored);
    Bytes cpu_page(layouts.back().offset + layouts.back().layer_bytes());
    codec.write(cpu_page.data(), count, payload.data(), stored);
    Bytes want(codec.bytes(count), 0xee), got = want;
    codec.read(cpu_page.data(), count, want.data());
    GpuPage gpu(layouts);
    gpu.write(payload, count, stored);
    emulator::reset_counters();
    gpu.read(got, count);
    const int64_t unread = int64_t{2} * layouts[3].kv_heads * (layouts[3].k_dim + layouts[3].v_dim);
    EXPECT(real != nullptr || emulator::counters("move_page_tokens").bytes_stored ==
                                  count * (gpu.token_bytes - unread),
           name + ": other bytes than the rank's are moved");
    EXPECT(got == want, name + ": differ in the payload of all heads");
    // Heads that another rank reads are in the page too.
    std::vector<KvLayout> all_read = layouts;
    all_read[3].slice.reads = true;
    gpu.shapes = page_layers_cuda(all_read);
    gpu.layers.assign(gpu.shapes.begin(), gpu.shapes.end());
    std::fill(want.begin(), want.end(), 0xee);
    std::fill(got.begin(), got.end(), 0xee);
    PageCodec(all_read).read(cpu_page.data(), count, want.data());
    gpu.read(got, count);
    EXPECT(got == want, name + ": heads that another rank reads differ");
  }
}

// Returns the payload cut into parts of random sizes, in reverse order with gaps in `memory`.
std::vector<PayloadPart> cut(const Bytes& payload, int most_units, Bytes* memory) {
  std::minstd_rand random(test_seed + static_cast<uint32_t>(payload.size()));
  std::vector<PayloadPart> parts;
  memory->assign(3 * payload.size() + 64, 0xaa);
  uint8_t* end = memory->data() + memory->size() / 16 * 16;
  for (size_t at = 0; at < payload.size();) {
    const size_t bytes = std::min(payload.size() - at, 16 * (random() % most_units));
    end -= bytes + 16;
    parts.push_back({end, bytes});
    std::memcpy(end, &payload[at], bytes);
    at += bytes;
  }
  return parts;
}

Bytes joined(const std::vector<PayloadPart>& parts) {
  Bytes all;
  for (const PayloadPart& part : parts) all.insert(all.end(), part.data, part.data + part.bytes);
  return all;
}

// A payload in parts, more than a launch takes and few, is copied as in one; empty parts too.
void check_parts() {
  const int count = 9;
  for (const int most_units : {8, 300, 5000}) {
    const std::string name = "parts of up to " + std::to_string(most_units);
    for (const std::vector<KvLayout>& layouts : {make_layers(), make_slices()}) {
      GpuPage one(layouts), several(layouts);
      const Bytes payload =
          random_bytes(static_cast<size_t>(count * stored_token_bytes(one.shapes)), most_units);
      Bytes memory, back;
      const std::vector<PayloadPart> parts = cut(payload, most_units, &memory);
      EXPECT((parts.size() > MoveTokensCuda::kMost) == (most_units == 8), name + ": other parts");
      one.write(payload, count, count);
      emulator::reset_counters();
      write_page_tokens(kind(), nullptr, several.job(count, count), parts);
      finish_kernels();
      EXPECT(real != nullptr ||
                 emulator::counters("move_page_tokens").bytes_stored == count * one.token_bytes,
             name + ": not every byte once");
      EXPECT(several.page == one.page, name + ": another page");
      Bytes want(payload.size(), 0xee);
      one.read(want, count);
      const std::vector<PayloadPart> out = cut(Bytes(payload.size(), 0xee), most_units, &back);
      const Bytes before = back;
      read_page_tokens(kind(), nullptr, several.job(count, count), out);
      finish_kernels();
      EXPECT(joined(out) == want, name + ": differ");
      for (const PayloadPart& part : out) std::fill_n(part.data, part.bytes, 0xee);
      EXPECT(back == before, name + ": memory between the parts changed");
    }
  }
}

void check_copies() {
  constexpr int kPages = 700;
  constexpr int64_t kBytes = 48;
  Bytes memory = random_bytes(kPages * kBytes, 1), want = memory;
  std::vector<int32_t> from, to;
  for (int i = 0; i < 300; ++i) from.push_back(2 * i), to.push_back(2 * i + 1);
  for (int i = 0; i < 300; ++i) std::memcpy(&want[to[i] * kBytes], &want[from[i] * kBytes], kBytes);
  emulator::reset_counters();
  copy_pages(kind(), nullptr, memory.data(), kBytes, from.data(), to.data(), 300);
  finish_kernels();
  EXPECT(memory == want, "copied pages differ");
  const auto copied = emulator::counters("copy_whole_pages");
  EXPECT(real != nullptr ||
             (copied.bytes_loaded == 300 * kBytes && copied.bytes_stored == 300 * kBytes),
         "copied pages are not moved once");
  copy_pages(kind(), nullptr, memory.data(), kBytes, nullptr, nullptr, 0);
  Bytes large = random_bytes(3 * 100000, 2);
  const int32_t a = 2, b = 0;
  copy_pages(kind(), nullptr, large.data(), 100000, &a, &b, 1);
  finish_kernels();
  EXPECT(std::memcmp(&large[0], &large[200000], 100000) == 0, "a large page differs");
}

void check_refusals() {
  const auto refuses = [](auto f) {
    try {
      f();
    } catch (const Error& e) {
      return e.code() == ErrorCode::internal;
    }
    return false;
  };
  GpuPage gpu;
  const Bytes plain(static_cast<size_t>(65 * gpu.token_bytes));
  EXPECT(refuses([&] { gpu.write(plain, 3, 2); }), "3 of 2 tokens are taken");
  EXPECT(refuses([&] { gpu.write(plain, 0, 2); }), "no tokens are taken");
  EXPECT(refuses([&] { gpu.write(plain, 64, 65); }), "65 tokens are taken");
  const Bytes two(static_cast<size_t>(2 * gpu.token_bytes + 16));
  EXPECT(refuses([&] { gpu.write(two, 2, 2); }), "a payload of 16 more bytes is taken");
  const auto in_parts = [&](size_t first, size_t gap) {
    uint8_t* const data = const_cast<uint8_t*>(two.data());
    write_page_tokens(kind(), nullptr, gpu.job(2, 2),
                      {{data, first}, {data + first + gap, two.size() - 16 - first}});
  };
  EXPECT(refuses([&] { in_parts(8, 8); }), "a part at byte 8 of a payload is taken");
  EXPECT(refuses([&] { in_parts(16, 8); }), "a part at byte 24 of memory is taken");
  KvLayout odd;
  odd.kv_heads = 1, odd.k_dim = 60, odd.v_dim = 64;
  EXPECT(refuses([&] { page_layers_cuda({odd}); }), "a width of 60 is taken");
  odd.k_dim = 64, odd.slice = {3, 3, true};
  EXPECT(refuses([&] { page_layers_cuda({odd}); }), "head 3 of 3 is taken");
  EXPECT(refuses([&] {
           const int32_t page = 0;
           copy_pages(kind(), nullptr, gpu.page.data(), 24, &page, &page, 1);
         }),
         "pages of 24 bytes are taken");
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv),
                   {
                       TM_CASE(check_all_tokens),
                       TM_CASE(check_slices),
                       TM_CASE(check_parts),
                       TM_CASE(check_copies),
                       TM_CASE(check_refusals),
                   },
                   &failures);
}
