// The operations on a GPU against the reference in float64. Skipped without a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "fattn/error.hpp"
#include "gpu_fixture.h"
#include "ops/ops.h"
#include "ops_array.h"
#include "ops_on_device.h"

namespace fattn {
namespace {

using namespace ops;
using test::Array;
using test::expect_near;
using test::kGpu;
using test::kReference;
using test::OnDevice;
using test::run;
using test::sums_error;
using test::unit_of;

Array packed(const Linear& p, const ops::Device& on, const Array& weight, bool in_by_out) {
  Array to(p.dtype, packed_bytes(p, on) / size_of(p.dtype));
  pack(p, on, weight.as<void>(), in_by_out, p.out, to.as<void>());
  return to;
}

class OpsGpu : public test::CudaGpu, public testing::WithParamInterface<DType> {
 protected:
  DType dtype() const { return GetParam(); }

  Array linear(const Linear& p, const Array& x, const Array& weight, bool in_by_out, const Array* bias, Array y, int64_t rows) {
    const OnDevice dx(x), dw(packed(p, kGpu, weight, in_by_out)), db(bias ? *bias : x), dy(y);
    run(p, kGpu, {rows, dx.get(), dw.get(), bias ? db.get() : nullptr, dy.get()});
    dy.read(y);
    return y;
  }
};
INSTANTIATE_TEST_SUITE_P(Every, OpsGpu, testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& one) { return std::string(name_of(one.param)); });

TEST_P(OpsGpu, Linear) {
  struct Shape {
    int64_t rows, in, out;
  };
  for (const auto& [rows, in, out] : {Shape{1, 40, 130},
                                      {1, 768, 768},
                                      {3, 768, 2304},
                                      {16, 3072, 768},
                                      {8, 33, 64},
                                      {9, 100, 50},
                                      {6, 1, 1},
                                      {2, 6400, 1600},
                                      {16, 768, 20000},
                                      {1, 1600, 4800},
                                      {33, 768, 3072},
                                      {64, 3072, 768},
                                      {17, 768, 768},
                                      {101, 401, 70},
                                      {300, 96, 384}}) {
    const Array x(dtype(), static_cast<size_t>(rows * in), 1), bias(dtype(), static_cast<size_t>(out), 2);
    const Array weight(dtype(), static_cast<size_t>(in * out), 3, 1 / std::sqrt(static_cast<double>(in)));
    for (const Activation activation : {Activation::kNone, Activation::kGeluTanh, Activation::kGelu})
      for (const int y : {0, 1, 2}) {  // in the dtype, in fp32, added
        if (y == 2 && activation != Activation::kNone) continue;
        // Each kernel is compiled: what they share is looked at in some shapes.
        const bool all = in == 40 || in == 401 || in == 96;
        if (!all && (activation == Activation::kGelu || (activation == Activation::kGeluTanh) != (in == 768 && out == 2304) || y == 1)) continue;
        const Linear p{rows, in, out, dtype(), y > 0 ? DType::kF32 : dtype(), activation, y == 2};
        const bool in_by_out = activation == Activation::kNone;
        const Array before(p.y, static_cast<size_t>(rows * out), 4);
        Array expected = before;
        const Array plain = packed(p, kReference, weight, in_by_out);
        run(p, kReference, {rows, x.as<void>(), plain.as<void>(), bias.as<void>(), expected.as<void>()});
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(in) + " x " + std::to_string(out) + ", activation " +
                     std::to_string(static_cast<int>(activation)) + ", y " + std::to_string(y));
        // Where the library has not the activation, it is applied to a rounded number.
        const double rounded = activation == Activation::kGelu && y == 0 ? 4 * unit_of(dtype()) : 0;
        expect_near(linear(p, x, weight, in_by_out, &bias, before, rows), expected, sums_error(in) + rounded);
      }
  }
}

// Neither company changes a bit of a row, as far as rows_alike() says.
TEST_P(OpsGpu, ARowDependsOnItselfAlone) {
  const int64_t in = 400, out = 150;
  const Linear p{16, in, out, dtype(), DType::kF32};
  const int64_t rows = rows_alike(p, kGpu);
  ASSERT_GE(rows, 8);
  const Array x(dtype(), static_cast<size_t>(rows * in), 1), bias(dtype(), out, 2), weight(dtype(), in * out, 3, 0.05);
  const Array none(DType::kF32, static_cast<size_t>(rows * out));
  const Array all = linear(p, x, weight, false, &bias, none, rows);
  for (int64_t row = 0; row < rows; ++row) {
    Array one(dtype(), in);
    std::memcpy(one.as<char>(), x.as<char>() + static_cast<size_t>(row * in) * size_of(dtype()), in * size_of(dtype()));
    const Array alone = linear(p, one, weight, false, &bias, none, 1);
    EXPECT_EQ(std::memcmp(alone.as<float>(), all.as<float>() + row * out, out * sizeof(float)), 0) << "row " << row;
  }
}

