// The host's side of training on a GPU without one: stubs of the driver, of NVRTC and of cuBLASLt, whose products of fp32 are computed. What the
// kernels compute is for a real GPU (test_ops_training_gpu).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_abi/training_params.h"
#include "jit_test.h"
#include "ops/training.h"
#include "ops_array.h"
#include "stub/cublaslt_stub.h"
#include "stub/cuda_stub.h"

namespace fattn {
namespace {

using namespace ops;
using test::Array;
using test::blas_calls;
using test::CudaStub;
using test::expect_contains;
using test::expect_near;
using test::set_blas;

const bool stubs_are_set = test::use_stubs(FATTN_STUB_CUDA_PATH);

const CudaStub& stub() {
  static const CudaStub loaded(FATTN_STUB_CUDA_PATH);
  return loaded;
}

const ops::Device kGpu{Place::kCuda};
const ops::Device kReference{Place::kReference};
size_t size(int64_t n) { return static_cast<size_t>(n); }

// What the last launch of each kernel was told.
ConvertParams converted;
LogitGradientParams loss_gradient;
EmbeddingGradientParams embedding_gradient;
AdamWParams adamw;
int64_t losses = 0;

// As the kernel, where all is fp32.
void convert(const void* argument) {
  std::memcpy(&converted, argument, sizeof converted);
  const ConvertParams& p = converted;
  for (int64_t i = 0; i < p.count; ++i)
    static_cast<float*>(p.to)[i] = static_cast<const float*>(p.x)[i] + (p.bias ? p.bias[i % p.width] : 0) + (p.add ? p.add[i] : 0);
}

class TrainingCuda : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(stubs_are_set);
    stub().set("registers", 255);
    set_blas("workspace", 1024);
    stub().kernel("fattn_ops_convert", convert, sizeof(ConvertParams));
    stub().kernel(
        "fattn_ops_loss_gradient",
        [](const void* p) {
          std::memcpy(&loss_gradient, p, sizeof loss_gradient);
          ++losses;
        },
        sizeof(LogitGradientParams));
    stub().kernel(
        "fattn_ops_embedding_gradient", [](const void* p) { std::memcpy(&embedding_gradient, p, sizeof embedding_gradient); },
        sizeof(EmbeddingGradientParams));
    stub().kernel(
        "fattn_ops_adamw", [](const void* p) { std::memcpy(&adamw, p, sizeof adamw); }, sizeof(AdamWParams));
  }
  void TearDown() override { set_blas("workspace", 0); }

  template <class Problem>
  static void run(const Problem& problem, const ops::Device& device, const typename Problem::Buffers& buffers) {
    const ops::Plan<Problem> plan(problem, device);
    const std::unique_ptr<char[]> room(new char[plan.workspace_bytes() + 256]);  // not zeroed: what is large is not used
    void* workspace = room.get() + (256 - reinterpret_cast<uintptr_t>(room.get()) % 256) % 256;
    const int64_t allocations = stub().calls("cuMemAlloc_v2"), loads = stub().calls("cuModuleLoadDataEx");
    plan.execute(buffers, workspace);
    EXPECT_EQ(stub().calls("cuMemAlloc_v2"), allocations);
    EXPECT_EQ(stub().calls("cuModuleLoadDataEx"), loads) << "a plan has its kernels";
  }
  static int64_t launches() { return stub().calls("cuLaunchKernelEx"); }
  test::CacheFolder folder_;
};

TEST_F(TrainingCuda, ProductsInEveryTurn) {
  const int64_t rows = 14, columns = 10, inner = 9;
  const Array a(DType::kF32, size(rows * inner), 1), b(DType::kF32, size(inner * columns), 2), bias(DType::kF32, size(columns), 3),
      add(DType::kF32, size(rows * columns), 4);
  for (const int turns : {0, 1, 2, 3})
    for (const int what : {0, 1, 2, 3, 4}) {
      const Product p{rows, columns, inner, (turns & 1) != 0, (turns & 2) != 0, DType::kF32, DType::kF32, DType::kF32, 0.5};
      Array expected(DType::kF32, size(rows * columns), 5), got = expected;
      const int64_t used = turns == 1 && what == 4 ? 6 : 0;  // of the inner dimension
      const auto call = [&](const ops::Device& device, const Array& to) {
        run(p, device,
            {rows - (turns == 0 ? 2 : 0), a.as<void>(), b.as<void>(), (what & 1) != 0 ? bias.as<void>() : nullptr,
             what == 4         ? to.as<float>()
             : (what & 2) != 0 ? add.as<float>()
                               : nullptr,
             to.as<void>(), used});
      };
      call(kReference, expected);
      call(kGpu, got);
      SCOPED_TRACE(std::to_string(turns) + " " + std::to_string(what));
      expect_near(got, expected, 1e-5);
    }
}

