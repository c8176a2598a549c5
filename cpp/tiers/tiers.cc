#include "tiers/tiers.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

using Clock = PageFetcher::Clock;

constexpr int64_t kPrepared = int64_t{256} << 20;     // bytes of memory, at most
constexpr int64_t kPreparedPiece = int64_t{8} << 20;  // bytes between two checks for the end

}  // namespace

bool Flush::wait(double seconds) {
  constexpr double kForever = 3.2e8;  // seconds; a longer wait would overflow the clock
  std::unique_lock lock(mutex_);
  const auto over = [this] { return over_; };
  if (seconds < 0 || seconds > kForever) {
    changed_.wait(lock, over);
  } else {
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), over);
  }
  return done_;
}

bool Flush::over() {
  std::lock_guard lock(mutex_);
  return over_;
}

std::vector<BlockHash> Flush::unsaved() {
  std::lock_guard lock(mutex_);
  return unsaved_;
}

void Flush::finish(bool done, std::vector<BlockHash> unsaved) {
  std::lock_guard lock(mutex_);
  over_ = true;
  done_ = done;
  unsaved_ = std::move(unsaved);
  changed_.notify_all();
}

Tiers::Tiers(KvCache& kv, Model& model, SharedTiers tiers,
             const std::vector<ReadSpeed>& first_speeds, std::function<void()> wake)
    : kv_(kv),
      mover_(model, std::move(tiers), std::move(wake)),
      saver_(kv, model, mover_, removals_),
      fetcher_(kv, model, mover_, removals_, first_speeds) {}

void Tiers::save_sealed(Sequence& seq) {
  if (seq.persist) saver_.post_sealed(seq);
}

void Tiers::save(Sequence& seq) {
  saver_.post_all(seq);
  saver_.pump();
}

void Tiers::offload(Sequence& seq) {
  if (!mover_.tiers().front()->in_host_memory()) return;
  saver_.post_offload(seq);
  saver_.pump();
}

void Tiers::touch(Sequence& seq) {
  kv_.extend_keys(seq, seq.length() / kPageTokens);
  if (seq.keys.empty()) return;
  post_task([keys = seq.keys, retention_priority = seq.retention_priority](LowerTier& tier) {
    tier.touch(keys, retention_priority);
  });
}

// The removal is recorded before it is posted, so a throw leaves nothing posted but unrecorded.
void Tiers::remove(const std::vector<BlockHash>& keys) {
  PageMover::Moves moves;
  const auto move = moves.emplace_back(std::make_shared<PageMove>());
  move->task = [keys](LowerTier& tier) { tier.remove(keys); };
  move->removes = true;
  removals_.add(move, keys);
  mover_.post(std::move(moves));
  saver_.forget(removals_);
  fetcher_.forget(removals_);
}

std::shared_ptr<PageMove> Tiers::post_task(std::function<void(LowerTier&)> task) {
  PageMover::Moves moves;
  const auto move = moves.emplace_back(std::make_shared<PageMove>());
  move->task = std::move(task);
  mover_.post(std::move(moves));
  return move;
}

void Tiers::flush(std::shared_ptr<Flush> flush) {
  flushes_.push_back({saver_.last(), std::move(flush), nullptr});
  mark_flushes();
}

void Tiers::record_speeds(const SpeedRecords& records, const StepTime& time) {
  const auto fit = time.fit();
  if (!fit) return;
  const SpeedRecord record{*fit, cost().time(count() - 1).speed()};
  post_task([records, record, last = mover_.tiers().back()](LowerTier& tier) {
    if (&tier == last) records.write(record);
  });
}

