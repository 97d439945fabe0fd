// What the tensors hold makes no call of the CPU's kernels slow, and what is hidden changes no bit of what does not see it.
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>
#include <tuple>

#include "fattn/fattn.hpp"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

// Times more than on random numbers. The goal is 1.5 (docs/results); other programs must not make the test fail, and going pair by pair took 5 to 22.
constexpr double kMostTimes = 3;
constexpr int64_t kSeqlen = 512, kHeads = 2, kHeaddim = 64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A case with its tensors; `set` changes numbers.
struct Call {
  Case c;
  Options options;
  CaseInputs in;
  CaseForward out;
  CaseGradients grads;
  double forward_seconds = 1e9, backward_seconds = 1e9;

  Call(const Case& of, const Target& target)
      : c(of), options(options_of(of, target)), in(make_inputs(of)), out(make_forward(of)), grads(make_gradients(of)) {
    options.num_threads = 1;
  }
  // value(x, row) takes the place of x in a row of tensor t.
  void set(const Tensor& t, const std::function<double(double, int64_t)>& value) const {
    Dense x = read(t);
    for (size_t i = 0; i < x.size(); ++i) x[i] = value(x[i], static_cast<int64_t>(i) / (kHeads * kHeaddim));
    write(t, x);
  }
  void run() {
    const double begin = processor_seconds();
    forward({in.q, in.k, in.v, out.o, out.lse, {}, in.scores}, options);
    const double middle = processor_seconds();
    if (c.backward) backward({in.q, in.k, in.v, out.o, out.lse, in.dout, grads.dq, grads.dk, grads.dv, in.scores, grads.dbias, in.dlse}, options);
    forward_seconds = std::min(forward_seconds, middle - begin);
    backward_seconds = std::min(backward_seconds, processor_seconds() - middle);
  }
};

using Parameter = std::tuple<DType, Target>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& p) {
  return std::string(fattn::name_of(std::get<0>(p.param))) + "_" + name_of(std::get<1>(p.param));
}

class CpuValues : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    std::tie(dtype, target) = GetParam();
    const std::string why = why_unavailable(target, dtype);
    if (!why.empty()) GTEST_SKIP() << why;
    if (target.backend != Backend::kCpu) GTEST_SKIP() << "is not the CPU";
  }
  // Called before a case is made of it: standard attention has few options.
  bool lacks(const Case& c) const { return !is_to_compute(target, c); }
  Case plain() const {
    Case c;
    c.dtype = dtype;
    c.seqlen_q = c.seqlen_k = kSeqlen;
    c.nheads = c.nheads_k = kHeads;
    return c;
  }
  std::vector<double> values() const {
    return {std::nan(""), kInfinity, -kInfinity, dtype == DType::kF16 ? 6e4 : 3e38, dtype == DType::kF16 ? 1e-7 : 1e-40};
  }
  void expect_as_fast(Call& plain, Call& other, const std::string& what) const {
    for (int attempt = 0; attempt < 80; ++attempt) {  // calls of some 10 us, beside other programs: the least times of each converge
      for (int i = 0; i < 3; ++i) {
        plain.run();
        other.run();
      }
      if (other.forward_seconds <= kMostTimes * plain.forward_seconds &&
          (!plain.c.backward || other.backward_seconds <= kMostTimes * plain.backward_seconds))
        return;
    }
    ADD_FAILURE() << what << ": forward " << other.forward_seconds / plain.forward_seconds << " times, backward "
                  << other.backward_seconds / plain.backward_seconds << " times the time on random numbers";
  }

  // Keys that `poisons`, in k and v: as fast, and what rows that `blind` has get is the same to the bit.
  void expect_hidden(const Case& c, const std::string& what, const std::function<bool(int64_t)>& poisons,
                     const std::function<bool(int64_t)>& blind) const {
    Call random(c, target);
    for (const double value : values()) {
      Call other(c, target);
      const auto put = [&](double x, int64_t row) { return poisons(row) ? value : x; };
      other.set(other.in.k, put);
      other.set(other.in.v, put);
      expect_as_fast(random, other, what + ", " + std::to_string(value));
      for (const auto& [a, b] : {std::pair(random.out.o, other.out.o), std::pair(random.grads.dq, other.grads.dq)}) {
        if (!c.backward && a.data() != random.out.o.data()) continue;
        const Dense x = read(a), y = read(b);
        int64_t different = 0;
        for (size_t i = 0; i < x.size(); ++i)
          if (blind(static_cast<int64_t>(i) / (kHeads * kHeaddim))) different += !(x[i] == y[i]);
        EXPECT_EQ(different, 0) << what << ", " << value;
      }
    }
  }

  // value(x, key, column) takes the place of x in v: o is Inf, -Inf and NaN where the reference's is. Returns how many of its numbers are infinite.
  int64_t expect_same_kinds(const Case& c, const std::function<double(double, int64_t, int64_t)>& value) const {
    Call ours(c, target), expected(c, Target{Backend::kReference, Algorithm::kAuto, Isa::kAuto, 0});
    for (Call* call : {&ours, &expected}) {
      Dense v = read(call->in.v);
      for (size_t i = 0; i < v.size(); ++i) {
        const auto at = static_cast<int64_t>(i);
        v[i] = value(v[i], at / (kHeads * kHeaddim), at % kHeaddim);
      }
      write(call->in.v, v);
      call->run();
    }
    const Dense got = read(ours.out.o), right = read(expected.out.o);
    int64_t different = 0, infinite = 0;
    for (size_t i = 0; i < right.size(); ++i) {
      different += std::isnan(got[i]) != std::isnan(right[i]) || std::isinf(got[i]) != std::isinf(right[i]) ||
                   (std::isinf(right[i]) && std::signbit(got[i]) != std::signbit(right[i]));
      infinite += std::isinf(right[i]);
    }
    EXPECT_EQ(different, 0) << "of " << right.size() << " numbers of o are of another kind";
    return infinite;
  }

  DType dtype = DType::kF32;
  Target target;
};

