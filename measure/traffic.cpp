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

}  // namespace fattn::measure
