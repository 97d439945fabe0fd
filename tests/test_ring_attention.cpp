// Attention over several ranks (fattn/ring.hpp) on the CPU: results and gradients are held to 1.25 times the error of one call, against float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fattn/fattn.hpp"
#include "owned_tensor.h"
#include "ring_of_threads.h"
#include "testing/random.h"

namespace fattn::testing {
namespace {

struct Case {
  RingSequence sequence;
  Options options;
  DType dtype = DType::kF32;
  int64_t batch = 1, nheads = 2, nheads_k = 1, headdim = 16, headdim_v = 16;
  bool documents = false, sinks = false, dlse = false, asks_lse = true, fp32_out = false;
  int alibi = 0;                                           // dimensions of slopes
  std::array<bool, 3> bias_shares = {}, mask_shares = {};  // one for all of batch, heads, rows
  bool bias = false, mask = false, dbias = false, bias_fp32 = false, dbias_fp32 = false;
  int ranks = 2;
  bool late = false;
};

struct Inputs {
  Owned q, k, v, dout, dlse, document_q, document_k, sinks, slopes, bias, mask, dropout_state;
};
struct Results {
  Owned o, lse, dq, dk, dv, dsinks, dbias;
};

std::vector<int64_t> shape_of_pairs(const Case& c, const std::array<bool, 3>& shares, int64_t rows) {
  return {shares[0] ? 1 : c.batch, shares[1] ? 1 : c.nheads, shares[2] ? 1 : rows, c.sequence.seqlen_k};
}
Owned bytes(std::vector<int64_t> shape, const auto& value) {
  Owned t(DType::kU8, std::move(shape));
  for (int64_t i = 0; i < t.size(); ++i) t.memory[static_cast<size_t>(i)] = static_cast<char>(value(i));
  return t;
}
Owned numbers(const std::vector<int64_t>& values) {
  Owned t(DType::kI64, {static_cast<int64_t>(values.size())});
  std::memcpy(t.memory.data(), values.data(), t.memory.size());
  return t;
}

Inputs inputs_of(const Case& c, uint64_t seed) {
  Inputs in;
  const int64_t m = c.sequence.seqlen_q, n = c.sequence.seqlen_k;
  in.q = normal(c.dtype, {c.batch, m, c.nheads, c.headdim}, seed);
  in.k = normal(c.dtype, {c.batch, n, c.nheads_k, c.headdim}, seed + 1);
  in.v = normal(c.dtype, {c.batch, n, c.nheads_k, c.headdim_v}, seed + 2);
  in.dout = normal(c.dtype, {c.batch, m, c.nheads, c.headdim_v}, seed + 3);
  if (c.dlse) in.dlse = normal(DType::kF32, {c.batch, c.nheads, m}, seed + 4);
  if (c.sinks) in.sinks = normal(DType::kF32, {c.nheads}, seed + 5);
  if (c.alibi > 0) {
    in.slopes = normal(DType::kF32, c.alibi == 1 ? std::vector<int64_t>{c.nheads} : std::vector<int64_t>{c.batch, c.nheads}, seed + 6);
    for (int64_t i = 0; i < in.slopes.size(); ++i) in.slopes.set(i, std::fabs(in.slopes.get(i)) / 4);
  }
  if (c.bias) in.bias = normal(c.bias_fp32 ? DType::kF32 : c.dtype, shape_of_pairs(c, c.bias_shares, m), seed + 7);
  const Random random(7, seed + 8);
  if (c.mask) in.mask = bytes(shape_of_pairs(c, c.mask_shares, m), [&](int64_t i) { return random.uniform(static_cast<uint64_t>(i)) > 0.3; });
  if (c.options.p_dropout > 0) in.dropout_state = numbers({static_cast<int64_t>(seed * 77), -5});
  if (!c.documents) return in;
  const auto ids = [&](int64_t length) {  // four documents of any lengths
    Owned t(DType::kI32, {c.batch, length});
    for (int64_t i = 0; i < t.size(); ++i)
      reinterpret_cast<int32_t*>(t.memory.data())[i] = static_cast<int32_t>(i % length * 4 / std::max<int64_t>(length, 1));
    return t;
  };
  in.document_q = ids(m);
  in.document_k = ids(n);
  return in;
}

// One call in `dtype`; fp64: by the reference. Packed sequences are given as documents, whose masks are those of each by itself.
Results one_call(const Case& c, const Inputs& in, DType dtype) {
  Options options = c.options;
  const DType lse_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (dtype == DType::kF64) options.backend = Backend::kReference;
  const Owned q = in.q.as(dtype), k = in.k.as(dtype), v = in.v.as(dtype), dout = in.dout.as(dtype);
  const Owned sinks = c.sinks ? in.sinks.as(lse_dtype) : Owned(), dlse = c.dlse ? in.dlse.as(lse_dtype) : Owned();
  Results r{{dtype, dout.shape}, {lse_dtype, {c.batch, c.nheads, c.sequence.seqlen_q}}, {dtype, q.shape}, {dtype, k.shape}, {dtype, v.shape}, {}, {}};
  if (c.sinks) r.dsinks = Owned(lse_dtype, {c.nheads});
  if (c.dbias) r.dbias = Owned(dtype == DType::kF64 || !c.dbias_fp32 ? dtype : DType::kF32, shape_of_pairs(c, c.bias_shares, c.sequence.seqlen_q));
  const Owned bias = c.bias ? in.bias.as(dtype == DType::kF64 ? dtype : in.bias.dtype) : Owned();
  Owned state = in.dropout_state;
  const auto run = [&](const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& o_, const Tensor& lse_, const Tensor& dout_,
                       const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& dlse_) {
    ForwardTensors f{q_, k_, v_, o_, lse_, {}};
    f.scores.sinks = sinks.view();
    f.scores.document_q = in.document_q.view();
    f.scores.document_k = in.document_k.view();
    f.scores.alibi_slopes = in.slopes.view();
    f.scores.bias = bias.view();
    f.scores.mask = in.mask.view();
    f.scores.dropout_state = state.view();
    forward(f, options);
    BackwardTensors b{q_, k_, v_, o_, lse_, dout_, dq_, dk_, dv_, f.scores};
    b.dlse = dlse_;
    b.dsinks = r.dsinks.view();
    b.dbias = r.dbias.view();
    backward(b, options);
  };
  if (c.sequence.cu_seqlens_q.empty()) {
    run(q.view(), k.view(), v.view(), r.o.view(), r.lse.view(), dout.view(), r.dq.view(), r.dk.view(), r.dv.view(), dlse.view());
    return r;
  }
  for (size_t s = 0; s + 1 < c.sequence.cu_seqlens_q.size(); ++s) {
    const int64_t a = c.sequence.cu_seqlens_q[s], m = c.sequence.cu_seqlens_q[s + 1] - a, b = c.sequence.cu_seqlens_k[s],
                  n = c.sequence.cu_seqlens_k[s + 1] - b;
    const auto of_q = [&](const Owned& t) { return detail::slice(t.view(), 1, a, m); };
    const auto of_k = [&](const Owned& t) { return detail::slice(t.view(), 1, b, n); };
    run(of_q(q), of_k(k), of_k(v), of_q(r.o), detail::slice(r.lse.view(), 2, a, m), of_q(dout), of_q(r.dq), of_k(r.dk), of_k(r.dv),
        c.dlse ? detail::slice(dlse.view(), 2, a, m) : Tensor());
    if (options.p_dropout > 0) reinterpret_cast<int64_t*>(state.memory.data())[1] += c.nheads;  // as of a batch entry
  }
  return r;
}

// Runs body(transport) as every rank of a case.
using Runner = std::function<void(const Case&, const std::function<void(RingTransport&)>&)>;
void by_threads(const Case& c, const std::function<void(RingTransport&)>& body) { run_ranks(c.ranks, c.late, body); }
void by_groups(const Case& c, const std::function<void(RingTransport&)>& body) {
  const GroupId id = new_group_id();
  for (const std::string& thrown : in_threads(c.ranks, [&](int rank) {
         HostGroup group(rank, c.ranks, id);
         body(group);
       }))
    if (!thrown.empty()) throw Error(ErrorCode::kInternal, thrown);
}

// All ranks, and their rows put together.
Results all_ranks(const Case& c, const Inputs& in, const Runner& run) {
  const DType out = c.fp32_out ? DType::kF32 : c.dtype;
  Results r{{c.dtype, in.dout.shape},
            {DType::kF32, {c.batch, c.nheads, c.sequence.seqlen_q}},
            {out, in.q.shape},
            {out, in.k.shape},
            {out, in.v.shape},
            {},
            {}};
  if (c.sinks) r.dsinks = Owned(DType::kF32, {c.nheads});
  for (int64_t i = 0; i < r.dsinks.size() && c.sinks; ++i) r.dsinks.set(i, 0);
  if (c.dbias) {
    r.dbias = Owned(c.dbias_fp32 || c.bias_shares[2] ? DType::kF32 : c.dtype, shape_of_pairs(c, c.bias_shares, c.sequence.seqlen_q));
    for (int64_t i = 0; i < r.dbias.size(); ++i) r.dbias.set(i, 0);
  }
  std::mutex mutex;
  run(c, [&](RingTransport& transport) {
    const RingSchedule held = ring_schedule(c.sequence, transport.rank(), transport.ranks());
    const Owned q = in.q.rows(1, held.held_q), k = in.k.rows(1, held.held_k), v = in.v.rows(1, held.held_k), dout = in.dout.rows(1, held.held_q);
    const Owned ids_q = c.documents ? in.document_q.rows(1, held.held_q) : Owned(),
                ids_k = c.documents ? in.document_k.rows(1, held.held_k) : Owned();
    const Owned dlse = c.dlse ? in.dlse.rows(2, held.held_q) : Owned();
    const Owned o(c.dtype, dout.shape), lse(DType::kF32, {c.batch, c.nheads, held.rows_q});
    const Owned dq(out, q.shape), dk(out, k.shape), dv(out, v.shape), dsinks(DType::kF32, {c.nheads});
    ForwardTensors f{q.view(), k.view(), v.view(), o.view(), lse.view(), {}};
    f.scores.document_q = ids_q.view();
    f.scores.document_k = ids_k.view();
    f.scores.sinks = in.sinks.view();
    const Owned bias = c.bias ? (c.bias_shares[2] ? in.bias : in.bias.rows(2, held.held_q)) : Owned();
    const Owned mask = c.mask ? (c.mask_shares[2] ? in.mask : in.mask.rows(2, held.held_q)) : Owned();
    const Owned dbias = c.dbias ? Owned(c.dbias_fp32 ? DType::kF32 : c.dtype, shape_of_pairs(c, c.bias_shares, held.rows_q)) : Owned();
    f.scores.alibi_slopes = in.slopes.view();
    f.scores.bias = bias.view();
    f.scores.mask = mask.view();
    f.scores.dropout_state = in.dropout_state.view();
    Options options = c.options;
    options.num_threads = 1;
    RingPlan forward(transport, c.sequence, f, options);
    std::vector<char> workspace(forward.workspace_bytes() + 256, 0x7f);
    const auto aligned = [&] { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256); };
    forward.execute(f, aligned(), forward.workspace_bytes());
    BackwardTensors b{q.view(), k.view(), v.view(), o.view(), lse.view(), dout.view(), dq.view(), dk.view(), dv.view(), f.scores};
    b.dlse = dlse.view();
    if (c.sinks) b.dsinks = dsinks.view();
    b.dbias = dbias.view();
    RingPlan backward(transport, c.sequence, b, options);
    workspace.assign(backward.workspace_bytes() + 256, 0x7f);
    backward.execute(b, aligned(), backward.workspace_bytes());
    const std::lock_guard lock(mutex);
    r.o.put_rows(1, held.held_q, o);
    r.lse.put_rows(2, held.held_q, lse);
    r.dq.put_rows(1, held.held_q, dq);
    r.dk.put_rows(1, held.held_k, dk);
    r.dv.put_rows(1, held.held_k, dv);
    for (int64_t i = 0; c.sinks && i < c.nheads; ++i) r.dsinks.set(i, r.dsinks.get(i) + dsinks.get(i));
    if (!c.dbias) return;
    if (!c.bias_shares[2]) return r.dbias.put_rows(2, held.held_q, dbias);
    for (int64_t i = 0; i < dbias.size(); ++i) r.dbias.set(i, r.dbias.get(i) + dbias.get(i));  // what this rank's rows give
  });
  return r;
}

double greatest(const Owned& t) {
  double most = 0;
  for (int64_t i = 0; i < t.size(); ++i)
    if (std::isfinite(t.get(i))) most = std::max(most, std::fabs(t.get(i)));
  return most;
}
// NaN is never close; infinities meet their like.
double error_of(const Owned& got, const Owned& wanted) {
  double most = 0;
  for (int64_t i = 0; i < wanted.size(); ++i) {
    const double a = got.get(i), b = wanted.get(i);
    if (a == b) continue;
    const double error = std::fabs(a - b);
    most = error <= most ? most : error;
    if (std::isnan(error)) return error;
  }
  return most;
}

// Squares of errors over many cases, each as a part of the tensor's largest number.
struct Squares {
  double ring = 0, one = 0;
};
using AllSquares = std::map<std::string, Squares>;

void expect_as_one(const Case& c, uint64_t seed, const std::string& what, AllSquares& squares, const Runner& run = by_threads) {
  const Inputs in = inputs_of(c, seed);
  const Results exact = one_call(c, in, DType::kF64), one = one_call(c, in, c.dtype), ring = all_ranks(c, in, run);
  const double epsilon = c.dtype == DType::kF32 ? 0x1p-23 : c.dtype == DType::kF16 ? 0x1p-10 : 0x1p-7;
  const auto compare = [&](const char* name, const Owned& got, const Owned& usual, const Owned& wanted, double unit) {
    if (wanted.shape.empty() || wanted.size() == 0) return;
    // One call may be lucky with so few elements: units in the last place of the largest number beside its error, of each rank's part half a one. The
    // squares of many cases are not lucky.
    const double most = greatest(wanted), allowed = 1.25 * error_of(usual, wanted) + (6 + 0.5 * c.ranks) * unit * most;
    // (Sums over all rows, which may be near 0, are held by these alone.)
    if (wanted.shape.size() > 1) {
      EXPECT_LE(error_of(got, wanted), allowed) << name << ", " << what;
    }
    EXPECT_FALSE(std::isnan(error_of(got, wanted))) << name << ", " << what;
    if (most == 0) return;
    Squares& sum = squares[std::string(name) + " " + fattn::name_of(c.dtype)];
    for (int64_t i = 0; i < wanted.size(); ++i) {
      if (!std::isfinite(wanted.get(i))) continue;
      sum.ring += std::pow((got.get(i) - wanted.get(i)) / most, 2) / static_cast<double>(wanted.size());
      sum.one += std::pow((usual.get(i) - wanted.get(i)) / most, 2) / static_cast<double>(wanted.size());
    }
  };
  compare("o", ring.o, one.o, exact.o, epsilon);
  compare("lse", ring.lse, one.lse, exact.lse, 0x1p-23);
  compare("dq", ring.dq, one.dq, exact.dq, epsilon);
  compare("dk", ring.dk, one.dk, exact.dk, epsilon);
  compare("dv", ring.dv, one.dv, exact.dv, epsilon);
  // Of one row each rank's part is rounded to its dtype.
  compare("dbias", ring.dbias, one.dbias, exact.dbias, c.dbias_fp32 ? 0x1p-23 : epsilon);
  if (c.sequence.cu_seqlens_q.empty()) compare("dsinks", ring.dsinks, one.dsinks, exact.dsinks, epsilon);
}

// Numbers of a random case.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(11, seed) {}
  int64_t up_to(int64_t most) { return static_cast<int64_t>(random_.uniform(at_++) * static_cast<double>(most + 1)); }
  bool one_of(int64_t n) { return up_to(n - 1) == 0; }

