#include "backend/standard/layout.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "shared/text.h"

namespace fattn::core {
namespace {

// 128 rows against 1024 keys: the fp32 scores take 512 KiB, which a second-level cache of 1 MiB holds with the operands,
// and sgemm still runs at its full speed.
constexpr int64_t kBlock = kMostOutputs, kTile = 1024;

constexpr size_t kLimit = std::numeric_limits<int64_t>::max();

class Sizes {
 public:
  explicit Sizes(const Problem& p) : p_(p) {}
  size_t times(std::initializer_list<int64_t> factors) const {
    size_t n = 1;
    bool fits = true;
    for (int64_t f : factors) fits = fits && !__builtin_mul_overflow(n, static_cast<size_t>(f), &n);
    return checked(fits, n);
  }
  size_t plus(size_t a, size_t b) const {
    size_t n = 0;
    const bool fits = !__builtin_add_overflow(a, b, &n);
    return checked(fits, n);
  }
  size_t aligned(size_t n, size_t to) const { return plus(n, to - 1) / to * to; }

 private:
  size_t checked(bool fits, size_t n) const {
    if (!fits || n > kLimit)
      throw Error(ErrorCode::kOutOfMemory, text("algorithm standard stores the scores of every head; with batch ", p_.batch, ", nheads ", p_.nheads,
                                                ", seqlen_q ", p_.seqlen_q, " and seqlen_k ", p_.seqlen_k,
                                                " that is more than 2^63 - 1 bytes. Use algorithm v2, whose memory grows with seqlen_q only"));
    return n;
  }
  const Problem& p_;
};

int64_t divide_up(int64_t a, int64_t b) { return b == 0 ? 0 : a / b + (a % b != 0); }

// The number of tasks; the heads are not multiplied where there are no blocks (the product of empty shapes may overflow).
int64_t tasks(int64_t batch, int64_t heads, int64_t blocks) { return batch == 0 || blocks == 0 ? 0 : batch * heads * blocks; }

// Does some tensor need an fp32 copy for BLAS?
bool needs_copies(const Problem& p) {
  if (p.dtype != DType::kF32) return true;
  const auto bad = [](const Strides& s, int64_t rows, int64_t width) { return !blas_can_use(s.row, rows, width); };
  return bad(p.q, p.seqlen_q, p.headdim) || bad(p.k, p.seqlen_k, p.headdim) || bad(p.v, p.seqlen_k, p.headdim_v) ||
         (p.backward ? bad(p.dout, p.seqlen_q, p.headdim_v) || bad(p.dq, p.seqlen_q, p.headdim) || bad(p.dk, p.seqlen_k, p.headdim) ||
                           bad(p.dv, p.seqlen_k, p.headdim_v)
                     : bad(p.o, p.seqlen_q, p.headdim_v));
}

}  // namespace

bool blas_can_use(int64_t stride, int64_t rows, int64_t width) {
  return rows <= 1 || (stride >= width && stride <= std::numeric_limits<int32_t>::max());
}

Layout layout_of(const Problem& p, int threads) {
  const Sizes sizes(p);
  Layout at;
  at.block_q = std::min(kBlock, p.seqlen_q);
  at.block_k = std::min(kBlock, p.seqlen_k);
  at.tile_q = std::min(kTile, p.seqlen_q);
  at.tile_k = std::min(kTile, p.seqlen_k);
  at.row_tasks = tasks(p.batch, p.nheads, divide_up(p.seqlen_q, at.block_q));
  at.key_tasks = p.backward ? tasks(p.batch, p.nheads_k, divide_up(p.seqlen_k, at.block_k)) : 0;
  at.workers = static_cast<int>(std::min<int64_t>(threads, std::max(at.row_tasks, at.key_tasks)));
  if (at.workers == 0) return at;

  const bool sixteen = p.dtype != DType::kF32;
  const size_t matrix = sizes.aligned(sizes.times({p.seqlen_q, p.seqlen_k, p.nheads, p.batch, static_cast<int64_t>(size_of(p.dtype))}), 64);
  at.weights = 0;
  at.dscores = matrix;
  at.scratch = p.backward ? sizes.plus(matrix, matrix) : matrix;

  size_t floats = 0;
  const auto take = [&](bool needed, int64_t rows, int64_t width) {
    const size_t start = floats;
    if (needed) floats = sizes.plus(floats, sizes.aligned(sizes.times({rows, width}), 16));
    return start;
  };
  const bool copies = needs_copies(p);
  const int64_t headdim = std::max(p.headdim, p.headdim_v);
  const int64_t block = p.backward ? std::max(at.block_q, at.block_k) : at.block_q;
  const int64_t tile = p.backward ? std::max(at.tile_q, at.tile_k) : at.tile_k;
  const int64_t scores = p.backward ? std::max(at.block_q * at.tile_k, at.block_k * at.tile_q) : at.block_q * at.tile_k;
  at.block[0] = take(copies, at.block_q, headdim);
  at.block[1] = take(copies && p.backward, at.block_q, headdim);
  at.tile[0] = take(true, tile, headdim);
  at.tile[1] = take(p.backward, tile, headdim);
  at.scores[0] = take(sixteen, scores, 1);
  at.scores[1] = take(sixteen && p.backward, scores, 1);
  at.output[0] = take(copies, block, headdim);
  at.output[1] = take(copies && p.backward, block, headdim);
  at.score_row = take(sixteen && !p.backward, p.seqlen_k, 1);
  at.row_values = take(true, at.block_q, 1);
  at.line = take(true, headdim, 1);
  at.scratch_stride = sizes.times({static_cast<int64_t>(floats), static_cast<int64_t>(sizeof(float))});
  at.total = sizes.plus(at.scratch, sizes.times({static_cast<int64_t>(at.scratch_stride), at.workers}));
  return at;
}

}  // namespace fattn::core
