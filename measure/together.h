// Work that all threads do at once, and its rate.
#pragma once

#include <algorithm>
#include <atomic>
#include <ctime>
#include <numeric>
#include <thread>
#include <vector>

namespace fattn::measure {

inline double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Runs body(thread) on all threads at once and returns what they did a second together, each doing `work`. Every thread is
// held against its own processor time: what other programs take from it must not make the machine look slower than it is,
// or true results would seem to be above its peak.
template <typename Body>
double rate_together(int threads, double work, const Body& body) {
  std::atomic<int> ready{0};
  std::vector<double> rates(static_cast<size_t>(threads));
  auto run = [&](int t) {
    ready.fetch_add(1);
    while (ready.load() < threads) std::this_thread::yield();
    const double start = thread_seconds();
    body(t);
    rates[static_cast<size_t>(t)] = work / std::max(thread_seconds() - start, 1e-9);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(run, t);
  run(0);
  for (std::thread& other : others) other.join();
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace fattn::measure
