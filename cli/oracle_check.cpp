// The parts of a problem that the oracle can afford, as views of the real tensors.
#include "cli/oracle_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "fattn/attention.hpp"
#include "testing/check.h"
#include "testing/pages.h"

namespace fattn::cli {
namespace {

using measure::Inputs;
using measure::Outputs;
using measure::ProblemSpec;
using measure::TensorCheck;

struct Range {
  int64_t begin = 0, count = 0;
};

// Part of a (batch, seqlen, heads, headdim) tensor.
Tensor part(const Tensor& t, Range batch, Range rows, Range heads) {
  if (!t.data()) return {};
  const int64_t offset = batch.begin * t.stride(0) + rows.begin * t.stride(1) + heads.begin * t.stride(2);
  return Tensor(static_cast<const char*>(t.data()) + offset * static_cast<int64_t>(size_of(t.dtype())), t.dtype(),
                {batch.count, rows.count, heads.count, t.shape(3)}, {t.stride(0), t.stride(1), t.stride(2), 1});
}
// Of lse (batch, heads, seqlen).
Tensor lse_part(const Tensor& t, Range batch, Range rows, Range heads) {
  if (!t.data()) return {};
  const int64_t offset = batch.begin * t.stride(0) + heads.begin * t.stride(1) + rows.begin * t.stride(2);
  return Tensor(static_cast<const char*>(t.data()) + offset * static_cast<int64_t>(size_of(t.dtype())), t.dtype(),
                {batch.count, heads.count, rows.count}, {t.stride(0), t.stride(1), t.stride(2)});
}

// Of a tensor over (batch or 1, heads or 1, queries or 1, keys).
Tensor pairs_part(const Tensor& t, Range batch, Range heads, Range rows, Range keys) {
  if (!t) return {};
  const Range wanted[4] = {batch, heads, rows, keys};
  int64_t offset = 0, shape[4];
  for (int d = 0; d < 4; ++d) {
    const bool shared = t.shape(d) == 1 && d < 3;
    offset += shared ? 0 : wanted[d].begin * t.stride(d);
    shape[d] = shared ? 1 : wanted[d].count;
  }
  return Tensor(static_cast<const char*>(t.data()) + offset * static_cast<int64_t>(size_of(t.dtype())), t.dtype(),
                {shape[0], shape[1], shape[2], shape[3]}, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)});
}
// Of a vector.
Tensor vector_part(const Tensor& t, Range range) {
  if (!t) return {};
  return Tensor(static_cast<const char*>(t.data()) + range.begin * t.stride(0) * static_cast<int64_t>(size_of(t.dtype())), t.dtype(), {range.count});
}

class OracleCheck {
 public:
  OracleCheck(const ProblemSpec& spec, const Inputs& inputs, const Outputs& outputs, std::vector<TensorCheck>& checks, testing::Rounding rounding)
      : s_(spec),
        q_(q_view(spec, inputs.q.data())),
        k_(k_view(spec, inputs.k.data())),
        v_(v_view(spec, inputs.v.data())),
        dout_(o_view(spec, inputs.dout.data())),
        o_(o_view(spec, outputs.o.data())),
        lse_(lse_view(spec, outputs.lse.data())),
        dq_(q_view(spec, outputs.dq.data())),
        dk_(k_view(spec, outputs.dk.data())),
        dv_(v_view(spec, outputs.dv.data())),
        dbias_(spec.dbias ? pair_view(spec, spec.bias, spec.bias_dtype(), outputs.dbias.data()) : Tensor()),
        scores_(score_views(spec, addresses_of(inputs.scores))),
        checks_(checks),
        rounding_(rounding) {
    spec.apply_to(options_);
  }

  void all_forward() { add(testing::verify(ForwardTensors{q_, k_, v_, o_, present(lse_), {}, scores_}, options_, rounding_), "all"); }
  void all_backward() { backward({0, s_.batch}, {0, s_.nheads_k}, "all"); }

