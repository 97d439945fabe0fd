// Bad input: every mistake that the library can see gets the right code and a message that names the offender.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "fattn/fattn.hpp"

namespace fattn {
namespace {

constexpr int64_t kBatch = 2, kSeqlenQ = 6, kSeqlenK = 8, kNheads = 4, kNheadsK = 2, kHeaddim = 16, kHeaddimV = 8;

// A good problem, forward or backward, in memory of its own; each test spoils one thing.
struct Good {
  std::vector<float> memory = std::vector<float>(16384, 0.5f);
  size_t used = 0;
  float* take(int64_t n) {
    used = (used + 15) / 16 * 16;
    float* p = memory.data() + used;
    used += static_cast<size_t>(n);
    return p;
  }
  Tensor rows(int64_t seqlen, int64_t heads, int64_t headdim) {
    return Tensor(take(kBatch * seqlen * heads * headdim), DType::kF32, {kBatch, seqlen, heads, headdim});
  }
  fattn_problem problem;

  explicit Good(bool backward = false, Backend backend = Backend::kReference) {
    Options options;
    options.backend = backend;
    const Tensor q = rows(kSeqlenQ, kNheads, kHeaddim), k = rows(kSeqlenK, kNheadsK, kHeaddim), v = rows(kSeqlenK, kNheadsK, kHeaddimV);
    const Tensor o = rows(kSeqlenQ, kNheads, kHeaddimV), lse(take(kBatch * kNheads * kSeqlenQ), DType::kF32, {kBatch, kNheads, kSeqlenQ});
    if (!backward) {
      problem = describe(ForwardTensors{q, k, v, o, lse, {}}, options);
      return;
    }
    const Tensor dout = rows(kSeqlenQ, kNheads, kHeaddimV), dq = rows(kSeqlenQ, kNheads, kHeaddim), dk = rows(kSeqlenK, kNheadsK, kHeaddim),
                 dv = rows(kSeqlenK, kNheadsK, kHeaddimV);
    problem = describe(BackwardTensors{q, k, v, o, lse, dout, dq, dk, dv}, options);
  }
};

// The call fails with `code`, and the message holds every one of `words`.
void expect_error(const fattn_problem& p, fattn_status code, std::initializer_list<std::string> words) {
  const fattn_status got = fattn_execute(&p);
  const std::string message = fattn_last_error();
  EXPECT_EQ(got, code) << fattn_status_name(got) << ": " << message;
  for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << "no '" << word << "' in: " << message;
}
void expect_invalid(const fattn_problem& p, std::initializer_list<std::string> words) { expect_error(p, FATTN_ERROR_INVALID_ARGUMENT, words); }

struct Named {
  const char* name;
  fattn_tensor fattn_problem::*member;
};
const Named kForwardNames[] = {
    {"q", &fattn_problem::q}, {"k", &fattn_problem::k}, {"v", &fattn_problem::v}, {"o", &fattn_problem::o}, {"lse", &fattn_problem::lse}};
const Named kBackwardNames[] = {{"q", &fattn_problem::q},   {"k", &fattn_problem::k},     {"v", &fattn_problem::v},
                                {"o", &fattn_problem::o},   {"lse", &fattn_problem::lse}, {"dout", &fattn_problem::dout},
                                {"dq", &fattn_problem::dq}, {"dk", &fattn_problem::dk},   {"dv", &fattn_problem::dv}};

// The same spoiling for every tensor of both passes. `spoil` returns words that the message must hold beside the name.
void each_tensor(const std::function<std::string(fattn_tensor&, const char* name)>& spoil, fattn_status code = FATTN_ERROR_INVALID_ARGUMENT) {
  for (bool backward : {false, true}) {
    const Good good(backward);
    const auto spoil_one = [&](const Named& n) {
      SCOPED_TRACE(std::string(backward ? "backward " : "forward ") + n.name);
      fattn_problem p = good.problem;
      const std::string word = spoil(p.*n.member, n.name);
      if (word.empty()) return;  // does not apply to this tensor
      expect_error(p, code, {n.name, word});
    };
    if (backward)
      for (const Named& n : kBackwardNames) spoil_one(n);
    else
      for (const Named& n : kForwardNames) spoil_one(n);
  }
}

TEST(InvalidSmall, TheGoodProblemIsGood) {
  for (bool backward : {false, true}) EXPECT_EQ(fattn_execute(&std::make_unique<Good>(backward)->problem), FATTN_OK) << fattn_last_error();
}

TEST(InvalidSmall, UnknownDtype) {
  for (int32_t dtype : {0, 5, -1, 1 << 30})
    each_tensor([&](fattn_tensor& t, const char*) {
      t.dtype = dtype;
      return std::to_string(dtype);
    });
}
TEST(InvalidSmall, MixedDtypes) {
  each_tensor([](fattn_tensor& t, const char* name) {
    t.dtype = FATTN_BF16;
    return std::string(name) == "q" ? "bf16" : std::string(name) == "lse" ? "must be fp32" : "but q is fp32";
  });
}
TEST(InvalidSmall, LseOfSixteenBits) {
  Good g;
  for (fattn_tensor* t : {&g.problem.q, &g.problem.k, &g.problem.v, &g.problem.o, &g.problem.lse}) t->dtype = FATTN_F16;
  expect_invalid(g.problem, {"lse is fp16", "must be fp32"});
}
TEST(InvalidSmall, AbsentTensor) {
  for (bool backward : {false, true})
    for (const Named& n : kBackwardNames) {
      if (!backward && (n.member == &fattn_problem::lse || std::strchr(n.name, 'd'))) continue;
      Good g(backward);
      (g.problem.*n.member).ndim = 0;
      SCOPED_TRACE(n.name);
      expect_invalid(g.problem, {std::string(n.name) + " is absent"});
    }
}
TEST(InvalidSmall, WrongRank) {
  for (int32_t ndim : {1, 5, -1, 1 << 30})
    each_tensor([&](fattn_tensor& t, const char*) {
      t.ndim = ndim;
      return std::to_string(ndim) + " dimensions";
    });
}
TEST(InvalidSmall, OtherDevice) {
  each_tensor([](fattn_tensor& t, const char*) {
    t.device_type = 2;
    return std::string("device type 2");
  });
  each_tensor([](fattn_tensor& t, const char*) {
    t.device_index = 1;
    return std::string("index 1");
  });
}
TEST(InvalidSmall, MismatchedShapes) {
  for (int d = 0; d < 4; ++d)
    each_tensor([&](fattn_tensor& t, const char* name) {
      if (d >= t.ndim || std::string(name) == "q") return std::string();  // q's shape is what the others are compared with
      // k gives seqlen_k and nheads_k, v gives headdim_v: changing these makes another tensor the odd one.
      if (std::string(name) == "k" && (d == 1 || d == 2)) return std::string();
      if (std::string(name) == "v" && d == 3) return std::string();
      t.shape[d] -= 1;
      return std::string("expected (");
    });
  Good g;
  g.problem.k.shape[1] = 7;
  expect_invalid(g.problem, {"v has the shape (2, 8, 2, 8)", "expected (2, 7, 2, 8)"});
  g = Good();
  g.problem.q.shape[0] = 1;
  expect_invalid(g.problem, {"k has the shape", "batch"});
}
TEST(InvalidSmall, NegativeShape) {
  each_tensor([](fattn_tensor& t, const char*) {
    t.shape[1] = -1;
    return std::string("must be at least 0");
  });
}
TEST(InvalidSmall, NegativeStride) {
  each_tensor([](fattn_tensor& t, const char*) {
    t.strides[1] = -t.strides[1];
    return std::string("stride -");
  });
}
TEST(InvalidSmall, LastDimensionNotContiguous) {
  each_tensor([](fattn_tensor& t, const char* name) {
    if (std::string(name) == "lse") return std::string();  // may have any strides
    for (int64_t& stride : t.strides) stride *= 2;         // every second element of a larger tensor
    return std::string("last dimension");
  });
}
TEST(InvalidSmall, SizesThatOverflow) {
  for (int64_t huge : {int64_t{1} << 40, std::numeric_limits<int64_t>::max()})
    each_tensor([&](fattn_tensor& t, const char*) {
      t.shape[0] = t.shape[1] = huge;
      t.strides[0] = t.strides[1] = huge;
      return std::string("2^63");
    });
  // Through the C++ API, whose contiguous strides wrap.
  ForwardTensors t;
  const int64_t n = int64_t{1} << 40;
  t.q = t.k = t.v = t.o = Tensor(nullptr, DType::kF32, {n, n, 4, 64});
  EXPECT_THROW(Plan(t, {}), Error);
}
// As large as tensors can be in one dimension each: what is planned for them must not overflow either (UBSan looks).
TEST(InvalidSmall, HugeDimensionsArePlannedOrRefused) {
  constexpr int64_t kHuge = int64_t{1} << 57;
  for (const int64_t nheads : {int64_t{1}, kHuge})
    for (const int64_t nheads_k : {int64_t{1}, nheads})
      for (const int64_t seqlen_q : {int64_t{1}, nheads == 1 ? kHuge : int64_t{3}}) {
        const Tensor q(nullptr, DType::kBF16, {1, seqlen_q, nheads, 1}), k(nullptr, DType::kBF16, {1, 1, nheads_k, 1});
        Options options;
        options.backend = Backend::kCpu;
        const Support answer = supported(describe(ForwardTensors{q, k, k, q, {}, {}}, options));
        EXPECT_TRUE(answer || !answer.reason.empty());
      }
}

TEST(InvalidSmall, HeadsThatDoNotDivide) {
  Good g;
  g.problem.k.shape[2] = g.problem.v.shape[2] = 3;
  expect_invalid(g.problem, {"nheads is 4", "nheads_k is 3", "multiple"});
  g.problem.k.shape[2] = g.problem.v.shape[2] = 8;
  expect_invalid(g.problem, {"nheads is 4", "nheads_k is 8"});
  g.problem.k.shape[2] = g.problem.v.shape[2] = 0;
  expect_invalid(g.problem, {"nheads_k is 0"});
  g = Good();
  g.problem.q.shape[2] = 0;
  expect_invalid(g.problem, {"nheads is 0"});
}
TEST(InvalidSmall, Headdims) {
  for (int64_t headdim : {0, 577}) {
    Good g;
    g.problem.q.shape[3] = g.problem.k.shape[3] = headdim;
    expect_invalid(g.problem, {"headdim of q is " + std::to_string(headdim), "1 to 576"});
    g = Good();
    g.problem.v.shape[3] = g.problem.o.shape[3] = headdim;
    expect_invalid(g.problem, {"headdim of v is " + std::to_string(headdim), "1 to 576"});
  }
}
TEST(InvalidSmall, UnknownEnums) {
  struct Field {
    const char* name;
    int32_t fattn_problem::*member;
    int32_t first_bad;
  };
  for (const Field& f :
       {Field{"pass", &fattn_problem::pass, 2}, Field{"backend", &fattn_problem::backend, 4}, Field{"algorithm", &fattn_problem::algorithm, 5},
        Field{"causal", &fattn_problem::causal, 2}, Field{"has_softmax_scale", &fattn_problem::has_softmax_scale, 2},
        Field{"cpu_isa", &fattn_problem::cpu_isa, 7}, Field{"has_window", &fattn_problem::has_window, 2},
        Field{"deterministic", &fattn_problem::deterministic, 2}, Field{"cuda_level", &fattn_problem::cuda_level, 90}})
    for (int32_t bad : {f.first_bad, -1, 1 << 30}) {
      Good g;
      g.problem.*f.member = bad;
      expect_invalid(g.problem, {std::string(f.name) + " is " + std::to_string(bad), "allowed"});
    }
}
TEST(InvalidSmall, TensorsOnTwoDevices) {
  for (fattn_tensor fattn_problem::*member : {&fattn_problem::k, &fattn_problem::v, &fattn_problem::o, &fattn_problem::dout, &fattn_problem::dk}) {
    Good g(true);
    (g.problem.*member).device_type = FATTN_DEVICE_CUDA;
    expect_invalid(g.problem, {"is on CUDA device 0 but q is on the CPU", "one device"});
  }
  Good g;
  g.problem.q.device_type = FATTN_DEVICE_CUDA;
  g.problem.q.device_index = -1;
  expect_invalid(g.problem, {"q is on device type 1, index -1", "allowed"});
}
TEST(InvalidSmall, SoftmaxScale) {
  for (double scale : {std::nan(""), HUGE_VAL, -HUGE_VAL, 1e300}) {
    Good g;
    g.problem.has_softmax_scale = 1;
    g.problem.softmax_scale = scale;
    expect_invalid(g.problem, {"softmax_scale"});
    g.problem.has_softmax_scale = 0;  // not looked at
    EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK);
  }
}
TEST(InvalidSmall, Window) {
  const std::pair<const char*, int64_t fattn_problem::*> limits[] = {{"window_left", &fattn_problem::window_left},
                                                                     {"window_right", &fattn_problem::window_right}};
  for (const auto& [name, member] : limits)
    for (int64_t bad : {int64_t{-2}, std::numeric_limits<int64_t>::min()}) {
      Good g;
      g.problem.has_window = 1;
      g.problem.*member = bad;
      expect_invalid(g.problem, {std::string(name) + " is " + std::to_string(bad), "-1 (no limit on that side)"});
      g.problem.has_window = 0;  // not looked at
      EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK);
    }
  Good g;  // a length that no sum holds with a limit; the tensors have no elements
  g.problem.has_window = 1;
  g.problem.window_left = 1;
  for (fattn_tensor* t : {&g.problem.q, &g.problem.k, &g.problem.v, &g.problem.o}) t->shape[0] = 0;
  for (fattn_tensor* t : {&g.problem.q, &g.problem.k, &g.problem.v, &g.problem.o}) t->shape[1] = int64_t{1} << 62;
  for (fattn_tensor* t : {&g.problem.q, &g.problem.k, &g.problem.v, &g.problem.o}) t->strides[1] = 0;
  g.problem.lse.ndim = 0;
  expect_invalid(g.problem, {"seqlen_q is 4611686018427387904", "2^61"});
}
TEST(InvalidSmall, Softcap) {
  for (double softcap : {std::nan(""), HUGE_VAL, -1.0, 1e300, 1e-40}) {
    Good g;
    g.problem.softcap = softcap;
    expect_invalid(g.problem, {"softcap is", "0 (none)"});
  }
  Good g;
  g.problem.softcap = 1e-20;
  g.problem.has_softmax_scale = 1;
  g.problem.softmax_scale = 1e20;
  expect_invalid(g.problem, {"softmax_scale is 1e+20", "softcap 1e-20", "quotient"});
}
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
    return std::string("has the dtype 2; it must be");
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
      int32_t lengths[] = {5, 4};
      spoiled([&](GoodSequences& g) { g.problem.seqused_k = Tensor(lengths, DType::kI32, {2}).raw(); },
              {"seqused_k[1] is 4", "0 to the length of its sequence, 3"});
      // Shapes and limits.
      spoiled([](GoodSequences& g) { g.problem.max_seqlen_q = -1; }, {"max_seqlen_q is -1", "0 to 2^31 - 1"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_q.ndim = 0; }, {"cu_seqlens_q is absent, and cu_seqlens_k is not"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_k.ndim = 0; }, {"cu_seqlens_k is absent, and cu_seqlens_q is not"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_k.shape[0] = 2; }, {"cu_seqlens_k has the shape (2)", "expected (3)"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_q.shape[0] = 0; }, {"cu_seqlens_q has the shape (0)", "batch + 1"});
      spoiled([](GoodSequences& g) { g.problem.cu_seqlens_q.dtype = FATTN_I64; }, {"cu_seqlens_q has the dtype 7", "int32"});
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
      spoiled([](fattn_problem& p) { p.document_q.dtype = FATTN_I64; }, {"document_q has the dtype 7", "int32"});
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
TEST(InvalidSmall, NumberOfThreads) {
  for (int32_t n : {-1, 4097, std::numeric_limits<int32_t>::min()}) {
    Good g;
    g.problem.num_threads = n;
    expect_invalid(g.problem, {"num_threads is " + std::to_string(n), "4096"});
  }
}
TEST(InvalidSmall, Executor) {
  fattn_executor executor{};
  executor.struct_size = sizeof executor;
  executor.concurrency = 2;
  Good g;
  g.problem.executor = &executor;
  expect_invalid(g.problem, {"executor", "null parallel"});
  executor.parallel = [](void*, int32_t, void (*)(void*, int32_t), void*) -> int32_t { return 0; };
  executor.concurrency = 0;
  expect_invalid(g.problem, {"executor has concurrency 0"});
}

