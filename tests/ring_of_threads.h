// Ranks as threads of this process: what they send each other goes through queues.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fattn/group.hpp"
#include "fattn/ring.hpp"

namespace fattn::testing {

class Mailboxes {
 public:
  void put(int from, int to, std::vector<char> bytes) {
    const std::lock_guard lock(mutex_);
    queues_[{from, to}].push_back(std::move(bytes));
    came_.notify_all();
  }
  std::vector<char> take(int from, int to) {
    std::unique_lock lock(mutex_);
    auto& queue = queues_[{from, to}];
    if (!came_.wait_for(lock, std::chrono::seconds(60), [&] { return !queue.empty(); })) throw Error(ErrorCode::kDevice, "nothing came");
    std::vector<char> bytes = std::move(queue.front());
    queue.pop_front();
    return bytes;
  }
  bool empty() {
    const std::lock_guard lock(mutex_);
    for (const auto& [pair, queue] : queues_)
      if (!queue.empty()) return false;
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> queues_;
};

// `late`: what is sent is read when the call is finished, the latest that it may be; else when it begins. What is received is spoilt in between.
class ThreadTransport : public RingTransport {
 public:
  ThreadTransport(Mailboxes& boxes, int rank, int ranks, bool late) : boxes_(boxes), rank_(rank), ranks_(ranks), late_(late) {}
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  void begin(const std::vector<RingPiece>& pieces, void*) override {
    begun_.push_back(pieces);
    for (const RingPiece& p : pieces)
      if (!p.sent) std::memset(p.data, 0x7f, p.bytes);  // large numbers
    if (!late_) send(pieces);
  }
  void finish(void*) override {
    if (begun_.empty()) throw Error(ErrorCode::kInternal, "nothing was begun");
    const std::vector<RingPiece> pieces = begun_.front();
    begun_.pop_front();
    if (late_) send(pieces);
    for (const RingPiece& p : pieces) {
      if (p.sent) continue;
      const std::vector<char> bytes = boxes_.take(p.peer, rank_);
      if (bytes.size() != p.bytes) throw Error(ErrorCode::kInternal, "a piece has another size");
      std::memcpy(p.data, bytes.data(), p.bytes);
    }
  }
  void settle() override {
    if (!begun_.empty()) throw Error(ErrorCode::kInternal, "something is still under way");
  }

 private:
  void send(const std::vector<RingPiece>& pieces) {
    for (const RingPiece& p : pieces)
      if (p.sent) boxes_.put(rank_, p.peer, {static_cast<char*>(p.data), static_cast<char*>(p.data) + p.bytes});
  }
  Mailboxes& boxes_;
  int rank_, ranks_;
  bool late_;
  std::deque<std::vector<RingPiece>> begun_;
};

// Runs body(rank) in a thread each, and gives what they threw: "" for nothing.
inline std::vector<std::string> in_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> thrown(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& e) {
        thrown[static_cast<size_t>(rank)] = e.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

// Runs body(transport) as every rank, and throws what the first of them threw.
inline void run_ranks(int ranks, bool late, const std::function<void(RingTransport&)>& body) {
  Mailboxes boxes;
  for (const std::string& thrown : in_threads(ranks, [&](int rank) {
         ThreadTransport transport(boxes, rank, ranks, late);
         body(transport);
       }))
    if (!thrown.empty()) throw Error(ErrorCode::kInternal, thrown);
  if (!boxes.empty()) throw Error(ErrorCode::kInternal, "something was sent that nobody received");
}

// NCCL's stand-in exchanges memory of the host.
class HostGroup : public Group {
 public:
  HostGroup(int rank, int ranks, const GroupId& id, double timeout = 30) : Group(Device::kCpu, 0, rank, ranks, id.data(), timeout) {}
};

}  // namespace fattn::testing
