// Conversion of pages between memory order and stored order: element by element against the
// formulas of cache/kv_layout.h, and with a decoder that continues from stored pages.
// `page_codec_test --speed` prints the payload converted per second instead.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cache/page_codec.h"
#include "core/memory.h"
#include "tests/check.h"
#include "tests/engine/fuzz_mix.h"

namespace turbomind {
namespace {

using Bytes = std::vector<uint8_t>;
constexpr size_t kGuard = 64;

Bytes random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (auto& b : bytes) b = static_cast<uint8_t>(random());
  return bytes;
}

// Layers of one group; page bytes in `size`.
std::vector<KvLayout> make_layers(DType dtype, const std::vector<std::array<int, 3>>& shapes,
                                  size_t* size) {
  std::vector<KvLayout> layers;
  *size = 0;
  for (const auto& [heads, k_dim, v_dim] : shapes) {
    KvLayout layout;
    layout.dtype = dtype;
    layout.kv_heads = heads;
    layout.k_dim = k_dim;
    layout.v_dim = v_dim;
    layout.offset = *size;
    *size += layout.layer_bytes();
    layers.push_back(layout);
  }
  return layers;
}

// Returns the offset of an element in the page, in bytes.
size_t place(const KvLayout& l, bool v, int head, int token, int dim) {
  const int pair = l.pair(), row = v ? dim : token, col = v ? token : dim;
  const int width = v ? l.page_tokens : l.k_width();
  const size_t element =
      ((size_t(row / 16) * (width / pair) + col / pair) * 16 + row % 16) * pair + col % pair;
  return (v ? l.v_offset(head) : l.k_offset(head)) + element * dtype_bytes(l.dtype);
}

// Calls visit(place in the page, place in the payload, element bytes, token) for every element.
template <typename F>
size_t each_element(const std::vector<KvLayout>& layers, int count, F&& visit) {
  size_t at = 0;
  for (const KvLayout& l : layers)
    for (bool v : {false, true})
      for (int head = 0; head < l.kv_heads; ++head)
        for (int token = 0; token < count; ++token)
          for (int dim = 0; dim < (v ? l.v_dim : l.k_dim); ++dim) {
            visit(place(l, v, head, token, dim), at, dtype_bytes(l.dtype), token);
            at += dtype_bytes(l.dtype);
          }
  return at;
}

void check_shape(DType dtype, const std::vector<std::array<int, 3>>& shapes, int count,
                 int stored) {
  size_t size;
  const auto layers = make_layers(dtype, shapes, &size);
  const PageCodec codec(layers);
  const uint64_t seed = size * 100 + count * 64 + stored;

  const Bytes page = random_bytes(size, seed);
  Bytes want(codec.bytes(count));
  const size_t total = each_element(layers, count, [&](size_t in, size_t out, size_t n, int) {
    std::memcpy(want.data() + out, page.data() + in, n);
  });
  CHECK(total == codec.bytes(count));
  Bytes got(total + kGuard, 0xA5);
  codec.read(page.data(), count, got.data());
  CHECK(std::memcmp(got.data(), want.data(), total) == 0);
  for (size_t i = total; i < got.size(); ++i) CHECK(got[i] == 0xA5);

  const Bytes payload = random_bytes(codec.bytes(stored), seed + 1);
  Bytes expected(size, 0);
  each_element(layers, stored, [&](size_t out, size_t in, size_t n, int token) {
    if (token < count) std::memcpy(expected.data() + out, payload.data() + in, n);
  });
  Bytes written(size + kGuard, 0xA5);
  codec.write(written.data(), count, payload.data(), stored);
  CHECK(std::memcmp(written.data(), expected.data(), size) == 0);
  for (size_t i = size; i < written.size(); ++i) CHECK(written[i] == 0xA5);
}

void test_shapes() {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (int dim : {40, 64, 80, 96, 128, 256, 7, 33, 50})
      for (int count : {1, 17, 63, 64}) check_shape(dtype, {{2, dim, dim}}, count, count);
    for (int count : {1, 16, 31, 64})
      check_shape(dtype, {{1, 64, 128}, {3, 40, 24}, {2, 192, 128}}, count, 64);
    check_shape(dtype, {{2, 80, 33}}, 5, 18);
  }
}