TEST(InvalidSmall, NullPointers) {
  each_tensor([](fattn_tensor& t, const char*) {
    t.data = nullptr;
    return std::string("null pointer");
  });
}
TEST(InvalidSmall, NullIsFineWhereThereIsNothing) {
  Good g;
  for (fattn_tensor* t : {&g.problem.q, &g.problem.o, &g.problem.lse}) t->shape[t->ndim == 3 ? 2 : 1] = 0, t->data = nullptr;
  EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
}
TEST(InvalidSmall, MisalignedPointers) {
  each_tensor([](fattn_tensor& t, const char*) {
    t.data = static_cast<char*>(t.data) + 2;
    return std::string("not aligned");
  });
}

// Every output over every other tensor of the call.
TEST(InvalidSmall, OutputsOverOtherTensors) {
  for (bool backward : {false, true}) {
    const Good good(backward);
    for (const Named& out : kBackwardNames)
      for (const Named& other : kBackwardNames) {
        const auto is_output = [&](const Named& n) {
          return backward ? n.name[0] == 'd' && n.member != &fattn_problem::dout : n.member == &fattn_problem::o || n.member == &fattn_problem::lse;
        };
        if (!is_output(out) || out.member == other.member || (!backward && other.name[0] == 'd')) continue;
        SCOPED_TRACE(std::string(backward ? "backward " : "forward ") + out.name + " over " + other.name);
        fattn_problem p = good.problem;
        (p.*out.member).data = (p.*other.member).data;
        expect_invalid(p, {out.name, other.name, "overlaps"});
        p = good.problem;  // the last element of one is the first of the other
        const fattn_tensor& t = p.*other.member;
        int64_t last = 0;
        for (int d = 0; d < t.ndim; ++d) last += (t.shape[d] - 1) * t.strides[d];
        (p.*out.member).data = static_cast<float*>(t.data) + last;
        EXPECT_EQ(fattn_execute(&p), FATTN_ERROR_INVALID_ARGUMENT) << fattn_last_error();
      }
  }
}
TEST(InvalidSmall, OutputsOverThemselves) {
  for (bool backward : {false, true}) {
    const Good good(backward);
    for (const Named& n : kBackwardNames) {
      const bool output =
          backward ? n.name[0] == 'd' && n.member != &fattn_problem::dout : n.member == &fattn_problem::o || n.member == &fattn_problem::lse;
      if (!output) continue;
      for (int d = 0; d < 2; ++d) {
        fattn_problem p = good.problem;
        (p.*n.member).strides[d] = 0;
        SCOPED_TRACE(n.name);
        expect_invalid(p, {std::string(n.name) + " is an output"});
      }
    }
  }
}
TEST(InvalidSmall, SharedInputsAreFine) {
  Good g;
  g.problem.v.data = g.problem.k.data;  // v's columns lie in k's memory
  EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
  g.problem.k.strides[0] = g.problem.v.strides[0] = 0;  // expanded over the batch
  EXPECT_EQ(fattn_execute(&g.problem), FATTN_OK) << fattn_last_error();
}
TEST(InvalidSmall, PackedGradientsAreFine) {
  std::vector<float> qkv(2 * 5 * 3 * 2 * 4, 0.25f), dqkv(qkv.size()), o(2 * 5 * 2 * 4, 0.25f), dout(o.size(), 1.0f), lse(2 * 2 * 5, 2.0f);
  const auto slice = [](std::vector<float>& x, int i) { return Tensor(x.data() + i * 8, DType::kF32, {2, 5, 2, 4}, {120, 24, 4, 1}); };
  const Tensor o_view(o.data(), DType::kF32, {2, 5, 2, 4}), dout_view(dout.data(), DType::kF32, {2, 5, 2, 4}),
      lse_view(lse.data(), DType::kF32, {2, 2, 5});
  EXPECT_NO_THROW(
      backward({slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), o_view, lse_view, dout_view, slice(dqkv, 0), slice(dqkv, 1), slice(dqkv, 2)}));
  EXPECT_THROW(backward({slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), o_view, lse_view, dout_view, slice(dqkv, 0), slice(dqkv, 1), slice(dqkv, 1)}),
               Error);
}

