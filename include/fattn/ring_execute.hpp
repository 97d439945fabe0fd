// What a RingPlan does: its plans of blocks, its passes, and what travels. Programs include fattn/ring.hpp.
#pragma once

#include "fattn/ring_plan.hpp"
#include "fattn/ring_prepare.hpp"
#include "fattn/ring_scores.hpp"

namespace fattn {

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
  const Pads pads = pads_of(b);
  const int64_t rows = b.q_rows + pads.rows;
  ForwardTensors f{rows_of(t.q, space_.q_pad, b.q_row, b.q_rows, pads.rows),
                   rows_of(keys.k, space_.k_pad, b.k_row, b.k_rows, pads.keys),
                   rows_of(keys.v, space_.v_pad, b.k_row, b.k_rows, pads.keys),
                   {},
                   {},
                   {}};
  f.o = merges(b) || pads.rows > 0 ? fresh(space_.part, DType::kF32, rows, nheads_, headdim_v_) : detail::slice(sums_of_o(t), 1, b.q_row, b.q_rows);
  f.lse = merges_any_ || pads.rows > 0 ? fresh_lse(space_.lse_part, DType::kF32, rows) : detail::slice(sums_of_lse(t), 2, b.q_row, b.q_rows);
  f.scores = scores_of(t, b, hop);
  return f;
}

inline BackwardTensors RingPlan::backward_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) const {
  const detail::RingPart keys = keys_of(t, hop);
  const Pads pads = pads_of(b);
  const int64_t rows = b.q_rows + pads.rows, all_keys = b.k_rows + pads.keys;
  const auto of_rows = [&](const Tensor& x, size_t padded) { return rows_of(x, padded, b.q_row, b.q_rows, pads.rows); };
  const auto of_keys = [&](const Tensor& x, size_t padded) { return rows_of(x, padded, b.k_row, b.k_rows, pads.keys); };
  const auto of_lse = [&](const Tensor& x, size_t padded, bool made) {
    return made ? fresh_lse(padded, DType::kF32, rows) : detail::slice(x, 2, b.q_row, b.q_rows);
  };
  BackwardTensors g{of_rows(t.q, space_.q_pad),
                    of_keys(keys.k, space_.k_pad),
                    of_keys(keys.v, space_.v_pad),
                    of_rows(t.o, space_.o_pad),
                    of_lse(t.lse, space_.lse_pad, pads.rows > 0 || b.side != 0),
                    of_rows(t.dout, space_.dout_pad),
                    {},
                    {},
                    {}};
  g.dq = aside(merges(b), pads.rows) ? fresh(space_.dq_part, part_dtype_, rows, nheads_, headdim_) : of_rows(sums_of_dq(t), 0);
  g.dk = aside(adds(b, hop), pads.keys) ? fresh(space_.dk_part, part_dtype_, all_keys, nheads_k_, headdim_) : of_keys(sums_of_dk(t, hop), 0);
  g.dv = aside(adds(b, hop), pads.keys) ? fresh(space_.dv_part, part_dtype_, all_keys, nheads_k_, headdim_v_) : of_keys(sums_of_dv(t, hop), 0);
  if (t.dlse) g.dlse = of_lse(t.dlse, space_.dlse_pad, pads.rows > 0);
  g.scores = scores_of(t, b, hop);
  if (planned_.dbias && has_pairs(b)) g.dbias = dbias_of(b);
  if (t.dsinks && b.k_rows == 0) {  // the gradient of sinks needs no key
    g.scores.sinks = t.sinks;
    g.dsinks = t.dsinks;
  }
  return g;
}

inline const RingPlan::Call& RingPlan::call_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) {
  const Pads pads = pads_of(b);
  const Key key{b.q_rows,  b.k_rows,  b.window_left, b.window_right, hop == 0 ? -1 : schedule_.hops[hop].rows_received, merges(b), adds(b, hop),
                pads.rows, pads.keys, b.side,        makes_mask(b)};
  const auto found = calls_.find(key);
  if (found != calls_.end()) return found->second;
  Options options = options_;
  options.causal = false;  // blocks have windows
  options.window_left = b.window_left;
  options.window_right = b.window_right;
  if (!has_pairs(b)) options.p_dropout = 0;
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
  t.check_memory();
  if (bytes < workspace_bytes_ || (!workspace && workspace_bytes_ > 0))
    invalid("the workspace has " + std::to_string(workspace ? bytes : 0) + " bytes; the plan needs " + std::to_string(workspace_bytes_) +
            " (workspace_bytes())");
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) invalid("the workspace is not aligned to 256 bytes");
  for (; open_ > 0; --open_) transport_->finish(stream);  // what a call that threw had begun
  memory_ = static_cast<char*>(workspace);
  stream_ = stream;
  fill_tables(t);
  copy_mask(t);
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
    const Pads pads = pads_of(b);
    make_block(t, b, hop, f);
    call.plan.execute(f, at(space_.plans), call.bytes, stream_);
    const Tensor o_part = detail::slice(f.o, 1, pads.rows, b.q_rows), lse_part = detail::slice(f.lse, 2, pads.rows, b.q_rows);
    if (b.side != 0) sum({lse_as_rows(lse_part), row_terms_of(b)}, lse_as_rows(lse_part), row_options());
    if ((!merges_any_ && pads.rows == 0) || b.q_rows == 0) return;
    const Tensor o_rows = detail::slice(o, 1, b.q_row, b.q_rows), lse_rows = detail::slice(lse, 2, b.q_row, b.q_rows);
    if (merges(b))
      merge({{o_rows, lse_rows, {}, {}}, {o_part, lse_part, {}, {}}}, o_rows, lse_rows, row_options());
    else if (pads.rows > 0)
      merge({{o_part, lse_part, {}, {}}}, o_rows, lse_rows, row_options());
    else
      convert_lse(o_rows, lse_part, lse_rows);
  };
  begin_keys(t, 1);
  if (starts_) compute(without_keys(), 0);
  for (size_t h = 0; h < schedule_.hops.size(); ++h) {
    if (h > 0) finish_oldest();
    if (h > 0) begin_keys(t, h + 1);
    for (const RingBlock& b : schedule_.hops[h].blocks) compute(b, h);
  }
  if (t.sinks && schedule_.rows_q > 0) {  // a key without a value for every row
    const Tensor none = constant(space_.zero_row, schedule_.rows_q, nheads_, headdim_v_);
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
    const Pads pads = pads_of(b);
    make_block(t, b, hop, g);
    call.plan.execute(g, at(space_.plans), call.bytes, stream_);
    const auto add_part = [&](const Tensor& to, const Tensor& part, int64_t first, int64_t count, int64_t pad, bool more) {
      if (aside(more, pad) && count > 0) add(detail::slice(to, 1, first, count), detail::slice(part, 1, pad, count), more);
    };
    add_part(sums_of_dq(t), g.dq, b.q_row, b.q_rows, pads.rows, merges(b));
    add_part(sums_of_dk(t, hop), g.dk, b.k_row, b.k_rows, pads.keys, adds(b, hop));
    add_part(sums_of_dv(t, hop), g.dv, b.k_row, b.k_rows, pads.keys, adds(b, hop));
    add_dbias(t, b, g.dbias);
  };
  begin_dbias(t);
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
  if (t.dbias && t.dbias.size() > 0 && sums_of_dbias(t).data() != t.dbias.data()) sum_pairs({sums_of_dbias(t)}, t.dbias);
}

}  // namespace fattn
