#include "testing/check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "fattn/plan.hpp"
#include "testing/device_mirror.h"
#include "testing/numbers.h"
#include "testing/pages.h"
#include "testing/run.h"
#include "testing/sequences.h"
#include "testing/standard_model.h"
#include "testing/tensors.h"

namespace fattn::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kForwardFactor = 2, kGradientFactor = 3;
constexpr double kRmsFactor = 1.10, kDeviations = 4;
const double kOneMoreRounding = std::sqrt(1.5);

// What the oracle says about one tensor, and how far from it a result may be.
struct Expected {
  std::string name;
  Dense values;
  double allowed = 0;
  double low_lse = kLowestLse;  // of lse: what is below passes for whatever is below kLowestLse
  // Of the second bound: the mean square of the peer's error in each row, NaN where the row is not counted. Empty: there is no second bound.
  Dense peer_rows = {};
  double allowed_fused = kInfinity;          // beside `allowed`, from the peer's largest error
  double rms_factor = kRmsFactor, unit = 0;  // unit: one in the last place of the largest
  bool rounded_weights = false;              // dq and dk that Rounding::kOfRoundedWeights is about
  double row_unit = 0;                       // mean square of the units of a row's elements, of the row where it is largest
  double last_places = 0;                    // of fp32 sums, in every element
};

// The distance that counts: infinity where only one is finite. A tiny weight times Inf is Inf where the weight does not
// underflow and NaN where it does, so these two pass for each other.
double distance(double a, double b) {
  if (!std::isfinite(a) && !std::isfinite(b)) return 0;
  const double d = std::fabs(a - b);
  return std::isfinite(d) ? d : kInfinity;
}
// Of lse: -inf says that a row is empty, and nothing else passes for it. Where all of a row has a bias that is meant to hide, lse says only that.
double lse_distance(double a, double b, double low) {
  if (std::isnan(a) && std::isnan(b)) return 0;
  if (std::isfinite(a) && std::isfinite(b) && a < low && b < kLowestLse) return 0;
  return a == b ? 0 : std::isfinite(a) && std::isfinite(b) ? distance(a, b) : kInfinity;
}
// Algorithm standard has no lower scores in fp16 than -65504.
double low_lse(DType dtype) { return dtype == DType::kF16 ? -6e4 : kLowestLse; }

// Of an element of the tensor.
double distance_in(const Expected& tensor, double a, double b) { return tensor.name == "lse" ? lse_distance(a, b, tensor.low_lse) : distance(a, b); }

double largest_finite(const Dense& x, double below = kInfinity) {
  double largest = 0;
  for (double v : x)
    if (std::fabs(v) < below) largest = std::max(largest, std::fabs(v));
  return largest;
}

// The largest distance of the yardstick that is a number: a bound must be one.
double largest_error(const Expected& wanted, const Dense& yardstick) {
  double largest = 0;
  for (size_t i = 0; i < yardstick.size(); ++i) {
    const double d = distance_in(wanted, yardstick[i], wanted.values[i]);
    if (std::isfinite(d)) largest = std::max(largest, d);
  }
  return largest;
}

Expected expected(const char* name, const Dense& oracle, const Dense& standard, double factor, DType dtype, double least_floor = 0,
                  double low = kLowestLse) {
  Expected wanted{name, oracle, 0, low};
  wanted.unit = ulp(dtype, largest_finite(oracle, wanted.name == "lse" ? -kLowestLse : kInfinity));
  wanted.last_places = least_floor;
  wanted.allowed = factor * largest_error(wanted, standard) + std::max(least_floor, wanted.unit);
  return wanted;
}

// What the peer's error is in each row of `width` elements.
void hold_against(Expected& wanted, const Dense& peer, int64_t width, DType dtype, double factor, double rms_factor) {
  wanted.rms_factor = rms_factor;
  wanted.allowed_fused = factor * largest_error(wanted, peer) + std::max(wanted.last_places + wanted.unit / 2, wanted.unit);
  for (size_t first = 0; width > 0 && first < peer.size(); first += static_cast<size_t>(width)) {
    double sum = 0, units = 0;
    for (size_t i = first; i < first + static_cast<size_t>(width); ++i) {
      const double unit = ulp(dtype, wanted.values[i]);
      sum += (peer[i] - wanted.values[i]) * (peer[i] - wanted.values[i]);
      units += unit * unit;
    }
    wanted.peer_rows.push_back(std::isfinite(sum) ? sum / static_cast<double>(width) : std::numeric_limits<double>::quiet_NaN());
    if (std::isfinite(sum)) wanted.row_unit = std::max(wanted.row_unit, units / static_cast<double>(width));
  }
}