TEST_F(TrainingCuda, ProductsAreRoundedOnce) {
  std::vector<char> memory(1 << 20);
  float* f = reinterpret_cast<float*>(memory.data());
  // A bias in 16 bits for fp32 sums is widened; a sum in 16 bits with something added comes from fp32.
  stub().kernel(
      "fattn_ops_convert", [](const void* p) { std::memcpy(&converted, p, sizeof converted); }, sizeof converted);
  int64_t before = launches(), products = blas_calls("cublasLtMatmul");
  run(Product{16, 24, 8, false, false, DType::kBF16, DType::kBF16, DType::kF32}, kGpu, {16, f, f, f, f, f});
  EXPECT_EQ(launches(), before + 1);
  EXPECT_EQ(converted.count, 24);
  before = launches();
  run(Product{16, 24, 8, false, false, DType::kBF16, DType::kBF16, DType::kBF16}, kGpu, {16, f, f, f, nullptr, f});
  EXPECT_EQ(launches(), before) << "the library adds it";
  run(Product{16, 24, 8, false, false, DType::kBF16, DType::kBF16, DType::kBF16}, kGpu, {16, f, f, nullptr, f + 4096, f});
  EXPECT_EQ(launches(), before + 1);
  EXPECT_EQ(converted.count, 16 * 24);
  EXPECT_EQ(converted.add, f + 4096);
  before = launches();
  run(Product{16, 25, 8, false, false, DType::kBF16, DType::kBF16, DType::kBF16}, kGpu, {16, f, f, f, nullptr, f});
  EXPECT_EQ(launches(), before + 2) << "rows at odd addresses: the bias is added to fp32";
  before = launches();
  run(Product{16, 24, 8, true, false, DType::kBF16, DType::kF32, DType::kF32}, kGpu, {16, f, f, nullptr, f, f});
  EXPECT_EQ(launches(), before + 1) << "a factor is rounded";
  EXPECT_EQ(converted.count, 8 * 24);
  EXPECT_EQ(blas_calls("cublasLtMatmul"), products + 5);
}

TEST_F(TrainingCuda, SaysWhatItDoesNot) {
  expect_contains(test::error_thrown_by([] {
                    ops::Plan<Product>({4, 4, 4, false, false, DType::kF16, DType::kBF16, DType::kF32}, kGpu);
                  }),
                  "a product of fp16 and bf16");
  std::vector<char> memory(1 << 12);
  expect_contains(test::error_thrown_by([&] {
                    run(Product{4, 4, 4}, kGpu, {4, memory.data(), memory.data(), nullptr, nullptr, memory.data(), 3});
                  }),
                  "an inner dimension of 3");
  const ops::Plan<AdamWStep> step({10}, kGpu);
  stub().fault("cuLaunchKernelEx", 1, 1);
  expect_contains(test::error_thrown_by([&] { step.execute({10}); }), "launching fattn_ops_adamw");
}

TEST_F(TrainingCuda, LossesComeInPartsOfTheRows) {
  // 512 rows of logits fit the room: three parts.
  const int64_t rows = 1100, width = 2, vocab = 800001;
  std::vector<float> x(size(rows * width)), weight(size(vocab * width)), loss(size(rows)), dx(x.size()), dweight(weight.size());
  const std::vector<int32_t> target(size(rows), 5);
  const double scale = 0.5;
  losses = 0;
  const int64_t products = blas_calls("cublasLtMatmul");
  const CrossEntropyGradient p{rows, width, vocab, DType::kBF16};
  run(p, kGpu, {rows, x.data(), weight.data(), target.data(), loss.data(), nullptr, 1, dx.data(), dweight.data(), &scale});
  EXPECT_EQ(losses, 3);
  EXPECT_EQ(blas_calls("cublasLtMatmul"), products + 9);
  EXPECT_EQ(loss_gradient.rows, 1100 - 1024);
  EXPECT_EQ(loss_gradient.target, target.data() + 1024);
  EXPECT_EQ(loss_gradient.loss, loss.data() + 1024);
  EXPECT_EQ(loss_gradient.stride % 64, 0);
  EXPECT_EQ(loss_gradient.scale_at, &scale);
  EXPECT_EQ(loss_gradient.gradient, 1);
  run(p, kGpu, {3, x.data(), weight.data(), target.data(), loss.data()});
  EXPECT_EQ(loss_gradient.gradient, 0);
  EXPECT_EQ(blas_calls("cublasLtMatmul"), products + 10);
}

