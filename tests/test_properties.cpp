// What must hold whatever the numbers are: for the oracle, standard attention and the kernels of every instruction set.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>
#include <tuple>

#include "fattn/fattn.hpp"
#include "testing/random.h"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

Case shape(DType dtype, int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim, bool causal,
           bool backward = true) {
  Case c;
  c.dtype = dtype;
  c.batch = batch;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.nheads = nheads;
  c.nheads_k = nheads_k;
  c.headdim = c.headdim_v = headdim;
  c.causal = causal;
  c.backward = backward;
  c.name = name_of(c);
  return c;
}

Case windowed(Case c, int64_t left, int64_t right) {
  c.window_left = left;
  c.window_right = right;
  c.name = name_of(c);
  return c;
}
Case capped(Case c, double softcap) {
  c.softcap = softcap;
  c.name = name_of(c);
  return c;
}

// With everything that a score may depend on beside q k.
Case featured(Case c) {
  c.key_lengths = true;
  c.alibi = Alibi::kBatchHeads;
  c.bias = Pairs::kHeads;
  c.mask = Pairs::kAll;
  c.p_dropout = 0.2;
  c.name = name_of(c);
  return c;
}
// A bias whose gradient is summed over everything but queries and keys.
Case biased(Case c) {
  c.bias = Pairs::kOne;
  c.name = name_of(c);
  return c;
}

std::vector<Case> those_of(const Target& target, const std::vector<Case>& cases) {
  std::vector<Case> some;
  for (const Case& c : cases)
    if (is_to_compute(target, c)) some.push_back(c);
  return some;
}

// Prefill with tails and GQA, causal with rows that see nothing, self-attention, and decode over keys worth splitting; the same in windows, capped,
// and with what else scores may depend on.
std::vector<Case> some_shapes(DType dtype) {
  return {windowed(shape(dtype, 2, 130, 197, 4, 2, 64, false), 50, 20),
          windowed(shape(dtype, 2, 2, 1500, 9, 3, 64, true, false), 1000, -1),
          capped(shape(dtype, 1, 70, 90, 2, 2, 40, true), 4),
          capped(shape(dtype, 1, 1, 2100, 4, 1, 80, false, false), 4),
          featured(shape(dtype, 3, 130, 197, 4, 2, 64, false)),
          featured(capped(windowed(shape(dtype, 2, 2, 1500, 9, 3, 64, true, false), 1000, -1), 6)),
          biased(shape(dtype, 2, 65, 700, 4, 2, 32, false)),
          shape(dtype, 2, 65, 97, 4, 2, 64, false),
          shape(dtype, 1, 70, 50, 2, 2, 40, true),
          shape(dtype, 1, 130, 130, 3, 1, 32, true),
          shape(dtype, 2, 2, 1500, 9, 3, 64, true, false),
          shape(dtype, 1, 1, 2100, 4, 1, 80, false, false)};
}

using Parameter = std::tuple<DType, Target>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& p) {
  return std::string(fattn::name_of(std::get<0>(p.param))) + "_" + name_of(std::get<1>(p.param));
}

class PropertySmall : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    std::tie(dtype, target) = GetParam();
    const std::string why = why_unavailable(target, dtype);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  Outputs run(const Case& c, const CaseInputs& in) const { return run_passes(c, in, options_of(c, target)); }
  Outputs run(const Case& c) const { return run(c, make_inputs(c)); }

  // Every executor of the CPU backend may be the host's; the oracle runs on the calling thread.
  bool uses_executor() const { return target.backend == Backend::kCpu; }

  DType dtype = DType::kF32;
  Target target;
};

// ---- Attention is a weighted mean over a set of keys -------------------------------------------------------------------

// Rows [from, to) of the second dimension.
Tensor slice(const Tensor& t, int64_t from, int64_t to) {
  auto* data = static_cast<unsigned char*>(t.data()) + static_cast<size_t>(from * t.stride(1)) * size_of(t.dtype());
  return Tensor(data, t.dtype(), {t.shape(0), to - from, t.shape(2), t.shape(3)}, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)});
}

