// The models: sums over tiles and tasks, in closed form where they are equal.
#include "measure/traffic.h"

#include <algorithm>

namespace fattn::measure {
namespace {

constexpr int64_t kKeys = 128;                                           // of a block
constexpr int64_t kRowsV1 = 16, kRowsForward = 128, kRowsBackward = 64;  // queries of a tile

int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }

// Pairs of a tile of `rows` queries and a block of keys with a pair of query and key that is visible, of one head.
double met(const ProblemSpec& s, int64_t rows) {
  double pairs = 0;
  for (int64_t row = 0; row < s.seqlen_q; row += rows) {
    const int64_t last = std::min(row + rows, s.seqlen_q) - 1;
    const int64_t end = s.causal ? std::clamp<int64_t>(last + 1 + s.seqlen_k - s.seqlen_q, 0, s.seqlen_k) : s.seqlen_k;
    pairs += static_cast<double>(parts_of(end, kKeys));
  }
  return pairs;
}

struct Sizes {
  double heads, heads_k, rows, keys, element, q, v;  // q, v: bytes of a row
  explicit Sizes(const ProblemSpec& s)
      : heads(static_cast<double>(s.batch * s.nheads)),
        heads_k(static_cast<double>(s.batch * s.nheads_k)),
        rows(static_cast<double>(s.seqlen_q)),
        keys(static_cast<double>(s.seqlen_k)),
        element(static_cast<double>(size_of(s.dtype))),
        q(static_cast<double>(s.headdim) * element),
        v(static_cast<double>(s.headdim_v) * element) {}
};

double standard(const ProblemSpec& s, bool backward) {
  const Sizes n(s);
  const double matrix = n.heads * n.rows * n.keys * n.element, queries = n.heads * n.rows, keys = n.heads_k * n.keys;
  if (!backward) return 4 * matrix + queries * (n.q + n.v + 4) + keys * (n.q + n.v);
  // q, k and v for the scores and dP, q, k and dout for the gradients, o and dout for their product by rows.
  return 9 * matrix + queries * (3 * n.q + 4 * n.v + 4) + keys * (3 * n.q + 2 * n.v);
}

double v1_forward(const ProblemSpec& s) {
  const Sizes n(s);
  const double pairs = met(s, kRowsV1), tiles = static_cast<double>(parts_of(s.seqlen_q, kRowsV1)), rows = kRowsV1;
  const double kept = 4 * (static_cast<double>(s.headdim_v) + 2);  // of a row: o, m and l
  return n.heads * (n.keys * (n.q + n.v) + pairs * rows * n.q + 2 * std::max(0.0, pairs - tiles) * rows * kept + n.rows * (n.v + 4));
}

double v2_forward(const ProblemSpec& s) {
  const Sizes n(s);
  return n.heads * (n.rows * (n.q + n.v + 4) + met(s, kRowsForward) * static_cast<double>(kKeys) * (n.q + n.v));
}

double flash_backward(const ProblemSpec& s) {
  const Sizes n(s);
  const double dq = 4 * static_cast<double>(s.headdim), pairs = met(s, kRowsBackward) * kRowsBackward;
  const double small = n.rows * (2 * n.v + 4 + dq) + n.rows * (dq + n.q);  // before: rowsum(o dout) and zeros; after: dq in its dtype
  return n.heads * (small + pairs * (n.q + n.v + 2 * dq + 8)) + n.heads_k * n.keys * 2 * (n.q + n.v);
}

// The CPU. How its plans cut a problem: constants of src/plan/plan.cpp, held against it by a test.
constexpr int64_t kTile = 64, kTasksWanted = 64, kDecodeRows = 8, kMostGroup = 4096;

int64_t group_of(const ProblemSpec& s) { return s.nheads / s.nheads_k; }
bool on_amx(const ProblemSpec& s, Isa isa) { return isa == Isa::kAmx && s.dtype == DType::kBF16; }

// Keys that row `row` sees, which is the last of its task.
int64_t keys_seen(const ProblemSpec& s, int64_t row) {
  return s.causal ? std::clamp<int64_t>(row + 1 + s.seqlen_k - s.seqlen_q, 0, s.seqlen_k) : s.seqlen_k;
}

double cpu_forward(const ProblemSpec& s, Isa isa) {
  const Sizes n(s);
  const int64_t tiles = parts_of(s.seqlen_q, kTile), most = on_amx(s, isa) ? 8 : 4;
  const int64_t of_task = std::clamp<int64_t>(s.batch * s.nheads * tiles / kTasksWanted, 1, std::min(most, std::max<int64_t>(tiles, 1))),
                rows = kTile * of_task;
  double keys = 0;
  for (int64_t row = 0; row < s.seqlen_q; row += rows) keys += static_cast<double>(keys_seen(s, std::min(row + rows, s.seqlen_q) - 1));
  return n.heads * (n.rows * (n.q + n.v + 4) + keys * (n.q + n.v));
}

double cpu_decode(const ProblemSpec& s) {
  const Sizes n(s);
  const int64_t wanted = parts_of(s.batch * s.nheads_k * s.seqlen_k, 2 * kTasksWanted);
  const int64_t chunk = std::clamp<int64_t>(parts_of(std::min<int64_t>(wanted, 2048), 64) * 64, 256, 2048);
  const auto chunks = static_cast<double>(std::max<int64_t>(1, parts_of(s.seqlen_k, chunk)));
  const double part = 4 * (static_cast<double>(s.headdim_v) + 2);  // of a row and a chunk: acc, max and sum, in fp32
  return n.heads_k * n.keys * (n.q + n.v) + n.heads * n.rows * (chunks * (n.q + 2 * part) + n.v + 4);
}

double cpu_backward(const ProblemSpec& s, Isa isa) {
  const Sizes n(s);
  const int64_t block = on_amx(s, isa) ? 128 : 96, tile = on_amx(s, isa) ? 128 : kTile, width = std::max(s.headdim, s.headdim_v);
  const int64_t super_block = std::clamp<int64_t>(640 * 1024 / 16 / width / block * block, block, 6 * block);
  double rows = 0;  // that super-blocks meet, in whole tiles
  for (int64_t key = 0; key < s.seqlen_k; key += super_block) {
    const int64_t first = s.causal ? std::clamp<int64_t>(key - (s.seqlen_k - s.seqlen_q), 0, s.seqlen_q) : 0;
    rows += static_cast<double>(s.seqlen_q - first / tile * tile);
  }
  const double sums = 4 * static_cast<double>(s.headdim), before = n.rows * (2 * n.v + sums + 4),
               after = s.dtype == DType::kF32 ? 0 : n.rows * (sums + n.q);
  return n.heads * (before + rows * (n.q + n.v + 8 + 2 * sums) + after) + n.heads_k * n.keys * 2 * (n.q + n.v);
}

// Algorithm v1: blocks of keys and of queries for a cache of kCacheOfV1 numbers.
constexpr int64_t kCacheOfV1 = 64 * 1024;

double cpu_v1(const ProblemSpec& s, bool backward) {
  const Sizes n(s);
  const int64_t width = std::max(s.headdim, s.headdim_v), block_k = parts_of(kCacheOfV1, 4 * width), block_q = std::min(block_k, width);
  double met = 0;  // rows that blocks of keys meet, in whole blocks
  for (int64_t key = 0; key < s.seqlen_k; key += block_k) {
    const int64_t first = s.causal ? std::clamp<int64_t>(key - (s.seqlen_k - s.seqlen_q), 0, s.seqlen_q) : 0;
    met += static_cast<double>(s.seqlen_q - first / block_q * block_q);
  }
  const bool rounds = s.dtype != DType::kF32;
  if (backward) {
    const double sums = 4 * static_cast<double>(s.headdim);
    return n.heads * (n.rows * sums + met * (n.q + 2 * n.v + 4 + 2 * sums) + (rounds ? n.rows * (sums + n.q) : 0)) +
           n.heads_k * n.keys * 2 * (n.q + n.v);
  }
  const double sums = 4 * static_cast<double>(s.headdim_v), statistics = 8;
  return n.heads * (n.rows * (sums + statistics) + n.keys * (n.q + n.v) + met * (n.q + 2 * (sums + statistics)) + n.rows * (statistics + 4) +
                    (rounds ? n.rows * (sums + n.v) : 0));
}

}  // namespace

