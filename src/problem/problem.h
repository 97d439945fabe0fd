// A validated attention problem: shapes, strides, dtype and options, immutable. Every error that the host can know
// without looking at the data is raised here.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "device_abi/mask.h"
#include "fattn/tensors.hpp"
#include "problem/overlap.h"

namespace fattn::core {

inline constexpr int64_t kMaxHeaddim = 576;

// Elements between neighbours. For q, k, v, o and gradients `row` steps along the sequence; for lse too.
struct Strides {
  int64_t batch = 0, row = 0, head = 0;
};

// A tensor over (batch, head, query, key): bias, mask, dbias. A dimension of one element has the stride 0, so that it is read for all.
struct PairTensor {
  bool given = false;
  DType dtype = DType::kF32;
  int64_t batch = 0, heads = 0, rows = 0;  // its sizes
  Strides strides;                         // of batch, query and head; keys lie side by side
};

// The rows of a batch entry: the first of them in q and in k and v (0, unless sequences are packed), how many there are, and how many keys count.
struct Sequence {
  int64_t q_begin = 0, seqlen_q = 0, k_begin = 0, seqlen_k = 0, keys = 0;
};

struct Problem {
  bool backward = false;
  DType dtype = DType::kF32;
  bool fp32_out = false;  // o, backward dq, dk and dv are fp32, and dtype has 16 bits
  // Of packed sequences batch is their number, seqlen_q and seqlen_k are the most that one has, and strides between batch entries are 0.
  bool packed = false;
  // Of a paged cache seqlen_k is what the table has room for, and k and v have strides of a page instead of a batch entry: those between entries are
  // 0.
  bool paged = false;
  int64_t page_size = 0, pages = 0;  // keys of a page, and pages of k and v
  int64_t k_page_stride = 0, v_page_stride = 0, block_table_stride = 0;
  int64_t total_q = 0, total_k = 0;  // rows of packed tensors; total_k of a paged cache: of all tables
  int64_t batch = 0, seqlen_q = 0, seqlen_k = 0, nheads = 0, nheads_k = 0, headdim = 0, headdim_v = 0;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  // -1: no limit. As mask() wants them: what a limit of 0 or causal say already is said once
  double softmax_scale = 0;
  double softcap = 0;           // 0: none
  bool dropout_places = false;  // dropout_state has the places of the first row and key, too
  int dropout_below = 0;        // a weight is dropped if its random number of 16 bits is below; 0: no dropout
  Backend backend = Backend::kAuto;
  Algorithm algorithm = Algorithm::kAuto;
  Isa cpu_isa = Isa::kAuto;
  int num_threads = 0;
  std::optional<fattn_executor> executor;
  Device device = Device::kCpu;  // of every tensor
  int device_index = 0;
  bool deterministic = false;
  bool batch_invariant = false;  // forward
  int32_t check = FATTN_CHECK_AUTO;
  bool want_status = false;
  int cuda_level = 0;

  bool want_lse = false, want_weights = false, has_dlse = false, has_documents = false, has_sinks = false, want_dsinks = false;
  Strides q, k, v, o, lse, dout, dq, dk, dv, dlse;
  int64_t weights_strides[4] = {};  // batch, head, query, key
  bool has_seqused_k = false, has_alibi = false;
  int64_t seqused_k_stride = 0, alibi_batch_stride = 0, alibi_head_stride = 0, cu_seqlens_q_stride = 0, cu_seqlens_k_stride = 0;
  int64_t sinks_stride = 0, dsinks_stride = 0;
  int64_t document_q_stride = 0, document_k_stride = 0;  // between batch entries
  PairTensor bias, pair_mask, dbias;
  // Of each of kTensors: where its elements lie, and how many bytes they span; 0: nothing of it is touched, as it is absent or empty.
  std::array<Extent, kTensorCount> extents = {};
  std::array<int64_t, kTensorCount> bytes = {};

