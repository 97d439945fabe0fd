// Bad input: tensors and numbers that scores and masks depend on, packed sequences, documents, dropout.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fattn/fattn.hpp"
#include "invalid_problem.h"

namespace fattn {
namespace {

using namespace test;

// Memory for what scores depend on, each a tensor that is right.
struct GoodScores {
  int32_t lengths[kBatch] = {3, 8};
  float slopes[kBatch * kNheads] = {};
  std::vector<float> pairs = std::vector<float>(kBatch * kNheads * kSeqlenQ * kSeqlenK, 0.5f), gradient = pairs;
  std::vector<uint8_t> seen = std::vector<uint8_t>(pairs.size(), 1);
  float dlse[kBatch * kNheads * kSeqlenQ] = {};
  int64_t state[2] = {1, 2};
  void give(fattn_problem& p) {
    p.seqused_k = Tensor(lengths, DType::kI32, {kBatch}).raw();
    p.alibi_slopes = Tensor(slopes, DType::kF32, {kBatch, kNheads}).raw();
    p.bias = Tensor(pairs.data(), DType::kF32, {kBatch, kNheads, kSeqlenQ, kSeqlenK}).raw();
    p.mask = Tensor(seen.data(), DType::kU8, {kBatch, kNheads, kSeqlenQ, kSeqlenK}).raw();
    p.dropout_state = Tensor(state, DType::kI64, {2}).raw();
    p.p_dropout = 0.5;
    if (p.pass != FATTN_BACKWARD) return;
    p.dlse = Tensor(dlse, DType::kF32, {kBatch, kNheads, kSeqlenQ}).raw();
    p.dbias = Tensor(gradient.data(), DType::kF32, {1, kNheads, kSeqlenQ, kSeqlenK}).raw();
  }
};
const Named kScoreNames[] = {{"seqused_k", &fattn_problem::seqused_k}, {"alibi_slopes", &fattn_problem::alibi_slopes},
                             {"bias", &fattn_problem::bias},           {"mask", &fattn_problem::mask},
                             {"dbias", &fattn_problem::dbias},         {"dropout_state", &fattn_problem::dropout_state}};

// The same spoiling for each of them, on both backends that compute them.
void each_score_tensor(const std::function<std::string(fattn_tensor&, const char* name)>& spoil) {
  for (Backend backend : {Backend::kReference, Backend::kCpu}) {
    Good good(true, backend);
    GoodScores scores;
    scores.give(good.problem);
    EXPECT_EQ(fattn_execute(&good.problem), FATTN_OK) << fattn_last_error();
    for (const Named& n : kScoreNames) {
      fattn_problem p = good.problem;
      const std::string word = spoil(p.*n.member, n.name);
      SCOPED_TRACE(n.name);
      if (!word.empty()) expect_invalid(p, {n.name, word});
    }
  }
}

TEST(InvalidSmall, ScoreTensors) {
  each_score_tensor([](fattn_tensor& t, const char*) {
    t.dtype = FATTN_F16;
    return std::string("has the dtype fp16 (2); it must be");
  });
  each_score_tensor([](fattn_tensor& t, const char*) {
    t.ndim = 3;
    return std::string("has 3 dimensions; allowed: ");
  });
  each_score_tensor([](fattn_tensor& t, const char*) {
    t.shape[t.ndim - 1] -= 1;
    return std::string("expected (");
  });
  each_score_tensor([](fattn_tensor& t, const char*) {
    t.shape[0] = -1;
    return std::string("must be at least 0");
  });
  each_score_tensor([](fattn_tensor& t, const char*) {
    t.strides[0] = -1;
    return std::string("has the stride -1");
  });
  each_score_tensor([](fattn_tensor& t, const char*) {
    t.device_type = FATTN_DEVICE_CUDA;
    return std::string("is on CUDA device 0 but q is on the CPU");
  });
  each_score_tensor([](fattn_tensor& t, const char*) {
    t.data = nullptr;
    return std::string("is a null pointer");
  });
  each_score_tensor([](fattn_tensor& t, const char* name) {
    if (std::string(name) == "mask") return std::string();  // bytes
    t.data = static_cast<char*>(t.data) + 1;
    return std::string("is not aligned");
  });
  each_score_tensor([](fattn_tensor& t, const char* name) {
    if (std::strlen(name) > 5 && std::string(name) != "dropout_state") return std::string();  // lengths and slopes may be apart
    for (int64_t& stride : t.strides) stride *= 2;
    return std::string("has the stride 2");
  });
}
TEST(InvalidSmall, PairTensorsOfOneAreForAll) {
  GoodScores scores;
  for (int d = 0; d < 3; ++d) {
    Good g(true, Backend::kCpu);
    scores.give(g.problem);
    g.problem.bias.shape[d] = g.problem.mask.shape[d] = g.problem.dbias.shape[d] = 1;
    EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
    g.problem.bias.shape[d] = 0;
    expect_invalid(g.problem, {"bias has the shape", "batch or 1"});
  }
}
TEST(InvalidSmall, GradientOfABias) {
  Good g;
  GoodScores scores;
  g.problem.dbias = Tensor(scores.gradient.data(), DType::kF32, {kBatch, kNheads, kSeqlenQ, kSeqlenK}).raw();
  expect_invalid(g.problem, {"dbias is an output of the backward pass only"});
  Good b(true);
  scores.give(b.problem);
  b.problem.dbias.data = scores.pairs.data();
  expect_invalid(b.problem, {"dbias", "bias", "overlaps"});
  b.problem.dbias.data = scores.gradient.data();
  b.problem.dbias.strides[1] = 0;
  expect_invalid(b.problem, {"dbias is an output whose strides reach one element by two indices"});
}
TEST(InvalidSmall, Sinks) {
  float sinks[kNheads] = {}, gradient[kNheads] = {};
  const auto of_heads = [](float* data) { return Tensor(data, DType::kF32, {kNheads}).raw(); };
  Good forward;
  forward.problem.sinks = forward.problem.dsinks = of_heads(sinks);
  expect_invalid(forward.problem, {"dsinks is an output of the backward pass only"});
  for (Backend backend : {Backend::kReference, Backend::kCpu}) {
    const Good good(true, backend);
    const auto spoiled = [&](const std::function<void(fattn_problem&)>& spoil) {
      fattn_problem p = good.problem;
      p.sinks = of_heads(sinks);
      p.dsinks = of_heads(gradient);
      EXPECT_EQ(fattn_execute(&p), FATTN_OK) << fattn_last_error();
      spoil(p);
      return p;
    };
    expect_invalid(spoiled([](fattn_problem& p) { p.sinks.ndim = 0; }), {"sinks is absent, and dsinks, their gradient, is not"});
    expect_invalid(spoiled([](fattn_problem& p) { p.sinks.dtype = FATTN_BF16; }), {"sinks has the dtype bf16 (3)", "must be fp32", "as lse is"});
    expect_invalid(spoiled([](fattn_problem& p) { ++p.sinks.shape[0]; }), {"sinks has the shape (5)", "expected (4)", "one number a query head"});
    expect_invalid(spoiled([](fattn_problem& p) { p.dsinks.ndim = 2; }), {"dsinks has 2 dimensions", "(nheads)"});
    expect_invalid(spoiled([](fattn_problem& p) { p.dsinks.strides[0] = 0; }), {"dsinks is an output whose strides reach one element"});
    expect_invalid(spoiled([](fattn_problem& p) { p.sinks.device_type = FATTN_DEVICE_CUDA; }), {"sinks is on CUDA device 0 but q is on the CPU"});
    expect_invalid(spoiled([](fattn_problem& p) { p.dsinks.data = p.sinks.data; }), {"dsinks", "overlaps"});
  }
}

TEST(InvalidSmall, GradientOfLse) {
  GoodScores scores;
  const fattn_tensor dlse = Tensor(scores.dlse, DType::kF32, {kBatch, kNheads, kSeqlenQ}).raw();
  Good forward;
  forward.problem.dlse = dlse;
  expect_invalid(forward.problem, {"dlse is an input of the backward pass only"});
  for (Backend backend : {Backend::kReference, Backend::kCpu}) {
    const Good good(true, backend);
    const auto spoiled = [&](const std::function<void(fattn_tensor&)>& spoil) {
      fattn_problem p = good.problem;
      p.dlse = dlse;
      EXPECT_EQ(fattn_execute(&p), FATTN_OK) << fattn_last_error();
      spoil(p.dlse);
      return p;
    };
    expect_invalid(spoiled([](fattn_tensor& t) { t.dtype = FATTN_BF16; }), {"dlse is bf16", "must be fp32"});
    expect_invalid(spoiled([](fattn_tensor& t) { t.ndim = 2; }), {"dlse has 2 dimensions", "(batch, heads, seqlen_q)"});
    expect_invalid(spoiled([](fattn_tensor& t) { --t.shape[2]; }), {"dlse has the shape (2, 4, 5)", "expected (2, 4, 6)"});
    expect_invalid(spoiled([](fattn_tensor& t) { t.strides[0] = -1; }), {"dlse has the stride -1"});
    expect_invalid(spoiled([](fattn_tensor& t) { t.device_type = FATTN_DEVICE_CUDA; }), {"dlse is on CUDA device 0 but q is on the CPU"});
    expect_invalid(spoiled([](fattn_tensor& t) { t.data = nullptr; }), {"dlse is a null pointer"});
    expect_invalid(spoiled([](fattn_tensor& t) { t.data = static_cast<char*>(t.data) + 2; }), {"dlse points to", "not aligned"});
    expect_invalid(spoiled([&](fattn_tensor& t) { t.data = good.problem.dq.data; }), {"dq", "dlse", "overlaps"});
    fattn_problem expanded = spoiled([](fattn_tensor& t) { t.strides[0] = t.strides[1] = t.strides[2] = 0; });
    EXPECT_EQ(fattn_execute(&expanded), FATTN_OK) << fattn_last_error();
  }
}
TEST(InvalidSmall, KeyLengths) {
  for (Backend backend : {Backend::kReference, Backend::kCpu})
    for (int32_t bad : {-1, static_cast<int32_t>(kSeqlenK) + 1, std::numeric_limits<int32_t>::min()}) {
      Good g(false, backend);
      GoodScores scores;
      scores.give(g.problem);
      scores.lengths[1] = bad;
      expect_invalid(g.problem, {"seqused_k[1] is " + std::to_string(bad), "0 to seqlen_k, 8"});
    }
}
// On the CPU lists out of range are errors whatever `check` says, and `status` is of good ones.
TEST(InvalidSmall, CheckAndStatus) {
  Good g(false, Backend::kCpu);
  GoodScores scores;
  scores.give(g.problem);
  for (const int32_t bad : {-1, 3}) {
    g.problem.check = bad;
    expect_invalid(g.problem, {"check is " + std::to_string(bad), "auto (0), none (1), sync (2)"});
  }
  g.problem.check = FATTN_CHECK_SYNC;
  g.problem.batch_invariant = 2;
  expect_invalid(g.problem, {"batch_invariant is 2", "allowed: 0, 1"});
  g.problem.batch_invariant = 0;
  int32_t status[3] = {5, 6, 7};
  g.problem.status = Tensor(status, DType::kI32, {2}).raw();
  ASSERT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
  EXPECT_EQ(status[0], FATTN_LISTS_GOOD);
  EXPECT_EQ(status[1], 0);
  EXPECT_EQ(status[2], 7);
  const auto spoiled = [&](void (*spoil)(fattn_tensor&), std::initializer_list<std::string> words) {
    const fattn_tensor kept = g.problem.status;
    spoil(g.problem.status);
    expect_invalid(g.problem, words);
    g.problem.status = kept;
  };
  spoiled([](fattn_tensor& t) { t.dtype = FATTN_I64; }, {"status has the dtype int64 (7)", "int32"});
  spoiled([](fattn_tensor& t) { t.ndim = 2; }, {"status has 2 dimensions", "(2)"});
  spoiled([](fattn_tensor& t) { t.shape[0] = 3; }, {"status has the shape (3)", "expected (2)"});
  spoiled([](fattn_tensor& t) { t.strides[0] = 2; }, {"status has the stride 2; it must be 1"});
  spoiled([](fattn_tensor& t) { t.device_type = FATTN_DEVICE_CUDA; }, {"status is on CUDA device 0 but q is on the CPU"});
  spoiled([](fattn_tensor& t) { t.data = nullptr; }, {"status is a null pointer"});
  EXPECT_EQ(fattn_set_check(FATTN_CHECK_AUTO), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_set_check(FATTN_CHECK_SYNC), FATTN_OK);
  EXPECT_EQ(fattn_set_check(FATTN_CHECK_NONE), FATTN_OK);
  scores.lengths[1] = -1;
  g.problem.check = FATTN_CHECK_NONE;
  expect_invalid(g.problem, {"seqused_k[1] is -1"});
}

// Two packed sequences, of 4 and 3 queries, 5 and 3 keys, in tensors of 8 and 9 rows.
struct GoodSequences {
  int32_t first_query[3] = {0, 4, 7}, first_key[3] = {0, 5, 8};
  std::vector<float> memory = std::vector<float>(8192, 0.5f);
  size_t used = 0;
  fattn_problem problem;
  Tensor rows(int64_t total, int64_t heads, int64_t headdim) {
    float* data = memory.data() + used;
    used += static_cast<size_t>(total * heads * headdim);
    return Tensor(data, DType::kF32, {total, heads, headdim});
  }
  explicit GoodSequences(bool backward, Backend backend) {
    Options options;
    options.backend = backend;
    options.max_seqlen_q = 4;
    options.max_seqlen_k = 5;
    const auto queries = [&](int64_t headdim) { return rows(8, kNheads, headdim); };
    const auto keys = [&](int64_t headdim) { return rows(9, kNheadsK, headdim); };
    const Tensor q = queries(kHeaddim), k = keys(kHeaddim), v = keys(kHeaddimV), o = queries(kHeaddimV);
    const Tensor lse(rows(kNheads, 8, 1).data(), DType::kF32, {kNheads, 8});
    ScoreTensors scores;
    scores.cu_seqlens_q = Tensor(first_query, DType::kI32, {3});
    scores.cu_seqlens_k = Tensor(first_key, DType::kI32, {3});
    problem =
        backward ? describe(BackwardTensors{q, k, v, o, lse, queries(kHeaddimV), queries(kHeaddim), keys(kHeaddim), keys(kHeaddimV), scores}, options)
                 : describe(ForwardTensors{q, k, v, o, lse, {}, scores}, options);
  }
};
TEST(InvalidSmall, PackedSequences) {
  for (Backend backend : {Backend::kReference, Backend::kCpu})
    for (bool backward : {false, true}) {
      const auto spoiled = [&](const std::function<void(GoodSequences&)>& spoil, std::initializer_list<std::string> words) {
        GoodSequences g(backward, backend);
        EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
        spoil(g);
        expect_invalid(g.problem, words);
      };
      // Values, which are data: no row beyond the tensors is ever read.
      spoiled([](GoodSequences& g) { g.first_query[0] = 1; }, {"cu_seqlens_q[0] is 1", "must be 0"});
      spoiled([](GoodSequences& g) { g.first_query[0] = -1; }, {"cu_seqlens_q[0] is -1"});
      spoiled([](GoodSequences& g) { g.first_query[1] = -2; }, {"cu_seqlens_q[1] is -2", "allowed: 0, where its sequence begins, to total_q, 8"});
      spoiled([](GoodSequences& g) { g.first_key[2] = 4; }, {"cu_seqlens_k[2] is 4", "allowed: 5"});
      spoiled([](GoodSequences& g) { g.first_query[2] = 9; }, {"cu_seqlens_q[2] is 9", "total_q, 8"});
      spoiled([](GoodSequences& g) { g.first_key[2] = std::numeric_limits<int32_t>::max(); }, {"cu_seqlens_k[2] is 2147483647", "total_k, 9"});
      spoiled(
          [](GoodSequences& g) {
            g.first_key[1] = 0;
            g.first_key[2] = 6;
          },
          {"cu_seqlens_k[1] and [2] are 0 and 6", "max_seqlen_k, 5"});
      // With seqused_k only where a sequence begins, in any order: sequence 1 is keys 5 to 8, then 0 to 2, behind sequence 0.
      int32_t lengths[] = {5, 4};
      const auto used = [&](std::initializer_list<int32_t> first, std::initializer_list<int32_t> keys) {
        return [&lengths, first = std::vector<int32_t>(first), keys = std::vector<int32_t>(keys)](GoodSequences& g) {
          std::copy(first.begin(), first.end(), g.first_key);
          std::copy(keys.begin(), keys.end(), lengths);
          g.problem.seqused_k = Tensor(lengths, DType::kI32, {2}).raw();
        };
      };
      const auto fine = [&](const std::function<void(GoodSequences&)>& change) {
        GoodSequences g(backward, backend);
        change(g);
        EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
      };
      fine(used({0, 5, 8}, {5, 4}));
      fine(used({4, 0, -9}, {5, 3}));
      fine(used({9, 9, 99}, {0, 0}));
      spoiled(used({0, 6, 8}, {5, 4}), {"seqused_k[1] is 4; allowed: 0 to 3, the rows of k from cu_seqlens_k[1] on"});
      spoiled(used({0, 1, 8}, {5, 6}), {"seqused_k[1] is 6; allowed: 0 to max_seqlen_k, 5"});
      spoiled(used({0, 1, 8}, {-1, 3}), {"seqused_k[0] is -1"});
      spoiled(used({0, -1, 8}, {3, 0}), {"cu_seqlens_k[1] is -1; allowed: 0 to total_k, 9, with seqused_k in any order"});
      spoiled(used({10, 0, 8}, {0, 3}), {"cu_seqlens_k[0] is 10"});
      if (backward)
        spoiled(used({4, 0, 8}, {5, 5}), {"sequences 0 and 1 use the same keys", "from cu_seqlens_k 4 and 0 on"});
      else
        fine(used({4, 0, 8}, {5, 5}));
      // Shapes and limits.
      spoiled([](GoodSequences& g) { g.problem.max_seqlen_q = -1; }, {"max_seqlen_q is -1", "0 to 2^31 - 1"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_q.ndim = 0; }, {"cu_seqlens_q is absent, and cu_seqlens_k is not"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_k.ndim = 0; }, {"cu_seqlens_k is absent, and cu_seqlens_q is not"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_k.shape[0] = 2; }, {"cu_seqlens_k has the shape (2)", "expected (3)"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_q.shape[0] = 0; }, {"cu_seqlens_q has the shape (0)", "batch + 1"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_q.dtype = FATTN_I64; }, {"cu_seqlens_q has the dtype int64 (7)", "int32"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_q.data = nullptr; }, {"cu_seqlens_q is a null pointer"});
      spoiled([](GoodSequences& g) { g.problem.q.ndim = 4; }, {"q has 4 dimensions; allowed: 3 (total, heads, headdim)"});
      spoiled([](GoodSequences& g) { g.problem.v.shape[0] = 8; }, {"v has the shape (8, 2, 8)", "from k's rows and heads"});
      spoiled([](GoodSequences& g) { g.problem.lse.shape[1] = 7; }, {"lse has the shape (4, 7)", "(nheads, total_q)"});
      spoiled([](GoodSequences& g) { g.problem.lse.ndim = 3; }, {"lse has 3 dimensions; allowed: 2 (heads, total_q)"});
      std::vector<float> bias(2 * kNheads * 4 * 9);
      spoiled(
          [&](GoodSequences& g) {
            g.problem.bias = Tensor(bias.data(), DType::kF32, {2, kNheads, 4, 9}).raw();
          },
          {"bias has the shape (2, 4, 4, 9)", "seqlen_q 4, seqlen_k 5"});
      if (!backward)
        spoiled(
            [&](GoodSequences& g) {
              g.problem.weights = Tensor(bias.data(), DType::kF32, {2, kNheads, 4, 5}).raw();
            },
            {"weights of packed sequences are not computed"});
      Good dense(backward, backend);
      dense.problem.max_seqlen_k = 8;
      expect_invalid(dense.problem, {"max_seqlen_k is 8", "cu_seqlens_k are absent"});
    }
  GoodSequences g(false, Backend::kCpu);
  g.problem.algorithm = FATTN_ALGORITHM_STANDARD;
  expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"algorithm standard of backend cpu does not compute packed sequences", "backend reference"});
}
TEST(InvalidSmall, Documents) {
  std::vector<int32_t> ids(64);
  for (Backend backend : {Backend::kReference, Backend::kCpu})
    for (bool backward : {false, true}) {
      const auto spoiled = [&](const std::function<void(fattn_problem&)>& spoil, std::initializer_list<std::string> words) {
        Good g(backward, backend);
        g.problem.document_q = Tensor(ids.data(), DType::kI32, {kBatch, kSeqlenQ}).raw();
        g.problem.document_k = Tensor(ids.data(), DType::kI32, {kBatch, kSeqlenK}).raw();
        EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
        spoil(g.problem);
        expect_invalid(g.problem, words);
      };
      spoiled([](fattn_problem& p) { p.document_k.ndim = 0; }, {"document_k is absent, and document_q is not"});
      spoiled([](fattn_problem& p) { p.document_q.ndim = 0; }, {"document_q is absent, and document_k is not"});
      spoiled([](fattn_problem& p) { p.document_q.dtype = FATTN_I64; }, {"document_q has the dtype int64 (7)", "int32"});
      spoiled([](fattn_problem& p) { p.document_k.ndim = 1; }, {"document_k has 1 dimensions; allowed: 2 (batch, seqlen)"});
      spoiled([](fattn_problem& p) { ++p.document_k.shape[1]; }, {"document_k has the shape (2, 9)", "expected (2, 8)"});
      spoiled([](fattn_problem& p) { p.document_q.strides[1] = 2; }, {"document_q has the stride 2 in its last dimension"});
      spoiled([](fattn_problem& p) { p.document_q.strides[0] = -1; }, {"document_q has the stride -1"});
      spoiled([](fattn_problem& p) { p.document_q.data = nullptr; }, {"document_q is a null pointer"});
      spoiled([](fattn_problem& p) { p.document_k.data = static_cast<char*>(p.document_k.data) + 1; }, {"document_k points to", "not aligned"});
      spoiled([](fattn_problem& p) { p.document_k.device_type = FATTN_DEVICE_CUDA; }, {"document_k is on CUDA device 0"});
      spoiled([&](fattn_problem& p) { p.document_k.data = (backward ? p.dq : p.o).data; }, {"document_k", "overlaps"});
      GoodSequences g(backward, backend);
      g.problem.document_q = Tensor(ids.data(), DType::kI32, {8}).raw();
      g.problem.document_k = Tensor(ids.data(), DType::kI32, {9}).raw();
      EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
      g.problem.document_k.shape[0] = 8;
      expect_invalid(g.problem, {"document_k has the shape (8)", "expected (9)"});
    }
  Good g(false, Backend::kCpu);
  g.problem.algorithm = FATTN_ALGORITHM_STANDARD;
  g.problem.document_q = Tensor(ids.data(), DType::kI32, {kBatch, kSeqlenQ}).raw();
  g.problem.document_k = Tensor(ids.data(), DType::kI32, {kBatch, kSeqlenK}).raw();
  expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"algorithm standard of backend cpu does not compute documents", "backend reference"});
}
// A plan is for any lengths within its limits.
TEST(InvalidSmall, PackedSequencesMayChangeBetweenCalls) {
  GoodSequences g(false, Backend::kCpu);
  const Plan plan(g.problem);
  fattn_problem p = g.problem;
  ScoreTensors scores;
  scores.cu_seqlens_q = Tensor(g.first_query, DType::kI32, {3});
  scores.cu_seqlens_k = Tensor(g.first_key, DType::kI32, {3});
  const ForwardTensors all{Tensor(p.q.data, DType::kF32, {8, kNheads, kHeaddim}),
                           Tensor(p.k.data, DType::kF32, {9, kNheadsK, kHeaddim}),
                           Tensor(p.v.data, DType::kF32, {9, kNheadsK, kHeaddimV}),
                           Tensor(p.o.data, DType::kF32, {8, kNheads, kHeaddimV}),
                           Tensor(p.lse.data, DType::kF32, {kNheads, 8}),
                           {},
                           scores};
  std::vector<float> workspace(plan.workspace_bytes() / sizeof(float) + 16);
  float* aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64 / sizeof(float);
  for (const auto& [first, keys] : {std::pair{4, 5}, std::pair{0, 0}, std::pair{3, 2}, std::pair{4, 4}}) {
    g.first_query[1] = first;
    g.first_key[1] = keys;
    g.first_query[2] = first + 4;
    g.first_key[2] = keys + 4;
    plan.execute(all, aligned, plan.workspace_bytes());
    const auto* lse = static_cast<const float*>(p.lse.data);
    for (int row = 0; row < 8; ++row) {  // every key has the same score: 16 * 0.25 / 4
      const int n = row < first ? keys : row < first + 4 ? 4 : 0;
      if (n == 0)
        EXPECT_EQ(lse[row], -HUGE_VALF) << row;
      else
        EXPECT_NEAR(lse[row], 1 + std::log(n), 1e-5) << row;
    }
  }
}
TEST(InvalidSmall, Dropout) {
  for (double p : {std::nan(""), -0.1, 1.0, 2.0, 1 - 0x1p-18}) {
    Good g;
    g.problem.p_dropout = p;
    expect_invalid(g.problem, {"p_dropout is", "0 (none) to 1 - 2^-16"});
  }
  Good g;
  g.problem.p_dropout = 0.1;
  expect_invalid(g.problem, {"dropout_state is absent", "seed"});
}
// What a backend lacks is refused with the reason, whatever else is asked for.
TEST(InvalidSmall, FeaturesThatABackendLacks) {
  for (bool backward : {false, true}) {
    Good g(backward, Backend::kCpu);
    g.problem.algorithm = FATTN_ALGORITHM_STANDARD;
    g.problem.softcap = 3;
    expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"algorithm standard of backend cpu does not compute softcap", "backend reference"});
    g.problem.softcap = 0;
    GoodScores scores;
    for (const auto& [n, word] : {std::pair{kScoreNames[0], "seqused_k"}, std::pair{kScoreNames[1], "ALiBi"}, std::pair{kScoreNames[2], "a bias"},
                                  std::pair{kScoreNames[3], "a mask of pairs"}}) {
      Good all(backward, Backend::kCpu);
      scores.give(all.problem);
      fattn_problem p = g.problem;
      p.*n.member = all.problem.*n.member;
      expect_error(p, FATTN_ERROR_UNSUPPORTED, {"algorithm standard of backend cpu does not compute", word, "backend reference"});
    }
    fattn_problem dropping = g.problem;
    dropping.dropout_state = Tensor(scores.state, DType::kI64, {2}).raw();
    dropping.p_dropout = 0.5;
    expect_error(dropping, FATTN_ERROR_UNSUPPORTED, {"does not compute dropout"});
    g.problem.has_window = 1;
    g.problem.window_left = 2;
    g.problem.window_right = -1;
    expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"a sliding window", "backend reference"});
    g.problem.window_left = 1000;  // hides nothing
    g.problem.window_right = 0;    // is causal
    char reason[256];
    if (fattn_supported(&g.problem, reason, sizeof reason) != FATTN_OK) {
      EXPECT_EQ(std::string(reason).find("window"), std::string::npos) << reason;
    }
  }
}

}  // namespace
}  // namespace fattn
