// Algorithm standard on a GPU without one: stubs of the driver, of NVRTC and of cuBLASLt, whose products are computed, and kernels that are written
// once more here, for fp32 and to be read. So the table of cases runs through plan, workspace, strides, batches and the order of the passes. What the
// real kernels compute is for a real GPU (`fattn check --device cuda --algorithm standard`).
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/matmul.h"
#include "backend/cuda/standard.h"
#include "device/cublaslt.h"
#include "device_abi/attention_params.h"
#include "device_abi/dropout.h"
#include "device_abi/lowest.h"
#include "device_abi/mask.h"
#include "device_abi/sinks_gradient_params.h"
#include "device_abi/standard_params.h"
#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "fattn/system.hpp"
#include "jit_test.h"
#include "stub/cublaslt_stub.h"
#include "stub/cuda_stub.h"
#include "testing/cases.h"
#include "testing/check.h"
#include "testing/targets.h"
#include "thrown.h"

namespace fattn {
namespace {

using core::cuda::batch_dimensions;
using core::cuda::BatchDimension;
using core::cuda::MatmulShape;
using core::cuda::MatrixBatch;
using test::blas_calls;
using test::CudaStub;
using test::error_thrown_by;
using test::expect_contains;
using test::set_blas;

const bool stubs_are_set = test::use_stubs(FATTN_STUB_CUDA_PATH);

const CudaStub& stub() {
  static const CudaStub loaded(FATTN_STUB_CUDA_PATH);
  return loaded;
}

constexpr float kInf = std::numeric_limits<float>::infinity();

core::Mask32 mask_of(const StandardMask& m, int keys) { return {m.seqlen_q, keys, m.causal != 0, m.window_left, m.window_right}; }
int64_t place(const StandardStrides& s, int64_t batch, int64_t row, int64_t head) { return batch * s.batch + row * s.row + head * s.head; }

// --- the kernels, in fp32 ---

bool places_are_given = false;  // of the case at hand: kernels know it by their specialisation alone

// One head: which pairs it sees, what is added to their scores and what dropout makes of a weight of 1.
struct Head {
  const PairParams& p;
  int64_t batch, head;
  int keys;  // -1: out of range
  core::Mask32 mask;

