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
#include "ring_of_threads.h"
#include "testing/numbers.h"
#include "testing/random.h"

namespace fattn::testing {
namespace {

// A contiguous tensor of a dtype in memory of its own.
struct Owned {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<char> memory;

  Owned() = default;
  Owned(DType of, std::vector<int64_t> sizes) : dtype(of), shape(std::move(sizes)), memory(static_cast<size_t>(size()) * size_of(of), 0x7f) {}
  int64_t size() const {
    int64_t n = 1;
    for (const int64_t x : shape) n *= x;
    return n;
  }
  Tensor view() const {
    if (shape.empty()) return {};
    const void* data = memory.data();
    const auto& n = shape;
    return n.size() == 4   ? Tensor(data, dtype, {n[0], n[1], n[2], n[3]})
           : n.size() == 3 ? Tensor(data, dtype, {n[0], n[1], n[2]})
           : n.size() == 2 ? Tensor(data, dtype, {n[0], n[1]})
                           : Tensor(data, dtype, {n[0]});
  }
  double get(int64_t i) const { return load(dtype, memory.data(), i); }
  void set(int64_t i, double x) { store(dtype, memory.data(), i, x); }
  void copy_row(int64_t to, const Owned& other, int64_t from, int64_t count) {
    const size_t size = size_of(dtype);
    std::copy_n(other.memory.data() + static_cast<size_t>(from) * size, static_cast<size_t>(count) * size,
                memory.data() + static_cast<size_t>(to) * size);
  }
  Owned as(DType other) const {
    Owned to(other, shape);
    for (int64_t i = 0; i < size(); ++i) to.set(i, get(i));
    return to;
  }
  // Positions of a dimension, in the order of the ranges.
  Owned rows(int dim, const std::vector<fattn_ring_range>& ranges) const {
    Owned to = *this;
    int64_t count = 0, outer = 1, inner = 1;
    for (const fattn_ring_range& r : ranges) count += r.count;
    for (int i = 0; i < dim; ++i) outer *= shape[static_cast<size_t>(i)];
    for (size_t i = static_cast<size_t>(dim) + 1; i < shape.size(); ++i) inner *= shape[i];
    const int64_t length = shape[static_cast<size_t>(dim)];
    to.shape[static_cast<size_t>(dim)] = count;
    to.memory.assign(static_cast<size_t>(to.size()) * size_of(dtype), 0x7f);
    for (int64_t n = 0; n < outer; ++n) {
      int64_t row = 0;
      for (const fattn_ring_range& r : ranges)
        for (int64_t i = 0; i < r.count; ++i, ++row) to.copy_row((n * count + row) * inner, *this, (n * length + r.first + i) * inner, inner);
    }
    return to;
  }
  // The way back: rows of `from` go where the ranges say.
  void put_rows(int dim, const std::vector<fattn_ring_range>& ranges, const Owned& from) {
    int64_t outer = 1, inner = 1;
    for (int i = 0; i < dim; ++i) outer *= shape[static_cast<size_t>(i)];
    for (size_t i = static_cast<size_t>(dim) + 1; i < shape.size(); ++i) inner *= shape[i];
    const int64_t length = shape[static_cast<size_t>(dim)], count = from.shape[static_cast<size_t>(dim)];
    for (int64_t n = 0; n < outer; ++n) {
      int64_t row = 0;
      for (const fattn_ring_range& r : ranges)
        for (int64_t i = 0; i < r.count; ++i, ++row) copy_row((n * length + r.first + i) * inner, from, (n * count + row) * inner, inner);
    }
  }
};

Owned normal(DType dtype, std::vector<int64_t> shape, uint64_t stream) {
  Owned t(dtype, std::move(shape));
  const Random random(7, stream);
  for (int64_t i = 0; i < t.size(); ++i) t.set(i, random.normal(static_cast<uint64_t>(i)));
  return t;
}

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

// Rows of keys longer than what is summed at once, parts that begin between random numbers, and all that scores depend on.
TEST(RingAttention, LongRowsOfPairs) {
  AllSquares squares;
  for (const bool shared : {false, true}) {
    Case c;
    c.sequence = {300, 2100, RingLayout::kContiguous, {}, {}, true};
    c.options.p_dropout = 0.25;
    c.options.window_left = 1700;
    c.batch = 2;
    c.alibi = 2;
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

// A plan of the forward pass on `rows` rows of q beside the rank's, and what it says.
void plan(RingTransport& transport, const RingSequence& sequence, const Options& options, int64_t more_rows = 0, DType dtype = DType::kF32) {
  const RingSchedule held = ring_schedule(sequence, transport.rank(), transport.ranks());
  const Owned q(dtype, {1, held.rows_q + more_rows, 2, 8}), k(dtype, {1, held.rows_k, 1, 8});
  const RingPlan made(transport, sequence, ForwardTensors{q.view(), k.view(), k.view(), q.view(), {}, {}}, options);
}

TEST(RingAttentionSmall, WhatDiffersIsNamedOnAllRanks) {
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 30;
  const auto thrown_by = [&](const std::function<void(RingTransport&)>& body) {
    Mailboxes boxes;
    return in_threads(3, [&](int rank) {
      ThreadTransport transport(boxes, rank, 3, false);
      body(transport);
    });
  };
  const auto expect_all = [](const std::vector<std::string>& thrown, const std::string& wanted) {
    for (const std::string& text : thrown) EXPECT_NE(text.find(wanted), std::string::npos) << text;
  };
  expect_all(thrown_by([&](RingTransport& t) {
               Options options;
               options.window_left = t.rank() == 1 ? 3 : 4;
               plan(t, sequence, options);
             }),
             "window_left is 3 on rank 1 and 4 on rank 0; all ranks must plan the same ring attention");
  expect_all(thrown_by([&](RingTransport& t) { plan(t, sequence, {}, 0, t.rank() == 2 ? DType::kBF16 : DType::kF32); }),
             "dtype is bf16 on rank 2 and fp32 on rank 0");
  expect_all(thrown_by([&](RingTransport& t) {
               RingSequence other = sequence;
               other.seqlen_k = t.rank() == 2 ? 29 : 30;
               plan(t, other, {});
             }),
             "seqlen_k is 29 on rank 2 and 30 on rank 0");
  const std::vector<std::string> one = thrown_by([&](RingTransport& t) { plan(t, sequence, {}, t.rank() == 1 ? 1 : 0); });
  EXPECT_EQ(one[1].find("q has 11 rows; rank 1 of 3 holds 10"), 0u) << one[1];
  for (const size_t rank : {0, 2}) EXPECT_EQ(one[rank].find("arguments is q has 11 rows; rank 1 of 3 holds 10"), 0u) << one[rank];
}

TEST(RingAttentionSmall, WhatIsRefused) {
  Mailboxes boxes;
  ThreadTransport transport(boxes, 0, 1, false);
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 4;
  const Owned q(DType::kF32, {1, 4, 2, 8}), ids(DType::kI32, {1, 4}), one_slope(DType::kF32, {1}), four(DType::kI64, {4}),
      pairs(DType::kF32, {1, 1, 1, 3}), other_kind(DType::kF32, {1, 1, 1, 4});
  const auto said = [&](const std::function<void(ForwardTensors&, Options&)>& change) -> std::string {
    ForwardTensors t{q.view(), q.view(), q.view(), q.view(), {}, {}};
    Options options;
    change(t, options);
    try {
      const RingPlan made(transport, sequence, t, options);
      return "";
    } catch (const Error& e) {
      return e.what();
    }
  };
  const auto expect = [](const std::string& text, const std::string& wanted) { EXPECT_NE(text.find(wanted), std::string::npos) << text; };
  EXPECT_EQ(said([](ForwardTensors&, Options&) {}), "");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.seqused_k = ids.view(); }),
         "ring attention in C++ has no lengths of keys (seqused_k); it has causal masks");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.alibi_slopes = one_slope.view(); }),
         "alibi_slopes is not fp32 (nheads) or (batch, nheads)");
  expect(said([](ForwardTensors&, Options& o) { o.p_dropout = 0.5; }), "p_dropout is 0.5");
  expect(said([&](ForwardTensors& t, Options& o) {
           o.p_dropout = 0.5;
           t.scores.dropout_state = four.view();
         }),
         "dropout_state is not two int64 side by side");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.bias = pairs.view(); }),
         "bias is not (batch or 1, nheads or 1, rows or 1, keys of all ranks), here 1, 2, 4 and 4");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.mask = other_kind.view(); }), "mask is fp32; allowed: u8");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.document_q = ids.view(); }), "document_q and document_k belong together");
  for (const Tensor& bad : {Tensor(ids.view().data(), DType::kI64, {1, 4}), Tensor(ids.view().data(), DType::kI32, {1, 4}, {8, 2}),
                            Tensor(ids.view().data(), DType::kI32, {2, 4})})
    expect(said([&](ForwardTensors& t, Options&) {
             t.scores.document_q = bad;
             t.scores.document_k = ids.view();
           }),
           "document_q is not int32 (batch, rows), here a batch of 1, with rows side by side");
  expect(said([&](ForwardTensors& t, Options&) { t.v = {}; }), "q, k, v or o is absent");
  expect(said([&](ForwardTensors& t, Options&) {
           t.k = Tensor(q.view().data(), DType::kF32, {1, 4, 2, 8}, {64, 8, 32, 1});
         }),
         "k has a stride of 32 in dimension 2; its rows travel, and must lie behind each other without gaps (8)");
  expect(said([&](ForwardTensors& t, Options&) {
           t.q = t.k = t.v = t.o = Tensor(q.view().data(), DType::kF64, {1, 4, 2, 8});
         }),
         "ring attention in C++ takes fp32");
  const Owned sinks(DType::kF16, {2}), one_sink(DType::kF32, {1}), narrow(DType::kF32, {1, 4, 2, 4}), half(DType::kF16, {1, 4, 2, 8}),
      lse(DType::kF32, {1, 2, 4});
  expect(said([&](ForwardTensors& t, Options&) { t.scores.sinks = sinks.view(); }), "sinks is not fp32 (nheads); q has 2 heads");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.sinks = one_sink.view(); }), "sinks is not fp32 (nheads); q has 2 heads");
  expect(said([&](ForwardTensors& t, Options&) { t.o = narrow.view(); }),
         "o has batch 1, 2 heads of 4; expected batch 1, 2 heads of 8, from q and v");
  expect(said([&](ForwardTensors& t, Options&) { t.o = half.view(); }), "o is fp16 and q fp32; allowed: q's dtype");
  expect(said([&](ForwardTensors& t, Options&) { t.o = t.o.on(Device::kCuda, 0, q.view().data()); }), "o and q are on different devices");
  expect(said([](ForwardTensors&, Options& o) { o.softcap = -1; }), "softcap is -1");
  expect(said([&](ForwardTensors& t, Options&) { t.scores.alibi_slopes = Tensor(lse.view().data(), DType::kF32, {2}, {-1}); }),
         "alibi_slopes has a negative stride");
}

