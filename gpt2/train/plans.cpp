// Every plan is for the whole batch: a shorter one is filled with rows that have no loss.
#include "gpt2/train/plans.h"

#include <algorithm>

#include "fattn/error.hpp"
#include "gpt2/error.h"
#include "gpt2/model/block.h"
#include "gpt2/train/precision.h"

namespace fattn::gpt2 {
namespace {

NetworkOptions checked(const Config& c, const NetworkOptions& o) {
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

// `x` and `y`: dtypes of input and output; the gradient of the output has `dy`, that of the input `dx`.
LinearPlans linear(int64_t rows, int64_t in, int64_t out, DType x, DType y, DType dy, DType dx, const Precision& precision,
                   const ops::Device& device) {
  const DType weight = precision.stored(Role::kWeights);
  return {{{rows, out, in, false, false, x, weight, y}, device},
          {{rows, in, out, false, true, dy, weight, dx}, device},
          {{in, out, rows, true, false, x, dy, precision.stored(Role::kGradients)}, device},
          {{rows, out, dy}, device}};
}

}  // namespace

NetworkPlans::NetworkPlans(const Config& c, const NetworkOptions& o, const Compute& compute)
    : config(c),
      options(checked(c, o)),
      on_gpu(compute.gpu.has_value()),
      layout(c),
      attention(c, o, compute),
      square_sum({layout.size()}, device_of(compute)),
      loss_sums({rows()}, device_of(compute)) {
  const ops::Device device = device_of(compute);
  const int64_t n = rows(), width = c.n_embd;
  const Precision precision(o.dtype);
  for (const PrecisionRule& rule : precision.rules())
    if (rule.fixed && rule.stored != DType::kF32) throw Error(std::string("operations have ") + rule.name + " in fp32 alone");
  const DType dtype = precision.stored(Role::kWeights), heads = precision.stored(Role::kQkv), inner = precision.stored(Role::kMlp),
              stream = precision.stored(Role::kResidual);
  const DType dstream = rounds() ? precision.stored(Role::kActivationGradients) : stream;  // as products read the gradient of the stream
  const bool learned = c.positions == Positions::kLearned;
  embedding = {{n, width, c.vocab_size, learned ? c.n_positions : 0, precision.stored(Role::kEmbeddings)}, device};
  norm = {{n, width, c.layer_norm_epsilon, dtype}, device};
  qkv = linear(n, width, c.qkv_width(), dtype, heads, heads, stream, precision, device);
  attn_proj = linear(n, width, width, heads, stream, dstream, heads, precision, device);
  fc = linear(n, width, c.n_inner, dtype, inner, inner, stream, precision, device);
  mlp_proj = linear(n, c.n_inner, width, inner, stream, dstream, inner, precision, device);
  activate = {{n, c.n_inner, inner, activation_of(c)}, device};
  dactivate = {{n, c.n_inner, inner, activation_of(c)}, device};
  loss = {{n, width, c.vocab_size, dtype, c.padded_vocab()}, device};
  dnorm = {{n, width, c.layer_norm_epsilon, dtype}, device};
  dembedding = {{n, width, c.vocab_size, learned ? c.n_positions : 0}, device};
  step = {{layout.size(), dtype}, device};
  const auto note = [&](const auto&... plans) { workspace = std::max({workspace, plans.workspace_bytes()...}); };
  for (const LinearPlans* l : {&qkv, &attn_proj, &fc, &mlp_proj}) note(l->forward, l->dx, l->dweight, l->dbias);
  note(square_sum, loss_sums, embedding, norm, activate, dactivate, loss, dnorm, dembedding, step);
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

size_t NetworkPlans::place_inputs(std::byte* begin, Inputs& in) const {
  BlockLayout blocks;
  const auto take = [&](auto*& to, int64_t count) {
    const size_t at = blocks.add(static_cast<size_t>(count) * sizeof *to);
    if (begin) to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(begin + at);
  };
  take(in.update, 1);
  take(in.scale, 1);
  take(in.dropout, 2);
  take(in.attention, 2 * config.n_layer);
  if (places_rows()) take(in.places, rows());
  for (int32_t** numbers : {&in.ids, &in.targets, &in.positions, &in.documents}) take(*numbers, rows());
  return blocks.total();
}

std::vector<TrainingMemory> NetworkPlans::place(std::byte* memory, Places& p) const {
  BlockLayout blocks;
  std::vector<TrainingMemory> parts;
  const auto part = [&](const char* what) {
    size_t before = 0;
    for (const TrainingMemory& use : parts) before += use.bytes;
    parts.push_back({what, blocks.total() - before});
  };
  const auto put = [&](auto*& to, size_t bytes) {
    const size_t at = blocks.add(bytes, BlockLayout::kWorkspace);
    if (memory) to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(memory + at);
  };
  const auto take = [&](auto*& to, int64_t width, size_t element) {
    size_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(rows()), static_cast<size_t>(width), &bytes) || __builtin_mul_overflow(bytes, element, &bytes))
      throw Error("a batch needs more bytes than 64-bit numbers count; use fewer or shorter sequences");
    const size_t at = blocks.add(bytes);
    if (memory) to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(memory + at);
  };
  const Config& c = config;
  const size_t size = size_of(options.dtype), f32 = sizeof(float);
  if (weight_bytes() > 0) put(p.weights, weight_bytes());
  part("weights");
  put(p.master, state_bytes());
  if (weight_bytes() == 0) p.weights = reinterpret_cast<std::byte*>(p.master);
  part("master weights");
  put(p.gradients, state_bytes());
  part("gradients");
  put(p.first_moments, state_bytes());
  put(p.second_moments, state_bytes());
  part("moments");
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
  if (rounds()) take(p.dx_rounded, c.n_embd, size);
  for (float** numbers : {&p.loss, &p.largest}) take(*numbers, 1, f32);
  put(p.inputs, place_inputs(nullptr, p.in));
  if (memory) place_inputs(p.inputs, p.in);
  put(p.results, sizeof(Results));
  part("activations");
  put(p.workspace, workspace);
  part("workspace of operations");
  put(p.attention_workspace, attention.workspace_bytes());
  part("attention workspace");
  const size_t taken = Block::taken(blocks.total());
  parts.push_back({"rounding to large pages", taken - blocks.total()});
  return parts;
}

std::vector<TrainingMemory> NetworkPlans::memory() const {
  Places places;
  return place(nullptr, places);
}

}  // namespace fattn::gpt2
