#include "backend/cuda/spills.h"

#include <bit>

#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

bool is_of(DTypes dtypes, DType dtype) {
  switch (dtypes) {
    case DTypes::kAny: return true;
    case DTypes::k16: return dtype != DType::kF32;
    case DTypes::kF32: return dtype == DType::kF32;
    case DTypes::kF16: return dtype == DType::kF16;
    case DTypes::kBF16: return dtype == DType::kBF16;
  }
  return false;
}

std::string replaced(std::string message, std::string_view name, const std::string& by) {
  if (const size_t at = message.find(name); at != std::string::npos) message.replace(at, name.size(), by);
  return message;
}

}  // namespace

uint32_t traits_of(const PairFeatures& pair) {
  uint32_t has = 0;
  const auto add = [&](bool given, uint32_t what) { has |= given ? what : 0; };
  add(pair.lengths, with::kLengths);
  add(pair.alibi, with::kAlibi);
  add(pair.bias != 0, with::kBias);
  add(pair.bias == 2, with::kFp32Bias);
  add(pair.mask, with::kMask);
  add(pair.dropout, with::kDropout);
  add(pair.dbias, with::kDbias);
  add(pair.packed, with::kPacked);
  add(pair.documents, with::kDocuments);
  add(pair.sinks, with::kSinks);
  add(pair.paged, with::kPages);
  add(pair.fp32_out, with::kFp32Out);
  add(pair.places, with::kPlaces);
  return has;
}

RegisterFacts register_facts(const Problem& problem, const PairFeatures& pair, int arch, int level) {
  RegisterFacts facts{arch, level, problem.dtype, static_cast<int>(problem.headdim), static_cast<int>(problem.headdim_v), traits_of(pair)};
  const auto add = [&](bool given, uint32_t what) { facts.has |= given ? what : 0; };
  add(problem.causal, with::kCausal);
  add(problem.windowed(), with::kWindow);
  add(problem.softcap > 0, with::kSoftcap);
  add(problem.deterministic, with::kDeterministic);
  return facts;
}

bool Where::holds(const RegisterFacts& facts) const {
  return facts.arch >= arch_from && facts.arch <= arch_to && (level == 0 || facts.level == level) && is_of(dtypes, facts.dtype) &&
         facts.wider() > above && facts.wider() <= up_to && facts.headdim_v > above_v && std::min(facts.headdim, facts.headdim_v) <= narrower_up_to &&
         facts.all(all) && !facts.any(none) && (any == 0 || std::popcount(facts.has & any) >= least);
}

bool holds_any(std::span<const GroupRule> rules, const RegisterFacts& facts, std::string_view without) {
  return std::any_of(rules.begin(), rules.end(), [&](const GroupRule& rule) { return rule.where.holds(facts) && rule.name != without; });
}

std::string register_refusal(std::span<const RefusalRule> rules, const RegisterFacts& facts, std::string_view without) {
  for (const RefusalRule& rule : rules)
    if (rule.where.holds(facts) && rule.name != without)
      return replaced(replaced(std::string(rule.why), "{headdims}", text("headdim is ", facts.headdim, " and headdim_v ", facts.headdim_v)), "{most}",
                      text(rule.where.above));
  return {};
}

}  // namespace fattn::core::cuda
