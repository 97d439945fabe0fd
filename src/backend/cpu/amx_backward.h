// FlashAttention-2 backward in bf16 on AMX for a range of keys: query rows in lanes.
//
// The task's keys are packed once; blocks of 128 query rows of every head go past them, the last rows first, and each meets the keys panel by
// panel. For 32 keys and 32 rows:
//   S^T[key][q] = K Q^T     dP^T[key][q] = V dO^T                                     on AMX
//   P^T = exp2(S^T - lse)   dS^T = P^T (dP^T - delta), both rounded to bf16           on the vector units
// and for the whole panel, so that an accumulator takes several products each time that it is in a tile:
//   dV[key][d] += P^T dO    dK[key][d] += dS^T Q    dQ^T[d][q] += K^T dS^T            on AMX
// dS is kept in two orders: pairs of rows for dK, pairs of keys for dQ.
//
// Where pairs are hidden, Inf and NaN leave the operands of the last three products; codes say what they add (amx_nonfinite.h).
//
// The phases are members that are defined beside this file, which has the order of the work; isa_amx.cpp includes all.
#pragma once

#include "backend/cpu/amx_backward_layout.h"

namespace fattn::core::amx {

template <bool kOptions>
class Backward {
 public:
  explicit Backward(const BackwardTask& task)
      : t_(task),
        options_(task),
        hides_(kOptions && options_.hides),
        at_(task.key_end - task.key_begin, task.block_k, task.headdim, task.headdim_v, kOptions && (options_.has_inputs() || task.has_dbias)),
        scratch_(static_cast<char*>(task.scratch)) {
    log2_scale_ = options_.scale * kLog2E;  // a negative scale flips the signs of Q instead
  }

  void run() {
    const TileScope tiles;
    load_keys();
    for (row_ = (ceil_div(t_.seqlen_q, kBackwardRows) - 1) * kBackwardRows; row_ >= 0; row_ -= kBackwardRows)
      for (head_ = 0; head_ < t_.group; ++head_) {
        rows_ = min_of(kBackwardRows, t_.seqlen_q - row_);
        say_begun(t_, row_, row_ + rows_, head_);
        const int64_t keys = t_.key_end - t_.key_begin;
        const int64_t begin = (first_key(row_) - t_.key_begin) / kSide * kSide, end = limit(row_ + rows_ - 1) - t_.key_begin;
        if (begin >= end || !meets_documents(keys)) {
          pass_over(row_, rows_, 0, keys);
          continue;
        }
        load_rows();
        pass_over(row_, rows_, 0, begin);
        for (int64_t square = begin / kSide; square * kSide < end; square += at_.panel)
          add_panel(square, min_of(at_.panel, ceil_div(end, kSide) - square));
        pass_over(row_, rows_, ceil_div(end, kSide) * kSide, keys);
        await_turn(t_, row_, head_);
        store_dq();
      }
    store_gradient(at_.dk, at_.depth, t_.headdim, t_.scale, t_.dk, t_.dk_stride);
    store_gradient(at_.dv, at_.depth_v, t_.headdim_v, t_.inputs.dropout_below > 0 ? t_.inputs.dropout_scale : 1.0f, t_.dv, t_.dv_stride);
  }

 private:
  static constexpr int64_t kSquares = BackwardLayout::kSquares;
  static constexpr char kHasNonfinite = 0, kIsFinite = 1, kIsSplit = 2;

  // Of the task's keys a row sees [first_key, limit).
  int64_t limit(int64_t row) const { return max_of(0, min_of(t_.key_end, row + t_.diagonal)); }
  int64_t first_key(int64_t row) const { return kOptions ? max_of(t_.key_begin, row + t_.left_diagonal) : t_.key_begin; }
  char* tile(int64_t offset, int64_t index) const { return scratch_ + offset + index * kTileBytes; }
  float* values(int64_t offset, int64_t index) const { return reinterpret_cast<float*>(tile(offset, index)); }
  // Of a square of the task's keys: kIsFinite, kHasNonfinite, or kIsSplit, if these left K^T.
  char& finite_keys(int64_t square) const { return scratch_[at_.finite_k + square]; }
  Coded& key_codes(int64_t square) const { return reinterpret_cast<Coded*>(scratch_ + at_.key_codes)[square]; }
  // Which keys of square c of the panel the rows of square r see, of their halves. Kept where Inf and NaN have left.
  __m512i* seen_words(int64_t c, int64_t r) const { return reinterpret_cast<__m512i*>(scratch_ + at_.words) + (c * kSquares + r) * 2; }

  // May some of the block's rows and of the task's keys be of the same document?
  bool meets_documents(int64_t keys) const {
    return !kOptions || !options_.documents || vec::may_meet(ids_of_rows(row_, rows_), ids_of_keys(0, keys));
  }
  vec::IdRange ids_of_rows(int64_t row, int64_t rows) const { return vec::ids_of(t_.inputs.document_q, row, row + rows); }
  vec::IdRange ids_of_keys(int64_t key, int64_t end_key) const {
    return vec::ids_of(t_.inputs.document_k, t_.key_begin + key, t_.key_begin + end_key);
  }

  vec::BiasGradient<vec::bf16> bias_gradient() const { return vec::bias_gradient_of<vec::bf16>(t_, head_); }
  // Nothing comes to the gradient of the bias from these rows and keys of the task.
  void pass_over(int64_t row, int64_t rows, int64_t key, int64_t end_key) const {
    if (kOptions && t_.has_dbias && key < end_key) bias_gradient().pass_over(row, row + rows, t_.key_begin + key, t_.key_begin + end_key);
  }