 private:
  Random random_;
  uint64_t at_ = 0;
};

Case random_case(uint64_t seed) {
  Draw draw(seed);
  constexpr int kRanks[] = {1, 2, 2, 3, 4, 8};
  Case c;
  c.ranks = kRanks[draw.up_to(5)];
  c.late = draw.one_of(2);
  c.sequence.layout = draw.one_of(2) ? RingLayout::kContiguous : RingLayout::kZigzag;
  c.sequence.seqlen_q = draw.one_of(12) ? draw.up_to(3) : 1 + draw.up_to(90);
  c.sequence.seqlen_k = draw.one_of(2) ? c.sequence.seqlen_q : draw.one_of(12) ? draw.up_to(3) : 1 + draw.up_to(90);
  c.options.causal = draw.one_of(2);
  if (draw.one_of(3)) {
    c.options.window_left = draw.one_of(4) ? -1 : draw.up_to(40);
    c.options.window_right = draw.one_of(2) ? -1 : draw.up_to(20);
  }
  if (draw.one_of(4)) c.options.softcap = 5;
  if (draw.one_of(4)) c.options.softmax_scale = 0.3;
  constexpr DType kDTypes[] = {DType::kF32, DType::kF32, DType::kBF16, DType::kF16};
  c.dtype = kDTypes[draw.up_to(3)];
  c.batch = 1 + draw.up_to(1);
  c.nheads_k = 1 + draw.up_to(1);
  c.nheads = c.nheads_k * (1 + draw.up_to(1));
  c.headdim = 8 + 8 * draw.up_to(2);
  c.headdim_v = draw.one_of(3) ? 24 : c.headdim;
  c.documents = draw.one_of(4);
  c.sinks = draw.one_of(4);
  c.dlse = draw.one_of(3);
  c.fp32_out = draw.one_of(4);
  if (!c.documents && draw.one_of(4)) {
    c.batch = 1;
    int64_t total_q = 0, total_k = 0;
    c.sequence.cu_seqlens_q = c.sequence.cu_seqlens_k = {0};
    for (int64_t n = 1 + draw.up_to(4); n > 0; --n) {
      total_q += draw.up_to(30);
      total_k += draw.up_to(30);
      c.sequence.cu_seqlens_q.push_back(total_q);
      c.sequence.cu_seqlens_k.push_back(total_k);
    }
    c.sequence.seqlen_q = total_q;
    c.sequence.seqlen_k = total_k;
  }
  const bool packed = !c.sequence.cu_seqlens_q.empty();
  if (draw.one_of(3)) c.alibi = 1 + static_cast<int>(draw.up_to(1));
  if (draw.one_of(3)) c.options.p_dropout = 0.25;
  const auto shares = [&] { return std::array{draw.one_of(2), draw.one_of(2), draw.one_of(3)}; };
  c.bias_shares = shares();
  c.mask_shares = shares();
  if (!packed && draw.one_of(4)) c.bias = true, c.bias_fp32 = draw.one_of(2);
  if (!packed && draw.one_of(4)) c.mask = true;
  if (!packed && draw.one_of(c.bias ? 2 : 8)) c.dbias = true, c.dbias_fp32 = draw.one_of(2);
  if (c.options.p_dropout > 0 && draw.one_of(2)) {  // several blocks of random numbers
    for (int64_t* x : {&c.sequence.seqlen_q, &c.sequence.seqlen_k}) *x *= 3;
    for (auto* list : {&c.sequence.cu_seqlens_q, &c.sequence.cu_seqlens_k})
      for (int64_t& x : *list) x *= 3;
  }
  return c;
}

