// The models: sums over tiles and tasks, in closed form where they are equal, and the line of arithmetic of each.
#include "measure/traffic.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace fattn::measure {
namespace {

constexpr int64_t kRowsV1 = 16, kKeysV1 = 128;                // of a tile
constexpr int64_t kProductRows = 256, kProductColumns = 128;  // of a tile of cuBLASLt's

int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }

constexpr int64_t kMostBlocks = int64_t{1} << 20;

// The sum of of(first) over blocks of `step` of `n` rows. Of more than kMostBlocks, runs of them count by the mean of their ends, which is exact
// where `of` grows evenly: off by less than a millionth of the largest times the number of blocks, and no length takes longer than a moment.
template <class Of>
double over_blocks(int64_t n, int64_t step, const Of& of) {
  const int64_t blocks = parts_of(n, step), run = std::max<int64_t>(1, parts_of(blocks, kMostBlocks));
  double sum = 0;
  for (int64_t block = 0; block < blocks; block += run) {
    const int64_t end = std::min(block + run, blocks);
    sum += static_cast<double>(end - block) * (of(block * step) + of((end - 1) * step)) / 2;
  }
  return sum;
}

// Pairs of a tile of `rows` queries and a block of `keys` keys with a pair of query and key that is visible, of one head.
double met(const ProblemSpec& s, int64_t rows, int64_t keys) {
  return over_blocks(s.seqlen_q, rows, [&](int64_t row) {
    const int64_t last = std::min(row + rows, s.seqlen_q) - 1;
    const int64_t end = s.causal ? std::clamp<int64_t>(last + 1 + s.seqlen_k - s.seqlen_q, 0, s.seqlen_k) : s.seqlen_k;
    return static_cast<double>(parts_of(end, keys));
  });
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

using Terms = std::vector<MovedTerm>;

std::string n_of(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f", value);
  return text;
}

// "8 heads * 1024 * 256 bytes" and what it comes to.
struct Product {
  std::string text;
  double value = 1;
};
Product of(const char* what, double count) { return {n_of(count) + " " + what, count}; }
Product operator*(Product a, double factor) {
  a.text += " * " + n_of(factor);
  a.value *= factor;
  return a;
}
// The last factor.
MovedTerm term(std::string what, const Product& count, double bytes, double once, double reused_of_head = 0, bool all_heads = false) {
  return {std::move(what), count.text + " * " + n_of(bytes) + " bytes", count.value * bytes, once, reused_of_head, all_heads};
}

Product heads(const Sizes& n) { return of("heads", n.heads); }
Product key_heads(const Sizes& n) { return of("key heads", n.heads_k); }

Terms standard(const ProblemSpec& s, bool backward) {
  const Sizes n(s);
  const double matrix = n.rows * n.keys * n.element, queries = n.heads * n.rows, keys = n.heads_k * n.keys;
  const Product all_pairs = heads(n) * n.rows * n.keys;
  // Bytes that products read of q and k (dout and v) for tiles of scores, and of a factor of width headdim for tiles of an output, after the first
  // time.
  const double tiles_q = static_cast<double>(parts_of(s.seqlen_q, kProductRows)),
               tiles_k = static_cast<double>(parts_of(s.seqlen_k, kProductColumns));
  const auto scores_of = [&](const char* what, double width) {
    return term(std::string(what) + " read again by tiles of 256 x 128 scores", heads(n) * ((tiles_k - 1) * n.rows + (tiles_q - 1) * n.keys), width,
                0, n.rows * width);
  };
  const auto factor_of = [&](const char* what, double tiles, double rows, double width) {
    return term(std::string(what) + " read again by every tile of 256 rows", heads(n) * (tiles - 1) * rows, width, 0, rows * width);
  };
  if (!backward)
    return {term("q read, o and lse written", heads(n) * n.rows, n.q + n.v + 4, queries * (n.q + n.v + 4)),
            term("k and v read", key_heads(n) * n.keys, n.q + n.v, keys * (n.q + n.v)), scores_of("q and k", n.q),
            factor_of("v", tiles_q, n.keys, n.v), term("scores and weights written, and each read again", all_pairs * 4, n.element, 0, matrix, true)};
  // q, k and v for the scores and dP, q, k and dout for the gradients, o and dout for their product by rows.
  const double tiles_of_keys = static_cast<double>(parts_of(s.seqlen_k, kProductRows));
  return {term("q read twice, dout three times, o and lse once, dq written", heads(n) * n.rows, 3 * n.q + 4 * n.v + 4,
               queries * (2 * n.q + 2 * n.v + 4), n.rows * (n.q + n.v), true),
          term("k read twice, v once, dk and dv written", key_heads(n) * n.keys, 3 * n.q + 2 * n.v, keys * (2 * n.q + 2 * n.v), n.keys * n.q, true),
          scores_of("q and k", n.q),
          scores_of("dout and v", n.v),
          factor_of("k", tiles_q, n.keys, n.q),
          factor_of("q", tiles_of_keys, n.rows, n.q),
          factor_of("dout", tiles_of_keys, n.rows, n.v),
          term("scores, weights, dP and dS written and read, nine times in all", all_pairs * 9, n.element, 0, matrix, true)};
}

Terms v1_forward(const ProblemSpec& s) {
  const Sizes n(s);
  const double pairs = met(s, kRowsV1, kKeysV1), tiles = static_cast<double>(parts_of(s.seqlen_q, kRowsV1)), rows = kRowsV1;
  const double kept = 4 * (static_cast<double>(s.headdim_v) + 2);  // of a row: o, m and l
  const double reused = n.rows * (n.q + kept);
  return {term("k and v read", heads(n) * n.keys, n.q + n.v, n.heads_k * n.keys * (n.q + n.v), n.keys * (n.q + n.v)),
          term("q read for every block of keys", heads(n) * pairs * rows, n.q, n.heads * n.rows * n.q, reused),
          term("o, m and l in fp32 written and read between blocks of keys", heads(n) * (2 * std::max(0.0, pairs - tiles)) * rows, kept, 0, reused),
          term("o and lse written", heads(n) * n.rows, n.v + 4, n.heads * n.rows * (n.v + 4))};
}

Terms v2_forward(const ProblemSpec& s, const CudaTiles& tiles) {
  const Sizes n(s);
  return {term("q read, o and lse written", heads(n) * n.rows, n.q + n.v + 4, n.heads * n.rows * (n.q + n.v + 4)),
          term("k and v read by every tile of " + std::to_string(tiles.forward_rows) + " queries that sees them",
               heads(n) * met(s, tiles.forward_rows, tiles.forward_keys) * static_cast<double>(tiles.forward_keys), n.q + n.v,
               n.heads_k * n.keys * (n.q + n.v), n.keys * (n.q + n.v))};
}

// `adds`: dq is added to in L2, which is written to and not read.
Terms flash_backward(const ProblemSpec& s, const CudaTiles& tiles, bool adds) {
  const Sizes n(s);
  const double sum = 4 * static_cast<double>(s.headdim), rows = static_cast<double>(tiles.backward_rows), queries = n.heads * n.rows;
  // Rows that blocks of keys meet, of a head: those that the first meets, and the rest.
  const double met_rows = met(s, tiles.backward_rows, tiles.backward_keys) * rows, first = std::min(met_rows, n.rows);
  const double reused = n.rows * (n.q + n.v + 8 + sum), before = n.rows * (2 * n.v + 4 + sum);
  const std::string block = std::to_string(tiles.backward_keys) + " keys";
  const auto dq = [&](const std::string& what, double count, double reuse, bool all_heads) {
    MovedTerm t = term(what, heads(n) * count, adds ? sum : 2 * sum, 0, reuse, all_heads);
    t.dram_of_missed = adds ? 2 : 1;
    return t;
  };
  const std::string added = adds ? "added to by " : "read and written by ";
  return {term("before: o and dout read", heads(n) * n.rows, 2 * n.v, queries * 2 * n.v),
          term("before: rowsum(o dout) and zeros for dq written", heads(n) * n.rows, 4 + sum, 0, n.rows * (4 + sum), true),
          term("k and v read, dk and dv written", key_heads(n) * n.keys, 2 * (n.q + n.v), n.heads_k * n.keys * 2 * (n.q + n.v)),
          term("q and lse read for every block of " + block, heads(n) * met_rows, n.q + 4, queries * (n.q + 4), reused),
          term("dout and rowsum read for the first block of " + block, heads(n) * first, n.v + 4, 0, before, true),
          term("dout and rowsum read for every other block", heads(n) * (met_rows - first), n.v + 4, 0, reused),
          dq("dq in fp32 " + added + "the first block of " + block, first, before, true),
          dq("dq in fp32 " + added + "every other block", met_rows - first, reused, false),
          term("after: dq in fp32 read, written in its dtype", heads(n) * n.rows, sum + n.q, queries * n.q, n.rows * (sum + n.q), true)};
}

// The CPU. How its plans cut a problem: constants of src/plan/plan.cpp, held against it by a test.
constexpr int64_t kTile = 64, kTasksWanted = 64, kDecodeRows = 8, kMostGroup = 4096;

int64_t group_of(const ProblemSpec& s) { return s.nheads / s.nheads_k; }
bool on_amx(const ProblemSpec& s, Isa isa) { return isa == Isa::kAmx && s.dtype == DType::kBF16; }

// Keys that row `row` sees, which is the last of its task.
int64_t keys_seen(const ProblemSpec& s, int64_t row) {
  return s.causal ? std::clamp<int64_t>(row + 1 + s.seqlen_k - s.seqlen_q, 0, s.seqlen_k) : s.seqlen_k;
}

// Rows that blocks of `keys` keys meet, in whole blocks of `rows`.
double rows_met(const ProblemSpec& s, int64_t keys, int64_t rows) {
  return over_blocks(s.seqlen_k, keys, [&](int64_t key) {
    const int64_t first = s.causal ? std::clamp<int64_t>(key - (s.seqlen_k - s.seqlen_q), 0, s.seqlen_q) : 0;
    return static_cast<double>(s.seqlen_q - first / rows * rows);
  });
}

Terms cpu_forward(const ProblemSpec& s, Isa isa) {
  const Sizes n(s);
  const int64_t tiles = parts_of(s.seqlen_q, kTile), most = on_amx(s, isa) ? 8 : 4;
  const int64_t of_task = std::clamp<int64_t>(s.batch * s.nheads * tiles / kTasksWanted, 1, std::min(most, std::max<int64_t>(tiles, 1))),
                rows = kTile * of_task;
  const double keys =
      over_blocks(s.seqlen_q, rows, [&](int64_t row) { return static_cast<double>(keys_seen(s, std::min(row + rows, s.seqlen_q) - 1)); });
  return {term("q read, o and lse written", heads(n) * n.rows, n.q + n.v + 4, n.heads * n.rows * (n.q + n.v + 4)),
          term("k and v read by every task of " + std::to_string(rows) + " queries that sees them", heads(n) * keys, n.q + n.v,
               n.heads_k * n.keys * (n.q + n.v), n.keys * (n.q + n.v))};
}

Terms cpu_decode(const ProblemSpec& s) {
  const Sizes n(s);
  const int64_t wanted = parts_of(s.batch * s.nheads_k * s.seqlen_k, 2 * kTasksWanted);
  const int64_t chunk = std::clamp<int64_t>(parts_of(std::min<int64_t>(wanted, 2048), 64) * 64, 256, 2048);
  const auto chunks = static_cast<double>(std::max<int64_t>(1, parts_of(s.seqlen_k, chunk)));
  const double part = 4 * (static_cast<double>(s.headdim_v) + 2);  // of a row and a chunk: acc, max and sum, in fp32
  return {term("k and v read, once for all heads that share them", key_heads(n) * n.keys, n.q + n.v, n.heads_k * n.keys * (n.q + n.v)),
          term("q read for every chunk of " + std::to_string(chunk) + " keys", heads(n) * n.rows * chunks, n.q, n.heads * n.rows * n.q, n.rows * n.q),
          term("partial results in fp32 written and read", heads(n) * n.rows * chunks * 2, part, 0, n.rows * chunks * part),
          term("o and lse written", heads(n) * n.rows, n.v + 4, n.heads * n.rows * (n.v + 4))};
}

Terms cpu_backward(const ProblemSpec& s, Isa isa) {
  const Sizes n(s);
  const int64_t block = on_amx(s, isa) ? 128 : 96, tile = on_amx(s, isa) ? 128 : kTile, width = std::max(s.headdim, s.headdim_v);
  const int64_t super_block = std::clamp<int64_t>(640 * 1024 / 16 / width / block * block, block, 6 * block);
  const double rows = rows_met(s, super_block, tile);
  const double sums = 4 * static_cast<double>(s.headdim), queries = n.heads * n.rows, reused = n.rows * (n.q + n.v + 8 + sums);
  const bool in_place = s.dtype == DType::kF32;  // dq itself is the sum
  const std::string of_keys = " for every super-block of " + std::to_string(super_block) + " keys";
  Terms terms = {
      term("before: o and dout read", heads(n) * n.rows, 2 * n.v, queries * 2 * n.v),
      term("before: rowsum(o dout) and zeros for dq written", heads(n) * n.rows, 4 + sums, in_place ? queries * sums : 0, n.rows * (4 + sums), true),
      term("k and v read, dk and dv written", key_heads(n) * n.keys, 2 * (n.q + n.v), n.heads_k * n.keys * 2 * (n.q + n.v)),
      term("q, dout, lse and rowsum read" + of_keys, heads(n) * rows, n.q + n.v + 8, queries * (n.q + 4), reused),
      term("dq in fp32 read and written" + of_keys, heads(n) * rows, 2 * sums, 0, reused)};
  if (!in_place)
    terms.push_back(term("after: dq in fp32 read, written in its dtype", heads(n) * n.rows, sums + n.q, queries * n.q, n.rows * (sums + n.q), true));
  return terms;
}

std::optional<double> sum_of(const std::optional<Terms>& terms) {
  if (!terms) return std::nullopt;
  double bytes = 0;
  for (const MovedTerm& t : *terms) bytes += t.bytes;
  return bytes;
}

Terms joined(Terms a, const Terms& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Algorithm v1: blocks of keys and of queries for a cache of kCacheOfV1 numbers.
constexpr int64_t kCacheOfV1 = 64 * 1024;

Terms cpu_v1(const ProblemSpec& s, bool backward) {
  const Sizes n(s);
  const int64_t width = std::max(s.headdim, s.headdim_v), block_k = parts_of(kCacheOfV1, 4 * width), block_q = std::min(block_k, width);
  const double met = rows_met(s, block_k, block_q);
  const bool rounds = s.dtype != DType::kF32;  // else sums are in the output itself
  const double queries = n.heads * n.rows, sums = 4 * static_cast<double>(backward ? s.headdim : s.headdim_v), statistics = 8;
  const std::string of_keys = " for every block of " + std::to_string(block_k) + " keys";
  if (backward) {
    const double reused = n.rows * (n.q + 2 * n.v + 4 + sums);
    Terms terms = {term("before: zeros for dq written", heads(n) * n.rows, sums, rounds ? 0 : queries * n.q, n.rows * sums),
                   term("k and v read, dk and dv written", key_heads(n) * n.keys, 2 * (n.q + n.v), n.heads_k * n.keys * 2 * (n.q + n.v)),
                   term("q, o, dout and lse read" + of_keys, heads(n) * met, n.q + 2 * n.v + 4, queries * (n.q + 2 * n.v + 4), reused),
                   term("dq in fp32 read and written" + of_keys, heads(n) * met, 2 * sums, 0, reused)};
    if (rounds) terms.push_back(term("after: dq in fp32 read, written in its dtype", heads(n) * n.rows, sums + n.q, queries * n.q, n.rows * sums));
    return terms;
  }
  const double reused = n.rows * (n.q + sums + statistics);
  Terms terms = {term("before: o, m and l set", heads(n) * n.rows, sums + statistics, rounds ? 0 : queries * n.v, n.rows * (sums + statistics)),
                 term("k and v read", heads(n) * n.keys, n.q + n.v, n.heads_k * n.keys * (n.q + n.v), n.keys * (n.q + n.v)),
                 term("q read" + of_keys, heads(n) * met, n.q, queries * n.q, reused),
                 term("o, m and l in fp32 read and written" + of_keys, heads(n) * met, 2 * (sums + statistics), 0, reused),
                 term("after: m and l read, lse written", heads(n) * n.rows, statistics + 4, queries * 4, n.rows * statistics)};
  if (rounds) terms.push_back(term("after: o in fp32 read, written in its dtype", heads(n) * n.rows, sums + n.v, queries * n.v, n.rows * sums));
  return terms;
}

}  // namespace

std::optional<std::vector<MovedTerm>> moved_terms(const std::string& algorithm, const ProblemSpec& s, Pass pass, const CudaTiles& tiles) {
  if (s.windowed() || s.has_terms()) return std::nullopt;  // blocks that are skipped and tensors beside q, k and v are not counted
  if (algorithm != "standard" && algorithm != "v1" && algorithm != "v2" && algorithm != "v3") return std::nullopt;
  const bool is_standard = algorithm == "standard";
  Terms terms;
  if (pass != Pass::kBackward) terms = is_standard ? standard(s, false) : algorithm == "v1" ? v1_forward(s) : v2_forward(s, tiles);
  if (pass != Pass::kForward) terms = joined(std::move(terms), is_standard ? standard(s, true) : flash_backward(s, tiles, algorithm != "v1"));
  return terms;
}

std::optional<std::vector<MovedTerm>> moved_terms_cpu(const std::string& algorithm, Isa isa, const ProblemSpec& s, Pass pass) {
  if ((algorithm != "v1" && algorithm != "v2") || s.windowed() || s.has_terms()) return std::nullopt;
  if (s.dtype != DType::kF32 && s.dtype != DType::kF16 && s.dtype != DType::kBF16) return std::nullopt;
  const bool v1 = algorithm == "v1", decodes = !v1 && s.seqlen_q <= kDecodeRows && group_of(s) <= kMostGroup;
  Terms terms;
  if (pass != Pass::kBackward) terms = v1 ? cpu_v1(s, false) : decodes ? cpu_decode(s) : cpu_forward(s, isa);
  if (pass != Pass::kForward) terms = joined(std::move(terms), v1 ? cpu_v1(s, true) : cpu_backward(s, isa));
  return terms;
}

std::optional<double> moved_bytes(const std::string& algorithm, const ProblemSpec& spec, Pass pass, const CudaTiles& tiles) {
  return sum_of(moved_terms(algorithm, spec, pass, tiles));
}

std::optional<double> moved_bytes_cpu(const std::string& algorithm, Isa isa, const ProblemSpec& spec, Pass pass) {
  return sum_of(moved_terms_cpu(algorithm, isa, spec, pass));
}

}  // namespace fattn::measure
