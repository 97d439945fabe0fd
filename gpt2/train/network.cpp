// Memory of a network, and its passes over a batch. On a GPU all is in its memory and the host reads once a step: a pass and an update are captured
// in graphs at their second time and replayed from then on.
#include "gpt2/train/network.h"

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "gpt2/error.h"
#include "gpt2/model/block.h"
#include "gpt2/train/passes.h"
#include "gpt2/train/plans.h"
#include "gpt2/weights/convert.h"

namespace fattn::gpt2 {
namespace {

size_t total_of(const std::vector<TrainingMemory>& memory) {
  size_t total = 0;
  for (const TrainingMemory& part : memory) total += part.bytes;
  return total;
}

}  // namespace

struct Network::State {
  // Work that has a graph each.
  enum Kind { kPass, kPassOfDocuments, kEvaluation, kEvaluationOfDocuments, kUpdate };

  State(const Config& config, const NetworkOptions& options, const Compute& compute)
      : plans(config, options, compute), space(space_of(compute)), memory(total_of(plans.memory()), "training", space) {
    plans.place(memory.at(0), places);
    for (const Flat which : {Flat::kMaster, Flat::kGradient, Flat::kFirstMoment, Flat::kSecondMoment}) space.zero(flat(which), plans.state_bytes());
    space.zero(places.results, sizeof *places.results);
    host[0] = places.in;
    if (!space.on_gpu()) return;
    const size_t bytes = plans.place_inputs(nullptr, host[0]);
    pinned = cuda::HostBuffer(space.gpu(), 2 * bytes + sizeof(NetworkPlans::Results));
    for (size_t i = 0; i < 2; ++i) {
      plans.place_inputs(static_cast<std::byte*>(pinned.get()) + i * bytes, host[i]);
      sent.emplace_back(space.gpu());
      sent.back().record(space.stream());
    }
  }
  // Work may be on its way.
  ~State() {
    try {
      space.wait();
    } catch (...) {  // whoever asks the device next hears of it
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  float* flat(Flat which) const {
    return which == Flat::kMaster        ? places.master
           : which == Flat::kGradient    ? places.gradients
           : which == Flat::kFirstMoment ? places.first_moments
                                         : places.second_moments;
  }
  size_t numbers() const { return static_cast<size_t>(plans.layout.size()); }
  // The master weights in the dtype of products; `master` is memory of the host.
  void write_weights(const float* master) {
    if (plans.weight_bytes() == 0) return;
    if (!space.on_gpu()) {
      convert(master, DType::kF32, places.weights, plans.options.dtype, numbers());
      return;
    }
    const Block narrow(plans.weight_bytes(), "weights on their way");
    convert(master, DType::kF32, narrow.at(0), plans.options.dtype, numbers());
    space.upload(places.weights, narrow.at(0), plans.weight_bytes());
  }
  // Of a GPU: where arrays are read to.
  float* host_array() {
    if (copy.size() == 0) copy = Block(plans.state_bytes(), "a copy of an array");
    return reinterpret_cast<float*>(copy.at(0));
  }
  // The passes, and what they are told: on a GPU that is on its way while the host writes the next.
  Passes::Call take(const Batch& batch, bool drops, uint64_t draw, double scale) {
    if (!space.on_gpu()) return passes(host[0]).take(batch, drops, draw, scale);
    turn ^= 1;
    sent[turn].wait();
    const Passes::Call call = passes(host[turn]).take(batch, drops, draw, scale);
    sent[turn].record(space.stream());
    return call;
  }
  Passes passes(const NetworkPlans::Inputs& from) const {
    Passes passes(plans, places, from, space);
    passes.watch(watcher);
    return passes;
  }
  Passes passes() const { return passes(host[0]); }

  // `work`, or on a GPU from its second time on the graph of it.
  template <class Work>
  void run(Kind kind, const Work& work) {
    const bool exchanges = plans.options.context.ranks > 1 && kind != kUpdate;  // the host has a part in it
    if (!space.on_gpu() || !plans.options.graph || exchanges || !why_no_graph.empty() || watcher) return work();
    const auto [at, first] = graphs.try_emplace(kind);
    if (first) return work();  // what a number of rows needs besides is made now
    if (!at->second) {
      try {
        at->second.emplace(space.work(), work);
      } catch (const fattn::Error& error) {
        why_no_graph = error.what();
        graphs.clear();
        return work();
      }
    }
    at->second->launch(space.stream());
  }

  NetworkPlans::Results read(bool passes_too) {
    NetworkPlans::Results results;
    std::byte* room = space.on_gpu() ? reinterpret_cast<std::byte*>(host[1].documents + plans.rows()) : nullptr;
    space.download(room ? room : reinterpret_cast<std::byte*>(&results), places.results, sizeof results);
    if (room) std::memcpy(&results, room, sizeof results);
    if (passes_too) space.zero(places.results->passes, sizeof results.passes);
    return results;
  }
  LossSum taken(const double* sums) { return {sums[0], std::exchange(targets, 0), sums[1]}; }

  const NetworkPlans plans;
  const MemorySpace space;
  Block memory, copy;
  NetworkPlans::Places places;
  cuda::HostBuffer pinned;       // of a GPU
  NetworkPlans::Inputs host[2];  // where the host writes, on a GPU in turns
  std::vector<cuda::Event> sent;
  size_t turn = 0;
  int64_t targets = 0;  // of passes whose losses were not read
  std::map<Kind, std::optional<cuda::Graph>> graphs;
  std::array<double, 5> constants{};  // of the update's
  std::string why_no_graph;
  PassWatcher* watcher = nullptr;
};

Network::Network(const Config& config, const Weights& weights, const NetworkOptions& options, const Compute& compute)
    : state_(std::make_unique<State>(config, options, compute)) {
  float* master = state_->space.on_gpu() ? state_->host_array() : state_->places.master;
  std::memset(master, 0, state_->plans.state_bytes());
  for (const Parameter& parameter : parameters()) {
    const Weight& from = weights.at(parameter.name);
    convert(from.data, from.dtype, master + parameter.offset, DType::kF32, static_cast<size_t>(parameter.size));
  }
  if (state_->space.on_gpu()) state_->space.upload(state_->places.master, master, state_->plans.state_bytes());
  state_->write_weights(master);
}
Network::~Network() = default;

std::vector<TrainingMemory> Network::memory(const Config& config, const NetworkOptions& options, const Compute& compute) {
  return NetworkPlans(config, options, compute).memory();
}

void Network::zero_gradients() { state_->space.zero(state_->places.gradients, state_->plans.state_bytes()); }

void Network::pass(const Batch& batch, double scale, uint64_t draw, GradientExchange* exchange) {
  const Passes passes = state_->passes();
  const Passes::Call call = state_->take(batch, state_->plans.options.dropout > 0, draw, scale);
  const auto work = [&] {
    passes.forward(call);
    passes.loss(state_->places.results->passes, true);
    passes.backward(call, exchange);
  };
  if (exchange)  // the host has a part in it
    work();
  else
    state_->run(call.documents ? State::kPassOfDocuments : State::kPass, work);
  state_->targets += call.targets;
}

int64_t Network::targets(const Batch& batch) const { return state_->plans.attention.held().targets(batch.targets, batch.sequences); }

LossSum Network::losses() { return state_->taken(state_->read(true).passes); }

LossSum Network::accumulate(const Batch& batch, double scale, uint64_t draw) {
  pass(batch, scale, draw);
  return losses();
}

LossSum Network::evaluate(const Batch& batch) {
  const Passes passes = state_->passes();
  double* sums = state_->places.results->evaluation;
  const Passes::Call call = state_->take(batch, false, 0, 1);
  state_->run(call.documents ? State::kEvaluationOfDocuments : State::kEvaluation, [&] {
    state_->space.zero(sums, sizeof NetworkPlans::Results::evaluation);
    passes.forward(call);
    passes.loss(sums, false);
  });
  const NetworkPlans::Results results = state_->read(false);
  return {results.evaluation[0], call.targets, results.evaluation[1]};
}

void Network::watch(PassWatcher* watcher) { state_->watcher = watcher; }

UpdateResult Network::update(const AdamW& adam) {
  if (adam.step < 1) throw Error("step " + std::to_string(adam.step) + " of the optimizer; allowed: 1 and above");
  for (const auto& [name, beta] : {std::pair("beta1", adam.beta1), std::pair("beta2", adam.beta2)})
    if (!(beta >= 0 && beta < 1)) throw Error(std::string(name) + " is " + std::to_string(beta) + "; allowed: 0 and above, below 1");
  if (!std::isfinite(adam.learning_rate)) throw Error("the learning rate is not finite");
  const NetworkPlans& plans = state_->plans;
  const NetworkPlans::Places& places = state_->places;
  const MemorySpace& space = state_->space;
  *state_->host[0].update = {adam.gradient_scale, adam.learning_rate, adam.step};
  if (space.on_gpu()) space.send(places.in.update, state_->host[0].update, sizeof *places.in.update);
  double* square_sum = &places.results->square_sum;
  const auto step = [&](int64_t offset, int64_t end, double decay) {
    ops::AdamWStep::Buffers b{end - offset, places.gradients + offset, places.master + offset, places.first_moments + offset,
                              places.second_moments + offset};
    if (plans.weight_bytes() > 0) b.weight = places.weights + static_cast<size_t>(offset) * size_of(plans.options.dtype);
    b.beta1 = adam.beta1, b.beta2 = adam.beta2, b.epsilon = adam.epsilon, b.weight_decay = decay;
    b.changing = places.in.update;
    b.square_sum = square_sum;
    b.clip = adam.clip;
    plans.step.execute(b, places.workspace, space.stream());
  };
  // What a graph has in it is that of the first call.
  const std::array<double, 5> constants{adam.beta1, adam.beta2, adam.epsilon, adam.weight_decay, adam.clip};
  if (state_->constants != constants) state_->graphs.erase(State::kUpdate);
  state_->constants = constants;
  state_->run(State::kUpdate, [&] {
    plans.square_sum.execute({plans.layout.size(), places.gradients, square_sum, places.results->passes}, places.workspace, space.stream());
    step(0, plans.layout.decaying(), adam.weight_decay);
    step(plans.layout.decaying(), plans.layout.size(), 0);
  });
  const NetworkPlans::Results results = state_->read(true);
  UpdateResult result;
  result.losses = state_->taken(results.passes);
  result.gradient_norm = std::sqrt(results.square_sum) * std::abs(adam.gradient_scale);
  result.finite = std::isfinite(result.gradient_norm);
  for (const Parameter& parameter : parameters()) {
    if (result.finite || !result.first_bad.empty()) break;
    plans.square_sum.execute({parameter.size, places.gradients + parameter.offset, square_sum}, places.workspace, space.stream());
    if (!std::isfinite(state_->read(false).square_sum)) result.first_bad = parameter.name;
  }
  return result;
}

const std::vector<Parameter>& Network::parameters() const { return state_->plans.layout.parameters(); }
int64_t Network::flat_size() const { return state_->plans.layout.size(); }
int64_t Network::vocab_size() const { return state_->plans.config.vocab_size; }
const std::string& Network::why_no_graph() const { return state_->why_no_graph; }
const float* Network::flat(Flat which) {
  if (!state_->space.on_gpu()) return state_->flat(which);
  state_->space.download(state_->host_array(), state_->flat(which), state_->plans.state_bytes());
  return state_->host_array();
}
void Network::restore(Flat which, const float* numbers) {
  state_->space.upload(state_->flat(which), numbers, state_->plans.state_bytes());
  if (which == Flat::kMaster) state_->write_weights(numbers);
}

}  // namespace fattn::gpt2
