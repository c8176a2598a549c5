#include "tiers/tiers.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

using Clock = PageFetcher::Clock;

// A fetch that takes so much longer than computing would is given up.
constexpr double kPatience = 3;
constexpr double kLeastPatience = 2;                  // seconds
constexpr int64_t kPrepared = int64_t{256} << 20;     // bytes of memory, at most
constexpr int64_t kPreparedPiece = int64_t{8} << 20;  // bytes, between two looks at the end

}  // namespace

bool Flush::wait(double seconds) {
  constexpr double kForever = 3.2e8;  // beyond that a deadline would overflow the clock
  std::unique_lock lock(mutex_);
  const auto over = [this] { return over_; };
  if (seconds < 0 || seconds > kForever) {
    news_.wait(lock, over);
  } else {
    news_.wait_for(lock, std::chrono::duration<double>(seconds), over);
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
  news_.notify_all();
}

Tiers::Tiers(KvCache& kv, Model& model, SharedTiers tiers,
             const std::vector<ReadSpeed>& first_speeds, std::function<void()> wake)
    : kv_(kv),
      cost_(first_speeds),
      mover_(model, std::move(tiers), std::move(wake)),
      saver_(kv, model, mover_, removals_),
      fetcher_(kv, model, mover_) {}

FetchPlanner Tiers::planner(size_t tiers) {
  return FetchPlanner(kv_, mover_.tiers(), removals_, fetcher_.loads(), tiers);
}

FetchPlan Tiers::plan(Sequence& seq, int64_t most, bool exact) {
  return planner(count()).plan(seq, most, exact);
}

// Instead of computing from the token `from` on.
bool Tiers::worth(const FetchPlan& plan, int64_t from, const StepTime& time, int64_t chunk) const {
  if (plan.loaded == 0) return false;
  std::vector<TierLoad> loads = plan.loads;
  fetcher_.add_loads(loads);
  return cost_.worth(loads, compute_range(time, chunk, from, plan.tokens));
}

// The first token behind the missing page from which on loading is worth it.
int64_t Tiers::find_gap_end(Sequence& seq, int64_t missing, int64_t most, bool exact,
                            const StepTime& time, int64_t chunk) {
  if (missing == kNoToken) return kNoToken;
  FetchPlanner planner = this->planner(count());
  for (int64_t page = missing + 1;;) {
    const Stretch stretch = planner.next_stretch(seq, page, most, exact);
    if (stretch.begin == stretch.end) return kNoToken;
    const int64_t begin = stretch.begin * kPageTokens, end = stretch.end * kPageTokens;
    if (cost_.worth(stretch.loads, compute_range(time, chunk, begin, end))) return begin;
    page = stretch.end;
  }
}

void Tiers::begin(Sequence& seq, Run* run, const FetchPlan& plan, bool exact,
                  double compute_seconds) {
  const double patience = std::max(kLeastPatience, kPatience * compute_seconds);
  const auto wait = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(patience, 3600.0)));
  fetcher_.begin(seq, run, plan, exact, Clock::now() + wait);
}

void Tiers::warm(Sequence& seq, const StepTime& time, int64_t chunk,
                 const std::vector<int64_t>& promised) {
  if (fetcher_.active(seq)) return;
  kv_.resume(seq, seq.length());
  const FetchPlan next = plan(seq, seq.length(), false);
  if (!worth(next, seq.written, time, chunk) || !fetcher_.has_room(next, promised)) return;
  begin(seq, nullptr, next, false, compute_range(time, chunk, seq.written, next.tokens));
}

void Tiers::sealed(Sequence& seq) {
  if (seq.persist) saver_.post_sealed(seq);
}

void Tiers::save(Sequence& seq) {
  saver_.post_all(seq);
  saver_.pump();
}

void Tiers::touch(Sequence& seq) {
  kv_.extend_keys(seq, seq.length() / kPageTokens);
  if (seq.keys.empty()) return;
  post_task([keys = seq.keys, retention_priority = seq.retention_priority](LowerTier& tier) {
    tier.touch(keys, retention_priority);
  });
}

// In this order nothing is posted that throws before it is known of.
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

void Tiers::record_speeds(const SpeedRecords& notes, const StepTime& time) {
  const auto fit = time.fit();
  if (!fit) return;
  const SpeedRecord note{*fit, cost_.time(count() - 1).speed()};
  post_task([notes, note, last = mover_.tiers().back()](LowerTier& tier) {
    if (&tier == last) notes.write(note);
  });
}

// On a thread of its own: where the system has to get the memory first, giving it out takes longer
// than reading what goes there.
void Tiers::prepare_memory(Model& model) {
  int64_t stored = 0;
  for (const LowerTier* tier : mover_.tiers()) stored = std::max(stored, tier->stats().pages);
  int64_t bytes = 1;  // of a page in all groups
  for (const CacheGroup& group : model.groups()) bytes += static_cast<int64_t>(group.page_bytes);
  const int64_t pages = std::min({stored, kv_.pool(0).total(), kPrepared / bytes});
  const int64_t piece = std::max<int64_t>(kPreparedPiece / bytes, 1);
  if (pages == 0) return;
  try {
    preparing_ = std::thread([this, &model, pages, piece] {
      for (int64_t at = piece; !stop_preparing_; at += piece) {
        model.prepare_pages(std::min(at, pages));
        if (at >= pages) return;
      }
    });
  } catch (const std::system_error&) {  // no thread: the first to use a page waits for its memory
  }
}

Tiers::~Tiers() {
  stop_preparing_ = true;
  if (preparing_.joinable()) preparing_.join();
}

// Behind what has gone to the mover, a mark that comes back when that is done.
void Tiers::mark_flushes() {
  for (Waiting& waiting : flushes_)
    if (!waiting.mark && waiting.number < saver_.oldest()) waiting.mark = post_task(nullptr);
}

void Tiers::collect() {
  take_done();
  fetcher_.cancel_late(Clock::now());
  saver_.pump();
  mark_flushes();
}

void Tiers::take_done() noexcept {
  for (const auto& move : mover_.take_done()) switch (move->kind) {
      case PageMove::Kind::load:
        if (move->succeeded) cost_.observe(move->tier, move->bytes, move->seconds);
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
  flushes_.remove_if([&](const Waiting& waiting) {
    if (waiting.mark.get() != &mark) return false;
    try {
      waiting.flush->finish(true, saver_.unsaved());
    } catch (const std::exception&) {  // for lack of memory nobody knows
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
    } catch (const std::exception&) {  // for lack of memory: once more
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
  for (const Waiting& waiting : flushes_) waiting.flush->finish(false);
  flushes_.clear();
  return result;
}

Residence Tiers::residence(Sequence& seq) {
  Residence where;
  const int64_t pages = seq.length() / kPageTokens;
  where.device = kPageTokens * kv_.longest_hit(seq, pages, false);
  for (size_t i = 1; i <= count(); ++i) {
    const int64_t tokens = planner(i).plan(seq, seq.length(), false).tokens;
    where.below.push_back(std::max(where.device, tokens));
  }
  return where;
}

double Tiers::predict_ttft(Sequence& seq, int64_t device, int64_t added, const StepTime& time,
                           int64_t chunk) {
  const int64_t length = seq.length() + added;
  const FetchPlan next = plan(seq, seq.length(), false);
  const bool load = next.tokens > device && worth(next, device, time, chunk);
  const int64_t from = std::min(load ? next.tokens : device, length - 1);
  const double loading = load ? cost_.load_seconds(next.loads) : 0;
  return loading + compute_range(time, chunk, from, length);
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
