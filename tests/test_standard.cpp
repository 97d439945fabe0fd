// Algorithm standard on the CPU against the float64 oracle: shapes, masks, strides, dtypes, roundings, weights, NaN,
// workspace, threads.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fattn/fattn.hpp"
#include "shared/half.h"

namespace {

using fattn::DType;
using fattn::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double load(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[i];
    case DType::kF32: return static_cast<const float*>(data)[i];
    case DType::kF16: return fattn::core::f16_to_float(static_cast<const uint16_t*>(data)[i]);
    case DType::kBF16: return fattn::core::bf16_to_float(static_cast<const uint16_t*>(data)[i]);
    default: return kNaN;
  }
}

void store(void* data, DType dtype, int64_t i, double x) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(data)[i] = x; return;
    case DType::kF32: static_cast<float*>(data)[i] = static_cast<float>(x); return;
    case DType::kF16: static_cast<uint16_t*>(data)[i] = fattn::core::float_to_f16(static_cast<float>(x)); return;
    case DType::kBF16: static_cast<uint16_t*>(data)[i] = fattn::core::float_to_bf16(static_cast<float>(x)); return;
    default: return;
  }
}

double rounded(DType dtype, double x) {
  double room = 0;
  store(&room, dtype, 0, x);
  return load(&room, dtype, 0);
}

enum class Layout { kBnhd, kBhnd, kPadded };

// A tensor with its memory. `values()` are in row-major order of the shape, whatever the strides.
struct Array {
  Array(DType t, const std::vector<int64_t>& sh, Layout layout) : Array(t, sh, strides_of(sh, layout)) {}
  Array(DType t, std::vector<int64_t> sh, std::vector<int64_t> st) : dtype(t), shape(std::move(sh)), strides(std::move(st)) {
    int64_t span = 1;
    for (size_t i = 0; i < shape.size(); ++i) span += (std::max<int64_t>(shape[i], 1) - 1) * strides[i];
    bytes.assign(static_cast<size_t>(size() == 0 ? 0 : span) * fattn::size_of(dtype), 0xff);  // NaN in every dtype
  }
  static std::vector<int64_t> strides_of(const std::vector<int64_t>& shape, Layout layout) {
    std::vector<int64_t> strides(shape.size());
    std::vector<size_t> order(shape.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    if (layout == Layout::kBhnd && order.size() == 4) std::swap(order[1], order[2]);
    int64_t stride = 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = stride;
      stride = stride * std::max<int64_t>(shape[order[i]], 1) + (layout == Layout::kPadded ? 3 : 0);
    }
    return strides;
  }
  int64_t size() const {
    int64_t n = 1;
    for (int64_t s : shape) n *= s;
    return n;
  }
  int64_t offset(int64_t index) const {
    int64_t at = 0;
    for (size_t i = shape.size(); i-- > 0;) {
      at += index % shape[i] * strides[i];
      index /= shape[i];
    }
    return at;
  }
  double get(int64_t index) const { return load(bytes.data(), dtype, offset(index)); }
  void set(int64_t index, double x) { store(bytes.data(), dtype, offset(index), x); }
  Tensor view() {
    void* data = size() == 0 ? nullptr : bytes.data();
    const auto& s = shape;
    const auto& t = strides;
    if (s.size() == 3) return Tensor(data, dtype, {s[0], s[1], s[2]}, {t[0], t[1], t[2]});
    return Tensor(data, dtype, {s[0], s[1], s[2], s[3]}, {t[0], t[1], t[2], t[3]});
  }
  // The same values in float64, contiguous.
  Array oracle() const {
    Array a(DType::kF64, shape, Layout::kBnhd);
    for (int64_t i = 0; i < size(); ++i) a.set(i, get(i));
    return a;
  }
  void fill_normal(std::mt19937& random) {
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < size(); ++i) set(i, normal(random));
  }

  DType dtype;
  std::vector<int64_t> shape, strides;
  std::vector<unsigned char> bytes;
};

struct Case {
  int64_t batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v;
  bool causal;
  Layout layout = Layout::kBnhd;
  double scale = 0;  // 0: the default
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "batch " << c.batch << " seqlen " << c.seqlen_q << "x" << c.seqlen_k << " heads " << c.nheads << "/" << c.nheads_k << " headdim "
             << c.headdim << "/" << c.headdim_v << (c.causal ? " causal" : "") << " layout " << static_cast<int>(c.layout) << " scale " << c.scale;
}

