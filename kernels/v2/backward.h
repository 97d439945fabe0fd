// Backward, algorithm v2 (FlashAttention-2), main kernel: dk and dv of a block of keys, and its share of dq, which is added up in fp32.
//
// A CTA owns kBlockN keys of one key head and walks over the blocks of kBlockM queries that see them, of all query heads that share the key head.
// Scores are computed transposed (keys are rows), because then the accumulators of P^T and dS^T are, in their registers, the A operands of
//   S^T = K Q^T    P^T = exp2(S^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dV += P^T dO    dK += dS^T Q    dQ += dS K
// Warps form groups; a group owns some of the CTA's keys. In a group one half of the warps computes S^T, P^T and dV, the other dP^T, dS^T and dK:
// all they share is P^T, which goes from the one to the other through shared memory. So a warp holds one accumulator of the keys' gradients and one
// of scores, which allows larger tiles, and of the two warps of a scheduler one multiplies while the other takes exponentials. Warps of the same
// role in a group split the queries of a block and then the columns of dV (dK); what they need of each other's P^T (dS^T) they read back.
// dS^T is in shared memory in any case, for dQ, which all warps compute together one block later, when one barrier a block has made it visible
// (pipelined; otherwise in the same block, with a barrier more).
//
// With softcap dS^T = P^T (1 - T^2) (dP^T - row_sum), T = tanh(...) the capped scores before they are multiplied by softcap: P^T (1 - T^2) goes to
// the second role in place of P^T.
//
// With features of pairs (kernels/pair.h) what goes to the second role is marked by its sign, which weights do not need: of a dropped pair it takes
// nothing of dP^T, and of -0, a pair that bias or mask hides, nothing at all.
//
// Spec: Element; kLevel (75, 80); kHeaddim, kHeaddimV; kCausal; kWindow (kCausal is then false); kCapped; kAligned (16-byte copies); kDeterministic;
// kTile (a BackwardTile); kPair, none if it is left out; kStaged: bias and mask of pairs come through shared memory (kernels/v2/term_tile.h), false
// if it is left out.
#pragma once

#include "kernels/constants.h"
#include "kernels/documents.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/async_copy_word.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/mma.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/score.h"
#include "kernels/tile/for_each.h"
#include "kernels/v2/careful.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/row_loader.h"
#include "kernels/v2/swizzled_tile.h"
#include "kernels/v2/term_tile.h"
#include "kernels/v2/workspace.h"
#include "shared/attention_params.h"
#include "shared/backward_layout.h"

namespace fattn::v2 {

using tile::Constant;

template <class Spec>
class Backward {
  static constexpr BackwardTile kTile = Spec::kTile;
  static constexpr int kWidth = kTile.width, kWidthV = kTile.width_v, kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.threads(), kGroupWarps = kTile.group_warps;
  static constexpr bool kPipelined = kTile.pipelined, kExchange = kGroupWarps > 1;
  static constexpr bool kAsync = Spec::kLevel >= 80;
  static constexpr bool kWindow = Spec::kWindow, kCapped = Spec::kCapped, kMasked = Spec::kCausal || kWindow;
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  static constexpr bool kTwoForms = kCapped || kPair.dropout;  // what dV is made of is not what dS^T is made of
  static constexpr bool kHides = kPair.hides();
  static constexpr bool kStaged = is_staged<Spec>();
  static constexpr TermTile kTerms = term_tile<kPair>(kBlockM, kBlockN, true);  // one a stage, behind all else
  // Blocks of queries that ids of documents leave out: not where key blocks wait for each other and are counted.
  static constexpr bool kByIds = kPair.documents && !Spec::kDeterministic, kRanges = kWindow || kByIds;
  static constexpr bool kByDocument = kByIds && !kPair.with_documents(false).terms() && !kPair.dropout;  // blocks of one document have nothing to add

  // What a warp computes. S^T or dP^T: kKeys x kQueries, kChunk queries at a time. dV or dK: kKeys x kColumnsV or kColumns.
  static constexpr int kKeys = kBlockN / kTile.key_groups, kQueries = kBlockM / kGroupWarps, kChunk = kTile.chunk;
  static constexpr int kKeyTiles = kKeys / 16, kChunkTiles = kChunk / 8;
  static constexpr int kColumns = kWidth / kGroupWarps, kColumnsV = kWidthV / kGroupWarps;
  static constexpr int kSumTiles = (kColumns > kColumnsV ? kColumns : kColumnsV) / 8;
  // dQ: the warps split a block's rows and columns.
  static_assert(kTile.dq_row_warps() > 0);
  static constexpr int kDqRowWarps = kTile.dq_row_warps(), kDqRows = kBlockM / kDqRowWarps, kDqColumns = kWidth / (kTile.warps() / kDqRowWarps);
  static constexpr int dq_span() {
    int parts = 1;
    while (kDqRows * kDqColumns / parts > 1536 || kDqColumns % (16 * parts) != 0) ++parts;
    return kDqColumns / parts;
  }
  static constexpr int kDqSpan = dq_span();  // columns at a time: dK and dV leave room for 48 accumulators

  static_assert(kKeys % 16 == 0 && kQueries % 16 == 0 && kColumns % 16 == 0 && kColumnsV % 16 == 0 && kQueries % kChunk == 0 && kChunk % 16 == 0);
  static_assert(!kExchange || kQueries == kChunk, "warps of a group exchange one chunk a block");
  static_assert(2 * kBlockM <= kThreads, "a thread copies one lse or one row_sum");

  using KLoader = RowLoader<kThreads, kWidth, Spec::kHeaddim, Spec::kAligned, kAsync>;
  using VLoader = RowLoader<kThreads, kWidthV, Spec::kHeaddimV, Spec::kAligned, kAsync>;
  using Bits = unsigned short;
  using Element = typename Spec::Element;

