#include "lab/memory/papers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace fattn::lab {
namespace {

using measure::MovedTerm;
using measure::ProblemSpec;

constexpr double kBlockV2 = 128;  // rows of a block in FlashAttention-2: 64 or 128

struct Numbers {
  double heads, heads_k, rows, keys, q, v, element;  // q, v: bytes of a row
  explicit Numbers(const ProblemSpec& s)
      : heads(static_cast<double>(s.batch * s.nheads)),
        heads_k(static_cast<double>(s.batch * s.nheads_k)),
        rows(static_cast<double>(s.seqlen_q)),
        keys(static_cast<double>(s.seqlen_k)),
        q(static_cast<double>(s.headdim) * static_cast<double>(size_of(s.dtype))),
        v(static_cast<double>(s.headdim_v) * static_cast<double>(size_of(s.dtype))),
        element(static_cast<double>(size_of(s.dtype))) {}
};

// times * heads * rows * bytes.
MovedTerm term(std::string what, double heads, double rows, double bytes, double times, double once_bytes, double reused_of_head = 0,
               bool all_heads = false) {
  MovedTerm t;
  t.what = std::move(what);
  t.arithmetic = times == 1 ? fmt::format("{:.0f} heads * {:.0f} * {:.0f} bytes", heads, rows, bytes)
                            : fmt::format("{:.0f} heads * {:.0f} times * {:.0f} * {:.0f} bytes", heads, times, rows, bytes);
  t.bytes = heads * rows * bytes * times;
  t.once = heads * rows * once_bytes;
  t.reused_of_head = reused_of_head;
  t.all_heads = all_heads;
  return t;
}

std::vector<MovedTerm> standard(const Numbers& n, bool backward) {
  const double matrix = n.rows * n.keys * n.element;
  const auto matrices = [&](const char* what, double times) { return term(what, n.heads, n.rows * n.keys, n.element, times, 0, matrix, true); };
  if (!backward)
    return {term("q read, o written", n.heads, n.rows, n.q + n.v, 1, n.q + n.v), term("k and v read", n.heads_k, n.keys, n.q + n.v, 1, n.q + n.v),
            matrices("S and P written, and each read again", 4)};
  return {term("q read, dout read twice, dq written", n.heads, n.rows, 2 * n.q + 2 * n.v, 1, 2 * n.q + n.v, n.rows * n.v, true),
          term("k and v read, dk and dv written", n.heads_k, n.keys, 2 * (n.q + n.v), 1, 2 * (n.q + n.v)),
          matrices("P read twice, dP written and read, dS written and read twice", 7)};
}

std::vector<MovedTerm> v1(const Numbers& n, const ProblemSpec& s, bool backward, double chip_bytes) {
  const double width = static_cast<double>(std::max(s.headdim, s.headdim_v));
  const double block = std::clamp(std::ceil(chip_bytes / n.element / (4 * width)), 1.0, std::max(1.0, n.keys));
  const double blocks = std::ceil(n.keys / block), kept = 2 * n.element;  // l and m
  const std::string each = fmt::format(" for each block of M / 4d = {:.0f} keys", block);
  const double of_row = backward ? 3 * n.q + 2 * n.v + kept : n.q + 2 * n.v + 2 * kept;
  const double once = backward ? 2 * n.q + 2 * n.v + kept : n.q + n.v + kept;
  return {backward ? term("k and v read, dk and dv written", n.heads_k, n.keys, 2 * (n.q + n.v), 1, 2 * (n.q + n.v))
                   : term("k and v read", n.heads_k, n.keys, n.q + n.v, 1, n.q + n.v),
          term((backward ? "q, o, dout, l and m read, dq read and written" : "q read, o, l and m read and written") + each, n.heads, n.rows, of_row,
               blocks, once, n.rows * (backward ? 2 * n.q + 2 * n.v + kept : n.q + n.v + kept))};
}

std::vector<MovedTerm> v2(const Numbers& n, bool backward) {
  if (!backward) {
    const double tiles = std::ceil(n.rows / kBlockV2);
    MovedTerm keys =
        term(fmt::format("k and v read for each block of {:.0f} queries", kBlockV2), n.heads, n.keys, n.q + n.v, tiles, 0, n.keys * (n.q + n.v));
    keys.once = n.heads_k * n.keys * (n.q + n.v);
    return {term("q read, o and lse written", n.heads, n.rows, n.q + n.v + 4, 1, n.q + n.v + 4), keys};
  }
  const double blocks = std::ceil(n.keys / kBlockV2);
  return {term("o and dout read, their product by rows written", n.heads, n.rows, 2 * n.v + 4, 1, 2 * n.v, n.rows * 4, true),
          term("k and v read, dk and dv written", n.heads_k, n.keys, 2 * (n.q + n.v), 1, 2 * (n.q + n.v)),
          term(fmt::format("q, dout, lse and the product read, dq read and written for each block of {:.0f} keys", kBlockV2), n.heads, n.rows,
               3 * n.q + n.v + 8, blocks, 2 * n.q + 4, n.rows * (2 * n.q + n.v + 8))};
}

}  // namespace

std::vector<MovedTerm> papers_terms(const std::string& algorithm, const ProblemSpec& spec, measure::Pass pass, double chip_bytes) {
  const Numbers n(spec);
  const bool backward = pass == measure::Pass::kBackward;
  if (algorithm == "standard") return standard(n, backward);
  if (algorithm == "v1") return v1(n, spec, backward, chip_bytes);
  if (algorithm == "v2" || algorithm == "v3") return v2(n, backward);
  return {};
}

}  // namespace fattn::lab