// A forward pass, and how wrong it may be.
struct Judged {
  Dense o, lse;
  double allowed_o, allowed_lse;
};
Judged judged_forward(const Case& c, const Target& target, const Tensor& q, const Tensor& k, const Tensor& v) {
  const CaseForward out = make_forward(c);
  ForwardTensors t;
  t.q = q;
  t.k = k;
  t.v = v;
  t.o = out.o;
  t.lse = out.lse;
  const Options options = options_of(c, target);
  forward(t, options);
  const std::vector<TensorVerdict> verdicts = verify(t, options);
  for (const TensorVerdict& verdict : verdicts) EXPECT_TRUE(verdict.pass) << verdict.message;
  return {read(out.o), read(out.lse), verdicts[0].allowed, verdicts[1].allowed};
}

TEST_P(PropertySmall, TheOrderOfTheKeysDoesNotMatter) {
  for (const Case& c : {shape(dtype, 1, 20, 150, 2, 1, 64, false), shape(dtype, 1, 1, 1200, 2, 1, 32, false)}) {
    const CaseInputs in = make_inputs(c), permuted = make_inputs(c);
    std::vector<size_t> order(static_cast<size_t>(c.seqlen_k));
    for (size_t j = 0; j < order.size(); ++j) order[j] = j;
    const Random random(7, 7);
    for (size_t j = order.size(); j-- > 1;) std::swap(order[j], order[static_cast<size_t>(random.uniform(j) * static_cast<double>(j + 1))]);
    for (const auto& [from, to] : {std::pair{in.k, permuted.k}, std::pair{in.v, permuted.v}}) {
      const Dense rows = read(from);
      const size_t row = rows.size() / order.size();
      Dense mixed(rows.size());
      for (size_t j = 0; j < order.size(); ++j)
        std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(order[j] * row), row, mixed.begin() + static_cast<std::ptrdiff_t>(j * row));
      write(to, mixed);
    }
    const Judged a = judged_forward(c, target, in.q, in.k, in.v), b = judged_forward(c, target, permuted.q, permuted.k, permuted.v);
    for (size_t i = 0; i < a.o.size(); ++i) ASSERT_LE(std::fabs(a.o[i] - b.o[i]), a.allowed_o + b.allowed_o) << c.name << " o " << i;
    for (size_t i = 0; i < a.lse.size(); ++i) ASSERT_LE(std::fabs(a.lse[i] - b.lse[i]), a.allowed_lse + b.allowed_lse) << c.name << " lse " << i;
  }
}

TEST_P(PropertySmall, TwoHalvesMergeByTheirLse) {
  for (const Case& c : {shape(dtype, 2, 9, 150, 4, 2, 64, false), shape(dtype, 1, 1, 1300, 4, 1, 32, false)}) {
    const CaseInputs in = make_inputs(c);
    const int64_t middle = c.seqlen_k / 3;
    const Judged whole = judged_forward(c, target, in.q, in.k, in.v);
    const Judged low = judged_forward(c, target, in.q, slice(in.k, 0, middle), slice(in.v, 0, middle));
    const Judged high = judged_forward(c, target, in.q, slice(in.k, middle, c.seqlen_k), slice(in.v, middle, c.seqlen_k));
    const double allowed_lse = whole.allowed_lse + std::max(low.allowed_lse, high.allowed_lse);
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.nheads; ++h)
        for (int64_t i = 0; i < c.seqlen_q; ++i) {
          const auto row = static_cast<size_t>((b * c.nheads + h) * c.seqlen_q + i);
          const double lse = std::log(std::exp(low.lse[row]) + std::exp(high.lse[row]));
          ASSERT_LE(std::fabs(lse - whole.lse[row]), allowed_lse) << c.name;
          const double weight_low = std::exp(low.lse[row] - lse), weight_high = std::exp(high.lse[row] - lse);
          for (int64_t d = 0; d < c.headdim_v; ++d) {
            const auto at = static_cast<size_t>(((b * c.seqlen_q + i) * c.nheads + h) * c.headdim_v + d);
            const double merged = weight_low * low.o[at] + weight_high * high.o[at];
            // A weight is off by as much, relatively, as the difference of the two lse.
            const double of_weights = 2 * std::max(low.allowed_lse, high.allowed_lse) * std::max(std::fabs(low.o[at]), std::fabs(high.o[at]));
            ASSERT_LE(std::fabs(merged - whole.o[at]), whole.allowed_o + std::max(low.allowed_o, high.allowed_o) + of_weights) << c.name;
          }
        }
  }
}

