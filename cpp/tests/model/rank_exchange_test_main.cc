// The exchange of ranks by itself: threads without decoders. Runs under ThreadSanitizer too.
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"
#include "model/decoder/rank_group.h"
#include "model/parallel/rank_exchange.h"
#include "ops/rows.h"
#include "tests/check.h"

namespace turbomind {
namespace {

constexpr int kWidth = 8;

// The partial sum of a rank in an exchange.
float value_of(int rank, int number, int column) {
  return static_cast<float>((rank + 1) * 1000 + number * 10 + column);
}

// A rank as the decoder makes it: two buffers take turns.
class Worker {
 public:
  Worker(RankExchange& exchange, int rank) : exchange_(exchange), rank_(rank) {}

  void exchange(int number, bool cancel, const ThreadPool& pool) {
    float* own = buffers_[number % 2];
    for (int c = 0; c < kWidth; ++c) own[c] = value_of(rank_, number, c);
    const auto& parts = exchange_.add(rank_, {own, DType::f32, 1, kWidth, kWidth}, cancel, pool);
    CHECK(static_cast<int>(parts.size()) == exchange_.ranks());
    for (int r = 0; r < exchange_.ranks(); ++r)
      for (int c = 0; c < kWidth; ++c)
        CHECK(parts[r].f32(0)[c] == value_of(r, number, c), "exchange %d of rank %d", number, r);
  }

 private:
  RankExchange& exchange_;
  const int rank_;
  float buffers_[2][kWidth] = {};
};

// Runs step(rank, its worker) on a thread per rank and returns how many were released. Workers
// outlive the step of all.
template <typename F>
int run_ranks(RankExchange& exchange, F&& step) {
  const int ranks = exchange.ranks();
  std::vector<Worker> workers;
  for (int r = 0; r < ranks; ++r) workers.emplace_back(exchange, r);
  std::vector<std::thread> threads;
  std::vector<int> released(ranks);
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        step(r, workers[r]);
      } catch (const RankReleased&) {
        released[r] = 1;
      }
    });
  for (std::thread& thread : threads) thread.join();
  int count = 0;
  for (const int each : released) count += each;
  return count;
}

void test_every_rank_gets_all_partial_sums_in_order() {
  for (const int ranks : {1, 2, 3, 4}) {
    RankExchange exchange(ranks);
    for (int step = 0; step < 3; ++step) {
      exchange.begin_step();
      const int released = run_ranks(exchange, [&](int, Worker& worker) {
        const ThreadPool pool(1);
        for (int i = 0; i < 300; ++i) worker.exchange(i, false, pool);
      });
      CHECK(released == 0);
    }
  }
}

// The decision of rank 0 is that of all, in the same exchange.
void test_rank_0_cancels_for_all() {
  constexpr int kRanks = 4;
  RankExchange exchange(kRanks);
  for (int at = 0; at < 40; ++at) {
    exchange.begin_step();
    std::vector<int> stopped(kRanks, -1);
    run_ranks(exchange, [&](int rank, Worker& worker) {
      const ThreadPool pool(1);
      CHECK(!exchange.cancelled(rank));
      for (int i = 0; stopped[rank] < 0; ++i) {
        // What others see does not count.
        worker.exchange(i, rank == 0 ? i == at : i > at / 2, pool);
        if (exchange.cancelled(rank)) stopped[rank] = i;
      }
    });
    for (const int each : stopped) CHECK(each == at, "stopped after %d", each);
  }
}

void test_a_rank_that_fails_releases_the_others() {
  constexpr int kRanks = 4;
  RankExchange exchange(kRanks);
  for (int failing = 0; failing < kRanks; ++failing)
    for (const int at : {0, 1, 7}) {
      exchange.begin_step();
      const int released = run_ranks(exchange, [&](int rank, Worker& worker) {
        const ThreadPool pool(1);
        for (int i = 0; i < 9; ++i) {
          if (rank == failing && i == at) return exchange.fail();
          worker.exchange(i, false, pool);
        }
      });
      CHECK(released == kRanks - 1, "%d were released", released);
      // The next step has no trace of it.
      exchange.begin_step();
      CHECK(run_ranks(exchange, [&](int rank, Worker& worker) {
              const ThreadPool pool(1);
              for (int i = 0; i < 5; ++i) worker.exchange(i, false, pool);
              CHECK(!exchange.cancelled(rank));
            }) == 0);
    }
}

void test_sums() {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-3, 3);
  constexpr int64_t kRows = 9, kCols = 1037, kStride = 1100;
  std::vector<std::vector<float>> values(4, std::vector<float>(kRows * kStride));
  for (auto& each : values)
    for (float& v : each) v = uniform(random);
  ThreadPool pool(3);
  Profiler profiler;
  Context ctx{pool, Isa::portable, profiler};
  std::vector<Mat> parts;
  for (int p = 0; p < 3; ++p)
    parts.push_back({values[p].data(), DType::f32, kRows, kCols, kStride});
  for (const bool add : {false, true}) {
    std::vector<float> y = values[3];
    sum_rows(ctx, parts, 0.5f, add, {y.data(), DType::f32, kRows, kCols, kStride});
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t c = 0; c < kStride; ++c) {
        const int64_t i = r * kStride + c;
        const float sum = 0.5f * ((values[0][i] + values[1][i]) + values[2][i]);
        const float want = c >= kCols ? values[3][i] : add ? values[3][i] + sum : sum;
        CHECK(y[i] == want, "row %d, column %d", int(r), int(c));
      }
  }
}

