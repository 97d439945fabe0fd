// A model that learns: parameters, their gradients and moments, and the passes over a batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fattn/options.hpp"
#include "gpt2/config.h"
#include "gpt2/data/batch.h"
#include "gpt2/model/model.h"
#include "gpt2/train/context.h"
#include "gpt2/train/gradient_exchange.h"
#include "gpt2/train/watcher.h"
#include "gpt2/weights/weights.h"

namespace fattn::gpt2 {

struct NetworkOptions {
  DType dtype = DType::kF32;  // of weights as products read them, and of activations; sums, residual stream and gradients are fp32
  int64_t sequences = 1, seqlen = 1024;
  Algorithm algorithm = Algorithm::kAuto;
  bool checkpoint_activations = false;  // a layer's activations are computed again in the backward pass
  double dropout = 0;                   // of embedding, attention and residual alike
  uint64_t seed = 0;                    // of dropout
  bool graph = true;                    // on a GPU steps are captured once and replayed
  bool deterministic = true;            // attention on a GPU: the same bits on every run; all else gives them always
  Context context;                      // of several processes each has some rows of every sequence
};

// Its numbers lie at [offset, offset + size) of each flat array, row-major, in the shape that files have (tensors_of()).
struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset = 0, size = 0;
  bool decays = false;  // weight decay: matrices and embeddings, not biases and LayerNorm
};

enum class Flat { kMaster, kGradient, kFirstMoment, kSecondMoment };  // fp32, flat_size() numbers each

struct LossSum {
  double loss = 0;  // summed over targets that are not -1
  int64_t targets = 0;
  double logit_scale = 0;  // largest |logit| seen, for the stability report; NaN where one is not finite
};

// Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
struct AdamW {
  double learning_rate = 0, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1;
  int64_t step = 1;           // counts from 1
  double gradient_scale = 1;  // gradients are multiplied by it first (the inverse of a loss scale)
  double clip = 0;            // largest norm of all gradients together; 0: any
};

struct UpdateResult {
  LossSum losses;            // of the passes whose losses nobody has read before
  double gradient_norm = 0;  // after gradient_scale, before clipping
  bool finite = true;        // false: nothing was updated, because of a gradient, or of the losses
  std::string first_bad;     // the first parameter whose gradient is not finite; empty: none
};

struct TrainingMemory {
  std::string what;  // "weights", "master weights", "gradients", "moments", "activations" and so on
  size_t bytes = 0;
};

class Network {
 public:
  // Throws Error where sizes cannot be or memory is missing.
  Network(const Config& config, const Weights& weights, const NetworkOptions& options, const Compute& compute);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // What the constructor will allocate, before anything is.
  static std::vector<TrainingMemory> memory(const Config& config, const NetworkOptions& options, const Compute& compute);

  void zero_gradients();
  // Forward and backward pass; gradients of scale * (sum of losses) are added. `draw` numbers the passes of a training run: dropout depends on it.
  // With an exchange this is a step's last pass: gradients go to it as they become final, and are what it makes of them afterwards. On a GPU it
  // returns while the work is under way, with an exchange when that is done. Of sequences that several processes share each gives the whole batch,
  // and losses, targets and gradients are those of its own rows; all of them make the same calls.
  void pass(const Batch& batch, double scale, uint64_t draw, GradientExchange* exchange = nullptr);
  // Of the passes whose losses nobody has read yet.
  LossSum losses();
  // A pass, and its loss.
  LossSum accumulate(const Batch& batch, double scale, uint64_t draw);
  // Forward pass alone, without dropout.
  LossSum evaluate(const Batch& batch);
  // That this process has a part in: of sequences that several share, those of its own rows.
  int64_t targets(const Batch& batch) const;
  // Is shown what passes compute from now on, tensor by tensor, until it is null; it must outlive that.
  void watch(PassWatcher* watcher);
  UpdateResult update(const AdamW& adam);

  // Why steps are not replayed from a graph, though the options ask for it; empty: they are, or there is no GPU.
  const std::string& why_no_graph() const;

  const std::vector<Parameter>& parameters() const;
  int64_t flat_size() const;
  int64_t vocab_size() const;
  // In memory of the host, up to date; from a GPU a copy, valid until the next call.
  const float* flat(Flat which);
  // Replaces a whole array; of kMaster also the weights that products read.
  void restore(Flat which, const float* numbers);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fattn::gpt2
