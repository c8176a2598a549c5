// Requests and wakers under concurrent publishing, reading and cancelling. Also for TSan.
#include <poll.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "engine/event.h"
#include "tests/check.h"

namespace turbomind {
namespace {

std::vector<Event> token_event(int32_t token, bool terminal) {
  Event e;
  e.token_ids = {token};
  e.terminal = terminal;
  if (terminal) e.finish = FinishReason::length;
  std::vector<Event> events;
  events.push_back(std::move(e));
  return events;
}

bool readable(int fd, int timeout_ms) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, timeout_ms) == 1;
}

void test_waker() {
  Waker waker;
  CHECK(!readable(waker.fd(), 0));
  CHECK(waker.drain().empty());
  for (uint64_t id : {7, 3, 7, 9, 3}) waker.post(id);
  CHECK(readable(waker.fd(), 0));
  CHECK((waker.drain() == std::vector<uint64_t>{7, 3, 9}));
  CHECK(!readable(waker.fd(), 0));  // one byte for five posts
  waker.wake();
  CHECK(readable(waker.fd(), 0));
  CHECK(waker.drain().empty());
  waker.post(3);
  CHECK(readable(waker.fd(), 0));
}

void test_request() {
  auto waker = std::make_shared<Waker>();
  Request r(5, waker);
  CHECK(!r.wait(0) && !r.wait(0.005) && !r.done());
  r.publish({});
  CHECK(!readable(waker->fd(), 0));
  r.publish(token_event(1, false));
  r.publish(token_event(2, true));
  CHECK((waker->drain() == std::vector<uint64_t>{5}));
  CHECK(r.wait(-1) && !r.done());
  const std::vector<Event> events = r.drain();
  CHECK(events.size() == 2 && events[0].token_ids[0] == 1 && events[1].terminal);
  CHECK(r.done() && r.wait(-1) && r.drain().empty());
  bool thrown = false;
  try {
    r.publish(token_event(3, false));
  } catch (const Error& e) {
    thrown = e.code() == ErrorCode::internal;
  }
  CHECK(thrown && r.drain().empty());
}

// One writer, like the engine thread; readers that block, and one that polls a waker for all of its
// requests.
void test_threads() {
  constexpr int kRequests = 16;
  constexpr int kTokens = 300;
  auto waker = std::make_shared<Waker>();
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < kRequests; ++i) {
    requests.push_back(std::make_shared<Request>(i, i % 2 ? waker : nullptr));
  }
  std::thread engine([requests] {
    for (int t = 0; t < kTokens; ++t) {
      for (const auto& r : requests) {
        if (t == 0) CHECK(!r->cancelled());
        r->publish(token_event(t, t == kTokens - 1));
      }
      if (t % 16 == 0) std::this_thread::yield();
    }
    while (!requests[0]->cancelled()) std::this_thread::yield();
  });
  const auto count = [](Request& r, int& next) {
    for (const Event& e : r.drain()) {
      CHECK(e.token_ids[0] == next);
      ++next;
      CHECK(e.terminal == (next == kTokens));
    }
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < kRequests; i += 2) {
    readers.emplace_back([r = requests[i], count] {
      int next = 0;
      while (!r->done()) {
        if (r->wait(0.05)) count(*r, next);
      }
      CHECK(next == kTokens);
    });
  }
  std::map<uint64_t, int> next;
  int open = kRequests / 2;
  while (open > 0) {
    CHECK(readable(waker->fd(), 60000));
    for (uint64_t id : waker->drain()) {
      const bool was_done = requests[id]->done();
      count(*requests[id], next[id]);
      if (!was_done && requests[id]->done()) --open;
    }
  }
  for (int i = 1; i < kRequests; i += 2) CHECK(next[i] == kTokens);
  for (auto& t : readers) t.join();
  requests[0]->cancel();
  engine.join();
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(turbomind::test_waker),
                                  TM_CASE(turbomind::test_request),
                                  TM_CASE(turbomind::test_threads),
                              });
}