// Runs on a thread of its own: the system takes longer to provide fresh memory than a tier takes to
// read the pages that go there.
void Tiers::prepare_memory(Model& model) {
  int64_t stored = 0;
  for (const LowerTier* tier : mover_.tiers()) stored = std::max(stored, tier->stats().pages);
  const auto bytes_of = [this](int64_t pages) {
    int64_t bytes = 0;
    for (size_t g = 0; g < kv_.groups(); ++g) {
      const int group = static_cast<int>(g);
      bytes += static_cast<int64_t>(kv_.group(group).page_bytes) *
               std::min(pages, kv_.pool(group).total());
    }
    return bytes;
  };
  int64_t pages = 0;
  for (size_t g = 0; g < kv_.groups(); ++g)
    pages = std::max(pages, kv_.pool(static_cast<int>(g)).total());
  pages = std::min(stored, pages);
  const int64_t piece = kPreparedPiece / (bytes_of(1) + 1) + 1;
  while (pages > 0 && bytes_of(pages) > kPrepared) pages -= std::min(pages, piece);
  if (pages == 0) return;
  try {
    preparing_ = std::thread([this, &model, pages, piece] {
      for (int64_t at = piece; !stop_preparing_; at += piece) {
        model.pages().prepare_pages(std::min(at, pages));
        if (at >= pages) return;
      }
    });
  } catch (const std::system_error&) {  // no thread: the first use of a page gets its memory
  }
}

Tiers::~Tiers() {
  stop_preparing_ = true;
  if (preparing_.joinable()) preparing_.join();
}

// Posts a mark after the saves that went to the mover; when the mark is done, they are.
void Tiers::mark_flushes() {
  for (PendingFlush& waiting : flushes_)
    if (!waiting.mark && waiting.number < saver_.oldest()) waiting.mark = post_task(nullptr);
}

void Tiers::collect() {
  take_done();
  fetcher_.cancel_late();
  saver_.pump();
  mark_flushes();
}

void Tiers::take_done() noexcept {
  for (const auto& move : mover_.take_done()) switch (move->kind) {
      case PageMove::Kind::load:
        fetcher_.finish(*move);
        break;
      case PageMove::Kind::save:
        saver_.finish(*move);
        break;
      case PageMove::Kind::task:
        removals_.finish(*move);
        finish_flushes(*move);
    }
}

void Tiers::finish_flushes(const PageMove& mark) noexcept {
  flushes_.remove_if([&](const PendingFlush& waiting) {
    if (waiting.mark.get() != &mark) return false;
    try {
      waiting.flush->finish(true, saver_.unsaved());
    } catch (const std::exception&) {  // no memory for the list: the outcome is unknown
      waiting.flush->finish(false);
    }
    return true;
  });
}

LastSaves Tiers::finish(double seconds) noexcept {
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  while (fetcher_.cancel_last()) {
  }
  std::shared_ptr<PageMove> last;
  const auto left = [&] { return std::chrono::duration<double>(deadline - Clock::now()).count(); };
  while (left() > 0) {
    try {
      collect();
      if (!last && saver_.oldest() > saver_.last())
        last = post_task([](LowerTier& tier) { tier.sync(); });
    } catch (const std::exception&) {  // out of memory: try again
    }
    if (last && last.use_count() == 1) break;
    mover_.wait_done(std::min(left(), 0.1));
  }
  LastSaves result;
  result.done = last && last.use_count() == 1;
  try {
    result.unsaved = static_cast<int64_t>(saver_.unsaved().size());
  } catch (const std::exception&) {
    result.done = false;
  }
  result.stuck = !mover_.stop(PageMover::kPatience);
  for (const PendingFlush& waiting : flushes_) waiting.flush->finish(false);
  flushes_.clear();
  return result;
}

Residence Tiers::residence(Sequence& seq) {
  Residence where;
  const int64_t pages = seq.length() / kPageTokens;
  where.device = kPageTokens * kv_.longest_hit(seq, pages, false);
  for (size_t i = 1; i <= count(); ++i) {
    where.tiers.push_back(std::max(where.device, fetcher_.longest_prefix(seq, i)));
  }
  return where;
}

std::vector<TierStats> Tiers::stats() const {
  std::vector<TierStats> out;
  for (const LowerTier* tier : mover_.tiers()) out.push_back(tier->stats());
  return out;
}

std::vector<HeldPage> Tiers::held() const {
  std::vector<HeldPage> held;
  saver_.add_held(held);
  fetcher_.add_held(held);
  return held;
}

}  // namespace turbomind