// ---- The same bits ------------------------------------------------------------------------------------------------------

TEST_P(PropertySmall, TheSameBitsEveryTime) {
  for (const Case& c : those_of(target, some_shapes(dtype))) {
    const CaseInputs in = make_inputs(c);
    const Outputs first = run(c, in);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(same_bits(first, run(c, in))) << c.name;
  }
}

TEST_P(PropertySmall, TheSameBitsForAnyNumberOfThreads) {
  if (!uses_executor()) GTEST_SKIP() << "runs on the calling thread";
  for (const Case& c : those_of(target, some_shapes(dtype))) {
    const CaseInputs in = make_inputs(c);
    Options options = options_of(c, target);
    options.num_threads = 1;
    const Outputs one = run_passes(c, in, options);
    for (int threads : {2, 3, 5, 16}) {
      options.num_threads = threads;
      ASSERT_TRUE(same_bits(one, run_passes(c, in, options))) << c.name << " with " << threads << " threads";
    }
  }
}

TEST_P(PropertySmall, AViewOfAnotherLayoutGivesTheSameBits) {
  for (Case c :
       {shape(dtype, 2, 65, 97, 4, 2, 64, true), shape(dtype, 2, 33, 40, 3, 3, 24, false), shape(dtype, 2, 2, 1100, 4, 2, 64, true, false)}) {
    const Outputs plain = run(c);
    c.layout = Layout::kBhsd;
    ASSERT_TRUE(same_bits(plain, run(c))) << c.name;
  }
}

TEST_P(PropertySmall, AHostsExecutorGivesTheSameBits) {
  if (!uses_executor()) GTEST_SKIP() << "runs on the calling thread";
  // Serial and backwards: no worker may rely on another one running at the same time, or before it.
  fattn_executor reverse{};
  reverse.struct_size = sizeof reverse;
  reverse.concurrency = 3;
  int calls = 0;
  reverse.context = &calls;
  reverse.parallel = [](void* context, int32_t workers, void (*body)(void*, int32_t), void* arg) -> int32_t {
    ++*static_cast<int*>(context);
    for (int32_t i = workers; i-- > 0;) body(arg, i);
    return 0;
  };
  for (const Case& c : those_of(target, some_shapes(dtype))) {
    const CaseInputs in = make_inputs(c);
    Options options = options_of(c, target);
    const Outputs own = run_passes(c, in, options);
    options.executor = &reverse;
    options.num_threads = 3;
    ASSERT_TRUE(same_bits(own, run_passes(c, in, options))) << c.name;
  }
  EXPECT_GT(calls, 0);
}

TEST_P(PropertySmall, AWindowAsWideAsTheKeysGivesTheSameBitsAsNone) {
  for (Case c :
       {shape(dtype, 1, 70, 97, 2, 1, 64, false), shape(dtype, 1, 70, 50, 2, 2, 40, true), shape(dtype, 1, 3, 1300, 2, 1, 64, false, false)}) {
    const Outputs plain = run(c);
    ASSERT_TRUE(same_bits(plain, run(windowed(c, c.seqlen_k - 1, c.seqlen_q - 1)))) << c.name;
    const Outputs causal_by_window = run(windowed(c, -1, 0));
    c.causal = true;
    ASSERT_TRUE(same_bits(run(c), causal_by_window)) << c.name;
  }
}

// ---- Calls --------------------------------------------------------------------------------------------------------------

TEST_P(PropertySmall, AFailingExecutorIsAnInternalError) {
  if (!uses_executor()) GTEST_SKIP() << "runs on the calling thread";
  fattn_executor failing{};
  failing.struct_size = sizeof failing;
  failing.concurrency = 2;
  failing.parallel = [](void*, int32_t, void (*)(void*, int32_t), void*) -> int32_t { return 1; };
  const Case c = shape(dtype, 2, 65, 97, 4, 2, 64, false);
  const CaseInputs in = make_inputs(c);
  Options options = options_of(c, target);
  options.num_threads = 2;
  const Outputs good = run_passes(c, in, options);
  options.executor = &failing;
  try {
    run_passes(c, in, options);
    ADD_FAILURE() << "the executor's failure was not reported";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInternal) << e.what();
    EXPECT_NE(std::string(e.what()).find("executor"), std::string::npos) << e.what();
  }
  options.executor = nullptr;
  EXPECT_TRUE(same_bits(good, run_passes(c, in, options)));  // and the library is usable
}

