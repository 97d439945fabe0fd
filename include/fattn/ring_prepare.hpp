// How a RingPlan is made: checks, what ranks must agree on, its workspace. Programs include fattn/ring.hpp.
#pragma once

#include "fattn/ring_plan.hpp"
#include "fattn/ring_scores.hpp"

namespace fattn {

inline RingPlan::RingPlan(RingTransport& transport, const RingSequence& sequence, const Options& options, const detail::RingTensors& t)
    : transport_(&transport), options_(options), planned_(t), device_(t.q.device()), index_(t.q.device_index()), dtype_(t.q.dtype()) {
  // What is wrong here is told to all ranks, which would wait for this one.
  std::string wrong = "good";
  std::exception_ptr thrown;
  try {
    prepare(sequence, t);
  } catch (const std::exception& e) {
    wrong = e.what();
    thrown = std::current_exception();
  }
  if (sequence.agree) {
    try {
      detail::agree(transport, facts_of(sequence, t, wrong));
    } catch (const Error&) {
      if (!thrown) throw;
    }
  }
  if (thrown) std::rethrow_exception(thrown);
}

inline void RingPlan::prepare(const RingSequence& sequence, const detail::RingTensors& t) {
  const int rank = transport_->rank(), ranks = transport_->ranks();
  const RingBlocks made_for{static_cast<bool>(t.slopes), t.bias || t.mask || t.dbias || options_.p_dropout > 0};
  const auto schedule_of = [&](int r) {
    return ring_schedule(sequence, r, ranks, options_.causal, options_.window_left, options_.window_right, made_for);
  };
  schedule_ = schedule_of(rank);
  cu_seqlens_q_ = sequence.cu_seqlens_q;
  cu_seqlens_k_ = sequence.cu_seqlens_k;
  t.check(rank, ranks, schedule_.rows_q, schedule_.rows_k);
  t.check_scores(schedule_.rows_q, sequence.seqlen_k, !sequence.cu_seqlens_q.empty(), options_.p_dropout);
  if (dtype_ != DType::kF32 && dtype_ != DType::kF16 && dtype_ != DType::kBF16)
    throw Error(ErrorCode::kUnsupported, std::string("q is ") + name_of(dtype_) + "; ring attention in C++ takes fp32, fp16 and bf16");
  if (!sequence.cu_seqlens_q.empty() && t.q.shape(0) != 1)
    throw Error(ErrorCode::kInvalidArgument,
                "q has a batch of " + std::to_string(t.q.shape(0)) + " beside packed sequences (cu_seqlens_q); they are one batch entry: pass 1");
  if (ranks > 1 && (device_ != transport_->device() || (device_ == Device::kCuda && index_ != transport_->device_index())))
    throw Error(ErrorCode::kInvalidArgument,
                "q is not in the memory that the transport exchanges, which is that of " +
                    (transport_->device() == Device::kCuda ? "CUDA device " + std::to_string(transport_->device_index()) : std::string("the host")));
  batch_ = t.q.shape(0);
  nheads_ = t.q.shape(2);
  nheads_k_ = t.k.shape(2);
  headdim_ = t.q.shape(3);
  headdim_v_ = t.v.shape(3);
  part_dtype_ = device_ == Device::kCuda ? dtype_ : DType::kF32;
  starts_ = !writes_all_queries() || (!planned_.is_forward && t.dsinks);
  for (size_t h = 0; h < schedule_.hops.size(); ++h) {
    const RingHop& hop = schedule_.hops[h];
    starts_keys_.push_back(!writes_all_keys(h));
    most_received_ = std::max(most_received_, hop.rows_received);
    most_sent_ = std::max(most_sent_, hop.rows_sent);
    for (const RingBlock& b : hop.blocks) {
      merges_any_ = merges_any_ || merges(b);
      most_q_ = std::max(most_q_, b.q_rows);
      most_k_ = std::max(most_k_, b.k_rows);
    }
    // In which pieces its keys come: the sender's.
    pieces_.push_back(hop.rows_received == 0 ? std::vector<fattn_ring_range>{} : schedule_of(hop.receive_from).hops[h].sent);
  }
  lay_out();
  size_t most = 0;
  const auto plan = [&](const RingBlock& block, size_t hop) { most = std::max(most, call_of(t, block, hop).bytes); };
  if (starts_) plan(without_keys(), 0);
  for (size_t h = 0; h < schedule_.hops.size(); ++h) {
    if (!planned_.is_forward && starts_keys_[h]) plan(without_queries(h), h);
    for (const RingBlock& block : schedule_.hops[h].blocks) plan(block, h);
  }
  space_.plans = workspace_bytes_;
  workspace_bytes_ += most;
}

inline detail::RingFacts RingPlan::facts_of(const RingSequence& sequence, const detail::RingTensors& t, const std::string& wrong) const {
  const auto list = [](const std::vector<int64_t>& numbers) {  // how many, and a fingerprint (FNV-1a)
    uint64_t hash = 14695981039346656037u;
    for (const int64_t x : numbers) hash = (hash ^ static_cast<uint64_t>(x)) * 1099511628211u;
    return std::to_string(numbers.size()) + " numbers of fingerprint " + std::to_string(hash % 1000000007u);
  };
  const auto exact = [](double x) {
    char text[40];
    std::snprintf(text, sizeof text, "%.17g", x);
    return std::string(text);
  };
  const auto size = [](const Tensor& tensor, int i) { return std::to_string(i < tensor.ndim() ? tensor.shape(i) : 0); };
  return {{"arguments", wrong},
          {"pass", planned_.is_forward ? "forward" : "backward"},
          {"dtype", name_of(dtype_)},
          {"batch", size(t.q, 0)},
          {"nheads", size(t.q, 2)},
          {"nheads_k", size(t.k, 2)},
          {"headdim", size(t.q, 3)},
          {"headdim_v", size(t.v, 3)},
          {"seqlen_q", std::to_string(sequence.seqlen_q)},
          {"seqlen_k", std::to_string(sequence.seqlen_k)},
          {"layout", sequence.layout == RingLayout::kZigzag ? "zigzag" : "contiguous"},
          {"cu_seqlens_q", list(sequence.cu_seqlens_q)},
          {"cu_seqlens_k", list(sequence.cu_seqlens_k)},
          {"causal", options_.causal ? "true" : "false"},
          {"window_left", std::to_string(options_.window_left)},
          {"window_right", std::to_string(options_.window_right)},
          {"softcap", exact(options_.softcap)},
          {"softmax_scale", options_.softmax_scale ? exact(*options_.softmax_scale) : "that of headdim"},
          {"documents", t.document_q ? "given" : "absent"},
          {"sinks", t.sinks ? "given" : "absent"},
          {"p_dropout", exact(options_.p_dropout)},
          {"alibi_slopes", t.slopes ? std::to_string(t.slopes.ndim()) + " dimensions" : "absent"},
          {"bias", t.bias ? "given" : "absent"},
          {"mask", t.mask ? "given" : "absent"},
          {"dbias", t.dbias ? "given" : "absent"}};
}

inline void RingPlan::lay_out() {
  size_t used = 0;
  const auto take = [&](int64_t rows, int64_t width, DType dtype) {
    const size_t begin = used;
    used += (static_cast<size_t>(batch_ * rows * width) * size_of(dtype) + 255) / 256 * 256;
    return begin;
  };
  const bool short_dtype = dtype_ != DType::kF32;
  int64_t pad_q = 0, pad_k = 0;
  bool has_terms = false;
  const auto most_of = [&](const auto& tensor_of) {
    int64_t most = 0;
    for (const RingHop& hop : schedule_.hops)
      for (const RingBlock& b : hop.blocks) most = std::max(most, tensor_of(b));
    return most;
  };
  for (const RingHop& hop : schedule_.hops)
    for (const RingBlock& b : hop.blocks) {
      pad_q = std::max(pad_q, pads_of(b).rows);
      pad_k = std::max(pad_k, pads_of(b).keys);
      has_terms = has_terms || b.side != 0;
    }
  const auto take_bytes = [&](size_t bytes) {
    const size_t begin = used;
    used += (bytes + 255) / 256 * 256;
    return begin;
  };
  const int64_t width = nheads_ * headdim_, width_v = nheads_ * headdim_v_, width_k = nheads_k_ * headdim_, width_kv = nheads_k_ * headdim_v_;
  for (int slot = 0; slot < 2; ++slot) {
    space_.keys[slot] = take(most_received_, width_k, dtype_);
    space_.values[slot] = take(most_received_, width_kv, dtype_);
    space_.ids[slot] = take(planned_.document_q ? most_received_ : 0, 1, DType::kI32);
  }
  const int64_t rows = most_q_ + pad_q, keys_of_block = most_k_ + pad_k;
  space_.q_pad = take(pad_q > 0 ? rows : 0, width, dtype_);
  space_.k_pad = take(pad_k > 0 ? keys_of_block : 0, width_k, dtype_);
  space_.v_pad = take(pad_k > 0 ? keys_of_block : 0, width_kv, dtype_);
  space_.ids_q = take(pad_q > 0 && planned_.document_q ? rows : 0, 1, DType::kI32);
  space_.ids_k = take(pad_k > 0 && planned_.document_q ? keys_of_block : 0, 1, DType::kI32);
  space_.bias = take_bytes(sizeof(float) * static_cast<size_t>(most_of([&](const RingBlock& b) { return makes_bias(b) ? made_bias(b).size() : 0; })));
  space_.mask_rows = most_of([&](const RingBlock& b) { return makes_mask(b) && planned_.mask.size() > 0 ? b.q_row + b.q_rows : 0; });
  if (space_.mask_rows > 0) space_.mask = take_bytes(static_cast<size_t>(lay_out_mask()));
  if (planned_.is_forward) {
    space_.o = take(short_dtype ? schedule_.rows_q : 0, width_v, DType::kF32);
    space_.lse = take(schedule_.rows_q, nheads_, merges_any_ ? DType::kF64 : DType::kF32);
    space_.part = take(rows, width_v, DType::kF32);
    space_.lse_part = take(std::max(rows, starts_ ? schedule_.rows_q : 0), nheads_, DType::kF32);
  } else {
    space_.dq = take(short_dtype ? schedule_.rows_q : 0, width, DType::kF32);
    space_.dk = take(short_dtype ? schedule_.rows_k : 0, width_k, DType::kF32);
    space_.dv = take(short_dtype ? schedule_.rows_k : 0, width_kv, DType::kF32);
    space_.dq_part = take(std::max(rows, starts_ ? schedule_.rows_q : 0), width, part_dtype_);
    const int64_t keys = std::max(keys_of_block, std::max(most_received_, schedule_.rows_k));
    space_.dk_part = take(keys, width_k, part_dtype_);
    space_.dv_part = take(keys, width_kv, part_dtype_);
    for (int slot = 0; slot < 2; ++slot) {
      space_.dk_hop[slot] = take(most_received_, width_k, DType::kF32);
      space_.dv_hop[slot] = take(most_received_, width_kv, DType::kF32);
    }
    space_.dk_came = take(most_sent_, width_k, DType::kF32);
    space_.dv_came = take(most_sent_, width_kv, DType::kF32);
    space_.o_pad = take(pad_q > 0 ? rows : 0, width_v, dtype_);
    space_.dout_pad = take(pad_q > 0 ? rows : 0, width_v, dtype_);
    space_.lse_pad = take(pad_q > 0 || has_terms ? rows : 0, nheads_, DType::kF32);
    space_.dlse_pad = take(pad_q > 0 && planned_.dlse ? rows : 0, nheads_, DType::kF32);
    if (planned_.dbias) {
      space_.dbias = take_bytes(sizeof(float) * static_cast<size_t>(planned_.dbias.shape(2) == 1 ? planned_.dbias.size() : 0));
      space_.dbias_part = take_bytes(sizeof(float) * static_cast<size_t>(most_of([&](const RingBlock& b) { return dbias_of(b).size(); })));
    }
  }
  lay_out_tables(used);
  workspace_bytes_ = used;
}

}  // namespace fattn
