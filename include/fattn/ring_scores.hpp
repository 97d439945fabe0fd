// What scores of a block of ring attention depend on beside q and k: bias, mask, ALiBi and dropout. Programs include fattn/ring.hpp.
//
// ALiBi of a block whose keys are all on one side of its queries is linear in both: what follows from the query alone leaves the softmax as it is and
// is taken off lse (row terms), what follows from the key is a bias. Dropout draws random numbers by the place in the whole matrix, 16 queries and 64
// keys at once: a block that begins elsewhere gets rows and keys before its own (pads), whose results are thrown away, or which a bias of -inf hides.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "fattn/ring_plan.hpp"

namespace fattn {
namespace detail {

inline constexpr int64_t kRingRows = 16, kRingKeys = 64;  // where random numbers begin anew

inline Tensor shared(const Tensor& t, int64_t a, int64_t b, int64_t c, int64_t d) {  // t where it is 1 in a dimension, for all
  const auto stride = [&](int i) { return t.shape(i) == 1 ? 0 : t.stride(i); };
  return Tensor(nullptr, t.dtype(), {a, b, c, d}, {stride(0), stride(1), stride(2), 1}).on(t.device(), t.device_index(), t.data());
}

}  // namespace detail

inline RingPlan::Pads RingPlan::pads_of(const RingBlock& b) const {
  if (!(options_.p_dropout > 0) || !has_pairs(b)) return {};
  return {place_of(b.q_position, cu_seqlens_q_, b) % detail::kRingRows, place_of(b.k_position, cu_seqlens_k_, b) % detail::kRingKeys};
}

// Rows of this rank, keys of all. With pads: keys before them too, and rows if there are any.
inline Tensor RingPlan::pairs_of(const Tensor& t, const RingBlock& b, const Pads& pads) const {
  const Tensor rows = t.shape(2) == 1 ? t : detail::slice(t, 2, b.q_row - pads.rows, b.q_rows + pads.rows);
  return detail::slice(rows, 3, b.k_position - pads.keys, b.k_rows + pads.keys);
}

// A bias that is made: by the tensor's own and ALiBi's, and -inf for keys before the block's.
inline bool RingPlan::makes_bias(const RingBlock& b) const {
  const Pads pads = pads_of(b);
  if (!planned_.bias) return b.side != 0 && pads.keys > 0;
  return b.side != 0 || pads.keys > 0 || (pads.rows > 0 && planned_.bias.shape(2) != 1);
}
inline Tensor RingPlan::made_bias(const RingBlock& b) const {
  const Pads pads = pads_of(b);
  const Tensor& bias = planned_.bias;
  const bool alibi = b.side != 0;
  const int64_t n = (bias && bias.shape(0) != 1) || (alibi && slopes_batch() != 1) ? batch_ : 1;
  const int64_t h = alibi || (bias && bias.shape(1) != 1) ? nheads_ : 1;
  const int64_t rows = bias && bias.shape(2) != 1 ? b.q_rows + pads.rows : 1;
  return Tensor(nullptr, DType::kF32, {n, h, rows, b.k_rows + pads.keys}).on(device_, index_, at(space_.bias));
}
// Pads of a block whose rows are the first of the mask would lie before it: such blocks take a copy, which has room there.
inline bool RingPlan::makes_mask(const RingBlock& b) const {
  return planned_.mask && planned_.mask.shape(2) != 1 && planned_.mask.stride(2) != 0 && b.q_row < pads_of(b).rows;
}
inline Tensor RingPlan::made_mask(const RingBlock& b) const {
  const Pads pads = pads_of(b);
  const int64_t* const stride = space_.mask_strides;
  const int64_t first = (detail::kRingRows - 1 + b.q_row - pads.rows) * stride[2] + b.k_position - pads.keys;
  return Tensor(nullptr, DType::kU8, {planned_.mask.shape(0), planned_.mask.shape(1), b.q_rows + pads.rows, b.k_rows + pads.keys},
                {stride[0], stride[1], stride[2], 1})
      .on(device_, index_, at(space_.mask + static_cast<size_t>(first)));
}
// The copy has the dimensions in the order in which they lie in memory, and one where a stride of 0 makes one of many. Rows, heads or entries between
// which there is little or nothing stay as they lie, a run that is copied at once; between others the copy leaves no gap. Rows before a head's own,
// whose results are thrown away, are those of the head before it, or zeros in front of all. Returns the copy's bytes.
inline int64_t RingPlan::lay_out_mask() {
  const Tensor& mask = planned_.mask;
  const int64_t counts[] = {mask.shape(0), mask.shape(1), space_.mask_rows};
  int order[] = {0, 1, 2};
  std::sort(order, order + 3, [&](int a, int b) { return mask.stride(a) < mask.stride(b); });
  int64_t bytes = mask.shape(3);
  bool is_run = true;
  space_.mask_run = bytes;
  for (const int d : order) {
    space_.mask_runs[d] = 1;
    if (counts[d] == 1 || mask.stride(d) == 0) continue;
    is_run = is_run && mask.stride(d) <= bytes + bytes / 4;
    space_.mask_strides[d] = is_run ? mask.stride(d) : (bytes + 15) / 16 * 16;  // which a GPU reads at once
    bytes += (counts[d] - 1) * space_.mask_strides[d];
    if (is_run)
      space_.mask_run = bytes;
    else
      space_.mask_runs[d] = counts[d];
  }
  return (detail::kRingRows - 1) * space_.mask_strides[2] + bytes;
}
inline void RingPlan::copy_mask(const detail::RingTensors& t) const {  // once a call
  if (space_.mask_rows == 0) return;
  const int64_t *const runs = space_.mask_runs, *const stride = space_.mask_strides, pad = (detail::kRingRows - 1) * stride[2];
  set_bytes(at(space_.mask), static_cast<size_t>(pad));
  for (int64_t n = 0; n < runs[0]; ++n)
    for (int64_t h = 0; h < runs[1]; ++h)
      for (int64_t row = 0; row < runs[2]; ++row)
        copy_bytes(at(space_.mask + static_cast<size_t>(pad + n * stride[0] + h * stride[1] + row * stride[2])),
                   static_cast<const char*>(t.mask.data()) + n * t.mask.stride(0) + h * t.mask.stride(1) + row * t.mask.stride(2),
                   static_cast<size_t>(space_.mask_run), FATTN_COPY_ON_DEVICE);
}
inline Tensor RingPlan::ids_of(const Tensor& ids, size_t padded, int64_t first, int64_t count, int64_t pad) const {
  if (pad == 0) return detail::slice(ids, 1, first, count);
  return Tensor(nullptr, DType::kI32, {batch_, count + pad}).on(device_, index_, at(padded));
}

inline ScoreTensors RingPlan::scores_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) const {
  ScoreTensors s;
  const Pads pads = pads_of(b);
  if (planned_.document_q) {
    s.document_q = ids_of(t.document_q, space_.ids_q, b.q_row, b.q_rows, pads.rows);
    s.document_k = ids_of(keys_of(t, hop).ids, space_.ids_k, b.k_row, b.k_rows, pads.keys);
  }
  if (!has_pairs(b)) return s;
  if (makes_bias(b))
    s.bias = made_bias(b);
  else if (planned_.bias)
    s.bias = pairs_of(t.bias, b, {});
  else if (b.side != 0)
    s.bias = key_terms_of(b);
  else if (pads.keys > 0)
    s.bias = Tensor(nullptr, DType::kF32, {1, 1, 1, pads.keys + b.k_rows}).on(device_, index_, at(hiding_at(pads.keys)));
  if (planned_.mask) s.mask = makes_mask(b) ? made_mask(b) : pairs_of(t.mask, b, pads);
  if (planned_.slopes && b.side == 0) s.alibi_slopes = t.slopes;
  if (options_.p_dropout > 0)
    s.dropout_state = Tensor(nullptr, DType::kI64, {4}).on(device_, index_, at(space_.tables + 4 * sizeof(int64_t) * number_of(b, hop)));
  return s;
}

