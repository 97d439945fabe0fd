// batch_invariant on a GPU, without one: the steps and blocks of a row follow from the device, the dtype, the headdims and the options
// alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cuda/pair_features.h"
#include "backend/cuda/plan/planners.h"
#include "backend/cuda/requests.h"
#include "backend/cuda/v2_forward.h"
#include "fattn/error.hpp"
#include "fattn/options.hpp"

namespace fattn::core::cuda {
namespace {

// As in test_cuda_v2_forward_plan.cpp.
const V2Target kTargets[] = {
    {75, 75, 65536, 65536, 6 << 20},    {80, 80, 166912, 167936, 40 << 20},   {86, 80, 101376, 102400, 6 << 20},   {89, 80, 101376, 102400, 72 << 20},
    {90, 80, 232448, 233472, 50 << 20}, {100, 80, 232448, 233472, 126 << 20}, {120, 80, 101376, 102400, 96 << 20}, {90, 75, 65536, 233472, 50 << 20},
};

Problem problem_of(DType dtype, int64_t headdim, int64_t headdim_v) {
  Problem p;
  p.dtype = dtype;
  p.batch = 2;
  p.seqlen_q = p.seqlen_k = 300;
  p.nheads = 8;
  p.nheads_k = 2;
  p.headdim = headdim;
  p.headdim_v = headdim_v;
  p.softmax_scale = 0.125;
  p.batch_invariant = true;
  p.q = {300 * 8 * headdim, 8 * headdim, headdim};
  p.k = {300 * 2 * headdim, 2 * headdim, headdim};
  p.v = {300 * 2 * headdim_v, 2 * headdim_v, headdim_v};
  p.o = {300 * 8 * headdim_v, 8 * headdim_v, headdim_v};
  p.lse = {8 * 300, 1, 300};
  return p;
}

// What another call with the same rows may have otherwise.
std::vector<Problem> calls_with_the_same_rows(const Problem& base) {
  std::vector<Problem> all;
  const auto add = [&](auto change) {
    all.push_back(base);
    change(all.back());
  };
  add([](Problem&) {});
  for (const int64_t batch : {1, 64}) add([&](Problem& p) { p.batch = batch; });
  for (const int64_t seqlen : {1, 7, 100, 1024}) {
    add([&](Problem& p) { p.seqlen_q = seqlen; });
    add([&](Problem& p) { p.seqlen_k = seqlen * 50; });
  }
  add([](Problem& p) { p.nheads = p.nheads_k = 1; });
  add([](Problem& p) { p.causal = !p.causal; });
  add([](Problem& p) { p.has_seqused_k = true; });
  add([](Problem& p) { p.q.row += 1; });
  const auto pack = [](Problem& p) {
    p.packed = true;
    p.total_q = p.total_k = 600;
    p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
  };
  const auto page = [](Problem& p) {
    p.paged = true;
    p.page_size = 16, p.pages = 40;
    p.k_page_stride = 16 * p.k.row, p.v_page_stride = 16 * p.v.row;
    p.k.batch = p.v.batch = 0;
  };
  add(pack);
  add([&](Problem& p) { pack(p), p.has_seqused_k = true; });
  add(page);
  add([&](Problem& p) { pack(p), page(p), p.has_seqused_k = true; });
  return all;
}

// Options, which are the same in all calls.
std::vector<Problem> with_options(const Problem& base) {
  std::vector<Problem> all;
  const PairTensor pairs{true, base.dtype, 1, base.nheads, 1024, {1 << 20, 1 << 10, 1}};
  for (int option = 0; option < 9; ++option) {
    Problem p = base;
    if (option == 1) p.window_left = 1 << 30;
    if (option == 2) p.softcap = 30;
    if (option == 3) p.has_alibi = true;
    if (option == 4) p.bias = pairs;
    if (option == 5) p.bias = pairs, p.bias.dtype = DType::kF32, p.pair_mask = pairs, p.pair_mask.dtype = DType::kU8;
    if (option == 6) p.dropout_below = 6554;
    if (option == 7) p.has_documents = true;
    if (option == 8) p.has_sinks = true;
    all.push_back(p);
  }
  return all;
}

// What the bits of a row follow from (kernels/v2/forward.h, forward_f32_own.h).
using Bits = std::tuple<int, int, int>;
Bits bits_of(const V2ForwardPlan& plan) {
  const V2ForwardRow& row = v2_forward_rows()[static_cast<size_t>(plan.key.row)];
  return row.f32 ? Bits{row.tile.step_n, 0, 0} : Bits{row.level, row.tile.exact_n, row.tile.block_n};
}

TEST(BatchInvariantCudaSmall, BitsFollowFromOptionsAndWidthsAlone) {
  int compared = 0;
  for (const V2Target& target : kTargets)
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
      for (const auto& [headdim, headdim_v] : {std::pair{32, 32}, {64, 64}, {128, 128}, {64, 128}, {192, 192}, {256, 256}})
        for (const Problem& base : with_options(problem_of(dtype, headdim, headdim_v))) {
          if (!v2_forward_refusal(base, target).empty()) continue;
          const V2ForwardPlan first = plan_v2_forward(base, target);
          for (const Problem& p : calls_with_the_same_rows(base)) {
            if (!v2_forward_refusal(p, target).empty()) continue;
            const V2ForwardPlan plan = plan_v2_forward(p, target);
            EXPECT_EQ(bits_of(plan), bits_of(first)) << target.arch << " " << headdim;
            EXPECT_EQ(plan.key.own_bits, 1);
            EXPECT_LE(plan.shared_bytes, target.shared_bytes);
            ++compared;
          }
        }
  EXPECT_GT(compared, 10000);
}

TEST(BatchInvariantCudaSmall, RowsOfOneKindHaveTheSameSteps) {
  std::map<std::tuple<int, int, bool, bool>, std::pair<int, int>> kinds;
  size_t own = 0;
  for (const V2ForwardRow& row : v2_forward_rows()) {
    if (!row.own) continue;
    ++own;
    const std::pair<int, int> steps = row.f32 ? std::pair{row.tile.step_n, 0} : std::pair{row.tile.exact_n, row.tile.block_n};
    const auto [at, is_new] = kinds.try_emplace({row.level, row.f32 ? 0 : row.headdim, row.f32, row.heavy}, steps);
    EXPECT_EQ(at->second, steps) << row.headdim;
    if (row.f32) {
      EXPECT_FALSE(row.tile.queries_in_registers);
      EXPECT_LE(row.headdim, 192);
    }
  }
  EXPECT_GT(own, 0u);
}

TEST(BatchInvariantCudaSmall, ItsKernelsAreOthers) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Problem p = problem_of(dtype, 64, 64);
    const V2ForwardPlan own = plan_v2_forward(p, kTargets[4]);
    p.batch_invariant = false;
    const V2ForwardPlan other = plan_v2_forward(p, kTargets[4]);
    EXPECT_TRUE(v2_forward_rows()[static_cast<size_t>(own.key.row)].own);
    EXPECT_FALSE(v2_forward_rows()[static_cast<size_t>(other.key.row)].own);
    const std::string source = v2_forward_request(own.key).source, line = source.substr(0, source.find('\n'));
    EXPECT_NE(source.find("kOwnBits = true;"), std::string::npos);
    EXPECT_NE(line.find(", batch invariant"), std::string::npos) << line;
    EXPECT_EQ(v2_forward_request(other.key).source.find("kOwnBits"), std::string::npos);
  }
}

