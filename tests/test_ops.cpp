// The operations beside attention: every instruction set and dtype against the reference in float64.
#include "ops/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "device/cpu_info.h"
#include "fattn/error.hpp"
#include "ops_array.h"

namespace {

using namespace fattn::ops;
using fattn::DType;
using fattn::Isa;
using fattn::core::cpu_info;
using fattn::test::Array;
using fattn::test::expect_near;
using fattn::test::unit_of;

template <class Problem>
void run(const Problem& problem, const Device& device, const typename Problem::Buffers& buffers) {
  const Plan<Problem> plan(problem, device);
  const Array workspace(DType::kF32, plan.workspace_bytes() / 4 + 1);
  plan.execute(buffers, workspace.as<void>());
}

using Way = std::tuple<Isa, DType>;
class OpsSmall : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (!cpu_info().available(isa())) GTEST_SKIP() << "this processor has no " << name_of(isa());
  }
  Isa isa() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  Device device(int threads = 2) const { return {Place::kCpu, isa(), threads, nullptr}; }
  const Device reference{Place::kReference};

  // y of a linear layer for `rows` of x.
  Array linear(const Linear& p, const Device& on, const Array& x, const Array& weight, bool in_by_out, const Array& bias, Array y, int64_t rows) {
    const Array packed(p.dtype, packed_bytes(p, on) / size_of(p.dtype));
    pack(p, on, weight.as<void>(), in_by_out, p.out, packed.as<void>());
    run(p, on, {rows, x.as<void>(), packed.as<void>(), bias.as<void>(), y.as<void>()});
    return y;
  }
};

TEST_P(OpsSmall, Linear) {
  for (const auto& [rows, in, out] : {std::tuple<int64_t, int64_t, int64_t>{1, 40, 130}, {7, 33, 64}, {101, 401, 70}, {6, 1, 1}}) {
    const Array x(dtype(), static_cast<size_t>(rows * in), 1), bias(dtype(), static_cast<size_t>(out), 2);
    const Array weight(dtype(), static_cast<size_t>(in * out), 3, 1 / std::sqrt(static_cast<double>(in)));
    for (const Activation activation : {Activation::kNone, Activation::kGeluTanh, Activation::kGelu})
      for (const bool single : {true, false}) {
        Linear p{rows, in, out, dtype(), single ? DType::kF32 : dtype(), activation, single};
        const Array before(p.y, static_cast<size_t>(rows * out), 4);
        const bool in_by_out = activation == Activation::kNone;
        const Array expected = linear(p, reference, x, weight, in_by_out, bias, before, rows);
        expect_near(linear(p, device(), x, weight, in_by_out, bias, before, rows), expected, 4e-6);
      }
  }
}

// Neither company, nor threads, change a bit of a row.
TEST_P(OpsSmall, ARowDependsOnItselfAlone) {
  const int64_t rows = 110, in = 400, out = 150;
  const Linear p{rows, in, out, dtype(), DType::kF32};
  const Array x(dtype(), rows * in, 1), bias(dtype(), out, 2), weight(dtype(), in * out, 3, 0.05), none(DType::kF32, rows * out);
  const Array all = linear(p, device(3), x, weight, false, bias, none, rows);
  for (const int64_t row : {int64_t{0}, int64_t{95}, int64_t{109}}) {
    Array one(dtype(), in);
    std::memcpy(one.as<char>(), x.as<char>() + static_cast<size_t>(row * in) * size_of(dtype()), in * size_of(dtype()));
    const Array alone = linear(p, device(1), one, weight, false, bias, none, 1);
    EXPECT_EQ(std::memcmp(alone.as<float>(), all.as<float>() + row * out, out * sizeof(float)), 0) << "row " << row;
  }
}

TEST_P(OpsSmall, LayerNormAndResidual) {
  const int64_t rows = 19, width = 77;
  const Array delta(dtype(), rows * width, 1), weight(dtype(), width, 2), bias(dtype(), width, 3);
  for (const bool add : {false, true}) {
    const LayerNorm p{rows, width, 1e-5, dtype(), add};
    const int32_t select[] = {4, 18, 0};
    Array x[] = {Array(DType::kF32, rows * width, 4, 3), Array(DType::kF32, rows * width, 4, 3)};
    Array y[] = {Array(dtype(), rows * width), Array(dtype(), rows * width)};
    for (const int on : {0, 1})
      run(p, on ? device() : reference,
          {add ? rows : 3, x[on].as<float>(), delta.as<void>(), add ? nullptr : select, weight.as<void>(), bias.as<void>(), y[on].as<void>()});
    expect_near(y[1], y[0], 4e-6);
    expect_near(x[1], x[0], 0);
  }
}