TEST(InvalidSmall, WorkspaceTooSmallMisalignedOrNull) {
  size_t tried = 0;
  for (bool backward : {false, true}) {
    const Good good(backward, Backend::kAuto);
    const Plan plan(good.problem);
    const size_t bytes = plan.workspace_bytes();
    fattn_plan* raw = nullptr;
    ASSERT_EQ(fattn_plan_create(&good.problem, &raw), FATTN_OK);
    const std::unique_ptr<fattn_plan, void (*)(fattn_plan*)> owner(raw, fattn_plan_destroy);
    fattn_buffers b{};
    b.struct_size = sizeof b;
    const fattn_problem& p = good.problem;
    b.q = p.q.data, b.k = p.k.data, b.v = p.v.data, b.o = p.o.data, b.lse = p.lse.data;
    b.dout = p.dout.data, b.dq = p.dq.data, b.dk = p.dk.data, b.dv = p.dv.data;
    std::vector<unsigned char> memory(bytes + 128);
    auto* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    b.workspace = aligned;
    b.workspace_bytes = bytes;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_OK) << fattn_last_error();
    if (bytes == 0) continue;
    ++tried;
    b.workspace_bytes = bytes - 1;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_ERROR_WORKSPACE);
    EXPECT_NE(std::string(fattn_last_error()).find(std::to_string(bytes)), std::string::npos) << fattn_last_error();
    b.workspace_bytes = bytes;
    b.workspace = aligned + 32;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_ERROR_WORKSPACE);
    EXPECT_NE(std::string(fattn_last_error()).find("aligned to 64"), std::string::npos) << fattn_last_error();
    b.workspace = nullptr;
    EXPECT_EQ(fattn_plan_execute(raw, &b), FATTN_ERROR_WORKSPACE);
  }
  if (tried == 0) GTEST_SKIP() << "no pass of the default backend needs a workspace here";
}

