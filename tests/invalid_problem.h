// A problem that is right in memory of its own, and what every test of bad input does with it: spoil one thing and look for the error.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "fattn/fattn.hpp"

namespace fattn::test {

inline constexpr int64_t kBatch = 2, kSeqlenQ = 6, kSeqlenK = 8, kNheads = 4, kNheadsK = 2, kHeaddim = 16, kHeaddimV = 8;

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
inline void expect_error(const fattn_problem& p, fattn_status code, std::initializer_list<std::string> words) {
  const fattn_status got = fattn_execute(&p);
  const std::string message = fattn_last_error();
  EXPECT_EQ(got, code) << fattn_status_name(got) << ": " << message;
  for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << "no '" << word << "' in: " << message;
}
inline void expect_invalid(const fattn_problem& p, std::initializer_list<std::string> words) { expect_error(p, FATTN_ERROR_INVALID_ARGUMENT, words); }

struct Named {
  const char* name;
  fattn_tensor fattn_problem::*member;
};
inline const Named kForwardNames[] = {
    {"q", &fattn_problem::q}, {"k", &fattn_problem::k}, {"v", &fattn_problem::v}, {"o", &fattn_problem::o}, {"lse", &fattn_problem::lse}};
inline const Named kBackwardNames[] = {{"q", &fattn_problem::q},   {"k", &fattn_problem::k},     {"v", &fattn_problem::v},
                                       {"o", &fattn_problem::o},   {"lse", &fattn_problem::lse}, {"dout", &fattn_problem::dout},
                                       {"dq", &fattn_problem::dq}, {"dk", &fattn_problem::dk},   {"dv", &fattn_problem::dv}};

// The same spoiling for every tensor of both passes. `spoil` returns words that the message must hold beside the name.
inline void each_tensor(const std::function<std::string(fattn_tensor&, const char* name)>& spoil, fattn_status code = FATTN_ERROR_INVALID_ARGUMENT) {
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

}  // namespace fattn::test
