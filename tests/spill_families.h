// The rules on registers of all tables of tiles (src/backend/cuda/tiles), and problems drawn from what a rule is about. The draws are the same in
// every run: find_spills compiles them, test_cuda_spills asks the planners about them.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/cuda/pair_features.h"
#include "backend/cuda/spills.h"
#include "backend/cuda/tiles/v2_backward.h"
#include "backend/cuda/tiles/v2_common.h"
#include "backend/cuda/tiles/v2_forward.h"
#include "backend/cuda/tiles/v3_backward.h"
#include "backend/cuda/tiles/v3_forward_rules.h"
#include "backend/cuda/v2_backward.h"
#include "backend/cuda/v2_forward.h"
#include "backend/cuda/v3_backward.h"
#include "backend/cuda/v3_forward.h"
#include "jit/jit.h"

namespace fattn::test::spilling {

using namespace core;
using namespace core::cuda;

// A problem on an architecture, and whether 16-byte copies can take it.
struct Drawn {
  Problem problem;
  int arch = 0, level = 0;
  bool aligned = true;
};

struct Rule {
  std::string_view kind, name;  // "row", "rows", "group" or "refusal"
  Where where;
  SpillBytes bytes;
};

// A pass of an algorithm.
struct Family {
  std::string_view name;
  bool backward, v3;
  uint32_t has;  // what its problems may have
  std::vector<Rule> rules;
  // The kernel that is chosen, if none of the rules of this name counts; none: refused.
  std::optional<jit::Request> (*kernel)(const Drawn&, std::string_view without);
};

inline std::optional<jit::Request> v2_forward_kernel(const Drawn& drawn, std::string_view without) {
  const V2Target target = target_of(drawn.arch, drawn.level);
  if (!v2_forward_refusal(drawn.problem, target, without).empty()) return std::nullopt;
  return v2_forward_request(v2_forward_key(plan_v2_forward(drawn.problem, target, without), drawn.aligned));
}

inline std::optional<jit::Request> own_forward_kernel(const Drawn& drawn, std::string_view without) {
  Drawn own = drawn;
  own.problem.batch_invariant = true;
  return v2_forward_kernel(own, without);
}

// Those with few queries that have tiles of their own.
inline std::optional<jit::Request> few_forward_kernel(const Drawn& drawn, std::string_view without) {
  Drawn few = drawn;
  few.problem.seqlen_q = 1;
  std::optional<jit::Request> kernel = own_forward_kernel(few, without);
  if (kernel && kernel->source == own_forward_kernel(drawn, without)->source) return std::nullopt;
  return kernel;
}

inline std::optional<jit::Request> v2_backward_kernel(const Drawn& drawn, std::string_view without) {
  const V2Target target = target_of(drawn.arch, drawn.level);
  if (!v2_backward_refusal(drawn.problem, target, without).empty()) return std::nullopt;
  return v2_backward_request(v2_backward_keys(plan_v2_backward(drawn.problem, target, without), drawn.aligned).main);
}

inline std::optional<jit::Request> v3_forward_kernel(const Drawn& drawn, std::string_view without) {
  const V3Target target = v3_target_of(kV3Arch);
  if (!v3_forward_refusal(drawn.problem, target, without).empty()) return std::nullopt;
  return v3_forward_request(plan_v3_forward(drawn.problem, target, without).key);
}

inline std::optional<jit::Request> v3_backward_kernel(const Drawn& drawn, std::string_view without) {
  const V3Target target = v3_target_of(kV3Arch);
  if (!v3_backward_refusal(drawn.problem, target, without).empty()) return std::nullopt;
  return v3_backward_request(plan_v3_backward(drawn.problem, target, without).main);
}

template <class Rules>
void add_rules(std::vector<Rule>& to, std::string_view kind, const Rules& rules) {
  for (const auto& rule : rules) to.push_back({kind, rule.name, rule.where, rule.bytes});
}

inline std::vector<Family> families() {
  constexpr uint32_t kForward = with::kCausal | with::kWindow | with::kSoftcap | with::kLengths | with::kAlibi | with::kBias | with::kFp32Bias |
                                with::kMask | with::kDropout | with::kPacked | with::kDocuments | with::kSinks | with::kFp32Out;
  constexpr uint32_t kBackward = (kForward & ~with::kSinks) | with::kDbias | with::kDeterministic;
  std::vector<Family> all = {{"v2 forward", false, false, kForward | with::kPages, {}, v2_forward_kernel},
                             {"v2 backward", true, false, kBackward, {}, v2_backward_kernel},
                             {"v3 forward", false, true, kForward, {}, v3_forward_kernel},
                             {"v3 backward", true, true, kBackward, {}, v3_backward_kernel},
                             {"v2 forward, batch invariant", false, false, kForward | with::kPages, {}, own_forward_kernel},
                             {"v2 forward, batch invariant, few queries", false, false, kForward | with::kPages, {}, few_forward_kernel}};
  add_rules(all[0].rules, "refusal", kV2Refusals);
  add_rules(all[0].rules, "refusal", kV2ForwardRefusals);
  add_rules(all[0].rules, "group", kV2ForwardHeavy);
  add_rules(all[0].rules, "row", kV2ForwardSpills);
  add_rules(all[1].rules, "refusal", kV2Refusals);
  add_rules(all[1].rules, "refusal", kV2BackwardRefusals);
  add_rules(all[1].rules, "group", kV2BackwardHeavy);
  add_rules(all[1].rules, "row", kV2BackwardSpills);
  add_rules(all[2].rules, "refusal", kV3ForwardScoreRefusals);
  add_rules(all[2].rules, "refusal", kV3ForwardRefusals);
  for (const V3ForwardRowsFor& rule : kV3ForwardRowsFor)
    if (!rule.for_speed) all[2].rules.push_back({"rows", rule.name, rule.where, rule.bytes});
  add_rules(all[3].rules, "refusal", kV3BackwardTermRefusals);
  add_rules(all[3].rules, "refusal", kV3BackwardRefusals);
  add_rules(all[3].rules, "row", kV3BackwardSpills);
  return all;
}

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}

  // None: what was drawn is not in the set. `parts`: half of those with dropout have it of a part of a matrix.
  std::optional<Drawn> one(const Family& family, const Where& where, bool parts = false) {
    Drawn drawn;
    drawn.arch = family.v3 ? kV3Arch : of(kArchs);
    drawn.level = drawn.arch < 80 ? 75 : 80;
    drawn.aligned = family.v3 || chance(2);
    Problem& p = drawn.problem;
    p.dtype = of(kDTypes);
    if (p.dtype != DType::kF16 && drawn.level < 80) return std::nullopt;
    if (p.dtype == DType::kF32 && family.v3) return std::nullopt;
    const int wider = of(kWidths), narrower = chance(2) ? wider : of(kWidths);
    const bool first = chance(2);
    p.headdim = first ? wider : narrower, p.headdim_v = first ? narrower : wider;
    set(p, family, features(family, where));
    if (parts) p.dropout_places = p.dropout_below > 0 && chance(2);
    const PairFeatures pair = pair_features(p);
    if (!where.holds(register_facts(p, pair, drawn.arch, drawn.level))) return std::nullopt;
    return drawn;
  }

 private:
  static constexpr int kArchs[] = {75, 80, 86, 89, 90, 100, 120}, kWidths[] = {40, 64, 96, 128, 192, 256}, kSeqlens[] = {512, 1024, 8192, 16384};
  static constexpr DType kDTypes[] = {DType::kF16, DType::kBF16, DType::kF32};

  template <class T, size_t N>
  T of(const T (&all)[N]) {
    return all[random_() % N];
  }
  bool chance(uint64_t in) { return random_() % in == 0; }

  // What the set asks for, and, of the rest, nothing, every fourth or most.
  uint32_t features(const Family& family, const Where& where) {
    const uint64_t rest = random_() % 3;
    uint32_t has = where.all;
    for (uint32_t bit = 1; bit <= with::kFp32Out; bit <<= 1) {
      const bool may = (family.has & bit) != 0 && (where.none & bit) == 0, asked = (where.any & bit) != 0;
      const bool more = rest == 1 ? chance(4) : rest == 2 && !chance(4);
      if (may && (asked ? chance(2) : more)) has |= bit;
    }
    return has;
  }

  void set(Problem& p, const Family& family, uint32_t has) {
    const auto in = [&](uint32_t what) { return (has & what) != 0; };
    constexpr int kHeads = 8;
    const int seqlen = family.v3 ? of(kSeqlens) : 1024;  // v2 takes no account of it
    p.backward = family.backward;
    p.batch = family.v3 && chance(2) ? 64 : 2, p.seqlen_q = p.seqlen_k = seqlen, p.nheads = p.nheads_k = kHeads;
    p.softmax_scale = 0.125;
    p.q = p.k = {seqlen * kHeads * p.headdim, kHeads * p.headdim, p.headdim};
    p.v = p.o = {seqlen * kHeads * p.headdim_v, kHeads * p.headdim_v, p.headdim_v};
    p.lse = {kHeads * seqlen, 1, seqlen};
    p.causal = in(with::kCausal);
    if (in(with::kWindow)) p.window_left = 100, p.window_right = p.causal ? -1 : 10;
    p.softcap = in(with::kSoftcap) ? 30 : 0;
    p.has_alibi = in(with::kAlibi);
    p.dropout_below = in(with::kDropout) ? 6554 : 0;
    p.dropout_places = in(with::kPlaces);
    p.has_documents = in(with::kDocuments);
    p.has_sinks = in(with::kSinks);
    p.deterministic = in(with::kDeterministic);
    p.fp32_out = in(with::kFp32Out) && p.dtype != DType::kF32;
    const PairTensor pairs{true, p.dtype, p.batch, p.nheads, p.seqlen_q, {8 << 20, 1024, 1 << 20}};
    if (in(with::kBias | with::kFp32Bias)) p.bias = pairs;
    if (in(with::kFp32Bias)) p.bias.dtype = DType::kF32;
    if (in(with::kMask)) p.pair_mask = pairs, p.pair_mask.dtype = DType::kU8;
    if (in(with::kDbias)) p.dbias = pairs;
    p.packed = in(with::kPacked), p.paged = in(with::kPages);
    p.has_seqused_k = in(with::kLengths) || (p.packed && p.paged);
    if (p.packed) {
      p.total_q = p.total_k = p.batch * p.seqlen_q;
      for (Strides* strides : {&p.q, &p.k, &p.v, &p.o}) strides->batch = 0;
    }
    if (p.paged) {
      p.page_size = 16, p.pages = p.batch * p.seqlen_k / p.page_size;
      p.k_page_stride = p.page_size * p.k.row, p.v_page_stride = p.page_size * p.v.row;
      p.k.batch = p.v.batch = 0;
    }
    if (p.backward) p.dout = p.o, p.dq = p.q, p.dk = p.k, p.dv = p.v;
  }

  std::mt19937_64 random_;  // says the same numbers everywhere
};

