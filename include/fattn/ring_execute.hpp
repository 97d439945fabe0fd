// What a RingPlan does: its plans of blocks, its passes, and what travels. Programs include fattn/ring.hpp.
#pragma once

#include "fattn/ring_plan.hpp"

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
  const auto schedule_of = [&](int r) { return ring_schedule(sequence, r, ranks, options_.causal, options_.window_left, options_.window_right); };
  schedule_ = schedule_of(rank);
  t.check(rank, ranks, schedule_.rows_q, schedule_.rows_k);
  if (dtype_ != DType::kF32 && dtype_ != DType::kF16 && dtype_ != DType::kBF16)
    throw Error(ErrorCode::kUnsupported, std::string("q is ") + name_of(dtype_) + "; ring attention in C++ takes fp32, fp16 and bf16");
  if (options_.p_dropout > 0)
    throw Error(ErrorCode::kUnsupported,
                "p_dropout is " + std::to_string(options_.p_dropout) + "; ring attention in C++ has no dropout; set it to 0");
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
          {"sinks", t.sinks ? "given" : "absent"}};
}

inline void RingPlan::lay_out() {
  size_t used = 0;
  const auto take = [&](int64_t rows, int64_t width, DType dtype) {
    const size_t begin = used;
    used += (static_cast<size_t>(batch_ * rows * width) * size_of(dtype) + 255) / 256 * 256;
    return begin;
  };
  const bool short_dtype = dtype_ != DType::kF32;
  const int64_t width = nheads_ * headdim_, width_v = nheads_ * headdim_v_, width_k = nheads_k_ * headdim_, width_kv = nheads_k_ * headdim_v_;
  for (int slot = 0; slot < 2; ++slot) {
    space_.keys[slot] = take(most_received_, width_k, dtype_);
    space_.values[slot] = take(most_received_, width_kv, dtype_);
    space_.ids[slot] = take(planned_.document_q ? most_received_ : 0, 1, DType::kI32);
  }
  if (planned_.is_forward) {
    space_.o = take(short_dtype ? schedule_.rows_q : 0, width_v, DType::kF32);
    space_.lse = take(schedule_.rows_q, nheads_, merges_any_ ? DType::kF64 : DType::kF32);
    space_.part = take(most_q_, width_v, DType::kF32);
    space_.lse_part = take(starts_ ? schedule_.rows_q : most_q_, nheads_, DType::kF32);
    space_.zeros = take(planned_.sinks ? 1 : 0, headdim_v_, DType::kF32);
  } else {
    space_.dq = take(short_dtype ? schedule_.rows_q : 0, width, DType::kF32);
    space_.dk = take(short_dtype ? schedule_.rows_k : 0, width_k, DType::kF32);
    space_.dv = take(short_dtype ? schedule_.rows_k : 0, width_kv, DType::kF32);
    space_.dq_part = take(std::max(most_q_, starts_ ? schedule_.rows_q : 0), width, part_dtype_);
    const int64_t keys = std::max(most_k_, std::max(most_received_, schedule_.rows_k));
    space_.dk_part = take(keys, width_k, part_dtype_);
    space_.dv_part = take(keys, width_kv, part_dtype_);
    for (int slot = 0; slot < 2; ++slot) {
      space_.dk_hop[slot] = take(most_received_, width_k, DType::kF32);
      space_.dv_hop[slot] = take(most_received_, width_kv, DType::kF32);
    }
    space_.dk_came = take(most_sent_, width_k, DType::kF32);
    space_.dv_came = take(most_sent_, width_kv, DType::kF32);
  }
  workspace_bytes_ = used;
}

// --- what there is of tensors ---

