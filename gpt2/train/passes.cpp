// The residual stream and its gradient are fp32; what products take and give besides is in the network's dtype. LayerNorms and activations are made
// again in the backward pass, with checkpoints a whole layer.
#include "gpt2/train/passes.h"

#include <algorithm>
#include <string>

#include "gpt2/error.h"

namespace fattn::gpt2 {

namespace {

// What operations on the host look at themselves.
void check_numbers(const char* what, const int32_t* numbers, int64_t count, int64_t least, int64_t end) {
  for (int64_t i = 0; i < count; ++i)
    if (numbers[i] < least || numbers[i] >= end)
      throw Error(std::string(what) + " " + std::to_string(numbers[i]) + " of row " + std::to_string(i) + "; allowed: " + std::to_string(least) +
                  " to " + std::to_string(end - 1));
}

}  // namespace

Passes::Call Passes::take(const Batch& batch, bool drops, uint64_t draw, double scale) const {
  const NetworkOptions& o = plans_.options;
  const Config& c = plans_.config;
  if (batch.sequences < 1 || batch.sequences > o.sequences || batch.seqlen != o.seqlen)
    throw Error("a batch of " + std::to_string(batch.sequences) + " x " + std::to_string(batch.seqlen) + " tokens; this network was made for up to " +
                std::to_string(o.sequences) + " x " + std::to_string(o.seqlen));
  const int64_t given = batch.sequences * batch.seqlen, all = plans_.rows();
  if (space_.on_gpu()) {
    check_numbers("token", batch.ids, given, 0, c.vocab_size);
    check_numbers("target", batch.targets, given, -1, c.vocab_size);
    check_numbers("position", batch.positions, given, 0, c.n_positions);
  }
  const ContextRows& held = plans_.attention.held();
  const int64_t taken = batch.sequences * held.count();  // rows of this process
  const auto copy = [&](const int32_t* from, int32_t* to, int32_t rest) {
    held.take(from, batch.sequences, to);
    std::fill(to + taken, to + all, rest);
  };
  copy(batch.ids, host_.ids, 0);
  copy(batch.targets, host_.targets, -1);
  copy(batch.positions, host_.positions, 0);
  if (batch.documents) copy(batch.documents, host_.documents, 0);
  // A draw has a stream for each head of each layer, one for the embedding, two a layer for the residual stream.
  const auto layers = static_cast<uint64_t>(c.n_layer), heads = static_cast<uint64_t>(plans_.attention.streams());
  const uint64_t first = draw * (layers * heads + 1 + 2 * layers);
  *host_.scale = scale;
  host_.dropout[0] = o.seed, host_.dropout[1] = first + layers * heads;
  for (uint64_t i = 0; i < layers; ++i) {
    host_.attention[2 * i] = static_cast<int64_t>(o.seed);
    host_.attention[2 * i + 1] = static_cast<int64_t>(first + i * heads);
  }
  if (plans_.places_rows()) held.places(o.sequences, host_.places);
  if (space_.on_gpu()) {
    const auto* begin = reinterpret_cast<const std::byte*>(host_.scale);
    const auto* end = reinterpret_cast<const std::byte*>(batch.documents ? host_.documents + all : host_.positions + all);
    space_.send(places_.in.scale, begin, static_cast<size_t>(end - begin));
  }
  return {batch.documents != nullptr, drops, std::count_if(host_.targets, host_.targets + taken, [](int32_t target) { return target >= 0; })};
}

void Passes::drop(DropPlace place, int64_t i, const float* x, const float* add, float* to) const {
  const uint64_t stream = place == DropPlace::kEmbedding ? 0 : 2 * static_cast<uint64_t>(i) + (place == DropPlace::kAttention ? 1 : 2);
  run(plans_.dropout, {plans_.rows(), x, add, to, 0, stream, places_.in.dropout, places_.in.places});
}

TrainingAttention::Call Passes::attention(int64_t i, const Call& call) const {
  const NetworkPlans::Kept& k = kept(i);
  TrainingAttention::Call c;
  c.layer = i;
  c.qkv = k.qkv;
  c.o = k.o;
  c.lse = k.lse;
  c.documents = call.documents ? places_.in.documents : nullptr;
  c.drops = call.drops;
  c.state = places_.in.attention + 2 * i;
  c.workspace = places_.attention_workspace;
  c.stream = space_.stream();
  return c;
}

void Passes::normalise(const float* x, const PairAt& at) const {
  run(plans_.norm, {plans_.rows(), const_cast<float*>(x), nullptr, nullptr, weight(at.weight), weight(at.bias), places_.normed});
}

// From dnormed; added to dx.
void Passes::normalise_back(const float* x, const PairAt& at) const {
  run(plans_.dnorm, {plans_.rows(), x, weight(at.weight), places_.dnormed, places_.dx, gradient(at.weight), gradient(at.bias), places_.dx_rounded});
}

void Passes::add_linear(const LinearPlans& linear, const void* x, const PairAt& at, const float* before, float* to, const Call& call, DropPlace place,
                        int64_t i) const {
  const bool drops = call.drops;
  run(linear.forward, {plans_.rows(), x, weight(at.weight), weight(at.bias), drops ? nullptr : before, drops ? places_.dnormed : to});
  if (drops) drop(place, i, places_.dnormed, before, to);
}

void Passes::linear_gradients(const LinearPlans& linear, const void* x, const void* dy, const PairAt& at) const {
  float* dweight = gradient(at.weight);
  run(linear.dweight, {linear.dweight.problem().rows, x, dy, nullptr, dweight, dweight});
  run(linear.dbias, {plans_.rows(), dy, gradient(at.bias)});
}

void Passes::forward(const Call& call) const {
  const ParameterLayout& at = plans_.layout;
  const bool learned = plans_.config.positions == Positions::kLearned;
  float* x = places_.x[0];
  run(plans_.embedding, {plans_.rows(), places_.in.ids, places_.in.positions, weight(at.tokens()), learned ? weight(at.positions()) : nullptr, x});
  if (call.drops) drop(DropPlace::kEmbedding, 0, x, nullptr, x);
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
  run(plans_.qkv.forward, {rows, p.normed, weight(at.qkv.weight), weight(at.qkv.bias), nullptr, k.qkv});
  if (plans_.config.positions == Positions::kRotary) run(plans_.turn, {rows, k.qkv, p.in.positions});
  plans_.attention.forward(attention(i, call));
  add_linear(plans_.attn_proj, k.o, at.attn_proj, x, k.middle, call, DropPlace::kAttention, i);
  normalise(k.middle, at.ln_2);
  run(plans_.fc.forward, {rows, p.normed, weight(at.fc.weight), weight(at.fc.bias), nullptr, k.inner});
  run(plans_.activate, {rows, k.inner, p.activated});
  add_linear(plans_.mlp_proj, p.activated, at.mlp_proj, k.middle, p.x[static_cast<size_t>(i) + 1], call, DropPlace::kMlp, i);
}

void Passes::loss(double* sums, bool gradient_too) const {
  const NetworkPlans::Places& p = places_;
  normalise(p.x.back(), plans_.layout.last_norm());
  show("ln_f.out", SeenTensor::Kind::kActivation, plans_.options.dtype, plans_.config.n_embd, p.normed);
  ops::CrossEntropyGradient::Buffers b{plans_.rows(), p.normed, weight(plans_.layout.head()), p.in.targets, p.loss, p.largest};
  if (gradient_too) b.dx = p.dnormed, b.dweight = gradient(plans_.layout.head());
  b.scale_at = p.in.scale;
  run(plans_.loss, b);
  run(plans_.loss_sums, {plans_.rows(), p.in.targets, p.loss, p.largest, sums});
  show("loss", SeenTensor::Kind::kActivation, DType::kF32, 1, p.loss);
}

void Passes::backward(const Call& call, GradientExchange* exchange) const {
  const ParameterLayout& at = plans_.layout;
  const NetworkPlans::Places& p = places_;
  const int64_t rows = plans_.rows();
  space_.zero(p.dx, static_cast<size_t>(rows * plans_.config.n_embd) * sizeof(float));
  normalise_back(p.x.back(), at.last_norm());
  const auto ready = [&](int64_t begin, int64_t end) {
    if (exchange) exchange->ready(places_.gradients, begin, end, space_.stream());
  };
  for (int64_t i = plans_.config.n_layer; i-- > 0;) {
    backward_layer(i, call);
    ready(at.matrices_begin(i), at.matrices_begin(i + 1));
  }
  if (call.drops) drop(DropPlace::kEmbedding, 0, p.dx, nullptr, p.dx);
  run(plans_.dembedding, {rows, p.in.ids, p.in.positions, p.dx, gradient(at.tokens()), gradient(at.positions())});
  ready(at.matrices_begin(plans_.config.n_layer), at.size());
  ready(0, at.matrices_begin(0));
  if (exchange) exchange->finish(space_.stream());
}

void Passes::backward_layer(int64_t i, const Call& call) const {
  const LayerAt& at = plans_.layout.layer(i);
  const NetworkPlans::Kept& k = kept(i);
  const NetworkPlans::Places& p = places_;
  const int64_t rows = plans_.rows();
  // The last layer's are still there.
  if (plans_.options.checkpoint_activations && i + 1 < plans_.config.n_layer) forward_layer(i, call);

  // MLP: x[i + 1] = middle + drop(activated(LayerNorm(middle) W + b) W' + b').
  const void *residual = plans_.rounds() ? static_cast<const void*>(p.dx_rounded) : p.dx, *dy = residual;
  if (call.drops) drop(DropPlace::kMlp, i, p.dx, nullptr, p.dnormed), dy = p.dnormed;
  run(plans_.mlp_proj.dx, {rows, dy, weight(at.mlp_proj.weight), nullptr, nullptr, p.dinner});
  run(plans_.dactivate, {rows, k.inner, p.dinner, p.dinner, p.activated});
  linear_gradients(plans_.mlp_proj, p.activated, dy, at.mlp_proj);
  show_gradient(i, ".mlp.inner", plans_.options.dtype, plans_.config.n_inner, p.dinner);
  normalise(k.middle, at.ln_2);
  linear_gradients(plans_.fc, p.normed, p.dinner, at.fc);
  run(plans_.fc.dx, {rows, p.dinner, weight(at.fc.weight), nullptr, nullptr, p.dnormed});
  normalise_back(k.middle, at.ln_2);

  // Attention: middle = x[i] + drop(attention(LayerNorm(x[i]) W + b) W' + b').
  dy = residual;
  if (call.drops) drop(DropPlace::kAttention, i, p.dx, nullptr, p.dnormed), dy = p.dnormed;
  run(plans_.attn_proj.dx, {rows, dy, weight(at.attn_proj.weight), nullptr, nullptr, p.dout});
  linear_gradients(plans_.attn_proj, k.o, dy, at.attn_proj);
  show_gradient(i, ".attn.out", plans_.options.dtype, plans_.config.n_embd, p.dout);
  plans_.attention.backward(attention(i, call), p.dout, p.dqkv);
  show_gradient(i, ".attn.qkv", plans_.options.dtype, plans_.config.qkv_width(), p.dqkv);
  if (plans_.config.positions == Positions::kRotary) run(plans_.turn_back, {rows, p.dqkv, p.in.positions});
  const float* x = p.x[static_cast<size_t>(i)];
  normalise(x, at.ln_1);
  linear_gradients(plans_.qkv, p.normed, p.dqkv, at.qkv);
  run(plans_.qkv.dx, {rows, p.dqkv, weight(at.qkv.weight), nullptr, nullptr, p.dnormed});
  normalise_back(x, at.ln_1);
  show_gradient(i, ".in", DType::kF32, plans_.config.n_embd, p.dx);
}

}  // namespace fattn::gpt2