// Fills in the verdict's RMS errors and the bound of it, and returns whether that is kept.
bool judge_rms(TensorVerdict& verdict, const Expected& wanted, const Dense& got, Rounding rounding) {
  verdict.rms_allowed = kInfinity;
  double rows = 0, mean = 0, of_squares = 0, own = 0;
  const size_t width = wanted.peer_rows.empty() ? 0 : got.size() / wanted.peer_rows.size();
  for (size_t row = 0; row < wanted.peer_rows.size(); ++row) {
    const double square = wanted.peer_rows[row];
    if (std::isnan(square)) continue;
    rows += 1;
    mean += square;
    of_squares += square * square;
    for (size_t i = row * width; i < (row + 1) * width; ++i) own += (got[i] - wanted.values[i]) * (got[i] - wanted.values[i]);
  }
  if (rows == 0) return true;
  mean /= rows;
  verdict.rms = std::sqrt(own / (rows * static_cast<double>(width)));
  verdict.rms_peer = std::sqrt(mean);
  if (rounding == Rounding::kTextbook) return true;
  const double factor = rounding == Rounding::kOfRoundedWeights && wanted.rounded_weights ? kRmsFactor * kOneMoreRounding : wanted.rms_factor;
  const double deviation = std::sqrt(std::max(0.0, of_squares / rows - mean * mean));
  const double chance = kDeviations * std::sqrt(2 / rows) * deviation;
  verdict.rms_allowed = std::sqrt(factor * factor * (mean + chance) + wanted.row_unit / rows + wanted.last_places * wanted.last_places);
  return verdict.rms <= verdict.rms_allowed;
}

std::string place_of(const Tensor& t, int64_t index) {
  std::string at;
  int64_t rest = index;
  for (int d = t.ndim() - 1; d >= 0; --d) {
    at = (d ? ", " : "") + std::to_string(rest % t.shape(d)) + at;
    rest /= t.shape(d);
  }
  return "[" + at + "]";
}

TensorVerdict judge(const Expected& wanted, const Tensor& tensor, Rounding rounding) {
  TensorVerdict verdict;
  verdict.tensor = wanted.name;
  verdict.allowed = rounding == Rounding::kTextbook ? wanted.allowed : std::min(wanted.allowed, wanted.allowed_fused);
  const Dense got = read(tensor);
  size_t bad = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = distance_in(wanted, got[i], wanted.values[i]);
    verdict.error = std::max(verdict.error, d);
    if (d <= verdict.allowed) continue;
    if (bad++ == 0) verdict.first_bad = static_cast<int64_t>(i);
  }
  const bool rms_kept = judge_rms(verdict, wanted, got, rounding);
  verdict.pass = bad == 0 && rms_kept;
  std::ostringstream out;
  if (bad == 0 && !rms_kept) {
    out << wanted.name << " has an RMS error of " << verdict.rms << ", and may have " << verdict.rms_allowed << ": FlashAttention-2's rounding has "
        << verdict.rms_peer;
    verdict.message = out.str();
  }
  if (bad > 0) {
    out.precision(9);
    const auto i = static_cast<size_t>(verdict.first_bad);
    out << wanted.name << place_of(tensor, verdict.first_bad) << " is " << got[i] << ", expected " << wanted.values[i] << "; " << bad << " of "
        << got.size() << " elements are off by more than " << verdict.allowed << ", by up to " << verdict.error;
    verdict.message = out.str();
  }
  return verdict;
}