inline detail::RingPart RingPlan::keys_of(const detail::RingTensors& t, size_t hop) const {
  if (hop == 0) return {t.k, t.v, t.document_k};
  const int64_t rows = schedule_.hops[hop].rows_received;
  const size_t slot = hop % 2;
  return {fresh(space_.keys[slot], dtype_, rows, nheads_k_, headdim_), fresh(space_.values[slot], dtype_, rows, nheads_k_, headdim_v_),
          planned_.document_q ? Tensor(nullptr, DType::kI32, {batch_, rows}).on(device_, index_, at(space_.ids[slot])) : Tensor()};
}
inline Tensor RingPlan::sums_of_o(const detail::RingTensors& t) const {
  return dtype_ == DType::kF32 ? t.o : fresh(space_.o, DType::kF32, schedule_.rows_q, nheads_, headdim_v_);
}
inline Tensor RingPlan::sums_of_lse(const detail::RingTensors& t) const {
  if (merges_any_) return fresh_lse(space_.lse, DType::kF64, schedule_.rows_q);  // merged again and again, which costs fp32 its last places
  return t.lse ? t.lse : fresh_lse(space_.lse, DType::kF32, schedule_.rows_q);
}
inline Tensor RingPlan::sums_of_dq(const detail::RingTensors& t) const {
  return t.dq.dtype() == DType::kF32 ? t.dq : fresh(space_.dq, DType::kF32, schedule_.rows_q, nheads_, headdim_);
}
inline Tensor RingPlan::sums_of_dk(const detail::RingTensors& t, size_t hop) const {
  if (hop > 0) return fresh(space_.dk_hop[hop % 2], DType::kF32, schedule_.hops[hop].rows_received, nheads_k_, headdim_);
  return t.dk.dtype() == DType::kF32 ? t.dk : fresh(space_.dk, DType::kF32, schedule_.rows_k, nheads_k_, headdim_);
}
inline Tensor RingPlan::sums_of_dv(const detail::RingTensors& t, size_t hop) const {
  if (hop > 0) return fresh(space_.dv_hop[hop % 2], DType::kF32, schedule_.hops[hop].rows_received, nheads_k_, headdim_v_);
  return t.dv.dtype() == DType::kF32 ? t.dv : fresh(space_.dv, DType::kF32, schedule_.rows_k, nheads_k_, headdim_v_);
}

// --- plans of blocks ---

inline ForwardTensors RingPlan::forward_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) const {
  const detail::RingPart keys = keys_of(t, hop);
  ForwardTensors f{
      detail::slice(t.q, 1, b.q_row, b.q_rows), detail::slice(keys.k, 1, b.k_row, b.k_rows), detail::slice(keys.v, 1, b.k_row, b.k_rows), {}, {}, {}};
  f.o = merges(b) ? fresh(space_.part, DType::kF32, b.q_rows, nheads_, headdim_v_) : detail::slice(sums_of_o(t), 1, b.q_row, b.q_rows);
  f.lse = merges_any_ ? fresh_lse(space_.lse_part, DType::kF32, b.q_rows) : detail::slice(sums_of_lse(t), 2, b.q_row, b.q_rows);
  if (planned_.document_q) {
    f.scores.document_q = detail::slice(t.document_q, 1, b.q_row, b.q_rows);
    f.scores.document_k = detail::slice(keys.ids, 1, b.k_row, b.k_rows);
  }
  return f;
}

inline BackwardTensors RingPlan::backward_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) const {
  const detail::RingPart keys = keys_of(t, hop);
  const auto of_rows = [&](const Tensor& x) { return detail::slice(x, 1, b.q_row, b.q_rows); };
  const auto of_keys = [&](const Tensor& x) { return detail::slice(x, 1, b.k_row, b.k_rows); };
  BackwardTensors g{
      of_rows(t.q), of_keys(keys.k), of_keys(keys.v), of_rows(t.o), detail::slice(t.lse, 2, b.q_row, b.q_rows), of_rows(t.dout), {}, {}, {}};
  g.dq = aside(merges(b)) ? fresh(space_.dq_part, part_dtype_, b.q_rows, nheads_, headdim_) : of_rows(sums_of_dq(t));
  g.dk = aside(adds(b, hop)) ? fresh(space_.dk_part, part_dtype_, b.k_rows, nheads_k_, headdim_) : of_keys(sums_of_dk(t, hop));
  g.dv = aside(adds(b, hop)) ? fresh(space_.dv_part, part_dtype_, b.k_rows, nheads_k_, headdim_v_) : of_keys(sums_of_dv(t, hop));
  if (t.dlse) g.dlse = detail::slice(t.dlse, 2, b.q_row, b.q_rows);
  if (planned_.document_q) {
    g.scores.document_q = detail::slice(t.document_q, 1, b.q_row, b.q_rows);
    g.scores.document_k = detail::slice(keys.ids, 1, b.k_row, b.k_rows);
  }
  if (t.dsinks && b.k_rows == 0) {  // the gradient of sinks needs no key
    g.scores.sinks = t.sinks;
    g.dsinks = t.dsinks;
  }
  return g;
}