TEST_P(OpsSmall, EmbeddingKeysAndValues) {
  const Array tokens(dtype(), 11 * 50, 1), positions(dtype(), 9 * 50, 2);
  const int32_t ids[] = {10, 0, 3}, position[] = {8, 0, 7}, bad[] = {1, 11, 2};
  Array out[] = {Array(DType::kF32, 150), Array(DType::kF32, 150)};
  for (const int on : {0, 1}) {
    const Embedding p{3, 50, 11, 9, dtype()};
    Embedding::Buffers b{3, ids, position, tokens.as<void>(), positions.as<void>(), out[on].as<float>()};
    run(p, on ? device() : reference, b);
    b.ids = bad;
    EXPECT_THROW(run(p, on ? device() : reference, b), fattn::Error);
    b.ids = ids, b.position = bad;
    EXPECT_THROW(run(p, on ? device() : reference, b), fattn::Error);
  }
  expect_near(out[1], out[0], 0);
  const int64_t slots[] = {5, 0, 2};
  Array qkv[] = {Array(dtype(), 3 * 32, 5), Array(dtype(), 3 * 32, 5)};
  Array k[] = {Array(dtype(), 6 * 8), Array(dtype(), 6 * 8)}, v[] = {k[0], k[1]};
  for (const int on : {0, 1})
    run(KeysValues{3, 2, 1, 8, dtype(), true, 10000}, on ? device() : reference,
        {3, qkv[on].as<void>(), position, slots, k[on].as<void>(), v[on].as<void>()});
  expect_near(qkv[1], qkv[0], unit_of(DType::kF32) * 8);
  expect_near(k[1], k[0], unit_of(DType::kF32) * 8);
  expect_near(v[1], v[0], 0);
  EXPECT_NE(k[0].at(5 * 8), 0);
}

TEST_P(OpsSmall, CrossEntropy) {
  const int64_t rows = 99, width = 31, vocab = 2100;
  const Array x(dtype(), rows * width, 1), weight(dtype(), vocab * width, 2, 0.5);
  std::vector<int32_t> target(rows, 2099);
  target[0] = -1, target[1] = 0;
  Array loss[] = {Array(DType::kF32, rows), Array(DType::kF32, rows)};
  for (const int on : {0, 1}) {
    const Device where = on ? device() : reference;
    const Linear head{rows, width, vocab, dtype()};
    const Array packed(dtype(), packed_bytes(head, where) / size_of(dtype()));
    pack(head, where, weight.as<void>(), false, vocab, packed.as<void>());
    run(CrossEntropy{rows, width, vocab, dtype()}, where, {rows, x.as<void>(), packed.as<void>(), target.data(), loss[on].as<float>()});
  }
  EXPECT_EQ(loss[1].at(0), 0);
  expect_near(loss[1], loss[0], 2e-5);
  target[3] = 2100;
  EXPECT_THROW(run(CrossEntropy{rows, width, vocab, dtype()}, device(), {rows, x.as<void>(), weight.as<void>(), target.data(), loss[1].as<float>()}),
               fattn::Error);
}

INSTANTIATE_TEST_SUITE_P(Every, OpsSmall,
                         testing::Combine(testing::Values(Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kNeon),
                                          testing::Values(DType::kF32, DType::kF16, DType::kBF16)),
                         [](const auto& way) { return std::string(name_of(std::get<0>(way.param))) + "_" + name_of(std::get<1>(way.param)); });

TEST(SamplingSmall, DrawsWhatTheReferenceDraws) {
  const int64_t rows = 40, vocab = 300;
  const Array logits(DType::kF32, rows * vocab, 7, 2);
  const int32_t seen[] = {3, 5, 3, 299};
  std::vector<Choice> choices;
  for (int64_t r = 0; r < rows; ++r)
    choices.push_back({r % 5 == 0 ? 0 : 0.3 * static_cast<double>(r % 5), r % 3 == 0 ? 0 : r, r % 4 == 0 ? 1.0 : 0.2 * static_cast<double>(r % 4 + 1),
                       r % 2 ? 1.3 : 1, 11, static_cast<uint64_t>(r), 5, seen, 4});
  std::vector<int32_t> token[2] = {std::vector<int32_t>(rows), std::vector<int32_t>(rows)};
  for (const int on : {0, 1})
    run(Sampling{rows, vocab, vocab}, {on ? Place::kCpu : Place::kReference}, {rows, logits.as<float>(), choices.data(), token[on].data()});
  EXPECT_EQ(token[0], token[1]);
}

TEST(SamplingSmall, FollowsTheShares) {
  Array logits(DType::kF32, 4);
  for (size_t i = 0; i < 4; ++i) logits.set(i, std::log(static_cast<double>(i + 1)));
  const Plan<Sampling> plan(Sampling{1, 4, 4}, {});
  const Array workspace(DType::kF32, plan.workspace_bytes() / 4 + 1);
  std::vector<int> count(4);
  for (uint64_t position = 0; position < 20000; ++position) {
    const Choice choice{1, 0, 1, 1, 1, 2, position};
    int32_t token = -1;
    plan.execute({1, logits.as<float>(), &choice, &token}, workspace.as<void>());
    ++count[static_cast<size_t>(token)];
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(count[i] / 20000.0, static_cast<double>(i + 1) / 10, 0.015);
  logits.set(2, NAN);
  const Choice greedy{};
  int32_t token = 0;
  EXPECT_THROW(plan.execute({1, logits.as<float>(), &greedy, &token}, workspace.as<void>()), fattn::Error);
}

TEST(OpsSmallErrors, SayWhatIsAllowed) {
  EXPECT_THROW((Plan<Linear>(Linear{1, 0, 5}, {})), fattn::Error);
  EXPECT_THROW((Plan<Linear>(Linear{int64_t{1} << 40, 5, 5}, {})), fattn::Error);
  EXPECT_THROW((Plan<Linear>(Linear{1, 5, 5, DType::kF64}, {})), fattn::Error);
  EXPECT_THROW((Plan<Linear>(Linear{1, 5, 5, DType::kBF16, DType::kF16}, {})), fattn::Error);
  const Plan<Linear> plan(Linear{2, 5, 5}, {});
  EXPECT_THROW(plan.execute({3}, nullptr), fattn::Error);
}

}  // namespace
