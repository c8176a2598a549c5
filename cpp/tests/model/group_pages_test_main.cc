// Pages of a model that is cut over emulated GPUs: their payloads equal those of the whole model's
// PageCodec.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/emulator.h"
#include "tests/check.h"
#include "tests/model/rank_pages.h"

namespace turbomind {
namespace {

void test_payloads_of_a_group() {
  for_all_cuts([](const ModelConfig& whole, Ranks& ranks, int group, const std::string& name) {
    const std::vector<KvLayout> layouts = layouts_on_cpu(whole, group);
    CHECK(ranks.all().stored_page_bytes(group, 3) == PageCodec(layouts).bytes(3), "%s",
          name.c_str());
    Batch batch(ranks.all(), group, 1);
    ranks.all().write_pages(batch.writes);
    ranks.all().read_pages(batch.reads);
    const std::string fault = batch.fault(layouts);
    CHECK(fault.empty(), "%s, %s", name.c_str(), fault.c_str());
    for (size_t i = 0; i < kCases.size(); ++i) {  // alone, in memory of any kind
      const auto& [count, stored, pieces] = kCases[i];
      const Bytes payload = random_bytes(batch.bytes[i].size(), 900 + static_cast<uint32_t>(i));
      ranks.all().write_page(group, 7, count, payload.data(), stored);
      Bytes read(ranks.all().stored_page_bytes(group, count), kUntouched);
      ranks.all().read_page(group, 7, count, read.data());
      CHECK(read == through_codec(layouts, payload, count, stored), "%s, alone", name.c_str());
    }
  });
}

// A rank alone writes its heads of the payload and no other byte; and none where an earlier rank
// has the same.
void test_payloads_of_a_rank() {
  for_all_cuts([](const ModelConfig&, Ranks& ranks, int group, const std::string& name) {
    for (int r = 0; r < ranks.count(); ++r) {
      const std::vector<KvLayout> layouts = layouts_on_cpu(ranks.config(r), group);
      DecoderPages& pages = ranks.rank(r);
      Batch batch(pages, group, 2);
      pages.write_pages(batch.writes);
      pages.read_pages(batch.reads);
      const std::string fault = batch.fault(layouts);
      CHECK(fault.empty(), "%s, rank %d, %s", name.c_str(), r, fault.c_str());
      for (size_t i = 0; i < kCases.size(); ++i) {
        const auto& [count, stored, pieces] = kCases[i];
        const Bytes& payload = batch.bytes[i];
        pages.write_page(group, 7, count, payload.data(), stored);
        Bytes read(pages.stored_page_bytes(group, count), kUntouched);
        pages.read_page(group, 7, count, read.data());
        CHECK(read == through_codec(layouts, payload, count, stored), "%s, rank %d, alone",
              name.c_str(), r);
      }
    }
  });
}

// Returns the heads [first, first + heads) of a full page in the order of a GPU's page.
Bytes heads_of(const ModelConfig& whole, int group, const Bytes& payload, int first, int heads) {
  Bytes out;
  const uint8_t* at = payload.data();
  for (const KvLayout& layout : layouts_on_cpu(whole, group))
    for (const int dim : {layout.k_dim, layout.v_dim}) {
      const size_t head = size_t{2} * kPageTokens * dim;
      out.insert(out.end(), at + first * head, at + (first + heads) * head);
      at += layout.kv_heads * head;
    }
  return out;
}

// The page in a rank's memory has the right heads, also those that another rank reads.
void test_heads_of_a_rank() {
  for_all_cuts([](const ModelConfig& whole, Ranks& ranks, int group, const std::string& name) {
    Batch batch(ranks.all(), group, 3);
    ranks.all().write_pages(batch.writes);
    const int all = whole.layers[0].kv_heads, count = ranks.count();
    for (int r = 0; r < count; ++r) {
      const int heads = std::max(all / count, 1), first = r * all / count;
      const GpuContext& gpu = ranks.gpu(r);
      const PageView view = ranks.rank(r).view(group);
      const PinnedBuffer page(gpu.gpu(), view.page_bytes);
      for (const int i : {0, 1}) {  // the full pages
        gpu.gpu().copy(gpu.handle(), page.data(), view.base + i * view.page_bytes, view.page_bytes);
        gpu.gpu().synchronize(gpu.handle());
        CHECK(Bytes(page.data(), page.data() + view.page_bytes) ==
                  heads_of(whole, group, batch.bytes[i], first, heads),
              "%s, rank %d, case %d", name.c_str(), r, i);
      }
    }
  });
}

// Full pages with all heads are copied as they lie; of the others each byte moves once.
void test_kernels() {
  const ModelConfig whole = make_config(4);
  for (const int count : {1, 2}) {
    Ranks ranks(whole, count);
    const PageIo& pages = ranks.all();
    const Payload payload(pages, random_bytes(pages.stored_page_bytes(0, kPageTokens), 4), 1);
    emulator::reset_counters();
    ranks.all().write_pages({{0, 0, kPageTokens, kPageTokens, payload.parts}});
    const auto moved = emulator::counters("move_page_tokens");
    CHECK(moved.bytes_stored == (count == 1 ? 0 : static_cast<int64_t>(payload.parts[0].bytes)));
    CHECK((moved.blocks == 0) == (count == 1));
  }
}

// Threads copy pages of their own at a time, as those of the tiers do.
void test_threads() {
  const ModelConfig whole = make_config(2);
  Ranks ranks(whole, 4);
  const std::vector<KvLayout> layouts = layouts_on_cpu(whole, 0);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int round = 0; round < 6; ++round) {
        const int count = round % 2 == 0 ? kPageTokens : 20 + t, pieces = 1 + round % 3;
        const size_t size = ranks.all().stored_page_bytes(0, count);
        const Bytes bytes = random_bytes(size, static_cast<uint32_t>(100 * t + round));
        const Payload in(ranks.all(), bytes, pieces);
        const Payload out(ranks.all(), Bytes(size, kUntouched), pieces);
        ranks.all().write_pages({{0, t, count, count, in.parts}});
        ranks.all().read_pages({{0, t, count, count, out.parts}});
        wrong += out.bytes() != through_codec(layouts, bytes, count, count);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0, "%d copies differ", wrong.load());
}

// A page that 2 ranks have computed continues on 4, and on a CPU.
void test_other_numbers_of_ranks() {
  const ModelConfig whole = make_config(2);
  Ranks two(whole, 2), four(whole, 4);
  for (const int count : {kPageTokens, 21}) {
    const size_t size = two.all().stored_page_bytes(0, count);
    const Bytes bytes = random_bytes(size, 5);
    two.all().write_page(0, 1, count, bytes.data(), count);
    two.all().copy_page(0, 1, 3);
    for (int r = 0; r < 2; ++r) two.gpu(r).stream().synchronize();
    const Payload moved(two.all(), Bytes(size, kUntouched), 1);
    two.all().read_pages({{0, 3, count, count, moved.parts}});
    four.all().write_pages({{0, 5, count, count, moved.parts}});
    Bytes read(size, kUntouched);
    four.all().read_page(0, 5, count, read.data());
    CHECK(read == bytes, "%d tokens on four ranks", count);
    CHECK(through_codec(layouts_on_cpu(whole, 0), read, count, count) == bytes,
          "%d tokens on the CPU", count);
  }
}

// A rank that notes its calls.
struct NotedRank final : PageIo {
  struct Copies final : PageCopies {
    explicit Copies(NotedRank& rank) : rank(rank) {}
    ~Copies() override { rank.note("ends"); }
    void wait() override { rank.note("waits"); }
    NotedRank& rank;
  };
  NotedRank(std::string name, std::string& notes, bool fails, int batch)
      : name(std::move(name)), notes(notes), fails(fails), batch(batch) {}
  void note(const char* what) const { notes += name + " " + what + ", "; }

