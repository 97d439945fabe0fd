// Rules on registers (src/backend/cuda/spills.h): what they match, that each decides something, and that they say what docs/results/spills.json has.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "spill_families.h"

namespace fattn::test::spilling {
namespace {

constexpr RefusalRule kOfTwo[] = {
    {.name = "first", .where = {.above = 64, .all = with::kBias}, .why = "{headdims}; up to {most}", .bytes = {}},
    {.name = "second", .where = {.any = with::kBias | with::kMask | with::kDropout, .least = 2}, .why = "two", .bytes = {}},
};

TEST(SpillsSmall, ASetIsAllThatIsSaid) {
  const RegisterFacts facts{90, 80, DType::kF16, 128, 64, with::kBias | with::kCausal};
  EXPECT_TRUE(Where{}.holds(facts));
  EXPECT_TRUE((Where{.arch_from = 90, .arch_to = 90, .level = 80, .dtypes = DTypes::k16, .above = 127, .up_to = 128}.holds(facts)));
  EXPECT_FALSE(Where{.arch_from = 100}.holds(facts));
  EXPECT_FALSE(Where{.arch_to = 89}.holds(facts));
  EXPECT_FALSE(Where{.level = 75}.holds(facts));
  EXPECT_FALSE(Where{.dtypes = DTypes::kF32}.holds(facts));
  EXPECT_FALSE(Where{.dtypes = DTypes::kBF16}.holds(facts));
  EXPECT_FALSE(Where{.above = 128}.holds(facts)) << "the wider";
  EXPECT_FALSE(Where{.up_to = 127}.holds(facts)) << "the wider";
  EXPECT_FALSE(Where{.above_v = 64}.holds(facts)) << "of v";
  EXPECT_FALSE(Where{.narrower_up_to = 63}.holds(facts));
  EXPECT_FALSE((Where{.all = with::kBias | with::kMask}.holds(facts)));
  EXPECT_FALSE((Where{.none = with::kCausal | with::kMask}.holds(facts)));
  EXPECT_TRUE((Where{.any = with::kBias | with::kMask}.holds(facts)));
  EXPECT_FALSE((Where{.any = with::kBias | with::kMask, .least = 2}.holds(facts)));
  EXPECT_TRUE((Where{.any = with::kBias | with::kCausal, .least = 2}.holds(facts)));
}

TEST(SpillsSmall, TheFirstRuleThatHoldsSaysWhy) {
  const auto why = [](int headdim, uint32_t has, std::string_view without = {}) {
    return register_refusal(kOfTwo, {90, 80, DType::kF16, headdim, 8, has}, without);
  };
  EXPECT_EQ(why(96, with::kBias | with::kMask), "headdim is 96 and headdim_v 8; up to 64");
  EXPECT_EQ(why(96, with::kBias | with::kMask, "first"), "two") << "as if it were not there";
  EXPECT_EQ(why(64, with::kBias | with::kDropout), "two");
  EXPECT_EQ(why(64, with::kBias), "");
}

TEST(SpillsSmall, NamesAreOfOneRule) {
  for (const Family& family : families()) {
    std::set<std::string_view> names;
    for (const Rule& rule : family.rules) {
      EXPECT_TRUE(names.insert(rule.name).second) << family.name << ": " << rule.name;
      EXPECT_LE(rule.bytes.least, rule.bytes.most) << rule.name;
      EXPECT_EQ(rule.bytes.least == 0, rule.bytes.most == 0) << rule.name;
    }
  }
}

// A rule without which nothing is chosen otherwise says nothing.
TEST(Spills, EveryRuleDecidesSomething) {
  for (const Family& family : families())
    for (const Rule& rule : family.rules) EXPECT_FALSE(witnesses(family, rule, 1).empty()) << family.name << ": " << rule.name;
}

// `build/tests/find_spills --json docs/results/spills.json` writes the record; the rules say what it found.
TEST(SpillsSmall, RulesSayWhatTheRecordHas) {
  std::ifstream file(FATTN_SPILLS);
  ASSERT_TRUE(file) << FATTN_SPILLS;
  const nlohmann::json record = nlohmann::json::parse(file);
  std::map<std::pair<std::string, std::string>, std::pair<int, int>> found;
  for (const nlohmann::json& row : record["rules"])
    found[{row["family"].get<std::string>(), row["rule"].get<std::string>()}] = {row["least_bytes"].get<int>(), row["most_bytes"].get<int>()};
  size_t rules = 0;
  for (const Family& family : families())
    for (const Rule& rule : family.rules) {
      const auto at = found.find({std::string(family.name), std::string(rule.name)});
      ++rules;
      ASSERT_NE(at, found.end()) << family.name << ": " << rule.name << " is not in the record; run find_spills";
      EXPECT_EQ(at->second, std::pair(rule.bytes.least, rule.bytes.most)) << family.name << ": " << rule.name;
    }
  EXPECT_EQ(rules, record["rules"].size()) << "the record has rules that are gone; run find_spills";
  EXPECT_EQ(record["chosen"].size(), families().size());
  for (const nlohmann::json& row : record["chosen"]) EXPECT_EQ(row["spill"], 0) << row["family"];
}

}  // namespace
}  // namespace fattn::test::spilling
