// Memory of a network, and its passes over a batch.
#include "gpt2/train/network.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "gpt2/error.h"
#include "gpt2/model/block.h"
#include "gpt2/train/passes.h"
#include "gpt2/train/plans.h"
#include "gpt2/weights/convert.h"

namespace fattn::gpt2 {

struct Network::State {
  State(const Config& config, const NetworkOptions& options, const Compute& compute)
      : plans(config, options, compute),
        master(plans.state_bytes(), "master weights"),
        gradients(plans.state_bytes(), "gradients"),
        first_moments(plans.state_bytes(), "moments"),
        second_moments(plans.state_bytes(), "moments"),
        arena(plans.arena_bytes(), "activations"),
        attention_workspace(plans.attention.workspace_bytes(), "attention's workspace") {
    if (plans.weight_bytes() > 0) weights = Block(plans.weight_bytes(), "weights");
    for (const Flat which : {Flat::kMaster, Flat::kGradient, Flat::kFirstMoment, Flat::kSecondMoment})
      std::memset(flat(which), 0, plans.state_bytes());
    plans.place(arena.at(0), places);
  }

  float* flat(Flat which) {
    const Block& block = which == Flat::kMaster        ? master
                         : which == Flat::kGradient    ? gradients
                         : which == Flat::kFirstMoment ? first_moments
                                                       : second_moments;
    return reinterpret_cast<float*>(block.at(0));
  }
  void write_weights() {
    if (plans.weight_bytes() > 0)
      convert(flat(Flat::kMaster), DType::kF32, weights.at(0), plans.options.dtype, static_cast<size_t>(plans.layout.size()));
  }
  Passes passes() {
    Passes passes(plans, places, plans.weight_bytes() > 0 ? weights.at(0) : master.at(0), flat(Flat::kGradient), attention_workspace.at(0));
    passes.watch(watcher);
    return passes;
  }

  const NetworkPlans plans;
  Block master, gradients, first_moments, second_moments, arena, attention_workspace, weights;
  NetworkPlans::Places places;
  PassWatcher* watcher = nullptr;
};

Network::Network(const Config& config, const Weights& weights, const NetworkOptions& options, const Compute& compute)
    : state_(std::make_unique<State>(config, options, compute)) {
  for (const Parameter& parameter : parameters()) {
    const Weight& from = weights.at(parameter.name);
    convert(from.data, from.dtype, state_->flat(Flat::kMaster) + parameter.offset, DType::kF32, static_cast<size_t>(parameter.size));
  }
  state_->write_weights();
}
Network::~Network() = default;

std::vector<TrainingMemory> Network::memory(const Config& config, const NetworkOptions& options, const Compute& compute) {
  return NetworkPlans(config, options, compute).memory();
}

void Network::zero_gradients() { std::memset(state_->flat(Flat::kGradient), 0, state_->plans.state_bytes()); }

LossSum Network::accumulate(const Batch& batch, double scale, uint64_t draw) {
  const Passes passes = state_->passes();
  const Passes::Call call = passes.take(batch, state_->plans.options.dropout > 0, draw);
  passes.forward(call);
  const LossSum sum = passes.loss(scale, true);
  passes.backward(call);
  return sum;
}

LossSum Network::evaluate(const Batch& batch) {
  const Passes passes = state_->passes();
  passes.forward(passes.take(batch, false, 0));
  return passes.loss(1, false);
}

void Network::watch(PassWatcher* watcher) { state_->watcher = watcher; }

UpdateResult Network::update(const AdamW& adam) {
  if (adam.step < 1) throw Error("step " + std::to_string(adam.step) + " of the optimizer; allowed: 1 and above");
  for (const auto& [name, beta] : {std::pair("beta1", adam.beta1), std::pair("beta2", adam.beta2)})
    if (!(beta >= 0 && beta < 1)) throw Error(std::string(name) + " is " + std::to_string(beta) + "; allowed: 0 and above, below 1");
  if (!std::isfinite(adam.learning_rate)) throw Error("the learning rate is not finite");
  const NetworkPlans& plans = state_->plans;
  float* gradients = state_->flat(Flat::kGradient);
  void* workspace = state_->places.workspace;
  const auto norm_of = [&](int64_t offset, int64_t size) {
    double sum = 0;
    plans.square_sum.execute({size, gradients + offset, &sum}, workspace);
    return std::sqrt(sum) * std::abs(adam.gradient_scale);
  };
  UpdateResult result;
  result.gradient_norm = norm_of(0, plans.layout.size());
  result.finite = std::isfinite(result.gradient_norm);
  if (!result.finite) {
    for (const Parameter& parameter : parameters())
      if (result.first_bad.empty() && !std::isfinite(norm_of(parameter.offset, parameter.size))) result.first_bad = parameter.name;
    return result;
  }
  double scale = adam.gradient_scale;
  if (adam.clip > 0) scale *= std::min(1.0, adam.clip / (result.gradient_norm + 1e-6));  // as torch's clip_grad_norm_
  const auto step = [&](int64_t offset, int64_t end, double decay) {
    std::byte* weights = plans.weight_bytes() > 0 ? state_->weights.at(static_cast<size_t>(offset) * size_of(plans.options.dtype)) : nullptr;
    plans.step.execute(
        {end - offset, gradients + offset, state_->flat(Flat::kMaster) + offset, state_->flat(Flat::kFirstMoment) + offset,
         state_->flat(Flat::kSecondMoment) + offset, weights, scale, adam.learning_rate, adam.beta1, adam.beta2, adam.epsilon, decay, adam.step},
        workspace);
  };
  step(0, plans.layout.decaying(), adam.weight_decay);
  step(plans.layout.decaying(), plans.layout.size(), 0);
  return result;
}

const std::vector<Parameter>& Network::parameters() const { return state_->plans.layout.parameters(); }
int64_t Network::flat_size() const { return state_->plans.layout.size(); }
int64_t Network::vocab_size() const { return state_->plans.config.vocab_size; }
const float* Network::flat(Flat which) { return state_->flat(which); }
void Network::restore(Flat which, const float* numbers) {
  std::memcpy(state_->flat(which), numbers, state_->plans.state_bytes());
  if (which == Flat::kMaster) state_->write_weights();
}

}  // namespace fattn::gpt2