  void allocate_pages(const std::vector<int64_t>&) override {}
  void copy_page(int, int32_t, int32_t) override {}
  size_t stored_page_bytes(int, int count) const override { return 2 * count; }
  // Half of the payload is the rank's.
  void read_page(int, int32_t, int count, uint8_t* out) const override {
    std::memset(out + (name == "b") * count, name[0], count);
  }
  void write_page(int, int32_t, int count, const uint8_t* in, int) override {
    notes.append(in + (name == "b") * count, in + (name == "b") * count + count);
  }
  int page_batch() const override { return batch; }
  std::unique_ptr<PageCopies> submit_writes(const std::vector<PageTransfer>&) override {
    if (fails) throw_error(ErrorCode::internal, name, " fails");
    note("submits");
    return std::make_unique<Copies>(*this);
  }

  const std::string name;
  std::string& notes;
  const bool fails;
  const int batch;
};

// All ranks copy at a time, and an error of one leaves no copy under way.
void test_ranks_copy_at_a_time() {
  for (const bool fails : {false, true}) {
    std::string notes, error;
    NotedRank a("a", notes, false, 8), b("b", notes, fails, 8);
    GroupPages group({&a, &b});
    try {
      group.write_pages({});
    } catch (const Error& e) {
      error = e.what();
    }
    CHECK(error == (fails ? "b fails" : ""), "%s", error.c_str());
    const std::string want =
        fails ? "a submits, a ends, " : "a submits, b submits, a waits, b waits, a ends, b ends, ";
    CHECK(notes == want, "%s", notes.c_str());
  }
}

// Ranks that take payloads in one piece, as those on a CPU, with a payload in two.
void test_payloads_in_one_piece() {
  std::string notes, first = "...", second = ".";
  NotedRank a("a", notes, false, 1), b("b", notes, false, 1);
  GroupPages group({&a, &b});
  const auto part = [](std::string& text) {
    return PayloadPart{reinterpret_cast<uint8_t*>(text.data()), text.size()};
  };
  group.read_pages({{0, 0, 2, 2, {part(first), part(second)}}});
  CHECK(first + second == "aabb", "%s", (first + second).c_str());
  first = "123", second = "4";
  group.write_pages({{0, 0, 2, 2, {part(first), part(second)}}});
  CHECK(notes == "1234", "%s", notes.c_str());
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {
                       TM_CASE(test_payloads_of_a_group),
                       TM_CASE(test_payloads_of_a_rank),
                       TM_CASE(test_heads_of_a_rank),
                       TM_CASE(test_kernels),
                       TM_CASE(test_threads),
                       TM_CASE(test_other_numbers_of_ranks),
                       TM_CASE(test_ranks_copy_at_a_time),
                       TM_CASE(test_payloads_in_one_piece),
                   });
}
