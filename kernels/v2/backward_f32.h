// Backward in fp32 on the matrix instructions for fp16, main kernel: the products of v2/backward.h, with every operand split into two fp16 and every
// product made of three (tile/split_tile.h). Level 80.
//
// A CTA owns kBlockN keys of one key head and walks over the blocks of kBlockM queries that see them, of all query heads that share the key head:
//   S^T = K Q^T    P^T = exp(S^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dV += P^T dO    dK += dS^T Q    dQ += dS K
// Each group of keys has two warps. One computes S^T, P^T and dV, the other dP^T, dS^T and dK; P^T goes from the one to the other through shared
// memory as it is, in fp32. dS^T, split, is in shared memory for dQ, which all warps compute together when the block is done. What comes from shared
// memory was scaled by powers of two, the keys once and the queries block by block, and is scaled back when it is added to a gradient in fp32.
//
// With softcap P^T (1 - T^2) goes to the second warp in place of P^T, T the capped scores before they are multiplied by softcap. With features of
// pairs (kernels/pair.h) it is marked by its sign: of a dropped pair the second warp takes nothing of dP^T, and of -0, a pair that bias or mask
// hides, nothing at all. Dropout's scale comes last: dP^T - row_sum is taken in units of it.
//
// Spec: kHeaddim, kHeaddimV; kCausal; kWindow (kCausal is then false); kCapped; kAligned (16-byte copies); kDeterministic; kTile (a BackwardF32Tile);
// kPair, none if it is left out.
#pragma once

#include "kernels/constants.h"
#include "kernels/documents.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/async_copy_word.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/score.h"
#include "kernels/tile/split_product.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/backward_f32_again.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/greatest.h"
#include "kernels/v2/split_rows_tile.h"
#include "kernels/v2/swizzled_tile.h"
#include "kernels/v2/workspace.h"
#include "shared/attention_params.h"
#include "shared/backward_f32_layout.h"
#include "shared/backward_layout.h"
#include "shared/mask.h"

namespace fattn::v2 {

template <class Spec>
class BackwardF32 {
  static constexpr BackwardF32Tile kTile = Spec::kTile;
  static constexpr int kWidth = kTile.width, kWidthV = kTile.width_v, kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.threads(), kWarps = kTile.warps();
  static constexpr bool kSplitBefore = kTile.query_stages == 2;  // q and dout
  static constexpr bool kWindow = Spec::kWindow, kCapped = Spec::kCapped, kMasked = Spec::kCausal || kWindow;
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  static constexpr bool kHides = kPair.hides();
  // Blocks of queries that ids of documents leave out: not where key blocks wait for each other and are counted.
  static constexpr bool kByIds = kPair.documents && !Spec::kDeterministic;
  using TileK = SplitRows<kBlockN, kWidth>;
  using TileV = SplitRows<kBlockN, kWidthV>;
  using TileQ = SplitRows<kBlockM, kWidth>;
  using TileDout = SplitRows<kBlockM, kWidthV>;
  using TileDs = SplitRows<kBlockN, kBlockM>;
  using CopyK = tile::SplitCopy<TileK, kThreads, Spec::kHeaddim, Spec::kAligned>;
  using CopyV = tile::SplitCopy<TileV, kThreads, Spec::kHeaddimV, Spec::kAligned>;
  using CopyQ = tile::SplitCopy<TileQ, kThreads, Spec::kHeaddim, Spec::kAligned>;
  using CopyDout = tile::SplitCopy<TileDout, kThreads, Spec::kHeaddimV, Spec::kAligned>;

  // What a warp computes. S^T or dP^T: kKeys x kBlockM, kChunk queries at a time. dV or dK: kKeys rows.
  static constexpr int kKeys = kBlockN / kTile.key_groups, kChunk = kTile.chunk, kChunks = kBlockM / kChunk;
  static constexpr int kKeyTiles = kKeys / 16, kChunkTiles = kChunk / 8, kDepths = kChunk / 16;
  static constexpr int kParts = kTile.parts, kColumns = kWidth / kParts, kColumnsV = kWidthV / kParts;  // of dK and dQ, of dV
  static constexpr int kSumTiles = (kColumns > kColumnsV ? kColumns : kColumnsV) / 8;
  // dQ: the warps split a block's rows and columns.
  static_assert(kTile.dq_row_warps() > 0);
  static constexpr int kDqRowWarps = kTile.dq_row_warps(), kDqRows = kBlockM / kDqRowWarps, kDqColumns = kColumns / (kWarps / kDqRowWarps);
  static constexpr int dq_span() {
    int parts = 1;
    while (kDqRows * kDqColumns / parts > 1024 || kDqColumns % (16 * parts) != 0) ++parts;
    return kDqColumns / parts;
  }
  static constexpr int kDqSpan = dq_span();  // columns at a time: dK and dV leave room for 64 accumulators

  static_assert(kKeys % 16 == 0 && kColumns % 16 == 0 && kColumnsV % 16 == 0 && kBlockM % kChunk == 0 && kChunk % 16 == 0 && 2 * kBlockM <= kThreads);
  static_assert(kTile.key_groups * kChunks <= 15, "barrier 0 is __syncthreads");

