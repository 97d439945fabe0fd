// The AMX kernels called directly on tasks: forward and backward in bf16 against float64, within twice (gradients: three
// times) the error of standard attention computed in bf16.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/kernels.h"
#include "shared/half.h"

namespace {

using namespace fattn::core;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool amx_usable() {
#if defined(FATTN_EMULATE_AMX)
  return kernels_amx() && __builtin_cpu_supports("avx512bf16");
#elif defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return kernels_amx() && __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Rows of bf16 that end at an unreadable page, so that reading past the last element faults.
class Rows {
 public:
  Rows(int64_t rows, int headdim, int64_t stride) : rows_(rows), headdim_(headdim), stride_(stride) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = rows > 0 ? static_cast<size_t>((rows - 1) * stride + headdim) * sizeof(uint16_t) : 0;
    size_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(base_, MAP_FAILED);
    EXPECT_EQ(mprotect(base_ + size_ - page, page, PROT_NONE), 0);
    data_ = reinterpret_cast<uint16_t*>(base_ + size_ - page - bytes);
  }
  ~Rows() { munmap(base_, size_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  void fill_normal(unsigned seed, float amplitude) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, amplitude);
    for (int64_t i = 0; i < rows_; ++i)
      for (int d = 0; d < headdim_; ++d) set(i, d, normal(random));
  }
  double at(int64_t row, int d) const { return static_cast<double>(bf16_to_float(data_[row * stride_ + d])); }
  void set(int64_t row, int d, float x) { data_[row * stride_ + d] = float_to_bf16(x); }
  uint16_t* data() const { return data_; }
  int64_t rows() const { return rows_; }
  int64_t stride() const { return stride_; }
  int headdim() const { return headdim_; }

 private:
  int64_t rows_;
  int headdim_;
  int64_t stride_;
  char* base_;
  size_t size_;
  uint16_t* data_;
};

// Scratch of exactly the promised size, full of NaN, that notices writes past its end.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : bytes_(bytes), memory_(bytes + 128, char(0xff)) {
    const size_t off = reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    data_ = memory_.data() + (off ? 64 - off : 0);
  }
  ~Scratch() {
    for (const char* p = data_ + bytes_; p < memory_.data() + memory_.size(); ++p) EXPECT_EQ(*p, char(0xff)) << "scratch overrun";
  }
  void* data() { return data_; }

 private:
  size_t bytes_;
  std::vector<char> memory_;
  char* data_;
};

struct Case {
  int64_t seqlen_q, seqlen_k;
  int headdim, headdim_v;
  bool causal = false;
  float amplitude = 1;  // of q
  int64_t block_k = 1024, task = 256;
  float scale = 0;  // 0: 1 / sqrt(headdim)
  int64_t group = 1;
  int64_t padding = 0;  // added to the strides