TEST_P(OpsGpu, LayerNormAndResidual) {
  for (const int64_t width : {int64_t{77}, int64_t{768}, int64_t{1600}, int64_t{5000}, int64_t{2049}}) {
    const int64_t rows = 19;
    const auto n = static_cast<size_t>(rows * width), w = static_cast<size_t>(width);
    const Array delta(dtype(), n, 1), weight(dtype(), w, 2), bias(dtype(), w, 3);
    for (const bool add : {false, true}) {
      const LayerNorm p{rows, width, 1e-5, dtype(), add};
      const std::vector<int32_t> select{4, 18, 0};
      const int64_t count = add ? rows : 3;
      Array x(DType::kF32, n, 4, 3), y(dtype(), n), got_x = x, got(dtype(), n);
      const OnDevice dx(x), dd(delta), dw(weight), db(bias), dy(got), ds(select);
      run(p, kReference, {count, x.as<float>(), delta.as<void>(), add ? nullptr : select.data(), weight.as<void>(), bias.as<void>(), y.as<void>()});
      run(p, kGpu, {count, dx.as<float>(), dd.get(), add ? nullptr : ds.as<int32_t>(), dw.get(), db.get(), dy.get()});
      dy.read(got);
      dx.read(got_x);
      expect_near(got, y, 6e-6);
      expect_near(got_x, x, 0);
    }
  }
}

TEST_P(OpsGpu, NormAndProductInOne) {
  for (const int64_t rows : {int64_t{1}, int64_t{5}, int64_t{16}, int64_t{40}, int64_t{64}})
    for (const int what : {0, 1, 2, 3}) {  // alone; with GELU; to the cache; rotary, too
      const int64_t in = 96, heads = 3, kv_heads = 2, headdim = 32, out = what < 2 ? 200 : (heads + 2 * kv_heads) * headdim;
      NormLinear p;
      p.linear = {rows, in, out, dtype(), what == 0 ? DType::kF32 : dtype(), what == 1 ? Activation::kGeluTanh : Activation::kNone};
      if (what >= 2) p.nheads = heads, p.nheads_k = kv_heads, p.headdim = headdim, p.rotary = what == 3;
      const auto size = [](int64_t n) { return static_cast<size_t>(n); };
      const Array x(DType::kF32, size(64 * in), 1, 2), nw(dtype(), size(in), 2), nb(dtype(), size(in), 3), bias(dtype(), size(out), 4);
      const Array weight(dtype(), size(in * out), 5, 0.1), normed(dtype(), size(rows * in));
      std::vector<int32_t> select, position;
      std::vector<int64_t> slot;
      for (int64_t r = 0; r < rows; ++r) {
        select.push_back(static_cast<int32_t>(r * 7 % 50));
        position.push_back(static_cast<int32_t>(r * 31));
        slot.push_back((r * 11 + 3) % 80);
      }
      Array y(p.linear.y, size(rows * out)), k(dtype(), size(80 * kv_heads * headdim)), v = k, got_y = y, got_k = k, got_v = v;
      const Array plain = packed(p.linear, kReference, weight, false);
      const OnDevice dx(x), dnw(nw), dnb(nb), db(bias), dw(packed(p.linear, kGpu, weight, false)), dn(normed), dy(y), dk(k), dv(v), ds(select),
          dp(position), dsl(slot);
      run(p, kReference,
          {rows, x.as<float>(), select.data(), nw.as<void>(), nb.as<void>(), normed.as<void>(), plain.as<void>(), bias.as<void>(), y.as<void>(),
           position.data(), slot.data(), k.as<void>(), v.as<void>()});
      run(p, kGpu,
          {rows, dx.as<float>(), ds.as<int32_t>(), dnw.get(), dnb.get(), dn.get(), dw.get(), db.get(), dy.get(), dp.as<int32_t>(), dsl.as<int64_t>(),
           dk.get(), dv.get()});
      dy.read(got_y);
      dk.read(got_k);
      dv.read(got_v);
      SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(what));
      // A normalised number that is rounded to the other neighbour changes a sum by 0.1 of its unit.
      const double allowed = 2e-5 + (dtype() == DType::kF32 ? 0 : 8 * unit_of(dtype()));
      for (int64_t r = 0; what >= 2 && r < rows; ++r)  // of k and v y need have nothing
        for (int64_t o = heads * headdim; o < out; ++o) y.set(size(r * out + o), 0), got_y.set(size(r * out + o), 0);
      expect_near(got_y, y, allowed);
      expect_near(got_k, k, allowed);
      expect_near(got_v, v, allowed);
      if (what >= 2) {
        EXPECT_NE(got_k.at(size(3 * kv_heads * headdim)), 0);
      }
    }
}