std::string name_of(const Case& c) {
  const Options& o = c.options;
  return std::to_string(c.ranks) + " ranks, " + (c.sequence.layout == RingLayout::kZigzag ? "zigzag " : "contiguous ") +
         std::to_string(c.sequence.seqlen_q) + " x " + std::to_string(c.sequence.seqlen_k) + (o.causal ? ", causal" : "") + ", window " +
         std::to_string(o.window_left) + " " + std::to_string(o.window_right) + (o.softcap > 0 ? ", softcap" : "") + ", " + fattn::name_of(c.dtype) +
         ", batch " + std::to_string(c.batch) + ", heads " + std::to_string(c.nheads) + "/" + std::to_string(c.nheads_k) + ", " +
         std::to_string(c.headdim) + "/" + std::to_string(c.headdim_v) + (c.documents ? ", documents" : "") + (c.sinks ? ", sinks" : "") +
         (c.dlse ? ", dlse" : "") + (c.fp32_out ? ", fp32 gradients" : "") + (c.sequence.cu_seqlens_q.empty() ? "" : ", packed") +
         (c.alibi > 0 ? ", ALiBi of " + std::to_string(c.alibi) + " dimensions" : "") + (o.p_dropout > 0 ? ", dropout" : "") +
         (c.bias ? ", bias" : "") + (c.mask ? ", mask" : "") + (c.dbias ? ", dbias" : "") + (c.late ? ", late" : "");
}