  float softmax_scale() const { return scale != 0 ? scale : static_cast<float>(1 / std::sqrt(static_cast<double>(headdim))); }
  int64_t diagonal() const { return causal ? seqlen_k - seqlen_q + 1 : seqlen_k; }
  int64_t visible(int64_t row) const { return std::clamp<int64_t>(row + diagonal(), 0, seqlen_k); }
  std::string name() const {
    return "seqlen_q " + std::to_string(seqlen_q) + " seqlen_k " + std::to_string(seqlen_k) + " headdim " + std::to_string(headdim) + "/" +
           std::to_string(headdim_v) + (causal ? " causal" : "") + " amplitude " + std::to_string(amplitude) + " block_k " + std::to_string(block_k) +
           " group " + std::to_string(group) + " scale " + std::to_string(softmax_scale());
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (bool causal : {false, true}) {
    for (int headdim : {64, 128})
      for (int64_t n : {1, 7, 33, 128, 300}) all.push_back({n, n, headdim, headdim, causal});
    for (int headdim : {1, 8, 31, 33, 80, 96, 200, 576}) all.push_back({70, 90, headdim, headdim, causal});
    all.push_back({50, 130, 64, 40, causal});
    all.push_back({50, 130, 40, 128, causal});
    all.push_back({130, 50, 64, 64, causal});          // causal: rows that see nothing
    all.push_back({40, 700, 64, 64, causal, 1, 256});  // several blocks
    all.push_back({300, 300, 64, 64, causal, 1, 32, 48});
    all.push_back({200, 600, 64, 64, causal, 8, 96});  // running maximum
    all.push_back({200, 600, 128, 128, causal, 8, 160});
    all.push_back({200, 300, 64, 64, causal, 3000, 96});  // huge logits
    all.push_back({100, 100, 64, 64, causal, 1, 64, 256, -0.2f});
    all.push_back({100, 100, 64, 64, causal, 1, 64, 256, 0, 3});
    all.push_back({100, 100, 72, 64, causal, 1, 64, 256, 0, 2, 24});
  }
  return all;
}

using Matrix = std::vector<std::vector<double>>;
Matrix zeros(int64_t rows, int64_t columns) { return Matrix(static_cast<size_t>(rows), std::vector<double>(static_cast<size_t>(columns), 0.0)); }
double as_bf16(double x) { return static_cast<double>(bf16_to_float(float_to_bf16(static_cast<float>(x)))); }

struct Inputs {
  explicit Inputs(const Case& c)
      : q(c.seqlen_q * c.group, c.headdim, c.headdim + c.padding),
        k(c.seqlen_k, c.headdim, c.headdim + c.padding),
        v(c.seqlen_k, c.headdim_v, c.headdim_v + c.padding),
        dout(c.seqlen_q * c.group, c.headdim_v, c.headdim_v + c.padding) {
    q.fill_normal(1, c.amplitude);
    k.fill_normal(2, 1);
    v.fill_normal(3, 1);
    dout.fill_normal(4, 1);
  }
  Rows q, k, v, dout;  // heads of a group lie one after the other
};

struct Results {
  Matrix o, dq, dk, dv;
  std::vector<double> lse, delta;
};

// Attention in float64; `rounded`: as the standard algorithm computes it in bf16, every intermediate matrix rounded.
Results oracle(const Case& c, const Inputs& in, bool rounded) {
  const auto round = [&](double x) { return rounded ? as_bf16(x) : x; };
  Results r{zeros(in.q.rows(), c.headdim_v), zeros(in.q.rows(), c.headdim), zeros(c.seqlen_k, c.headdim), zeros(c.seqlen_k, c.headdim_v), {}, {}};
  for (int64_t i = 0; i < in.q.rows(); ++i) {
    const int64_t n = c.visible(i % c.seqlen_q);
    std::vector<double> s, p, dp;
    double largest = -kInf, sum = 0, delta = 0;
    for (int64_t j = 0; j < n; ++j) {
      double x = 0, y = 0;
      for (int d = 0; d < c.headdim; ++d) x += in.q.at(i, d) * in.k.at(j, d);
      for (int d = 0; d < c.headdim_v; ++d) y += in.dout.at(i, d) * in.v.at(j, d);
      s.push_back(round(x * static_cast<double>(c.softmax_scale())));
      dp.push_back(round(y));
      if (!(s.back() <= largest)) largest = s.back();
    }
    for (double x : s) sum += std::exp(x - largest);
    r.lse.push_back(largest == -kInf ? -kInf : largest + std::log(sum));
    if (r.lse.back() == -kInf) s.clear();
    for (double x : s) p.push_back(round(std::exp(x - r.lse.back())));
    for (size_t j = 0; j < p.size(); ++j) delta += p[j] * dp[j];
    r.delta.push_back(delta);
    auto& o = r.o[static_cast<size_t>(i)];
    for (size_t j = 0; j < p.size(); ++j) {
      const int64_t key = static_cast<int64_t>(j);
      const double ds = round(p[j] * (dp[j] - delta) * static_cast<double>(c.softmax_scale()));
      for (int d = 0; d < c.headdim_v; ++d) {
        o[static_cast<size_t>(d)] += p[j] * in.v.at(key, d);
        r.dv[j][static_cast<size_t>(d)] += p[j] * in.dout.at(i, d);
      }
      for (int d = 0; d < c.headdim; ++d) {
        r.dq[static_cast<size_t>(i)][static_cast<size_t>(d)] += ds * in.k.at(key, d);
        r.dk[j][static_cast<size_t>(d)] += ds * in.q.at(i, d);
      }
    }
  }
  for (Matrix* m : {&r.o, &r.dq, &r.dk, &r.dv})
    for (auto& row : *m)
      for (double& x : row) x = round(x);
  return r;
}

void run_forward(const Case& c, const Inputs& in, Rows& o, std::vector<float>& lse) {
  lse.assign(static_cast<size_t>(in.q.rows()), kNaN);
  const KernelShape shape{c.task, 0, c.block_k, c.headdim, c.headdim_v};
  Scratch scratch(kernels_amx()->forward_scratch(kKernelBF16, shape));
  for (int64_t head = 0; head < c.group; ++head)
    for (int64_t row = 0; row < c.seqlen_q; row += c.task) {
      ForwardTask t{};
      t.q = in.q.data() + head * c.seqlen_q * in.q.stride();
      t.k = in.k.data();
      t.v = in.v.data();
      t.o = o.data() + head * c.seqlen_q * o.stride();
      t.lse = lse.data() + head * c.seqlen_q;
      t.q_stride = in.q.stride();
      t.k_stride = in.k.stride();
      t.v_stride = in.v.stride();
      t.o_stride = o.stride();
      t.lse_stride = 1;
      t.row_begin = row;
      t.row_end = std::min(c.seqlen_q, row + c.task);
      t.seqlen_k = c.seqlen_k;
      t.diagonal = c.diagonal();
      t.left_diagonal = kNoBegin;
      t.block_k = c.block_k;
      t.headdim = c.headdim;
      t.headdim_v = c.headdim_v;
      t.scale = c.softmax_scale();
      t.scratch = scratch.data();
      kernels_amx()->forward(kKernelBF16, t);
    }
}

struct Gradients {
  explicit Gradients(const Case& c)
      : dq(static_cast<size_t>(c.seqlen_q * c.group * c.headdim), 0.0f),
        dk(c.seqlen_k, c.headdim, c.headdim + c.padding),
        dv(c.seqlen_k, c.headdim_v, c.headdim_v + c.padding) {}
  std::vector<float> dq;
  Rows dk, dv;
};

// Sums as the kernels keep them: the high and the low halves of fp32 numbers apart.
struct Halves {
  std::vector<uint16_t> high, low;

