// Steps of training: batches that are accumulated, one update of the weights, and what is told of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpt2/data/loader.h"
#include "gpt2/error.h"
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

class Trainer {
 public:
  // The loader stands where the state says.
  Trainer(Network& network, Loader& loader, const TrainOptions& options, const TrainState& state);

  // The loss is the mean over the targets of all batches of the step. Throws NotANumber, before anything of the weights has changed.
  LogLine step();
  // Is shown every tensor of the steps from now on; it must outlive the trainer.
  void track(PrecisionTracker* tracker) { tracker_ = tracker; }
  const TrainState& state() const { return state_; }

 private:
  // A batch of its own: the loader's is gone with the next.
  struct Held {
    std::vector<int32_t> numbers;
    Batch batch;
    void hold(const Batch& from);
  };
  void read_batches();
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
};

// The mean loss over the targets of at most `batches` batches from the beginning of files; 0: of all.
struct Validation {
  double loss = 0;
  int64_t targets = 0;
};
Validation validate(Network& network, const std::vector<std::string>& paths, const LoaderOptions& options, int64_t batches);

}  // namespace fattn::gpt2
