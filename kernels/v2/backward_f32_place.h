// Where a CTA of kernels/v2/backward_f32.h is and what it has: its keys, the blocks of queries that see them, what its warps compute, its shared
// memory, the loads, and what is loaded, split. Spec: see there.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "device_abi/mask.h"
#include "kernels/documents.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/async_copy_word.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/greatest.h"
#include "kernels/v2/split_rows_tile.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

template <class Spec>
struct BackwardF32Place {
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
      const Sequence at = given_sequence<kPair.lengths>(p, batch);
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

  // Keys that hold Inf: a word of each group, a bit of each key.
  __device__ unsigned infinite_at(int group) const { return shared + kTile.infinite_offset() + 4 * static_cast<unsigned>(group); }
  __device__ unsigned infinite_keys() const { return ptx::ld_shared_4(infinite_at(this_group())); }
  // Before split_keys().
  __device__ void clear_infinite_keys() const {
    if (this_thread() < kTile.key_groups) ptx::st_shared_4(infinite_at(this_thread()), 0);
    __syncthreads();
  }

  // Splits what this thread's copies brought; the caller has a barrier before it is read. What is not finite becomes 0, but for dout: rows that see
  // it have an lse or a row sum that is not finite, and so gradients that are not, or, with scores of -Inf alone, an lse of -Inf and none; other rows
  // get nothing of it. Where the score of an Inf in k is -Inf nothing else tells, and so such keys are noted.
  __device__ void split_keys() {
    static_assert(kKeys <= 32);
    const float greatest_k = CopyK::greatest_finite(shared, [&](int key) { ptx::red_or_shared(infinite_at(key / kKeys), 1u << key % kKeys); });
    const float2 greatest =
        greatest_of_all<kWarps>(shared + kTile.greatest_offset(), greatest_k, CopyV::template greatest_cleaned<tile::NonfiniteCleaned>(v_tile()));
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
    const float2 greatest = greatest_of_all<kWarps>(
        shared + kTile.greatest_offset(), CopyQ::template greatest_cleaned<tile::NonfiniteCleaned>(q_tile()), CopyDout::greatest(dout_tile()));
    const tile::SplitFactor q(greatest.x), dout(greatest.y);
    CopyQ::split(q_tile(), q.factor);
    CopyDout::split(dout_tile(), dout.factor);
    query_inverse = q.inverse;
    dout_inverse = dout.inverse;
  }

  __device__ BackwardF32Place(CallParams<kPair>& params, unsigned shared_address, const BackwardF32Parts& parts_of_queries = {})
      : p(params), shared(shared_address), parts_before(parts_of_queries) {}
};

}  // namespace fattn::v2