  explicit Halves(const std::vector<float>& x) {
    for (const float f : x) {
      high.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(f) >> 16));
      low.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(f)));
    }
  }
  std::vector<float> joined() const {
    std::vector<float> x;
    for (size_t i = 0; i < high.size(); ++i) x.push_back(std::bit_cast<float>(uint32_t{high[i]} << 16 | low[i]));
    return x;
  }
};

void run_backward(const Case& c, const Inputs& in, const Results& exact, Gradients& g) {
  Halves dq(g.dq);
  std::vector<float> lse(exact.lse.begin(), exact.lse.end()), delta(exact.delta.begin(), exact.delta.end());
  const KernelShape shape{c.seqlen_q, c.task, c.block_k, c.headdim, c.headdim_v};
  Scratch scratch(kernels_amx()->backward_scratch(kKernelBF16, shape));
  for (int64_t key = 0; key < c.seqlen_k; key += c.task) {
    BackwardTask t{};
    t.q = in.q.data();
    t.k = in.k.data();
    t.v = in.v.data();
    t.dout = in.dout.data();
    t.lse = lse.data();
    t.delta = delta.data();
    t.dq = dq.high.data();
    t.dq_low = dq.low.data();
    t.dk = g.dk.data();
    t.dv = g.dv.data();
    t.q_stride = in.q.stride();
    t.k_stride = in.k.stride();
    t.v_stride = in.v.stride();
    t.dout_stride = in.dout.stride();
    t.lse_stride = t.delta_stride = 1;
    t.dq_stride = t.dq_low_stride = c.headdim;
    t.dk_stride = g.dk.stride();
    t.dv_stride = g.dv.stride();
    t.q_head_stride = c.seqlen_q * in.q.stride();
    t.dout_head_stride = c.seqlen_q * in.dout.stride();
    t.lse_head_stride = t.delta_head_stride = c.seqlen_q;
    t.dq_head_stride = t.dq_low_head_stride = c.seqlen_q * c.headdim;
    t.group = c.group;
    t.seqlen_q = c.seqlen_q;
    t.seqlen_k = c.seqlen_k;
    t.key_begin = key;
    t.key_end = std::min(c.seqlen_k, key + c.task);
    t.diagonal = c.diagonal();
    t.left_diagonal = kNoBegin;
    t.block_k = c.block_k;
    t.headdim = c.headdim;
    t.headdim_v = c.headdim_v;
    t.scale = c.softmax_scale();
    t.scratch = scratch.data();
    kernels_amx()->backward(kKernelBF16, t);
  }
  g.dq = dq.joined();
}

