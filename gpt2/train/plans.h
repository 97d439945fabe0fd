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

  int64_t rows() const { return options.sequences * options.seqlen; }
  size_t state_bytes() const { return static_cast<size_t>(layout.size()) * sizeof(float); }  // of one of the flat arrays
  size_t weight_bytes() const;                                                               // 0 in fp32: the master weights are read
  size_t arena_bytes() const;
  std::vector<TrainingMemory> memory() const;

  const Config config;
  const NetworkOptions options;
  const ParameterLayout layout;
  ops::Plan<ops::SquareSum> square_sum;
  TrainingAttention attention;
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
  // Where all that is computed lies in the arena.
  struct Places {
    std::vector<float*> x;   // the residual stream before each layer, and behind the last
    std::vector<Kept> kept;  // of each layer; with checkpoints one for all
    std::byte *normed = nullptr, *activated = nullptr, *dinner = nullptr, *dqkv = nullptr, *dout = nullptr;
    float *dx = nullptr, *dnormed = nullptr;  // dnormed: also a product before it is dropped
    float *loss = nullptr, *largest = nullptr;
    int32_t *ids = nullptr, *targets = nullptr, *positions = nullptr, *documents = nullptr;
    std::byte* workspace = nullptr;
  };
  // `arena` null: nothing but the size, which is returned.
  size_t place(std::byte* arena, Places& places) const;
};

}  // namespace fattn::gpt2
