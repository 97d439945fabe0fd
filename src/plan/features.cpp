#include "plan/features.h"

#include <iterator>
#include <string_view>

#include "fattn/options.hpp"
#include "shared/text.h"

namespace fattn::core {
namespace {

constexpr int kWays = 9;
constexpr const char* kWayNames[kWays] = {"backend reference",
                                          "algorithm standard of backend cpu",
                                          "algorithm v1 of backend cpu",
                                          "algorithm v2 of backend cpu",
                                          "algorithm standard of backend cuda",
                                          "algorithm v1 of backend cuda",
                                          "algorithm v2 of backend cuda",
                                          "algorithm v3 of backend cuda",
                                          "decode of backend cuda"};

// What the library knows of each of kOptions, in their order.
struct Feature {
  std::string_view name;
  bool (*used)(const Problem&);
  bool has[kWays];  // in the order of Way
};

// A window that hides nothing, or hides what a causal mask does, is none by now.
constexpr Feature kFeatures[] = {
    {"window", [](const Problem& p) { return p.windowed(); }, {true, false, false, true, true, false, true, true, false}},
    {"packed", [](const Problem& p) { return p.packed; }, {true, false, false, true, false, false, true, true, false}},
    {"documents", [](const Problem& p) { return p.has_documents; }, {true, false, false, true, true, false, true, true, false}},
    {"softcap", [](const Problem& p) { return p.softcap > 0; }, {true, false, false, true, true, false, true, true, false}},
    {"key_lengths", [](const Problem& p) { return p.has_seqused_k; }, {true, false, false, true, true, false, true, true, true}},
    {"alibi", [](const Problem& p) { return p.has_alibi; }, {true, false, false, true, true, false, true, true, false}},
    {"bias", [](const Problem& p) { return p.bias.given; }, {true, false, false, true, true, false, true, true, false}},
    {"dbias", [](const Problem& p) { return p.dbias.given; }, {true, false, false, true, true, false, true, true, false}},
    {"mask", [](const Problem& p) { return p.pair_mask.given; }, {true, false, false, true, true, false, true, true, false}},
    {"dropout", [](const Problem& p) { return p.dropout_below > 0; }, {true, false, false, true, true, false, true, true, false}},
    {"dlse", [](const Problem& p) { return p.has_dlse; }, {true, true, true, true, true, true, true, true, false}},
    {"sinks", [](const Problem& p) { return p.has_sinks; }, {true, false, false, true, true, false, true, true, true}},
    {"pages", [](const Problem& p) { return p.paged; }, {true, false, false, true, false, false, true, false, true}},
    {"fp32_outputs", [](const Problem& p) { return p.fp32_out; }, {true, true, true, true, false, false, true, true, true}},
    {"batch_invariant", [](const Problem& p) { return p.batch_invariant; }, {true, false, false, true, false, false, true, false, false}},
};

constexpr bool same_options() {
  if (std::size(kFeatures) != kOptionCount) return false;
  for (size_t i = 0; i < kOptionCount; ++i)
    if (kFeatures[i].name != kOptions[i].name) return false;
  return true;
}
static_assert(same_options(), "a row for each of kOptions (fattn/options.hpp), in their order");

std::string ways_with(const Feature& feature) {
  std::string names;
  for (int way = 0; way < kWays; ++way)
    if (feature.has[way]) names += (names.empty() ? "" : "; ") + std::string(kWayNames[way]);
  return names;
}

}  // namespace

std::string lacks(const Problem& problem, Way way) {
  for (size_t i = 0; i < kOptionCount; ++i)
    if (kFeatures[i].used(problem) && !kFeatures[i].has[static_cast<int>(way)])
      return text(kWayNames[static_cast<int>(way)], " does not compute ", kOptions[i].text, "; what does: ", ways_with(kFeatures[i]));
  return "";
}

int feature_count() { return static_cast<int>(std::size(kFeatures)); }
int way_count() { return kWays; }
FeatureCell feature_cell(int feature, int way) { return {kOptions[feature].text, kWayNames[way], kFeatures[feature].has[way]}; }

}  // namespace fattn::core