  // ---- what this thread and its CTA are ----
  CallParams<kPair>& p;  // once the tile is known, of packed sequences those of its own
  const unsigned shared;
  const int number_;
  // Masked, so that the compiler knows them not to be negative: division by powers of two is then a shift.
  const int thread = threadIdx.x & 1023, lane = thread & 31, warp = ptx::warp_id() & 31;
  // The roles are halves of the CTA, so that each scheduler has warps of both.
  const bool values = warp < kTile.role_warps();  // S, P, dV; otherwise dP, dS, dK
  const int key_group = warp % kTile.role_warps() / kGroupWarps, member = warp % kGroupWarps;
  int batch, head_k, key_block, first_key;
  int first_block;               // of queries that see these keys
  int diagonal;                  // query i sees the keys j <= i + diagonal
  int entry_keys;                // kPair.lengths: keys of this batch entry
  int document;                  // kByIds: the id of all keys of the tile
  bool one_document = false;     // if they have one
  int end_block, left_diagonal;  // kRanges: no query from end_block on sees these keys; kWindow: query i sees the keys j >= i + left_diagonal

  // The query block that a step is about.
  struct Step {
    int head, block;  // query head, query block
  };

  __device__ Step after(Step step) const {
    return step.block + 1 < blocks_end() ? Step{step.head, step.block + 1} : Step{step.head + 1, first_block};
  }
  __device__ Step before(Step step) const {
    return step.block > first_block ? Step{step.head, step.block - 1} : Step{step.head - 1, blocks_end() - 1};
  }

  __device__ int query_blocks() const { return static_cast<int>((static_cast<unsigned>(p.seqlen_q) + kBlockM - 1) / kBlockM); }

  __device__ int seqlen_k() const { return kPair.lengths ? entry_keys : p.seqlen_k; }

  __device__ int blocks_end() const { return kRanges ? end_block : query_blocks(); }

  // Tiles are dealt section by section: heads of a section together, so that their Q, dO and dQ stay in L2, and in a section key block by key
  // block: under a causal mask the first is the longest.
  __device__ void take_tile() {
    int index = number_;
    if constexpr (Spec::kDeterministic) {
      // CTAs wait for those of lower key blocks. Numbers drawn when a CTA starts make sure that those have started.
      if (thread == 0) *ticket_slot() = ptx::atomic_add(p.dq_semaphore, 1);
      __syncthreads();
      index = *ticket_slot();
      __syncthreads();
    }
    const int key_blocks = (p.seqlen_k + kBlockN - 1) / kBlockN, heads = p.batch * p.nheads_k;
    const int section = index / (key_blocks * p.heads_per_section), first_head = section * p.heads_per_section;
    const int section_heads = min(p.heads_per_section, heads - first_head), rest = index - first_head * key_blocks;
    key_block = rest / section_heads;
    const int head = first_head + rest % section_heads;
    if constexpr (kPair.bias != 0 || kPair.mask || kPair.dbias) {  // batch entries side by side: they may share what lies by pair
      batch = head % p.batch;
      head_k = head / p.batch;
    } else {
      batch = head / p.nheads_k;
      head_k = head % p.nheads_k;
    }
    first_key = key_block * kBlockN;
    if constexpr (kPair.packed) enter<kWidth, kBlockM>(p, batch);
    if constexpr (kPair.lengths) entry_keys = keys_of<kPair>(p, batch);
    diagonal = seqlen_k() - p.seqlen_q;
    first_block = Spec::kCausal ? max(0, first_key - diagonal) / kBlockM : 0;
    if constexpr (kWindow) {
      constexpr int kNoLimit = 1 << 30;
      const core::Mask32 mask = window_mask_of<kPair>(p, seqlen_k());
      diagonal = mask.ends() ? mask.diagonal() - 1 : kNoLimit;
      left_diagonal = mask.begins() ? mask.left_diagonal() : -kNoLimit;
      first_block = mask.first_row(first_key) / kBlockM;
      end_block = (mask.row_end(min(first_key + kBlockN, seqlen_k()) - 1) + kBlockM - 1) / kBlockM;
    } else if constexpr (kByIds) {
      end_block = query_blocks();
    }
  }

  // Leaves out the blocks of queries before the first and behind the last that may have an id of these keys.
  __device__ void narrow() {
    const PairParams& pairs = pairs_of(p);
    const IdRange range = common_range<kThreads>(pairs.document_k + batch * pairs.document_k_stride + first_key, min(kBlockN, seqlen_k() - first_key),
                                                 pairs.document_q + batch * pairs.document_q_stride, first_block * kBlockM,
                                                 min(end_block * kBlockM, p.seqlen_q), ticket_slot());
    first_block = range.begin / kBlockM;
    end_block = range.begin == range.end ? first_block : (range.end + kBlockM - 1) / kBlockM;
    document = ticket_slot()[0];
    one_document = document == ticket_slot()[1];
    __syncthreads();  // before the keys are where the range was
  }

  // Whether all queries of a block that exists whole have the id of all keys of the tile. The same in all warps.
  __device__ bool of_one_document(int first_query) const {
    bool same = one_document && first_query + kBlockM <= p.seqlen_q;
    if (!same) return false;
    const int* const ids = pairs_of(p).document_q + batch * pairs_of(p).document_q_stride + first_query;
#pragma unroll
    for (int query = 0; query < kBlockM; query += 32) same = same && ids[query + lane] == document;
    return ptx::vote_all(same);
  }

  // How many blocks of lower keys add to dq of this block of queries.
  __device__ int nth_key_block(int query_block) const {
    if constexpr (kWindow) return key_block - window_mask_of<kPair>(p, seqlen_k()).visible_begin(query_block * kBlockM) / kBlockN;
    return key_block;
  }

  __device__ int* ticket_slot() const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<int*>(shared_memory);
  }

  // ---- load ----
  __device__ static const Bits* at(const void* tensor, const TensorStrides& s, int batch, int head, long long row) {
    return static_cast<const Bits*>(tensor) + batch * s.batch + head * s.head + row * s.row;
  }

  __device__ void load_keys() const {
    const KLoader k_loader(thread);
    const VLoader v_loader(thread);
    const int rows = seqlen_k() - first_key;
    k_loader.template load<kBlockN>(shared, at(p.k, p.k_strides, batch, head_k, first_key), p.k_strides.row, rows);
    v_loader.template load<kBlockN>(shared + kTile.v_offset(), at(p.v, p.v_strides, batch, head_k, first_key), p.v_strides.row, rows);
  }

