// Operations and sessions on a GPU without one: stubs of the driver, of NVRTC and of cuBLASLt, whose products are computed. Plans, caches, graphs and
// errors; what the kernels compute is for a real GPU (test_ops_gpu, test_gpt2_gpu).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "device_abi/ops_params.h"
#include "gpt2/error.h"
#include "gpt2_files.h"
#include "jit_test.h"
#include "ops/cuda/planned.h"
#include "ops/ops.h"
#include "stub/cublaslt_stub.h"
#include "stub/cuda_stub.h"

namespace fattn {
namespace {

using gpt2::thrown_by;
using test::blas_calls;
using test::CudaStub;
using test::expect_contains;
using test::set_blas;

const bool stubs_are_set = test::use_stubs(FATTN_STUB_CUDA_PATH);

const CudaStub& stub() {
  static const CudaStub loaded(FATTN_STUB_CUDA_PATH);
  return loaded;
}

const ops::Device kGpu{ops::Place::kCuda};

class OpsCuda : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(stubs_are_set);
    stub().set("registers", 255);  // as many as any kernel counts on
  }
  test::CacheFolder folder_;
};

// The bias kernel, in fp32: what the library's epilogues leave.
void add_bias(const void* argument) {
  BiasParams p;
  std::memcpy(&p, argument, sizeof p);
  for (int64_t i = 0; i < p.count; ++i) {
    float& y = static_cast<float*>(p.y)[i];
    if (p.bias) y += static_cast<const float*>(p.bias)[i % p.width];
  }
}

TEST_F(OpsCuda, ManyRowsAreTheLibrarys) {
  stub().kernel("fattn_ops_bias", add_bias, sizeof(BiasParams));
  const int64_t in = 40, out = 24, most = 60;
  std::vector<float> x(static_cast<size_t>(most * in)), weight(static_cast<size_t>(in * out)), bias(static_cast<size_t>(out));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = std::cos(static_cast<float>(3 * i));
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i);
  for (const bool epilogues : {true, false})
    for (const bool accumulate : {true, false}) {
      set_blas("gelu", epilogues ? 1 : 0);
      const ops::Linear p{most, in, out, DType::kF32, DType::kF32, ops::Activation::kNone, accumulate};
      const ops::Plan<ops::Linear> plan(p, kGpu);
      EXPECT_GE(plan.workspace_bytes(), size_t{32} << 20);
      std::vector<char> workspace(plan.workspace_bytes() + 256);
      void* room = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256) % 256;
      std::vector<float> packed(ops::packed_bytes(p, kGpu) / 4), y(x.size(), 2), expected = y;
      std::vector<float> turned(weight.size());
      for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < in; ++i) turned[static_cast<size_t>(i * out + o)] = weight[static_cast<size_t>(o * in + i)];
      ops::pack(p, kGpu, turned.data(), true, out, packed.data());
      const int64_t asked = blas_calls("cublasLtMatmulAlgoGetHeuristic");
      for (int turn = 0; turn < 3; ++turn) {
        std::fill(y.begin(), y.end(), 2.0f);
        plan.execute({17, x.data(), packed.data(), bias.data(), y.data()}, room);
      }
      EXPECT_EQ(blas_calls("cublasLtMatmulAlgoGetHeuristic"), asked + 1) << "an algorithm is asked for once a number of rows";
      for (int64_t r = 0; r < 17; ++r)
        for (int64_t o = 0; o < out; ++o) {
          double sum = bias[static_cast<size_t>(o)] + (accumulate ? 2 : 0);
          for (int64_t i = 0; i < in; ++i) sum += static_cast<double>(x[static_cast<size_t>(r * in + i)]) * weight[static_cast<size_t>(o * in + i)];
          EXPECT_NEAR(y[static_cast<size_t>(r * out + o)], sum, 1e-4) << r << " " << o;
        }
      EXPECT_EQ(y[17 * 24], 2);
    }
  set_blas("gelu", 1);
}

TEST_F(OpsCuda, APlanLoadsItsKernels) {
  const ops::Plan<ops::Linear> plan(ops::Linear{16, 96, 200, DType::kBF16, DType::kBF16}, kGpu);
  const int64_t loads = stub().calls("cuModuleLoadDataEx"), launches = stub().calls("cuLaunchKernelEx");
  std::vector<char> memory(1 << 20);
  for (const int64_t rows : {1, 16, 5}) plan.execute({rows, memory.data(), memory.data(), memory.data(), memory.data()});
  EXPECT_EQ(stub().calls("cuModuleLoadDataEx"), loads);
  EXPECT_EQ(stub().calls("cuLaunchKernelEx"), launches + 3);
  EXPECT_GE(ops::rows_alike(ops::Linear{64, 96, 200, DType::kBF16}, kGpu), 16);
}

