// Backward pass of the CPU backend (FlashAttention-2, algorithm 2, with K/V blocks outside): a task owns a range of keys
// and their dK and dV, walks over all tiles of query rows that see them, the last one first, and adds its part of dQ.
//   P = exp(S - lse)   dV += P^T dO   dP = dO V^T   dS = P * (dP - delta)   dQ += scale dS K   dK += scale dS^T Q
//
//   for each tile of rows, the last first          run()
//     for each query head of the group             walk_rows()
//       load_rows            q, dO, lse, delta; what comes next is fetched meanwhile       backward_rows.h
//       for each block of keys that some row sees  add_block()
//         multiply           S^T = K Q^T, dP^T = V dO^T                                   backward_block.h
//         weigh              P and dS (backward_softmax.h), as the options of scores want them
//         look_at_pairs      where a pair that does not count meets an Inf or NaN
//         add_to_keys        dV += P^T dO, dK += dS^T Q
//         add_to_rows        dQ^T += K^T dS^T
//       await_turn, store_dq in the order of the keys: dq_order.h                          backward_rows.h
//   store_keys
//
// The members are defined in those two files; isa_*.cpp include both.
#pragma once

#include "backend/cpu/backward_softmax.h"
#include "backend/cpu/bias_gradient.h"
#include "backend/cpu/dq_order.h"
#include "backend/cpu/dq_sums.h"
#include "device_abi/lowest.h"

namespace fattn::core::FATTN_ISA {

// Of lse in a tile, where rows without a gradient and lanes beyond the tensor have +inf, so that P is 0.
FATTN_INLINE bool has_gradient(float lse) { return lse != __builtin_inff(); }

template <class T, class Ops>
class BackwardWalk {
 public:
  explicit BackwardWalk(const BackwardTask& task)
      : t_(task),
        in_(task.inputs),
        scaling_(task.scale),
        task_keys_(task.key_end - task.key_begin),
        width_(round_up(task.headdim, kLanes)),
        width_v_(round_up(task.headdim_v, kLanes)),
        k_(static_cast<const T*>(task.k) + task.key_begin * task.k_stride),
        capped_(task.softcap > 0),
        keeps_(task.has_dbias && (capped_ || Ops::kPair == 2)) {
    scratch_.lay_out(static_cast<char*>(task.scratch), task_keys_, task.block_k, task.headdim, task.headdim_v,
                     !is_plain(in_) || task.has_dbias || in_.document_q);
    for (int w = 0; w < kTileVecs; ++w) one_[w] = unused_[w] = set1(1.0f);
    if (documents()) task_ids_ = ids_of_keys(0, task_keys_);
  }

  void run() {
    load_keys();
    // The rows that see a key of this task.
    const int64_t first_row = t_.key_begin - t_.diagonal + 1, row_end = t_.key_end - t_.left_diagonal;
    begin_ = first_row > 0 ? first_row / kTile * kTile : 0;
    const int64_t end = row_end < t_.seqlen_q ? row_end : t_.seqlen_q;
    for (int64_t head = 0; t_.has_dbias && head < t_.group; ++head) {  // of rows that see none
      const BiasGradient<T> dbias = bias_gradient_of<T>(t_, head);
      dbias.pass_over(0, begin_ < t_.seqlen_q ? begin_ : t_.seqlen_q, t_.key_begin, t_.key_end);
      dbias.pass_over(begin_ < end ? end : begin_, t_.seqlen_q, t_.key_begin, t_.key_end);
    }
    for (int64_t tile_end = end; tile_end > begin_; tile_end = row0_) {
      const int64_t left = tile_end - begin_;
      row0_ = documents() ? tile_end - rows_of_one(in_.document_q + tile_end, left < kTile ? left : kTile) : begin_ + (left - 1) / kTile * kTile;
      rows_ = tile_end - row0_;
      vecs_ = static_cast<int>((rows_ + kLanes - 1) / kLanes);
      if (documents()) ids_ = ids_of(in_.document_q, row0_, tile_end);
      for (head_ = 0; head_ < t_.group; ++head_) walk_rows();
    }
    t_.fp32_out ? store_keys<float>() : store_keys<T>();
  }

 private:
  using Element = typename Ops::Element;