// One execution of a plan with a workspace of its own, filled with garbage.
Dense execute(const Plan& plan, const ForwardTensors& t, unsigned char garbage) {
  std::vector<unsigned char> memory(plan.workspace_bytes() + 64, garbage);
  auto* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  plan.execute(t, aligned, plan.workspace_bytes());
  return read(t.o);
}

TEST_P(PropertySmall, APlanRunsAgainAndFromSeveralThreads) {
  if (!uses_executor()) GTEST_SKIP() << "runs on the calling thread";
  for (const Case& c : those_of(target, some_shapes(dtype))) {
    const CaseInputs in = make_inputs(c);
    const auto tensors = [&](const CaseForward& out) {
      ForwardTensors t;
      t.q = in.q;
      t.k = in.k;
      t.v = in.v;
      t.o = out.o;
      t.lse = out.lse;
      t.scores = in.scores;
      return t;
    };
    const CaseForward out = make_forward(c);
    Options options = options_of(c, target);
    options.num_threads = 2;
    const Plan plan(tensors(out), options);
    const Dense first = execute(plan, tensors(out), 0x00);
    ASSERT_TRUE(same_bits(first, execute(plan, tensors(out), 0xff))) << c.name;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        const CaseForward mine = make_forward(c);
        for (int round = 0; round < 3; ++round)
          if (!same_bits(first, execute(plan, tensors(mine), 0xff))) ++wrong;
      });
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(wrong, 0) << c.name;
  }
}

class Fork : public PropertySmall {};

TEST_P(Fork, TheChildComputesToo) {
  const Case c = shape(dtype, 2, 65, 97, 4, 2, 64, true);
  const CaseInputs in = make_inputs(c);
  Options options = options_of(c, target);
  options.num_threads = 3;
  const Outputs expected = run_passes(c, in, options);  // so that the pool runs when the process forks
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);  // a child that hangs is a failure, not a hang of the test
    int code = 1;
    try {
      code = same_bits(expected, run_passes(c, in, options)) ? 0 : 2;
    } catch (...) {
      code = 3;
    }
    _exit(code);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "the child was ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "2: other bits, 3: an error";
  EXPECT_TRUE(same_bits(expected, run_passes(c, in, options)));
}

// ---- NaN and Inf stay where they belong ---------------------------------------------------------------------------------

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void put(const Tensor& t, int64_t b, int64_t row, int64_t h, int64_t d, double x) {
  Dense all = read(t);
  all[static_cast<size_t>(((b * t.shape(1) + row) * t.shape(2) + h) * t.shape(3) + d)] = x;
  write(t, all);
}

// (batch, row, head) of every element: touched(b, row, h, d) ones must be non-finite, all others as before up to rounding:
// next to a non-finite value a block may be summed in another order.
using Touched = std::function<bool(int64_t b, int64_t row, int64_t h, int64_t d)>;
void expect_touched(const char* what, const Dense& clean, const Dense& spoilt, int64_t seqlen, int64_t heads, int64_t headdim,
                    const Touched& touched) {
  ASSERT_EQ(clean.size(), spoilt.size());
  double rounding = 0;
  for (double x : clean) rounding = std::max(rounding, std::fabs(x) / 64);  // two units of bf16, the coarsest dtype
  for (size_t i = 0; i < clean.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    const int64_t d = n % headdim, h = n / headdim % heads, row = n / headdim / heads % seqlen, b = n / headdim / heads / seqlen;
    if (touched(b, row, h, d))
      ASSERT_FALSE(std::isfinite(spoilt[i])) << what << "[" << b << ", " << row << ", " << h << ", " << d << "] is " << spoilt[i];
    else
      ASSERT_LE(std::fabs(clean[i] - spoilt[i]), rounding)
          << what << "[" << b << ", " << row << ", " << h << ", " << d << "] was " << clean[i] << ", is " << spoilt[i];
  }
}

