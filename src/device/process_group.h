// Exchanges of this process with others over NCCL, on a stream of their own, so that work goes on beside them.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/nccl_communicator.h"

namespace fattn::core {

class ProcessGroup {
 public:
  struct Options {
    CudaDevice* device = nullptr;  // null: memory of the host, which a stand-in for NCCL alone takes
    NcclId id{};
    int rank = 0, ranks = 1;
    double timeout_s = 30;  // that a process waits for another one
  };
  // Returns when all processes are there. Throws Error.
  explicit ProcessGroup(const Options& options);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  // Begins to send and receive: behind the work so far on `stream`, beside what comes after it.
  void begin(std::span<const fattn_piece> pieces, CUstream stream);
  // Of those begun and not finished the oldest: work on `stream` from here on sees it.
  void finish(CUstream stream);
  // Until everything that was finished is over, or the time is.
  void wait();

 private:
  class Event;
  struct Begun {
    std::unique_ptr<Event> done;
    std::vector<int> peers;
  };
  // Throws if nothing has come for longer than the timeout.
  void alive() const;
  void expect(std::span<const int> peers, const char* doing);

  Options options_;
  CUstream stream_ = nullptr;
  std::unique_ptr<Event> ready_;
  std::deque<Begun> begun_, finished_;  // finished_: work waits for them, but this process has not seen their end
  std::vector<std::unique_ptr<Event>> spare_;
  std::chrono::steady_clock::time_point since_;
  std::string waiting_for_;
  std::optional<NcclCommunicator> communicator_;
};

}  // namespace fattn::core
