// Batches of a step are read first, because each one's gradients are divided by the targets of all.
#include "gpt2/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

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

Trainer::Trainer(Network& network, Loader& loader, const TrainOptions& options, const TrainState& state, Group* group,
                 std::function<bool()> asked_to_stop)
    : network_(network),
      loader_(loader),
      options_(options),
      state_(state),
      scaler_(state.step > 0 ? LossScaler(Precision(options.dtype).scales_loss(), state.scaler) : LossScaler(Precision(options.dtype).scales_loss())),
      group_(group),
      asked_to_stop_(std::move(asked_to_stop)) {
  if (options.accumulate % ranks() != 0)
    throw Error("a step of " + std::to_string(options.accumulate) + " batches cannot be shared by " + std::to_string(ranks()) + " processes");
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
  const LoaderPosition begin = loader_.position();
  batches_ = std::min(options_.accumulate, loader_.batches_an_epoch() - begin.batch);
  for (int64_t i = 0; i < options_.accumulate / ranks() && loader_.position().epoch == begin.epoch; ++i) {
    if (held_.size() == used_) held_.emplace_back();
    held_[used_++].hold(loader_.next());
  }
}

// Of all ranks: gradients are divided by them. Where ranks are at different steps, nothing that follows would be right.
void Trainer::agree_on_targets(LogLine& line) {
  line.tokens = batches_ * options_.sequences * options_.seqlen;
  for (size_t i = 0; i < used_; ++i) line.targets += held_[i].batch.target_count;
  if (!group_) return;
  say_step();
  const bool counts = group_->share().context_rank == 0;  // the others have the same batches
  const auto all = group_->all({static_cast<double>(line.step), counts ? static_cast<double>(line.targets) : 0.0});
  line.targets = 0;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != 2 || all[r][0] != static_cast<double>(line.step))
      throw Error("rank " + std::to_string(r) + " is at another step than " + std::to_string(line.step));
    line.targets += static_cast<int64_t>(all[r][1]);
  }
}

// Steps that make plans, or look at every tensor, may take long.
void Trainer::say_step() { group_->control().doing(warm_ && !tracker_ ? Doing::kStep : Doing::kPreparing, state_.step + 1); }

// A rank whose batch is padding has nothing to compute, but in the last pass, with which gradients are summed.
void Trainer::run_passes(double scale) {
  for (size_t i = 0; i < used_; ++i) {
    const int64_t number = static_cast<int64_t>(i) * ranks() + rank();
    GradientExchange* exchange = group_ && i + 1 == used_ ? &group_->gradients() : nullptr;
    if (group_) {
      group_->control().check();
      say_step();
    }
    if (tracker_) network_.watch(network_.targets(held_[i].batch) > 0 ? tracker_ : nullptr);  // gradients of no loss are 0
    if (number < batches_ || exchange) network_.pass(held_[i].batch, scale, state_.draws + static_cast<uint64_t>(number), exchange);
  }
}

// The losses of all ranks. Gradients are the same numbers on all of them; whether they are good must be, too.
void Trainer::add_losses_of_ranks(UpdateResult& update) {
  stops_ = asked_to_stop_ && asked_to_stop_();
  if (!group_) return;
  const auto all = group_->all({stops_ ? 1.0 : 0.0, update.losses.loss, update.losses.logit_scale, update.gradient_norm, update.finite ? 1.0 : 0.0});
  LossSum sum;
  size_t other = 0;  // a rank whose gradients are not those of rank 0
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != 5) throw Error("rank " + std::to_string(r) + " is at another place of the step than rank 0");
    stops_ = stops_ || all[r][0] != 0;
    sum.loss += all[r][1];
    if (!std::isnan(sum.logit_scale) && !(all[r][2] <= sum.logit_scale)) sum.logit_scale = all[r][2];  // NaN stays
    if (all[r][4] != all[0][4] || (all[r][4] != 0 && all[r][3] != all[0][3])) other = r;
  }
  if (other > 0 && (std::isfinite(sum.loss) || options_.dtype == DType::kF16))  // a loss that is no number has words of its own
    throw Error("the gradients of rank " + std::to_string(other) + " have the norm " + std::to_string(all[other][3]) + ", those of rank 0 " +
                std::to_string(all[0][3]) + ": what was summed over processes is not the same on all");
  sum.targets = update.losses.targets;
  update.losses = sum;
}

