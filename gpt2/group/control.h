// The connection that every process of a run has to rank 0: who is there and what it does, small exchanges, and which rank has died or stands still.
// A thread of its own works on it, so that a process says that it lives while it computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpt2/group/launch.h"

namespace fattn::gpt2 {

struct ControlOptions {
  Launch launch;
  double timeout = 20;         // seconds that a rank may say nothing, or let others wait in a step
  double start_timeout = 300;  // for all of them to come
  // Called on the thread, where this process does not take note of a failure for another `timeout`: it hangs, and is to end.
  std::function<void(const std::string& why)> abandon;
};

// What a rank does when others wait for it. Only steps have a limit.
enum class Doing : uint8_t { kPreparing, kStep, kKeeping };

class Control {
 public:
  // Returns when all ranks are there. Throws Error: rank 0 cannot listen, or is not there in time; ranks missing, there twice, of another version,
  // or started with another number.
  explicit Control(const ControlOptions& options);
  ~Control();  // without finish(): the others take it for a death
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int rank() const;
  int ranks() const;

  // Waits for all ranks, and gives what each of them has brought, at most some MB together. All ranks call it as often. Throws as check() does.
  std::vector<std::string> exchange(const std::string& mine);

  void doing(Doing what, int64_t step);
  // While it lives, this rank waits for the others by another way.
  class Waits {
   public:
    explicit Waits(Control& control) : control_(control) { control_.waits(true); }
    ~Waits() { control_.waits(false); }
    Waits(const Waits&) = delete;
    Waits& operator=(const Waits&) = delete;

   private:
    Control& control_;
  };
  // Throws Error where another rank has failed, died or stands still, with its number.
  void check();

  // Tells the others why this one ends.
  void fail(const std::string& why) noexcept;
  // At the end of a run that went well; all ranks call it.
  void finish();

 private:
  void waits(bool so);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fattn::gpt2