TEST_P(CpuValues, BehindAMaskOfKeys) {
  Case c = plain();
  c.mask = Pairs::kKeys;
  if (lacks(c)) GTEST_SKIP() << "has no masks";
  const Dense mask = read(make_inputs(c).scores.mask);
  expect_hidden(
      c, "mask", [&](int64_t key) { return mask[static_cast<size_t>(key)] == 0; }, [](int64_t) { return true; });
}

TEST_P(CpuValues, BehindTheDiagonal) {
  Case c = plain();
  c.causal = true;
  expect_hidden(
      c, "causal", [](int64_t key) { return key >= kSeqlen - 70; }, [](int64_t row) { return row < kSeqlen - 70; });
}

TEST_P(CpuValues, BeforeAWindow) {
  Case c = plain();
  c.window_left = 64;
  c.window_right = 0;
  if (lacks(c)) GTEST_SKIP() << "has no windows";
  expect_hidden(
      c, "window", [](int64_t key) { return key < 100; }, [](int64_t row) { return row >= 164; });
}

TEST_P(CpuValues, ThatAreVisible) {
  Case c = plain();
  c.causal = true;
  for (const double value : values())
    for (const bool everywhere : {false, true}) {
      Call random(c, target), other(c, target);
      const auto put = [&](double x, int64_t row) { return everywhere || row == 300 ? value : x; };
      const std::string what = "visible " + std::to_string(value) + (everywhere ? ", in all of v and dout" : ", in a row of all");
      for (const Tensor& t : {other.in.v, other.in.dout}) other.set(t, put);
      if (!everywhere)
        for (const Tensor& t : {other.in.q, other.in.k}) other.set(t, put);
      expect_as_fast(random, other, what);
    }
}