fattn::Options options_of(const Case& c, fattn::Backend backend) {
  fattn::Options o;
  o.causal = c.causal;
  o.backend = backend;
  o.algorithm = fattn::Algorithm::kStandard;
  if (c.scale != 0) o.softmax_scale = c.scale;
  return o;
}

// All tensors of a case, in one dtype and layout.
struct Set {
  Set(const Case& c, DType dtype, uint32_t seed)
      : q(dtype, {c.batch, c.seqlen_q, c.nheads, c.headdim}, c.layout),
        k(dtype, {c.batch, c.seqlen_k, c.nheads_k, c.headdim}, c.layout),
        v(dtype, {c.batch, c.seqlen_k, c.nheads_k, c.headdim_v}, c.layout),
        o(dtype, {c.batch, c.seqlen_q, c.nheads, c.headdim_v}, c.layout),
        lse(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {c.batch, c.nheads, c.seqlen_q}, c.layout),
        weights(dtype, {c.batch, c.nheads, c.seqlen_q, c.seqlen_k}, c.layout),
        dout(dtype, {c.batch, c.seqlen_q, c.nheads, c.headdim_v}, c.layout),
        dq(dtype, q.shape, c.layout),
        dk(dtype, k.shape, c.layout),
        dv(dtype, v.shape, c.layout) {
    std::mt19937 random(seed);
    for (Array* a : {&q, &k, &v, &dout}) a->fill_normal(random);
  }
  Set oracle() const {
    Set r = *this;
    for (Array* a : {&r.q, &r.k, &r.v, &r.o, &r.lse, &r.weights, &r.dout, &r.dq, &r.dk, &r.dv}) *a = a->oracle();
    return r;
  }
  fattn::ForwardTensors forward() { return {q.view(), k.view(), v.view(), o.view(), lse.view(), weights.view()}; }
  fattn::BackwardTensors backward() { return {q.view(), k.view(), v.view(), o.view(), lse.view(), dout.view(), dq.view(), dk.view(), dv.view()}; }

  Array q, k, v, o, lse, weights, dout, dq, dk, dv;
};

// Executes with a workspace of exactly the size asked for, full of NaN, and looks whether the bytes behind it were left alone.
template <class Tensors>
void execute(const Tensors& tensors, const fattn::Options& options) {
  const fattn::Plan plan(tensors, options);
  const size_t bytes = plan.workspace_bytes(), guard = 64;
  std::unique_ptr<unsigned char, void (*)(void*)> workspace(static_cast<unsigned char*>(std::aligned_alloc(64, (bytes + guard + 63) / 64 * 64)),
                                                            std::free);
  std::memset(workspace.get(), 0xff, bytes);
  std::memset(workspace.get() + bytes, 0x5a, guard);
  plan.execute(tensors, workspace.get(), bytes);
  for (size_t i = 0; i < guard; ++i) ASSERT_EQ(workspace.get()[bytes + i], 0x5a) << "written behind the workspace";
}

void run_forward(Set& run, const Case& c) { execute(run.forward(), options_of(c, fattn::Backend::kCpu)); }
void run_backward(Set& run, const Case& c) { execute(run.backward(), options_of(c, fattn::Backend::kCpu)); }
void run_oracle(Set& run, const Case& c, bool backward) {
  const fattn::Options options = options_of(c, fattn::Backend::kReference);
  fattn::forward(run.forward(), options);
  if (backward) fattn::backward(run.backward(), options);
}

// |got - want| <= tolerance * (largest |want|) for every element; Inf and NaN only where they are wanted.
void expect_close(const char* name, const Array& got, const Array& want, double tolerance) {
  ASSERT_EQ(got.shape, want.shape);
  double largest = 0.1;  // of inputs of about 1; gradients may cancel to nothing
  for (int64_t i = 0; i < want.size(); ++i)
    if (std::isfinite(want.get(i))) largest = std::max(largest, std::fabs(want.get(i)));
  double worst = 0;
  for (int64_t i = 0; i < want.size(); ++i) {
    const double g = got.get(i), w = want.get(i);
    if (std::isnan(w) ? std::isnan(g) : g == w) continue;
    const double error = std::fabs(g - w) / largest;
    ASSERT_TRUE(error <= tolerance) << name << "[" << i << "] is " << g << ", expected " << w << "; largest " << largest;
    worst = std::max(worst, error);
  }
  if (std::getenv("FATTN_TEST_VERBOSE")) std::printf("%s %.2e of %.2e\n", name, worst, tolerance);
}

