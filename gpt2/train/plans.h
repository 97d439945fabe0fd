// The plans of a network's passes, and what it will take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpt2/train/attention.h"
#include "gpt2/train/network.h"
#include "gpt2/train/parameters.h"
#include "ops/training.h"

namespace fattn::gpt2 {

// Of a linear layer: y = x W + b, and the gradients of x and W; W is (in, out).
struct LinearPlans {
  ops::Plan<ops::Product> forward, dx, dweight;
  ops::Plan<ops::ColumnSums> dbias;
};

struct NetworkPlans {
  NetworkPlans(const Config& config, const NetworkOptions& options, const Compute& compute);

  int64_t rows() const { return options.sequences * attention.held().count(); }              // of this process
  size_t state_bytes() const { return static_cast<size_t>(layout.size()) * sizeof(float); }  // of one of the flat arrays
  // On a GPU the products of a gradient of the residual stream take it rounded: LayerNorm's gradient leaves it so, unless dropout comes between.
  bool rounds() const { return on_gpu && options.dtype != DType::kF32 && options.dropout == 0; }
  // Whether dropout is told which rows of a batch this process has.
  bool places_rows() const { return options.dropout > 0 && options.context.ranks > 1; }
  size_t weight_bytes() const;  // 0 in fp32: the master weights are read
  std::vector<TrainingMemory> memory() const;

  const Config config;
  const NetworkOptions options;
  const bool on_gpu;
  const ParameterLayout layout;
  TrainingAttention attention;
  ops::Plan<ops::SquareSum> square_sum;
  ops::Plan<ops::LossSums> loss_sums;
  ops::Plan<ops::Embedding> embedding;
  ops::Plan<ops::LayerNorm> norm;
  LinearPlans qkv, attn_proj, fc, mlp_proj;
  ops::Plan<ops::Rotary> turn, turn_back;
  ops::Plan<ops::Activate> activate;
  ops::Plan<ops::Dropout> dropout;
  ops::Plan<ops::CrossEntropyGradient> loss;
  ops::Plan<ops::ActivationGradient> dactivate;
  ops::Plan<ops::LayerNormGradient> dnorm;
  ops::Plan<ops::EmbeddingGradient> dembedding;
  ops::Plan<ops::AdamWStep> step;
  size_t workspace = 0;  // of all operations but attention

  // What a layer keeps for its backward pass.
  struct Kept {
    float* middle = nullptr;  // the residual stream between attention and MLP
    std::byte *qkv = nullptr, *o = nullptr, *inner = nullptr;
    float* lse = nullptr;
  };
  // What the host says of a pass, for operations to read.
  struct Inputs {
    double* scale = nullptr;       // of the loss
    uint64_t* dropout = nullptr;   // seed, and the pass's first stream
    int64_t* attention = nullptr;  // of each layer: seed and offset
    int32_t* places = nullptr;     // of rows among those of the batch, where dropout draws numbers; null: they are all of them, or nothing is dropped
    int32_t *ids = nullptr, *targets = nullptr, *positions = nullptr, *documents = nullptr;
    ops::AdamWStep::Changing* update = nullptr;
  };
  // What the host hears: of all passes since it was read last, of an evaluation, of the gradients.
  struct Results {
    double passes[2] = {}, evaluation[2] = {};  // the sum of losses, the largest logit
    double square_sum = 0;
  };
  // Where all that is computed lies in the memory of the device.
  struct Places {
    float *master = nullptr, *gradients = nullptr, *first_moments = nullptr, *second_moments = nullptr;
    std::byte* weights = nullptr;  // as products read them; in fp32 the master weights
    std::vector<float*> x;         // the residual stream before each layer, and behind the last
    std::vector<Kept> kept;        // of each layer; with checkpoints one for all
    std::byte *normed = nullptr, *activated = nullptr, *dinner = nullptr, *dqkv = nullptr, *dout = nullptr;
    float *dx = nullptr, *dnormed = nullptr;  // dnormed: also a product before it is dropped
    std::byte* dx_rounded = nullptr;          // null: there is none
    float *loss = nullptr, *largest = nullptr;
    std::byte *workspace = nullptr, *attention_workspace = nullptr;
    std::byte* inputs = nullptr;
    Inputs in;
    Results* results = nullptr;
  };
  // `memory` null: nothing but what each part takes, which is returned.
  std::vector<TrainingMemory> place(std::byte* memory, Places& places) const;
  // `begin` null: nothing but their size, which is returned.
  size_t place_inputs(std::byte* begin, Inputs& in) const;
};

}  // namespace fattn::gpt2