  // Three pieces of `rows` query rows of one group of heads each, of those that are problems of their own.
  void some_forward(int64_t rows) {
    std::string last;
    for (int i = 0; i < 3; ++i) {
      const int64_t batch = (s_.batch - 1) * i / 2, head = (s_.nheads_k - 1) * i / 2, all = s_.rows_of(batch);
      const int64_t count = std::clamp<int64_t>(rows, 1, all), begin = (all - count) * i / 2;
      const std::string where = fmt::format("batch {}, key head {}, rows {} to {}", batch, head, begin, begin + count - 1);
      if (where != last) forward(batch, {begin, count}, head, where);
      last = where;
    }
  }
  void last_group_backward() {
    backward({s_.batch - 1, 1}, {s_.nheads_k - 1, 1}, fmt::format("batch {}, key head {}", s_.batch - 1, s_.nheads_k - 1));
  }

  void finite() {
    const Tensor* const tensors[] = {&o_, &dq_, &dk_, &dv_, &dbias_};
    const char* const names[] = {"o", "dq", "dk", "dv", "dbias"};
    for (int i = 0; i < 5; ++i)
      if (tensors[i]->data() && !measure::all_finite(tensors[i]->data(), tensors[i]->dtype(), tensors[i]->size()))
        checks_.push_back({names[i], std::numeric_limits<double>::infinity(), 0, false, "all: NaN or Inf from finite inputs"});
  }

 private:
  int64_t group() const { return s_.nheads / s_.nheads_k; }
  static Tensor present(const Tensor& t) { return t.data() ? t : Tensor(); }

  void add(const std::vector<testing::TensorVerdict>& verdicts, const std::string& where) {
    for (const testing::TensorVerdict& v : verdicts) checks_.push_back({v.tensor, v.error, v.allowed, v.pass, where, v.rms, v.rms_peer});
  }

  // Rows [begin, begin + count) see no key at or beyond begin + count + seqlen_k - seqlen_q, plus window_right, under a causal mask or in a window
  // that ends; with the keys before that the piece is a problem of its own, whose mask ends at its last row and key. Its rows are aligned with other
  // keys, to the right by what its end was cut by or it lacks of rows: by so much more it looks back. ALiBi would measure other distances then, and
  // dropout counts rows from the first: such pieces are left out.
  void forward(int64_t entry, Range rows, int64_t key_head, const std::string& where) {
    const int64_t seqlen_q = s_.rows_of(entry), seqlen_k = s_.keys_of(entry);
    const int64_t own = rows.begin + rows.count + seqlen_k - seqlen_q;  // behind the key that the last row is aligned with
    const int64_t right = s_.causal ? 0 : s_.window_right;
    const int64_t seen = right >= 0 ? std::clamp<int64_t>(own + right, 0, seqlen_k) : seqlen_k;
    const int64_t further = seen - own;  // 0 or more, unless the piece sees nothing
    if ((s_.alibi && further != 0) || (s_.p_dropout > 0 && rows.begin > 0)) return;
    Options options = options_;
    options.max_seqlen_q = options.max_seqlen_k = 0;
    if (s_.window_left >= 0) options.window_left = std::max<int64_t>(0, s_.window_left + further);
    if (right >= 0 && !s_.causal) options.window_right = std::max<int64_t>(0, right - further);

    const Range one{entry, 1}, heads{key_head * group(), group()}, key_heads{key_head, 1}, keys{0, seen};
    // Packed sequences lie one behind the other.
    const int64_t first = s_.packed() ? s_.rows_before(entry) : 0;
    const Range batch = s_.packed() ? Range{0, 1} : one, q_rows{first + rows.begin, rows.count}, k_rows{first, seen};
    int64_t state[2] = {};
    ScoreTensors scores;
    scores.alibi_slopes = vector_part(scores_.alibi_slopes, heads);
    scores.bias = pairs_part(scores_.bias, one, heads, rows, keys);
    scores.mask = pairs_part(scores_.mask, one, heads, rows, keys);
    if (scores_.dropout_state) {  // each head of each batch entry has an offset of its own
      const auto* whole = static_cast<const int64_t*>(scores_.dropout_state.data());
      state[0] = whole[0];
      state[1] = whole[1] + entry * s_.nheads + heads.begin;
      scores.dropout_state = Tensor(state, DType::kI64, {2});
    }
    if (scores_.document_q) {
      const auto* ids = static_cast<const int32_t*>(scores_.document_q.data()) + entry * s_.seqlen_q;
      scores.document_q = Tensor(ids + rows.begin, DType::kI32, {1, rows.count});
      scores.document_k = Tensor(ids, DType::kI32, {1, seen});
    }
    std::optional<testing::Unpaged> keys_of_entry;
    if (scores_.block_table) keys_of_entry.emplace(k_, v_, pages_of(entry));
    const Tensor k = keys_of_entry ? part(keys_of_entry->k(), {0, 1}, k_rows, key_heads) : part(batched(k_), batch, k_rows, key_heads);
    const Tensor v = keys_of_entry ? part(keys_of_entry->v(), {0, 1}, k_rows, key_heads) : part(batched(v_), batch, k_rows, key_heads);
    add(testing::verify(ForwardTensors{part(batched(q_), batch, q_rows, heads),
                                       k,
                                       v,
                                       part(batched(o_), batch, q_rows, heads),
                                       lse_part(batched_lse(lse_), batch, q_rows, heads),
                                       {},
                                       scores},
                        options, rounding_),
        where);
  }

