// The routes of the CUDA backend, without a device: which algorithms may compute a problem, in which order, what calls they accept, and their
// kernels.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "backend/cuda/plan/planners.h"
#include "backend/cuda/requests.h"
#include "fattn/error.hpp"
#include "fattn/options.hpp"

namespace fattn::core::cuda {
namespace {

struct Sizes {
  int64_t batch = 2, seqlen_q = 512, seqlen_k = 512, nheads = 4, nheads_k = 2, headdim = 64;
};

Problem problem_of(DType dtype, bool backward = false, Options options = {}, const char* with = "", Sizes s = {}) {
  const auto on_gpu = [&](DType type, std::initializer_list<int64_t> shape) { return Tensor(nullptr, type, shape).on(Device::kCuda, 0, nullptr); };
  const Tensor q = on_gpu(dtype, {s.batch, s.seqlen_q, s.nheads, s.headdim}), k = on_gpu(dtype, {s.batch, s.seqlen_k, s.nheads_k, s.headdim}),
               lse = on_gpu(DType::kF32, {s.batch, s.nheads, s.seqlen_q});
  fattn_problem p =
      backward ? describe(BackwardTensors{q, k, k, q, lse, q, q, k, k}, options) : describe(ForwardTensors{q, k, k, q, lse, {}}, options);
  if (*with) kOptions[option_index(with)].add(p);
  return validate(p);
}
Options asked(Algorithm algorithm) {
  Options options;
  options.algorithm = algorithm;
  return options;
}

std::string names_of(const std::vector<Route>& routes) {
  std::string names;
  for (const Route& route : routes) names += (names.empty() ? "" : ", ") + route.title.substr(0, route.title.find(' ', sizeof "cuda v2"));
  return names;
}
std::string on_hopper(const Problem& p) { return names_of(plan_routes(p, any_target(90, p.cuda_level))); }
std::string refusal(const Problem& p, int arch) {
  try {
    plan_routes(p, any_target(arch, p.cuda_level));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    return error.what();
  }
  return {};
}

constexpr Sizes kDecoding = {.seqlen_q = 1, .seqlen_k = 5000};

// Behind what wants multiples of 16 bytes stands what takes any address, unless the former was asked for.
TEST(CudaRoutesSmall, TheBestIsFirstAndTheLastTakesAnyAddress) {
  for (const bool backward : {false, true}) {
    const char* const pass = backward ? "backward" : "forward";
    EXPECT_EQ(on_hopper(problem_of(DType::kBF16, backward)), std::string("cuda v3 ") + pass + ", cuda v2 " + pass);
    EXPECT_EQ(on_hopper(problem_of(DType::kBF16, backward, asked(Algorithm::kV3))), std::string("cuda v3 ") + pass);
    EXPECT_EQ(on_hopper(problem_of(DType::kBF16, backward, asked(Algorithm::kV2))), std::string("cuda v2 ") + pass);
    EXPECT_EQ(on_hopper(problem_of(DType::kBF16, backward, asked(Algorithm::kV1))), std::string("cuda v1 ") + pass);
    Options level;
    level.cuda_level = 80;
    EXPECT_EQ(on_hopper(problem_of(DType::kBF16, backward, level)), std::string("cuda v2 ") + pass);
    EXPECT_EQ(names_of(plan_routes(problem_of(DType::kBF16, backward), any_target(80, 0))), std::string("cuda v2 ") + pass);
  }
  EXPECT_EQ(on_hopper(problem_of(DType::kF32)), "cuda v3 forward");
  EXPECT_EQ(on_hopper(problem_of(DType::kF32, true)), "cuda v2 backward");
  EXPECT_EQ(on_hopper(problem_of(DType::kF32, false, {}, "sinks")), "cuda v3 forward");
  EXPECT_EQ(on_hopper(problem_of(DType::kF16, false, {}, "", kDecoding)), "cuda v2 decode, cuda v2 forward");
  EXPECT_EQ(on_hopper(problem_of(DType::kF16, false, asked(Algorithm::kV3), "", kDecoding)), "cuda v3 forward");
}

TEST(CudaRoutesSmall, WhatIsRefusedIsNamed) {
  const std::vector<Route> routes = plan_routes(problem_of(DType::kF32, false, {}, "softcap"), any_target(90, 0));
  ASSERT_EQ(routes.size(), 1u);
  EXPECT_NE(routes[0].why.find("; not v3: algorithm v3 has no softcap in fp32"), std::string::npos) << routes[0].why;
  EXPECT_EQ(refusal(problem_of(DType::kF16, false, asked(Algorithm::kV3)), 80),
            "backend cuda: algorithm v3 was asked for: it is for compute capability 9.0 alone");
  EXPECT_NE(refusal(problem_of(DType::kBF16), 75).find("bf16 needs compute capability 8.0"), std::string::npos);
  EXPECT_NE(refusal(problem_of(DType::kF16, false, asked(Algorithm::kV1), "alibi"), 80).find("v1 of backend cuda does not compute ALiBi"),
            std::string::npos);
}

// Decode and v2 have pages, also on Hopper, which says why it is not v3.
TEST(CudaRoutesSmall, PagesAreForDecodeAndV2) {
  const std::vector<Route> forward = plan_routes(problem_of(DType::kBF16, false, {}, "pages"), any_target(90, 0));
  EXPECT_EQ(names_of(forward), "cuda v2 forward");
  EXPECT_NE(forward[0].why.find("; not v3: algorithm v3 of backend cuda does not compute a paged cache (block_table)"), std::string::npos)
      << forward[0].why;
  EXPECT_EQ(on_hopper(problem_of(DType::kF32, false, {}, "pages")), "cuda v2 forward");
  Problem few = problem_of(DType::kF16, false, {}, "pages", kDecoding);
  EXPECT_EQ(on_hopper(few), "cuda v2 decode, cuda v2 forward");
  few.v_page_stride += 4;  // no multiple of 16 bytes
  EXPECT_EQ(on_hopper(few), "cuda v2 forward");
  for (const Algorithm algorithm : {Algorithm::kV1, Algorithm::kV3, Algorithm::kStandard})
    EXPECT_NE(refusal(problem_of(DType::kF16, false, asked(algorithm), "pages"), 90).find("does not compute a paged cache"), std::string::npos);
  EXPECT_EQ(names_of(plan_routes(problem_of(DType::kF16, false, {}, "pages"), any_target(75, 0))), "cuda v2 forward");
}

// Without that somebody behind it takes the call, it is refused, and never left undone.
TEST(CudaRoutesSmall, CallsAreAcceptedByTheirAddresses) {
  fattn_buffers buffers{};
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  for (const TensorRow& row : kTensors) row.pointer.set(buffers, at(4096));
  for (const bool backward : {false, true})
    for (const TensorRow& row : kTensors) {
      const Problem p = problem_of(DType::kBF16, backward, {}, "bias");
      const std::vector<Route> routes = plan_routes(p, any_target(90, 0));
      ASSERT_EQ(routes.size(), 2u) << backward;
      EXPECT_TRUE(routes[0].accepts(misaligned(buffers)));
      fattn_buffers off = buffers;
      row.pointer.set(off, at(4096 + 8));
      const std::set<std::string> rows =
          backward ? std::set<std::string>{"q", "k", "v", "o", "dout", "dq", "dk", "dv"} : std::set<std::string>{"q", "k", "v", "o"};
      const bool copied = rows.count(row.name) != 0;
      EXPECT_EQ(routes[0].accepts(misaligned(off)), !copied) << row.name;
      EXPECT_TRUE(routes[1].accepts(misaligned(off))) << row.name;
      row.pointer.set(off, at(4096 + 2));
      const bool words = backward && std::string(row.name) == "bias";  // which v3's backward pass reads by two elements
      EXPECT_EQ(routes[0].accepts(misaligned(off)), !copied && !words) << row.name;
    }
}

// Loading, launching and compiling in advance go over the same kernels.
TEST(CudaRoutesSmall, KernelsAreThoseOfTheLaunches) {
  for (const int arch : {80, 90})
    for (const DType dtype : {DType::kF16, DType::kF32})
      for (const bool backward : {false, true})
        for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3})
          for (size_t option = 0; option <= kOptionCount; ++option) {
            const Problem p = problem_of(dtype, backward, asked(algorithm), option < kOptionCount ? kOptions[option].name : "");
            if (!refusal(p, arch).empty()) continue;
            const Route route = plan_routes(p, any_target(arch, 0)).front();
            std::set<std::string> launched, compiled;
            for (const Launch& launch : route.launches()) {
              ASSERT_NE(launch.kernel.request, nullptr) << "without a device there are no products";
              EXPECT_GT(launch.shape.grid_x, 0u);
              launched.insert(launch.kernel.request(launch.kernel.key).source);
            }
            for (const jit::Request& request : requests_for(p, arch)) EXPECT_TRUE(compiled.insert(request.source).second) << request.source;
            for (const std::string& source : launched) EXPECT_EQ(compiled.count(source), 1u) << source;
            EXPECT_LE(compiled.size(), launched.size() + route.siblings().size());
          }
}

}  // namespace
}  // namespace fattn::core::cuda
