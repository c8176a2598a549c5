// The page mover: pages that are moved together each arrive intact. stop() returns at once when the
// tiers respond, and after its patience when one hangs as a disk may; detached threads then touch
// nothing that was destroyed. Also for ASan and TSan.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "tests/check.h"
#include "tests/engine/scripted_model.h"
#include "tests/tiers/test_tier.h"
#include "tiers/host_tier.h"
#include "tiers/page_mover.h"

namespace turbomind {
namespace {

enum class Place { nowhere, read, write, task, sync, end };

// Outlives the tier.
struct Control {
  Place hangs = Place::nowhere;
  std::atomic<bool> released{false};
  std::atomic<bool> inside{false}, gone{false};
  void pass(Place place) {
    if (place != hangs) return;
    inside = true;
    inside.notify_all();
    released.wait(false);
  }
};

class HangingTier : public LowerTier {
 public:
  explicit HangingTier(std::shared_ptr<Control> control) : control_(std::move(control)) {}
  ~HangingTier() override {
    control_->pass(Place::end);
    control_->gone = true;
    control_->gone.notify_all();
  }

  std::optional<PageRef> find(const BlockHash& key, int group) const override {
    PageRef ref;
    ref.key = key;
    ref.group = group;
    ref.count = kPageTokens;
    ref.payload_bytes = kPageTokens * sizeof(scripted::Slot);
    return ref;
  }
  std::optional<PageRef> find_prefix(const BlockHash&, int, const int32_t*, int,
                                     int*) const override {
    return std::nullopt;
  }
  bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) override {
    control_->pass(Place::read);
    page->key = ref.key;
    page->fingerprint = "scripted";
    page->numerics = scripted::Options{}.numerics;
    page->tokens.assign(kPageTokens, 1);
    page->payload_bytes = ref.payload_bytes;
    std::fill_n(payload, ref.payload_bytes, uint8_t{0});
    return true;
  }
  bool write(const StoredPage&, const uint8_t*) override {
    control_->pass(Place::write);
    return true;
  }
  void touch(const std::vector<BlockHash>&, float) override { control_->pass(Place::task); }
  void remove(const std::vector<BlockHash>&) override {}
  void retain_only(const std::vector<BlockHash>&) override {}
  void sync() override { control_->pass(Place::sync); }
  TierStats stats() const override { return {}; }

 private:
  const std::shared_ptr<Control> control_;
};

// Loads and saves use different pages: a page that is being loaded has no tokens to save.
std::shared_ptr<PageMove> make_move(PageMove::Kind kind, const Model& model) {
  auto move = std::make_shared<PageMove>();
  move->kind = kind;
  move->page = kind == PageMove::Kind::load ? 1 : 2;
  move->record.fingerprint = model.fingerprint();
  move->record.tokens.assign(kPageTokens, 1);
  move->record.payload_bytes = model.pages().stored_page_bytes(0, kPageTokens);
  if (kind == PageMove::Kind::task) move->task = [](LowerTier& tier) { tier.touch({}, 1); };
  return move;
}

// The mover, its model and its waker are destroyed while a tier hangs.
void test_hanging(Place place) {
  const auto control = std::make_shared<Control>();
  control->hangs = place;
  auto model = std::make_unique<scripted::ScriptedModel>(scripted::Options{});
  model->pages().allocate_pages({4});
  auto woken = std::make_unique<std::atomic<int>>(0);
  TierPtrs tiers;
  tiers.push_back(std::make_unique<HangingTier>(control));
  auto mover = std::make_unique<PageMover>(
      *model, std::make_shared<const TierPtrs>(std::move(tiers)), [&count = *woken] { ++count; });
  for (const auto kind : {PageMove::Kind::load, PageMove::Kind::save, PageMove::Kind::task}) {
    PageMover::Moves moves(1, make_move(kind, *model));
    mover->post(std::move(moves));
  }
  if (place == Place::nowhere) {
    for (size_t done = 0; done < 3;) {
      for (const auto& move : mover->take_done()) {
        CHECK(move->succeeded);
        ++done;
      }
      std::this_thread::yield();
    }
    CHECK(mover->stop(60) && control->gone && mover->stop(60) && *woken == 3);
    return;
  }
  if (place != Place::end) control->inside.wait(false);
  CHECK(!mover->stop(0.05) && !mover->stop(60));
  mover.reset();
  model.reset();
  woken.reset();
  CHECK(!control->gone);
  control->released = true;
  control->released.notify_all();
  control->gone.wait(false);
}

constexpr size_t kPayload = kPageTokens * sizeof(scripted::Slot);

// Moves up to four pages at a time, as a GPU does.
class BatchModel : public scripted::ScriptedModel {
 public:
  BatchModel() : ScriptedModel({}) {}
  int page_batch() const override { return 4; }
  void read_pages(const std::vector<PageTransfer>& transfers) const override {
    note(transfers.size());
    ScriptedModel::read_pages(transfers);
  }
  void write_pages(const std::vector<PageTransfer>& transfers) override {
    note(transfers.size());
    ScriptedModel::write_pages(transfers);
  }
  std::vector<uint8_t> page(int32_t at) const {
    std::vector<uint8_t> bytes(kPayload);
    read_page(0, at, kPageTokens, bytes.data());
    return bytes;
  }
  mutable std::atomic<size_t> most{0};  // at a time

