// The end of the page mover: at once where the tiers answer, and without them where one hangs as a
// disk may; what is left behind then touches nothing that is gone. Meant for ASan and TSan.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "engine/page_mover.h"
#include "tests/scripted_model.h"

namespace turbomind {
namespace {

#define CHECK(cond)                                                  \
  do {                                                               \
    if (!(cond)) {                                                   \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
      std::exit(1);                                                  \
    }                                                                \
  } while (0)

enum class Place { nowhere, read, write, chore, sync, end };

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

  std::optional<PageRef> find(const ChainKey& key, int group) const override {
    PageRef ref;
    ref.key = key;
    ref.group = group;
    ref.count = kPageTokens;
    ref.payload_bytes = kPageTokens * sizeof(scripted::Slot);
    return ref;
  }
  std::optional<PageRef> find_beginning(const ChainKey&, int, const int32_t*, int,
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
  void touch(const std::vector<ChainKey>&, float) override { control_->pass(Place::chore); }
  void remove(const std::vector<ChainKey>&) override {}
  void keep_only(const std::vector<ChainKey>&) override {}
  void sync() override { control_->pass(Place::sync); }
  TierStats stats() const override { return {}; }

 private:
  const std::shared_ptr<Control> control_;
};

std::shared_ptr<PageMove> make_move(PageMove::Kind kind, const Model& model) {
  auto move = std::make_shared<PageMove>();
  move->kind = kind;
  move->page = 1;
  move->record.fingerprint = model.fingerprint();
  move->record.tokens.assign(kPageTokens, 1);
  move->record.payload_bytes = model.stored_page_bytes(0, kPageTokens);
  if (kind == PageMove::Kind::chore) move->chore = [](LowerTier& tier) { tier.touch({}, 1); };
  return move;
}

// The mover, its model and whoever it wakes go while a tier hangs.
void test_hanging(Place place) {
  const auto control = std::make_shared<Control>();
  control->hangs = place;
  auto model = std::make_unique<scripted::ScriptedModel>(scripted::Options{});
  model->allocate_pages(4);
  auto woken = std::make_unique<std::atomic<int>>(0);
  TierPtrs tiers;
  tiers.push_back(std::make_unique<HangingTier>(control));
  auto mover = std::make_unique<PageMover>(
      *model, std::make_shared<const TierPtrs>(std::move(tiers)), [&count = *woken] { ++count; });
  for (const auto kind : {PageMove::Kind::load, PageMove::Kind::save, PageMove::Kind::chore}) {
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

}  // namespace
}  // namespace turbomind

int main() {
  using turbomind::Place;
  for (const Place place :
       {Place::nowhere, Place::read, Place::write, Place::chore, Place::sync, Place::end})
    turbomind::test_hanging(place);
  std::puts("page_mover_test: passed");
}