  // --- keys and rows, packed and stored: amx_backward_memory.h ---

  static bool all_finite(const uint16_t* x, int64_t stride, int64_t rows, int headdim);
  void clear(int64_t offset, int64_t tiles) const {
    for (int64_t r = 0; r < tiles * 16; ++r) store_row(scratch_ + offset, r, _mm512_setzero_si512());
  }

  void load_keys();

  // Rounding to bf16 by an integer addition would make a number of a NaN with ones in its low half.
  static float plain_nan(float x) { return x == x ? x : __builtin_nanf(""); }

  void load_rows();

  // Of the task's keys: those that some row of a square sees lie in [seen_begin, seen_end), those that all see are [whole_begin, whole_end).
  struct SquareRows {
    int64_t seen_begin, seen_end, whole_begin, whole_end;
  };
  auto rows_of_square(int64_t r) const -> SquareRows;
  void store_dq() const;
  FATTN_AMX_INLINE void add_to_halves(__m512 x, __m512 scale, uint16_t* high, uint16_t* low, __mmask16 lanes);
  void store_gradient(int64_t offset, int64_t depth, int headdim, float scale, void* to, int64_t stride) const;

  // --- a panel of keys with the block of rows: amx_backward_products.h, amx_backward_nonfinite.h ---

  void add_panel(int64_t first, int64_t squares);
  __attribute__((noinline)) void split_operands(int64_t first, int64_t squares);
  __attribute__((noinline)) void add_nonfinite(int64_t first, int64_t squares, int64_t row_squares, const uint64_t (&computed)[kSquares]);
  template <class Counts, class Product>
  void add_codes(int64_t n, int64_t acc, int64_t acc_row, const Counts& counts, const Product& product);
  void tell_kinds_of_rows(int64_t c, int64_t r) const;
  void tell_kinds_of_keys(int64_t c, int64_t r) const;
  void add_products_of_panel(int64_t first, int64_t squares, int64_t row_squares, const uint64_t (&computed)[kSquares]);
  void clear_square(int64_t c, int64_t r) const;
  static void multiply_square(const char* a, const char* b, int64_t depth, char* to);
  static void add_products(const char* a, const char* b, int64_t n, int64_t a_step, int64_t a_pair, int64_t b_step, int64_t b_pair, int64_t d_pairs,
                           char* acc, int64_t acc_row, bool walk_b);

  // --- a square: amx_backward_square.h ---

  void prefetch_inputs(int64_t keys, int64_t r) const;
  bool compute_square(int64_t keys, int64_t c, int64_t r, bool whole, bool split);
  FATTN_AMX_INLINE void store_gradients(char* ds, char* ds_keys, int row, const __m512i (&rounded)[2][2]);
  template <bool masked>
  void weigh_square(int64_t keys, int64_t c, int64_t r);

  // What options make of a square beside products.
  struct SquareOptions {
    bool whole;          // all rows see all keys, as far as their places go
    bool masked, mixed;  // pairs are hidden by the mask, by documents
    bool split;          // Inf and NaN have left operands; seen_words() says which pairs count
  };
  float* terms() const { return values(at_.terms, 0); }         // [32 keys][32 rows]: what is added to capped scores
  float* gradients() const { return values(at_.gradient, 0); }  // likewise, of whole scores
  uint32_t* mask_words() const { return reinterpret_cast<uint32_t*>(tile(at_.mask_words, 0)); }
  uint32_t* dropout_words() const { return reinterpret_cast<uint32_t*>(tile(at_.dropout_words, 0)); }

  void weigh_with_options(const vec::TilePlace& at, int64_t keys, int64_t c, int64_t r, const SquareOptions& with);
  __m512i words_of_square(const vec::TilePlace& at, int64_t keys, int64_t r, int q, const SquareOptions& with) const;
  __m512i counting_words_of_square(const vec::TilePlace& at, int64_t keys, int64_t r, int q, const SquareOptions& with) const;
  template <bool kCapped, bool kDrops, bool kCounts, bool kKeeps>
  __attribute__((noinline)) void weigh_square_with(int64_t keys, int64_t c, int64_t r, const __m512i (&seen)[2], bool split, bool apart);

  // --- state ---

  const BackwardTask& t_;
  const TaskOptions options_;
  const bool hides_;  // options_.hides, false without options
  const BackwardLayout at_;
  char* const scratch_;
  float log2_scale_;
  // Of the block of rows at hand:
  int64_t head_ = 0, row_ = 0, rows_ = 0;
  bool finite_rows_ = true, split_rows_ = false;  // are Q and dO finite; have Inf and NaN left them?
  Coded q_codes_[kSquares] = {}, dout_codes_[kSquares] = {};
  alignas(64) float lse_[kBackwardRows];  // in fixed-point log2 units; with options as it is
  alignas(64) float delta_[kBackwardRows];
  alignas(64) int32_t begin_[kBackwardRows];  // of the task's keys a row sees [begin_, visible_)
  alignas(64) int32_t visible_[kBackwardRows];
  int64_t dropout_key_ = -1;  // the block of random numbers whose words are there, for the square of rows at hand
};

static size_t backward_scratch_bytes(const KernelShape& shape) {
  return static_cast<size_t>(BackwardLayout(shape.task_k, shape.block_k, shape.headdim, shape.headdim_v, shape.inputs).bytes);
}

static void backward_bf16(const BackwardTask& task) {
  if (task.key_begin >= task.key_end) return;
  if (has_options(task) || task.has_dbias)
    Backward<true>(task).run();
  else
    Backward<false>(task).run();
}

}  // namespace fattn::core::amx