// Largest difference of finite elements; infinity where one side is NaN or infinite in another way.
template <class Get>
double difference(const Matrix& exact, Get get) {
  double worst = 0;
  for (size_t i = 0; i < exact.size(); ++i)
    for (size_t d = 0; d < exact[i].size(); ++d) {
      const double x = exact[i][d], y = get(static_cast<int64_t>(i), static_cast<int>(d));
      if ((std::isnan(x) && std::isnan(y)) || x == y) continue;
      const double error = std::fabs(x - y);
      if (!(error <= worst)) worst = std::isnan(error) ? kInf : error;
    }
  return worst;
}
double difference(const Matrix& exact, const Matrix& other) {
  return difference(exact, [&](int64_t i, int d) { return other[static_cast<size_t>(i)][static_cast<size_t>(d)]; });
}
double difference(const Matrix& exact, const Rows& rows) {
  return difference(exact, [&](int64_t i, int d) { return rows.at(i, d); });
}
double largest(const Matrix& m) {
  double x = 0;
  for (const auto& row : m)
    for (double y : row) x = std::max(x, std::fabs(y));
  return x;
}

class AmxKernels : public testing::Test {
 protected:
  void SetUp() override {
    if (!amx_usable()) GTEST_SKIP() << "this processor, kernel or compiler has no AMX";
  }
};

TEST_F(AmxKernels, ForwardIsAsExactAsStandardAttention) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    const Inputs in(c);
    Rows o(in.q.rows(), c.headdim_v, c.headdim_v + c.padding);
    std::vector<float> lse;
    run_forward(c, in, o, lse);
    const Results exact = oracle(c, in, false), standard = oracle(c, in, true);
    const double ulp = largest(exact.o) / 256;  // a result of one or two keys may be exact in standard attention by chance
    const double allowed = std::max(2 * difference(exact.o, standard.o), ulp);
    EXPECT_LE(difference(exact.o, o), allowed);
    if (c.amplitude == 1 && c.scale == 0 && !c.causal && c.seqlen_k >= 256) {
      EXPECT_LE(difference(exact.o, o), 8e-3);
    }
    for (size_t i = 0; i < lse.size(); ++i) {
      if (exact.lse[i] == -kInf)
        EXPECT_EQ(lse[i], -std::numeric_limits<float>::infinity());
      else
        EXPECT_LE(std::fabs(exact.lse[i] - static_cast<double>(lse[i])), 2e-4 + 1e-6 * std::fabs(exact.lse[i]));
    }
  }
}

TEST_F(AmxKernels, GradientsAreAsExactAsStandardAttention) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    const Inputs in(c);
    const Results exact = oracle(c, in, false), standard = oracle(c, in, true);
    Gradients g(c);
    run_backward(c, in, exact, g);
    const auto allowed = [](const Matrix& e, const Matrix& s) {
      return std::max({3 * difference(e, s), largest(e) / 128, 1e-5});
    };  // lse and delta are fp32
    EXPECT_LE(difference(exact.dv, g.dv), allowed(exact.dv, standard.dv));
    EXPECT_LE(difference(exact.dk, g.dk), allowed(exact.dk, standard.dk));
    EXPECT_LE(difference(exact.dq, [&](int64_t i, int d) { return static_cast<double>(g.dq[static_cast<size_t>(i * c.headdim + d)]); }),
              allowed(exact.dq, standard.dq));
  }
}

// What is not finite reaches exactly the outputs that it reaches in exact arithmetic.
TEST_F(AmxKernels, NonFiniteInputsStayWhereTheyBelong) {
  for (int headdim : {64, 128, 40})
    for (int what = 0; what < 7; ++what) {
      const Case c{100, 100, headdim, headdim, true, 1, 64, 256};
      SCOPED_TRACE("input " + std::to_string(what) + " headdim " + std::to_string(headdim));
      Inputs in(c);
      const float infinity = std::numeric_limits<float>::infinity();
      switch (what) {
        case 0: in.q.set(37, 3, kNaN); break;
        case 1: in.k.set(70, 3, kNaN); break;
        case 2: in.v.set(70, 5, kNaN); break;
        case 3: in.v.set(99, 5, infinity); break;
        case 4: in.v.set(10, 0, -infinity); break;
        case 5: in.dout.set(20, 1, kNaN); break;
        case 6: in.dout.set(3, 1, infinity); break;
      }
      const Results exact = oracle(c, in, false);
      Rows o(c.seqlen_q, headdim, headdim);
      std::vector<float> lse;
      run_forward(c, in, o, lse);
      EXPECT_LE(difference(exact.o, o), 0.03);
      for (size_t i = 0; i < lse.size(); ++i) EXPECT_EQ(std::isnan(exact.lse[i]), std::isnan(lse[i])) << "row " << i;
      Gradients g(c);
      run_backward(c, in, exact, g);
      EXPECT_LE(difference(exact.dv, g.dv), 0.1);
      EXPECT_LE(difference(exact.dk, g.dk), 0.1);
      EXPECT_LE(difference(exact.dq, [&](int64_t i, int d) { return static_cast<double>(g.dq[static_cast<size_t>(i * headdim + d)]); }), 0.1);
    }
}