// --- tables, brought to the workspace by each call, as what they follow from may change from call to call ---

// States of dropout, a block each; -inf for kRingKeys - 1 keys and zeros; multiples of slopes, of which each block on one side takes a stretch as key
// terms and another as row terms. They come from the host, which waits for the device then; a row of zeros behind them does not.
inline void RingPlan::lay_out_tables(size_t& used) {
  size_t blocks = 0;
  for (const RingHop& hop : schedule_.hops) {
    first_block_.push_back(blocks);
    blocks += hop.blocks.size();
  }
  const auto take = [&](size_t bytes) {
    const size_t begin = used;
    used += (bytes + 255) / 256 * 256;
    return begin;
  };
  const bool dropout = options_.p_dropout > 0;
  space_.tables = used;
  take(dropout ? 4 * sizeof(int64_t) * blocks : 0);
  space_.hiding = take(dropout ? sizeof(float) * static_cast<size_t>(detail::kRingKeys + most_k_) : 0);
  int64_t least[2] = {}, end[2] = {};
  bool any[2] = {};
  for (const RingHop& hop : schedule_.hops)
    for (const RingBlock& b : hop.blocks)
      for (const Stretch& s : {key_stretch(b), row_stretch(b)}) {
        if (b.side == 0) continue;
        least[s.descends] = any[s.descends] ? std::min(least[s.descends], s.first) : s.first;
        end[s.descends] = any[s.descends] ? std::max(end[s.descends], s.first + s.count) : s.first + s.count;
        any[s.descends] = true;
      }
  // One length for both tables; of 64 numbers, so that heads begin where a block's memory may.
  space_.length = (std::max(end[0] - least[0], end[1] - least[1]) + 63) / 64 * 64;
  for (const int descends : {0, 1}) {
    space_.least[descends] = least[descends];
    space_.multiples[descends] = take(any[descends] ? sizeof(float) * static_cast<size_t>(slopes_batch() * nheads_ * space_.length) : 0);
    space_.has_multiples[descends] = any[descends];
  }
  tables_.resize(used - space_.tables);
  if (dropout || planned_.sinks || planned_.dbias)
    space_.zero_row_bytes = sizeof(float) * static_cast<size_t>(std::max({headdim_, headdim_v_, planned_.dbias ? planned_.dbias.shape(3) : 0}));
  space_.zero_row = take(space_.zero_row_bytes);
}