// What the plan reads by itself, before any block's call looks at it.
TEST(RingAttentionSmall, TensorsWithoutMemoryAreRefused) {
  Mailboxes boxes;
  ThreadTransport transport(boxes, 0, 1, false);
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 4;
  const Owned q(DType::kF32, {1, 4, 2, 8}), state(DType::kI64, {2});
  ForwardTensors t{q.view(), q.view(), q.view(), q.view(), {}, {}};
  t.scores.dropout_state = state.view();
  Options options;
  options.p_dropout = 0.5;
  RingPlan plan(transport, sequence, t, options);
  std::vector<char> memory(static_cast<size_t>(plan.workspace_bytes()) + 256);
  void* const workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  t.scores.dropout_state = Tensor(nullptr, DType::kI64, {2}).on(Device::kCpu, 0, nullptr);
  try {
    plan.execute(t, workspace, static_cast<size_t>(plan.workspace_bytes()));
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("dropout_state has elements and no memory"), std::string::npos) << e.what();
  }
}

TEST(RingAttentionSmall, BackwardTensorsOfOtherKindsAreRefused) {
  Mailboxes boxes;
  ThreadTransport transport(boxes, 0, 1, false);
  RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = 4;
  const Owned q(DType::kF32, {1, 4, 2, 8}), half(DType::kF16, {1, 4, 2, 8}), lse(DType::kF32, {1, 2, 4}), ids(DType::kI32, {1, 4});
  BackwardTensors t{q.view(), q.view(), q.view(), q.view(), lse.view(), q.view(), q.view(), half.view(), q.view()};
  const auto said = [](const std::function<void()>& call) -> std::string {
    try {
      call();
      return "";
    } catch (const Error& e) {
      return e.what();
    }
  };
  EXPECT_NE(said([&] { RingPlan(transport, sequence, t, {}); }).find("dk is fp16 and q fp32; allowed: q's dtype"), std::string::npos);
  const Owned k = normal(DType::kF32, {1, 4, 2, 8}, 1), o(DType::kF32, {1, 4, 2, 8});
  ForwardTensors f{k.view(), k.view(), k.view(), o.view(), {}, {}};
  RingPlan plan(transport, sequence, f, {});
  std::vector<char> memory(plan.workspace_bytes() + 512);
  char* const workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  const char* const other = "these tensors are not as the plan was made for";
  f.scores.document_q = f.scores.document_k = ids.view();
  EXPECT_NE(said([&] { plan.execute(f, workspace, plan.workspace_bytes()); }).find(other), std::string::npos);
  f.scores = {};
  t.dk = q.view();
  EXPECT_NE(said([&] { plan.execute(t, workspace, plan.workspace_bytes()); }).find(other), std::string::npos);
  EXPECT_NE(said([&] { plan.execute(f, workspace + 4, plan.workspace_bytes()); }).find("the workspace is not aligned to 256 bytes"),
            std::string::npos);
  EXPECT_NE(said([&] { plan.execute(f, workspace, 16); }).find("the workspace has 16 bytes; the plan needs "), std::string::npos);
  plan.execute(f, workspace, plan.workspace_bytes());
}

