// Plans for all that a batch may be: with documents or without, with dropout (a step) or without (an evaluation).
#include "gpt2/train/attention.h"

#include <algorithm>
#include <cmath>

namespace fattn::gpt2 {
namespace {
constexpr size_t kAlignment = 256;  // of what lies behind each other in the workspace
}

TrainingAttention::TrainingAttention(const Config& config, const NetworkOptions& options, const Compute& compute)
    : config_(config),
      options_(options),
      gpu_(compute.gpu),
      held_(config, options.seqlen, options.context),
      transport_(options.context, compute.gpu ? Device::kCuda : Device::kCpu, compute.gpu.value_or(0)) {
  copying_.cpu_isa = compute.isa;
  copying_.num_threads = compute.threads;
  copying_.executor = compute.executor;
  fattn::Options wanted;
  wanted.backend = compute.gpu ? Backend::kCuda : compute.reference ? Backend::kReference : Backend::kCpu;
  wanted.algorithm = compute.reference ? Algorithm::kAuto : options.algorithm;
  wanted.cpu_isa = compute.reference ? Isa::kAuto : compute.isa;
  wanted.num_threads = compute.threads;
  wanted.executor = compute.executor;
  wanted.causal = config.causal;
  wanted.deterministic = options.deterministic;
  // Pointers are only of the tensors that a call has; a plan is of shapes.
  constexpr int64_t kState[2] = {};
  constexpr int32_t kDocuments = 0;
  for (const bool documents : {false, true})
    for (const bool drops : {false, true}) {
      if (drops && options.dropout == 0) continue;
      Plans& plans = plans_[documents][drops];
      Call call;
      call.documents = documents ? &kDocuments : nullptr;
      call.drops = drops;
      call.state = kState;
      wanted.p_dropout = drops ? options.dropout : 0;
      try {
        make(plans, call, wanted);
      } catch (const fattn::Error& error) {  // some algorithms know no documents, of which there may be none
        if (!documents || error.code() != ErrorCode::kUnsupported) throw;
        plans = {};
        plans.refused = error;
      }
    }
}

void TrainingAttention::make(Plans& plans, const Call& call, fattn::Options& wanted) {
  const int64_t scales = config_.scale_attn_by_inverse_layer_idx ? config_.n_layer : 1;
  for (int64_t i = 0; i < scales; ++i) {
    wanted.softmax_scale = (config_.scale_attn_weights ? 1 / std::sqrt(static_cast<double>(config_.headdim())) : 1.0) / static_cast<double>(i + 1);
    plans.forward.push_back(pass(forward_tensors(call), wanted));
    workspace_bytes_ = std::max(workspace_bytes_, plans.forward.back().workspace_bytes());
    if (options_.dropout > 0 && !call.drops) continue;  // an evaluation has no backward pass
    plans.backward.push_back(pass(backward_tensors(call, nullptr, nullptr), wanted));
    workspace_bytes_ = std::max(workspace_bytes_, plans.backward.back().workspace_bytes());
  }
  workspace_bytes_ = (workspace_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
}

template <class Tensors>
TrainingAttention::Pass TrainingAttention::pass(const Tensors& tensors, const fattn::Options& wanted) {
  if (!shares()) return {std::make_unique<Plan>(tensors, wanted), nullptr};
  return {nullptr, std::make_unique<RingPlan>(transport_, held_.sequence(), tensors, wanted)};
}

const TrainingAttention::Plans& TrainingAttention::plans_of(const Call& call) const {
  const Plans& plans = plans_[call.documents != nullptr][call.drops];
  if (plans.refused) throw fattn::Error(*plans.refused);
  return plans;
}

Tensor TrainingAttention::rows(const void* data, int64_t first_head, int64_t heads, int64_t width) const {
  const int64_t d = config_.headdim(), n = held_.count();
  const auto* begin = data ? static_cast<const std::byte*>(data) + first_head * d * static_cast<int64_t>(size_of(options_.dtype)) : nullptr;
  return placed({begin, options_.dtype, {options_.sequences, n, heads, d}, {n * width, width, d, 1}});
}

size_t TrainingAttention::packed_bytes() const {
  const auto bytes = static_cast<size_t>(options_.sequences * held_.count() * config_.kv_width()) * size_of(options_.dtype);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

Tensor TrainingAttention::packed(const Tensor& x, int which, const Call& call) const {
  if (!shares()) return x;
  std::byte* to = call.workspace ? static_cast<std::byte*>(call.workspace) + workspace_bytes_ + static_cast<size_t>(which) * packed_bytes() : nullptr;
  const Tensor copy = placed(Tensor(to, x.dtype(), {x.shape(0), x.shape(1), x.shape(2), x.shape(3)}));
  if (!to) return copy;
  RowOptions options = copying_;
  options.stream = call.stream;
  sum({x}, copy, options);
  return copy;
}

ScoreTensors TrainingAttention::scores(const Call& call) const {
  ScoreTensors s;
  if (call.documents) s.document_q = s.document_k = placed(Tensor(call.documents, DType::kI32, {options_.sequences, held_.count()}));
  if (call.drops) s.dropout_state = placed(Tensor(call.state, DType::kI64, {2}));
  return s;
}

ForwardTensors TrainingAttention::forward_tensors(const Call& call) const {
  const int64_t heads = config_.n_head, kv_heads = config_.n_kv_head, width = config_.qkv_width();
  ForwardTensors t;
  t.q = rows(call.qkv, 0, heads, width);
  t.k = packed(rows(call.qkv, heads, kv_heads, width), 0, call);
  t.v = packed(rows(call.qkv, heads + kv_heads, kv_heads, width), 1, call);
  t.o = rows(call.o, 0, heads, config_.n_embd);
  t.lse = placed(Tensor(call.lse, DType::kF32, {options_.sequences, heads, held_.count()}));
  t.scores = scores(call);
  return t;
}

BackwardTensors TrainingAttention::backward_tensors(const Call& call, const void* dout, void* dqkv) const {
  const ForwardTensors f = forward_tensors(call);  // copies k and v anew, where they travel
  const int64_t heads = config_.n_head, kv_heads = config_.n_kv_head, width = config_.qkv_width();
  BackwardTensors t;
  t.q = f.q, t.k = f.k, t.v = f.v, t.o = f.o, t.lse = f.lse, t.scores = f.scores;
  t.dout = rows(dout, 0, heads, config_.n_embd);
  t.dq = rows(dqkv, 0, heads, width);
  t.dk = rows(dqkv, heads, kv_heads, width);
  t.dv = rows(dqkv, heads + kv_heads, kv_heads, width);
  return t;
}

void TrainingAttention::forward(const Call& call) const {
  of(plans_of(call).forward, call.layer).execute(forward_tensors(call), call.workspace, workspace_bytes_, call.stream);
}

void TrainingAttention::backward(const Call& call, const void* dout, void* dqkv) const {
  of(plans_of(call).backward, call.layer).execute(backward_tensors(call, dout, dqkv), call.workspace, workspace_bytes_, call.stream);
}

}  // namespace fattn::gpt2