  // P, at most 1, enters its product as P * 2^14. dP - row_sum is bounded by the width times the greatest of v and dO; dS enters its products scaled
  // so that an eighth of that is 2^15, which is never reached but where nearly all weight is on a pair with parallel v and dO: then Inf, computed
  // again.
  static constexpr int pow2_above(int x) { return x <= 1 ? 1 : 2 * pow2_above((x + 1) / 2); }
  static constexpr float kWeightFactor = 16384.0f, kGradientFactor = 1.0f / 4096 / pow2_above(kWidthV);

  CallParams<kPair>& p;  // of packed sequences OwnParams, once the tile is known
  const unsigned shared;
  const BackwardF32Parts parts_before;  // kSplitBefore
  unsigned stage = 0;                   // of the block of queries at hand, likewise
  // Which thread this is. Found again at each use, not kept: registers are few. Masked, so that the compiler knows it not to be negative: division by
  // powers of two is then a shift.
  __device__ static int this_thread() { return ptx::opaque(static_cast<int>(threadIdx.x)) & 1023; }
  __device__ static int this_lane() { return this_thread() & 31; }
  __device__ static int this_warp() { return ptx::thread_place().warp & 31; }
  __device__ static bool computes_values() { return this_warp() < kTile.key_groups; }  // S, P, dV; otherwise dP, dS, dK
  __device__ static int this_group() { return this_warp() % kTile.key_groups; }
  int batch, head_k, first_key, part;
  int entry_keys;                     // kPair.lengths: keys of this batch entry
  int ids_begin, ids_end;             // kByIds: no query before the first of these blocks or from the second on has an id of these keys
  float query_inverse, dout_inverse;  // of the splitting of q and dout, in the block at hand
  // Of k and v: in shared memory, because registers are few.
  __device__ float key_inverse() const { return ptx::ld_shared_f32(shared + kTile.inverse_offset()); }
  __device__ float value_inverse() const { return ptx::ld_shared_f32(shared + kTile.inverse_offset() + 4); }

  // Of the CTA's packed sequence: where its queries begin, how many there are, where its keys begin, how many.
  __device__ int sequence_number(int nth) const { return static_cast<int>(ptx::ld_shared_4(shared + kTile.sequence_offset() + 4 * nth)); }
  // As p. Of packed sequences found again from where theirs begins, in shared memory: registers are few.
  __device__ decltype(auto) found_params() const {
    if constexpr (kPair.packed) {
      const uint4 at = ptx::ld_shared_16(shared + kTile.sequence_offset());
      const auto rows = [](unsigned begin, unsigned count) { return Rows{static_cast<int>(begin), static_cast<int>(count)}; };
      PairParams own = pairs_of(static_cast<const OwnParams&>(p).call);
      enter<kWidth, kBlockM, float>(own, batch, {rows(at.x, at.y), rows(at.z, at.w)});
      return own;
    } else {
      return (p);
    }
  }

  // The query block that a step is about.
  struct Step {
    int head, block;  // query head, query block
  };
  __device__ Step after(Step step) const {
    return step.block + 1 < blocks_end() ? Step{step.head, step.block + 1} : Step{step.head + 1, first_block()};
  }
  // Of packed sequences from shared memory, as in found_params().
  __device__ int seqlen_q() const { return kPair.packed ? sequence_number(1) : p.seqlen_q; }
  __device__ int seqlen_k() const { return kPair.lengths ? entry_keys : kPair.packed ? sequence_number(3) : p.seqlen_k; }
  // Query i sees the keys j <= i + diagonal().
  __device__ int diagonal() const {
    if constexpr (kWindow) return mask().ends() ? mask().diagonal() - 1 : kNoLimit;
    return seqlen_k() - seqlen_q();
  }
  // kWindow: and j >= i + left_diagonal().
  __device__ int left_diagonal() const { return mask().begins() ? mask().left_diagonal() : -kNoLimit; }
  // Of the queries that see these keys.
  __device__ int first_block() const { return kByIds ? ids_begin : first_unmasked_block(); }
  __device__ int blocks_end() const { return kByIds ? ids_end : unmasked_blocks_end(); }
  __device__ int first_unmasked_block() const {
    if constexpr (kWindow) return mask().first_row(first_key) / kBlockM;
    return Spec::kCausal ? max(0, first_key - diagonal()) / kBlockM : 0;
  }
  __device__ int unmasked_blocks_end() const {
    if constexpr (kWindow) return (mask().row_end(min(first_key + kBlockN, seqlen_k()) - 1) + kBlockM - 1) / kBlockM;
    return query_blocks();
  }
  __device__ int query_blocks() const { return static_cast<int>((static_cast<unsigned>(seqlen_q()) + kBlockM - 1) / kBlockM); }
  static constexpr int kNoLimit = 1 << 30;
  __device__ core::Mask32 mask() const {
    if constexpr (kWindow)
      return window_mask_of<kPair>(p, seqlen_k());
    else
      return {seqlen_q(), seqlen_k(), Spec::kCausal};
  }
  // How many blocks of lower keys add to dQ of a block of queries.
  __device__ int nth_key_block(int query_block) const {
    const int key_block = first_key / kBlockN;
    if constexpr (kWindow) return key_block - mask().visible_begin(query_block * kBlockM) / kBlockN;
    return key_block;
  }