// Of a call that threw in the middle nothing is left in the way of the next.
TEST(RingAttentionSmall, AfterACallThatThrew) {
  Case c;
  c.sequence.seqlen_q = c.sequence.seqlen_k = 24;
  c.ranks = 2;
  const Inputs in = inputs_of(c, 5);
  const Results one = one_call(c, in, c.dtype);
  std::mutex mutex;
  Owned together(c.dtype, in.dout.shape);
  run_ranks(2, false, [&](RingTransport& transport) {
    const RingSchedule held = ring_schedule(c.sequence, transport.rank(), 2);
    const Owned q = in.q.rows(1, held.held_q), k = in.k.rows(1, held.held_k), v = in.v.rows(1, held.held_k), o(c.dtype, q.shape);
    ForwardTensors f{q.view(), k.view(), v.view(), o.view(), {}, {}};
    RingPlan plan(transport, c.sequence, f, c.options);
    std::vector<char> memory(plan.workspace_bytes() + 256);
    void* const workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    ForwardTensors bad = f;
    bad.o = Tensor(nullptr, c.dtype, {1, held.rows_q, c.nheads, c.headdim_v});  // found when the keys are on their way
    EXPECT_THROW(plan.execute(bad, workspace, plan.workspace_bytes()), Error);
    plan.execute(f, workspace, plan.workspace_bytes());
    const std::lock_guard lock(mutex);
    together.put_rows(1, held.held_q, o);
  });
  EXPECT_LT(error_of(together, one.o), 1e-5);
}

