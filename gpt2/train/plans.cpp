// Every plan is for the whole batch: a shorter one is filled with rows that have no loss.
#include "gpt2/train/plans.h"

#include <algorithm>

#include "fattn/error.hpp"
#include "gpt2/error.h"
#include "gpt2/model/block.h"
#include "gpt2/train/precision.h"

namespace fattn::gpt2 {
namespace {

NetworkOptions checked(const Config& c, const NetworkOptions& o, const Compute& compute) {
  if (compute.gpu)
    throw fattn::Error(ErrorCode::kUnsupported, "training runs on the CPU in this version, not on a GPU; choose the CPU (`--device cpu`)");
  if (o.dtype != DType::kF32 && o.dtype != DType::kF16 && o.dtype != DType::kBF16) throw Error("training is in fp32, fp16 or bf16");
  if (o.sequences < 1) throw Error("a batch of " + std::to_string(o.sequences) + " sequences; allowed: 1 and above");
  if (o.seqlen < 1 || o.seqlen > c.n_positions)
    throw Error("sequences of " + std::to_string(o.seqlen) + " tokens; the model has positions for 1 to " + std::to_string(c.n_positions));
  constexpr int64_t kMost = int64_t{1} << 31;
  if (o.sequences >= kMost / o.seqlen) throw Error("a batch exceeds 2^31 - 1 tokens; use fewer or shorter sequences");
  if (!(o.dropout >= 0 && o.dropout <= 0.9999)) throw Error("dropout of " + std::to_string(o.dropout) + "; allowed: 0 (none) to 0.9999");
  return o;
}

ops::Activation activation_of(const Config& c) { return c.activation == Activation::kGeluTanh ? ops::Activation::kGeluTanh : ops::Activation::kGelu; }

// `x` and `y`: dtypes of input and output; the gradient of the output has `y` too, that of the input `dx`.
LinearPlans linear(int64_t rows, int64_t in, int64_t out, DType x, DType y, DType dx, const Precision& precision, const ops::Device& device) {
  const DType weight = precision.stored(Role::kWeights);
  return {{{rows, out, in, false, false, x, weight, y}, device},
          {{rows, in, out, false, true, y, weight, dx}, device},
          {{in, out, rows, true, false, x, y, precision.stored(Role::kGradients)}, device},
          {{rows, out, y}, device}};
}

}  // namespace

NetworkPlans::NetworkPlans(const Config& c, const NetworkOptions& o, const Compute& compute)
    : config(c), options(checked(c, o, compute)), layout(c), square_sum({layout.size()}, device_of(compute)), attention(c, o, compute) {
  const ops::Device device = device_of(compute);
  const int64_t n = rows(), width = c.n_embd;
  const Precision precision(o.dtype);
  for (const PrecisionRule& rule : precision.rules())
    if (rule.fixed && rule.stored != DType::kF32) throw Error(std::string("operations have ") + rule.name + " in fp32 alone");
  const DType dtype = precision.stored(Role::kWeights), heads = precision.stored(Role::kQkv), inner = precision.stored(Role::kMlp),
              stream = precision.stored(Role::kResidual);
  const bool learned = c.positions == Positions::kLearned;
  embedding = {{n, width, c.vocab_size, learned ? c.n_positions : 0, precision.stored(Role::kEmbeddings)}, device};
  norm = {{n, width, c.layer_norm_epsilon, dtype}, device};
  qkv = linear(n, width, c.qkv_width(), dtype, heads, stream, precision, device);
  attn_proj = linear(n, width, width, heads, stream, heads, precision, device);
  fc = linear(n, width, c.n_inner, dtype, inner, stream, precision, device);
  mlp_proj = linear(n, c.n_inner, width, inner, stream, inner, precision, device);
  activate = {{n, c.n_inner, inner, activation_of(c)}, device};
  dactivate = {{n, c.n_inner, inner, activation_of(c)}, device};
  loss = {{n, width, c.vocab_size, dtype}, device};
  dnorm = {{n, width, c.layer_norm_epsilon, dtype}, device};
  dembedding = {{n, width, c.vocab_size, learned ? c.n_positions : 0}, device};
  step = {{layout.size(), dtype}, device};
  const auto note = [&](const auto&... plans) { workspace = std::max({workspace, plans.workspace_bytes()...}); };
  for (const LinearPlans* l : {&qkv, &attn_proj, &fc, &mlp_proj}) note(l->forward, l->dx, l->dweight, l->dbias);
  note(square_sum, embedding, norm, activate, dactivate, loss, dnorm, dembedding, step);
  if (!learned) {
    ops::Rotary rotary{n, c.n_head + c.n_kv_head, c.headdim(), c.qkv_width(), heads, c.rope_theta};
    turn = {rotary, device};
    rotary.back = true;
    turn_back = {rotary, device};
    note(turn, turn_back);
  }
  if (o.dropout > 0) {
    dropout = {{n, width, o.dropout}, device};
    note(dropout);
  }
}

size_t NetworkPlans::weight_bytes() const { return options.dtype == DType::kF32 ? 0 : static_cast<size_t>(layout.size()) * size_of(options.dtype); }

size_t NetworkPlans::place(std::byte* arena, Places& p) const {
  BlockLayout blocks;
  const auto take = [&](auto*& to, int64_t width, size_t element) {
    size_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(rows()), static_cast<size_t>(width), &bytes) || __builtin_mul_overflow(bytes, element, &bytes))
      throw Error("a batch needs more bytes than 64-bit numbers count; use fewer or shorter sequences");
    const size_t at = blocks.add(bytes);
    if (arena) to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(arena + at);
  };
  const Config& c = config;
  const size_t size = size_of(options.dtype), f32 = sizeof(float);
  p.x.resize(static_cast<size_t>(c.n_layer) + 1);
  for (float*& x : p.x) take(x, c.n_embd, f32);
  p.kept.resize(options.checkpoint_activations ? 1 : static_cast<size_t>(c.n_layer));
  for (Kept& kept : p.kept) {
    take(kept.middle, c.n_embd, f32);
    take(kept.qkv, c.qkv_width(), size);
    take(kept.o, c.n_embd, size);
    take(kept.lse, c.n_head, f32);
    take(kept.inner, c.n_inner, size);
  }
  take(p.normed, c.n_embd, size);
  take(p.activated, c.n_inner, size);
  take(p.dinner, c.n_inner, size);
  take(p.dqkv, c.qkv_width(), size);
  take(p.dout, c.n_embd, size);
  take(p.dx, c.n_embd, f32);
  take(p.dnormed, c.n_embd, f32);
  for (float** numbers : {&p.loss, &p.largest}) take(*numbers, 1, f32);
  for (int32_t** numbers : {&p.ids, &p.targets, &p.positions, &p.documents}) take(*numbers, 1, sizeof(int32_t));
  const size_t at = blocks.add(workspace, BlockLayout::kWorkspace);
  if (arena) p.workspace = arena + at;
  return blocks.total();
}

size_t NetworkPlans::arena_bytes() const {
  Places places;
  return place(nullptr, places);
}

std::vector<TrainingMemory> NetworkPlans::memory() const {
  const size_t state = Block::taken(state_bytes());
  return {{"weights", weight_bytes() > 0 ? Block::taken(weight_bytes()) : 0},
          {"master weights", state},
          {"gradients", state},
          {"moments", 2 * state},
          {"activations", Block::taken(arena_bytes())},
          {"attention workspace", Block::taken(attention.workspace_bytes())}};
}

}  // namespace fattn::gpt2