inline const RingPlan::Call& RingPlan::call_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) {
  const Key key{b.q_rows, b.k_rows, b.window_left, b.window_right, hop == 0 ? -1 : schedule_.hops[hop].rows_received, merges(b), adds(b, hop)};
  const auto found = calls_.find(key);
  if (found != calls_.end()) return found->second;
  Options options = options_;
  options.causal = false;  // blocks have windows
  options.window_left = b.window_left;
  options.window_right = b.window_right;
  Plan plan = planned_.is_forward ? Plan(forward_of(t, b, hop), options) : Plan(backward_of(t, b, hop), options);
  const size_t bytes = plan.workspace_bytes();
  return calls_.emplace(key, Call{std::move(plan), bytes}).first->second;
}

// --- what travels ---

inline void RingPlan::begin_keys(const detail::RingTensors& t, size_t h) {
  if (h >= schedule_.hops.size()) return;
  const RingHop& hop = schedule_.hops[h];
  const detail::RingPart to = keys_of(t, h);
  std::vector<RingPiece> pieces;
  const auto add_pieces = [&](const Tensor& x, const std::vector<fattn_ring_range>& ranges, bool sent) {
    int64_t row_bytes = static_cast<int64_t>(size_of(x.dtype()));
    for (int i = 2; i < x.ndim(); ++i) row_bytes *= x.shape(i);
    for (int64_t n = 0; n < batch_; ++n) {
      int64_t row = 0;  // what came lies in the order in which it was sent
      char* const data = static_cast<char*>(x.data()) + n * x.stride(0) * static_cast<int64_t>(size_of(x.dtype()));
      for (const fattn_ring_range& range : ranges) {
        pieces.push_back({data + (sent ? range.first : row) * row_bytes, static_cast<size_t>(range.count * row_bytes),
                          sent ? hop.send_to : hop.receive_from, sent ? 1 : 0});
        row += range.count;
      }
    }
  };
  const Tensor *const own[] = {&t.k, &t.v, &t.document_k}, *const came[] = {&to.k, &to.v, &to.ids};
  for (size_t i = 0; i < (planned_.document_q ? 3 : 2); ++i) {
    if (hop.rows_sent > 0) add_pieces(*own[i], hop.sent, true);
    if (hop.rows_received > 0) add_pieces(*came[i], pieces_[h], false);
  }
  transport_->begin(pieces, stream_);
  ++open_;
}

// The gradients of a hop's keys go back the way that these came.
inline void RingPlan::begin_gradients(const detail::RingTensors& t, size_t h) {
  const RingHop& hop = schedule_.hops[h];
  std::vector<RingPiece> pieces;
  const auto add_piece = [&](void* data, int64_t rows, int64_t width, int peer, bool sent) {
    if (rows > 0) pieces.push_back({data, static_cast<size_t>(batch_ * rows * nheads_k_ * width) * sizeof(float), peer, sent});
  };
  add_piece(sums_of_dk(t, h).data(), hop.rows_received, headdim_, hop.receive_from, true);
  add_piece(sums_of_dv(t, h).data(), hop.rows_received, headdim_v_, hop.receive_from, true);
  add_piece(at(space_.dk_came), hop.rows_sent, headdim_, hop.send_to, false);
  add_piece(at(space_.dv_came), hop.rows_sent, headdim_v_, hop.send_to, false);
  transport_->begin(pieces, stream_);
  ++open_;
}

inline void RingPlan::finish_gradients(const detail::RingTensors& t, size_t h) {
  finish_oldest();
  const RingHop& hop = schedule_.hops[h];
  const Tensor dk = sums_of_dk(t, 0), dv = sums_of_dv(t, 0);
  const Tensor dk_came = fresh(space_.dk_came, DType::kF32, hop.rows_sent, nheads_k_, headdim_),
               dv_came = fresh(space_.dv_came, DType::kF32, hop.rows_sent, nheads_k_, headdim_v_);
  int64_t row = 0;
  for (const fattn_ring_range& range : hop.sent) {
    add(detail::slice(dk, 1, range.first, range.count), detail::slice(dk_came, 1, row, range.count), true);
    add(detail::slice(dv, 1, range.first, range.count), detail::slice(dv_came, 1, row, range.count), true);
    row += range.count;
  }
}

// --- passes ---

inline void RingPlan::begin(const detail::RingTensors& t, void* workspace, size_t bytes, void* stream) {
  const auto invalid = [](const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); };
  if (!t.same_kind(planned_))
    invalid("these tensors are not as the plan was made for: the pass, which there are, shapes, strides, dtypes and device must be");
  if (bytes < workspace_bytes_ || (!workspace && workspace_bytes_ > 0))
    invalid("the workspace has " + std::to_string(workspace ? bytes : 0) + " bytes; the plan needs " + std::to_string(workspace_bytes_) +
            " (workspace_bytes())");
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) invalid("the workspace is not aligned to 256 bytes");
  for (; open_ > 0; --open_) transport_->finish(stream);  // what a call that threw had begun
  memory_ = static_cast<char*>(workspace);
  stream_ = stream;
}