  // The block table of one batch entry.
  ScoreTensors pages_of(int64_t entry) const {
    const Tensor& table = scores_.block_table;
    ScoreTensors scores;
    scores.block_table = Tensor(static_cast<const int32_t*>(table.data()) + entry * table.stride(0), DType::kI32, {1, table.shape(1)});
    return scores;
  }

  // A packed tensor as one batch entry.
  static Tensor batched(const Tensor& t) { return t.ndim() == 4 ? t : Tensor(t.data(), t.dtype(), {1, t.shape(0), t.shape(1), t.shape(2)}); }
  static Tensor batched_lse(const Tensor& t) { return t.ndim() == 3 ? t : Tensor(t.data(), t.dtype(), {1, t.shape(0), t.shape(1)}); }

  // Of problems with terms all batch entries and heads.
  void backward(Range batch, Range key_heads, const std::string& where) {
    if (s_.has_terms()) {
      add(testing::verify(BackwardTensors{q_, k_, v_, o_, lse_, dout_, dq_, dk_, dv_, scores_, dbias_}, options_, rounding_), where);
      return;
    }
    const Range heads{key_heads.begin * group(), key_heads.count * group()}, rows{0, s_.seqlen_q}, keys{0, s_.seqlen_k};
    const Tensor q = part(q_, batch, rows, heads), k = part(k_, batch, keys, key_heads), v = part(v_, batch, keys, key_heads);
    Tensor o = part(o_, batch, rows, heads), lse = lse_part(lse_, batch, rows, heads);
    measure::Pages own_o, own_lse;
    if (!lse) {  // a provider keeps its log-sum-exp to itself: the oracle's stands in for it
      ProblemSpec piece = s_;
      piece.batch = batch.count;
      piece.nheads = heads.count;
      own_o = measure::Pages(static_cast<size_t>(piece.o_bytes()));
      own_lse = measure::Pages(static_cast<size_t>(piece.lse_bytes()));
      o = o_view(piece, own_o.data());
      lse = lse_view(piece, own_lse.data());
      Options reference = options_;
      reference.backend = Backend::kReference;
      fattn::forward(ForwardTensors{q, k, v, o, lse, {}}, reference);
    }
    add(testing::verify(BackwardTensors{q, k, v, o, lse, part(dout_, batch, rows, heads), part(dq_, batch, rows, heads),
                                        part(dk_, batch, keys, key_heads), part(dv_, batch, keys, key_heads)},
                        options_, rounding_),
        where);
  }

  const ProblemSpec& s_;
  const Tensor q_, k_, v_, dout_, o_, lse_, dq_, dk_, dv_, dbias_;
  const ScoreTensors scores_;
  Options options_;
  std::vector<TensorCheck>& checks_;
  const testing::Rounding rounding_;  // what it is held against
};