TEST_P(OpsGpu, EmbeddingKeysAndValues) {
  const Array tokens(dtype(), 11 * 50, 1), positions(dtype(), 9 * 50, 2);
  const std::vector<int32_t> ids{10, 0, 3}, position{8, 0, 7};
  for (const bool table : {true, false}) {
    const Embedding p{3, 50, 11, table ? 9 : 0, dtype()};
    Array out(DType::kF32, 150), got = out;
    const OnDevice dt(tokens), dp(positions), di(ids), dpos(position), dout(got);
    run(p, kReference, {3, ids.data(), position.data(), tokens.as<void>(), positions.as<void>(), out.as<float>()});
    run(p, kGpu, {3, di.as<int32_t>(), dpos.as<int32_t>(), dt.get(), dp.get(), dout.as<float>()});
    dout.read(got);
    expect_near(got, out, 0);
  }
  const std::vector<int32_t> bad{11, -1, 3};
  const OnDevice dt(tokens), dp(positions), di(bad), dpos(position), dout(Array(DType::kF32, 150));
  run(Embedding{3, 50, 11, 9, dtype()}, kGpu, {3, di.as<int32_t>(), dpos.as<int32_t>(), dt.get(), dp.get(), dout.as<float>()});
  const std::vector<float> read = dout.numbers<float>(150);
  EXPECT_TRUE(std::isnan(read[0]) && std::isnan(read[99]) && !std::isnan(read[100]));

  const std::vector<int64_t> slots{5, -1, 2}, known{5, 0, 2};
  const std::vector<int32_t> far{100000, 0, 7};
  for (const int64_t headdim : {int64_t{6}, int64_t{64}}) {
    const auto n = static_cast<size_t>(headdim);
    Array qkv(dtype(), 3 * 4 * n, 5), k(dtype(), 6 * n), v = k, got_qkv = qkv, got_k = k, got_v = v;
    const OnDevice dq(qkv), dk(k), dv(v), ds(slots), dfar(far);
    const KeysValues p{3, 2, 1, headdim, dtype(), true, 10000};
    run(p, kReference, {3, qkv.as<void>(), far.data(), known.data(), k.as<void>(), v.as<void>()});
    run(p, kGpu, {3, dq.get(), dfar.as<int32_t>(), ds.as<int64_t>(), dk.get(), dv.get()});
    dq.read(got_qkv);
    dk.read(got_k);
    dv.read(got_v);
    for (size_t i = 0; i < n; ++i) k.set(i, 0), v.set(i, 0);  // a negative slot: nowhere
    expect_near(got_qkv, qkv, 3e-6);
    expect_near(got_k, k, 3e-6);
    expect_near(got_v, v, 0);
  }
}

TEST_P(OpsGpu, CrossEntropy) {
  for (const auto& [rows, vocab] : {std::pair<int64_t, int64_t>{99, 2100}, {5, 20000}, {1100, 8200}}) {
    const int64_t width = 31;
    const Array x(dtype(), static_cast<size_t>(rows * width), 1), weight(dtype(), static_cast<size_t>(vocab * width), 2, 0.5);
    std::vector<int32_t> target(static_cast<size_t>(rows), static_cast<int32_t>(vocab - 1));
    target[0] = -1, target[1] = 0;
    Array loss(DType::kF32, static_cast<size_t>(rows)), lse = loss, got = loss, got_lse = loss;
    const Linear head{rows, width, vocab, dtype()};
    const CrossEntropy p{rows, width, vocab, dtype()};
    const Array plain = packed(head, kReference, weight, false);
    const OnDevice dx(x), dw(packed(head, kGpu, weight, false)), dt(target), dl(loss), dlse(lse);
    run(p, kReference, {rows, x.as<void>(), plain.as<void>(), target.data(), loss.as<float>(), lse.as<float>()});
    run(p, kGpu, {rows, dx.get(), dw.get(), dt.as<int32_t>(), dl.as<float>(), dlse.as<float>()});
    dl.read(got);
    dlse.read(got_lse);
    EXPECT_EQ(got.at(0), 0);
    expect_near(got, loss, 4e-5);
    expect_near(got_lse, lse, 4e-5);
  }
}