  Head(const PairParams& pairs, const StandardMask& m, int64_t n, int64_t h)
      : p(pairs), batch(n), head(h), keys(pairs.lengths ? pairs.lengths[n * pairs.length_stride] : m.seqlen_k) {
    if (keys < 0 || keys > m.seqlen_k) keys = -1;
    mask = mask_of(m, std::max(keys, 0));
  }
  bool lost() const { return keys < 0; }
  int64_t at(const TensorStrides& s, int64_t i, int64_t j) const { return batch * s.batch + head * s.head + i * s.row + j; }
  float bias(int64_t i, int64_t j) const { return p.bias ? static_cast<const float*>(p.bias)[at(p.bias_strides, i, j)] : 0.0f; }
  bool sees(int64_t i, int64_t j) const {
    const int row = static_cast<int>(i);
    if (j < mask.visible_begin(row) || j >= mask.visible_end(row) || bias(i, j) == -kInf) return false;
    if (p.pair_mask && p.pair_mask[at(p.pair_mask_strides, i, j)] == 0) return false;
    return !p.document_q || p.document_q[batch * p.document_q_stride + i] == p.document_k[batch * p.document_k_stride + j];
  }
  float term(int64_t i, int64_t j) const {
    const float slope = p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head * p.alibi_head_stride] : 0.0f;
    return bias(i, j) - slope * std::fabs(static_cast<float>(i + keys - mask.seqlen_q - j));
  }
  float kept(int64_t i, int64_t j) const {
    if (p.dropout_below == 0) return 1;
    const uint64_t stream = p.dropout_state[1] + static_cast<uint64_t>(batch * p.nheads + head);
    const auto row = places_are_given ? static_cast<int64_t>(p.dropout_state[2]) : 0,
               key = places_are_given ? static_cast<int64_t>(p.dropout_state[3]) : 0;
    return core::dropout_number(p.dropout_state[0], stream, row + i, key + j) < static_cast<int>(p.dropout_below) ? 0 : p.dropout_scale;
  }
};

int softmax_launches = 0;
int64_t heads_of_sinks = 0;  // of the case at hand: kernels know it by their grid alone

template <class Body>
void for_rows(const StandardRowsParams& p, const Body& body) {
  for (int64_t number = 0; number < p.rows; ++number) {
    const int64_t query = number % p.mask.seqlen_q, head = number / p.mask.seqlen_q % p.nheads;
    body(number / p.mask.seqlen_q / p.nheads, head, query);
  }
}

float finished(const StandardRowsParams& p, float score) {
  score *= p.after;
  return p.softcap > 0 ? p.softcap * std::tanh(score / p.softcap) : score;
}

void softmax(const void* argument) {
  StandardRowsParams p;
  std::memcpy(&p, argument, sizeof p);
  ++softmax_launches;
  for_rows(p, [&](int64_t batch, int64_t head, int64_t query) {
    const Head pairs(p.pairs, p.mask, batch, head);
    float* row = static_cast<float*>(p.weights.data) + place(p.weights.strides, batch, query, head);
    float greatest = -kInf, sum = 0;
    for (int j = 0; j < p.mask.seqlen_k; ++j) {
      row[j] = pairs.sees(query, j) ? finished(p, row[j]) + pairs.term(query, j) : -kInf;
      greatest = std::fmax(greatest, row[j]);
    }
    const float reference = greatest == -kInf ? 0 : greatest;
    for (int j = 0; j < p.mask.seqlen_k; ++j) sum += row[j] = row[j] == -kInf ? 0 : std::exp(row[j] - reference);
    if (pairs.lost()) sum = std::numeric_limits<float>::quiet_NaN();
    const float sink = p.pairs.sinks ? p.pairs.sinks[head * p.pairs.sinks_stride] : -kInf;
    const bool all = sum == 0 || (sink - reference > 80 && sum == sum);  // that counts
    const float total = sum == 0 ? 0 : sum + std::exp(std::fmin(sink - reference, 80.0f));
    const float factor = sum == 0 ? -0.0f : 1 / total;  // -0: an empty row, to finish()
    for (int j = 0; j < p.mask.seqlen_k; ++j) row[j] *= factor * pairs.kept(query, j);
    if (p.lse) p.lse[place(p.lse_strides, batch, query, head)] = all ? sink : reference + std::log(total);
  });
}

void gradient(const void* argument) {
  StandardRowsParams p;
  std::memcpy(&p, argument, sizeof p);
  for_rows(p, [&](int64_t batch, int64_t head, int64_t query) {
    const Head pairs(p.pairs, p.mask, batch, head);
    float* weights = static_cast<float*>(p.weights.data) + place(p.weights.strides, batch, query, head);
    float* dscores = static_cast<float*>(p.dscores.data) + place(p.dscores.strides, batch, query, head);
    const float* o = static_cast<const float*>(p.o) + place(p.o_strides, batch, query, head);
    const float* dout = static_cast<const float*>(p.dout) + place(p.dout_strides, batch, query, head);
    const float lse = p.lse[place(p.lse_strides, batch, query, head)];
    float delta = 0;
    for (int d = 0; d < p.headdim_v; ++d) delta += o[d] * dout[d];
    if (p.pairs.dlse && !(lse < kLowestLse))
      delta -= p.pairs.dlse[batch * p.pairs.dlse_strides.batch + head * p.pairs.dlse_strides.head + query * p.pairs.dlse_strides.row];
    const float none = pairs.lost() ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    for (int j = 0; j < p.mask.seqlen_k; ++j) {
      if (lse < kLowestLse || !pairs.sees(query, j)) {
        dscores[j] = weights[j] = none;
        continue;
      }
      const float score = finished(p, weights[j]), weight = std::exp(score + pairs.term(query, j) - lse), kept = pairs.kept(query, j);
      const float cap = p.softcap > 0 ? 1 - score / p.softcap * (score / p.softcap) : 1;
      const float gradient = weight * ((kept == 0 ? 0 : kept * dscores[j]) - delta);
      if (p.pairs.dbias) p.pairs.dbias[pairs.at(p.pairs.dbias_strides, query, j)] += gradient;
      dscores[j] = gradient * cap * p.after;
      weights[j] = kept == 0 ? 0 : weight * kept;
    }
  });
}

void sinks_gradient(const void* argument) {
  SinksGradientParams p;
  std::memcpy(&p, argument, sizeof p);
  const auto at = [](const SinksStrides& s, int64_t batch, int64_t head, int64_t row) { return batch * s.batch + head * s.head + row * s.row; };
  const int64_t parts = (p.all_rows + kSinksRows - 1) / kSinksRows;
  for (int64_t head = 0; head < heads_of_sinks; ++head)
    for (int64_t part = 0; part < parts; ++part) {
      double sum = 0;
      for (int64_t i = part * kSinksRows; i < std::min<int64_t>((part + 1) * kSinksRows, p.all_rows); ++i) {
        const int64_t batch = i / p.rows, row = i % p.rows;
        const float lse = p.lse[at(p.lse_strides, batch, head, row)];
        if (lse < kLowestLse) continue;
        const float *o = static_cast<const float*>(p.o) + at(p.o_strides, batch, head, row),
                    *dout = static_cast<const float*>(p.dout) + at(p.dout_strides, batch, head, row);
        float delta = p.dlse ? -p.dlse[at(p.dlse_strides, batch, head, row)] : 0;
        for (int d = 0; d < p.headdim_v; ++d) delta += o[d] * dout[d];
        sum -= std::exp(p.sinks[head * p.sinks_stride] - lse) * delta;
      }
      p.parts[head * parts + part] = static_cast<float>(sum);
    }
}
void sinks_gradient_sum(const void* argument) {
  SinksGradientParams p;
  std::memcpy(&p, argument, sizeof p);
  const int64_t parts = (p.all_rows + kSinksRows - 1) / kSinksRows;
  for (int64_t head = 0; head < heads_of_sinks; ++head)
    p.dsinks[head * p.dsinks_stride] =
        p.sinks[head * p.sinks_stride] == -kInf ? 0 : std::accumulate(p.parts + head * parts, p.parts + (head + 1) * parts, 0.0f);
}

void dbias_zero(const void* argument) {
  PairParams p;
  std::memcpy(&p, argument, sizeof p);
  for (int64_t n = 0; n < p.dbias_batch; ++n)
    for (int64_t h = 0; h < p.dbias_heads; ++h)
      for (int64_t i = 0; i < p.dbias_rows; ++i)
        std::fill_n(p.dbias + n * p.dbias_strides.batch + h * p.dbias_strides.head + i * p.dbias_strides.row, p.seqlen_k, 0.0f);
}

int finish_launches = 0, clean_launches = 0;

void clean(const void* argument) {
  StandardCleanParams p;
  std::memcpy(&p, argument, sizeof p);
  ++clean_launches;
  const int64_t blocks = (p.seqlen + kStandardCleanRows - 1) / kStandardCleanRows;
  const int64_t heads = int64_t{p.batch} * p.heads;
  std::fill_n(p.spoilt, heads * blocks, 0ull);
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t row = 0; row < p.seqlen; ++row) {
      const float* from = static_cast<const float*>(p.from) + place(p.strides, head / p.heads, row, head % p.heads);
      float* to = static_cast<float*>(p.to) + (head * p.seqlen + row) * p.pitch;
      std::vector<unsigned> plus(static_cast<size_t>(p.words)), minus = plus;
      bool spoilt = false;
      for (int column = 0; column < p.pitch; ++column) {
        const float x = column < p.width ? from[column] : 0.0f;
        to[column] = std::isfinite(x) ? x : 0.0f;
        if (std::isfinite(x)) continue;
        spoilt = true;
        if (!(x < 0)) plus[static_cast<size_t>(column / 32)] |= 1u << column % 32;
        if (!(x > 0)) minus[static_cast<size_t>(column / 32)] |= 1u << column % 32;
      }
      if (!spoilt) continue;
      p.spoilt[head * blocks + row / kStandardCleanRows] |= 1ull << row % kStandardCleanRows;
      unsigned* marks = p.marks + (head * p.seqlen + row) * 2 * p.words;
      std::copy(plus.begin(), plus.end(), marks);
      std::copy(minus.begin(), minus.end(), marks + p.words);
    }
}