  __device__ void load_queries(Step step, int stage) const {
    const int thread = ptx::opaque(this->thread);  // as for dQ below: what follows from it shall not occupy registers across the loop
    const KLoader k_loader(thread);
    const VLoader v_loader(thread);
    const int first = step.block * kBlockM, rows = p.seqlen_q - first;
    k_loader.template load<kBlockM>(shared + kTile.q_offset() + stage * kTile.q_bytes(), at(p.q, p.q_strides, batch, step.head, first),
                                    p.q_strides.row, rows);
    v_loader.template load<kBlockM>(shared + kTile.dout_offset() + stage * kTile.dout_bytes(), at(p.dout, p.dout_strides, batch, step.head, first),
                                    p.dout_strides.row, rows);
    if constexpr (kStaged)
      copy_terms<kPair, kTerms, kThreads>(term_tile_at(stage), Terms<kPair, Element>(p, batch, step.head, seqlen_k()), first, rows, first_key,
                                          seqlen_k(), thread);
    if (thread < 2 * kBlockM) {
      const int row = thread % kBlockM;
      const bool is_lse = thread < kBlockM;
      const float* lse = p.lse + batch * p.lse_strides.batch + step.head * p.lse_strides.head + (first + row) * p.lse_strides.row;
      const float* row_sum = p.row_sum + workspace_rows<kPair>(p, static_cast<long long>(batch) * p.nheads + step.head, step.head) + first + row;
      const unsigned to = shared + (is_lse ? kTile.lse_offset() : kTile.row_sum_offset()) + stage * kTile.row_bytes() + 4 * row;
      const float* from = row >= rows ? p.row_sum : is_lse ? lse : row_sum;
      if constexpr (kAsync)
        ptx::cp_async_4_zfill(to, from, row < rows);
      else
        ptx::st_shared_f32(to, row < rows ? *from : 0.f);
    }
  }

  __device__ static void commit() {
    if constexpr (kAsync) ptx::cp_async_commit();
  }

  // This thread's copies are done, and after the barrier everybody's.
  __device__ static void wait_for_loads() {
    if constexpr (kAsync) ptx::cp_async_wait<0>();
    __syncthreads();
  }