inline std::vector<char> RingPlan::read(const Tensor& from, size_t count) const {  // its first numbers, to the host
  std::vector<char> to(count * size_of(from.dtype()));
  if (device_ == Device::kCuda)
    fattn::check(fattn_cuda_copy(index_, FATTN_COPY_TO_HOST, to.data(), from.data(), to.size(), stream_));
  else
    std::memcpy(to.data(), from.data(), to.size());
  return to;
}

inline void RingPlan::fill_tables(const detail::RingTensors& t) {
  set_bytes(at(space_.zero_row), space_.zero_row_bytes);
  if (tables_.empty()) return;
  const auto put = [&](size_t offset, int64_t i, auto x) {
    std::memcpy(tables_.data() + (offset - space_.tables) + static_cast<size_t>(i) * sizeof x, &x, sizeof x);
  };
  if (options_.p_dropout > 0) {
    int64_t state[2];
    std::memcpy(state, read(t.dropout_state, 2).data(), sizeof state);
    for (size_t h = 0; h < schedule_.hops.size(); ++h)
      for (const RingBlock& b : schedule_.hops[h].blocks) {
        const Pads pads = pads_of(b);
        const auto first = static_cast<int64_t>(static_cast<uint64_t>(state[1]) + static_cast<uint64_t>(b.sequence * nheads_));
        const int64_t numbers[] = {state[0], first, place_of(b.q_position, cu_seqlens_q_, b) - pads.rows,
                                   place_of(b.k_position, cu_seqlens_k_, b) - pads.keys};
        for (int64_t i = 0; i < 4; ++i) put(space_.tables, 4 * static_cast<int64_t>(number_of(b, h)) + i, numbers[i]);
      }
    for (int64_t i = 0; i + 1 < detail::kRingKeys; ++i) put(space_.hiding, i, -std::numeric_limits<float>::infinity());
  }
  if (space_.length > 0) fill_multiples(t);
  copy_bytes(at(space_.tables), tables_.data(), tables_.size(), FATTN_COPY_TO_DEVICE);
}