template <bool kQueries>
void finish(const void* argument) {
  StandardFinishParams p;
  std::memcpy(&p, argument, sizeof p);
  ++finish_launches;
  const int64_t seqlen = kQueries ? p.mask.seqlen_q : p.mask.seqlen_k, others = kQueries ? p.mask.seqlen_k : p.mask.seqlen_q;
  const int64_t blocks = (others + kStandardCleanRows - 1) / kStandardCleanRows;
  const int64_t parts = (seqlen + p.block_rows - 1) / p.block_rows;
  for (int64_t number = 0; number < p.blocks * p.block_rows; ++number) {
    const int64_t block = number / p.block_rows, index = block % parts * p.block_rows + number % p.block_rows, head = block / parts % p.heads,
                  batch = block / parts / p.heads;
    if (index >= seqlen) continue;
    float* out = static_cast<float*>(p.out) + place(p.out_strides, batch, index, head);
    const float none = Head(p.pairs, p.mask, batch, head).lost() ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    for (int column = 0; column < p.width; ++column)
      if (p.sums || p.all != 0) out[column] = p.all != 0 ? none : p.sums[((batch * seqlen + index) * p.heads + head) * p.width + column];
    if (!p.spoilt) continue;
    bool weighed = !kQueries || p.lse;
    if (!weighed) {
      const float* weights = static_cast<const float*>(p.matrix.data) + place(p.matrix.strides, batch, index, head);
      for (int64_t key = 0; key < others; ++key) weighed = weighed || !(weights[key] == 0 && std::signbit(weights[key]));
    }
    const auto add = [&](int64_t query_head, int64_t query, int64_t key) {
      if (!weighed || !Head(p.pairs, p.mask, batch, query_head).sees(query, key)) return;
      if (p.lse && p.lse[place(p.lse_strides, batch, query, query_head)] < kLowestLse) return;
      const int64_t row = kQueries ? key : query,
                    other = kQueries ? batch * (p.heads / p.group) + query_head / p.group : batch * p.heads * p.group + query_head;
      if ((p.spoilt[other * blocks + row / kStandardCleanRows] >> row % kStandardCleanRows & 1) == 0) return;
      const unsigned* marks = p.marks + (other * others + row) * 2 * p.words;
      for (int column = 0; column < p.width; ++column) {
        const bool plus = (marks[column / 32] >> column % 32 & 1) != 0, minus = (marks[p.words + column / 32] >> column % 32 & 1) != 0;
        if ((plus || minus) && p.keeps_sign == 0) out[column] = std::numeric_limits<float>::quiet_NaN();
        if (plus) out[column] += kInf;
        if (minus) out[column] -= kInf;
      }
    };
    if (kQueries)
      for (int key = 0; key < p.mask.seqlen_k; ++key) add(head, index, key);
    else
      for (int64_t h = head * p.group; h < (head + 1) * p.group; ++h)
        for (int query = 0; query < p.mask.seqlen_q; ++query) add(h, query, index);
  }
}