ModelShape model_shape(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreTensors& scores, const Options& options) {
  const double scale = options.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.shape(3))));
  return {q.shape(0),     q.shape(1), k.shape(1),          q.shape(2),           k.shape(2),      q.shape(3), v.shape(3),       q.dtype(),
          options.causal, scale,      options.window_left, options.window_right, options.softcap, scores,     options.p_dropout};
}

Options oracle_options(const Options& options) {
  Options oracle;
  oracle.causal = options.causal;
  oracle.window_left = options.window_left;
  oracle.window_right = options.window_right;
  oracle.softcap = options.softcap;
  oracle.softmax_scale = options.softmax_scale;
  oracle.p_dropout = options.p_dropout;
  oracle.backend = Backend::kReference;
  return oracle;
}

// The same beside fp64 tensors, with a bias that is `bias`'s values, and sinks likewise.
ScoreTensors oracle_scores(const ScoreTensors& scores, const Widened& bias, const Widened& sinks) {
  ScoreTensors wide = scores;
  wide.bias = bias.view;
  wide.sinks = sinks.view;
  return wide;
}

bool in_16_bits(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

// An eighth of a unit in the last place of a weight near 1, for the dtypes that have fewer digits than lse.
double weight_rounding(DType dtype) { return in_16_bits(dtype) ? ulp(dtype, 1.0) / 8 : 0.0; }

// `out`: the dtype of o.
std::vector<Expected> expect_forward(const Tensor& q, const Tensor& k, const Tensor& v, DType out, const ScoreTensors& scores,
                                     const Options& options);
std::vector<Expected> expect_backward(const BackwardTensors& t, const Options& options);

// Numbers of some rows, to their place among `total` of `heads` each.
void put_rows(Dense& to, const Dense& from, int64_t begin, int64_t row) {
  std::copy(from.begin(), from.end(), to.begin() + static_cast<std::ptrdiff_t>(begin * row));
}

// The peer's errors of one sequence, to their place among `total` rows of `heads` each. Rows of no sequence are not counted.
void put_peer(Expected& to, const Expected& from, int64_t begin, int64_t heads, int64_t total) {
  if (from.peer_rows.empty()) return;
  to.allowed_fused = to.peer_rows.empty() ? from.allowed_fused : std::max(to.allowed_fused, from.allowed_fused);
  if (to.peer_rows.empty()) to.peer_rows.assign(static_cast<size_t>(total * heads), std::numeric_limits<double>::quiet_NaN());
  put_rows(to.peer_rows, from.peer_rows, begin, heads);
  to.unit = std::max(to.unit, from.unit);
  to.last_places = std::max(to.last_places, from.last_places);
  to.row_unit = std::max(to.row_unit, from.row_unit);
  to.rms_factor = from.rms_factor;
  to.rounded_weights = from.rounded_weights;
}

// Of packed sequences: each is expected to be what it is alone. Rows of none are empty.
std::vector<Expected> expect_packed_forward(const Tensor& q, const Tensor& k, const Tensor& v, DType out, const ScoreTensors& scores,
                                            const Options& options) {
  const int64_t total = q.shape(0), nheads = q.shape(1), width = nheads * v.shape(2);
  std::vector<Expected> all{{"o", Dense(static_cast<size_t>(total * width), 0.0), 0},
                            {"lse", Dense(static_cast<size_t>(total * nheads), -kInfinity), 0, low_lse(q.dtype())}};
  for (const OneSequence& one : sequences_of(scores)) {
    int64_t state[4];
    const std::vector<Expected> alone =
        expect_forward(queries_of(q, one), keys_of(k, one), keys_of(v, one), out, scores_of(scores, one, nheads, state), options);
    put_rows(all[0].values, alone[0].values, one.q_begin, width);
    for (int64_t h = 0; h < nheads; ++h)
      for (int64_t i = 0; i < one.seqlen_q; ++i)
        all[1].values[static_cast<size_t>(h * total + one.q_begin + i)] = alone[1].values[static_cast<size_t>(h * one.seqlen_q + i)];
    for (size_t i = 0; i < all.size(); ++i) all[i].allowed = std::max(all[i].allowed, alone[i].allowed);
    put_peer(all[0], alone[0], one.q_begin, nheads, total);
  }
  return all;
}
std::vector<Expected> expect_packed_backward(const BackwardTensors& t, const Options& options) {
  const auto zeros = [](const Tensor& of) { return Dense(static_cast<size_t>(of.size()), 0.0); };
  const int64_t q_row = t.q.shape(1) * t.q.shape(2), k_row = t.k.shape(1) * t.k.shape(2), v_row = t.v.shape(1) * t.v.shape(2);
  std::vector<Expected> all{{"dq", zeros(t.dq), 0}, {"dk", zeros(t.dk), 0}, {"dv", zeros(t.dv), 0}};
  if (t.dbias) all.push_back({"dbias", zeros(t.dbias), 0});
  if (t.dsinks) all.push_back({"dsinks", zeros(t.dsinks), 0});
  for (const OneSequence& one : sequences_of(t.scores)) {
    int64_t state[4];
    BackwardTensors alone;
    alone.q = queries_of(t.q, one);
    alone.k = keys_of(t.k, one);
    alone.v = keys_of(t.v, one);
    alone.o = queries_of(t.o, one);
    alone.lse = lse_of(t.lse, one);
    alone.dout = queries_of(t.dout, one);
    alone.dq = queries_of(t.dq, one);
    alone.dk = keys_of(t.dk, one);
    alone.dv = keys_of(t.dv, one);
    alone.scores = scores_of(t.scores, one, t.q.shape(1), state);
    alone.dbias = pairs_of(t.dbias, one);
    alone.dlse = lse_of(t.dlse, one);
    alone.dsinks = t.dsinks;
    const std::vector<Expected> expected = expect_backward(alone, options);
    put_rows(all[0].values, expected[0].values, one.q_begin, q_row);
    put_rows(all[1].values, expected[1].values, one.k_begin, k_row);
    put_rows(all[2].values, expected[2].values, one.k_begin, v_row);
    for (size_t i = 0; i < 3; ++i) all[i].allowed = std::max(all[i].allowed, expected[i].allowed);
    put_peer(all[0], expected[0], one.q_begin, t.q.shape(1), t.q.shape(0));
    put_peer(all[1], expected[1], one.k_begin, t.k.shape(1), t.k.shape(0));
    put_peer(all[2], expected[2], one.k_begin, t.v.shape(1), t.v.shape(0));
    if (t.dsinks) {
      for (size_t h = 0; h < all.back().values.size(); ++h) all.back().values[h] += expected.back().values[h];
      all.back().allowed += expected.back().allowed;
    }
    if (!t.dbias) continue;
    const int64_t heads = t.dbias.shape(1), rows = t.dbias.shape(2), keys = t.dbias.shape(3), own = alone.dbias.shape(2);
    const int64_t entry = t.dbias.shape(0) > 1 ? one.index : 0;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < own; ++i)
        for (int64_t j = 0; j < one.seqlen_k; ++j)
          all[3].values[static_cast<size_t>(((entry * heads + h) * rows + i) * keys + j)] +=
              expected[3].values[static_cast<size_t>((h * own + i) * one.seqlen_k + j)];
    const double allowed = expected[3].allowed;  // sums of sequences have the errors of all of them
    all[3].allowed = t.dbias.shape(0) > 1 ? std::max(all[3].allowed, allowed) : all[3].allowed + allowed;
  }
  return all;
}