 private:
  void note(size_t pages) const {
    CHECK(pages >= 1 && pages <= 4);
    most = std::max<size_t>(most, pages);
  }
};

std::shared_ptr<PageMove> make_move(PageMove::Kind kind, const StoredPage& record, int32_t page) {
  auto move = std::make_shared<PageMove>();
  move->kind = kind;
  move->record = record;
  move->page = page;
  return move;
}

// Waits until `count` moves are done and returns those that failed.
int failed_of(PageMover& mover, size_t count) {
  int failed = 0;
  for (size_t done = 0; done < count;) {
    for (const auto& move : mover.take_done()) {
      ++done;
      failed += !move->succeeded;
    }
    std::this_thread::yield();
  }
  return failed;
}

// Pages 0 to 11 are saved, the last one partially, and loaded as 12 to 23. Pages of the host tier
// have one part or several. `tier`: a lower one, with pages that the host tier has lost.
void test_batches(size_t slab_bytes, bool hold_host) {
  constexpr int kPages = 12;
  BatchModel model;
  model.pages().allocate_pages({2 * kPages});
  HostTier::Options options;
  options.numerics = model.numerics_fingerprint();
  options.quota = 20 * kPayload;
  options.page_bytes = kPayload;
  options.memory.slab_bytes = slab_bytes;
  const auto shelf = std::make_shared<fuzz::Shelf>();
  TierPtrs tiers;
  tiers.push_back(std::make_unique<HostTier>(options));
  tiers.push_back(std::make_unique<fuzz::TestTier>(shelf, model.numerics_fingerprint()));
  PageMover mover(model, std::make_shared<const TierPtrs>(std::move(tiers)), [] {});
  std::vector<StoredPage> records(kPages);
  PageMover::Moves saves, loads;
  for (int i = 0; i < kPages; ++i) {
    StoredPage& record = records[i];
    std::vector<scripted::Slot> slots(kPageTokens);
    for (int t = 0; t < kPageTokens; ++t) slots[t] = {i, t, uint64_t(1000 * i + t)};
    model.pages().write_page(0, i, kPageTokens, reinterpret_cast<const uint8_t*>(slots.data()));
    record.fingerprint = model.fingerprint();
    record.numerics = model.numerics_fingerprint();
    if (i > 0) record.parent = records[i - 1].key;
    record.tokens.assign(i == kPages - 1 ? 9 : kPageTokens, i);
    record.key = next_key(record.parent, record.tokens.data(), int(record.tokens.size()));
    record.payload_bytes = record.tokens.size() * sizeof(scripted::Slot);
    saves.push_back(make_move(PageMove::Kind::save, record, i));
    loads.push_back(make_move(PageMove::Kind::load, record, kPages + i));
  }
  shelf->held = true;  // the first save waits there, so the others are taken together
  mover.post(std::move(saves));
  while (shelf->waiting == 0) std::this_thread::yield();
  shelf->release();
  CHECK(failed_of(mover, kPages) == 0 && model.most > 1);
  CHECK(shelf->items.size() == kPages && mover.tiers()[0]->stats().pages == kPages);
  if (!hold_host)
    for (int i = 0; i < kPages; i += 2) mover.tiers()[0]->remove({records[i].key});

  model.most = 0;
  const auto revoked = *std::next(loads.begin(), 5);
  mover.post(std::move(loads));
  mover.revoke(*revoked);
  const std::vector<uint8_t> as_it_was = model.page(kPages + 5);
  CHECK(failed_of(mover, kPages) <= 1 && model.most > 1);
  CHECK(model.page(kPages + 5) == as_it_was);
  for (int i = 0; i < kPages; ++i) {
    if (i == 5) continue;
    const size_t bytes = records[i].payload_bytes;
    const auto from = model.page(i), to = model.page(kPages + i);
    CHECK(std::equal(from.begin(), from.begin() + bytes, to.begin()));
  }
  CHECK(mover.stop(60));
}

void test_all_batches() {
  for (const size_t slab : {size_t{0}, 3 * kPayload / 2}) {
    test_batches(slab, true);
    test_batches(slab, false);
  }
}

void test_all_hanging() {
  for (const Place place :
       {Place::nowhere, Place::read, Place::write, Place::task, Place::sync, Place::end})
    test_hanging(place);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {
                       TM_CASE(test_all_batches),
                       TM_CASE(test_all_hanging),
                   });
}