// Whatever keys hold that a row does not see, its results are the same to the bit.
TEST_F(AmxKernels, HiddenKeysChangeNoBit) {
  constexpr int64_t kFirst = 70;  // in the middle of a tile of rows
  for (int headdim : {64, 128, 40})
    for (float amplitude : {1.0f, 8.0f})
      for (float value : {kNaN, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), 3e38f, 1e30f, 1e20f, 1e-40f}) {
        const Case c{200, 200, headdim, headdim, true, amplitude, 96, 256};
        SCOPED_TRACE(c.name() + " value " + std::to_string(value));
        const Results exact = oracle(c, Inputs(c), false);  // of other keys, but it is the same for both
        Inputs blank(c), other(c);
        for (int64_t key = kFirst; key < c.seqlen_k; ++key)
          for (int d = 0; d < headdim; ++d) {
            blank.k.set(key, d, 0);
            blank.v.set(key, d, 0);
            other.k.set(key, d, value);
            other.v.set(key, d, value);
          }
        Rows o_blank(200, headdim, headdim), o_other(200, headdim, headdim);
        std::vector<float> lse_blank, lse_other;
        run_forward(c, blank, o_blank, lse_blank);
        run_forward(c, other, o_other, lse_other);
        Gradients g_blank(c), g_other(c);
        run_backward(c, blank, exact, g_blank);
        run_backward(c, other, exact, g_other);
        int64_t different = 0;
        for (int64_t row = 0; row < kFirst; ++row) {
          different += std::bit_cast<uint32_t>(lse_blank[static_cast<size_t>(row)]) != std::bit_cast<uint32_t>(lse_other[static_cast<size_t>(row)]);
          for (int d = 0; d < headdim; ++d) {
            const auto at = static_cast<size_t>(row * headdim + d);
            different += o_blank.data()[at] != o_other.data()[at];
            different += std::bit_cast<uint32_t>(g_blank.dq[at]) != std::bit_cast<uint32_t>(g_other.dq[at]);
          }
        }
        EXPECT_EQ(different, 0);
      }
}

TEST_F(AmxKernels, SameBitsEveryTime) {
  const Case c{200, 200, 64, 64, true};
  const Inputs in(c);
  const Results exact = oracle(c, in, false);
  Rows first(200, 64, 64), second(200, 64, 64);
  std::vector<float> lse_first, lse_second;
  Gradients a(c), b(c);
  run_forward(c, in, first, lse_first);
  run_backward(c, in, exact, a);
  run_forward(c, in, second, lse_second);
  run_backward(c, in, exact, b);
  const size_t bytes = 200 * 64 * sizeof(uint16_t);
  EXPECT_EQ(std::memcmp(first.data(), second.data(), bytes), 0);
  EXPECT_EQ(std::memcmp(a.dk.data(), b.dk.data(), bytes), 0);
  EXPECT_EQ(std::memcmp(a.dv.data(), b.dv.data(), bytes), 0);
  EXPECT_EQ(lse_first, lse_second);
  EXPECT_EQ(a.dq, b.dq);
}