// Valid, but nothing here can do it.
TEST(UnsupportedSmall, IsaThatIsNotHere) {
  const fattn_cpu_info cpu = cpu_info();
  int missing = 0;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon}) {
    Good g(false, Backend::kCpu);
    g.problem.cpu_isa = static_cast<int32_t>(isa);
    if (available(cpu, isa)) continue;
    ++missing;
    expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {name_of(isa), "scalar"});  // the offender, and what there is
  }
  EXPECT_GE(missing, 1);  // x86 lacks NEON, AArch64 lacks AVX2
}
TEST(UnsupportedSmall, WeightsWithoutTheScoreMatrix) {
  Good g(false, Backend::kCpu);
  std::vector<float> weights(static_cast<size_t>(kBatch * kNheads * kSeqlenQ * kSeqlenK));
  g.problem.algorithm = FATTN_ALGORITHM_V2;
  g.problem.weights = Tensor(weights.data(), DType::kF32, {kBatch, kNheads, kSeqlenQ, kSeqlenK}).raw();
  expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"weights", "standard"});
}
TEST(UnsupportedSmall, Fp64OnTheCpuBackend) {
  Good g(false, Backend::kCpu);
  for (fattn_tensor* t : {&g.problem.q, &g.problem.k, &g.problem.v, &g.problem.o, &g.problem.lse}) t->dtype = FATTN_F64;
  expect_error(g.problem, FATTN_ERROR_UNSUPPORTED, {"fp64", "reference"});
  char reason[512] = "";
  EXPECT_EQ(fattn_supported(&g.problem, reason, sizeof reason), FATTN_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(reason).find("fp64"), std::string::npos) << reason;
}
TEST(UnsupportedSmall, WeightsOfABackwardPass) {
  Good g(true);
  std::vector<float> weights(static_cast<size_t>(kBatch * kNheads * kSeqlenQ * kSeqlenK));
  g.problem.weights = Tensor(weights.data(), DType::kF32, {kBatch, kNheads, kSeqlenQ, kSeqlenK}).raw();
  expect_invalid(g.problem, {"weights", "forward"});
}
TEST(UnsupportedSmall, FailedCallsLeaveTheLibraryUsable) {
  for (int i = 0; i < 3; ++i) {
    Good bad, good;
    bad.problem.q.dtype = 77;
    EXPECT_NE(fattn_execute(&bad.problem), FATTN_OK);
    EXPECT_EQ(fattn_execute(&good.problem), FATTN_OK) << fattn_last_error();
  }
}

}  // namespace
}  // namespace fattn