// The scores, up to about 5, are rounded to eps relatively, so weights are off by about 5 eps; three more roundings follow.
double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 0x1p-24 * 40;  // sums over up to 1,100 terms in fp32
    case DType::kF16: return 0x1p-11 * 8;
    default: return 0x1p-8 * 8;
  }
}

const Case kCases[] = {
    {1, 1, 1, 1, 1, 1, 1, false},
    {2, 7, 7, 3, 1, 5, 5, true},
    {1, 63, 65, 2, 2, 64, 64, true},
    {1, 65, 63, 2, 2, 64, 64, true},  // two empty rows
    {2, 127, 300, 4, 2, 40, 24, true, Layout::kBhnd},
    {2, 300, 127, 6, 2, 24, 40, true, Layout::kBhnd},
    {1, 257, 1025, 2, 1, 16, 80, false, Layout::kPadded},
    {1, 1025, 257, 2, 1, 80, 16, false, Layout::kPadded},
    {1, 257, 1025, 2, 1, 16, 16, true},
    {1, 1026, 258, 2, 1, 16, 16, true, Layout::kBhnd},  // whole blocks of empty rows
    {3, 1, 513, 8, 2, 64, 64, true},
    {1, 100, 100, 1, 1, 576, 576, false},
    {1, 100, 100, 1, 1, 32, 32, false, Layout::kBnhd, -0.3},
    {1, 33, 34, 2, 1, 32, 32, true, Layout::kBnhd, 5.0},  // logits of 100
    {0, 4, 4, 2, 2, 8, 8, false},
    {2, 0, 4, 2, 1, 8, 8, false},
    {2, 4, 0, 2, 1, 8, 8, true},
};

class Standard : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, Standard, testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& instance) { return fattn::name_of(instance.param); });

TEST_P(Standard, ForwardMatchesOracle) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << c);
    Set run(c, GetParam(), 1);
    Set oracle = run.oracle();
    run_forward(run, c);
    run_oracle(oracle, c, false);
    // At |scale| > 1 scores reach 150, and their rounding counts in proportion.
    const double tolerance = tolerance_of(GetParam()) * (c.scale > 1 ? 30 : 1);
    expect_close("o", run.o, oracle.o, tolerance);
    expect_close("lse", run.lse, oracle.lse, tolerance);
    expect_close("weights", run.weights, oracle.weights, tolerance);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Standard, BackwardMatchesOracle) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << c);
    Set run(c, GetParam(), 2);
    Set oracle = run.oracle();
    run_forward(run, c);
    run_backward(run, c);
    run_oracle(oracle, c, true);
    const double tolerance = tolerance_of(GetParam()) * (c.scale > 1 ? 60 : 2);
    expect_close("dq", run.dq, oracle.dq, tolerance);
    expect_close("dk", run.dk, oracle.dk, tolerance);
    expect_close("dv", run.dv, oracle.dv, tolerance);
    if (HasFatalFailure()) return;
  }
}