// The layouts of a rank that has `heads` of each layer from `first` on.
std::vector<KvLayout> of_rank(std::vector<KvLayout> layers, int first, int heads, bool reads,
                              size_t* size) {
  *size = 0;
  for (KvLayout& layout : layers) {
    layout.slice = {first, layout.kv_heads, reads};
    layout.kv_heads = heads;
    layout.offset = *size;
    *size += layout.layer_bytes();
  }
  return layers;
}

// Ranks write their heads of one payload and read them back into one, also where two ranks have the
// same head.
void check_ranks(DType dtype, int heads, int ranks, int count, int stored) {
  size_t whole_size;
  const auto layers = make_layers(dtype, {{heads, 40, 24}, {heads, 64, 64}}, &whole_size);
  const PageCodec whole(layers);
  const Bytes payload = random_bytes(whole.bytes(stored), heads * 100 + ranks);
  Bytes page(whole_size), want(whole.bytes(count)), got(want.size(), 0xA5);
  whole.write(page.data(), count, payload.data(), stored);
  whole.read(page.data(), count, want.data());
  for (int r = 0; r < ranks; ++r) {
    const int first = r * heads / ranks, own = std::max(1, heads / ranks);
    const bool reads = r == 0 || first != (r - 1) * heads / ranks;
    size_t size;
    const auto part = of_rank(layers, first, own, reads, &size);
    const PageCodec codec(part);
    CHECK(codec.bytes(count) == whole.bytes(count));
    Bytes written(size, 0xA5);
    codec.write(written.data(), count, payload.data(), stored);
    for (size_t i = 0; i < layers.size(); ++i)
      for (int h = 0; h < own; ++h) {
        CHECK(std::memcmp(&written[part[i].k_offset(h)], &page[layers[i].k_offset(first + h)],
                          part[i].k_head_bytes()) == 0);
        CHECK(std::memcmp(&written[part[i].v_offset(h)], &page[layers[i].v_offset(first + h)],
                          part[i].v_head_bytes()) == 0);
      }
    const Bytes before = got;
    codec.read(written.data(), count, got.data());
    CHECK(reads || got == before);
  }
  CHECK(got == want);
}

void test_heads_of_ranks() {
  for (DType dtype : {DType::f32, DType::bf16}) {
    check_ranks(dtype, 4, 2, 64, 64);
    check_ranks(dtype, 4, 4, 17, 64);
    check_ranks(dtype, 2, 4, 63, 63);
    check_ranks(dtype, 1, 2, 1, 30);
  }
}

void test_errors() {
  size_t size;
  const PageCodec codec(make_layers(DType::bf16, {{1, 64, 64}}, &size));
  Bytes page(size), payload(codec.bytes(64));
  const auto refuses = [](auto&& f) {
    try {
      f();
      return false;
    } catch (const Error& e) {
      return e.code() == ErrorCode::internal;
    }
  };
  CHECK(refuses([&] { codec.read(page.data(), 0, payload.data()); }));
  CHECK(refuses([&] { codec.read(page.data(), 65, payload.data()); }));
  CHECK(refuses([&] { codec.write(page.data(), 3, payload.data(), 2); }));
  CHECK(refuses([&] { codec.write(page.data(), 64, payload.data(), 65); }));
}

// A decoder with two cache groups, one of them windowed, and its page tables.
struct Subject {
  std::unique_ptr<Model> model;
  std::vector<std::vector<int32_t>> tables;

  Subject(DType kv, Isa isa, int32_t first_page) {
    DecoderBuilder builder(fuzz::tiny_config(kv), isa, 1);
    builder.fill_dummy(7);
    model = builder.finish(false);
    model->pages().allocate_pages(std::vector<int64_t>(model->groups().size(), 8));
    tables.assign(model->groups().size(), {first_page, first_page + 1});
  }

  std::vector<float> run(const std::vector<int32_t>& tokens, int begin, int end) {
    StepBatch batch;
    for (int i = begin; i < end; ++i) {
      batch.token_ids.push_back(tokens[i]);
      batch.positions.push_back(i);
      batch.sample_rows.push_back(i - begin);
    }
    StepRow row;
    row.q_len = end - begin;
    row.kv_begin = begin;
    for (const auto& table : tables) row.pages.push_back(table.data());
    batch.rows.push_back(row);
    std::vector<float> logits(static_cast<size_t>(end - begin) * model->vocab());
    CHECK(model->forward(batch, logits.data(), nullptr));
    return logits;
  }

  Bytes stored(size_t group, int page, int count) const {
    const int g = static_cast<int>(group);
    Bytes payload(model->pages().stored_page_bytes(g, count));
    model->pages().read_page(g, tables[group][page], count, payload.data());
    return payload;
  }
};

