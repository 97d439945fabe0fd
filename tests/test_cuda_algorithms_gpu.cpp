// Algorithms standard and v1 on a real GPU: what the table of cases does not show. Without a GPU every test is skipped.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "gpu_fixture.h"
#include "gpu_problem.h"
#include "testing/cases.h"
#include "testing/run.h"

namespace fattn {
namespace {

using test::CudaGpu;
using test::DeviceForward;
using test::float_of_bf16;
using test::halves;
using test::on_cuda;
using test::shape;
using testing::Case;

Options by(const Case& c, Algorithm algorithm) {
  Options options = on_cuda(c);
  options.algorithm = algorithm;
  return options;
}

// Skips where the machine has no cuBLASLt that starts, or too old a GPU; any other refusal is a failure.
#define SKIP_WITHOUT(tensors, options)                                                                                             \
  if (const Support support = supported(describe(tensors, options)); !support) {                                                   \
    const auto says = [&](const char* words) { return support.reason.find(words) != std::string::npos; };                          \
    if (!says("needs cuBLASLt") && !says("does not start on the device") && !says("compute capability")) FAIL() << support.reason; \
    GTEST_SKIP() << support.reason;                                                                                                \
  }

// Nothing may be loaded or allocated by the first call: it is captured before any other.
TEST_F(CudaGpu, TheFirstCallOfStandardCanBeCapturedInAGraph) {
  const Case c = shape(DType::kBF16, 2, 384, 520, 4, 2, 96, true);
  const DeviceForward d(c);
  const Options options = by(c, Algorithm::kStandard);
  SKIP_WITHOUT(d.t, options);
  const Plan plan(d.t, options);
  const cuda::Stream stream(0);
  const cuda::Buffer workspace(0, plan.workspace_bytes());
  cuda::synchronize(0);
  const cuda::Graph graph(stream, [&] { plan.execute(d.t, workspace.get(), workspace.bytes(), stream.get()); });
  check(fattn_cuda_memset(0, d.t.o.data(), 0xff, 2 * static_cast<size_t>(d.t.o.size()), stream.get()));
  for (int i = 0; i < 3; ++i) graph.launch(stream.get());
  stream.synchronize();
  const std::vector<uint16_t> captured = halves(d.t.o, 0, d.t.o.size());
  check(fattn_cuda_memset(0, d.t.o.data(), 0xff, 2 * static_cast<size_t>(d.t.o.size()), stream.get()));
  plan.execute(d.t, workspace.get(), workspace.bytes(), stream.get());
  stream.synchronize();
  EXPECT_EQ(halves(d.t.o, 0, d.t.o.size()), captured);
}

TEST_F(CudaGpu, StandardAndV1GiveTheSameBitsEveryRun) {
  for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kV1})
    for (const int64_t nheads_k : {4, 2}) {
      const Case c = shape(DType::kBF16, 2, 700, 900, 4, nheads_k, 128, nheads_k == 2);
      const testing::CaseInputs in = testing::make_inputs(c);
      const Options options = by(c, algorithm);
      SKIP_WITHOUT(DeviceForward(c).t, options);
      const testing::Outputs first = testing::run_passes(c, in, options);
      for (int i = 0; i < 4; ++i) EXPECT_TRUE(testing::same_bits(first, testing::run_passes(c, in, options))) << name_of(algorithm);
    }
}

// Rows of weights sum to 1, and what is hidden is 0; also where rows begin at any address, and nothing is written between them.
TEST_F(CudaGpu, StandardReturnsItsWeights) {
  const Case c = shape(DType::kBF16, 2, 100, 130, 4, 2, 64, true);
  DeviceForward d(c);
  const Options options = by(c, Algorithm::kAuto);  // the weights decide
  for (const int64_t padding : {6, 7}) {            // rows of 136 and 137 elements
    const int64_t row = c.seqlen_k + padding, all = c.batch * c.nheads * c.seqlen_q * row;
    cuda::Buffer memory(0, static_cast<size_t>(all) * 2);
    memory.fill(0x7f);
    d.t.weights = Tensor(nullptr, c.dtype, {c.batch, c.nheads, c.seqlen_q, c.seqlen_k}, {c.nheads * c.seqlen_q * row, c.seqlen_q * row, row, 1})
                      .on(Device::kCuda, 0, memory.get());
    SKIP_WITHOUT(d.t, options);
    forward(d.t, options);
    const std::vector<uint16_t> weights = halves(Tensor(nullptr, c.dtype, {all}).on(Device::kCuda, 0, memory.get()), 0, all);
    for (int64_t r = 0; r < c.batch * c.nheads * c.seqlen_q; ++r) {
      double sum = 0;
      for (int64_t j = 0; j < c.seqlen_k; ++j) {
        const float w = float_of_bf16(weights[static_cast<size_t>(r * row + j)]);
        if (j > r % c.seqlen_q + c.seqlen_k - c.seqlen_q) {
          ASSERT_EQ(w, 0.0f) << r << " " << j;
        }
        sum += w;
      }
      ASSERT_NEAR(sum, 1.0, 0.02) << r;
      for (int64_t j = c.seqlen_k; j < row; ++j) ASSERT_EQ(weights[static_cast<size_t>(r * row + j)], 0x7f7f) << r << " " << j;
    }
  }
}

// Pointers that are no multiple of 16 bytes are computed by other kernels of both libraries, to the same numbers but for the order of the sums.
TEST_F(CudaGpu, MisalignedPointersOfStandardAndV1) {
  for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kV1}) {
    const Case c = shape(DType::kBF16, 1, 130, 150, 2, 1, 64, true);
    const DeviceForward aligned(c), skewed(c, 3);
    const Options options = by(c, algorithm);
    SKIP_WITHOUT(aligned.t, options);
    std::vector<uint16_t> values(static_cast<size_t>(aligned.t.q.size()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3e80 + (i * 2654435761u >> 20) % 0x0180);
    for (const DeviceForward* d : {&aligned, &skewed})
      for (const Tensor* t : {&d->t.q, &d->t.k, &d->t.v})
        check(
            fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, t->data(), values.data(), 2 * std::min(values.size(), static_cast<size_t>(t->size())), nullptr));
    forward(aligned.t, options);
    forward(skewed.t, options);
    const std::vector<uint16_t> a = halves(aligned.t.o, 0, aligned.t.o.size()), b = halves(skewed.t.o, 0, skewed.t.o.size());
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(float_of_bf16(a[i]), float_of_bf16(b[i]), 0.02) << name_of(algorithm) << " " << i;
  }
}

}  // namespace
}  // namespace fattn
