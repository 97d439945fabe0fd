// CTAs, tiles and waves of a GPU, counted: products in whole tiles, what a tile costs besides, bytes of its memory.
#include <algorithm>
#include <cmath>

#include "lab/kernel_work.h"
#include "lab/parts.h"

namespace fattn::lab {
namespace {

using measure::ProblemSpec;

// Kernels are as wide as the next of these; those of v2 skip what is beyond in steps of 16.
int64_t width_of(const ProblemSpec& s) {
  const int64_t dim = std::max(s.headdim, s.headdim_v);
  for (const int64_t width : {64, 96, 128, 192, 256})
    if (dim <= width) return width;
  return rounded(dim, 64);
}

// CTAs that are resident on a multiprocessor at once, by shared memory and warps.
double ctas_of_multiprocessor(const PlanShape& shape, const MachineSizes& machine) {
  constexpr double kReserved = 1024, kMostWarps = 64, kMostCtas = 32;
  double ctas = kMostCtas;
  if (shape.shared_bytes > 0) ctas = std::min(ctas, std::floor(machine.shared_per_multiprocessor / (real(shape.shared_bytes) + kReserved)));
  if (shape.warps > 0) ctas = std::min(ctas, std::floor(kMostWarps / 2 / real(shape.warps)));  // half: registers are the limit, too
  return std::max(1.0, ctas);
}

struct Sizes {
  double heads, heads_k, rows, keys, q, v, element;
  explicit Sizes(const ProblemSpec& s)
      : heads(real(s.batch * s.nheads)),
        heads_k(real(s.batch * s.nheads_k)),
        rows(real(s.seqlen_q)),
        keys(real(s.seqlen_k)),
        q(real(s.headdim)),
        v(real(s.headdim_v)),
        element(real(static_cast<int64_t>(size_of(s.dtype)))) {}
};

void forward(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const int64_t block_m = std::max<int64_t>(16, shape.rows), block_n = std::max<int64_t>(16, shape.keys);
  constexpr double kTileInBlocks = 2;  // what a tile costs besides its blocks, about
  double blocks = 0, tiles = 0;
  std::vector<Tasks> tasks;
  for (int64_t row = 0; row < s.seqlen_q; row += block_m) {
    const int64_t last = std::min(row + block_m, s.seqlen_q) - 1;
    const int64_t begin = keys_seen(s, row).begin, end = std::max(begin, keys_seen(s, last).end);
    const double here = real(parts_of(end - begin / block_n * block_n, block_n));
    blocks += here;
    tiles += 1;
    tasks.push_back({here + kTileInBlocks, n.heads});
  }
  const double slots = machine.multiprocessors * ctas_of_multiprocessor(shape, machine);
  const double most = n.heads * largest_share(tasks, slots);
  const double width = shape.algorithm == Algorithm::kV3 ? 2 * real(width_of(s)) : real(rounded(s.headdim, 16) + rounded(s.headdim_v, 16));
  work.add("products", Part::kCompute, blocks * most * real(block_m * block_n) * width);
  work.add("blocks", Part::kCompute, blocks * most);
  work.add("tiles", Part::kCompute, tiles * most);
  work.add("launches", Part::kCall, 1);
  work.add("bytes", Part::kMemory, shape.bytes);
  // Operands in two parts, written to and read from the workspace.
  if (s.dtype == DType::kF32) work.add("bytes of parts", Part::kMemory, 2 * real(shape.workspace_bytes));
}

void backward(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const int64_t block_m = std::max<int64_t>(16, shape.rows), block_n = std::max<int64_t>(16, shape.keys);
  constexpr double kTileInBlocks = 3;
  const double group = n.heads / n.heads_k;
  double blocks = 0, tiles = 0;
  std::vector<Tasks> tasks;
  for (int64_t key = 0; key < s.seqlen_k; key += block_n) {
    const int64_t last = std::min(key + block_n, s.seqlen_k) - 1;
    double here = 0;
    if (!s.causal && !s.windowed()) {
      here = real(parts_of(s.seqlen_q, block_m));
    } else {
      for (int64_t row = 0; row < s.seqlen_q; row += block_m) {
        const int64_t row_last = std::min(row + block_m, s.seqlen_q) - 1;
        here += keys_seen(s, row).begin <= last && keys_seen(s, row_last).end > key ? 1 : 0;
      }
    }
    blocks += here * group;
    tiles += 1;
    tasks.push_back({here * group + kTileInBlocks, n.heads_k});
  }
  const double slots = machine.multiprocessors * ctas_of_multiprocessor(shape, machine);
  const double most = n.heads_k * largest_share(tasks, slots);
  const double width = shape.algorithm == Algorithm::kV3 ? 5 * real(width_of(s)) : 2.5 * real(rounded(s.headdim, 16) + rounded(s.headdim_v, 16));
  work.add("products", Part::kCompute, blocks * most * real(block_m * block_n) * width);
  work.add("blocks", Part::kCompute, blocks * most);
  work.add("tiles", Part::kCompute, tiles * most);
  work.add("launches", Part::kCall, 1);
  // Row sums and zeros before the gradients, dq rounded behind them: kernels of their own, which nothing overlaps.
  work.add("bytes of rows", Part::kCall, n.heads * n.rows * (2 * n.v * n.element + 8 * n.q + n.q * n.element));
  work.add("bytes", Part::kMemory, shape.bytes);
}

void decode(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const double slots = machine.multiprocessors * ctas_of_multiprocessor(shape, machine), grid = std::max(1.0, real(shape.grid));
  const bool merges = shape.splits > 1;
  const double waves = std::ceil(grid / slots), splits = real(std::max<int64_t>(1, shape.splits)) / (shape.shared ? real(s.batch) : 1);
  // A multiprocessor reads some 2.6 times its share of the bandwidth if it is alone.
  const double busy = std::min(1.0, 2.6 * grid / machine.multiprocessors);
  const double row_tiles = std::max(1.0, grid / splits / n.heads_k), keys = n.heads_k * n.keys * (n.q + n.v) * n.element;
  // The last of several waves is as long as the others, however many CTAs it has.
  work.add("bytes of keys", Part::kMemory, keys / busy * (waves > 1 ? waves * slots / grid : 1));
  work.add("keys of a CTA", Part::kCompute, waves * n.keys / splits);
  work.add("numbers of a CTA", Part::kCompute, waves * n.keys / splits * (n.q + n.v));
  work.add("bytes read again", Part::kMemory, keys * (row_tiles - 1));
  work.add("waves", Part::kCall, waves);
  work.add("merged", Part::kCall, merges ? 1 : 0);
  const double rows = n.heads * n.rows;
  work.add("bytes of rows", Part::kCall, rows * (n.element * (n.q + n.v) + (merges ? 2 * (splits + (shape.shared ? 1 : 0)) * 4 * (n.v + 2) : 0)));
}

// cuBLASLt's products of whole matrices, and a kernel that reads and writes each matrix once.
void standard(Work& work, const ProblemSpec& s, const PlanShape& shape) {
  const Sizes n(s);
  const bool backward = shape.path == PlanShape::Path::kBackward;
  const double matrix = n.heads * n.rows * n.keys;
  work.add("products", Part::kCompute, matrix * (n.q + n.v) * (backward ? 2.5 : 1));
  work.add("matrix elements", Part::kCall, matrix * n.element);
  work.add("launches", Part::kCall, 1);
  work.add("bytes", Part::kMemory, shape.bytes);
}

}  // namespace

Work cuda_work(const ProblemSpec& spec, const PlanShape& shape, const MachineSizes& machine) {
  Work work;
  work.overlap = 2;  // of 1.5 to 8, errors left out one by one were least at 1.5 to 2
  const bool backward_pass = shape.path == PlanShape::Path::kBackward, decodes = shape.path == PlanShape::Path::kDecode;
  // fp16 and bf16 are the same kernels with another instruction of the same rate.
  work.family = std::string("cuda ") + name_of(shape.algorithm) +
                (backward_pass ? " backward "
                 : decodes     ? " decode "
                               : " forward ") +
                (spec.dtype == DType::kF32 ? "fp32" : "16-bit");
  if (shape.algorithm == Algorithm::kStandard) {
    standard(work, spec, shape);
    return work;
  }
  if (decodes) {
    decode(work, spec, shape, machine);
    return work;
  }
  // With a mask or without: constants of both together predict either better, as there are twice as many calls to fit them to.
  work.family += " headdim " + std::to_string(width_of(spec));
  backward_pass ? backward(work, spec, shape, machine) : forward(work, spec, shape, machine);
  return work;
}

}  // namespace fattn::lab
