// The parts of a problem that the oracle can afford, as views of the real tensors.
#include "cli/oracle_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "fattn/attention.hpp"
#include "testing/check.h"

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

class OracleCheck {
 public:
  OracleCheck(const ProblemSpec& spec, const Inputs& inputs, const Outputs& outputs, std::vector<TensorCheck>& checks)
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
        checks_(checks) {
    spec.apply_to(options_);
  }

  void all_forward() { forward({0, s_.batch}, {0, s_.seqlen_q}, {0, s_.nheads_k}, "all"); }
  void all_backward() { backward({0, s_.batch}, {0, s_.nheads_k}, "all"); }

  // Three pieces of `rows` query rows of one group of heads each.
  void some_forward(int64_t rows) {
    rows = std::clamp<int64_t>(rows, 1, s_.seqlen_q);
    const Range pieces[3] = {{0, rows}, {(s_.seqlen_q - rows) / 2, rows}, {s_.seqlen_q - rows, rows}};
    for (int i = 0; i < 3; ++i) {
      const int64_t batch = (s_.batch - 1) * i / 2, head = (s_.nheads_k - 1) * i / 2;
      forward({batch, 1}, pieces[i], {head, 1},
              fmt::format("batch {}, key head {}, rows {} to {}", batch, head, pieces[i].begin, pieces[i].begin + rows - 1));
    }
  }
  void last_group_backward() {
    backward({s_.batch - 1, 1}, {s_.nheads_k - 1, 1}, fmt::format("batch {}, key head {}", s_.batch - 1, s_.nheads_k - 1));
  }

  void finite() {
    const Tensor* const tensors[] = {&o_, &dq_, &dk_, &dv_};
    const char* const names[] = {"o", "dq", "dk", "dv"};
    for (int i = 0; i < 4; ++i)
      if (tensors[i]->data() && !measure::all_finite(tensors[i]->data(), s_.dtype, tensors[i]->size()))
        checks_.push_back({names[i], std::numeric_limits<double>::infinity(), 0, false, "all: NaN or Inf from finite inputs"});
  }

 private:
  int64_t group() const { return s_.nheads / s_.nheads_k; }

  void add(const std::vector<testing::TensorVerdict>& verdicts, const std::string& where) {
    for (const testing::TensorVerdict& v : verdicts) checks_.push_back({v.tensor, v.error, v.allowed, v.pass, where});
  }

  // Rows [begin, begin + count) see no key at or beyond begin + count + seqlen_k - seqlen_q, plus window_right, under a causal mask or in a window
  // that ends; with the keys before that the piece is a problem of its own, whose mask ends at its last row and key. Its rows are aligned with other
  // keys, to the right by what its end was cut by or it lacks of rows: by so much more it looks back.
  void forward(Range batch, Range rows, Range key_heads, const std::string& where) {
    const int64_t own = rows.begin + rows.count + s_.seqlen_k - s_.seqlen_q;  // behind the key that the last row is aligned with
    const int64_t right = s_.causal ? 0 : s_.window_right;
    const int64_t seen = right >= 0 ? std::clamp<int64_t>(own + right, 0, s_.seqlen_k) : s_.seqlen_k;
    Options options = options_;
    const int64_t further = seen - own;  // 0 or more, unless the piece sees nothing
    if (s_.window_left >= 0) options.window_left = std::max<int64_t>(0, s_.window_left + further);
    if (right >= 0 && !s_.causal) options.window_right = std::max<int64_t>(0, right - further);
    const Range heads{key_heads.begin * group(), key_heads.count * group()}, keys{0, seen};
    add(testing::verify(ForwardTensors{part(q_, batch, rows, heads),
                                       part(k_, batch, keys, key_heads),
                                       part(v_, batch, keys, key_heads),
                                       part(o_, batch, rows, heads),
                                       lse_part(lse_, batch, rows, heads),
                                       {}},
                        options),
        where);
  }

  void backward(Range batch, Range key_heads, const std::string& where) {
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
                        options_),
        where);
  }

  const ProblemSpec& s_;
  const Tensor q_, k_, v_, dout_, o_, lse_, dq_, dk_, dv_;
  Options options_;
  std::vector<TensorCheck>& checks_;
};

// One group of heads with both lengths shortened alike until the oracle can afford its backward pass.
ProblemSpec smaller(const ProblemSpec& spec, double flops_of_group, double oracle_flops) {
  ProblemSpec s = spec;
  const double shorter = std::sqrt(oracle_flops / flops_of_group);
  s.batch = 1;
  s.nheads = spec.nheads / spec.nheads_k;
  s.nheads_k = 1;
  s.seqlen_q = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(spec.seqlen_q) * shorter));
  s.seqlen_k = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(spec.seqlen_k) * shorter));
  return s;
}

}  // namespace

std::vector<TensorCheck> check_against_oracle(measure::Contestant& contestant, const ProblemSpec& spec, const Inputs& inputs, bool grad,
                                              int64_t memory_limit, double oracle_flops, const Outputs*& outputs) {
  std::vector<TensorCheck> checks;
  const double pair = 2.0 * static_cast<double>(spec.headdim + spec.headdim_v),
               pairs = static_cast<double>(spec.seqlen_q) * static_cast<double>(spec.seqlen_k);
  const double group = pair * pairs * static_cast<double>(spec.nheads) / static_cast<double>(spec.nheads_k);
  const double all = group * static_cast<double>(spec.batch) * static_cast<double>(spec.nheads_k);
  // The oracle's backward costs as much as 2.5 forward passes, which the budget counts as one.
  const bool backward_elsewhere = grad && group > oracle_flops;
  if (backward_elsewhere) {
    const ProblemSpec little = smaller(spec, group, oracle_flops);
    const Inputs little_inputs = measure::make_inputs(little, true);
    contestant.prepare(little, little_inputs, true, memory_limit);
    const size_t before = checks.size();
    OracleCheck(little, little_inputs, contestant.compute(), checks).all_backward();
    for (size_t i = before; i < checks.size(); ++i) checks[i].where = "smaller problem " + describe(little);
    contestant.release();
  }
  contestant.prepare(spec, inputs, grad, memory_limit);
  outputs = &contestant.compute();
  OracleCheck check(spec, inputs, *outputs, checks);
  check.finite();
  if (all <= oracle_flops) {
    check.all_forward();
    if (grad) check.all_backward();
  } else {
    check.some_forward(static_cast<int64_t>(oracle_flops / 3 / (group / static_cast<double>(spec.seqlen_q))));
    if (grad && !backward_elsewhere) check.last_group_backward();
  }
  return checks;
}

}  // namespace fattn::cli