// Of the forward pass: o, lse.
std::vector<Expected> expect_forward(const Tensor& q, const Tensor& k, const Tensor& v, DType out, const ScoreTensors& scores,
                                     const Options& options) {
  if (scores.block_table) {
    const Unpaged keys(k, v, scores);
    return expect_forward(q, keys.k(), keys.v(), out, keys.scores(), options);
  }
  if (scores.cu_seqlens_q) return expect_packed_forward(q, k, v, out, scores, options);
  const Widened wide_q = widen(q), wide_k = widen(k), wide_v = widen(v), wide_bias = widen(scores.bias), wide_sinks = widen(scores.sinks);
  Dense o(static_cast<size_t>(q.shape(0) * q.shape(1) * q.shape(2) * v.shape(3))), lse(static_cast<size_t>(q.shape(0) * q.shape(1) * q.shape(2)));
  ForwardTensors oracle;
  oracle.q = wide_q.view;
  oracle.k = wide_k.view;
  oracle.v = wide_v.view;
  oracle.o = Tensor(o.data(), DType::kF64, {q.shape(0), q.shape(1), q.shape(2), v.shape(3)});
  oracle.lse = Tensor(lse.data(), DType::kF64, {q.shape(0), q.shape(2), q.shape(1)});
  oracle.scores = oracle_scores(scores, wide_bias, wide_sinks);
  forward(oracle, oracle_options(options));
  ModelShape model = model_shape(q, k, v, scores, options);
  model.fp32_out = out != q.dtype();
  const ModelForward standard = standard_forward(model, wide_q.values, wide_k.values, wide_v.values);
  const DType lse_dtype = q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  // Weights that dropout leaves need not sum to 1: what fp32 makes of each stays in o.
  const double weights = options.p_dropout > 0 && lse_dtype == DType::kF32 ? 2 * ulp(DType::kF32, 1.0) * largest_finite(o) : 0;
  std::vector<Expected> all{expected("o", o, standard.o, kForwardFactor, out, weights),
                            expected("lse", lse, standard.lse, kForwardFactor, lse_dtype,
                                     std::max(ulp(lse_dtype, standard.score_terms), weight_rounding(q.dtype())), low_lse(q.dtype()))};
  if (in_16_bits(q.dtype())) {
    model.fused = true;
    hold_against(all[0], standard_forward(model, wide_q.values, wide_k.values, wide_v.values).o, v.shape(3), out, kForwardFactor, kRmsFactor);
    if (out != q.dtype()) all[0].allowed_fused += weight_rounding(q.dtype()) * largest_finite(o);
    for (int64_t row = 0; row < static_cast<int64_t>(all[0].peer_rows.size()); ++row) {  // in the order of o
      const int64_t h = row % q.shape(2), i = row / q.shape(2) % q.shape(1), b = row / q.shape(2) / q.shape(1);
      if (lse[static_cast<size_t>((b * q.shape(2) + h) * q.shape(1) + i)] < kLowestLse)
        all[0].peer_rows[static_cast<size_t>(row)] = std::numeric_limits<double>::quiet_NaN();
    }
  }
  return all;
}