// A rank without layers, which exchanges as often as a step has tokens and may fail.
class TestRank final : public Model {
 public:
  TestRank(RankExchange& exchange, int rank)
      : exchange_(exchange), rank_(rank), worker_(exchange, rank) {}
  int vocab() const override { return 1; }
  int max_context() const override { return 1; }
  const std::string& fingerprint() const override { return name_; }
  const std::vector<CacheGroup>& groups() const override { return groups_; }
  const ModelMemory& memory() const override { return memory_; }
  const std::string& numerics_fingerprint() const override { return name_; }
  Context& context() override { return ctx_; }
  PageIo& pages() override { return pages_; }
  bool forward(const StepBatch& batch, float*, const StepCancel* cancel) override {
    for (size_t i = 0; i < batch.token_ids.size(); ++i) {
      const int wish = batch.token_ids[i];
      if (wish == rank_) throw_error(ErrorCode::model, "rank ", rank_);
      if (wish == -2) throw std::bad_alloc();  // of all
      worker_.exchange(static_cast<int>(i), cancel && cancel->requested(), pool_);
      if (exchange_.cancelled(rank_)) return false;
    }
    return true;
  }

 private:
  struct Pages final : PageIo {
    void allocate_pages(const std::vector<int64_t>&) override {}
    void copy_page(int, int32_t, int32_t) override {}
    size_t stored_page_bytes(int, int) const override { return 0; }
    void read_page(int, int32_t, int, uint8_t*) const override {}
    void write_page(int, int32_t, int, const uint8_t*, int) override {}
  };

  RankExchange& exchange_;
  const int rank_;
  Worker worker_;
  const std::string name_ = "test";
  const std::vector<CacheGroup> groups_ = {{CacheKind::full, 0, {0}, 100}};
  const ModelMemory memory_ = {7, {{10, {100}}}};
  Pages pages_;
  ThreadPool pool_{1};
  Profiler profiler_;
  Context ctx_{pool_, Isa::portable, profiler_};
};

std::unique_ptr<Model> group_of(int ranks) {
  auto exchange = std::make_unique<RankExchange>(ranks);
  std::vector<std::unique_ptr<Model>> members;
  for (int r = 0; r < ranks; ++r) members.push_back(std::make_unique<TestRank>(*exchange, r));
  return join_ranks(std::move(members), std::move(exchange));
}

std::string error_of(Model& model, const StepBatch& batch) {
  try {
    model.forward(batch, nullptr, nullptr);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

void test_a_step_of_a_group_fails_as_one() {
  constexpr int kRanks = 3;
  const auto group = group_of(kRanks);
  CHECK(group->numerics_fingerprint() == "test/tp3");
  CHECK(group->groups()[0].page_bytes == 300);
  CHECK(group->memory().weights() == 37 && group->memory().shared_weights == 7);
  CHECK(group->memory().ranks.size() == kRanks && group->memory().ranks[2].page_bytes[0] == 100);
  StepBatch good;
  good.token_ids.assign(20, -1);
  for (int round = 0; round < 20; ++round)
    for (int rank = 0; rank < kRanks; ++rank)
      for (const int at : {0, 1, 19}) {
        StepBatch bad = good;
        bad.token_ids[at] = rank;
        const std::string error = error_of(*group, bad);
        CHECK(error == "rank " + std::to_string(rank), "%s", error.c_str());
        CHECK(group->forward(good, nullptr, nullptr));
      }
  StepBatch all = good;
  all.token_ids[5] = -2;
  CHECK(!error_of(*group, all).empty());
  CHECK(group->forward(good, nullptr, nullptr));
  CHECK(group->forward({}, nullptr, nullptr), "a step without tokens");
}

void test_a_step_of_a_group_is_cancelled_as_one() {
  const auto group = group_of(4);
  StepBatch batch;
  batch.token_ids.assign(200, -1);
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> flag{round % 10 == 0};
    StepCancel cancel{{&flag}};
    std::thread other([&] { flag.store(true); });  // at any moment
    group->forward(batch, nullptr, &cancel);
    other.join();
    CHECK(!group->forward(batch, nullptr, &cancel));
    CHECK(group->forward(batch, nullptr, nullptr));
  }
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(
      argc, argv,
      {TM_CASE(test_every_rank_gets_all_partial_sums_in_order),
       TM_CASE(test_rank_0_cancels_for_all), TM_CASE(test_a_rank_that_fails_releases_the_others),
       TM_CASE(test_sums), TM_CASE(test_a_step_of_a_group_fails_as_one),
       TM_CASE(test_a_step_of_a_group_is_cancelled_as_one)});
}