TEST_F(TrainingCuda, LaunchesOfEach) {
  alignas(16) static float f[1 << 14];
  const std::vector<int32_t> ids(64);
  const auto count = [&](const auto& problem, const auto& buffers) {
    const int64_t before = launches();
    run(problem, kGpu, buffers);
    return launches() - before;
  };
  EXPECT_EQ(count(ColumnSums{64, 8}, ColumnSums::Buffers{64, f, f}), 2);
  EXPECT_EQ(count(Activate{8, 8}, Activate::Buffers{8, f, f}), 1);
  EXPECT_EQ(count(ActivationGradient{8, 8}, ActivationGradient::Buffers{8, f, f, f, nullptr}), 1);
  EXPECT_EQ(count(LayerNormGradient{64, 8}, LayerNormGradient::Buffers{64, f, f, f, f, f, f}), 2);
  EXPECT_EQ(count(EmbeddingGradient{64, 8, 9, 5}, EmbeddingGradient::Buffers{64, ids.data(), ids.data(), f, f, f}), 2);
  EXPECT_EQ(embedding_gradient.entries, 5);
  EXPECT_EQ(embedding_gradient.wide, 1);
  EXPECT_EQ(count(EmbeddingGradient{64, 8, 9, 0}, EmbeddingGradient::Buffers{64, ids.data(), nullptr, f + 1, f, nullptr}), 1);
  EXPECT_EQ(embedding_gradient.wide, 0) << "rows at other addresses are read one by one";
  EXPECT_EQ(count(Rotary{8, 2, 4, 16}, Rotary::Buffers{8, f, ids.data()}), 1);
  EXPECT_EQ(count(Dropout{8, 8, 0.5}, Dropout::Buffers{8, f, nullptr, f, 1, 2}), 1);
  double sum = 0;
  EXPECT_EQ(count(SquareSum{1000}, SquareSum::Buffers{1000, f, &sum}), 2);
  AdamWStep::Changing changing{1, 2, 3};
  AdamWStep::Buffers step{100, f, f, f, f, f + 2};
  step.changing = &changing, step.square_sum = &sum, step.clip = 4;
  EXPECT_EQ(count(AdamWStep{100, DType::kBF16}, step), 1);
  EXPECT_EQ(static_cast<const void*>(adamw.changing), &changing);
  EXPECT_EQ(adamw.square_sum, &sum);
  EXPECT_EQ(adamw.clip, 4);
  EXPECT_EQ(adamw.wide, 1);
  step.weight = f + 1;
  EXPECT_EQ(count(AdamWStep{100, DType::kBF16}, step), 1);
  EXPECT_EQ(adamw.wide, 0);
}

// What a captured graph reads anew: the same for the host's backends.
TEST_F(TrainingCuda, ChangingNumbersOfTheHost) {
  for (const Place place : {Place::kReference, Place::kCpu}) {
    const Array gradient(DType::kF32, 50, 1);
    Array direct(DType::kF32, 50, 2), m(DType::kF32, 50), v = m, weight = m;
    Array changed = direct, changed_m = m, changed_v = v;
    const ops::Device device{place};
    AdamWStep::Buffers b{50, gradient.as<float>(), direct.as<float>(), m.as<float>(), v.as<float>()};
    b.scale = 0.5, b.learning_rate = 0.1, b.step = 7;
    run(AdamWStep{50}, device, b);
    const AdamWStep::Changing changing{2, 0.1, 7};
    double sum = 0;
    run(SquareSum{50}, device, {50, gradient.as<float>(), &sum});
    AdamWStep::Buffers c{50, gradient.as<float>(), changed.as<float>(), changed_m.as<float>(), changed_v.as<float>()};
    c.changing = &changing, c.square_sum = &sum;
    c.clip = 0.25 * (2 * std::sqrt(sum) + 1e-6);  // a quarter of what the scale makes
    run(AdamWStep{50}, device, c);
    expect_near(changed, direct, 1e-6);
    sum = NAN;
    run(AdamWStep{50}, device, c);
    expect_near(changed, direct, 1e-6);
    const std::vector<uint64_t> state{3, 4};
    Array first(DType::kF32, 50), second = first;
    run(Dropout{5, 10, 0.5}, device, {5, gradient.as<float>(), nullptr, first.as<float>(), 3, 9});
    run(Dropout{5, 10, 0.5}, device, {5, gradient.as<float>(), nullptr, second.as<float>(), 1, 5, state.data()});
    expect_near(second, first, 0);
  }
}

}  // namespace
}  // namespace fattn