// Of the backward pass: dq, dk, dv and, if it is there, dbias. The oracle is given the same o and lse as the pass that is judged.
std::vector<Expected> expect_backward(const BackwardTensors& t, const Options& options) {
  if (t.scores.cu_seqlens_q) return expect_packed_backward(t, options);
  const Widened q = widen(t.q), k = widen(t.k), v = widen(t.v), o = widen(t.o), lse = widen(t.lse), dout = widen(t.dout), bias = widen(t.scores.bias),
                dlse = widen(t.dlse), sinks = widen(t.scores.sinks);
  Dense dq(q.values.size()), dk(k.values.size()), dv(v.values.size()), dbias(static_cast<size_t>(t.dbias.size())),
      dsinks(static_cast<size_t>(t.dsinks.size()));
  const auto like = [](Dense& to, const Tensor& from) {
    return Tensor(to.data(), DType::kF64, {from.shape(0), from.shape(1), from.shape(2), from.shape(3)});
  };
  BackwardTensors oracle;
  oracle.q = q.view;
  oracle.k = k.view;
  oracle.v = v.view;
  oracle.o = o.view;
  oracle.lse = lse.view;
  oracle.dout = dout.view;
  oracle.dq = like(dq, t.q);
  oracle.dk = like(dk, t.k);
  oracle.dv = like(dv, t.v);
  oracle.scores = oracle_scores(t.scores, bias, sinks);
  if (t.dbias) oracle.dbias = like(dbias, t.dbias);
  oracle.dlse = dlse.view;
  if (t.dsinks) oracle.dsinks = Tensor(dsinks.data(), DType::kF64, {t.dsinks.shape(0)});
  backward(oracle, oracle_options(options));
  ModelShape model = model_shape(t.q, t.k, t.v, t.scores, options);
  model.dbias = t.dbias;
  model.dlse = dlse.values;
  model.fp32_out = t.dq.dtype() != t.q.dtype();
  const ModelBackward standard = standard_backward(model, q.values, k.values, v.values, o.values, lse.values, dout.values);
  const DType dtype = t.q.dtype(), out = t.dq.dtype();
  const DType sums = dtype == DType::kF64 ? DType::kF64 : DType::kF32;  // of the accumulators
  const double dp_rounding = 2 * ulp(sums, standard.dp_terms),
               scaled = dp_rounding * std::fabs(model.softmax_scale);  // one of dP, one of rowsum(o dout)
  std::vector<Expected> all{expected("dq", dq, standard.dq, kGradientFactor, out, scaled * standard.k_terms),
                            expected("dk", dk, standard.dk, kGradientFactor, out, scaled * standard.q_terms),
                            expected("dv", dv, standard.dv, kGradientFactor, out, ulp(sums, standard.score_terms) * standard.dout_terms)};
  if (t.dbias) all.push_back(expected("dbias", dbias, standard.dbias, kGradientFactor, t.dbias.dtype(), dp_rounding * standard.p_terms));
  if (t.dsinks)
    all.push_back(expected("dsinks", dsinks, standard.dsinks, kGradientFactor, t.dsinks.dtype(),
                           dp_rounding * standard.sink_p + 4 * ulp(sums, 1 + standard.score_terms) * standard.sink_terms));
  if (in_16_bits(dtype)) {
    model.fused = true;
    const ModelBackward peer = standard_backward(model, q.values, k.values, v.values, o.values, lse.values, dout.values);
    const bool dropout = options.p_dropout > 0, terms = t.scores.bias || t.scores.mask || t.scores.document_q || t.dbias;
    const bool uneven = t.q.shape(3) != t.v.shape(3) && std::max(t.q.shape(3), t.v.shape(3)) > 128;
    const double factor = kRmsFactor * (dropout ? kOneMoreRounding : 1.0);
    const double of_weights = ulp(sums, standard.score_terms) * standard.dp_terms * std::fabs(model.softmax_scale);  // by the last place of a score
    all[0].last_places += of_weights * standard.k_terms;
    all[1].last_places += of_weights * standard.q_terms;
    hold_against(all[0], peer.dq, t.q.shape(3), out, kGradientFactor, factor);
    hold_against(all[1], peer.dk, t.k.shape(3), out, kGradientFactor, factor);
    hold_against(all[2], peer.dv, t.v.shape(3), out, kGradientFactor, kRmsFactor);
    all[0].rounded_weights = all[1].rounded_weights = out == dtype && dtype == DType::kF16 && (terms || uneven);
  }
  return all;
}