TEST(RingAttentionSmall, AGroupNamesWhoIsGone) {
  const GroupId id = new_group_id();
  char sent[8] = {}, received[8] = {};
  const std::vector<std::string> thrown = in_threads(2, [&](int rank) {
    HostGroup group(rank, 2, id, 0.5);
    if (rank == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    group.begin({{sent, 8, 1, true}, {received, 8, 1, false}}, nullptr);
    group.finish(nullptr);
  });
  EXPECT_EQ(thrown[1], "");
  EXPECT_NE(thrown[0].find("rank 0 of 2 has waited 0.5 seconds for rank 1 to exchange, which has ended, hangs"), std::string::npos) << thrown[0];
}

TEST(RingAttentionSmall, AGroupRefusesWhatMakesNoSense) {
  const auto said = [](const std::function<void()>& call) -> std::string {
    try {
      call();
      return "";
    } catch (const Error& e) {
      return e.what();
    }
  };
  const auto expect = [](const std::string& text, const std::string& wanted) { EXPECT_NE(text.find(wanted), std::string::npos) << text; };
  Group alone;  // needs no NCCL
  alone.begin({}, nullptr);
  alone.finish(nullptr);
  alone.settle();
  char byte = 0;
  expect(said([&] { alone.finish(nullptr); }), "finish without a begin before it");
  expect(said([&] { alone.begin({{&byte, 1, 0, true}}, nullptr); }), "a piece's peer is 0; allowed: another rank");
  alone.begin({}, nullptr);
  expect(said([&] { alone.settle(); }), "1 begun and not finished");
  alone.finish(nullptr);
  const GroupId id = new_group_id();
  expect(said([&] { HostGroup(2, 2, id); }), "rank is 2 and nranks 2; allowed: 0 <= rank < nranks");
  expect(said([&] { HostGroup(0, 2, id, -1); }), "timeout is -1 seconds; allowed: more than 0");
  expect(said([&] { HostGroup(0, 2, id, 0.2); }), "rank 0 of 2 has waited 0.2 seconds for all ranks to join the group");
}

}  // namespace
}  // namespace fattn::testing

// Read when NCCL is first wanted.
const int fattn_nccl_is_the_stub = setenv("FATTN_NCCL", FATTN_STUB_NCCL_PATH, 1);