  void load_keys() {
    for (int64_t i = 0; i < task_keys_ * width_; i += kLanes) store(scratch_.dk + i, zero());
    for (int64_t i = 0; i < task_keys_ * width_v_; i += kLanes) store(scratch_.dv + i, zero());
    const T* v = static_cast<const T*>(t_.v) + t_.key_begin * t_.v_stride;
    k_rows_ = Operand<T, Ops>::row_scalars(k_, t_.k_stride, task_keys_, t_.headdim, scratch_.k_rows);
    v_rows_ = Operand<T, Ops>::row_scalars(v, t_.v_stride, task_keys_, t_.headdim_v, scratch_.v_rows);
    k_columns_ = k_rows_;
    if constexpr (Ops::kPair == 2) k_columns_ = Operand<T, Ops>::column_scalars(k_, t_.k_stride, task_keys_, t_.headdim, scratch_.k_columns);
  }

  // The tile of rows in one query head.
  void walk_rows() {
    say_begun(t_, row0_, row0_ + rows_, head_);
    dbias_ = bias_gradient_of<T>(t_, head_);
    if (documents() && !may_meet(ids_, task_ids_)) return pass_over(0, task_keys_);
    load_rows();
    const KeyRange some = keys_of_rows();
    fetch_next_rows(some);
    dbias_end_ = 0;
    const int64_t unit = in_.dropout_below > 0 ? kDropoutBlock : Ops::kPair;  // counted from key_begin
    for (int64_t key0 = some.begin / unit * unit; key0 < some.end; key0 += t_.block_k)
      add_block(key0, some.end - key0 < t_.block_k ? some.end - key0 : t_.block_k);
    pass_over(dbias_end_, task_keys_);
    await_turn(t_, row0_, head_);
    store_dq();
  }

  // The keys [key0, key0 + keys) of the task, with the tile of rows.
  void add_block(int64_t key0, int64_t keys) {
    if (!begin_block(key0, keys)) return;
    multiply();
    if (!find_pairs()) return;
    weigh();
    if (block_.element_wise) look_at_pairs();
    if (t_.has_dbias) {
      pass_over(dbias_end_, key0);
      // dS is by the product q k; that is the gradient of a bias where scores are not capped and dS is kept in fp32.
      dbias_.template add<kTileVecs>(keeps_ ? scratch_.score_gradient : scratch_.ds, block_.at);
      dbias_end_ = key0 + keys;
    }
    add_block_to_keys();
    add_block_to_rows();
  }

  // dk and dv, as Out.
  template <class Out>
  void store_keys() const {
    const F32 scale = set1(t_.scale), scale_v = set1(in_.dropout_below > 0 ? in_.dropout_scale : 1.0f);
    for (int64_t key = 0; key < t_.key_end - t_.key_begin; ++key) {
      Out* dk = static_cast<Out*>(t_.dk) + (t_.key_begin + key) * t_.dk_stride;
      Out* dv = static_cast<Out*>(t_.dv) + (t_.key_begin + key) * t_.dv_stride;
      for (int64_t d = 0; d < t_.headdim; d += kLanes) store_n(dk + d, mul(load(scratch_.dk + key * width_ + d), scale), t_.headdim - d);
      for (int64_t d = 0; d < t_.headdim_v; d += kLanes) store_n(dv + d, mul(load(scratch_.dv + key * width_v_ + d), scale_v), t_.headdim_v - d);
    }
  }

  bool documents() const { return in_.document_q != nullptr; }
  IdRange ids_of_keys(int64_t begin, int64_t end) const { return ids_of(in_.document_k, t_.key_begin + begin, t_.key_begin + end); }

  // Keys [begin, end) of the task give the gradient of the bias nothing in this tile of rows.
  void pass_over(int64_t begin, int64_t end) const {
    if (t_.has_dbias) dbias_.pass_over(row0_, row0_ + rows_, t_.key_begin + begin, t_.key_begin + end);
  }

  // --- the tile of rows: backward_rows.h ---

  void load_rows();
  KeyRange keys_of_rows() const;
  void fetch_next_rows(KeyRange some);
  void store_dq();
  bool rows_nonfinite();
  void split_rows();

  // --- a block of keys with it: backward_block.h ---

  struct Block {
    int64_t key0, keys;  // of the task's
    BlockMask mask;
    TilePlace at;
    bool at_edge;       // of the mask: some row does not see some key
    bool mixed;         // of several documents
    Seen visible;       // by a mask of pairs
    bool element_wise;  // an Inf or NaN may meet a pair that does not count: each pair is looked at
    bool split_k;       // Inf and NaN have left the block's keys
  };

