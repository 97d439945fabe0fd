// Sums over the processes of a group, and exchanges between them, by NCCL: what training on several GPUs needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fattn/fattn.h"
#include "ops/ops.h"

namespace fattn::ops {

class ProcessSum {
 public:
  // A word of NCCL's that one process makes and all are told. Throws Error where there is no NCCL, with what to do.
  static std::vector<std::byte> new_id();
  // What new_id() gives.
  static constexpr size_t kIdBytes = 128;

  struct Group {
    std::vector<std::byte> id;
    int rank = 0, ranks = 1;
    std::function<void()> alive;  // asked again and again by whoever waits; what it throws ends the wait
  };
  // Returns when all processes are there. On a CPU only a stand-in for NCCL works, which tests have.
  ProcessSum(const Device& device, const Group& group);
  ~ProcessSum();
  ProcessSum(const ProcessSum&) = delete;
  ProcessSum& operator=(const ProcessSum&) = delete;

  // x becomes the sum of all processes' x, of which each gets the same bits: behind the work so far on `stream`, beside what comes after it. Every
  // process begins the same sums in the same order.
  void begin(float* x, int64_t count, void* stream);
  // Returns when all sums are there. Later work on `stream` sees them.
  void finish(void* stream);

  // Sends and receives all pieces beside each other: behind the work so far on `stream` and behind the sums and exchanges that were begun before, so
  // that processes which begin them in the same order never wait for each other. What one process sends to another comes in the order given.
  void begin_exchange(const std::vector<fattn_piece>& pieces, void* stream);
  // Of the exchanges that are begun and not finished, the oldest: later work on `stream` sees what came; on a CPU it is there when this returns.
  void finish_exchange(void* stream);
  // Returns when all that was begun is over.
  void settle();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fattn::ops
