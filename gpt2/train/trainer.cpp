// Batches of a step are read first, because each one's gradients are divided by the targets of all.
#include "gpt2/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "gpt2/train/precision.h"

namespace fattn::gpt2 {
namespace {

// The first parameter with a number that is none; empty: there is none.
std::string first_bad(Network& network, Flat which) {
  const float* numbers = network.flat(which);
  for (const Parameter& p : network.parameters())
    if (!std::all_of(numbers + p.offset, numbers + p.offset + p.size, [](float x) { return std::isfinite(x); })) return p.name;
  return "";
}

}  // namespace

int64_t steps_an_epoch(const Loader& loader, int64_t accumulate) { return (loader.batches_an_epoch() + accumulate - 1) / accumulate; }

Trainer::Trainer(Network& network, Loader& loader, const TrainOptions& options, const TrainState& state)
    : network_(network),
      loader_(loader),
      options_(options),
      state_(state),
      scaler_(state.step > 0 ? LossScaler(Precision(options.dtype).scales_loss(), state.scaler)
                             : LossScaler(Precision(options.dtype).scales_loss())) {
  state_.scaler = scaler_.state();
  state_.position = loader.position();
}

void Trainer::Held::hold(const Batch& from) {
  const auto size = static_cast<size_t>(from.sequences) * static_cast<size_t>(from.seqlen);
  numbers.resize(4 * size);
  const auto copy = [&](size_t i, const int32_t* array) -> const int32_t* {
    if (!array) return nullptr;
    return static_cast<const int32_t*>(std::memcpy(numbers.data() + i * size, array, size * sizeof(int32_t)));
  };
  batch = {from.sequences,          from.seqlen,      copy(0, from.ids), copy(1, from.targets), copy(2, from.positions),
           copy(3, from.documents), from.target_count};
}

void Trainer::read_batches() {
  used_ = 0;
  const int64_t epoch = loader_.position().epoch;
  for (int64_t i = 0; i < options_.accumulate && loader_.position().epoch == epoch; ++i) {
    if (held_.size() == used_) held_.emplace_back();
    held_[used_++].hold(loader_.next());
  }
}

void Trainer::stop(const std::string& what, const std::string& tensor) const {
  throw NotANumber("step " + std::to_string(state_.step + 1) + ": " + what +
                   (tensor.empty() ? "" : "; the first tensor that is not finite is " + tensor));
}

std::string Trainer::first_bad_tensor(double scale) {
  FirstBad first;
  network_.watch(&first);
  uint64_t draw = state_.draws;
  for (size_t i = 0; i < used_ && first.name().empty(); ++i) network_.accumulate(held_[i].batch, scale, draw++);
  network_.watch(nullptr);
  return first.name();
}

LogLine Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  read_batches();
  LogLine line;
  line.step = state_.step + 1;
  for (size_t i = 0; i < used_; ++i) {
    line.targets += held_[i].batch.target_count;
    line.tokens += held_[i].batch.sequences * held_[i].batch.seqlen;
  }
  line.learning_rate = learning_rate(options_.schedule, line.step);
  line.loss_scale = scaler_.scale();
  network_.zero_gradients();
  const double scale = scaler_.scale() / static_cast<double>(std::max<int64_t>(line.targets, 1));
  uint64_t draw = state_.draws;
  if (tracker_) {
    tracker_->begin(line.step, scaler_.scale());
    network_.watch(tracker_);
  }
  for (size_t i = 0; i < used_; ++i) network_.pass(held_[i].batch, scale, draw++);
  network_.watch(nullptr);
  AdamW adam{line.learning_rate,    options_.beta1,     options_.beta2,      options_.epsilon,
             options_.weight_decay, state_.updates + 1, 1 / scaler_.scale(), options_.clip};
  UpdateResult update;
  if (line.targets > 0)
    update = network_.update(adam);
  else
    update.losses = network_.losses();
  line.logit_scale = update.losses.logit_scale;
  line.loss = update.losses.loss / static_cast<double>(line.targets);
  line.gradient_norm = update.gradient_norm;
  if (tracker_) {
    tracker_->see_logits(line.logit_scale, line.targets, network_.vocab_size());
    tracker_->see_gradients(network_);
    tracker_->end();
  }
  const bool fp16 = options_.dtype == DType::kF16;
  if (line.targets > 0 && !std::isfinite(line.loss) && !fp16) {
    const std::string weight = first_bad(network_, Flat::kMaster);
    stop("the loss is not a number", weight.empty() ? first_bad_tensor(scale) : "the weight '" + weight + "'");
  }
  if (!update.finite) {
    if (!scaler_.overflow()) {
      const std::string tensor = first_bad_tensor(scale);
      stop(fp16 ? "gradients overflow fp16 even without a loss scale; train in bf16 or with a smaller learning rate" : "a gradient is not finite",
           tensor.empty() ? "the gradient of '" + update.first_bad + "'" : tensor);
    }
    line.skipped = true;
  } else if (line.targets > 0) {
    ++state_.updates;
    scaler_.good();
  } else {
    line.skipped = true;
  }
  line.overflows = scaler_.state().overflows;
  state_.step = line.step;
  state_.draws = draw;
  state_.scaler = scaler_.state();
  state_.position = loader_.position();
  line.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return line;
}

Validation validate(Network& network, const std::vector<std::string>& paths, const LoaderOptions& options, int64_t batches) {
  LoaderOptions in_order = options;
  in_order.shuffle = false;
  Loader loader(paths, in_order);
  const int64_t all = loader.batches_an_epoch();
  Validation result;
  double sum = 0;
  for (int64_t i = 0; i < (batches > 0 ? std::min(batches, all) : all); ++i) {
    const LossSum part = network.evaluate(loader.next());
    sum += part.loss;
    result.targets += part.targets;
  }
  result.loss = sum / static_cast<double>(result.targets);
  return result;
}

}  // namespace fattn::gpt2