// --- ALiBi of blocks on one side ---

// From the key next to the queries, whose weight is the greatest. Forward row terms are taken off lse, backward they are added.
inline RingPlan::Stretch RingPlan::row_stretch(const RingBlock& b) const {
  return {(b.side > 0) == planned_.is_forward, b.distance - (b.side > 0 ? b.k_rows - 1 : 0), b.q_rows};
}
inline char* RingPlan::multiples_at(const Stretch& s) const {
  return at(space_.multiples[s.descends] + sizeof(float) * static_cast<size_t>(s.first - space_.least[s.descends]));
}
inline Tensor RingPlan::key_terms_of(const RingBlock& b) const {
  const Stretch s = key_stretch(b);
  const int64_t head = space_.length;
  return Tensor(nullptr, DType::kF32, {slopes_batch(), nheads_, 1, s.count}, {nheads_ * head, head, head, 1}).on(device_, index_, multiples_at(s));
}
inline Tensor RingPlan::row_terms_of(const RingBlock& b) const {
  const Stretch s = row_stretch(b);
  const int64_t head = space_.length;
  return Tensor(nullptr, DType::kF32, {batch_, s.count, nheads_, 1}, {slopes_batch() == 1 ? 0 : nheads_ * head, 1, head, 1})
      .on(device_, index_, multiples_at(s));
}
// Made when slopes are others than in the call before.
inline void RingPlan::fill_multiples(const detail::RingTensors& t) {
  const int64_t of_batch = slopes_batch() == 1 ? 0 : t.slopes.stride(0), of_head = t.slopes.stride(t.slopes.ndim() - 1);
  std::vector<char> given = read(t.slopes, static_cast<size_t>((slopes_batch() - 1) * of_batch + (nheads_ - 1) * of_head + 1));
  if (given == slopes_) return;
  for (const int descends : {0, 1}) {
    if (!space_.has_multiples[descends]) continue;
    char* to = tables_.data() + (space_.multiples[descends] - space_.tables);
    for (int64_t n = 0; n < slopes_batch(); ++n)
      for (int64_t h = 0; h < nheads_; ++h) {
        float slope;
        std::memcpy(&slope, given.data() + static_cast<size_t>(n * of_batch + h * of_head) * sizeof slope, sizeof slope);
        for (int64_t i = 0; i < space_.length; ++i, to += sizeof(float)) {
          const int64_t times = (descends != 0 ? -1 : 1) * (space_.least[descends] + i);
          const auto term = static_cast<float>(static_cast<double>(slope) * static_cast<double>(times));
          std::memcpy(to, &term, sizeof term);
        }
      }
  }
  slopes_ = std::move(given);
}

// --- what is made of a block's own before it is computed ---

inline void RingPlan::copy_bytes(void* to, const void* from, size_t bytes, int32_t direction) const {
  if (bytes == 0) return;
  if (device_ != Device::kCuda)
    std::memcpy(to, from, bytes);
  else
    fattn::check(direction == FATTN_COPY_ON_DEVICE ? fattn_cuda_copy_async(index_, direction, to, from, bytes, stream_)
                                                   : fattn_cuda_copy(index_, direction, to, from, bytes, stream_));
}
inline void RingPlan::set_bytes(void* to, size_t bytes) const {
  if (bytes == 0) return;
  if (device_ == Device::kCuda)
    fattn::check(fattn_cuda_memset(index_, to, 0, bytes, stream_));
  else
    std::memset(to, 0, bytes);
}
// One number for all of (batch, rows, heads, width), of the table of zeros and -inf.
inline Tensor RingPlan::constant(size_t offset, int64_t rows, int64_t heads, int64_t width) const {
  return Tensor(nullptr, DType::kF32, {batch_, rows, heads, width}, {0, 0, 0, 1}).on(device_, index_, at(offset));
}
inline Tensor RingPlan::lse_as_rows(const Tensor& lse) {
  return Tensor(nullptr, lse.dtype(), {lse.shape(0), lse.shape(2), lse.shape(1), 1}, {lse.stride(0), lse.stride(2), lse.stride(1), 1})
      .on(lse.device(), lse.device_index(), lse.data());
}