  // ---- compute: products ----
  __device__ static void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (Spec::kLevel < 80) {
      ptx::mma_m16n8k8_f16(d, a[0], a[1], b0);
      ptx::mma_m16n8k8_f16(d, a[2], a[3], b1);
    } else if constexpr (is_same<Element, bf16>) {
      ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    } else {
      ptx::mma_m16n8k16_f16(d, a, b0, b1);
    }
  }

  template <int kRowTiles, int kColumnTiles>
  __device__ static void clear(float (&d)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
  }

  template <int kRowTiles, int kColumnTiles>
  __device__ static void fill(float (&d)[kRowTiles][kColumnTiles][4], float x) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = x;
  }

  // d = A B^T over the whole width: A = kKeys rows of K (V), B = kChunk rows of Q (dO).
  template <int kInner>
  __device__ static void multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                       const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                       const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row) {
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      unsigned a[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, k));
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, b_at.at(b_tile, b_row + 16 * j, k));
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          mma(d[i][2 * j], a[i], b[0], b[1]);
          mma(d[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // d += A B for 16 inner indices (queries): A = fragments of P^T (dS^T), B = 16 rows of dO (Q).
  template <int kSpan, int kInner>
  __device__ static void accumulate(float (&d)[kKeyTiles][kSumTiles][4], const unsigned (&a)[kKeyTiles][4], unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, int b_row) {
#pragma unroll
    for (int j = 0; j < kSpan / 16; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, b_row, j));
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        mma(d[i][2 * j], a[i], b[0], b[1]);
        mma(d[i][2 * j + 1], a[i], b[2], b[3]);
      }
    }
  }

  // ---- compute: P^T and dS^T ----
  // Zeros in place of the pairs that the mask hides, or that are beyond the last key or query, whatever was computed for them: such a query was
  // loaded as zeros, which an Inf in k makes NaN.
  __device__ void hide(unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4], int first_query) const {
    const int key = first_key + key_group * kKeys + lane / 4, query = first_query + lane % 4 * 2;
    const int keys_left = seqlen_k() - key, queries_left = p.seqlen_q - query, reach = query + diagonal - key;
    const int lead = kWindow ? query + left_diagonal - key : 0;
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key_step = 16 * i + 8 * half;
          unsigned& pair = bits[j / 2][i][j % 2 * 2 + half];  // two neighbouring queries
          if (key_step >= keys_left || 8 * j >= queries_left) pair = 0;
          if (8 * j + 1 >= queries_left) pair &= 0x0000ffffu;
          if constexpr (kMasked) {
            if (key_step - 8 * j > reach) pair &= 0xffff0000u;
            if (key_step - 8 * j - 1 > reach) pair &= 0x0000ffffu;
          }
          if constexpr (kWindow) {
            if (key_step - 8 * j < lead) pair &= 0xffff0000u;
            if (key_step - 8 * j - 1 < lead) pair &= 0x0000ffffu;
          }
        }
  }

  // P^T = exp2(S^T * scale - lse), as fragments: the accumulators of two neighbouring 16 x 8 blocks are one 16 x 16 A fragment. kCapped: and from the
  // capped S^T what dS^T is made of, P^T (1 - T^2), as `sloped`.
  __device__ void weights(const float (&s)[kKeyTiles][kChunkTiles][4], unsigned lse_at, unsigned (&p_bits)[kChunkTiles / 2][kKeyTiles][4],
                          unsigned (&sloped)[kChunkTiles / 2][kKeyTiles][4]) const {
    const float scale = kCapped ? p.softmax_scale_log2 : p.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      // An empty row has lse = -inf; its weights are 0.
      const float lse_log2[2] = {lse.x == -kInfinity ? kInfinity : lse.x * kLog2e, lse.y == -kInfinity ? kInfinity : lse.y * kLog2e};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = ptx::ex2(s[i][j][e] * scale - lse_log2[e % 2]);
#pragma unroll
        for (int half = 0; half < 2; ++half) p_bits[j / 2][i][j % 2 * 2 + half] = ptx::pack2<Element>(w[2 * half], w[2 * half + 1]);
        if constexpr (kCapped) {
#pragma unroll
          for (int e = 0; e < 4; ++e) w[e] *= fmaf(-s[i][j][e], s[i][j][e], 1.0f);
#pragma unroll
          for (int half = 0; half < 2; ++half) sloped[j / 2][i][j % 2 * 2 + half] = ptx::pack2<Element>(w[2 * half], w[2 * half + 1]);
        }
      }
    }
  }

  // The same with terms or dropout, of queries from `row` of the block at `first_query` on: what dV is made of, and what the second role gets.
  __device__ void pair_weights(const float (&s)[kKeyTiles][kChunkTiles][4], int stage, unsigned lse_at, int head, int first_query, int row,
                               unsigned (&p_bits)[kChunkTiles / 2][kKeyTiles][4], unsigned (&sent)[kChunkTiles / 2][kKeyTiles][4]) const {
    constexpr float kLn2 = 0.693147180559945309f;
    // What may hide is in units of scores, ALiBi alone in those of log2.
    const float scale =
        kHides ? (kCapped ? p.softmax_scale_log2 * kLn2 : p.softmax_scale) : (kCapped ? p.softmax_scale_log2 : p.softmax_scale * kLog2e);
    const Terms<kPair, Element> terms(p, batch, head, seqlen_k());
    const Dropout<kPair> dropout(p, batch, head);
    const int key = first_key + key_group * kKeys + lane / 4, query = first_query + row + lane % 4 * 2;
    TransposedTermReader<kPair, Element, kTerms, kKeyTiles> reader(term_tile_at(stage), terms, key_group * kKeys, row, lane);
    [[maybe_unused]] float distance = 0, slope = 0;  // of the lane's first pair
    if constexpr (kPair.alibi) {
      distance = static_cast<float>(query + terms.shift - key);
      slope = kHides ? -terms.natural_slope : -terms.slope;
    }
    // Which pairs stay, of two score tiles and the keys of a block of random numbers.
    constexpr int kBlocks = (kKeys + core::kDropoutBlock - 1) / core::kDropoutBlock;
    static_assert(kKeys % core::kDropoutBlock == 0 || core::kDropoutBlock % kKeys == 0);
    const int group_key = first_key + key_group * kKeys;
    [[maybe_unused]] unsigned kept[kPair.dropout ? kBlocks : 1];
    const auto make_kept = [&](int j) {
      if constexpr (kPair.dropout) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          kept[block] = dropout.kept_transposed(query + 8 * j, group_key / core::kDropoutBlock + block, lane);
          if constexpr (kKeys < core::kDropoutBlock) kept[block] >>= group_key % core::kDropoutBlock / 8;
        }
      }
    };
    // Score tiles j of 8 queries; may_hide: some of their pairs may be hidden.
    const auto weigh = [&](auto may_hide, int j) {
      constexpr bool kMayHide = decltype(may_hide)::value != 0;
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      const float lse_log2[2] = {lse.x == -kInfinity ? kInfinity : lse.x * kLog2e, lse.y == -kInfinity ? kInfinity : lse.y * kLog2e};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float w[2];
          unsigned marks = 0;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float score = s[i][j][2 * half + e];
            [[maybe_unused]] const float step = static_cast<float>(8 * j + e - 16 * i - 8 * half);
            if constexpr (kHides) {
              // Rows and keys behind the last get what another one has, or something else, and are hidden later.
              const int query_here = min(query + 8 * j + e, p.seqlen_q - 1), key_here = min(key + 16 * i + 8 * half, seqlen_k() - 1);
              float term = 0;
              if constexpr (kStaged) {
                term = reader.term(i, half, j, e);
                if constexpr (kPair.documents)
                  if (terms.document_q[query_here] != terms.document_k[key_here]) term = -kInfinity;
              } else {
                term = terms.natural(query_here, key_here);
              }
              if (kMayHide && term == -kInfinity) marks |= 0x8000u << 16 * e;
              if constexpr (kPair.alibi) term = fmaf(slope, fabsf(distance + step), term);
              w[e] = ptx::ex2(fmaf(fmaf(score, scale, term), kLog2e, -lse_log2[e]));
            } else if constexpr (kPair.alibi && Spec::kCausal) {  // no key that is seen is behind its query
              w[e] = ptx::ex2(fmaf(score, scale, fmaf(slope, step, slope * distance - lse_log2[e])));
            } else if constexpr (kPair.alibi) {
              w[e] = ptx::ex2(fmaf(score, scale, fmaf(slope, fabsf(distance + step), -lse_log2[e])));
            } else {
              w[e] = ptx::ex2(score * scale - lse_log2[e]);
            }
            if (kMayHide && (marks >> 16 * e & 0x8000u) != 0) w[e] = 0;  // whatever the score and the row's lse are
          }
          unsigned& weights = p_bits[j / 2][i][j % 2 * 2 + half];
          weights = ptx::pack2<Element>(w[0], w[1]);
          unsigned& to = sent[j / 2][i][j % 2 * 2 + half];
          to = weights;
          if constexpr (kCapped) {
#pragma unroll
            for (int e = 0; e < 2; ++e) w[e] *= fmaf(-s[i][j][2 * half + e], s[i][j][2 * half + e], 1.0f);
            to = ptx::pack2<Element>(w[0], w[1]);
          }
          to |= marks;
          if constexpr (kPair.dropout) {
            const unsigned halves = kept_halves(kept[i / 4], j % 2, i % 4 * 2 + half);
            weights &= halves;
            to |= ~halves & 0x80008000u;
          }
        }
      }
    };