  // Tiles are dealt section by section: heads of a section together, so that their Q, dO and dQ stay in L2, and in a section key block by key
  // block: under a causal mask the first is the longest.
  __device__ void take_tile() {
    int index = static_cast<int>(blockIdx.x);
    if constexpr (Spec::kDeterministic) {
      // CTAs wait for those of lower key blocks. Numbers drawn when a CTA starts make sure that those have started.
      if (this_thread() == 0) ptx::st_shared_4(shared, static_cast<unsigned>(ptx::atomic_add(p.dq_semaphore, 1)));
      __syncthreads();
      index = static_cast<int>(ptx::ld_shared_4(shared));
      __syncthreads();
    }
    part = index % kParts;
    index /= kParts;
    const int key_blocks = (p.seqlen_k + kBlockN - 1) / kBlockN, heads = p.batch * p.nheads_k;
    const int section = index / (key_blocks * p.heads_per_section), first_head = section * p.heads_per_section;
    const int section_heads = min(p.heads_per_section, heads - first_head), rest = index - first_head * key_blocks;
    const int head = first_head + rest % section_heads;
    batch = head / p.nheads_k;
    head_k = head % p.nheads_k;
    first_key = rest / section_heads * kBlockN;
    if constexpr (kPair.packed) {
      const Sequence at = given_sequence(p, batch);
      if (this_thread() == 0)
        ptx::st_shared_16(shared + kTile.sequence_offset(), uint4{static_cast<unsigned>(at.q.begin), static_cast<unsigned>(at.q.count),
                                                                  static_cast<unsigned>(at.k.begin), static_cast<unsigned>(at.k.count)});
      __syncthreads();
      enter<kWidth, kBlockM, float>(p, batch, at);
      if (first_key >= p.seqlen_k) return;
    }
    if constexpr (kPair.lengths) entry_keys = keys_of<kPair>(p, batch);
    if constexpr (kByIds) {
      extern __shared__ __align__(1024) unsigned char shared_memory[];
      const PairParams& pairs = pairs_of(p);
      const IdRange range =
          common_range<kThreads>(pairs.document_k + batch * pairs.document_k_stride + first_key, min(kBlockN, seqlen_k() - first_key),
                                 pairs.document_q + batch * pairs.document_q_stride, first_unmasked_block() * kBlockM,
                                 min(unmasked_blocks_end() * kBlockM, p.seqlen_q), reinterpret_cast<int*>(shared_memory));
      ids_begin = range.begin / kBlockM;
      ids_end = range.begin == range.end ? ids_begin : (range.end + kBlockM - 1) / kBlockM;
      __syncthreads();  // before the keys are where the range was
    }
  }

  // ---- load ----
  __device__ static const float* at(const void* tensor, const TensorStrides& s, int batch, int head, long long row) {
    return static_cast<const float*>(tensor) + batch * s.batch + head * s.head + row * s.row;
  }
  __device__ unsigned v_tile() const { return shared + kTile.v_offset(); }
  __device__ unsigned q_tile() const { return shared + kTile.q_offset() + in_stage(kTile.q_bytes()); }
  __device__ unsigned dout_tile() const { return shared + kTile.dout_offset() + in_stage(kTile.dout_bytes()); }
  __device__ unsigned lse_at() const { return shared + kTile.lse_offset() + in_stage(kTile.row_bytes()); }
  __device__ unsigned row_sum_at() const { return shared + kTile.row_sum_offset() + in_stage(kTile.row_bytes()); }
  __device__ unsigned in_stage(int bytes) const { return kSplitBefore ? stage * static_cast<unsigned>(bytes) : 0; }
  __device__ unsigned ds_tile() const { return shared + kTile.ds_offset(); }

  __device__ void load_keys() const {
    const int rows = seqlen_k() - first_key;
    CopyK::copy(shared, at(p.k, p.k_strides, batch, head_k, first_key), p.k_strides.row, rows);
    CopyV::copy(v_tile(), at(p.v, p.v_strides, batch, head_k, first_key), p.v_strides.row, rows);
    ptx::cp_async_commit();
  }
  // kSplitBefore, of packed sequences: the first of the sequence's blocks among those of its head.
  __device__ int first_part() const { return sequence_number(0) / kBlockM + batch; }
  // What lies in memory as it is wanted.
  template <int kBytes>
  __device__ static void copy_parts(unsigned to, const unsigned char* from) {
    static_assert(kBytes % 16 == 0);
#pragma unroll
    for (int pass = 0; pass < (kBytes / 16 + kThreads - 1) / kThreads; ++pass) {
      const int at = 16 * (this_thread() + pass * kThreads);
      if (kBytes / 16 % kThreads == 0 || at < kBytes) ptx::cp_async_16(to + static_cast<unsigned>(at), from + at);
    }
  }
  __device__ void load_queries(Step step) const {
    const auto& p = found_params();
    const int thread = this_thread();
    const int first = step.block * kBlockM, rows = p.seqlen_q - first;
    if constexpr (kSplitBefore) {
      const long long number = workspace_head<kPair>(static_cast<long long>(batch) * p.nheads + step.head, step.head) * parts_before.blocks +
                               (kPair.packed ? first_part() : 0) + step.block;
      copy_parts<kTile.q_bytes()>(q_tile(), parts_before.q + number * kTile.q_bytes());
      copy_parts<kTile.dout_bytes()>(dout_tile(), parts_before.dout + number * kTile.dout_bytes());
      if (thread < 2)
        ptx::cp_async_4_zfill(shared + kTile.query_inverse_offset() + 8 * stage + 4 * thread, parts_before.inverses + 2 * number + thread, true);
    } else {
      CopyQ::copy(q_tile(), at(p.q, p.q_strides, batch, step.head, first), p.q_strides.row, rows);
      CopyDout::copy(dout_tile(), at(p.dout, p.dout_strides, batch, step.head, first), p.dout_strides.row, rows);
    }
    if (thread < 2 * kBlockM) {
      const int row = thread % kBlockM;
      const bool is_lse = thread < kBlockM;
      const float* lse = p.lse + batch * p.lse_strides.batch + step.head * p.lse_strides.head + (first + row) * p.lse_strides.row;
      const float* row_sum = p.row_sum + workspace_rows<kPair>(p, static_cast<long long>(batch) * p.nheads + step.head, step.head) + first + row;
      const unsigned to = (is_lse ? lse_at() : row_sum_at()) + 4 * row;
      ptx::cp_async_4_zfill(to, row >= rows ? p.row_sum : is_lse ? lse : row_sum, row < rows);
    }
    ptx::cp_async_commit();
  }

