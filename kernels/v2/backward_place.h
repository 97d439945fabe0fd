// Where a CTA of kernels/v2/backward.h is and what it has: its keys, the blocks of queries that see them, what its warps compute, its shared memory,
// and the loads. Spec: see there.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_layout.h"
#include "kernels/documents.h"
#include "kernels/fine_weights.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/async_copy_word.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/v2/row_loader.h"
#include "kernels/v2/term_tile.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

template <class Spec>
struct BackwardPlace {
  static constexpr BackwardTile kTile = Spec::kTile;
  static constexpr int kWidth = kTile.width, kWidthV = kTile.width_v, kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.threads(), kGroupWarps = kTile.group_warps;
  static constexpr bool kPipelined = kTile.pipelined, kExchange = kGroupWarps > 1;
  static constexpr bool kAsync = Spec::kLevel >= 80;
  static constexpr bool kWindow = Spec::kWindow, kCapped = Spec::kCapped, kMasked = Spec::kCausal || kWindow;
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  static constexpr bool kTwoForms = kCapped || kPair.dropout;  // what dV is made of is not what dS^T is made of
  // Gradients in fp32: what rounding takes from P^T follows it through shared memory, so that dS^T is of P^T in fp32.
  static constexpr bool kWholeWeights = kPair.fp32_out;
  static constexpr bool kHides = kPair.hides();
  // Elsewhere P^T passes as kernels/fine_weights.h has it, but not in fp16 where its sign is a mark, or where registers do not suffice.
  using Fine = FineWeights<typename Spec::Element, kCapped ? 15 : 10>;  // scores below softcap have no weight of 2, up to some 5e6
  static constexpr bool kMarked = kHides || kPair.dropout || kPair.dbias;
  static constexpr bool kFine = !kWholeWeights && !(Fine::kSign && (kMarked || (kExchange && kWidth != kWidthV)));
  static constexpr bool kRoundedLater = kFine && !kTwoForms && !kHides;  // into P^T for dV, when it has been sent
  static constexpr bool kStaged = is_staged<Spec>();
  static constexpr TermTile kTerms = term_tile<kPair>(kBlockM, kBlockN, true);  // one a stage, behind all else
  // Blocks of queries that ids of documents leave out: not where key blocks wait for each other and are counted.
  static constexpr bool kByIds = kPair.documents && !Spec::kDeterministic, kRanges = kWindow || kByIds;
  static constexpr bool kByDocument = kByIds && !kPair.with_documents(false).terms() && !kPair.dropout;  // blocks of one document have nothing to add

  // The second role reads P^T piece by piece, when it needs it: registers of 64 queries and 32 keys are few. Elsewhere others wait until it has.
  static constexpr bool kReadLate = kRoundedLater && !kExchange && !kMarked;

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
    if constexpr (kPair.packed) enter<kPair, kWidth, kBlockM>(p, batch);
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

  // Barriers of a key group. A chunk of P^T is written: the first role goes on, perhaps to the next chunk (hence a barrier for each). It could
  // arrive without waiting for the second role, which is 0 to 2 % faster, but compute-sanitizer's racecheck then finds hazards in any program.
  // And, with several warps of a role, those wait for each other.
  static constexpr int kAllThreads = 64 * kGroupWarps, kRoleThreads = 32 * kGroupWarps, kChunks = kQueries / kChunk;
  static_assert(kTile.key_groups * (kChunks + (kExchange ? 2 : 0)) <= 15, "barrier 0 is __syncthreads");
  // Whether in a block, masked or not, warps may read back P^T in another form than the second role, which then says when it has read its own.
  __device__ static bool read_again(bool masked) {
    if constexpr (kRoundedLater) return kExchange || ((kMasked || kPair.lengths) && masked);
    return kTwoForms || kWholeWeights || kFine;
  }
  __device__ int weights_barrier(int chunk) const { return 1 + key_group * kChunks + chunk; }
  __device__ int role_barrier() const { return 1 + kTile.key_groups * kChunks + 2 * key_group + values; }

  __device__ unsigned q_tile(int stage) const { return shared + kTile.q_offset() + stage * kTile.q_bytes(); }
  __device__ unsigned dout_tile(int stage) const { return shared + kTile.dout_offset() + stage * kTile.dout_bytes(); }
  __device__ unsigned ds_tile(int stage) const { return shared + kTile.ds_offset() + stage * kTile.ds_bytes(); }
  __device__ unsigned term_tile_at(int stage) const { return shared + kTile.shared_bytes() + stage * kTerms.bytes(); }
  __device__ unsigned p_tile() const { return shared + kTile.p_offset(); }
  __device__ unsigned lse_rows(int stage) const { return shared + kTile.lse_offset() + stage * kTile.row_bytes(); }

  // `number`: which tile of keys, as take_tile() deals them.
  __device__ BackwardPlace(CallParams<kPair>& params, unsigned shared_address, int number) : p(params), shared(shared_address), number_(number) {}
};

}  // namespace fattn::v2
