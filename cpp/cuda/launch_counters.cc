#include "cuda/launch_counters.h"

#include <map>
#include <mutex>

#include "cuda/emulated_machine.h"

namespace turbomind::emulator {

namespace {

struct Totals {
  std::mutex mutex;
  std::map<std::string, LaunchCounters> by_kernel;
  uint64_t seed = 1;
  uint64_t launches = 0;
};

Totals& totals() {
  static Totals& totals = *new Totals;  // never destroyed: threads may still run at exit
  return totals;
}

void add(LaunchCounters& sum, const LaunchCounters& c) {
  sum.launches += c.launches;
  sum.blocks += c.blocks;
  sum.bytes_loaded += c.bytes_loaded;
  sum.bytes_stored += c.bytes_stored;
  sum.mmas += c.mmas;
}

}  // namespace

LaunchCounters counters(const std::string& kernel) {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  LaunchCounters sum;
  for (const auto& [name, c] : t.by_kernel) {
    if (name != kernel && name.compare(0, kernel.size() + 1, kernel + "<") != 0) continue;
    add(sum, c);
  }
  return sum;
}

void reset_counters() {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.by_kernel.clear();
}

void set_schedule_seed(uint64_t seed) {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.seed = seed;
  t.launches = 0;
}

uint64_t next_seed() {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  return mix(t.seed) ^ ++t.launches;
}

void count_launch(const char* kernel, const LaunchCounters& done) {
  Totals& t = totals();
  const std::lock_guard<std::mutex> lock(t.mutex);
  add(t.by_kernel[kernel], done);
}

}  // namespace turbomind::emulator