// The weights are what standard.h says, rounding by rounding: softmax of the rounded scores, rounded. Sums in another
// order move a value across a rounding boundary now and then; a rounding too many or too few moves most of them.
TEST_P(Standard, RoundingsAreThoseDocumented) {
  const DType dtype = GetParam();
  if (dtype == DType::kF32) GTEST_SKIP() << "16-bit only";
  const Case c{1, 64, 128, 1, 1, 64, 64, false};
  Set run(c, dtype, 3);
  run_forward(run, c);
  int64_t different = 0;
  for (int64_t i = 0; i < c.seqlen_q; ++i) {
    std::vector<double> s(static_cast<size_t>(c.seqlen_k));
    double sum = 0;
    for (int64_t j = 0; j < c.seqlen_k; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < c.headdim; ++d) dot += run.q.get(i * c.headdim + d) * run.k.get(j * c.headdim + d);
      sum += std::exp(s[static_cast<size_t>(j)] = rounded(dtype, dot / 8));
    }
    EXPECT_NEAR(run.lse.get(i), std::log(sum), 2e-6);
    for (int64_t j = 0; j < c.seqlen_k; ++j) {
      const double want = rounded(dtype, std::exp(s[static_cast<size_t>(j)]) / sum), got = run.weights.get(i * c.seqlen_k + j);
      EXPECT_NEAR(got, want, want * 0x1p-6);
      different += got != want;
    }
  }
  EXPECT_LE(different, c.seqlen_q * c.seqlen_k / 50);
  for (int64_t x = 0; x < c.seqlen_q * c.headdim_v; ++x) {
    double sum = 0;
    for (int64_t j = 0; j < c.seqlen_k; ++j) sum += run.weights.get(x / c.headdim_v * c.seqlen_k + j) * run.v.get(j * c.headdim_v + x % c.headdim_v);
    EXPECT_NEAR(run.o.get(x), sum, std::fabs(sum) * (dtype == DType::kF16 ? 0x1p-11 : 0x1p-8) + 1e-6);
  }
}

// Every 16-bit pattern goes through the library as through half.h, but subnormal numbers of bf16 are 0: one key of weight 1 copies v to o.
TEST_P(Standard, ConversionsOfEveryPattern) {
  const DType dtype = GetParam();
  if (dtype == DType::kF32) GTEST_SKIP() << "16-bit only";
  const Case c{1024, 1, 1, 1, 1, 1, 64, false};
  Set run(c, dtype, 4);
  for (int64_t x = 0; x < 65536; ++x) {
    const auto pattern = static_cast<uint16_t>(x);
    std::memcpy(run.v.bytes.data() + 2 * x, &pattern, 2);
  }
  run_forward(run, c);
  for (int64_t x = 0; x < 65536; ++x) {
    const double got = run.o.get(x), given = run.v.get(x);
    const double want = dtype == DType::kBF16 && std::fabs(given) < 0x1p-126 ? 0 : given;  // docs/NUMERICS.md
    // BLAS may sum x and +0, so -0 may become +0.
    EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << "pattern " << x << " became " << got;
  }
}

// NaN and Inf anywhere: the same elements of every result are NaN or Inf as in the oracle, masked ones reach nothing.
TEST_P(Standard, NaNAndInfPropagateAsInTheOracle) {
  const Case shapes[] = {{1, 9, 6, 2, 1, 4, 4, true}, {2, 6, 9, 2, 1, 4, 5, true}, {1, 5, 7, 2, 2, 4, 4, false}, {1, 300, 270, 1, 1, 8, 8, true}};
  std::mt19937 random(5);
  for (const Case& c : shapes)
    for (int round = 0; round < 12; ++round) {
      Set run(c, GetParam(), static_cast<uint32_t>(round));
      Array* where[] = {&run.q, &run.k, &run.v, &run.dout};
      Array& target = *where[round % 4];
      const int64_t index = static_cast<int64_t>(random()) % target.size();
      target.set(index, round % 3 == 0 ? kNaN : round % 3 == 1 ? kInf : -kInf);
      SCOPED_TRACE(testing::Message() << c << " round " << round << " index " << index);
      Set oracle = run.oracle();
      run_forward(run, c);
      run_backward(run, c);
      run_oracle(oracle, c, true);
      const double tolerance = tolerance_of(GetParam()) * 4;
      expect_close("o", run.o, oracle.o, tolerance);
      expect_close("lse", run.lse, oracle.lse, tolerance);
      expect_close("weights", run.weights, oracle.weights, tolerance);
      expect_close("dq", run.dq, oracle.dq, tolerance);
      expect_close("dk", run.dk, oracle.dk, tolerance);
      expect_close("dv", run.dv, oracle.dv, tolerance);
      if (HasFatalFailure()) return;
    }
}

