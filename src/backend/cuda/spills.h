// Rules on registers, as data: for which problems rows of a table of tiles would spill, and which problems no row has registers for. Tables of tiles
// (tiles/) have the rules; tests/find_spills.cpp compiles a witness of each and records its bytes in docs/results/spills.json.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "backend/cuda/pair_features.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// What takes registers beside a tile's sums and scores; a set of these.
namespace with {
inline constexpr uint32_t kCausal = 1 << 0;
inline constexpr uint32_t kWindow = 1 << 1;
inline constexpr uint32_t kSoftcap = 1 << 2;
inline constexpr uint32_t kLengths = 1 << 3;
inline constexpr uint32_t kAlibi = 1 << 4;
inline constexpr uint32_t kBias = 1 << 5;
inline constexpr uint32_t kFp32Bias = 1 << 6;  // beside kBias
inline constexpr uint32_t kMask = 1 << 7;
inline constexpr uint32_t kDropout = 1 << 8;
inline constexpr uint32_t kDbias = 1 << 9;
inline constexpr uint32_t kPacked = 1 << 10;
inline constexpr uint32_t kDocuments = 1 << 11;
inline constexpr uint32_t kSinks = 1 << 12;
inline constexpr uint32_t kPages = 1 << 13;
inline constexpr uint32_t kDeterministic = 1 << 14;
inline constexpr uint32_t kFp32Out = 1 << 15;
inline constexpr uint32_t kPlaces = 1 << 16;  // beside kDropout
inline constexpr uint32_t kHides = kBias | kMask | kDocuments;
inline constexpr uint32_t kHeavy = kHides | kAlibi | kDropout | kDbias;
}  // namespace with

enum class DTypes { kAny, k16, kF32, kF16, kBF16 };

// Of a problem on a target, what rules ask for.
struct RegisterFacts {
  int arch = 0, level = 0;
  DType dtype = DType::kF16;
  int headdim = 0, headdim_v = 0;
  uint32_t has = 0;  // of `with`

  int wider() const { return std::max(headdim, headdim_v); }
  bool all(uint32_t of) const { return (has & of) == of; }
  bool any(uint32_t of) const { return (has & of) != 0; }
};
uint32_t traits_of(const PairFeatures& pair);
// `pair`: of the algorithm, which may see lengths where another does not.
RegisterFacts register_facts(const Problem& problem, const PairFeatures& pair, int arch, int level);

// A set of problems: all that is said holds.
struct Where {
  int arch_from = 0, arch_to = std::numeric_limits<int>::max(), level = 0;  // 0: any level
  DTypes dtypes = DTypes::kAny;
  int above = 0, up_to = std::numeric_limits<int>::max();  // the wider of headdim and headdim_v
  int above_v = 0;                                         // headdim_v
  int narrower_up_to = std::numeric_limits<int>::max();    // the narrower of the two
  uint32_t all = 0, none = 0;                              // what they have, and have not
  uint32_t any = 0;                                        // and of these at least
  int least = 1;

  bool holds(const RegisterFacts& facts) const;
};

// Bytes of a thread, in the kernels that find_spills saw spill with NVRTC 13.0; 0: none of its witnesses did.
struct SpillBytes {
  int least = 0, most = 0;
};

// Rows of a table, of which `Tiles` says the kind, that would spill there.
template <class Tiles>
struct SpillRule {
  std::string_view name;
  Where where;
  Tiles tiles;
  SpillBytes bytes;
};

// Problems that rows of one group have registers for, and those of the other have not.
struct GroupRule {
  std::string_view name;
  Where where;
  SpillBytes bytes;
};
bool holds_any(std::span<const GroupRule> rules, const RegisterFacts& facts, std::string_view without = {});

// Problems that no row has registers for. {headdims} in the message: which they are; {most}: `where.above`.
struct RefusalRule {
  std::string_view name;
  Where where;
  std::string_view why;
  SpillBytes bytes;
};

// Whether the row spills. `without`: the name of a rule that is not to count, as the search tries it.
template <class Rules, class Row>
bool spills(const Rules& rules, const Row& row, const RegisterFacts& facts, std::string_view without = {}) {
  return std::any_of(std::begin(rules), std::end(rules),
                     [&](const auto& rule) { return rule.tiles.has(row) && rule.where.holds(facts) && rule.name != without; });
}

// Empty: there are registers.
std::string register_refusal(std::span<const RefusalRule> rules, const RegisterFacts& facts, std::string_view without = {});

}  // namespace fattn::core::cuda