class CudaStandard : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(test::cublaslt_stub, nullptr) << dlerror();
    stub().kernel("fattn_std_softmax", softmax, sizeof(StandardRowsParams));
    stub().kernel("fattn_std_gradient", gradient, sizeof(StandardRowsParams));
    stub().kernel("fattn_sinks_gradient", sinks_gradient, sizeof(SinksGradientParams));
    stub().kernel("fattn_sinks_gradient_sum", sinks_gradient_sum, sizeof(SinksGradientParams));
    stub().kernel("fattn_v2_dbias_zero", dbias_zero, sizeof(PairParams));
    stub().kernel("fattn_std_clean", clean, sizeof(StandardCleanParams));
    stub().kernel("fattn_std_finish_queries", finish<true>, sizeof(StandardFinishParams));
    stub().kernel("fattn_std_finish_keys", finish<false>, sizeof(StandardFinishParams));
    set_blas("workspace", 0);
    set_blas("needs", 1);
    softmax_launches = finish_launches = clean_launches = 0;
  }
  const test::CacheFolder folder_;
};

testing::Target target() {
  testing::Target t;
  t.backend = Backend::kCuda;
  t.algorithm = Algorithm::kStandard;
  t.device = Device::kCuda;
  return t;
}

// Contiguous tensors of the stub's device.
struct Tensors {
  std::vector<cuda::Buffer> memory;
  ForwardTensors forward;
  Tensor make(DType dtype, std::initializer_list<int64_t> shape, int64_t skew = 0) {
    const Tensor t(nullptr, dtype, shape);
    memory.emplace_back(0, static_cast<size_t>(t.size() + skew) * size_of(dtype));
    memory.back().fill(0);
    return t.on(Device::kCuda, 0, static_cast<char*>(memory.back().get()) + static_cast<size_t>(skew) * size_of(dtype));
  }
  Tensors(DType dtype, int64_t batch, int64_t seqlen, int64_t nheads, int64_t nheads_k, int64_t headdim) {
    forward.q = make(dtype, {batch, seqlen, nheads, headdim});
    forward.k = make(dtype, {batch, seqlen, nheads_k, headdim});
    forward.v = make(dtype, {batch, seqlen, nheads_k, headdim});
    forward.o = make(dtype, {batch, seqlen, nheads, headdim});
    forward.lse = make(DType::kF32, {batch, nheads, seqlen});
  }
};