TEST_F(OpsCuda, SaysWhatIsNotThere) {
  set_blas("cublasLtMatmulAlgoGetHeuristic", 15);
  expect_contains(thrown_by([&] {
                    ops::Plan<ops::Linear>(ops::Linear{64, 97, 200}, kGpu);
                  }),
                  "has no algorithm for a product of 64 x 97 and 97 x 200 in fp32");
  set_blas("cublasLtMatmulAlgoGetHeuristic", 0);
  expect_contains(thrown_by([&] { ops::Plan<ops::Sampling>(ops::Sampling{1, 1 << 20, 1 << 20}, kGpu); }), "on a GPU at most");
  expect_contains(thrown_by([&] {
                    ops::Plan<ops::Linear>(ops::Linear{64, 8, 8, DType::kF32, DType::kF32, ops::Activation::kGelu, true}, kGpu);
                  }),
                  "does not add to its output");
  expect_contains(thrown_by([&] { ops::Plan<ops::Linear>(ops::Linear{1, 8, 8}, {.place = ops::Place::kCuda, .gpu = 7}); }), "allowed: 0 to 1");
  const ops::Plan<ops::LayerNorm> norm(ops::LayerNorm{3, 40}, kGpu);
  stub().fault("cuLaunchKernelEx", 1, 1);
  expect_contains(thrown_by([&] { norm.execute({3}); }), "launching fattn_ops_norm");
}

TEST(OpsCudaPlanned, EachKernelOnce) {
  for (const int arch : {80, 90, 120}) {
    std::vector<ops::cuda::KernelKey> seen;
    for (const auto& one : ops::cuda::planned_kernels(arch)) {
      EXPECT_EQ(std::count(seen.begin(), seen.end(), one.key), 0);
      seen.push_back(one.key);
      const core::jit::Request request = ops::cuda::request_of(one.key);
      EXPECT_NO_THROW(core::jit::reachable(request.source, request.sources()));
      EXPECT_THROW(core::jit::reachable(request.source, core::jit::embedded_sources()), Error) << "the library has none of them";
    }
    EXPECT_GT(seen.size(), 50u);
  }
}

// What the device would do: the token follows from seed and position, and the step goes on with it.
constexpr int kVocab = 131;
std::vector<int64_t> slots_of_row_0;  // that steps of one token wrote to
void draw(const void* argument) {
  DrawParams p;
  std::memcpy(&p, argument, sizeof p);
  for (int row = 0; row < p.rows; ++row) {
    DrawChoice& choice = p.choice[row];
    const auto token = static_cast<int>((choice.seed + 7 * choice.position + choice.request) % kVocab);
    p.token[row] = token;
    const DrawAdvance& a = p.advance;
    if (!a.ids || a.slot[row] < 0) continue;
    if (row == 0) slots_of_row_0.push_back(a.slot[row]);
    if (a.used[row] != a.position[row] + 1) p.token[row] = -1;
    a.ids[row] = token;
    ++a.position[row];
    ++a.used[row];
    ++a.slot[row];
    if (choice.seen_count < a.seen_stride) a.seen[row * a.seen_stride + choice.seen_count++] = token;
    ++choice.position;
  }
}

class SessionCuda : public OpsCuda {
 protected:
  void SetUp() override {
    OpsCuda::SetUp();
    stub().kernel("fattn_ops_draw", draw, sizeof(DrawParams));
  }
  static gpt2::Config config() {
    gpt2::Config c = gpt2::small();
    c.n_embd = 64;
    return c;
  }
  const gpt2::Files files_{config()};
  const gpt2::Model model_ = files_.load({.dtype = DType::kBF16, .gpu = 0});
};

