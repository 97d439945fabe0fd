// What a kernel is told about one call: pointers, strides, sizes. Passed by value; include-free, compiled by the host and by NVRTC.
// Compile-time facts (dtype, headdims, causal, alignment) are in the kernel's specialisation instead.
#pragma once

namespace fattn {

// Elements between neighbours; the last dimension (headdim) is contiguous.
struct TensorStrides {
  long long batch, row, head;
};

struct AttentionParams {
  // (batch, seqlen, nheads or nheads_k, headdim or headdim_v)
  const void* q;
  const void* k;
  const void* v;
  void* o;     // read by backward
  float* lse;  // (batch, nheads, seqlen_q), natural log; null: not wanted
  const void* dout;
  void* dq;
  void* dk;
  void* dv;

  // Workspace of backward.
  float* dq_accum;
  float* row_sum;
  int* dq_semaphore;  // deterministic only

  TensorStrides q_strides, k_strides, v_strides, o_strides, lse_strides, dout_strides, dq_strides, dk_strides, dv_strides;

  int batch, seqlen_q, seqlen_k, nheads, nheads_k;
  int group;              // query heads that share a key head: nheads / nheads_k
  int heads_per_section;  // (batch, head) pairs whose tiles run side by side, so that their K and V stay in L2

  float softmax_scale;       // as given
  float softmax_scale_log2;  // |softmax_scale| * log2(e), or 1 where softmax_scale is 0: forward moves sign and 0 into q
};

// The parameters of specialisations with a window or capped scores, in place of AttentionParams, so that those of the others are as if there were
// none. With softcap forward's softmax_scale is 1, and softmax_scale_log2 is softcap * log2(e), forward and backward: what tanh is multiplied by.
struct FeatureParams : AttentionParams {
  int window_left, window_right;  // -1: no limit; causal is a window_right of 0
  float score_factor;             // kTanhUnit * softmax_scale / softcap: tanh is taken of q k * score_factor / kTanhUnit
};

// Which features of pairs (query, key) and of batch entries a specialisation has; Spec::kPair, none where there is no such member.
struct PairFeatures {
  bool lengths = false;  // of the batch entries' keys
  bool alibi = false;
  int bias = 0;  // 1: of the tensors' dtype; 2: fp32
  bool mask = false;
  bool dropout = false;
  bool dbias = false;      // backward
  bool packed = false;     // sequences of lengths of their own, one behind the other
  bool documents = false;  // a query sees the keys of its own id
  bool dlse = false;       // of the kernels that make row sums alone: those that prepare a backward pass, and algorithm standard's
  bool sinks = false;      // forward: a logit of each head joins the sum of a row's weights
  bool paged = false;      // forward: keys are in pages (Pages), and each batch entry has a length
  bool fp32_out = false;   // outputs are fp32, of inputs of 16 bits: o, backward dq, dk and dv
  bool places = false;     // with dropout: dropout_state has the places of the first query and key in the whole matrix

  constexpr bool hides() const { return bias != 0 || mask || documents; }  // pairs anywhere
  constexpr bool terms() const { return alibi || hides(); }                // something is added to scores
  constexpr PairFeatures with_documents(bool has) const {
    PairFeatures other = *this;
    other.documents = has;
    return other;
  }
  constexpr bool any() const { return lengths || terms() || dropout || dbias || packed; }
};

inline constexpr int kDbiasThreads = 256;  // of a CTA of kernels/v2/dbias.h, which takes a row of keys

// The parameters of specialisations that have some, in place of FeatureParams. Strides as there, 0 where all share; keys lie side by side.
struct PairParams : FeatureParams {
  const int* lengths;       // keys that each batch entry has
  long long length_stride;  // elements
  const float* alibi_slopes;
  long long alibi_batch_stride, alibi_head_stride;
  const void* bias;
  const unsigned char* pair_mask;
  TensorStrides bias_strides, pair_mask_strides;

  float* dbias;  // (dbias_batch, dbias_heads, dbias_rows, seqlen_k); kernels/v2/dbias.h makes it 0 before the pass and has it in dbias_out behind it
  void* dbias_out;
  TensorStrides dbias_strides, dbias_out_strides;
  int dbias_batch, dbias_heads, dbias_rows;
  int dbias_alone;  // every element of dbias is of one pair

  const unsigned long long* dropout_state;  // seed, offset; with `places` those of the first query and key
  unsigned dropout_below;                   // device_abi/dropout.h
  float dropout_scale;                      // of the weights that stay
  unsigned dropout_thresholds[16];          // dropout_threshold() of each bit: operands, from where they are

  // Packed sequences: (batch + 1) offsets of each. seqlen_q and seqlen_k are the most rows that one has, and strides between batch entries are 0.
  const int *cu_seqlens_q, *cu_seqlens_k;
  long long cu_seqlens_q_stride, cu_seqlens_k_stride;
  long long total_q, total_k;  // rows of the tensors
  void* tiles;      // of algorithm v3: tiles of packed sequences (device_abi/v3_packed_tiles.h), what documents leave, words of a mask, which
                    // follow what says which blocks it shows
  int tile_groups;  // of sequences, in that list

  const int *document_q, *document_k;              // ids
  long long document_q_stride, document_k_stride;  // between batch entries; rows lie side by side

  const float* dlse;
  TensorStrides dlse_strides;

  const float* sinks;  // of each query head
  long long sinks_stride;
};

// Where the keys of a paged cache are.
struct Pages {
  const int* table;                  // (batch, columns): numbers of pages
  long long table_stride;            // between batch entries
  long long k_stride, v_stride;      // elements from page to page; the strides of rows are those of the tensors
  int count;                         // pages of k and v
  int size;                          // keys of a page
  unsigned size_factor, size_shift;  // what a key's number is divided by `size` with (Divisor, v3_forward_work.h)
};

// The parameters of specialisations with pages, in place of PairParams. Strides of k and v between batch entries are 0, and seqlen_k is what a row of
// the table has room for.
struct PagedParams : PairParams {
  Pages pages;
};

// In this unit of its argument the polynomial for tanh in kernels/score.h has a leading coefficient of -1: an operation and a register less.
inline constexpr float kTanhUnit = 0.6408731937f;

}  // namespace fattn