Options standard() {
  Options options;
  options.backend = Backend::kCuda;
  options.algorithm = Algorithm::kStandard;
  return options;
}

// Every case in fp32 that the stub multiplies in no time: lengths, head dimensions, groups, layouts, windows, softcap, Inf and NaN.
TEST_F(CudaStandard, TableOfCases) {
  set_blas("workspace", 512);
  const char* const whole = std::getenv("FATTN_TEST_WHOLE");
  const bool all = whole && std::string(whole) == "1";
  const double most_flops = all ? 4e7 : 1e7;  // `make test-all` has two thirds more cases, which take most of the time
  int passed = 0;
  for (const testing::Case& c : testing::all_cases()) {
    if (c.dtype != DType::kF32 || c.flops() > most_flops || !testing::is_to_compute(target(), c)) continue;
    heads_of_sinks = c.nheads;
    places_are_given = c.dropout_part;
    const testing::CaseResult result = testing::run_case(c, target());
    EXPECT_TRUE(result.passed()) << c.name << ": " << result.summary();
    if (result.passed()) ++passed;
  }
  EXPECT_GT(passed, all ? 350 : 200);
  EXPECT_GT(softmax_launches, 100);
  EXPECT_GT(finish_launches, 100);
  EXPECT_GT(clean_launches, 100);
}

TEST_F(CudaStandard, PlanSaysWhatItTakes) {
  const Tensors t(DType::kF16, 2, 100, 4, 2, 64);
  const Plan plan(t.forward, standard());
  EXPECT_EQ(plan.info().algorithm, FATTN_ALGORITHM_STANDARD);
  EXPECT_EQ(plan.workspace_bytes(), (2u * 4 * 100 * 104 * 2 + 255) / 256 * 256) << "rows of 100 scores, and 4 more for 16 bytes";
  expect_contains(plan.info().kernel, "cuda standard forward fp16");
  expect_contains(plan.info().why, "cuBLASLt 13.0");
  set_blas("workspace", 1000);
  EXPECT_EQ(Plan(t.forward, standard()).workspace_bytes(), (2u * 4 * 100 * 104 * 2 + 255) / 256 * 256 + 1024);
}

TEST_F(CudaStandard, ExecuteAllocatesNothingAndAsksForNothing) {
  Tensors t(DType::kF32, 1, 20, 2, 1, 8);
  const Plan plan(t.forward, standard());
  const cuda::Buffer workspace(0, plan.workspace_bytes());
  plan.execute(t.forward, workspace.get(), workspace.bytes());
  const char* const never[] = {"cuMemAlloc_v2", "cuMemFree_v2", "cuStreamSynchronize", "cuModuleLoadDataEx"};
  std::vector<int64_t> before;
  for (const char* name : never) before.push_back(stub().calls(name));
  const int64_t asked = blas_calls("cublasLtMatmulAlgoGetHeuristic"), made = blas_calls("cublasLtMatrixLayoutCreate");
  const int64_t products = blas_calls("cublasLtMatmul");
  plan.execute(t.forward, workspace.get(), workspace.bytes());
  for (size_t i = 0; i < std::size(never); ++i) EXPECT_EQ(stub().calls(never[i]), before[i]) << never[i];
  EXPECT_EQ(blas_calls("cublasLtMatmulAlgoGetHeuristic"), asked);
  EXPECT_EQ(blas_calls("cublasLtMatrixLayoutCreate"), made);
  EXPECT_EQ(blas_calls("cublasLtMatmul"), products + 2) << "both heads in one launch";
}