TEST_F(SessionCuda, ATokenIsALaunchAndACopy) {
  gpt2::Session session(model_, {.batch = 3, .context = 40});
  const std::vector<gpt2::Token> prompt = gpt2::text(5, 1);
  session.prefill(std::vector<gpt2::NewTokens>{{0, prompt}, {1, std::span(prompt).first(2)}});
  std::vector<gpt2::Token> tokens(2);
  std::vector<ops::Choice> choices(2);
  for (size_t i = 0; i < 2; ++i) choices[i] = {.temperature = 1, .seed = 9, .request = i, .position = i == 0 ? 5u : 2u};
  session.draw(choices, tokens.data());
  const auto expected = [&](size_t i) { return static_cast<gpt2::Token>((9 + 7 * choices[i].position + i) % kVocab); };
  int64_t launches = 0, allocations = 0, uploads = 0, downloads = 0, graphs = 0;
  const auto note = [&] {
    launches = stub().calls("cuGraphLaunch");
    allocations = stub().calls("cuMemAlloc_v2");
    uploads = stub().calls("cuMemcpyHtoDAsync_v2");
    downloads = stub().calls("cuMemcpyDtoHAsync_v2");
    graphs = stub().calls("cuGraphInstantiateWithFlags");
  };
  for (int step = 0; step < 10; ++step) {
    const std::vector<gpt2::Token> last = tokens;
    const std::vector<gpt2::NewTokens> parts{{0, std::span(last).first(1)}, {1, std::span(last).last(1)}};
    for (ops::Choice& choice : choices) ++choice.position;
    session.step_and_draw(parts, choices, tokens.data());
    EXPECT_EQ(tokens[0], expected(0));
    EXPECT_EQ(tokens[1], expected(1));
    EXPECT_EQ(session.length(0), 6 + step);
    if (step > 0) {
      EXPECT_EQ(stub().calls("cuGraphLaunch"), launches + 1);
      EXPECT_EQ(stub().calls("cuMemAlloc_v2"), allocations);
      EXPECT_EQ(stub().calls("cuMemcpyHtoDAsync_v2"), uploads) << "the device has what it needs";
      EXPECT_EQ(stub().calls("cuMemcpyDtoHAsync_v2"), downloads + 1);
      EXPECT_EQ(stub().calls("cuGraphInstantiateWithFlags"), graphs);
    }
    note();
  }
  // What the host changes is sent.
  session.truncate(0, 7);
  choices[0].position = 20;
  const std::vector<gpt2::Token> other{3, tokens[1]};
  const std::vector<gpt2::NewTokens> parts{{0, std::span(other).first(1)}, {1, std::span(other).last(1)}};
  ++choices[1].position;
  session.step_and_draw(parts, choices, tokens.data());
  EXPECT_GT(stub().calls("cuMemcpyHtoDAsync_v2"), uploads);
  EXPECT_EQ(tokens[0], expected(0));
  EXPECT_EQ(session.length(0), 8);
  // Another number of rows has another graph.
  note();
  const std::vector<gpt2::NewTokens> third{{2, std::span(prompt).first(1)}};
  session.step_and_draw(third, std::vector<ops::Choice>(1), tokens.data());
  EXPECT_EQ(stub().calls("cuGraphInstantiateWithFlags"), graphs + 2) << "one a turn";
}

// Where more is to come the next step is there before it is asked for; each is launched once, and a guess that was wrong changes nothing.
TEST_F(SessionCuda, GoesAhead) {
  gpt2::Session session(model_, {.batch = 1, .context = 40});
  const std::vector<gpt2::Token> prompt = gpt2::text(5, 1);
  session.step({{0, prompt}});
  std::vector<gpt2::Token> token{3};
  ops::Choice choice{.temperature = 1, .seed = 9, .position = 5};
  const auto step = [&](bool more) {
    const std::vector<gpt2::Token> last = token;
    const std::vector<gpt2::NewTokens> part{{0, std::span(last)}};
    session.step_and_draw(part, std::vector<ops::Choice>{choice}, token.data(), more);
    EXPECT_EQ(token[0], static_cast<gpt2::Token>((9 + 7 * choice.position) % kVocab));
    ++choice.position;
  };
  step(true);
  const int64_t before = stub().calls("cuGraphLaunch");
  for (int i = 0; i < 10; ++i) step(true);
  EXPECT_EQ(stub().calls("cuGraphLaunch"), before + 11) << "one is ahead";
  step(false);
  EXPECT_EQ(stub().calls("cuGraphLaunch"), before + 11);
  step(true);
  step(true);
  session.truncate(0, 8);
  choice.position = 8;
  step(true);
  step(true);
  EXPECT_EQ(session.length(0), 10);
  // To the end of the cache, and not beyond.
  while (session.length(0) < 40) step(true);
  const std::vector<gpt2::NewTokens> part{{0, std::span(token)}};
  expect_contains(thrown_by([&] { session.step_and_draw(part, std::vector<ops::Choice>{choice}, token.data(), true); }), "the cache holds 40");
}