// Shapes where edges of the mask cross blocks of keys, and decode.
std::vector<Case> shapes_for_nan(DType dtype, bool backward) {
  std::vector<Case> all{shape(dtype, 2, 150, 210, 4, 2, 64, true, backward), shape(dtype, 1, 100, 70, 2, 1, 40, true, backward),
                        shape(dtype, 1, 40, 130, 2, 2, 32, false, backward), windowed(shape(dtype, 1, 150, 210, 2, 1, 64, false, backward), 40, 25),
                        windowed(shape(dtype, 1, 150, 150, 2, 1, 64, true, backward), 70, -1)};
  if (!backward) {
    all.push_back(shape(dtype, 2, 4, 1300, 4, 2, 64, true, false));
    all.push_back(windowed(shape(dtype, 2, 4, 1300, 4, 2, 64, true, false), 647, -1));  // two rows see the key in the middle
  }
  return all;
}

bool sees(const Case& c, int64_t row, int64_t key) {
  const int64_t away = key - (row + c.seqlen_k - c.seqlen_q), right = c.causal ? 0 : c.window_right;
  return (c.window_left < 0 || away >= -c.window_left) && (right < 0 || away <= right);
}

// lse is (batch, nheads, seqlen_q).
void expect_lse_touched(const Case& c, const Outputs& clean, const Outputs& spoilt,
                        const std::function<bool(int64_t b, int64_t row, int64_t h)>& touched) {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.nheads; ++h)
      for (int64_t row = 0; row < c.seqlen_q; ++row) {
        const auto i = static_cast<size_t>((b * c.nheads + h) * c.seqlen_q + row);
        if (touched(b, row, h))
          ASSERT_TRUE(std::isnan(spoilt.lse[i])) << "lse[" << b << ", " << h << ", " << row << "] is " << spoilt.lse[i];
        else
          ASSERT_TRUE(clean.lse[i] == spoilt.lse[i] || std::fabs(clean.lse[i] - spoilt.lse[i]) <= 1e-3)
              << "lse[" << b << ", " << h << ", " << row << "] was " << clean.lse[i] << ", is " << spoilt.lse[i];
      }
}

TEST_P(PropertySmall, ANanQueryTouchesItsRowOnly) {
  for (const Case& c : those_of(target, shapes_for_nan(dtype, true))) {
    SCOPED_TRACE(c.name);
    const CaseInputs in = make_inputs(c);
    const Outputs clean = run(c, in);
    const int64_t bad_row = c.seqlen_q - 3, bad_head = 1;
    put(in.q, 0, bad_row, bad_head, 5, kNan);
    const Outputs spoilt = run(c, in);
    const auto row_only = [&](int64_t b, int64_t row, int64_t h, int64_t) { return b == 0 && row == bad_row && h == bad_head; };
    // Keys that the row sees, of the key head that its head reads.
    const auto its_keys = [&](int64_t b, int64_t key, int64_t h, int64_t) {
      return b == 0 && h == bad_head / (c.nheads / c.nheads_k) && sees(c, bad_row, key);
    };
    expect_touched("o", clean.o, spoilt.o, c.seqlen_q, c.nheads, c.headdim_v, row_only);
    expect_lse_touched(c, clean, spoilt, [&](int64_t b, int64_t row, int64_t h) { return row_only(b, row, h, 0); });
    expect_touched("dq", clean.dq, spoilt.dq, c.seqlen_q, c.nheads, c.headdim, row_only);
    expect_touched("dk", clean.dk, spoilt.dk, c.seqlen_k, c.nheads_k, c.headdim, its_keys);
    expect_touched("dv", clean.dv, spoilt.dv, c.seqlen_k, c.nheads_k, c.headdim_v, its_keys);
  }
}