  // Splits what this thread's copies brought; the caller has a barrier before it is read.
  __device__ void split_keys() {
    const float2 greatest = greatest_of_all<kWarps>(shared + kTile.greatest_offset(), CopyK::greatest(shared), CopyV::greatest(v_tile()));
    const tile::SplitFactor k(greatest.x), v(greatest.y);
    CopyK::split(shared, k.factor);
    CopyV::split(v_tile(), v.factor);
    if (this_thread() == 0) {
      ptx::st_shared_f32(shared + kTile.inverse_offset(), k.inverse);
      ptx::st_shared_f32(shared + kTile.inverse_offset() + 4, v.inverse);
    }
  }
  __device__ void split_queries() {
    if constexpr (kSplitBefore) {
      query_inverse = ptx::ld_shared_f32(shared + kTile.query_inverse_offset() + 8 * stage);
      dout_inverse = ptx::ld_shared_f32(shared + kTile.query_inverse_offset() + 8 * stage + 4);
      return;
    }
    const float2 greatest = greatest_of_all<kWarps>(shared + kTile.greatest_offset(), CopyQ::greatest(q_tile()), CopyDout::greatest(dout_tile()));
    const tile::SplitFactor q(greatest.x), dout(greatest.y);
    CopyQ::split(q_tile(), q.factor);
    CopyDout::split(dout_tile(), dout.factor);
    query_inverse = q.inverse;
    dout_inverse = dout.inverse;
  }

  // ---- compute: products ----
  template <int kRowTiles, int kColumnTiles>
  __device__ static void clear(float (&d)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
  }