  bool begin_block(int64_t key0, int64_t keys);
  bool keys_nonfinite(int64_t begin, int64_t keys);
  // At an edge of the mask each half of the rows has products of its own, of the keys that it sees; what is left of s and ds is hidden later.
  __attribute__((always_inline)) KeyRange keys_seen_by(int64_t lane, int64_t lanes) const {
    return block_.at_edge ? keys_of_lanes<Ops>(block_.mask, block_.keys, lane, lanes) : KeyRange{0, block_.keys};
  }
  template <class Body>
  __attribute__((always_inline)) void for_parts(const Body& body) const {
    if (kPanelVecs < 4 || !block_.at_edge) return for_panels(0, vecs_, body);
    int w = 0;
    for (; w + 2 <= vecs_; w += 2) body(w, Count<2>{});
    if (w < vecs_) body(w, Count<1>{});
  }
  void multiply();
  void multiply_keys(int64_t begin, int64_t end);
  bool find_pairs();
  void weigh();
  void find_hidden();
  void look_at_pairs();
  void add_to_keys(const Element* of_pairs, const Element* columns, int headdim, float* to) const;
  void add_codes_to_keys(const Element* codes, int headdim, float* to) const;
  void add_block_to_keys();
  void add_to_rows(Scalars of_keys, const Element* of_pairs, float* to) const;
  void add_block_to_rows();

  // --- state ---

  const BackwardTask& t_;
  const ScoreInputs& in_;
  BackwardScratch<T, Ops> scratch_;
  const Scale scaling_;
  const int64_t task_keys_, width_, width_v_;  // columns of dk's and dv's sums
  const T* const k_;                           // of the task's first key
  const bool capped_, keeps_;                  // keeps_: the gradient of the scores beside dS
  Scalars k_rows_, v_rows_, k_columns_;
  IdRange task_ids_{};
  int64_t begin_ = 0;        // the first row that sees a key of the task
  int keys_nonfinite_ = -1;  // is there an Inf or NaN among the task's keys? Looked for when it is first asked
  F32 one_[kTileVecs], unused_[kTileVecs];
  // Of the tile of rows:
  int64_t row0_ = 0, rows_ = 0, head_ = 0;
  int vecs_ = 0;  // of the tile's that have rows
  IdRange ids_{};
  const T *q_ = nullptr, *dout_ = nullptr;
  float lse_[kTile], delta_[kTile];
  bool some_without_ = false;                   // a gradient
  int q_nonfinite_ = -1, dout_nonfinite_ = -1;  // likewise
  bool rows_split_ = false;                     // Inf and NaN have left q_finite and dout_finite
  NextRows next_q_, next_dout_, next_dq_, next_dq_low_;
  int64_t fetched_ = 0;  // rows a panel
  BiasGradient<T> dbias_;
  int64_t dbias_end_ = 0;  // up to this key of the task dbias has all it gets
  Block block_;
};

template <class T, class Ops>
void backward_task(const BackwardTask& task) {
  BackwardWalk<T, Ops>(task).run();
}

template <class T, class Ops>
size_t backward_scratch_bytes(const KernelShape& shape) {
  BackwardScratch<T, Ops> scratch;
  return scratch.lay_out(nullptr, shape.task_k, shape.block_k, shape.headdim, shape.headdim_v, shape.inputs);
}

template <class T>
void row_dots_of(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows, int headdim, float* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    F32 total = zero();
    for (int64_t d = 0; d < headdim; d += kLanes)
      total = fma(load_n(static_cast<const T*>(a) + r * a_stride + d, headdim - d), load_n(static_cast<const T*>(b) + r * b_stride + d, headdim - d),
                  total);
    to[r * to_stride] = sum(total);
  }
}

template <class T>
void sum_rows_of(const float* parts, int64_t part_stride, int64_t nparts, int64_t headdim, void* to) {
  for (int64_t d = 0; d < headdim; d += kLanes) {
    F32 total = load_n(parts + d, headdim - d);
    for (int64_t i = 1; i < nparts; ++i) total = add(total, load_n(parts + i * part_stride + d, headdim - d));
    store_n(static_cast<T*>(to) + d, total, headdim - d);
  }
}

}  // namespace fattn::core::FATTN_ISA