// Plans, which says how is rounded, and executes on a workspace of garbage between guard zones. Returns what was written outside of it, if anything.
template <class Tensors>
std::string execute(const Tensors& tensors, const Options& options, Rounding& rounding) {
  const Plan plan(tensors, options);
  rounding = rounding_of(tensors.q.device(), static_cast<Algorithm>(plan.info().algorithm));
  constexpr size_t kGuard = 256;
  const size_t bytes = plan.workspace_bytes();
  std::vector<unsigned char> memory(bytes + 2 * kGuard + 64, TensorBlock::kCanary);
  const bool on_device = tensors.q.device() == Device::kCuda;
  const size_t skip = kGuard + (on_device ? 0 : (64 - (reinterpret_cast<uintptr_t>(memory.data()) + kGuard) % 64) % 64);
  std::fill_n(memory.begin() + static_cast<std::ptrdiff_t>(skip), bytes, TensorBlock::kUnwritten);
  if (on_device) {
    cuda::Buffer copy(tensors.q.device_index(), memory.size());
    copy.copy_from(memory.data(), memory.size());
    plan.execute(tensors, static_cast<unsigned char*>(copy.get()) + skip, bytes);
    copy.copy_to(memory.data(), memory.size());
  } else {
    plan.execute(tensors, memory.data() + skip, bytes);
  }
  for (size_t i = 0; i < memory.size(); ++i)
    if ((i < skip || i >= skip + bytes) && memory[i] != TensorBlock::kCanary)
      return "byte " + std::to_string(static_cast<int64_t>(i) - static_cast<int64_t>(skip)) + " of a workspace of " + std::to_string(bytes) +
             " bytes was written";
  return {};
}