// Weights are written where they are wanted; AUTO takes standard for them, and no other algorithm has them.
TEST_F(CudaStandard, WeightsAreReturned) {
  Tensors t(DType::kF32, 2, 24, 2, 2, 8);
  t.forward.weights = t.make(DType::kF32, {2, 2, 24, 24});
  Options options = standard();
  options.algorithm = Algorithm::kAuto;
  options.causal = true;
  constexpr size_t kCopy = 3072 + 256 + 768;  // v without Inf and NaN, and notes of them
  EXPECT_EQ(Plan(t.forward, options).workspace_bytes(), kCopy) << "the weights are in the caller's memory";
  forward(t.forward, options);
  std::vector<float> weights(2 * 2 * 24 * 24);
  const auto fetch = [&] { check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, weights.data(), t.forward.weights.data(), weights.size() * 4, nullptr)); };
  fetch();
  EXPECT_FLOAT_EQ(weights[0], 1.0f);
  EXPECT_EQ(weights[1], 0.0f);
  EXPECT_FLOAT_EQ(weights[23 * 24 + 5], 1.0f / 24) << "q and k are zeros";
  // With other strides, and a row that begins at no multiple of 16 bytes.
  t.forward.weights =
      Tensor(nullptr, DType::kF32, {2, 2, 24, 24}, {24 * 50, 25, 50, 1}).on(Device::kCuda, 0, t.make(DType::kF32, {2, 24, 50}, 1).data());
  EXPECT_EQ(Plan(t.forward, options).workspace_bytes(), kCopy);
  forward(t.forward, options);
  check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, weights.data(), t.forward.weights.data(), 24 * 50 * 4, nullptr));
  EXPECT_FLOAT_EQ(weights[5 * 50 + 25 + 5], 1.0f / 6);
  EXPECT_EQ(weights[5 * 50 + 25 + 6], 0.0f);
  EXPECT_EQ(weights[5 * 50 + 24], 0.0f) << "between the heads nothing is written";
  options.algorithm = Algorithm::kV2;
  expect_contains(error_thrown_by([&] { forward(t.forward, options); }), "unsupported: algorithm v2 never has the weights in memory");
}

