// Values that are not finite, visible to all rows, on a real GPU: each algorithm's result beside the reference's. Without a GPU every test is
// skipped.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fattn/attention.hpp"
#include "fattn/plan.hpp"
#include "gpu_fixture.h"
#include "gpu_problem.h"
#include "testing/cases.h"
#include "testing/run.h"
#include "testing/tensors.h"

namespace fattn {
namespace {

using test::CudaGpu;
using testing::Case;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The values of the keys before `from` are Inf, those behind it -Inf; in odd columns the other way round, so that every block holds both.
void make_infinite(const Tensor& v, int64_t from, bool mixed) {
  testing::Dense values = testing::read(v);
  const int64_t columns = v.shape(3), row = v.shape(2) * columns;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const bool first = at / row % v.shape(1) < from, turned = mixed && at % columns % 2 == 1;
    values[i] = first != turned ? kInfinity : -kInfinity;
  }
  testing::write(v, values);
}

// Where no sum is finite any more, what comes next still counts: Inf - Inf is NaN, whichever block each is in.
TEST_F(CudaGpu, InfinitiesOfBothSignsMakeANan) {
  int compared = 0;
  for (const Algorithm algorithm : {Algorithm::kV1, Algorithm::kV2, Algorithm::kV3})
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      for (const int64_t headdim : {64, 128, 192, 256})
        for (const int64_t seqlen_q : {1, 600}) {
          Case c = test::shape(dtype, 1, seqlen_q, 600, 2, 1, headdim, false);
          c.backward = false;
          Options options = test::on_cuda(c);
          options.algorithm = algorithm;
          if (!supported(describe(test::DeviceForward(c).t, options))) continue;
          const Options reference = testing::options_of(c, {Backend::kReference, Algorithm::kAuto, Isa::kAuto, 0});
          for (const int64_t from : {0, 300, 599, 600})
            for (const bool mixed : {false, true}) {
              SCOPED_TRACE(std::string(name_of(algorithm)) + " " + name_of(dtype) + ", headdim " + std::to_string(headdim) + ", seqlen_q " +
                           std::to_string(seqlen_q) + ", -Inf from key " + std::to_string(from) + (mixed ? ", mixed" : ""));
              const testing::CaseInputs in = testing::make_inputs(c);
              make_infinite(in.v, from, mixed);
              const testing::Outputs expected = testing::run_passes(c, in, reference), got = testing::run_passes(c, in, options);
              ASSERT_EQ(got.o.size(), expected.o.size());
              int wrong = 0;
              for (size_t i = 0; i < got.o.size(); ++i)
                if (!(got.o[i] == expected.o[i] || (std::isnan(got.o[i]) && std::isnan(expected.o[i])))) ++wrong;
              EXPECT_EQ(wrong, 0) << "of " << got.o.size();
              ++compared;
            }
        }
  EXPECT_GE(compared, 64);  // v2 alone has as many and more
}

}  // namespace
}  // namespace fattn