// A step that nobody has asked for yet writes behind the token before, so it begins at no page's end: what is behind may be another sequence's.
TEST_F(SessionCuda, GoesAheadInsideAPageAlone) {
  gpt2::Session session(model_, {.batch = 2, .context = 40, .page_size = 4, .cache_tokens = 24});
  const std::vector<gpt2::Token> prompt = gpt2::text(5, 1);
  session.prefill(std::vector<gpt2::NewTokens>{{0, prompt}, {1, std::span(prompt).first(3)}});
  std::vector<gpt2::Token> token{3};
  ops::Choice choice{.temperature = 1, .seed = 9, .position = 5};
  slots_of_row_0.clear();
  const auto step = [&] {
    const std::vector<gpt2::Token> last = token;
    const std::vector<gpt2::NewTokens> part{{0, std::span(last)}};
    session.step_and_draw(part, std::vector<ops::Choice>{choice}, token.data(), true);
    EXPECT_EQ(token[0], static_cast<gpt2::Token>((9 + 7 * choice.position) % kVocab));
    ++choice.position;
  };
  const int64_t before = stub().calls("cuGraphLaunch");
  for (int i = 0; i < 11; ++i) step();
  EXPECT_EQ(stub().calls("cuGraphLaunch"), before + 11) << "none was for nothing";
  // Pages 0 and 1 were there, 2 is the other sequence's.
  EXPECT_EQ(slots_of_row_0, (std::vector<int64_t>{5, 6, 7, 12, 13, 14, 15, 16, 17, 18, 19}));
  for (int i = 0; i < 4; ++i) step();
  const std::vector<gpt2::NewTokens> part{{0, std::span(token)}};
  expect_contains(thrown_by([&] { session.step_and_draw(part, std::vector<ops::Choice>{choice}, token.data(), true); }),
                  "this step needs 1 more page of 4 tokens; the cache has 0 left");
  session.truncate(1, 0);
  slots_of_row_0.clear();
  step();
  EXPECT_EQ(slots_of_row_0, (std::vector<int64_t>{8}));
}

TEST_F(SessionCuda, TakesItsMemoryOnceAndGivesItBack) {
  const int64_t before = stub().alive("bytes"), graphs = stub().alive("graphs"), streams = stub().alive("streams");
  {
    gpt2::Session session(model_, {.batch = 2, .context = 40});
    const gpt2::SessionPlans plans(model_.config(), model_.dtype(), model_.compute(), model_.device(), {.batch = 2, .context = 40});
    const gpt2::SessionMemory memory = plans.memory();
    const auto took = static_cast<size_t>(stub().alive("bytes") - before);
    EXPECT_GE(took, memory.cache + memory.arena());
    EXPECT_LE(took, memory.cache + memory.arena() + memory.inputs() + (64 << 10));
    const std::vector<gpt2::Token> prompt = gpt2::text(5, 1);
    session.step({{0, prompt}});
    std::vector<gpt2::Token> token{1};
    const std::vector<gpt2::NewTokens> part{{0, std::span(token)}};
    session.step_and_draw(part, std::vector<ops::Choice>(1), token.data());
  }
  EXPECT_EQ(stub().alive("bytes"), before);
  EXPECT_EQ(stub().alive("graphs"), graphs);
  EXPECT_EQ(stub().alive("streams"), streams);
}

TEST_F(SessionCuda, SaysHowMuchMemoryIsMissing) {
  stub().fault("cuMemAlloc_v2", 2, 1);
  const std::string why = thrown_by([&] { gpt2::Session(model_, {.batch = 2, .context = 40}); });
  expect_contains(why, "activations: cuda:0");
  expect_contains(why, "bytes are free");
  gpt2::Session session(model_, {.batch = 2, .context = 40});
  stub().fault("cuGraphInstantiateWithFlags", 2, 1);
  const std::vector<gpt2::Token> one{1};
  std::vector<gpt2::Token> token(1);
  const std::vector<gpt2::NewTokens> part{{0, std::span(one)}};
  EXPECT_NE(thrown_by([&] { session.step_and_draw(part, std::vector<ops::Choice>(1), token.data()); }), "nothing was thrown");
  EXPECT_EQ(session.length(0), 0) << "after an error nothing has changed";
  session.step_and_draw(part, std::vector<ops::Choice>(1), token.data());
  EXPECT_EQ(session.length(0), 1);
}

}  // namespace
}  // namespace fattn