std::string damage(const std::vector<TensorBlock>& blocks) {
  for (const TensorBlock& block : blocks)
    if (std::string d = block.damage(); !d.empty()) return d;
  return {};
}

}  // namespace

bool CaseResult::passed() const {
  return skipped.empty() && failure.empty() && !tensors.empty() &&
         std::all_of(tensors.begin(), tensors.end(), [](const TensorVerdict& t) { return t.pass; });
}

std::string CaseResult::summary() const {
  if (!failure.empty()) return failure;
  if (!skipped.empty()) return "skipped: " + skipped;
  std::ostringstream out;
  out.precision(3);
  for (size_t i = 0; i < tensors.size(); ++i) {
    out << (i ? ", " : "");
    if (tensors[i].pass)
      out << tensors[i].tensor << " " << tensors[i].error << " of " << tensors[i].allowed;
    else
      out << tensors[i].message;
  }
  return out.str();
}

struct PreparedCase::Data {
  Case c;
  CaseInputs inputs;
  std::vector<Expected> forward, backward;
  CaseForward saved;  // what the backward pass gets: the oracle's o and lse, rounded
};

PreparedCase::~PreparedCase() = default;
PreparedCase::PreparedCase(PreparedCase&&) noexcept = default;
const Case& PreparedCase::description() const { return data_->c; }

PreparedCase::PreparedCase(const Case& c) : data_(std::make_unique<Data>()) {
  Data& d = *data_;
  d.c = c;
  d.inputs = make_inputs(c);
  const Options options = options_of(c, Target{});
  // Where all rows have the same weights they are one sample, which bounds no RMS error.
  const auto only_samples = [&](std::vector<Expected>& all) {
    if (c.inputs == Inputs::kRising || c.inputs == Inputs::kConstant)
      for (Expected& one : all) one.peer_rows.clear();
  };
  d.forward = expect_forward(d.inputs.q, d.inputs.k, d.inputs.v, c.out_dtype(), d.inputs.scores, options);
  only_samples(d.forward);
  if (!c.backward) return;
  d.saved = make_saved(c);
  write(d.saved.o, d.forward[0].values);
  write(d.saved.lse, d.forward[1].values);
  if (c.dlse) {  // in a row without a gradient it is never looked at
    Dense dlse = read(d.inputs.dlse);
    for (size_t i = 0; i < dlse.size(); ++i)
      if (d.forward[1].values[i] < kLowestLse) dlse[i] = std::numeric_limits<double>::quiet_NaN();
    write(d.inputs.dlse, dlse);
  }
  CaseGradients shapes = make_gradients(c);
  d.backward = expect_backward({d.inputs.q, d.inputs.k, d.inputs.v, d.saved.o, d.saved.lse, d.inputs.dout, shapes.dq, shapes.dk, shapes.dv,
                                d.inputs.scores, shapes.dbias, d.inputs.dlse, shapes.dsinks},
                               options);
  only_samples(d.backward);
}

