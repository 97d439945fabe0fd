// The residual stream and its gradient are fp32; what products take and give besides is in the network's dtype. LayerNorms and activations are made
// again in the backward pass, with checkpoints a whole layer.
#include "gpt2/train/passes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gpt2/error.h"

namespace fattn::gpt2 {

Passes::Call Passes::take(const Batch& batch, bool drops, uint64_t draw) const {
  const NetworkOptions& o = plans_.options;
  if (batch.sequences < 1 || batch.sequences > o.sequences || batch.seqlen != o.seqlen)
    throw Error("a batch of " + std::to_string(batch.sequences) + " x " + std::to_string(batch.seqlen) + " tokens; this network was made for up to " +
                std::to_string(o.sequences) + " x " + std::to_string(o.seqlen));
  const int64_t given = batch.sequences * batch.seqlen, all = plans_.rows();
  const auto copy = [&](const int32_t* from, int32_t* to, int32_t rest) {
    std::copy(from, from + given, to);
    std::fill(to + given, to + all, rest);
  };
  copy(batch.ids, places_.ids, 0);
  copy(batch.targets, places_.targets, -1);
  copy(batch.positions, places_.positions, 0);
  if (batch.documents) copy(batch.documents, places_.documents, 0);
  return {batch.documents != nullptr, drops, draw};
}

// A draw has a stream for each head of each layer, one for the embedding, two a layer for the residual stream.
uint64_t Passes::first_stream(const Call& call) const {
  const auto layers = static_cast<uint64_t>(plans_.config.n_layer), heads = static_cast<uint64_t>(plans_.attention.streams());
  return call.draw * (layers * heads + 1 + 2 * layers);
}

void Passes::drop(const Call& call, DropPlace place, int64_t i, const float* x, const float* add, float* to) const {
  const uint64_t attention = static_cast<uint64_t>(plans_.config.n_layer * plans_.attention.streams());
  const uint64_t of_place = place == DropPlace::kEmbedding ? 0 : 2 * static_cast<uint64_t>(i) + (place == DropPlace::kAttention ? 1 : 2);
  plans_.dropout.execute({plans_.rows(), x, add, to, plans_.options.seed, first_stream(call) + attention + of_place}, places_.workspace);
}

TrainingAttention::Call Passes::attention(int64_t i, const Call& call) const {
  const NetworkPlans::Kept& k = kept(i);
  TrainingAttention::Call c;
  c.layer = i;
  c.qkv = k.qkv;
  c.o = k.o;
  c.lse = k.lse;
  c.documents = call.documents ? places_.documents : nullptr;
  c.drops = call.drops;
  c.seed = static_cast<int64_t>(plans_.options.seed);
  c.offset = static_cast<int64_t>(first_stream(call) + static_cast<uint64_t>(i * plans_.attention.streams()));
  c.workspace = attention_workspace_;
  return c;
}

void Passes::normalise(const float* x, const PairAt& at) const {
  plans_.norm.execute({plans_.rows(), const_cast<float*>(x), nullptr, nullptr, weight(at.weight), weight(at.bias), places_.normed},
                      places_.workspace);
}

// From dnormed; added to dx.
void Passes::normalise_back(const float* x, const PairAt& at) const {
  plans_.dnorm.execute({plans_.rows(), x, weight(at.weight), places_.dnormed, places_.dx, gradient(at.weight), gradient(at.bias)}, places_.workspace);
}

void Passes::add_linear(const LinearPlans& linear, const void* x, const PairAt& at, const float* before, float* to, const Call& call, DropPlace place,
                        int64_t i) const {
  const bool drops = call.drops;
  linear.forward.execute({plans_.rows(), x, weight(at.weight), weight(at.bias), drops ? nullptr : before, drops ? places_.dnormed : to},
                         places_.workspace);
  if (drops) drop(call, place, i, places_.dnormed, before, to);
}

void Passes::linear_gradients(const LinearPlans& linear, const void* x, const void* dy, const PairAt& at) const {
  float* dweight = gradient(at.weight);
  linear.dweight.execute({linear.dweight.problem().rows, x, dy, nullptr, dweight, dweight}, places_.workspace);
  linear.dbias.execute({plans_.rows(), dy, gradient(at.bias)}, places_.workspace);
}

void Passes::forward(const Call& call) const {
  const ParameterLayout& at = plans_.layout;
  const bool learned = plans_.config.positions == Positions::kLearned;
  float* x = places_.x[0];
  plans_.embedding.execute({plans_.rows(), places_.ids, places_.positions, weight(at.tokens()), learned ? weight(at.positions()) : nullptr, x},
                           places_.workspace);
  if (call.drops) drop(call, DropPlace::kEmbedding, 0, x, nullptr, x);
  show("embedding", SeenTensor::Kind::kResidual, DType::kF32, plans_.config.n_embd, x);
  for (int64_t i = 0; i < plans_.config.n_layer; ++i) {
    forward_layer(i, call);
    show_layer(i);
  }
}

void Passes::forward_layer(int64_t i, const Call& call) const {
  const LayerAt& at = plans_.layout.layer(i);
  const NetworkPlans::Kept& k = kept(i);
  const NetworkPlans::Places& p = places_;
  const int64_t rows = plans_.rows();
  const float* x = p.x[static_cast<size_t>(i)];
  normalise(x, at.ln_1);
  plans_.qkv.forward.execute({rows, p.normed, weight(at.qkv.weight), weight(at.qkv.bias), nullptr, k.qkv}, p.workspace);
  if (plans_.config.positions == Positions::kRotary) plans_.turn.execute({rows, k.qkv, p.positions}, p.workspace);
  plans_.attention.forward(attention(i, call));
  add_linear(plans_.attn_proj, k.o, at.attn_proj, x, k.middle, call, DropPlace::kAttention, i);
  normalise(k.middle, at.ln_2);
  plans_.fc.forward.execute({rows, p.normed, weight(at.fc.weight), weight(at.fc.bias), nullptr, k.inner}, p.workspace);
  plans_.activate.execute({rows, k.inner, p.activated}, p.workspace);
  add_linear(plans_.mlp_proj, p.activated, at.mlp_proj, k.middle, p.x[static_cast<size_t>(i) + 1], call, DropPlace::kMlp, i);
}

LossSum Passes::loss(double scale, bool gradient_too) const {
  const NetworkPlans::Places& p = places_;
  const int64_t rows = plans_.rows();
  normalise(p.x.back(), plans_.layout.last_norm());
  const int64_t head = plans_.layout.head();
  show("ln_f.out", SeenTensor::Kind::kActivation, plans_.options.dtype, plans_.config.n_embd, p.normed);
  plans_.loss.execute({rows, p.normed, weight(head), p.targets, p.loss, p.largest, scale, gradient_too ? p.dnormed : nullptr, gradient(head)},
                      p.workspace);
  show("loss", SeenTensor::Kind::kActivation, DType::kF32, 1, p.loss);
  LossSum sum;
  for (int64_t r = 0; r < rows; ++r) {
    if (p.targets[r] < 0) continue;
    sum.loss += p.loss[r];
    ++sum.targets;
    sum.logit_scale = std::max(sum.logit_scale, static_cast<double>(p.largest[r]));
    if (std::isnan(p.largest[r])) sum.logit_scale = NAN;  // which std::max keeps from then on
  }
  return sum;
}

void Passes::backward(const Call& call) const {
  const ParameterLayout& at = plans_.layout;
  const NetworkPlans::Places& p = places_;
  const int64_t rows = plans_.rows();
  std::memset(p.dx, 0, static_cast<size_t>(rows * plans_.config.n_embd) * sizeof(float));
  normalise_back(p.x.back(), at.last_norm());
  for (int64_t i = plans_.config.n_layer; i-- > 0;) backward_layer(i, call);
  if (call.drops) drop(call, DropPlace::kEmbedding, 0, p.dx, nullptr, p.dx);
  plans_.dembedding.execute({rows, p.ids, p.positions, p.dx, gradient(at.tokens()), gradient(at.positions())}, p.workspace);
}

void Passes::backward_layer(int64_t i, const Call& call) const {
  const LayerAt& at = plans_.layout.layer(i);
  const NetworkPlans::Kept& k = kept(i);
  const NetworkPlans::Places& p = places_;
  const int64_t rows = plans_.rows();
  // The last layer's are still there.
  if (plans_.options.checkpoint_activations && i + 1 < plans_.config.n_layer) forward_layer(i, call);

  // MLP: x[i + 1] = middle + drop(activated(LayerNorm(middle) W + b) W' + b').
  const float* dy = p.dx;
  if (call.drops) drop(call, DropPlace::kMlp, i, p.dx, nullptr, p.dnormed), dy = p.dnormed;
  plans_.mlp_proj.dx.execute({rows, dy, weight(at.mlp_proj.weight), nullptr, nullptr, p.dinner}, p.workspace);
  plans_.dactivate.execute({rows, k.inner, p.dinner, p.dinner, p.activated}, p.workspace);
  linear_gradients(plans_.mlp_proj, p.activated, dy, at.mlp_proj);
  show_gradient(i, ".mlp.inner", plans_.options.dtype, plans_.config.n_inner, p.dinner);
  normalise(k.middle, at.ln_2);
  linear_gradients(plans_.fc, p.normed, p.dinner, at.fc);
  plans_.fc.dx.execute({rows, p.dinner, weight(at.fc.weight), nullptr, nullptr, p.dnormed}, p.workspace);
  normalise_back(k.middle, at.ln_2);

  // Attention: middle = x[i] + drop(attention(LayerNorm(x[i]) W + b) W' + b').
  dy = p.dx;
  if (call.drops) drop(call, DropPlace::kAttention, i, p.dx, nullptr, p.dnormed), dy = p.dnormed;
  plans_.attn_proj.dx.execute({rows, dy, weight(at.attn_proj.weight), nullptr, nullptr, p.dout}, p.workspace);
  linear_gradients(plans_.attn_proj, k.o, dy, at.attn_proj);
  show_gradient(i, ".attn.out", plans_.options.dtype, plans_.config.n_embd, p.dout);
  plans_.attention.backward(attention(i, call), p.dout, p.dqkv);
  show_gradient(i, ".attn.qkv", plans_.options.dtype, plans_.config.qkv_width(), p.dqkv);
  if (plans_.config.positions == Positions::kRotary) plans_.turn_back.execute({rows, p.dqkv, p.positions}, p.workspace);
  const float* x = p.x[static_cast<size_t>(i)];
  normalise(x, at.ln_1);
  linear_gradients(plans_.qkv, p.normed, p.dqkv, at.qkv);
  plans_.qkv.dx.execute({rows, p.dqkv, weight(at.qkv.weight), nullptr, nullptr, p.dnormed}, p.workspace);
  normalise_back(x, at.ln_1);
  show_gradient(i, ".in", DType::kF32, plans_.config.n_embd, p.dx);
}

}  // namespace fattn::gpt2