TEST(BatchInvariantCudaSmall, EveryWidthHasATile) {
  for (const V2Target& target : kTargets)
    for (const DType dtype : {DType::kF32, DType::kF16})
      for (int headdim = 1; headdim <= 256; ++headdim)
        for (const int headdim_v : {headdim, 1, 256}) {
          if (dtype == DType::kF32 && target.level < 80) continue;
          const std::string why = v2_forward_refusal(problem_of(dtype, headdim, headdim_v), target);
          if (dtype == DType::kF32 && std::max(headdim, headdim_v) > 192)
            EXPECT_NE(why.find("with batch_invariant the CUDA kernels for fp32 take up to 192; use fp16 or bf16, or the CPU"), std::string::npos)
                << why;
          else
            EXPECT_EQ(why, "") << target.arch << " " << headdim << " " << headdim_v;
        }
}

TEST(BatchInvariantCudaSmall, DistancesStayExact) {
  Problem p = problem_of(DType::kBF16, 64, 64);
  p.seqlen_k = (int64_t{1} << 24) + 1;
  EXPECT_EQ(v2_forward_refusal(p, kTargets[4]), "");
  p.has_alibi = true;
  EXPECT_NE(v2_forward_refusal(p, kTargets[4]).find("with batch_invariant and ALiBi the CUDA kernels take up to 16777216"), std::string::npos);
  p.seqlen_k -= 1;
  EXPECT_EQ(v2_forward_refusal(p, kTargets[4]), "");
}

// Neither decode nor v3 takes it, and the other algorithms do not have it.
TEST(BatchInvariantCudaSmall, V2AloneTakesIt) {
  const auto described = [](int64_t seqlen_q, Algorithm algorithm, DType dtype) {
    const auto on_gpu = [&](DType type, std::initializer_list<int64_t> shape) { return Tensor(nullptr, type, shape).on(Device::kCuda, 0, nullptr); };
    const Tensor q = on_gpu(dtype, {2, seqlen_q, 4, 64}), k = on_gpu(dtype, {2, 5000, 2, 64}), lse = on_gpu(DType::kF32, {2, 4, seqlen_q});
    Options options;
    options.algorithm = algorithm;
    options.batch_invariant = true;
    return validate(describe(ForwardTensors{q, k, k, q, lse, {}, {}}, options));
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    for (const int64_t seqlen_q : {1, 5000}) {
      const std::vector<Route> routes = plan_routes(described(seqlen_q, Algorithm::kAuto, dtype), any_target(90, 0));
      ASSERT_EQ(routes.size(), 1u);
      EXPECT_EQ(routes[0].title.substr(0, 15), "cuda v2 forward");
      EXPECT_EQ(routes[0].launches().size(), 1u);
      for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kV1, Algorithm::kV3}) {
        try {
          plan_routes(described(seqlen_q, algorithm, dtype), any_target(90, 0));
          ADD_FAILURE() << name_of(algorithm) << " took it";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
          EXPECT_NE(std::string(error.what()).find("bits of a row that are its own (batch_invariant)"), std::string::npos) << error.what();
        }
      }
    }
}

}  // namespace
}  // namespace fattn::core::cuda