TEST_P(CpuValues, OfAnySize) {
  for (const double size : {0.0, 1e-38, 1e-20, 8.0, 64.0})
    for (const double softcap : {0.0, 30.0}) {
      Case c = plain();
      c.softcap = softcap;
      if (lacks(c)) continue;
      Call random(c, target), other(c, target);
      for (const Tensor& t : {other.in.q, other.in.k, other.in.v, other.in.dout})
        if (size < 1 || t.data() != other.in.dout.data()) other.set(t, [&](double x, int64_t) { return size * x; });
      expect_as_fast(random, other, "all times " + std::to_string(size) + ", softcap " + std::to_string(softcap));
    }
}

// Few queries: the kernels of decode.
TEST_P(CpuValues, InDecode) {
  for (const int64_t queries : {1, 8})
    for (int option = 0; option < 3; ++option) {
      Case c = plain();
      c.backward = false;
      c.seqlen_q = queries;
      c.seqlen_k = 1024;
      if (option == 0) c.mask = Pairs::kKeys;
      if (option == 1) c.bias = Pairs::kAll;
      if (option == 2) c.documents = Documents::kAny;
      if (lacks(c)) continue;
      const std::string what = std::to_string(queries) + " queries, " + (option == 0 ? "mask" : option == 1 ? "bias" : "documents");
      if (option == 0) {
        const Dense mask = read(make_inputs(c).scores.mask);
        expect_hidden(
            c, what, [&](int64_t key) { return mask[static_cast<size_t>(key)] == 0; }, [](int64_t) { return true; });
      }
      Call random(c, target);
      for (const double value : values())
        for (const bool everywhere : {false, true}) {
          Call other(c, target);
          other.set(other.in.v, [&](double x, int64_t row) { return everywhere || row % 3 == 0 ? value : x; });
          expect_as_fast(random, other, what + ", " + std::to_string(value) + (everywhere ? " in all of v" : " in a third of the keys"));
        }
    }
}

// A row whose o is NaN in one column is not done: what it sees later makes other columns infinite. As the reference has it, element by element.
TEST_P(CpuValues, InOneColumnLeaveTheOthers) {
  Case c = plain();
  c.seqlen_q = c.seqlen_k = 300;
  c.mask = Pairs::kAll;
  if (lacks(c)) GTEST_SKIP() << "has no masks";
  for (const double late : {kInfinity, -kInfinity, 2.0}) {
    const int64_t infinite = expect_same_kinds(c, [&](double x, int64_t key, int64_t column) {
      if (column == 0 && key < 40) return std::nan("");
      return column == 5 && key == 250 ? late : x;
    });
    EXPECT_EQ(infinite > 0, std::isinf(late)) << late;
  }
}

// In decode sums that are Inf throughout take no finite numbers any more, but an Inf of the other sign makes NaN of them.
TEST_P(CpuValues, InAllOfVMeetTheOtherSign) {
  Case c = plain();
  c.seqlen_q = 8;
  c.seqlen_k = 1024;
  c.mask = Pairs::kKeys;
  c.backward = false;
  if (lacks(c)) GTEST_SKIP() << "has no masks";
  const int64_t infinite = expect_same_kinds(c, [](double x, int64_t key, int64_t column) {
    if (key < 40) return kInfinity;
    return column == 5 && key >= 64 && key < 96 ? -kInfinity : x;
  });
  EXPECT_GT(infinite, 0);
}

// Workers take numbers below 2^-126 for 0; whoever calls does not afterwards, though a call of one worker is computed on its thread.
TEST(CpuValuesSmall, SubnormalsAreTheCallersAgain) {
  Case c;
  c.seqlen_q = c.seqlen_k = 40;
  for (const Target target : {Target{.backend = Backend::kCpu}, Target{.backend = Backend::kCpu, .algorithm = Algorithm::kStandard}}) {
    Call call(c, target);
    const auto tiny = [](double, int64_t) { return 1e-39; };
    call.set(call.in.v, tiny);
    call.run();
    for (const double o : read(call.out.o)) EXPECT_EQ(o, 0) << "subnormal numbers are 0 in a call";
    volatile float x = 1e-39f;
    EXPECT_GT(x * 0.5f, 0) << name_of(target);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, CpuValues,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16), ::testing::ValuesIn(all_targets())),
                         parameter_name);

}  // namespace
}  // namespace fattn::testing