// lse in another dtype: a merge of one part, of one column, which stays as it is.
inline void RingPlan::convert_lse(const Tensor& o, const Tensor& from, const Tensor& to) const {
  const Tensor column = detail::slice(o, 3, 0, 1);
  merge({{column, from, {}, {}}}, column, to, row_options());
}

inline void RingPlan::forward(const detail::RingTensors& t) {
  const Tensor o = sums_of_o(t), lse = sums_of_lse(t);
  const auto compute = [&](const RingBlock& b, size_t hop) {
    const ForwardTensors f = forward_of(t, b, hop);
    const Call& call = call_of(t, b, hop);
    call.plan.execute(f, at(space_.plans), call.bytes, stream_);
    if (!merges_any_ || b.q_rows == 0) return;
    const Tensor o_rows = detail::slice(o, 1, b.q_row, b.q_rows), lse_rows = detail::slice(lse, 2, b.q_row, b.q_rows);
    if (merges(b))
      merge({{o_rows, lse_rows, {}, {}}, {f.o, f.lse, {}, {}}}, o_rows, lse_rows, row_options());
    else
      convert_lse(o_rows, f.lse, lse_rows);
  };
  begin_keys(t, 1);
  if (starts_) compute(without_keys(), 0);
  for (size_t h = 0; h < schedule_.hops.size(); ++h) {
    if (h > 0) finish_oldest();
    if (h > 0) begin_keys(t, h + 1);
    for (const RingBlock& b : schedule_.hops[h].blocks) compute(b, h);
  }
  if (t.sinks && schedule_.rows_q > 0) {  // a key without a value for every row
    fill_zeros();
    const Tensor none =
        Tensor(nullptr, DType::kF32, {batch_, schedule_.rows_q, nheads_, headdim_v_}, {0, 0, 0, 1}).on(device_, index_, at(space_.zeros));
    const Tensor sinks =
        Tensor(nullptr, DType::kF32, {batch_, nheads_, schedule_.rows_q}, {0, t.sinks.stride(0), 0}).on(device_, index_, t.sinks.data());
    merge({{o, lse, {}, {}}, {none, sinks, {}, {}}}, t.o, t.lse, row_options());
  } else if (o.data() != t.o.data() && schedule_.rows_q > 0) {
    merge({{o, lse, {}, {}}}, t.o, lse.data() == t.lse.data() ? Tensor() : t.lse, row_options());
  } else if (t.lse && lse.data() != t.lse.data() && schedule_.rows_q > 0) {
    convert_lse(o, lse, t.lse);
  }
}

inline void RingPlan::backward(const detail::RingTensors& t) {
  const auto compute = [&](const RingBlock& b, size_t hop) {
    const BackwardTensors g = backward_of(t, b, hop);
    const Call& call = call_of(t, b, hop);
    call.plan.execute(g, at(space_.plans), call.bytes, stream_);
    const auto add_part = [&](const Tensor& to, const Tensor& part, int64_t first, bool more) {
      if (aside(more) && part.shape(1) > 0) add(detail::slice(to, 1, first, part.shape(1)), part, more);
    };
    add_part(sums_of_dq(t), g.dq, b.q_row, merges(b));
    add_part(sums_of_dk(t, hop), g.dk, b.k_row, adds(b, hop));
    add_part(sums_of_dv(t, hop), g.dv, b.k_row, adds(b, hop));
  };
  begin_keys(t, 1);
  if (starts_) compute(without_keys(), 0);
  for (size_t h = 0; h < schedule_.hops.size(); ++h) {
    if (h > 0) finish_oldest();
    if (h > 0) begin_keys(t, h + 1);
    if (starts_keys_[h]) compute(without_queries(h), h);
    for (const RingBlock& b : schedule_.hops[h].blocks) compute(b, h);
    if (h > 1) finish_gradients(t, h - 1);
    if (h > 0) begin_gradients(t, h);
  }
  if (schedule_.hops.size() > 1) finish_gradients(t, schedule_.hops.size() - 1);
  const auto round = [&](const Tensor& sums, const Tensor& to) {
    if (sums.data() != to.data() && to.size() > 0) add(to, sums, false);
  };
  round(sums_of_dq(t), t.dq);
  round(sums_of_dk(t, 0), t.dk);
  round(sums_of_dv(t, 0), t.dv);
}

}  // namespace fattn