  // d = A B^T over the whole width: A = kKeys rows of K (V), B = kChunk rows of Q (dO).
  template <class TileA, class TileB, int kInner>
  __device__ static void multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                       const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                       const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row) {
    float high[kChunkTiles][kKeyTiles][4], low[kChunkTiles][kKeyTiles][4];
    clear(high);
    clear(low);
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      unsigned a_high[kKeyTiles][4], a_low[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        ptx::ldmatrix_x4(a_high[i], a_at.at(a_tile, 16 * i, k));
        ptx::ldmatrix_x4(a_low[i], a_at.at(a_tile + TileA::kBytes, 16 * i, k));
      }
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) {
        unsigned b_high[4], b_low[4];
        ptx::ldmatrix_x4(b_high, b_at.at(b_tile, b_row + 16 * j, k));
        ptx::ldmatrix_x4(b_low, b_at.at(b_tile + TileB::kBytes, b_row + 16 * j, k));
#pragma unroll
        for (int half = 0; half < 2; ++half)
          tile::multiply_split(high[2 * j + half], low[2 * j + half], a_high, a_low, b_high + 2 * half, b_low + 2 * half);
      }
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = high[j][i][e] + low[j][i][e];
  }

  // A chunk of P^T or dS^T as A operands.
  struct Fragments {
    unsigned high[kDepths][kKeyTiles][4], low[kDepths][kKeyTiles][4];
    __device__ Fragments(const float (&x)[kKeyTiles][kChunkTiles][4], float factor) {
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            tile::split2(x[i][j][2 * half] * factor, x[i][j][2 * half + 1] * factor, high[j / 2][i][j % 2 * 2 + half],
                         low[j / 2][i][j % 2 * 2 + half]);
    }
  };

  // sum += A B * factor * factor2 for kChunk queries, in kSpan columns: A = P^T (dS^T), B = rows of dO (Q).
  template <class TileB, int kInner, int kSpan>
  __device__ static void accumulate(float (&sum)[kKeyTiles][kSumTiles][4], const Fragments& a, unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, float factor, float factor2) {
#pragma unroll
    for (int j = 0; j < kSpan / 16; ++j) {
      unsigned b_high[kDepths][4], b_low[kDepths][4];
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) {
        ptx::ldmatrix_x4_trans(b_high[depth], b_at.at(b_tile, 16 * depth, j));
        ptx::ldmatrix_x4_trans(b_low[depth], b_at.at(b_tile + TileB::kBytes, 16 * depth, j));
      }
      float t[kKeyTiles][2][4];
      tile::product_split(t, a.high, a.low, b_high, b_low);
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][2 * j + half][e] = fmaf(t[i][half][e] * factor, factor2, sum[i][2 * j + half][e]);
    }
  }

  // ---- compute: P^T and dS^T ----
  // What dropout multiplies the weights that stay by, and its inverse.
  __device__ float dropout_scale() const {
    if constexpr (kPair.dropout) return pairs_of(p).dropout_scale;
    return 1.0f;
  }
  __device__ float kept_share() const { return 1.0f - static_cast<float>(pairs_of(p).dropout_below) * (1.0f / 65536); }

  // Zeros in place of the pairs that the mask hides, or that are beyond the last key or query, whatever was computed for them.
  __device__ void hide(float (&x)[kKeyTiles][kChunkTiles][4], int first_query) const {
    const int lane = this_lane(), key = first_key + this_group() * kKeys + lane / 4, query = first_query + lane % 4 * 2;
    const int keys_left = seqlen_k() - key, queries_left = seqlen_q() - query, reach = query + diagonal() - key;
    const int lead = kWindow ? query + left_diagonal() - key : 0;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key_step = 16 * i + e / 2 * 8, query_step = 8 * j + e % 2;
          if (key_step >= keys_left || query_step >= queries_left || (kMasked && key_step - query_step > reach) ||
              (kWindow && key_step - query_step < lead))
            x[i][j][e] = 0;
        }
  }

  // P^T = exp(S^T * scale - lse), in place of S^T.
  __device__ void weights(float (&s)[kKeyTiles][kChunkTiles][4], unsigned lse_at) const {
    const int lane = this_lane();
    const float scale = p.softmax_scale * (key_inverse() * query_inverse);
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      // An empty row has lse = -inf; its weights are 0.
      const float reference[2] = {lse.x == -kInfinity ? kInfinity : lse.x, lse.y == -kInfinity ? kInfinity : lse.y};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = ptx::ex2(fmaf(s[i][j][e], scale, -reference[e % 2]) * kLog2e);
    }
  }

  // The same with softcap, terms or dropout: P^T as dV takes it, and `sent`, what the second warp gets.
  __device__ void pair_weights(float (&s)[kKeyTiles][kChunkTiles][4], float (&sent)[kKeyTiles][kChunkTiles][4], unsigned lse_at, int head,
                               int first_query) const {
    const auto& p = found_params();
    const int lane = this_lane(), group_key = first_key + this_group() * kKeys, key = group_key + lane / 4, query = first_query + lane % 4 * 2;
    float scale = p.softmax_scale * (key_inverse() * query_inverse) * kLog2e;
    if constexpr (kCapped) {
      cap_scores_closely(reinterpret_cast<float(&)[kKeyTiles * kChunkTiles * 4]>(s), features_of(p).score_factor * (key_inverse() * query_inverse));
      scale = p.softmax_scale_log2;
    }
    [[maybe_unused]] const Terms<kPair, f16> terms(p, batch, head, seqlen_k());  // no bias is of 16 bits here
    [[maybe_unused]] const Dropout<kPair> dropout(p, batch, head);
    static_assert(core::kDropoutBlock % kKeys == 0);
    [[maybe_unused]] unsigned kept = 0;  // of two tiles of queries
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      if constexpr (kPair.dropout)
        if (j % 2 == 0) kept = dropout.kept_transposed(query + 8 * j, group_key / core::kDropoutBlock, lane) >> group_key % core::kDropoutBlock / 8;
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      const float reference[2] = {lse.x == -kInfinity ? kInfinity : lse.x, lse.y == -kInfinity ? kInfinity : lse.y};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Rows and keys behind the last get what another one has, and are hidden later.
          const float term = terms(min(query + 8 * j + e % 2, p.seqlen_q - 1), min(key + 16 * i + e / 2 * 8, seqlen_k() - 1));
          const bool hidden = kHides && term == -kInfinity;
          const float capped = s[i][j][e], weight = hidden ? 0.0f : ptx::ex2(fmaf(capped, scale, fmaf(-reference[e % 2], kLog2e, term)));
          s[i][j][e] = weight;
          sent[i][j][e] = hidden ? -0.0f : kCapped ? weight * fmaf(-capped, capped, 1.0f) : weight;
          if constexpr (kPair.dropout) {
            const bool dropped = (kept >> (j % 2 * 8 + 2 * i + e / 2 + e % 2 * 16) & 1u) == 0;
            if (dropped) s[i][j][e] = 0;
            if (dropped) sent[i][j][e] = -sent[i][j][e];
            if (hidden) sent[i][j][e] = -0.0f;
          }
        }
      }
    }
  }

  // Adds dS, in units of `factor` * `factor2`, to dbias, or writes it, where the pair is seen (masked: where not all are). What is not finite, by
  // IEEE rules: of an Inf in k or v the split operands make NaN.
  __device__ void add_to_dbias(const float (&ds)[kKeyTiles][kChunkTiles][4], int head, int first_query, bool masked, float factor,
                               float factor2) const {
    const auto& p = found_params();
    static_assert(kKeyTiles * kChunkTiles * 4 <= 32);
    const int lane = this_lane(), key = first_key + this_group() * kKeys + lane / 4, query = first_query + lane % 4 * 2;
    const PairParams& pairs = pairs_of(p);
    float* const to = pairs.dbias + batch * pairs.dbias_strides.batch + head * pairs.dbias_strides.head + query * pairs.dbias_strides.row + key;
    const auto add = [&](int key_step, int query_step, float x) {
      if (masked) {
        if (key + key_step >= seqlen_k() || query + query_step >= p.seqlen_q) return;
        if (kMasked && key + key_step > query + query_step + diagonal()) return;
        if (kWindow && key + key_step < query + query_step + left_diagonal()) return;
      }
      if (!is_finite(x)) x = HeadPairs<Spec>(p, batch, head, seqlen_k()).gradient_alone(query + query_step, key + key_step);
      float* const at = to + query_step * pairs.dbias_strides.row + key_step;
      if (pairs.dbias_alone != 0)
        *at = x;
      else
        ptx::red_add(at, x);
    };
    unsigned again = 0;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = ds[i][j][e] * factor * factor2;
          if (is_finite(x))
            add(16 * i + e / 2 * 8, 8 * j + e % 2, x);
          else
            again |= 1u << ((i * kChunkTiles + j) * 4 + e);
        }