CaseResult PreparedCase::run(const Target& target) const {
  const Data& d = *data_;
  const Options options = options_of(d.c, target);
  Rounding rounding = Rounding::kFused;  // of the pass that ran
  CaseResult result;
  // The inputs are shared by all runs of this case, so they are compared with copies from before.
  const auto inputs_now = [&] {
    std::vector<Dense> all{read(d.inputs.q), read(d.inputs.k), read(d.inputs.v), read(d.inputs.dout), read(d.inputs.dlse)};
    for_each_tensor(d.inputs.scores, [&](const TensorRow&, const Tensor& t) { all.push_back(read(t)); });
    if (d.c.backward) all.insert(all.end(), {read(d.saved.o), read(d.saved.lse)});
    return all;
  };
  const std::vector<Dense> before = inputs_now();
  const auto note = [&](const char* pass, const std::string& what) {
    if (!what.empty() && result.failure.empty()) result.failure = std::string(pass) + ": " + what;
  };
  const auto attempt = [&](const char* pass, const auto& body) {
    try {
      body();
    } catch (const Error& e) {
      if (e.code() == ErrorCode::kUnsupported)
        result.skipped = std::string(pass) + ": " + e.what();
      else
        note(pass, e.what());
    }
  };

  const bool on_device = target.device == Device::kCuda;
  // Executes in host memory, or on copies of all blocks on the device.
  const auto execute_on = [&](const auto& tensors, const std::vector<TensorBlock>& outputs) {
    if (!on_device) return execute(tensors, options, rounding);
    DeviceMirror mirror(target.device_index);
    mirror.add(d.inputs.blocks);
    mirror.add(d.saved.blocks);
    mirror.add(outputs);
    std::string problem = execute(each_tensor(tensors, [&](const Tensor& t) { return mirror.at(t); }), options, rounding);
    mirror.fetch();
    return problem;
  };

  attempt("forward", [&] {
    const CaseForward out = make_forward(d.c);
    const ForwardTensors tensors{d.inputs.q, d.inputs.k, d.inputs.v, out.o, d.c.want_lse ? out.lse : Tensor(), {}, d.inputs.scores};
    note("forward", execute_on(tensors, out.blocks));
    note("forward", damage(out.blocks));
    result.tensors.push_back(judge(d.forward[0], out.o, rounding));
    if (d.c.want_lse) result.tensors.push_back(judge(d.forward[1], out.lse, rounding));
  });
  if (d.c.backward)
    attempt("backward", [&] {
      const CaseGradients out = make_gradients(d.c);
      const BackwardTensors tensors{d.inputs.q, d.inputs.k, d.inputs.v,      d.saved.o, d.saved.lse,   d.inputs.dout, out.dq,
                                    out.dk,     out.dv,     d.inputs.scores, out.dbias, d.inputs.dlse, out.dsinks};
      note("backward", execute_on(tensors, out.blocks));
      note("backward", damage(out.blocks));
      result.tensors.push_back(judge(d.backward[0], out.dq, rounding));
      result.tensors.push_back(judge(d.backward[1], out.dk, rounding));
      result.tensors.push_back(judge(d.backward[2], out.dv, rounding));
      if (out.dbias) result.tensors.push_back(judge(d.backward[3], out.dbias, rounding));
      if (out.dsinks) result.tensors.push_back(judge(d.backward.back(), out.dsinks, rounding));
    });
  const std::vector<Dense> after = inputs_now();
  for (size_t i = 0; i < before.size(); ++i)
    if (!same_bits(before[i], after[i])) note("call", "an input was written");
  return result;
}

CaseResult run_case(const Case& c, const Target& target) { return PreparedCase(c).run(target); }

Rounding rounding_of(Device device, Algorithm algorithm) {
  if (algorithm == Algorithm::kStandard) return Rounding::kTextbook;
  return device == Device::kCuda && algorithm != Algorithm::kV3 ? Rounding::kOfRoundedWeights : Rounding::kFused;
}

std::vector<TensorVerdict> verify(const ForwardTensors& t, const Options& options, Rounding rounding) {
  const std::vector<Expected> wanted = expect_forward(t.q, t.k, t.v, t.o.dtype(), t.scores, options);
  if (options.algorithm == Algorithm::kStandard) rounding = Rounding::kTextbook;
  std::vector<TensorVerdict> verdicts{judge(wanted[0], t.o, rounding)};
  if (t.lse) verdicts.push_back(judge(wanted[1], t.lse, rounding));
  return verdicts;
}

std::vector<TensorVerdict> verify(const BackwardTensors& t, const Options& options, Rounding rounding) {
  const std::vector<Expected> wanted = expect_backward(t, options);
  if (options.algorithm == Algorithm::kStandard) rounding = Rounding::kTextbook;
  std::vector<TensorVerdict> verdicts{judge(wanted[0], t.dq, rounding), judge(wanted[1], t.dk, rounding), judge(wanted[2], t.dv, rounding)};
  if (t.dbias) verdicts.push_back(judge(wanted[3], t.dbias, rounding));
  if (t.dsinks) verdicts.push_back(judge(wanted.back(), t.dsinks, rounding));
  return verdicts;
}

}  // namespace fattn::testing