TEST_P(PropertySmall, ANanGradientTouchesItsRowAndTheKeysThatItSees) {
  for (const Case& c : those_of(target, shapes_for_nan(dtype, true))) {
    SCOPED_TRACE(c.name);
    const CaseInputs in = make_inputs(c);
    const Outputs clean = run(c, in);
    const int64_t bad_row = c.seqlen_q / 2 + 7, bad_head = 0, bad_d = 3;
    put(in.dout, 0, bad_row, bad_head, bad_d, kNan);
    const Outputs spoilt = run(c, in);
    const auto its_keys = [&](int64_t b, int64_t key, int64_t h, int64_t) { return b == 0 && h == 0 && sees(c, bad_row, key); };
    EXPECT_TRUE(same_bits(clean.o, spoilt.o));
    expect_touched("dq", clean.dq, spoilt.dq, c.seqlen_q, c.nheads, c.headdim,
                   [&](int64_t b, int64_t row, int64_t h, int64_t) { return b == 0 && row == bad_row && h == bad_head; });
    expect_touched("dk", clean.dk, spoilt.dk, c.seqlen_k, c.nheads_k, c.headdim, its_keys);
    expect_touched("dv", clean.dv, spoilt.dv, c.seqlen_k, c.nheads_k, c.headdim_v,
                   [&](int64_t b, int64_t key, int64_t h, int64_t d) { return its_keys(b, key, h, d) && d == bad_d; });
  }
}

TEST_P(PropertySmall, ANonFiniteKeyTouchesTheRowsThatSeeIt) {
  for (const Case& c : those_of(target, shapes_for_nan(dtype, false)))
    for (int64_t bad_key : {c.seqlen_k - 1, c.seqlen_k - 3, c.seqlen_k / 2}) {
      SCOPED_TRACE(c.name + " key " + std::to_string(bad_key));
      const CaseInputs in = make_inputs(c);
      const Outputs clean = run(c, in);
      put(in.k, 0, bad_key, 0, 5, kNan);
      const Outputs spoilt = run(c, in);
      const auto rows = [&](int64_t b, int64_t row, int64_t h, int64_t) {
        return b == 0 && h / (c.nheads / c.nheads_k) == 0 && sees(c, row, bad_key);
      };
      expect_touched("o", clean.o, spoilt.o, c.seqlen_q, c.nheads, c.headdim_v, rows);
      expect_lse_touched(c, clean, spoilt, [&](int64_t b, int64_t row, int64_t h) { return rows(b, row, h, 0); });
      // Inf: a score of +Inf makes a NaN, one of -Inf a weight of 0; rows that do not see the key must not change.
      put(in.k, 0, bad_key, 0, 5, kInfinity);
      const Outputs infinite = run(c, in);
      Dense others = infinite.o, all_clean = clean.o;
      for (size_t i = 0; i < others.size(); ++i) {
        const auto n = static_cast<int64_t>(i);
        if (rows(n / c.headdim_v / c.nheads / c.seqlen_q, n / c.headdim_v / c.nheads % c.seqlen_q, n / c.headdim_v % c.nheads, 0))
          others[i] = all_clean[i] = 0;
      }
      expect_touched("o beside Inf", all_clean, others, c.seqlen_q, c.nheads, c.headdim_v, [](int64_t, int64_t, int64_t, int64_t) { return false; });
    }
}

TEST_P(PropertySmall, ANonFiniteValueTouchesTheRowsThatSeeIt) {
  for (const Case& c : those_of(target, shapes_for_nan(dtype, false)))
    for (int64_t bad_key : {c.seqlen_k - 1, c.seqlen_k - 3, c.seqlen_k / 2})
      for (double bad : {kNan, kInfinity}) {
        SCOPED_TRACE(c.name + " key " + std::to_string(bad_key) + " value " + std::to_string(bad));
        const CaseInputs in = make_inputs(c);
        const Outputs clean = run(c, in);
        put(in.v, 0, bad_key, 0, 7, bad);
        const Outputs spoilt = run(c, in);
        expect_touched("o", clean.o, spoilt.o, c.seqlen_q, c.nheads, c.headdim_v, [&](int64_t b, int64_t row, int64_t h, int64_t d) {
          return b == 0 && h / (c.nheads / c.nheads_k) == 0 && d == 7 && sees(c, row, bad_key);
        });
        expect_lse_touched(c, clean, spoilt, [](int64_t, int64_t, int64_t) { return false; });
      }
}