// With all options at once, from scratch of the promised size; and a NaN whose low half is all ones, as CUDA writes it and as rounding by an addition
// would lose it, reaches all that it should.
TEST_F(AmxKernels, OptionsStayInTheirScratchAndKeepNan) {
  const Case c{70, 150, 64, 64, false, 1, 128, 128};
  const Inputs in(c);
  const auto pairs = static_cast<size_t>(c.seqlen_q * c.seqlen_k);
  std::vector<float> bias(pairs, 0.5f), sums(pairs, 0.0f), lse(static_cast<size_t>(c.seqlen_q)), delta(lse.size(), 0.25f);
  constexpr int64_t kRow = 3, kKey = 5;
  bias[kRow * static_cast<size_t>(c.seqlen_k) + kKey] = bits_to_float(0x7fffffffu);
  const std::vector<uint8_t> mask(pairs, 1);
  const std::vector<int32_t> row_ids(lse.size(), 0), key_ids(static_cast<size_t>(c.seqlen_k), 0);
  const float slope = 0.01f;
  ScoreInputs inputs{};
  inputs.alibi_slopes = &slope;
  inputs.bias = bias.data();
  inputs.bias_fp32 = true;
  inputs.mask = mask.data();
  inputs.bias_stride = inputs.mask_stride = c.seqlen_k;
  inputs.document_q = row_ids.data();
  inputs.document_k = key_ids.data();
  inputs.dropout_below = 1000;
  inputs.dropout_scale = 1.015f;

  const auto fill = [&](auto& t) {  // what both passes have
    t.q = in.q.data(), t.k = in.k.data(), t.v = in.v.data();
    t.q_stride = t.k_stride = t.v_stride = c.headdim;
    t.lse_stride = 1;
    t.seqlen_k = t.diagonal = c.seqlen_k;
    t.left_diagonal = kNoBegin;
    t.block_k = c.block_k;
    t.headdim = t.headdim_v = c.headdim;
    t.scale = c.softmax_scale();
    t.softcap = 30;
    t.inputs = inputs;
  };

  Rows o(c.seqlen_q, c.headdim_v, c.headdim_v);
  {
    const KernelShape shape{c.task, 0, c.block_k, c.headdim, c.headdim_v, 1, true};
    Scratch scratch(kernels_amx()->forward_scratch(kKernelBF16, shape));
    ForwardTask t{};
    fill(t);
    t.o = o.data(), t.lse = lse.data();
    t.o_stride = c.headdim;
    t.row_end = c.seqlen_q;
    t.scratch = scratch.data();
    kernels_amx()->forward(kKernelBF16, t);
  }
  for (int64_t row = 0; row < c.seqlen_q; ++row) {
    EXPECT_EQ(std::isnan(o.at(row, 0)), row == kRow) << row;
    EXPECT_EQ(std::isnan(lse[static_cast<size_t>(row)]), row == kRow) << row;
  }

  lse[kRow] = bits_to_float(0x7fffffffu);
  Halves dq(std::vector<float>(static_cast<size_t>(c.seqlen_q * c.headdim)));
  Rows dk(c.seqlen_k, c.headdim, c.headdim), dv(c.seqlen_k, c.headdim, c.headdim);
  const KernelShape shape{c.seqlen_q, c.task, c.block_k, c.headdim, c.headdim_v, 1, true};
  Scratch scratch(kernels_amx()->backward_scratch(kKernelBF16, shape));
  for (int64_t key = 0; key < c.seqlen_k; key += c.task) {
    BackwardTask t{};
    fill(t);
    t.dout = in.dout.data(), t.lse = lse.data(), t.delta = delta.data();
    t.dq = dq.high.data(), t.dq_low = dq.low.data(), t.dk = dk.data(), t.dv = dv.data();
    t.dout_stride = t.dq_stride = t.dq_low_stride = t.dk_stride = t.dv_stride = c.headdim;
    t.delta_stride = 1;
    t.group = 1;
    t.seqlen_q = c.seqlen_q;
    t.key_begin = key;
    t.key_end = std::min(c.seqlen_k, key + c.task);
    t.has_dbias = true;
    t.dbias_sums = sums.data();
    t.dbias_stride = c.seqlen_k;
    t.scratch = scratch.data();
    kernels_amx()->backward(kKernelBF16, t);
  }
  for (int64_t key = 0; key < c.seqlen_k; ++key) {
    EXPECT_TRUE(std::isnan(dk.at(key, 0))) << key;
    EXPECT_TRUE(std::isnan(sums[kRow * static_cast<size_t>(c.seqlen_k) + static_cast<size_t>(key)])) << key;
    EXPECT_FALSE(std::isnan(sums[static_cast<size_t>(key)])) << key;
  }
  for (int64_t row = 0; row < c.seqlen_q; ++row) EXPECT_EQ(std::isnan(dq.joined()[static_cast<size_t>(row * c.headdim)]), row == kRow) << row;
}

// dq is added to, so that tasks over parts of the keys sum up.
TEST_F(AmxKernels, BackwardAddsToDq) {
  const Case c{64, 64, 64, 64};
  const Inputs in(c);
  const Results exact = oracle(c, in, false);
  Gradients once(c), twice(c);
  run_backward(c, in, exact, once);
  run_backward(c, in, exact, twice);
  run_backward(c, in, exact, twice);
  for (size_t i = 0; i < once.dq.size(); ++i) EXPECT_NEAR(twice.dq[i], 2 * once.dq[i], 1e-5);
}

}  // namespace