void Trainer::stop(const std::string& what, const std::string& tensor) const {
  throw NotANumber("step " + std::to_string(state_.step + 1) + ": " + what +
                   (tensor.empty() ? "" : "; the first tensor that is not finite is " + tensor));
}

std::string Trainer::first_bad_tensor(double scale) {
  FirstBad first;
  if (group_) group_->control().doing(Doing::kKeeping, state_.step + 1);
  network_.watch(&first);
  const bool all_take_part = group_ && group_->share().context_ranks > 1;  // in every pass, whatever one has found
  for (size_t i = 0; i < used_ && (all_take_part || first.name().empty()); ++i)
    network_.accumulate(held_[i].batch, scale, state_.draws + static_cast<uint64_t>(static_cast<int64_t>(i) * ranks() + rank()));
  network_.watch(nullptr);
  if (!group_) return first.name();
  const std::vector<std::string> all = group_->control().exchange(first.name());
  const auto found = std::find_if(all.begin(), all.end(), [](const std::string& name) { return !name.empty(); });
  return found == all.end() ? "" : *found + " of rank " + std::to_string(found - all.begin());
}

LogLine Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  read_batches();
  LogLine line;
  line.step = state_.step + 1;
  agree_on_targets(line);
  line.learning_rate = learning_rate(options_.schedule, line.step);
  line.loss_scale = scaler_.scale();
  network_.zero_gradients();
  const double scale = scaler_.scale() / static_cast<double>(std::max<int64_t>(line.targets, 1));
  if (tracker_) {
    tracker_->begin(line.step, scaler_.scale());
    network_.watch(tracker_);
  }
  run_passes(scale);
  network_.watch(nullptr);
  AdamW adam{line.learning_rate,    options_.beta1,     options_.beta2,      options_.epsilon,
             options_.weight_decay, state_.updates + 1, 1 / scaler_.scale(), options_.clip};
  UpdateResult update;
  if (line.targets > 0)
    update = network_.update(adam);
  else
    update.losses = network_.losses();
  add_losses_of_ranks(update);
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
  state_.draws += static_cast<uint64_t>(batches_);
  warm_ = true;
  state_.scaler = scaler_.state();
  state_.position = loader_.position();
  line.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return line;
}

Validation validate(Network& network, const std::vector<std::string>& paths, const LoaderOptions& options, int64_t batches, Group* group) {
  LoaderOptions in_order = options;
  in_order.shuffle = false;
  Loader loader(paths, in_order);
  const int64_t all = batches > 0 ? std::min(batches, loader.batches_an_epoch()) : loader.batches_an_epoch();
  std::vector<double> mine;
  for (int64_t i = options.rank; i < all; i += options.ranks) {
    if (group) group->control().check();
    const LossSum part = network.evaluate(loader.next());
    mine.insert(mine.end(), {part.loss, static_cast<double>(part.targets)});
  }
  const std::vector<std::vector<double>> parts = group ? group->all(mine) : std::vector<std::vector<double>>{mine};
  const int64_t rows_of = group ? group->share().context_ranks : 1;  // processes that have parts of a batch
  Validation result;
  double sum = 0;
  for (int64_t i = 0; i < all; ++i)  // in the order of one process, which gives the same bits
    for (int64_t c = 0; c < rows_of; ++c) {
      const std::vector<double>& part = parts.at(static_cast<size_t>(i % options.ranks * rows_of + c));
      const size_t at = 2 * static_cast<size_t>(i / options.ranks);
      sum += part.at(at);
      result.targets += static_cast<int64_t>(part.at(at + 1));
    }
  result.loss = sum / static_cast<double>(result.targets);
  return result;
}

}  // namespace fattn::gpt2