// sum() of tensors over pairs, whose rows of keys are longer than those of heads may be: in pieces.
inline void RingPlan::sum_pairs(std::initializer_list<Tensor> parts, const Tensor& to) const {
  constexpr int64_t kPiece = 512;
  const int64_t keys = to.shape(3), whole = keys / kPiece;
  const auto add = [&](int64_t n, int64_t first, int64_t pieces, int64_t width) {
    if (pieces == 0 || width == 0) return;
    const auto piece = [&](const Tensor& t) {
      char* const data = static_cast<char*>(t.data()) + (n * t.stride(0) + first) * static_cast<int64_t>(size_of(t.dtype()));
      return Tensor(data, t.dtype(), {t.shape(1), t.shape(2), pieces, width}, {t.stride(1), t.stride(2), kPiece, 1})
          .on(t.device(), t.device_index(), data);
    };
    std::vector<MergePart> all;
    for (const Tensor& t : parts) all.push_back({piece(t), {}, {}, {}});
    merge(all, piece(to), {}, row_options());
  };
  for (int64_t n = 0; n < to.shape(0); ++n) {
    add(n, 0, whole, kPiece);
    add(n, whole * kPiece, 1, keys % kPiece);
  }
}

// `own` behind `pad` rows of zeros.
inline void RingPlan::pad_rows(const Tensor& own, const Tensor& to, int64_t pad) const {
  if (pad == 0) return;
  sum({constant(space_.zero_row, pad, to.shape(2), to.shape(3))}, detail::slice(to, 1, 0, pad), row_options());
  sum({own}, detail::slice(to, 1, pad, own.shape(1)), row_options());
}
inline void RingPlan::pad_lse(const Tensor& own, const Tensor& to, int64_t pad, size_t before) const {
  if (pad > 0) sum({constant(before, pad, nheads_, 1)}, lse_as_rows(detail::slice(to, 2, 0, pad)), row_options());
  sum({lse_as_rows(own)}, lse_as_rows(detail::slice(to, 2, pad, own.shape(2))), row_options());
}
inline void RingPlan::pad_ids(const Tensor& own, const Tensor& to, int64_t first, int64_t count, int64_t pad) const {
  if (pad == 0) return;
  set_bytes(to.data(), static_cast<size_t>(to.size()) * size_of(DType::kI32));
  for (int64_t n = 0; n < batch_; ++n)
    copy_bytes(detail::slice(detail::slice(to, 0, n, 1), 1, pad, count).data(), detail::slice(detail::slice(own, 0, n, 1), 1, first, count).data(),
               static_cast<size_t>(count) * size_of(DType::kI32), FATTN_COPY_ON_DEVICE);
}

inline void RingPlan::make_scores(const detail::RingTensors& t, const RingBlock& b, size_t hop, const ScoreTensors& s) const {
  const Pads pads = pads_of(b);
  if (planned_.document_q) {
    pad_ids(t.document_q, s.document_q, b.q_row, b.q_rows, pads.rows);
    pad_ids(keys_of(t, hop).ids, s.document_k, b.k_row, b.k_rows, pads.keys);
  }
  if (!has_pairs(b)) return;
  if (makes_bias(b)) {
    const Tensor to = made_bias(b);
    const int64_t n = to.shape(0), h = to.shape(1), rows = to.shape(2), keys = to.shape(3), own_rows = rows == 1 ? 1 : b.q_rows;
    const auto all = [&](size_t offset, int64_t r, int64_t k) {
      return Tensor(nullptr, DType::kF32, {n, h, r, k}, {0, 0, 0, 1}).on(device_, index_, at(offset));
    };
    if (pads.keys > 0 || pads.rows > 0) sum_pairs({all(hiding_at(pads.keys), rows, keys)}, to);
    const Tensor own = detail::slice(detail::slice(to, 2, rows - own_rows, own_rows), 3, pads.keys, b.k_rows);
    const Tensor terms = b.side == 0 ? Tensor() : detail::shared(key_terms_of(b), n, h, own_rows, b.k_rows);
    if (!planned_.bias) {
      sum_pairs({terms}, own);
    } else {
      const Tensor given = detail::shared(pairs_of(t.bias, b, {}), n, h, own_rows, b.k_rows);
      b.side == 0 ? sum_pairs({given}, own) : sum_pairs({given, terms}, own);
    }
  }
}

