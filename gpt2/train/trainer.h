// Steps of training: batches that are accumulated, one update of the weights, and what is told of it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gpt2/data/loader.h"
#include "gpt2/error.h"
#include "gpt2/group/group.h"
#include "gpt2/train/log.h"
#include "gpt2/train/network.h"
#include "gpt2/train/options.h"
#include "gpt2/train/state.h"
#include "gpt2/train/tracker.h"

namespace fattn::gpt2 {

// A loss or gradient is not a number, and what was tried against it did not help. what() says the step and the first tensor.
class NotANumber : public Error {
 public:
  using Error::Error;
};

// Batches of an epoch that make one step are `accumulate`; the last step of an epoch has what is left.
int64_t steps_an_epoch(const Loader& loader, int64_t accumulate);

// With a group each rank takes its share of a step's batches, from a loader of its data_rank, and of each its rows; what a step does is what one
// process would do, but for the order in which gradients are summed: each rank's own first, then over ranks.
class Trainer {
 public:
  // The loader stands where the state says. `asked_to_stop`: whether this process is to end after the step.
  Trainer(Network& network, Loader& loader, const TrainOptions& options, const TrainState& state, Group* group = nullptr,
          std::function<bool()> asked_to_stop = {});

  // The loss is the mean over the targets of all batches of the step. Throws NotANumber, before anything of the weights has changed.
  LogLine step();
  // Is shown every tensor of the steps from now on; it must outlive the trainer.
  void track(PrecisionTracker* tracker) { tracker_ = tracker; }
  const TrainState& state() const { return state_; }
  // Whether any process is to end after the last step.
  bool stops() const { return stops_; }

 private:
  // A batch of its own: the loader's is gone with the next.
  struct Held {
    std::vector<int32_t> numbers;
    Batch batch;
    void hold(const Batch& from);
  };
  // Among those that take batches in turns.
  int64_t rank() const { return group_ ? group_->share().data_rank : 0; }
  int64_t ranks() const { return group_ ? group_->share().data_ranks : 1; }
  void read_batches();
  void agree_on_targets(LogLine& line);
  void say_step();
  void run_passes(double scale);
  void add_losses_of_ranks(UpdateResult& update);
  [[noreturn]] void stop(const std::string& what, const std::string& tensor) const;
  // Computes the step's batches again and names the first tensor with a number that is none; empty: there is none.
  std::string first_bad_tensor(double scale);

  Network& network_;
  Loader& loader_;
  const TrainOptions options_;
  TrainState state_;
  LossScaler scaler_;
  std::vector<Held> held_;  // `used_` of them are the step's
  size_t used_ = 0;
  PrecisionTracker* tracker_ = nullptr;
  int64_t batches_ = 0;  // of all ranks in this step, without those of padding
  Group* const group_;
  const std::function<bool()> asked_to_stop_;
  bool stops_ = false;
  bool warm_ = false;  // a step is done: kernels are there
};

// The mean loss over the targets of at most `batches` batches from the beginning of files; 0: of all.
struct Validation {
  double loss = 0;
  int64_t targets = 0;
};
// Ranks of a group take turns, and all have the result.
Validation validate(Network& network, const std::vector<std::string>& paths, const LoaderOptions& options, int64_t batches, Group* group = nullptr);

}  // namespace fattn::gpt2