#pragma unroll 1
    for (; again != 0; again &= again - 1) {
      const int at = __ffs(static_cast<int>(again)) - 1;
      add(at / (4 * kChunkTiles) * 16 + at % 4 / 2 * 8, at / 4 % kChunkTiles * 8 + at % 2, kInfinity);
    }
  }

  // A chunk of P^T in shared memory: every lane writes its own numbers, and the same lane of the other warp reads them.
  __device__ unsigned p_slot(int chunk) const {
    return shared + kTile.p_offset() + static_cast<unsigned>((this_group() * kChunks + chunk) * kKeys * kChunk * 4 + this_lane() * 16);
  }
  // Barriers of a key group, one a chunk: the chunk is written, and the first warp goes on to the next. (Arriving without waiting would do, but
  // compute-sanitizer's racecheck then finds hazards in any program.)
  __device__ int weights_barrier(int chunk) const { return 1 + this_group() * kChunks + chunk; }

  __device__ void compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int first_query, bool masked, [[maybe_unused]] int head) const {
    const int lane = this_lane(), key_group = this_group();
    const BlockAddress<kWidth, kWidth, LaneOrder::kColumnMajor> k_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidth, kWidth, LaneOrder::kRowMajor> q_rows(lane, 0, 0);
    const BlockAddress<kWidthV, kColumnsV, LaneOrder::kColumnMajor> dout_columns(lane, 0, part * kColumnsV);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int row = chunk * kChunk;
      float s[kKeyTiles][kChunkTiles][4];
      multiply_rows<TileK, TileQ, kWidth>(s, shared, q_tile() + static_cast<unsigned>(row * TileQ::kPitch), k_rows, q_rows, 0);  // S^T = K Q^T
      const auto send = [&](const float(&x)[kKeyTiles][kChunkTiles][4]) {
        const unsigned p_at = p_slot(chunk);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int j = 0; j < kChunkTiles; ++j)
            ptx::st_shared_16(p_at + (i * kChunkTiles + j) * 512, uint4{__float_as_uint(x[i][j][0]), __float_as_uint(x[i][j][1]),
                                                                        __float_as_uint(x[i][j][2]), __float_as_uint(x[i][j][3])});
      };
      if constexpr (kCapped || kPair.terms() || kPair.dropout) {
        float sent[kKeyTiles][kChunkTiles][4];
        pair_weights(s, sent, lse_at() + 4 * row, head, first_query + row);
        send(sent);  // what the mask hides the second warp hides again
        if (masked) hide(s, first_query + row);
      } else {
        weights(s, lse_at() + 4 * row);
        if (masked) hide(s, first_query + row);
        send(s);
      }
      ptx::bar_sync(weights_barrier(chunk), 64);
      const Fragments fragments(s, kWeightFactor);
      accumulate<TileDout, kWidthV, kColumnsV>(dv, fragments, dout_tile() + static_cast<unsigned>(row * TileDout::kPitch), dout_columns,
                                               1 / kWeightFactor, dout_inverse);  // dV += P^T dO
    }
  }

  __device__ void compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int first_query, bool masked, [[maybe_unused]] int head) const {
    const int lane = this_lane(), key_group = this_group();
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kColumnMajor> v_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kRowMajor> dout_rows(lane, 0, 0);
    const BlockAddress<kWidth, kColumns, LaneOrder::kColumnMajor> q_columns(lane, 0, part * kColumns);
    const FragmentStore<kBlockM, kBlockM> ds_store(lane, key_group * kKeys, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int row = chunk * kChunk;
      float ds[kKeyTiles][kChunkTiles][4];
      multiply_rows<TileV, TileDout, kWidthV>(ds, v_tile(), dout_tile() + static_cast<unsigned>(row * TileDout::kPitch), v_rows, dout_rows,
                                              0);  // dP^T = V dO^T
      ptx::bar_sync(weights_barrier(chunk), 64);
      const unsigned p_at = p_slot(chunk);
      const unsigned row_sum_at = this->row_sum_at() + 4 * row;
      const float dout_factor = tile::inverse_of(dout_inverse),
                  value_gradient_factor = tile::inverse_of(value_inverse()) * (kGradientFactor * (kPair.dropout ? kept_share() : 1.0f));
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j) {
        const float2 row_sum = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * j + lane % 4 * 2));
        const float scaled[2] = {row_sum.x * dout_factor * value_gradient_factor, row_sum.y * dout_factor * value_gradient_factor};
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          const uint4 bits = ptx::ld_shared_16(p_at + (i * kChunkTiles + j) * 512);
          const float weight[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // dS^T = P^T (dP^T - row_sum)
            if constexpr (kPair.dropout) {
              const bool dropped = __float_as_uint(weight[e]) >> 31 != 0;
              const bool hidden = kHides && __float_as_uint(weight[e]) == 0x80000000u;
              const float gradient = fmaf(dropped ? 0.0f : ds[i][j][e], kGradientFactor, -scaled[e % 2]);
              ds[i][j][e] = hidden ? 0.0f : fabsf(weight[e]) * gradient;
            } else {
              ds[i][j][e] = weight[e] * fmaf(ds[i][j][e], kGradientFactor, -scaled[e % 2]);
              if (kHides && __float_as_uint(weight[e]) == 0x80000000u) ds[i][j][e] = 0;
            }
          }
        }
      }
      if (masked) hide(ds, first_query + row);
      if constexpr (kPair.dbias) add_to_dbias(ds, head, first_query + row, masked, dropout_scale() / kGradientFactor, dout_inverse * value_inverse());
      const Fragments fragments(ds, 1.0f);
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) store_ds(ds_store, 16 * i, chunk * kDepths + depth, fragments.high[depth][i], fragments.low[depth][i]);
      accumulate<TileQ, kWidth, kColumns>(dk, fragments, q_tile() + static_cast<unsigned>(row * TileQ::kPitch), q_columns,
                                          query_inverse / kGradientFactor, dout_inverse * value_inverse());  // dK += dS^T Q
    }
  }

  __device__ void store_ds(const FragmentStore<kBlockM, kBlockM>& to, int row, int block, const unsigned (&high)[4], const unsigned (&low)[4]) const {
    to.store(ds_tile(), row, block, high);
    to.store(ds_tile() + TileDs::kBytes, row, block, low);
  }

  __device__ void clear_ds() const {
    const FragmentStore<kBlockM, kBlockM> ds_store(this_lane(), this_group() * kKeys, 0);
    const unsigned zeros[4] = {};
#pragma unroll 1
    for (int j = 0; j < kBlockM / 16; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) store_ds(ds_store, 16 * i, j, zeros, zeros);
  }

  // dQ of one block, from everybody's dS^T.
  __device__ void compute_dq(Step step) const {
    const auto& p = found_params();
    const int lane = this_lane(), warp = this_warp(), dq_row = warp % kDqRowWarps * kDqRows,
              dq_column = part * kColumns + warp / kDqRowWarps * kDqColumns;
    const BlockAddress<kBlockM, kDqRows, LaneOrder::kRowMajor> ds_columns(lane, 0, dq_row);
    const BlockAddress<kWidth, kDqColumns, LaneOrder::kColumnMajor> k_columns(lane, 0, dq_column);
    const long long batch_head = static_cast<long long>(batch) * p.nheads + step.head;
    const int first_row = step.block * kBlockM + dq_row;
    float* const accum = p.dq_accum + workspace_accum<kPair, kWidth>(p, batch_head, step.head, dq_accum_head(p.seqlen_q, kWidth)) +
                         static_cast<long long>(first_row / kDqAccumRows) * (kDqAccumRows * kWidth) + dq_column * kDqAccumRows;
    int* const turn = Spec::kDeterministic
                          ? p.dq_semaphore + 1 + workspace_head<kPair>(batch_head, step.head) * workspace_blocks<kPair, kBlockM>(p) + step.block
                          : nullptr;
    constexpr int kTiles = kDqRows / 16;
    const float factor = key_inverse() / kGradientFactor * dropout_scale(), factor2 = dout_inverse * value_inverse();
#pragma unroll
    for (int first = 0; first < kDqColumns; first += kDqSpan) {
      float high[kDqSpan / 8][kTiles][4], low[kDqSpan / 8][kTiles][4];
      clear(high);
      clear(low);
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {  // dQ = dS K
        unsigned a_high[kTiles][4], a_low[kTiles][4];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          ptx::ldmatrix_x4_trans(a_high[i], ds_columns.at(ds_tile(), 16 * k, i));
          ptx::ldmatrix_x4_trans(a_low[i], ds_columns.at(ds_tile() + TileDs::kBytes, 16 * k, i));
        }
#pragma unroll
        for (int j = 0; j < kDqSpan / 16; ++j) {
          unsigned b_high[4], b_low[4];
          ptx::ldmatrix_x4_trans(b_high, k_columns.at(shared, 16 * k, first / 16 + j));
          ptx::ldmatrix_x4_trans(b_low, k_columns.at(shared + TileK::kBytes, 16 * k, first / 16 + j));
#pragma unroll
          for (int half = 0; half < 2; ++half)
            tile::multiply_split(high[2 * j + half], low[2 * j + half], a_high, a_low, b_high + 2 * half, b_low + 2 * half);
        }
      }
      if (Spec::kDeterministic && first == 0) {  // lower key blocks first: the same order of additions in every run
        if (this_thread() == 0) {
          while (ptx::ld_acquire(turn) < nth_key_block(step.block) * kParts) __nanosleep(64);
        }
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (first_row + 16 * i < seqlen_q()) {
#pragma unroll
          for (int j = 0; j < kDqSpan / 8; ++j) {
            float dq[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[e] = (high[j][i][e] + low[j][i][e]) * factor * factor2;
            add_to_dq(accum + 16 * i * kWidth + (first / 8 + j) * 128, lane, dq);
          }
        }
      }
    }
    if constexpr (Spec::kDeterministic) {
      __threadfence();
      __syncthreads();
      if (this_thread() == 0) ptx::red_add_release(turn, 1);
    }
  }

  // Writes this warp's rows of dV or dK, this part of their columns; what is computed again is a row with all columns, by whichever part needs it.
  template <bool kIsDk>
  __device__ void store_gradient(const float (&d)[kKeyTiles][kSumTiles][4], float scale) const {
    const auto& p = found_params();
    const void* const tensor = kIsDk ? p.dk : p.dv;
    const TensorStrides& strides = kIsDk ? p.dk_strides : p.dv_strides;
    constexpr int kAll = kIsDk ? Spec::kHeaddim : Spec::kHeaddimV, kOwn = kIsDk ? kColumns : kColumnsV;
    const int lane = this_lane(), key_group = this_group();
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = first_key + key_group * kKeys + 16 * i + 8 * half, key = first + lane / 4;
        float* const row = const_cast<float*>(at(tensor, strides, batch, head_k, key));
        bool good = true;
#pragma unroll
        for (int n = 0; n < kOwn / 8; ++n) {
          const float x[2] = {d[i][n][2 * half] * scale, d[i][n][2 * half + 1] * scale};
          good = good && is_finite(x[0]) && is_finite(x[1]);
          const int column = part * kOwn + 8 * n + lane % 4 * 2;
          if (key >= p.seqlen_k) continue;
          if constexpr (Spec::kAligned && kAll % 2 == 0) {
            if (column < kAll) *reinterpret_cast<float2*>(row + column) = float2{x[0], x[1]};
          } else {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (column + e < kAll) row[column + e] = x[e];
          }
        }
        unsigned bad = ptx::ballot(!good && key < p.seqlen_k);
        if (kPair.lengths && given_length(p, batch) < 0) bad = 0;  // NaN it shall be
        if (bad == 0) [[likely]]
          continue;
        ptx::warp_sync();
#pragma unroll 1
        for (int g = 0; g < 8; ++g, bad >>= 4)
          if ((bad & 15) != 0)
            key_row_again<Spec, kIsDk>(p, mask(), batch, head_k, first + g, const_cast<float*>(at(tensor, strides, batch, head_k, first + g)), lane);
      }
  }

  // The block behind `now`; kSplitBefore: to the other stage, which nobody reads any more.
  __device__ void load_next(Step now) {
    const Step next = after(now);
    if (next.head >= (head_k + 1) * p.group) return;
    if constexpr (kSplitBefore) stage ^= 1;
    load_queries(next);
    if constexpr (kSplitBefore) stage ^= 1;
  }

 public:
  __device__ BackwardF32(CallParams<kPair>& params, unsigned shared_address, const BackwardF32Parts& parts_of_queries = {})
      : p(params), shared(shared_address), parts_before(parts_of_queries) {}

  __device__ void run() {
    take_tile();
    if (kPair.packed && first_key >= p.seqlen_k) return;
    float sum[kKeyTiles][kSumTiles][4];  // dV or dK, by role
    clear(sum);
    if constexpr (kPair.lengths) {
      const float first = first_sum<kPair>(p, batch);
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int j = 0; j < kSumTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] = first;
    }

    const bool any = first_block() < blocks_end() && (!kPair.lengths || first_key < seqlen_k());  // some query sees these keys
    Step now{head_k * p.group, first_block()};
    if (any) {
      load_keys();
      load_queries(now);
      ptx::cp_async_wait<1>();
      split_keys();
      __syncthreads();  // all have read the greatest numbers
    }
    while (any && now.head < (head_k + 1) * p.group) {
      ptx::cp_async_wait<0>();
      if constexpr (kSplitBefore) {
        __syncthreads();
        split_queries();
        load_next(now);
      } else {
        split_queries();
        __syncthreads();
      }
      const int first_query = now.block * kBlockM, group_key = first_key + this_group() * kKeys;
      const bool hidden = (kMasked && group_key > first_query + kBlockM - 1 + diagonal()) ||
                          (kWindow && group_key + kKeys - 1 < first_query + left_diagonal());  // no query of the block sees a key of the group
      const bool masked = first_key + kBlockN > seqlen_k() || first_query + kBlockM > seqlen_q() ||
                          (kMasked && group_key + kKeys - 1 > first_query + diagonal()) ||
                          (kWindow && group_key < first_query + kBlockM - 1 + left_diagonal());
      if (computes_values()) {
        if (!hidden) compute_values(sum, first_query, masked, now.head);
      } else {
        if (!hidden)
          compute_keys(sum, first_query, masked, now.head);
        else
          clear_ds();
      }
      __syncthreads();
      if constexpr (kSplitBefore) {
        compute_dq(now);
        stage ^= 1;
      } else {
        load_next(now);
        compute_dq(now);
      }
      now = after(now);
    }
    if (computes_values())
      store_gradient<false>(sum, dropout_scale());
    else
      store_gradient<true>(sum, p.softmax_scale * dropout_scale());
  }
};

template <class Spec>
__device__ __forceinline__ void backward_f32(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if constexpr (kPairOf<Spec>.packed) {
    OwnParams own{pairs_of(p), p};
    BackwardF32<Spec>(own, ptx::shared_address(shared_memory)).run();
  } else {
    BackwardF32<Spec>(p, ptx::shared_address(shared_memory)).run();
  }
}

// With q and dout split before.
template <class Spec>
__device__ __forceinline__ void backward_f32(const AttentionParams& p, const BackwardF32Parts& parts) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if constexpr (kPairOf<Spec>.packed) {
    OwnParams own{pairs_of(p), p};
    BackwardF32<Spec>(own, ptx::shared_address(shared_memory), parts).run();
  } else {
    BackwardF32<Spec>(p, ptx::shared_address(shared_memory), parts).run();
  }
}

}  // namespace fattn::v2