class SamplingGpu : public test::CudaGpu {
 protected:
  // Tokens of the reference and of the device.
  static std::pair<std::vector<int32_t>, std::vector<int32_t>> draw(const Sampling& p, const Array& logits, std::vector<Choice> choices,
                                                                    const std::vector<int32_t>& seen) {
    std::vector<int32_t> expected(static_cast<size_t>(p.rows));
    run(p, kReference, {p.rows, logits.as<float>(), choices.data(), expected.data()});
    const OnDevice dl(logits), dseen(seen), dt(std::vector<int32_t>(static_cast<size_t>(p.rows), -7));
    for (Choice& c : choices) c.seen = dseen.as<int32_t>();
    const OnDevice dc(choices);
    run(p, kGpu, {p.rows, dl.as<float>(), dc.as<Choice>(), dt.as<int32_t>()});
    return {expected, dt.numbers<int32_t>(static_cast<size_t>(p.rows))};
  }
};

TEST_F(SamplingGpu, DrawsWhatTheReferenceDraws) {
  const std::vector<int32_t> seen{3, 5, 3, 299};
  for (const auto& [vocab, stride, deviation] :
       {std::tuple<int64_t, int64_t, double>{300, 300, 2}, {301, 303, 0.01}, {50257, 50304, 1}, {2000, 2048, 0}}) {
    const int64_t rows = 60;
    const Array logits(DType::kF32, static_cast<size_t>(rows * stride), 7, deviation);
    std::vector<Choice> choices;
    for (int64_t r = 0; r < rows; ++r)
      choices.push_back({r % 5 == 0 ? 0 : 0.3 * static_cast<double>(r % 5), r % 3 == 0 ? 0 : r * 9,
                         r % 4 == 0 ? 1.0 : 0.2 * static_cast<double>(r % 4 + 1), r % 2 ? 1.3 : 1, 11, static_cast<uint64_t>(r), 5, seen.data(), 4});
    const auto [expected, got] = draw({rows, vocab, stride}, logits, choices, seen);
    EXPECT_EQ(got, expected) << vocab;
  }
}

TEST_F(SamplingGpu, InfinityAndNaN) {
  Array logits(DType::kF32, 4 * 100, 3);
  const float inf = INFINITY;
  for (size_t i = 0; i < 100; ++i) logits.set(i, i == 40 ? 1 : -inf);
  logits.set(100 + 17, inf);
  const std::vector<Choice> choices(4, Choice{1, 0, 0.9, 1, 1, 2, 3});
  EXPECT_EQ(draw({4, 100, 100}, logits, choices, {0}).second[0], 40);
  EXPECT_EQ(draw({4, 100, 100}, logits, choices, {0}).second[1], 17);
  logits.set(300 + 99, NAN);
  const OnDevice dl(logits), dc(choices), dt(std::vector<int32_t>(4));
  run(Sampling{4, 100, 100}, kGpu, {4, dl.as<float>(), dc.as<Choice>(), dt.as<int32_t>()});
  EXPECT_EQ(dt.numbers<int32_t>(4)[3], -1);
}

TEST_F(SamplingGpu, GoesOnByItself) {
  const Array logits(DType::kF32, 2 * 100, 3);
  const OnDevice dl(logits), dt(std::vector<int32_t>(2)), ids(std::vector<int32_t>(2)), position(std::vector<int32_t>{4, 9}),
      used(std::vector<int32_t>{5, 10}), slot(std::vector<int64_t>{4, -1}), seen(std::vector<int32_t>(16, -5));
  std::vector<Choice> choices(2, Choice{});
  choices[0].repetition_penalty = 1e9;
  choices[0].seen = seen.as<int32_t>();
  choices[0].position = 5;
  const OnDevice dc(choices);
  const Sampling::Buffers b{2,
                            dl.as<float>(),
                            dc.as<Choice>(),
                            dt.as<int32_t>(),
                            {ids.as<int32_t>(), position.as<int32_t>(), used.as<int32_t>(), slot.as<int64_t>(), seen.as<int32_t>(), 8}};
  run(Sampling{2, 100, 100}, kGpu, b);
  const int32_t first = dt.numbers<int32_t>(2)[0];
  run(Sampling{2, 100, 100}, kGpu, b);
  const int32_t second = dt.numbers<int32_t>(2)[0];
  EXPECT_NE(first, second) << "what was drawn is seen the next time";
  EXPECT_EQ(ids.numbers<int32_t>(2), (std::vector<int32_t>{second, 0}));
  EXPECT_EQ(position.numbers<int32_t>(2), (std::vector<int32_t>{6, 9}));
  EXPECT_EQ(used.numbers<int32_t>(2), (std::vector<int32_t>{7, 10}));
  EXPECT_EQ(slot.numbers<int64_t>(2), (std::vector<int64_t>{6, -1}));
  EXPECT_EQ(seen.numbers<int32_t>(3), (std::vector<int32_t>{first, second, -5}));
  EXPECT_EQ(dc.numbers<Choice>(1)[0].position, 7u);
  EXPECT_EQ(dc.numbers<Choice>(1)[0].seen_count, 2);
}

}  // namespace
}  // namespace fattn
