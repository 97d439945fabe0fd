// Bad input: every mistake that the library can see gets the right code and a message that names the offender. Here dtypes, shapes, strides and
// options.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "fattn/fattn.hpp"
#include "invalid_problem.h"

namespace fattn {
namespace {

using namespace test;

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
// Of inputs of 16 bits they may be fp32, the three gradients together; what the backward pass takes is of q's dtype.
TEST(InvalidSmall, DtypesOfOutputs) {
  const auto sixteen_bits = [](Good& g) {
    for (fattn_tensor* t : {&g.problem.q, &g.problem.k, &g.problem.v, &g.problem.o, &g.problem.dout, &g.problem.dq, &g.problem.dk, &g.problem.dv})
      t->dtype = FATTN_F16;
  };
  for (const int32_t dtype : {FATTN_BF16, FATTN_F64}) {
    Good g;
    sixteen_bits(g);
    g.problem.o.dtype = dtype;
    expect_invalid(g.problem, {"o is ", "but q is fp16", "allowed: q's dtype, or fp32"});
  }
  Good g(true);
  sixteen_bits(g);
  g.problem.o.dtype = FATTN_F32;
  expect_invalid(g.problem, {"o is fp32 but q is fp16", "the backward pass takes o in q's dtype"});
  g.problem.o.dtype = FATTN_F16;
  g.problem.dout.dtype = FATTN_F32;
  expect_invalid(g.problem, {"dout is fp32 but q is fp16", "share one dtype"});
  g.problem.dout.dtype = FATTN_F16;
  g.problem.dv.dtype = FATTN_F32;
  expect_invalid(g.problem, {"dv is fp32 but dq is fp16", "q's or fp32"});
  g.problem.dq.dtype = g.problem.dk.dtype = FATTN_BF16;
  expect_invalid(g.problem, {"dq is bf16 but q is fp16", "allowed: q's dtype, or fp32"});
  g.problem.dq.dtype = g.problem.dk.dtype = FATTN_F32;
  char reason[256];
  EXPECT_EQ(fattn_supported(&g.problem, reason, sizeof reason), FATTN_OK) << fattn_last_error();
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

// Without rows no tensor is too large for them.
TEST(InvalidSmall, HeadsBeyond64Bits) {
  const auto ask = [](int64_t nheads) {
    const Tensor q(nullptr, DType::kF32, {2, 0, nheads, 4}, {0, 0, 4, 1}), k(nullptr, DType::kF32, {2, 3, 1, 4});
    try {
      supported(describe(ForwardTensors{q, k, k, q, {}, {}}, Options{}));
      return std::string();
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(ask(int64_t{1} << 61), "");
  EXPECT_NE(ask(int64_t{1} << 62).find("together they must be at most 2^63 - 1"), std::string::npos);
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

}  // namespace
}  // namespace fattn