// One group of heads, of problems with terms two, of two batch entries, with both lengths shortened alike until the oracle can afford its backward
// pass.
ProblemSpec smaller(const ProblemSpec& spec, double flops_of_group, double oracle_flops) {
  ProblemSpec s = spec;
  const int64_t most = spec.has_terms() ? 2 : 1;
  s.batch = std::min(spec.batch, most);
  s.nheads_k = std::min(spec.nheads_k, most);
  s.nheads = spec.nheads / spec.nheads_k * s.nheads_k;
  const double shorter = std::min(1.0, std::sqrt(oracle_flops / (flops_of_group * static_cast<double>(s.batch * s.nheads_k))));
  const auto shorten = [&](int64_t length) { return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(length) * shorter)); };
  s.seqlen_q = shorten(spec.seqlen_q);
  s.seqlen_k = shorten(spec.seqlen_k);
  if (spec.page_size > 0) s.seqlen_k = std::max<int64_t>(1, s.seqlen_k / spec.page_size) * spec.page_size;
  if (spec.least_seqused_k > 0) s.least_seqused_k = std::min(shorten(spec.least_seqused_k), s.seqlen_k);
  if (spec.packed()) s.least_packed = shorten(spec.least_packed);
  s.documents = std::min(spec.documents, s.seqlen_q);
  return s;
}

// Once the contestant has plans.
testing::Rounding rounding_of(const measure::Identity& who) {
  if (who.provider != "fattn" || who.algorithm == name_of(Algorithm::kStandard)) return testing::Rounding::kTextbook;
  const bool of_rounded = who.kernel_backward.starts_with("cuda v1") || who.kernel_backward.starts_with("cuda v2");
  return of_rounded ? testing::Rounding::kOfRoundedWeights : testing::Rounding::kFused;
}

}  // namespace

std::vector<TensorCheck> check_against_oracle(measure::Contestant& contestant, const ProblemSpec& spec, const Inputs& inputs, bool grad,
                                              int64_t memory_limit, double oracle_flops, const Outputs*& outputs) {
  std::vector<TensorCheck> checks;
  const double pair = 2.0 * static_cast<double>(spec.headdim + spec.headdim_v),
               pairs = static_cast<double>(spec.seqlen_q) * static_cast<double>(spec.seqlen_k);
  const double group = pair * pairs * static_cast<double>(spec.nheads) / static_cast<double>(spec.nheads_k);
  const double all = group * static_cast<double>(spec.batch) * static_cast<double>(spec.nheads_k);
  // The oracle's backward costs as much as 2.5 forward passes, which the budget counts as one. Terms go all the way through it or not at all.
  const bool elsewhere = spec.has_terms() ? all > oracle_flops : grad && group > oracle_flops;
  if (elsewhere) {
    const ProblemSpec little = smaller(spec, group, oracle_flops);
    const Inputs little_inputs = measure::make_inputs(little, grad);
    contestant.prepare(little, little_inputs, grad, memory_limit);
    const size_t before = checks.size();
    OracleCheck check(little, little_inputs, contestant.compute(), checks, rounding_of(contestant.identity()));
    if (spec.has_terms()) check.all_forward();
    if (grad) check.all_backward();
    for (size_t i = before; i < checks.size(); ++i) checks[i].where = "smaller problem " + describe(little);
    contestant.release();
  }
  contestant.prepare(spec, inputs, grad, memory_limit);
  outputs = &contestant.compute();
  OracleCheck check(spec, inputs, *outputs, checks, rounding_of(contestant.identity()));
  check.finite();
  if (all <= oracle_flops) {
    check.all_forward();
    if (grad) check.all_backward();
  } else {
    check.some_forward(static_cast<int64_t>(oracle_flops / 3 / (group / static_cast<double>(spec.seqlen_q))));
    if (grad && !elsewhere) check.last_group_backward();
  }
  return checks;
}

}  // namespace fattn::cli