#pragma unroll
    for (int j = 0; j < kChunkTiles; j += 2) {
      make_kept(j);
      if constexpr (kStaged) reader.next(j);
      if constexpr (kStaged && decltype(reader)::kTells) {
        if (!reader.hides()) {
          weigh(Constant<0>{}, j);
          weigh(Constant<0>{}, j + 1);
          continue;
        }
      }
      weigh(Constant<kHides>{}, j);
      weigh(Constant<kHides>{}, j + 1);
    }
  }

  __device__ static void copy(unsigned (&to)[kChunkTiles / 2][kKeyTiles][4], const unsigned (&from)[kChunkTiles / 2][kKeyTiles][4]) {
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[j][i][e] = from[j][i][e];
  }

  // dS^T = P^T (dP^T - row_sum), in place of P^T. P is as it was rounded for the product with dO.
  __device__ void score_gradients(const float (&dp)[kKeyTiles][kChunkTiles][4], unsigned row_sum_at,
                                  unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 row_sum = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * j + lane % 4 * 2));
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned& pair = bits[j / 2][i][j % 2 * 2 + half];
          pair = ptx::pack2<Element>(ptx::low_float<Element>(pair) * (dp[i][j][2 * half] - row_sum.x),
                                     ptx::high_float<Element>(pair) * (dp[i][j][2 * half + 1] - row_sum.y));
        }
    }
  }

  // The same with marks and dropout; dS in fp32 takes the place of dP, for dbias.
  __device__ void pair_score_gradients(float (&dp)[kKeyTiles][kChunkTiles][4], unsigned row_sum_at,
                                       unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) const {
    if constexpr (kHides && !kPair.dropout && !kPair.mask && !kPair.documents) {
      unsigned marks = 0;
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) marks |= bits[j][i][0] | bits[j][i][1] | bits[j][i][2] | bits[j][i][3];
      if (ptx::vote_all((marks & 0x80008000u) == 0)) return marked_gradients(Constant<0>{}, dp, row_sum_at, bits);
    }
    marked_gradients(Constant<kHides>{}, dp, row_sum_at, bits);
  }
  // has_hidden: some pairs may be marked as hidden.
  template <class HasHidden>
  __device__ void marked_gradients(HasHidden, float (&dp)[kKeyTiles][kChunkTiles][4], unsigned row_sum_at,
                                   unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 row_sums = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * j + lane % 4 * 2));
      const float row_sum[2] = {row_sums.x, row_sums.y};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned& pair = bits[j / 2][i][j % 2 * 2 + half];
          float* const ds = &dp[i][j][2 * half];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float marked = e == 0 ? ptx::low_float<Element>(pair) : ptx::high_float<Element>(pair);
            const int sign = static_cast<int>(__float_as_uint(marked));  // below 0: dropped or hidden, and -0: hidden
            float gradient = ds[e];
            if constexpr (kPair.dropout) gradient = sign < 0 ? 0.0f : gradient * pairs_of(p).dropout_scale;
            ds[e] = fabsf(marked) * (gradient - row_sum[e]);
            if (HasHidden::value != 0 && (kPair.dropout ? sign == static_cast<int>(0x80000000u) : sign < 0)) ds[e] = 0;
          }
          pair = ptx::pack2<Element>(ds[0], ds[1]);
        }
    }
  }

  // Adds dS of a chunk, of queries from `first_query` on, to dbias, or writes it, where pairs are seen (masked: where not all are). Lanes of
  // neighbouring keys exchange a query each, so that what a lane adds lies side by side.
  __device__ void add_to_dbias(const float (&ds)[kKeyTiles][kChunkTiles][4], int head, int first_query, bool masked) const {
    const PairParams& pairs = pairs_of(p);
    const int odd = lane / 4 & 1;
    const int key = first_key + key_group * kKeys + lane / 4 - odd, query = first_query + lane % 4 * 2 + odd;
    const long long step = pairs.dbias_strides.row * 8;
    float* const first = pairs.dbias + batch * pairs.dbias_strides.batch + head * pairs.dbias_strides.head + query * pairs.dbias_strides.row + key;
    const bool by_pair = ((reinterpret_cast<unsigned long long>(pairs.dbias) / 4 | static_cast<unsigned long long>(pairs.dbias_strides.row) |
                           static_cast<unsigned long long>(pairs.dbias_strides.head) | static_cast<unsigned long long>(pairs.dbias_strides.batch)) &
                          1) == 0;
    const bool alone = pairs.dbias_alone != 0;
    // Calls take(i, half, j, x): of the query 8 j and the keys 16 i + 8 half and the next, from this lane's.
    const auto for_each_pair = [&](const auto& take) {
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float low = ds[i][j][2 * half], high = ds[i][j][2 * half + 1];
            const float got = ptx::shfl_xor(odd ? low : high, 4);
            const float x[2] = {odd ? got : low, odd ? high : got};
            take(i, half, j, x);
          }
    };
    if (by_pair && !masked && !alone) {
      for_each_pair([&](int i, int half, int j, const float(&x)[2]) { ptx::red_add2(first + j * step + 16 * i + 8 * half, x[0], x[1]); });
      return;
    }
    if (by_pair && !masked) {
      for_each_pair([&](int i, int half, int j, const float(&x)[2]) {
        *reinterpret_cast<float2*>(first + j * step + 16 * i + 8 * half) = {x[0], x[1]};
      });
      return;
    }
    for_each_pair([&](int i, int half, int j, const float(&x)[2]) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int its_query = query + 8 * j, its_key = key + 16 * i + 8 * half + e;
        float* const to = first + j * step + 16 * i + 8 * half + e;
        bool seen = its_query < p.seqlen_q && its_key < seqlen_k();
        if (kMasked) seen = seen && its_key <= its_query + diagonal;
        if (kWindow) seen = seen && its_key >= its_query + left_diagonal;
        if (seen) {
          if (alone)
            *to = x[e];
          else
            ptx::red_add(to, x[e]);
        }
      }
    });
  }

  // Barriers of a key group. A chunk of P^T is written: the first role goes on, perhaps to the next chunk (hence a barrier for each). It could
  // arrive without waiting for the second role, which is 0 to 2 % faster, but compute-sanitizer's racecheck then finds hazards in any program.
  // And, with several warps of a role, those wait for each other.
  static constexpr int kAllThreads = 64 * kGroupWarps, kRoleThreads = 32 * kGroupWarps, kChunks = kQueries / kChunk;
  static_assert(kTile.key_groups * (kChunks + (kExchange ? 2 : 0)) <= 15, "barrier 0 is __syncthreads");
  __device__ int weights_barrier(int chunk) const { return 1 + key_group * kChunks + chunk; }
  __device__ int role_barrier() const { return 1 + kTile.key_groups * kChunks + 2 * key_group + values; }

  __device__ unsigned q_tile(int stage) const { return shared + kTile.q_offset() + stage * kTile.q_bytes(); }
  __device__ unsigned dout_tile(int stage) const { return shared + kTile.dout_offset() + stage * kTile.dout_bytes(); }
  __device__ unsigned ds_tile(int stage) const { return shared + kTile.ds_offset() + stage * kTile.ds_bytes(); }
  __device__ unsigned term_tile_at(int stage) const { return shared + kTile.shared_bytes() + stage * kTerms.bytes(); }
  __device__ unsigned p_tile() const { return shared + kTile.p_offset(); }

  // sum += A B for the queries of the other warps of this role: A from shared memory.
  template <int kSpan, int kInner>
  __device__ void accumulate_others(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at) const {
    ptx::bar_sync(role_barrier(), kRoleThreads);
#pragma unroll
    for (int other = 1; other < kGroupWarps; ++other) {
      const int queries = (member + other) % kGroupWarps * kQueries;
      const BlockAddress<kBlockM, kQueries, LaneOrder::kColumnMajor> a_at(lane, key_group * kKeys, queries);
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        unsigned a[kKeyTiles][4];
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, j));
        accumulate<kSpan, kInner>(sum, a, b_tile + 2 * queries * kInner, b_at, 16 * j);
      }
    }
  }

  // Puts fragments of a chunk where the other role, or the other warps of the role, read them.
  __device__ static void store_chunk(const FragmentStore<kBlockM, kQueries>& store, unsigned tile, int row,
                                     const unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) {
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) store.store(tile, 16 * i, row / 16 + j, bits[j][i]);
  }

  // sum += A B for all queries of a block that an edge of the mask crosses and whose B holds Inf or NaN.
  template <int kSpan, int kInner>
  __device__ void accumulate_careful(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                     const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, int first_query, float factor,
                                     int head) const {
    if constexpr (kExchange)
      ptx::bar_sync(role_barrier(), kRoleThreads);
    else
      ptx::warp_sync();
    const BlockAddress<kBlockM, kBlockM, LaneOrder::kColumnMajor> a_at(lane, key_group * kKeys, 0);
#pragma unroll 1
    for (int k = 0; k < kBlockM / 16; ++k) {
      unsigned a[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, k));
#pragma unroll
      for (int j = 0; j < kSpan / 16; ++j) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, 16 * k, j));
        for (unsigned& pair : b) pair = without_nonfinite<Element>(pair);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          mma(sum[i][2 * j], a[i], b[0], b[1]);
          mma(sum[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
    }
    const int reach = first_query + diagonal - (first_key + key_group * kKeys + lane / 4);
    [[maybe_unused]] const int lead = kWindow ? reach - diagonal + left_diagonal : 0;
    [[maybe_unused]] const Terms<kPair, Element> terms(p, batch, head, seqlen_k());
    add_nonfinite_of<Element, kInner, kSpan / 8>(sum, b_tile, kBlockM, member * kSpan, lane, factor, [&](int i, int half, int query) {
      if constexpr (kWindow)
        if (16 * i + 8 * half < lead + query) return false;
      if constexpr (kPair.lengths || kHides) {
        const int key = first_key + key_group * kKeys + lane / 4 + 16 * i + 8 * half;
        if (key >= seqlen_k()) return false;
        if (kHides && !terms.sees(first_query + query, key)) return false;  // a query behind the last is all zeros
        if (!kMasked) return true;
      }
      return 16 * i + 8 * half <= reach + query;
    });
  }

  // The first role.
  __device__ void compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const {
    const int lane = ptx::opaque(this->lane);
    const BlockAddress<kWidth, kWidth, LaneOrder::kColumnMajor> k_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidth, kWidth, LaneOrder::kRowMajor> q_rows(lane, member * kQueries, 0);
    const BlockAddress<kWidthV, kColumnsV, LaneOrder::kColumnMajor> dout_columns(lane, 0, member * kColumnsV);
    const FragmentStore<kBlockM, kQueries> p_store(lane, key_group * kKeys, member * kQueries);
    const unsigned own_dout = dout_tile(stage) + 2 * member * kQueries * kWidthV;
    [[maybe_unused]] const bool plain = kByDocument && of_one_document(first_query);
    // An Inf or NaN in a row of dO makes its row_sum one.
    const bool careful = (((kMasked || kPair.lengths) && masked) || (kHides && !plain)) &&
                         any_nonfinite(shared + kTile.row_sum_offset() + stage * kTile.row_bytes(), kBlockM, lane);
#pragma unroll 1
    for (int row = 0; row < kQueries; row += kChunk) {
      const int query = member * kQueries + row;
      unsigned p_bits[kChunkTiles / 2][kKeyTiles][4], sloped[kChunkTiles / 2][kKeyTiles][4];
      {
        float s[kKeyTiles][kChunkTiles][4];
        clear(s);
        multiply_rows<kWidth>(s, shared, q_tile(stage), k_rows, q_rows, row);  // S^T = K Q^T
        ptx::warp_sync();  // no need of it, but the compiler then keeps this apart from the product: together they want too many registers
        if constexpr (kCapped) cap_scores(reinterpret_cast<float(&)[kKeyTiles * kChunkTiles * 4]>(s), features_of(p).score_factor);
        const unsigned lse_at = shared + kTile.lse_offset() + stage * kTile.row_bytes() + 4 * query;
        if constexpr (kByDocument) {
          if (plain) {
            weights(s, lse_at, p_bits, sloped);
            if constexpr (!kCapped) copy(sloped, p_bits);
          } else {
            pair_weights(s, stage, lse_at, head, first_query, query, p_bits, sloped);
          }
        } else if constexpr (kPair.terms() || kPair.dropout) {
          pair_weights(s, stage, lse_at, head, first_query, query, p_bits, sloped);
        } else {
          weights(s, lse_at, p_bits, sloped);
        }
        if (masked) hide(p_bits, first_query + query);
        if ((kTwoForms || kHides) && masked) hide(sloped, first_query + query);
      }
      store_chunk(p_store, p_tile(), row, kTwoForms || kHides ? sloped : p_bits);
      ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
      if constexpr (kTwoForms) {  // once the second role has read it, P^T may be there, for those who read it back
        ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
        if (kExchange || careful) store_chunk(p_store, p_tile(), row, p_bits);
      }
      if (careful) continue;
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) accumulate<kColumnsV, kWidthV>(dv, p_bits[j], own_dout, dout_columns, row + 16 * j);  // dV += P^T dO
    }
    if (careful)
      accumulate_careful<kColumnsV, kWidthV>(dv, p_tile(), dout_tile(stage), dout_columns, first_query, 1.0f, head);
    else if constexpr (kExchange)
      accumulate_others<kColumnsV, kWidthV>(dv, p_tile(), dout_tile(stage), dout_columns);
  }

  // The second role.
  __device__ void compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const {
    const int lane = ptx::opaque(this->lane);
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kColumnMajor> v_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kRowMajor> dout_rows(lane, member * kQueries, 0);
    const BlockAddress<kWidth, kColumns, LaneOrder::kColumnMajor> q_columns(lane, 0, member * kColumns);
    const BlockAddress<kBlockM, kQueries, LaneOrder::kColumnMajor> p_read(lane, key_group * kKeys, member * kQueries);
    const FragmentStore<kBlockM, kQueries> ds_store(lane, key_group * kKeys, member * kQueries);
    const unsigned own_q = q_tile(stage) + 2 * member * kQueries * kWidth;
    // An Inf or NaN in a row of Q makes its lse one, unless scores are capped.
    const bool careful = (((kMasked || kPair.lengths) && masked) || kHides) &&
                         (kCapped ? !ptx::vote_all(!share_nonfinite<Element>(q_tile(stage), kTile.q_bytes(), lane, 32))
                                  : any_nonfinite(shared + kTile.lse_offset() + stage * kTile.row_bytes(), kBlockM, lane));
#pragma unroll 1
    for (int row = 0; row < kQueries; row += kChunk) {
      const int query = member * kQueries + row;
      unsigned ds_bits[kChunkTiles / 2][kKeyTiles][4];
      {
        float dp[kKeyTiles][kChunkTiles][4];
        clear(dp);
        multiply_rows<kWidthV>(dp, shared + kTile.v_offset(), dout_tile(stage), v_rows, dout_rows, row);  // dP^T = V dO^T
        ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
#pragma unroll
        for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
          for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(ds_bits[j][i], p_read.at(p_tile(), 16 * i, row / 16 + j));
        if constexpr (kTwoForms) ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
        const unsigned row_sum_at = shared + kTile.row_sum_offset() + stage * kTile.row_bytes() + 4 * query;
        if constexpr (kHides || kPair.dropout || kPair.dbias)
          pair_score_gradients(dp, row_sum_at, ds_bits);
        else
          score_gradients(dp, row_sum_at, ds_bits);
        if (masked) hide(ds_bits, first_query + query);
        if constexpr (kPair.dbias) add_to_dbias(dp, head, first_query + query, masked);
      }
      store_chunk(ds_store, ds_tile(stage), row, ds_bits);
      if (careful) continue;
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) accumulate<kColumns, kWidth>(dk, ds_bits[j], own_q, q_columns, row + 16 * j);  // dK += dS^T Q
    }
    if (careful)
      accumulate_careful<kColumns, kWidth>(dk, ds_tile(stage), q_tile(stage), q_columns, first_query, 0.0f, head);
    else if constexpr (kExchange)
      accumulate_others<kColumns, kWidth>(dk, ds_tile(stage), q_tile(stage), q_columns);
  }

  __device__ void clear_ds(int stage) const {
    const FragmentStore<kBlockM, kQueries> ds_store(lane, key_group * kKeys, member * kQueries);
    const unsigned zeros[4] = {};
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ds_store.store(ds_tile(stage), 16 * i, j, zeros);
  }

 public:
  // `number`: which tile of keys, as take_tile() deals them.
  __device__ Backward(CallParams<kPair>& params, unsigned shared_address, int number) : p(params), shared(shared_address), number_(number) {}

  __device__ void run() {
    take_tile();
    if (kPair.packed && first_key >= p.seqlen_k) return;
    if constexpr (kByIds) narrow();

    bool keys_nonfinite = false;         // Inf or NaN among the keys; asked under a mask only
    float sum[kKeyTiles][kSumTiles][4];  // dV or dK, by role
    clear(sum);
    if constexpr (kPair.lengths) fill(sum, first_sum<kPair>(p, batch));

    // S^T, P^T of one block; dV. Or dP^T, dS^T; dK.
    const auto compute_block = [&](Step step, int stage) {
      const int first_query = step.block * kBlockM, group_key = first_key + key_group * kKeys;
      const bool hidden = (kMasked && group_key > first_query + kBlockM - 1 + diagonal) ||
                          (kWindow && group_key + kKeys - 1 < first_query + left_diagonal);  // no query of the block sees a key of the group
      const bool masked = first_key + kBlockN > seqlen_k() || first_query + kBlockM > p.seqlen_q ||
                          (kMasked && group_key + kKeys - 1 > first_query + diagonal) ||
                          (kWindow && group_key < first_query + kBlockM - 1 + left_diagonal);
      if (values) {
        if (!hidden) compute_values(sum, stage, first_query, masked, step.head);
      } else {
        if (!hidden)
          compute_keys(sum, stage, first_query, masked, step.head);
        else
          clear_ds(stage);
      }
    };

    // dQ of one block, from everybody's dS^T.
    const auto compute_dq = [&](Step step, int stage) {
      const int lane = ptx::opaque(thread) & 31, dq_row = warp % kDqRowWarps * kDqRows, dq_column = warp / kDqRowWarps * kDqColumns;
      const BlockAddress<kBlockM, kDqRows, LaneOrder::kRowMajor> ds_columns(lane, 0, dq_row);
      const BlockAddress<kWidth, kDqColumns, LaneOrder::kColumnMajor> k_columns(lane, 0, dq_column);
      const long long head = workspace_head<kPair>(static_cast<long long>(batch) * p.nheads + step.head, step.head);
      const int first_row = step.block * kBlockM + dq_row;
      const unsigned row_blocks = workspace_blocks<kPair, kDqAccumRows>(p);
      float* const accum = p.dq_accum + (head * row_blocks + first_row / kDqAccumRows) * (kDqAccumRows * kWidth) + dq_column * kDqAccumRows;
      int* const turn = Spec::kDeterministic ? p.dq_semaphore + 1 + head * workspace_blocks<kPair, kBlockM>(p) + step.block : nullptr;
#pragma unroll
      for (int first = 0; first < kDqColumns; first += kDqSpan) {
        float dq[kDqRows / 16][kDqSpan / 8][4];
        clear(dq);
        if ((kMasked || kHides) && keys_nonfinite &&
            (kHides || first_key + kBlockN - 1 > step.block * kBlockM + diagonal ||
             (kWindow && first_key < step.block * kBlockM + kBlockM - 1 + left_diagonal))) {
#pragma unroll 1
          for (int k = 0; k < kBlockN / 16; ++k) {
            unsigned a[kDqRows / 16][4];
#pragma unroll
            for (int i = 0; i < kDqRows / 16; ++i) ptx::ldmatrix_x4_trans(a[i], ds_columns.at(ds_tile(stage), 16 * k, i));
#pragma unroll
            for (int j = 0; j < kDqSpan / 16; ++j) {
              unsigned b[4];
              ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j));
              for (unsigned& pair : b) pair = without_nonfinite<Element>(pair);
#pragma unroll
              for (int i = 0; i < kDqRows / 16; ++i) {
                mma(dq[i][2 * j], a[i], b[0], b[1]);
                mma(dq[i][2 * j + 1], a[i], b[2], b[3]);
              }
            }
          }
          const int reach = first_row + lane / 4 + diagonal - first_key;
          [[maybe_unused]] const int lead = kWindow ? reach - diagonal + left_diagonal : 0;
          [[maybe_unused]] const Terms<kPair, Element> terms(p, batch, step.head, seqlen_k());
          add_nonfinite_of<Element, kWidth, kDqSpan / 8>(dq, shared, kBlockN, dq_column + first, lane, 0.0f, [&](int i, int half, int key) {
            if constexpr (kWindow)
              if (key < lead + 16 * i + 8 * half) return false;
            if constexpr (kHides) {
              const int query = first_row + lane / 4 + 16 * i + 8 * half;
              if (query >= p.seqlen_q || !terms.sees(query, first_key + key)) return false;  // a key behind the last is all zeros
              if (!kMasked) return true;
            }
            return key <= reach + 16 * i + 8 * half;
          });
        } else
#pragma unroll
          for (int k = 0; k < kBlockN / 16; ++k) {  // dQ = dS K
            unsigned a[kDqRows / 16][4];
#pragma unroll
            for (int i = 0; i < kDqRows / 16; ++i) ptx::ldmatrix_x4_trans(a[i], ds_columns.at(ds_tile(stage), 16 * k, i));
#pragma unroll
            for (int j = 0; j < kDqSpan / 16; ++j) {
              unsigned b[4];
              ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j));
#pragma unroll
              for (int i = 0; i < kDqRows / 16; ++i) {
                mma(dq[i][2 * j], a[i], b[0], b[1]);
                mma(dq[i][2 * j + 1], a[i], b[2], b[3]);
              }
            }
          }
        if (Spec::kDeterministic && first == 0) {  // lower key blocks first: the same order of additions in every run
          if (thread == 0) {
            while (ptx::ld_acquire(turn) != nth_key_block(step.block)) __nanosleep(64);
          }
          __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kDqRows / 16; ++i) {
          if (first_row + 16 * i < p.seqlen_q) {
#pragma unroll
            for (int j = 0; j < kDqSpan / 8; ++j) add_to_dq(accum + 16 * i * kWidth + (first / 8 + j) * 128, lane, dq[i][j]);
          }
        }
      }
      if constexpr (Spec::kDeterministic) {
        __threadfence();
        __syncthreads();
        if (thread == 0) ptx::red_add_release(turn, 1);
      }
    };

    // ---- the walk over query blocks ----
    // No query sees the keys of a tile behind a batch entry's last.
    const int steps = kPair.lengths && first_key >= seqlen_k() ? 0 : max(0, blocks_end() - first_block) * p.group;
    Step now{head_k * p.group, first_block};
    if (steps > 0) {
      load_keys();
      load_queries(now, 0);
      commit();
    }
    if ((kMasked || kHides) && steps > 0) {
      wait_for_loads();
      keys_nonfinite = ptx::bar_or(share_nonfinite<Element>(shared, kTile.k_bytes(), thread, kThreads));
    }
    for (int i = 0; i < (kPipelined && steps > 0 ? steps + 1 : steps); ++i, now = after(now)) {
      wait_for_loads();
      if constexpr (kPipelined) {
        if (i + 1 < steps) {
          load_queries(after(now), (i + 1) % 2);
          commit();
        }
        const bool late = !Spec::kDeterministic && values;
        if (i > 0 && !late) compute_dq(before(now), (i + 1) % 2);
        if (i < steps) compute_block(now, i % 2);
        if (i > 0 && late) compute_dq(before(now), (i + 1) % 2);
      } else {
        compute_block(now, 0);
        __syncthreads();
        if (i + 1 < steps) {
          load_queries(after(now), 0);
          commit();
        }
        compute_dq(now, 0);
      }
    }
    // ---- finish: dK and dV leave through the shared memory of K and V ----
    __syncthreads();
    if (values)
      store_gradient<kWidthV, kColumnsV>(shared + kTile.v_offset(), sum, kPair.dropout ? pairs_of(p).dropout_scale : 1.f, member * kColumnsV);
    else
      store_gradient<kWidth, kColumns>(shared, sum, p.softmax_scale, member * kColumns);
    __syncthreads();
    const KLoader k_loader(thread);
    const VLoader v_loader(thread);
    const int rows = p.seqlen_k - first_key;
    k_loader.template store<kBlockN>(shared, const_cast<Bits*>(at(p.dk, p.dk_strides, batch, head_k, first_key)), p.dk_strides.row, rows);
    v_loader.template store<kBlockN>(shared + kTile.v_offset(), const_cast<Bits*>(at(p.dv, p.dv_strides, batch, head_k, first_key)), p.dv_strides.row,
                                     rows);
  }

 private:
  template <int kInner, int kSpan>
  __device__ void store_gradient(unsigned tile, const float (&d)[kKeyTiles][kSumTiles][4], float scale, int first_column) const {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kSpan / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = key_group * kKeys + 16 * i + 8 * half + lane / 4;
          ptx::st_shared_4(tile + SwizzledTile<kInner>::offset(row, first_column / 8 + j) + lane % 4 * 4,
                           ptx::pack2<Element>(d[i][j][2 * half] * scale, d[i][j][2 * half + 1] * scale));
        }
  }
};

template <class Spec>
__device__ __forceinline__ void backward(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto run = [&](auto& params) { Backward<Spec>(params, ptx::shared_address(shared_memory), static_cast<int>(blockIdx.x)).run(); };
  if constexpr (kPairOf<Spec>.packed) {
    PairParams own = pairs_of(p);
    run(own);
  } else {
    run(p);
  }
}

}  // namespace fattn::v2