void expect_range(uint64_t begin, uint64_t end, AllSquares& squares, const Runner& run = by_threads) {
  for (uint64_t seed = begin; seed < end; ++seed) {
    const Case c = random_case(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_NO_THROW(expect_as_one(c, 100 * seed, name_of(c), squares, run));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(RingAttentionSmall, AsOneProcess) {
  AllSquares squares;
  expect_range(0, 40, squares);
}

TEST(RingAttention, SquaresOfErrorsAreThoseOfOneProcess) {
  AllSquares squares;
  expect_range(40, 340, squares);
  EXPECT_GE(squares.size(), 15u);
  // What ranks have of the gradients of sinks is rounded before it is added.
  for (const auto& [what, x] : squares) EXPECT_LE(std::sqrt(x.ring / x.one), what == "dsinks fp32" ? 1.6 : 1.25) << what;
}

// Rank 1 has blocks of one shape on both sides: tables of their ALiBi have other lengths, and plans other strides.
TEST(RingAttentionSmall, AlibiOfBothSides) {
  AllSquares squares;
  Case c;
  c.sequence = {200, 200, RingLayout::kContiguous, {}, {}, true};
  c.ranks = 4, c.alibi = 1;
  expect_as_one(c, 3, name_of(c), squares);
}

// Rows of keys longer than what is summed at once, parts that begin between random numbers, and all that scores depend on.
TEST(RingAttention, LongRowsOfPairs) {
  AllSquares squares;
  for (const bool shared : {false, true}) {
    Case c;
    c.sequence = {300, 2100, RingLayout::kContiguous, {}, {}, true};
    c.options.p_dropout = 0.25;
    c.options.window_left = 1700;
    c.batch = c.alibi = 2;
    c.bias = c.mask = c.dbias = c.dlse = true;
    c.bias_fp32 = c.dbias_fp32 = shared;
    c.bias_shares = c.mask_shares = {shared, !shared, shared};
    expect_as_one(c, 5, name_of(c), squares);
  }
}

TEST(RingAttentionSmall, OverGroups) {
  AllSquares squares;
  expect_range(1000, 1010, squares, by_groups);
}

}  // namespace
}  // namespace fattn::testing

// Read when NCCL is first wanted.
const int fattn_nccl_is_the_stub = setenv("FATTN_NCCL", FATTN_STUB_NCCL_PATH, 1);