  int64_t group() const { return nheads / nheads_k; }  // query heads that share a key head
  Mask mask() const { return mask(seqlen_k); }
  // Of a batch entry that has the first `keys` of seqlen_k keys.
  Mask mask(int64_t keys) const { return {seqlen_q, keys, causal, window_left, window_right}; }
  Mask mask(const Sequence& s) const { return {s.seqlen_q, s.keys, causal, window_left, window_right}; }
  // The tensors' rows as one dense batch has them: packed sequences are one entry of all rows, where nothing depends on which row is whose.
  int64_t dense_batch() const { return packed ? 1 : batch; }
  int64_t dense_rows() const { return packed ? total_q : seqlen_q; }
  int64_t dense_keys() const { return packed ? total_k : seqlen_k; }
  // Does every score depend on its row and key beside q k?
  bool has_pair_terms() const { return has_alibi || bias.given || pair_mask.given; }
  double dropout_scale() const { return 65536.0 / (65536 - dropout_below); }  // of the weights that stay
  // Backward: batch entries, or key heads, whose sums for dbias are one.
  bool shares_dbias_of_batch() const { return dbias.given && dbias.batch < batch; }
  bool shares_dbias_of_heads() const { return dbias.given && dbias.heads < nheads; }
  // How many (batch entry, key head) are independent of each other, then.
  int64_t backward_units() const { return (shares_dbias_of_batch() ? 1 : batch) * (shares_dbias_of_heads() ? 1 : nheads_k); }
  bool windowed() const { return window_left >= 0 || window_right >= 0; }
  // Without queries a dense batch's lengths are nobody's business.
  bool uses_lengths() const { return has_seqused_k && (packed || !empty()); }
  bool has_pairs() const {  // of a row and a key
    constexpr size_t kQ = tensor_index("q"), kK = tensor_index("k");
    return bytes[kQ] > 0 && bytes[kK] > 0;
  }
  DType out_dtype() const { return fp32_out ? DType::kF32 : dtype; }
  bool empty() const { return packed ? total_q == 0 : batch == 0 || seqlen_q == 0; }  // no output row
};

// Throws Error(kAbi) or Error(kInvalidArgument).
Problem validate(const fattn_problem& given);

// Null, misaligned and overlapping pointers. Throws Error(kInvalidArgument).
void validate_buffers(const Problem& problem, const fattn_buffers& buffers);

// Of the 65536 numbers that a weight's may be, those below drop it. Throws Error(kInvalidArgument).
int dropout_below(double p_dropout);

// FATTN_CHECK_NONE or _SYNC, for problems that leave it open: of the process, and of plans that there are already, too.
void set_default_check(int32_t check);
// Whether lists in device memory are looked at before anything is computed.
bool checks_lists(const Problem& problem);

// Values in host memory that decide what is read: lengths. Throws Error(kInvalidArgument).
void validate_host_values(const Problem& problem, const fattn_buffers& buffers);

// Where the n-th of packed sequences begins; n may be batch, where the last one ends. Of keys with seqused_k nothing is there, and they are in any
// order.
inline int64_t first_query_of(const Problem& p, const fattn_buffers& b, int64_t n) {
  return static_cast<const int32_t*>(b.cu_seqlens_q)[n * p.cu_seqlens_q_stride];
}
inline int64_t first_key_of(const Problem& p, const fattn_buffers& b, int64_t n) {
  return static_cast<const int32_t*>(b.cu_seqlens_k)[n * p.cu_seqlens_k_stride];
}

// The rows of a batch entry.
inline Sequence sequence_of(const Problem& p, const fattn_buffers& b, int64_t n) {
  Sequence s{0, p.seqlen_q, 0, p.seqlen_k, p.seqlen_k};
  if (p.packed) {
    s.q_begin = first_query_of(p, b, n);
    s.seqlen_q = first_query_of(p, b, n + 1) - s.q_begin;
  }
  if (p.packed && !p.paged) {
    s.k_begin = first_key_of(p, b, n);
    if (!p.has_seqused_k) s.keys = s.seqlen_k = first_key_of(p, b, n + 1) - s.k_begin;
  }
  if (p.has_seqused_k) s.keys = static_cast<const int32_t*>(b.seqused_k)[n * p.seqused_k_stride];
  if (p.packed) s.seqlen_k = s.keys;
  return s;
}

// The pages of a batch entry's keys.
inline const int32_t* pages_of(const Problem& p, const fattn_buffers& b, int64_t n) {
  return static_cast<const int32_t*>(b.block_table) + n * p.block_table_stride;
}

// Rows of packed tensors from this one on belong to no sequence; of keys with seqused_k any may.
inline int64_t end_of_queries(const Problem& p, const fattn_buffers& b) { return p.packed ? first_query_of(p, b, p.batch) : 0; }
inline int64_t end_of_keys(const Problem& p, const fattn_buffers& b) { return p.packed && !p.has_seqused_k ? first_key_of(p, b, p.batch) : 0; }

// Arithmetic of the problem, from the shapes alone.
struct Cost {
  double flops = 0;          // visible pairs, as masks and seqlen_k say: what seqused_k and `mask` hide is not known
  double flops_nominal = 0;  // all pairs, halved if causal; visible pairs in a window
  double bytes = 0;          // inputs once, outputs once
};
Cost cost_of(const Problem& problem);

}  // namespace fattn::core