// A scale of 0 makes every score 0, except that 0 times NaN or Inf is NaN.
TEST_P(Standard, ScaleZero) {
  const Case c{1, 5, 6, 1, 1, 4, 4, true};
  for (const bool poisoned : {false, true}) {
    Set run(c, GetParam(), 6);
    if (poisoned) run.q.set(2, kInf);
    Set oracle = run.oracle();
    fattn::Options options = options_of(c, fattn::Backend::kCpu);
    options.softmax_scale = 0.0;
    execute(run.forward(), options);
    execute(run.backward(), options);
    options.backend = fattn::Backend::kReference;
    fattn::forward(oracle.forward(), options);
    fattn::backward(oracle.backward(), options);
    expect_close("o", run.o, oracle.o, tolerance_of(GetParam()));
    expect_close("dq", run.dq, oracle.dq, tolerance_of(GetParam()));
    expect_close("dk", run.dk, oracle.dk, tolerance_of(GetParam()));
    expect_close("dv", run.dv, oracle.dv, tolerance_of(GetParam()));
  }
}

// Strides that BLAS does not know: overlapping windows (stride below headdim), one key expanded to all (stride 0).
TEST_P(Standard, InputsThatNeedACopy) {
  const Case c{2, 40, 30, 2, 1, 8, 8, true};
  for (const std::vector<int64_t>& strides : {std::vector<int64_t>{0, 1, 0, 1}, std::vector<int64_t>{0, 3, 8, 1}, std::vector<int64_t>{0, 0, 8, 1}}) {
    Set run(c, GetParam(), 7);
    run.k = Array(GetParam(), run.k.shape, strides);
    run.v = Array(GetParam(), run.v.shape, strides);
    std::mt19937 random(8);
    run.k.fill_normal(random);
    run.v.fill_normal(random);
    Set oracle = run.oracle();
    run_forward(run, c);
    run_backward(run, c);
    run_oracle(oracle, c, true);
    // With equal keys the gradients of up to 40 rows cancel, their errors do not.
    const double tolerance = tolerance_of(GetParam()) * (strides[1] == 0 ? 20 : 2);
    expect_close("o", run.o, oracle.o, tolerance_of(GetParam()));
    expect_close("dq", run.dq, oracle.dq, tolerance);
    expect_close("dk", run.dk, oracle.dk, tolerance);
    expect_close("dv", run.dv, oracle.dv, tolerance);
  }
}

// Row strides beyond 32 bits, in an input and an output: mapped, hardly touched memory.
TEST(StandardStrides, BeyondThirtyTwoBits) {
  const Case c{1, 2, 2, 1, 1, 4, 4, false};
  Set run(c, DType::kF32, 9);
  const int64_t far = (int64_t{1} << 31) + 16;
  const size_t bytes = static_cast<size_t>(far + 4) * sizeof(float);
  void* maps[2];
  for (void*& map : maps) {
    map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) GTEST_SKIP() << "no address space of 16 GiB here";
  }
  const Tensor k(maps[0], DType::kF32, {1, 2, 1, 4}, {0, far, 4, 1}), o(maps[1], DType::kF32, {1, 2, 1, 4}, {0, far, 4, 1});
  for (int64_t i = 0; i < 8; ++i) static_cast<float*>(maps[0])[i / 4 * far + i % 4] = static_cast<float>(run.k.get(i));
  Set oracle = run.oracle();
  run_oracle(oracle, c, false);
  execute(fattn::ForwardTensors{run.q.view(), k, run.v.view(), o, run.lse.view(), {}}, options_of(c, fattn::Backend::kCpu));
  for (int64_t i = 0; i < 8; ++i) run.o.set(i, static_cast<float*>(maps[1])[i / 4 * far + i % 4]);
  expect_close("o", run.o, oracle.o, tolerance_of(DType::kF32));
  for (void* map : maps) munmap(map, bytes);
}

// Threads of a host: real ones, all at once.
int32_t on_threads(void*, int32_t nworkers, void (*body)(void*, int32_t), void* arg) {
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < nworkers; ++i) threads.emplace_back(body, arg, i);
  for (std::thread& t : threads) t.join();
  return 0;
}
const fattn_executor kThreads{sizeof(fattn_executor), 64, nullptr, on_threads};