// Where no sum is finite any more, what comes next still counts: Inf - Inf is NaN.
TEST_P(PropertySmall, InfinitiesOfBothSignsMakeANan) {
  for (Case c : those_of(target, shapes_for_nan(dtype, false)))
    for (const int64_t from : {c.seqlen_k / 2, c.seqlen_k - 1}) {  // the keys whose values are -Inf
      SCOPED_TRACE(c.name + ", -Inf from key " + std::to_string(from));
      c.backward = false;
      const CaseInputs in = make_inputs(c);
      Dense v = read(in.v);
      const int64_t row = in.v.shape(2) * in.v.shape(3);
      for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<int64_t>(i) / row % in.v.shape(1) < from ? kInfinity : -kInfinity;
      write(in.v, v);
      const Outputs expected = run_passes(c, in, options_of(c, {Backend::kReference, Algorithm::kAuto, Isa::kAuto, 0})), got = run(c, in);
      ASSERT_EQ(got.o.size(), expected.o.size());
      for (size_t i = 0; i < got.o.size(); ++i)
        ASSERT_TRUE(got.o[i] == expected.o[i] || (std::isnan(got.o[i]) && std::isnan(expected.o[i])))
            << "element " << i << ": " << got.o[i] << ", not " << expected.o[i];
    }
}

const auto kParameters = ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16), ::testing::ValuesIn(all_targets()));
INSTANTIATE_TEST_SUITE_P(Every, PropertySmall, kParameters, parameter_name);
INSTANTIATE_TEST_SUITE_P(Every, Fork, kParameters, parameter_name);

// ---- The oracle itself --------------------------------------------------------------------------------------------------

// d/dx of sum(o * dout) + sum(lse * dlse) by central differences, for every element of q, k, v and of a bias that hides nothing.
TEST(OracleSmall, GradientsAgreeWithFiniteDifferences) {
  std::vector<Case> cases;
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{5, 7}, std::pair{7, 5}}) {
    const Case plain = shape(DType::kF64, 2, seqlen_q, seqlen_k, 4, 2, 6, false), causal = shape(DType::kF64, 2, seqlen_q, seqlen_k, 4, 2, 6, true);
    cases.insert(cases.end(), {plain, causal, featured(plain), featured(capped(windowed(causal, 3, -1), 2)), biased(plain), windowed(plain, 2, 1),
                               windowed(causal, 1, -1), capped(causal, 1.5), capped(windowed(plain, 0, 3), 0.7)});
    for (const Case& c : {plain, causal, featured(capped(windowed(causal, 3, -1), 2))}) {
      cases.push_back(c);
      cases.back().dlse = true;
      cases.push_back(cases.back());
      cases.back().varlen = true;
    }
  }
  for (Case c : cases) {
    c.headdim_v = 3;
    c.softmax_scale = 0.7;
    const CaseInputs in = make_inputs(c);
    if (in.scores.bias) {
      Dense bias = read(in.scores.bias);
      for (double& x : bias) x = std::isfinite(x) ? x : -1.0;
      write(in.scores.bias, bias);
    }
    const Options options = options_of(c, {Backend::kReference, Algorithm::kAuto, Isa::kAuto, 0});
    const Outputs out = run_passes(c, in, options);
    const Dense dout = read(in.dout), dlse = read(in.dlse);
    Case forward_only = c;
    forward_only.backward = false;
    const auto loss = [&] {
      const Outputs forward = run_passes(forward_only, in, options);
      double sum = 0;
      for (size_t i = 0; i < dout.size(); ++i) sum += forward.o[i] * dout[i];
      for (size_t i = 0; i < dlse.size(); ++i)
        if (std::isfinite(forward.lse[i])) sum += forward.lse[i] * dlse[i];  // an empty row has no gradient
      return sum;
    };
    const auto compare = [&](const char* name, const Tensor& x, const Dense& gradient) {
      const Dense at = read(x);
      constexpr double kStep = 1e-5;
      for (size_t i = 0; i < at.size(); ++i) {
        Dense moved = at;
        moved[i] = at[i] + kStep;
        write(x, moved);
        const double above = loss();
        moved[i] = at[i] - kStep;
        write(x, moved);
        const double below = loss();
        ASSERT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-8) << name << " " << i << " " << c.name;
      }
      write(x, at);
    };
    compare("dq", in.q, out.dq);
    compare("dk", in.k, out.dk);
    compare("dv", in.v, out.dv);
    if (in.scores.bias) compare("dbias", in.scores.bias, out.dbias);
  }
}

}  // namespace
}  // namespace fattn::testing