std::optional<double> moved_bytes(const std::string& algorithm, const ProblemSpec& s, Pass pass) {
  if (s.windowed() || s.has_terms()) return std::nullopt;  // blocks that are skipped and tensors beside q, k and v are not counted
  if (pass == Pass::kForwardBackward) {
    const std::optional<double> forward = moved_bytes(algorithm, s, Pass::kForward), backward = moved_bytes(algorithm, s, Pass::kBackward);
    return forward && backward ? std::optional(*forward + *backward) : std::nullopt;
  }
  if (algorithm == "standard") return standard(s, pass == Pass::kBackward);
  if (algorithm != "v1" && algorithm != "v2" && algorithm != "v3") return std::nullopt;
  if (pass == Pass::kBackward) return flash_backward(s);
  return algorithm == "v1" ? v1_forward(s) : v2_forward(s);
}

std::optional<double> moved_bytes_cpu(const std::string& algorithm, Isa isa, const ProblemSpec& s, Pass pass) {
  if ((algorithm != "v1" && algorithm != "v2") || s.windowed() || s.has_terms()) return std::nullopt;
  if (s.dtype != DType::kF32 && s.dtype != DType::kF16 && s.dtype != DType::kBF16) return std::nullopt;
  if (algorithm == "v1") return (pass != Pass::kBackward ? cpu_v1(s, false) : 0) + (pass != Pass::kForward ? cpu_v1(s, true) : 0);
  const bool decodes = s.seqlen_q <= kDecodeRows && group_of(s) <= kMostGroup;
  const double forward = decodes ? cpu_decode(s) : cpu_forward(s, isa);
  if (pass == Pass::kForward) return forward;
  return cpu_backward(s, isa) + (pass == Pass::kForwardBackward ? forward : 0);
}

}  // namespace fattn::measure