// With so many heads a CTA looks at more rows than it would write.
TEST_F(CudaStandard, ManyHeadsGetWhatTheySee) {
  constexpr int64_t kBatch = 128, kSeqlen = 20, kHeads = 4, kWidth = 128, kRow = kHeads * kWidth;
  Tensors t(DType::kF32, kBatch, kSeqlen, kHeads, kHeads, kWidth);
  std::vector<float> v(static_cast<size_t>(kBatch * kSeqlen * kRow), 1.0f), o(v.size());
  for (int64_t batch = 0; batch < kBatch; ++batch)
    for (int64_t head = 0; head < kHeads; ++head)
      v[static_cast<size_t>((batch * kSeqlen + kSeqlen - 1) * kRow + head * kWidth + 5)] = std::numeric_limits<float>::quiet_NaN();
  check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, const_cast<void*>(t.forward.v.data()), v.data(), v.size() * 4, nullptr));
  Options options = standard();
  options.causal = true;
  forward(t.forward, options);
  check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, o.data(), t.forward.o.data(), o.size() * 4, nullptr));
  int wrong = 0;
  for (size_t i = 0; i < o.size(); ++i) {
    const bool sees = static_cast<int64_t>(i) / kRow % kSeqlen == kSeqlen - 1 && i % kWidth == 5;
    if (sees ? !std::isnan(o[i]) : !(std::fabs(o[i] - 1) < 1e-5f)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(CudaStandard, WhatCannotBeComputedSaysWhy) {
  const Tensors t(DType::kF32, 1, 20, 2, 1, 8);
  set_blas("needs", 64);
  expect_contains(error_thrown_by([&] { Plan(t.forward, standard()); }),
                  "unsupported: cuBLASLt 13.0 has no algorithm for a product of 20 x 8 with 8 x 20");
  set_blas("needs", 8);
  Tensors skewed(DType::kF32, 1, 20, 2, 2, 8);
  skewed.forward.q = skewed.make(DType::kF32, {1, 20, 2, 8}, 1);
  expect_contains(error_thrown_by([&] { forward(skewed.forward, standard()); }),
                  "unsupported: cuBLASLt 13.0 has no algorithm for such a product in memory");
  set_blas("needs", 1);
  forward(skewed.forward, standard());
  Options options = standard();
  options.cuda_level = 80;
  expect_contains(error_thrown_by([&] { Plan(t.forward, options); }), "cuda_level is 80, which is of algorithm v2");
  ForwardTensors repeated = t.forward;
  repeated.k = Tensor(nullptr, DType::kF32, {1, 20, 1, 8}, {0, 0, 8, 1}).on(Device::kCuda, 0, repeated.k.data());
  expect_contains(error_thrown_by([&] { forward(repeated, standard()); }), "k has a stride of 0 elements along the sequence");
  const Tensor huge = Tensor(nullptr, DType::kF16, {1 << 20, 1 << 20, 1, 8}).on(Device::kCuda, 0, nullptr);
  expect_contains(supported(describe(ForwardTensors{huge, huge, huge, huge, {}, {}}, standard())).reason, "more rows than a grid has");
  set_blas("cublasLtMatmul", 13);
  expect_contains(error_thrown_by([&] { forward(t.forward, standard()); }), "device: cuBLASLt 13.0: a product failed: CUBLAS_STATUS_OTHER (13)");
  set_blas("cublasLtMatmul", 0);
  forward(t.forward, standard());
}

// --- the batches of products ---

MatrixBatch matrix(int64_t row, std::array<int64_t, 3> step) { return {DType::kF32, false, row, step}; }

TEST(CudaMatmul, BatchesAreJoinedWhereStridesAllow) {
  MatmulShape shape{4, 5, 6, {3, 7, 1}, 1, matrix(6, {7 * 24, 24, 0}), matrix(5, {7 * 30, 30, 0}), matrix(5, {7 * 20, 20, 0})};
  ASSERT_EQ(batch_dimensions(shape).size(), 1u);
  EXPECT_EQ(batch_dimensions(shape)[0].count, 21);
  // (batch, seqlen, heads, headdim): heads side by side, batch entries not; the longer of the two in one launch.
  shape.a = matrix(42, {168, 6, 0});
  const std::vector<BatchDimension> found = batch_dimensions(shape);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].count, 7);
  EXPECT_EQ(found[1].count, 3);
  // A sum over a group is no batch, and comes last.
  shape.count = {1, 1, 8};
  shape.d.step[2] = 0;
  const std::vector<BatchDimension> summed = batch_dimensions(shape);
  ASSERT_EQ(summed.size(), 2u);
  EXPECT_EQ(summed[0].count, 1);
  EXPECT_TRUE(summed[1].summed);
}

// --- the library itself ---

TEST(Cublaslt, SaysWhatIsMissing) {
  expect_contains(core::open_cublaslt({"/nonexistent/libcublasLt.so.13"}).reason, "/nonexistent/libcublasLt.so.13");
  expect_contains(core::open_cublaslt({"/nonexistent/libcublasLt.so.13"}).reason, "pip install nvidia-cublas");
  expect_contains(core::open_cublaslt({FATTN_STUB_CUBLASLT_INCOMPLETE_PATH}).reason, "it has no function cublasLtMatmulDescDestroy");
  EXPECT_TRUE(core::open_cublaslt({"/nonexistent", FATTN_STUB_CUBLASLT_PATH}));
}

TEST(Cublaslt, IsListed) {
  bool found = false;
  for (const fattn_library_info& library : libraries())
    if (std::string(library.name) == "cuBLASLt") {
      found = true;
      EXPECT_EQ(library.loaded, 1);
      EXPECT_EQ(std::string(library.path), FATTN_STUB_CUBLASLT_PATH);
    }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace fattn
