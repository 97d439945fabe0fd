// The loops of src/backend/cpu and of the reference, counted: products in vectors of the instruction set, keys and values that a task brings along,
// rows that are packed and written, and bytes by the level of memory that they come from.
#include <algorithm>

#include "lab/kernel_work.h"
#include "lab/parts.h"

namespace fattn::lab {
namespace {

using measure::ProblemSpec;

constexpr int64_t kTile = 64;      // queries
constexpr int64_t kHalfTile = 32;  // at an edge of a mask
constexpr int64_t kStep = 32;      // keys of a step of decode

bool masked(const ProblemSpec& s) { return s.causal || s.windowed(); }

int64_t lanes_of(const std::string& kernel) {
  const auto has = [&](const char* isa) { return kernel.find(isa) != std::string::npos; };
  return has("avx512") || has("amx") ? 16 : has("avx2") ? 8 : 4;
}

// Pairs of a tile's rows [row, end) with the keys [from, to), in half tiles where a mask has edges: `padded` with the rows as vectors.
struct Pairs {
  double padded = 0, exact = 0, keys = 0;
};
Pairs pairs_of(const ProblemSpec& s, int64_t row, int64_t end, int64_t from, int64_t to, int64_t lanes) {
  Pairs pairs;
  const int64_t part = masked(s) ? kHalfTile : kTile;
  for (int64_t first = row; first < end; first += part) {
    const int64_t last = std::min(first + part, end) - 1;
    const int64_t begin = std::max(from, keys_seen(s, first).begin), stop = std::min(to, keys_seen(s, last).end);
    const double keys = real(std::max<int64_t>(0, stop - begin));
    pairs.padded += real(rounded(last + 1 - first, lanes)) * keys;
    pairs.exact += real(last + 1 - first) * keys;
    pairs.keys = std::max(pairs.keys, keys);
  }
  return pairs;
}

struct Sizes {
  double batch, heads, heads_k, rows, keys, dims, element;  // dims: of a row of q and of v together
  explicit Sizes(const ProblemSpec& s)
      : batch(real(s.batch)),
        heads(real(s.batch * s.nheads)),
        heads_k(real(s.batch * s.nheads_k)),
        rows(real(s.seqlen_q)),
        keys(real(s.seqlen_k)),
        dims(real(s.headdim + s.headdim_v)),
        element(real(static_cast<int64_t>(size_of(s.dtype)))) {}
};

// Bytes that come from beyond the L2 caches of all cores, and those from beyond the L3 cache, half of which others use.
void add_bytes(Work& work, double bytes, double working_set, double cores, const MachineSizes& machine) {
  work.add("bytes beyond L2", Part::kMemory, bytes * share_beyond(working_set, machine.l2_bytes * cores) / cores);
  work.add("bytes beyond L3", Part::kMemory, bytes * share_beyond(working_set, machine.l3_bytes / 2));
}

void forward(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const int64_t lanes = lanes_of(shape.kernel), block = std::max<int64_t>(1, shape.keys), rows = std::max(shape.rows, kTile);
  double padded = 0, keys = 0, steps = 0, count = 0;
  std::vector<Tasks> tasks;
  for (int64_t row = 0; row < s.seqlen_q; row += rows) {
    const int64_t end = std::min(row + rows, s.seqlen_q);
    const double seen = real(std::max<int64_t>(0, keys_seen(s, end - 1).end - keys_seen(s, row).begin));
    double here = 0;
    for (int64_t tile = row; tile < end; tile += kTile) {
      const Pairs pairs = pairs_of(s, tile, std::min(tile + kTile, end), 0, s.seqlen_k, lanes);
      here += pairs.padded;
      steps += real(parts_of(static_cast<int64_t>(pairs.keys), block));
    }
    padded += here;
    keys += seen;
    count += 1;
    // In products, which the other costs are about this many times of.
    tasks.push_back({here * n.dims + seen * n.dims * 8 + real(end - row) * n.dims * 20 + 3000, n.heads});
  }
  const double most = n.heads * largest_share(tasks, shape.threads), dims_v = real(s.headdim_v);
  work.add("products", Part::kCompute, padded * n.dims * most);
  work.add("scores", Part::kCompute, padded * most);
  work.add("keys brought", Part::kCompute, keys * n.dims * most);
  work.add("rows", Part::kCompute, n.rows * n.dims * most);
  work.add("steps", Part::kCompute, steps * most);
  work.add("sums scaled", Part::kCompute, steps * dims_v * kTile * most);
  work.add("tasks", Part::kCompute, count * most);
  work.add("calls", Part::kCall, 1);
  const double bytes = n.element * n.dims * (n.heads * n.rows + n.heads_k * n.keys);
  add_bytes(work, bytes, bytes, shape.threads, machine);
}

void decode(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const int64_t lanes = lanes_of(shape.kernel), step = shape.kernel.find("bf16 avx512_bf16") != std::string::npos ? 2 * lanes : lanes;
  const double wide = real(rounded(s.headdim, step) + rounded(s.headdim_v, step));
  const int64_t first = keys_seen(s, 0).begin, seen = std::max<int64_t>(0, s.seqlen_k - first), chunk = std::max<int64_t>(1, shape.task_keys);
  const double group = real(s.nheads / s.nheads_k), rows = group * n.rows;
  std::vector<Tasks> tasks;
  const double sets = n.batch * real(parts_of(s.nheads_k, shape.heads)), last = real(seen - (shape.splits - 1) * chunk);
  tasks.push_back({real(chunk), sets * real(shape.splits - 1)});
  tasks.push_back({std::max(1.0, last), sets});
  const double share = largest_share(tasks, shape.threads), most = n.heads_k * share, keys = real(seen);
  const double steps = real(parts_of(seen, kStep));
  const auto all_rows = static_cast<int64_t>(rows), padded = (seen / kStep * kStep) + rounded(seen % kStep, lanes);
  const double reads = real(all_rows / 4 + all_rows % 4 / 2 + all_rows % 2);  // four rows share one, then two, then one
  work.add("products", Part::kCompute, most * rows * real(padded) * wide);
  work.add("keys read", Part::kCompute, most * reads * real(padded) * wide);
  const bool copied = s.headdim % step != 0 || s.headdim_v % step != 0;
  work.add("keys copied", Part::kCompute, copied ? most * keys * wide : 0);
  work.add("scores", Part::kCompute, most * rows * keys);
  work.add("sums", Part::kCompute, most * steps * rows * real(s.headdim_v));
  work.add("steps", Part::kCompute, most * steps * rows);
  const double merged = n.heads * n.rows * real(shape.splits) / std::min<double>(shape.threads, std::max(1.0, n.heads_k));
  work.add("rows merged", Part::kCompute, merged);
  work.add("sums merged", Part::kCompute, merged * real(s.headdim_v));
  work.add("tasks", Part::kCompute, most * real(shape.splits));
  work.add("calls", Part::kCall, 1);
  const double bytes = n.heads_k * keys * n.dims * n.element;
  add_bytes(work, bytes, bytes + n.heads * n.rows * n.dims * n.element, shape.threads, machine);
}

void backward(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const int64_t lanes = lanes_of(shape.kernel), block = std::max<int64_t>(1, shape.keys), super_block = std::max<int64_t>(1, shape.task_keys);
  const double group = real(s.nheads / s.nheads_k);
  double padded = 0, exact = 0, kept = 0, tiles = 0, steps = 0;
  std::vector<Tasks> tasks;
  double head = 0;
  for (int64_t key = 0; key < s.seqlen_k; key += super_block) {
    const int64_t end = std::min(key + super_block, s.seqlen_k);
    double here = 0, met = 0;
    for (int64_t row = 0; row < s.seqlen_q; row += kTile) {
      const int64_t row_end = std::min(row + kTile, s.seqlen_q);
      const Pairs pairs = pairs_of(s, row, row_end, key, end, lanes);
      if (pairs.keys == 0) continue;
      here += pairs.padded;
      exact += pairs.exact;
      kept += pairs.keys * n.dims;
      steps += real(parts_of(static_cast<int64_t>(pairs.keys), block));
      met += 1;
    }
    padded += here;
    tiles += met;
    const double size = group * (here * 2.5 * n.dims + met * kTile * n.dims * 10 + real(end - key) * n.dims * 5 + 2000);
    head += size;
    if (shape.splits > 1) tasks.push_back({size, n.heads_k});
  }
  if (shape.splits <= 1) tasks.push_back({head, n.heads_k});
  const double share = largest_share(tasks, shape.threads), most = n.heads * share;
  const double q = real(s.headdim), v = real(s.headdim_v);
  work.add("products", Part::kCompute, most * (padded * (2 * q + v) + exact * (q + v)));
  work.add("keys' sums", Part::kCompute, most * kept);
  work.add("scores", Part::kCompute, most * padded);
  work.add("rows packed", Part::kCompute, most * tiles * kTile * n.dims / 2);
  work.add("tiles", Part::kCompute, most * tiles);
  work.add("steps", Part::kCompute, most * steps);
  work.add("keys", Part::kCompute, n.heads_k * share * n.keys * n.dims / 2);
  const double row_workers = std::min<double>(shape.threads, n.heads * real(parts_of(s.seqlen_q, kTile)));
  work.add("rows", Part::kCompute, n.heads * n.rows * n.dims / 2 / row_workers);
  work.add("tasks", Part::kCompute, n.heads_k * share * real(static_cast<int64_t>(shape.splits > 1 ? tasks.size() : 1)));
  work.add("calls", Part::kCall, 1);
  const double bytes = 2 * n.element * n.dims * (n.heads * n.rows + n.heads_k * n.keys);
  add_bytes(work, bytes, bytes, shape.threads, machine);
}

// One thread, in float64, a vector on the heap for every row.
void reference(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const bool backward = shape.path == PlanShape::Path::kBackward;
  double pairs = 0;
  if (masked(s))
    for (int64_t row = 0; row < s.seqlen_q; ++row) pairs += real(keys_seen(s, row).count());
  else
    pairs = n.rows * n.keys;
  const double all = n.heads * pairs, heads = backward ? n.heads_k : n.heads, set = n.keys * (n.dims + 4) * 8 * (backward ? 2 : 1);
  work.add("products", Part::kCompute, all * n.dims);
  work.add("scores", Part::kCompute, all);
  work.add("rows", Part::kCompute, n.heads * n.rows);
  work.add("rows' numbers", Part::kCompute, n.heads * n.rows * n.dims);
  work.add("keys", Part::kCompute, heads * n.keys);
  work.add("keys' numbers", Part::kCompute, heads * n.keys * n.dims);
  work.add("calls", Part::kCall, 1);
  work.add("products beyond L2", Part::kMemory, all * n.dims * share_beyond(set, machine.l2_bytes));
  work.add("products beyond L3", Part::kMemory, all * n.dims * share_beyond(set, machine.l3_bytes / 4));
  work.add("keys' numbers beyond L3", Part::kMemory, heads * n.keys * n.dims * share_beyond(set, machine.l3_bytes / 4));
}

// Products by OpenBLAS of a block of rows and a tile of keys at a time, whatever a mask hides, and a pass over the matrix between them.
void standard(Work& work, const ProblemSpec& s, const PlanShape& shape, const MachineSizes& machine) {
  const Sizes n(s);
  const bool backward = shape.path == PlanShape::Path::kBackward;
  constexpr int64_t kBlock = 128, kKeys = 1024;  // those of src/backend/standard
  const double blocks = real(parts_of(s.seqlen_q, kBlock)), tiles = real(parts_of(s.seqlen_k, kKeys));
  const double share = largest_share({{1, n.heads * blocks}}, shape.threads), matrix = n.heads * n.rows * n.keys;
  work.add("products", Part::kCompute, matrix * n.dims * (backward ? 2.5 : 1) * share);
  work.add("matrix elements", Part::kCompute, matrix * share);
  work.add("keys brought", Part::kCompute, n.heads * blocks * n.keys * n.dims * share);
  work.add("rows", Part::kCompute, n.heads * n.rows * n.dims * share);
  work.add("tiles", Part::kCompute, n.heads * blocks * tiles * share);
  work.add("calls", Part::kCall, 1);
  const double bytes = matrix * n.element * (backward ? 2 : 1);
  add_bytes(work, bytes, bytes, shape.threads, machine);
}

}  // namespace

Work cpu_work(const ProblemSpec& spec, const PlanShape& shape, const MachineSizes& machine) {
  Work work;
  work.family = shape.kernel;
  const bool of_reference = shape.backend == Backend::kReference, of_standard = shape.algorithm == Algorithm::kStandard;
  if (of_reference) {
    work.family = std::string("reference ") + (shape.path == PlanShape::Path::kBackward ? "backward " : "forward ") + name_of(spec.dtype);
    reference(work, spec, shape, machine);
  } else if (of_standard) {
    standard(work, spec, shape, machine);
  } else if (shape.path == PlanShape::Path::kBackward) {
    backward(work, spec, shape, machine);
  } else if (shape.path == PlanShape::Path::kDecode) {
    decode(work, spec, shape, machine);
  } else {
    forward(work, spec, shape, machine);
  }
  return work;
}

}  // namespace fattn::lab