// Kernels that would be chosen if the rule were not there, and are not as it is: up to `most` that differ.
inline std::vector<jit::Request> witnesses(const Family& family, const Rule& rule, size_t most) {
  constexpr int kDraws = 40000;
  std::vector<jit::Request> found;
  Draws draws(1);
  for (int i = 0; i < kDraws && found.size() < most; ++i) {
    const std::optional<Drawn> drawn = draws.one(family, rule.where);
    if (!drawn) continue;
    const std::optional<jit::Request> without = family.kernel(*drawn, rule.name), chosen = family.kernel(*drawn, {});
    if (!without || (chosen && chosen->source == without->source)) continue;
    const bool known =
        std::any_of(found.begin(), found.end(), [&](const jit::Request& r) { return r.arch == without->arch && r.source == without->source; });
    if (!known) found.push_back(*without);
  }
  return found;
}

// Kernels that are chosen, of problems of any kind.
inline std::vector<jit::Request> chosen(const Family& family, size_t most) {
  std::vector<jit::Request> found;
  Draws draws(2);
  while (found.size() < most) {
    const std::optional<Drawn> drawn = draws.one(family, Where{}, true);
    if (!drawn) continue;
    if (std::optional<jit::Request> kernel = family.kernel(*drawn, {})) found.push_back(*std::move(kernel));
  }
  return found;
}

}  // namespace fattn::test::spilling