TEST_P(Standard, SameBitsForAnyNumberOfThreads) {
  const Case c{1, 700, 600, 4, 2, 32, 32, true};
  std::vector<unsigned char> first;
  for (const int threads : {1, 2, 5, 16}) {
    Set run(c, GetParam(), 10);
    fattn::Options options = options_of(c, fattn::Backend::kCpu);
    options.num_threads = threads;
    options.executor = &kThreads;
    execute(run.forward(), options);
    execute(run.backward(), options);
    std::vector<unsigned char> all;
    for (const Array* a : {&run.o, &run.lse, &run.weights, &run.dq, &run.dk, &run.dv}) all.insert(all.end(), a->bytes.begin(), a->bytes.end());
    if (first.empty()) first = all;
    EXPECT_EQ(all, first) << threads << " threads";
  }
}

TEST(StandardThreads, SeveralCallersAtOnce) {
  const Case c{1, 300, 300, 3, 3, 32, 32, false};
  Set alone(c, DType::kF32, 11);
  run_forward(alone, c);
  std::vector<Set> runs(6, Set(c, DType::kF32, 11));
  std::vector<std::thread> callers;
  for (Set& run : runs)
    callers.emplace_back([&run, &c] {
      for (int i = 0; i < 20; ++i) run_forward(run, c);
    });
  for (std::thread& t : callers) t.join();
  for (const Set& run : runs) EXPECT_EQ(run.o.bytes, alone.o.bytes);
}

TEST(StandardThreads, WorksInAForkedChild) {
  const Case c{1, 300, 300, 2, 2, 32, 32, false};
  Set parent(c, DType::kF32, 12);
  run_forward(parent, c);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs is a failure, not a hang of the test
    Set run(c, DType::kF32, 12);
    run_forward(run, c);
    _exit(run.o.bytes == parent.o.bytes ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

fattn_problem described(DType dtype, int64_t seqlen_q, int64_t seqlen_k) {
  const Tensor q(nullptr, dtype, {1, seqlen_q, 1, 1}), k(nullptr, dtype, {1, seqlen_k, 1, 1});
  return fattn::describe(fattn::ForwardTensors{q, k, k, q, {}, {}}, options_of({}, fattn::Backend::kCpu));
}

TEST(StandardPlan, WorkspaceHoldsTheMatricesAndLittleElse) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    const Case c{2, 1024, 2048, 3, 1, 64, 64, true};
    const size_t matrix = size_t{2} * 3 * 1024 * 2048 * fattn::size_of(dtype);
    Set run(c, dtype, 13);
    fattn::Options options = options_of(c, fattn::Backend::kCpu);
    options.num_threads = 2;
    // In fp32 of each worker a tile of 1024 rows, where Inf and NaN are taken out of what pairs hide.
    const size_t little = dtype == DType::kF32 ? 2 * (4096 + size_t{1024} * 64 * sizeof(float)) : 2 * (size_t{4} << 20);
    const size_t forward = fattn::Plan(run.forward(), options).workspace_bytes(), backward = fattn::Plan(run.backward(), options).workspace_bytes();
    EXPECT_GE(forward, matrix);
    EXPECT_LE(forward, matrix + little);
    EXPECT_GE(backward, 2 * matrix);
    EXPECT_LE(backward, 2 * (matrix + little));
  }
}

TEST(StandardPlan, TooLargeIsOutOfMemory) {
  const fattn_problem problem = described(DType::kF32, int64_t{1} << 40, std::numeric_limits<int32_t>::max());
  try {
    fattn::Plan plan(problem);
    FAIL() << "planned";
  } catch (const fattn::Error& e) {
    EXPECT_EQ(e.code(), fattn::ErrorCode::kOutOfMemory) << e.what();
    EXPECT_NE(std::string(e.what()).find("Use algorithm v2"), std::string::npos) << e.what();
  }
}

TEST(StandardPlan, UnsupportedSaysWhy) {
  const fattn::Support f64 = fattn::supported(described(DType::kF64, 4, 4));
  EXPECT_FALSE(f64);
  EXPECT_NE(f64.reason.find("backend reference"), std::string::npos) << f64.reason;
  const fattn::Support keys = fattn::supported(described(DType::kF32, 1, int64_t{1} << 31));
  EXPECT_FALSE(keys);
  EXPECT_NE(keys.reason.find("2147483647"), std::string::npos) << keys.reason;
}

}  // namespace