// What a block's tensors have that is not where it is planned to be, which is the caller's.
inline void RingPlan::make_block(const detail::RingTensors& t, const RingBlock& b, size_t hop, const ForwardTensors& f) const {
  const Pads pads = pads_of(b);
  const detail::RingPart keys = keys_of(t, hop);
  pad_rows(detail::slice(t.q, 1, b.q_row, b.q_rows), f.q, pads.rows);
  pad_rows(detail::slice(keys.k, 1, b.k_row, b.k_rows), f.k, pads.keys);
  pad_rows(detail::slice(keys.v, 1, b.k_row, b.k_rows), f.v, pads.keys);
  make_scores(t, b, hop, f.scores);
}
inline void RingPlan::make_block(const detail::RingTensors& t, const RingBlock& b, size_t hop, const BackwardTensors& g) const {
  const Pads pads = pads_of(b);
  make_block(t, b, hop, ForwardTensors{g.q, g.k, g.v, {}, {}, {}, g.scores});
  pad_rows(detail::slice(t.o, 1, b.q_row, b.q_rows), g.o, pads.rows);
  pad_rows(detail::slice(t.dout, 1, b.q_row, b.q_rows), g.dout, pads.rows);
  if (pads.rows > 0 || b.side != 0) pad_lse(detail::slice(t.lse, 2, b.q_row, b.q_rows), g.lse, pads.rows, space_.hiding);
  if (b.side != 0) {
    const Tensor own = lse_as_rows(detail::slice(g.lse, 2, pads.rows, b.q_rows));
    sum({own, row_terms_of(b)}, own, row_options());
  }
  if (pads.rows > 0 && t.dlse) pad_lse(detail::slice(t.dlse, 2, b.q_row, b.q_rows), g.dlse, pads.rows, space_.zero_row);
}

// --- the gradient of a bias ---

// Where each pair has an element of its own, the caller's tensor has it; rows that share one are summed in fp32.
inline Tensor RingPlan::sums_of_dbias(const detail::RingTensors& t) const {
  if (t.dbias.dtype() == DType::kF32 || t.dbias.shape(2) != 1) return t.dbias;
  return Tensor(nullptr, DType::kF32, {t.dbias.shape(0), t.dbias.shape(1), 1, t.dbias.shape(3)}).on(device_, index_, at(space_.dbias));
}
inline Tensor RingPlan::dbias_of(const RingBlock& b) const {
  const Pads pads = pads_of(b);
  const Tensor& d = planned_.dbias;
  return Tensor(nullptr, DType::kF32, {d.shape(0), d.shape(1), d.shape(2) == 1 ? 1 : b.q_rows + pads.rows, b.k_rows + pads.keys})
      .on(device_, index_, at(space_.dbias_part));
}
inline void RingPlan::begin_dbias(const detail::RingTensors& t) const {
  if (!t.dbias || t.dbias.size() == 0) return;
  const Tensor to = sums_of_dbias(t);
  sum_pairs(
      {Tensor(nullptr, DType::kF32, {to.shape(0), to.shape(1), to.shape(2), to.shape(3)}, {0, 0, 0, 1}).on(device_, index_, at(space_.zero_row))},
      to);
}
inline void RingPlan::add_dbias(const detail::RingTensors& t, const RingBlock& b, const Tensor& part) const {
  if (!t.dbias || !has_pairs(b)) return;
  const Pads pads = pads_of(b);
  const bool shared = t.dbias.shape(2) == 1;
  const Tensor own = detail::slice(shared ? part : detail::slice(part, 2, pads.rows, b.q_rows), 3, pads.keys, b.k_rows);
  const Tensor sums = sums_of_dbias(t), to = detail::slice(shared ? sums : detail::slice(sums, 2, b.q_row, b.q_rows), 3, b.k_position, b.k_rows);
  shared ? sum_pairs({to, own}, to) : sum_pairs({own}, to);
}

}  // namespace fattn