// Fills every page with NaN, as a previous owner might have left it.
void spoil(Subject& s) {
  for (size_t g = 0; g < s.tables.size(); ++g) {
    const int group = static_cast<int>(g);
    const Bytes garbage(s.model->pages().stored_page_bytes(group, kPageTokens), 0xFF);
    for (int32_t page = 0; page < 8; ++page)
      s.model->pages().write_page(group, page, kPageTokens, garbage.data());
  }
}

// A decoder continues with `used` of 90 tokens from stored pages, the last of which has more
// tokens.
void check_decoder(DType kv, Isa isa, int used) {
  constexpr int kStored = 90, kAll = 100;
  std::vector<int32_t> tokens;
  Subject first(kv, isa, 0), second(kv, isa, 3);
  for (int i = 0; i < kAll; ++i) tokens.push_back((i * 37 + 11) % first.model->vocab());
  CHECK(first.model->numerics_fingerprint().rfind(std::string("cpu/") + isa_name(isa) + "/", 0) ==
        0);
  CHECK(first.model->numerics_fingerprint() == second.model->numerics_fingerprint());
  first.run(tokens, 0, kStored);
  spoil(second);
  for (size_t g = 0; g < first.tables.size(); ++g)
    for (int page = 0; page * kPageTokens < used; ++page) {
      const int stored = std::min(kPageTokens, kStored - page * kPageTokens);
      const int count = std::min(stored, used - page * kPageTokens);
      const Bytes payload = first.stored(g, page, stored);
      second.model->pages().write_page(static_cast<int>(g), second.tables[g][page], count,
                                       payload.data(), stored);
      if (count == stored) CHECK(second.stored(g, page, count) == payload);
    }
  const std::vector<float> want = first.run(tokens, used, kAll);
  const std::vector<float> got = second.run(tokens, used, kAll);
  CHECK(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0);
}

// A decoder of one instruction set continues from pages of another one, with nearly equal logits.
void check_across(DType kv) {
  std::vector<int32_t> tokens;
  Subject first(kv, best_isa(), 0), second(kv, Isa::portable, 0);
  for (int i = 0; i < 80; ++i) tokens.push_back((i * 53 + 5) % first.model->vocab());
  first.run(tokens, 0, 70);
  const std::vector<float> want = first.run(tokens, 70, 80);
  for (size_t g = 0; g < first.tables.size(); ++g)
    for (int page = 0; page < 2; ++page)
      second.model->pages().write_page(static_cast<int>(g), page, page ? 6 : 64,
                                       first.stored(g, page, page ? 6 : 64).data());
  const std::vector<float> got = second.run(tokens, 70, 80);
  double difference = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  CHECK(difference < 1e-3 * size);
}

void test_decoder() {
  for (DType kv : {DType::bf16, DType::f32, DType::f16}) {
    for (int used : {64, 75, 90, 17}) check_decoder(kv, best_isa(), used);
    check_decoder(kv, Isa::portable, 81);
    check_across(kv);
  }
}

// The page of a model with 24 layers of 2 kv heads, 64 wide, in bfloat16.
void print_speed() {
  size_t size;
  const PageCodec codec(
      make_layers(DType::bf16, std::vector<std::array<int, 3>>(24, {2, 64, 64}), &size));
  constexpr int kPages = 64;  // more than the CPU caches hold
  HugeBuffer pages(kPages * size), payload(kPages * size);
  const auto measure = [&](const char* name, auto&& convert) {
    double best = 1e30;
    for (int round = 0; round < 5; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kPages; ++i) convert(pages.data() + i * size, payload.data() + i * size);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      best = std::min(best, took.count());
    }
    std::printf("%s: %.1f GB/s\n", name, kPages * double(codec.bytes(64)) / best / 1e9);
  };
  measure("write", [&](uint8_t* page, uint8_t* in) { codec.write(page, 64, in, 64); });
  measure("read", [&](uint8_t* page, uint8_t* out) { codec.read(page, 64, out); });
  measure("copy", [&](uint8_t* page, uint8_t* out) { std::memcpy(out, page, size); });
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--speed") {
    turbomind::print_speed();
    return 0;
  }
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(turbomind::test_shapes),
                                  TM_CASE(turbomind::test_heads_of_ranks),
                                  TM_CASE(turbomind::test_errors),
                                  TM_CASE(turbomind::test_decoder),
                              });
}
