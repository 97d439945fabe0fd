#include "plan/features.h"

#include <iterator>

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

struct Feature {
  const char* name;
  bool (*used)(const Problem&);
  bool has[kWays];  // in the order of Way
};

// A window that hides nothing, or hides what a causal mask does, is none by now.
constexpr Feature kFeatures[] = {
    {"a sliding window (window_left, window_right)",
     [](const Problem& p) { return p.windowed(); },
     {true, false, false, true, true, false, true, true, false}},
    {"packed sequences (cu_seqlens_q, cu_seqlens_k)",
     [](const Problem& p) { return p.packed; },
     {true, false, false, true, false, false, true, true, false}},
    {"documents (document_q, document_k)",
     [](const Problem& p) { return p.has_documents; },
     {true, false, false, true, true, false, true, true, false}},
    {"softcap", [](const Problem& p) { return p.softcap > 0; }, {true, false, false, true, true, false, true, true, false}},
    {"lengths of the batch's entries (seqused_k)",
     [](const Problem& p) { return p.has_seqused_k; },
     {true, false, false, true, true, false, true, true, true}},
    {"ALiBi (alibi_slopes)", [](const Problem& p) { return p.has_alibi; }, {true, false, false, true, true, false, true, true, false}},
    {"a bias (bias)", [](const Problem& p) { return p.bias.given; }, {true, false, false, true, true, false, true, true, false}},
    {"the gradient of a bias (dbias)", [](const Problem& p) { return p.dbias.given; }, {true, false, false, true, true, false, true, true, false}},
    {"a mask of pairs (mask)", [](const Problem& p) { return p.pair_mask.given; }, {true, false, false, true, true, false, true, true, false}},
    {"dropout", [](const Problem& p) { return p.dropout_below > 0; }, {true, false, false, true, true, false, true, true, false}},
    {"the gradient of lse (dlse)", [](const Problem& p) { return p.has_dlse; }, {true, true, true, true, true, true, true, true, false}},
};

std::string ways_with(const Feature& feature) {
  std::string names;
  for (int way = 0; way < kWays; ++way)
    if (feature.has[way]) names += (names.empty() ? "" : "; ") + std::string(kWayNames[way]);
  return names;
}

}  // namespace

std::string lacks(const Problem& problem, Way way) {
  for (const Feature& feature : kFeatures)
    if (feature.used(problem) && !feature.has[static_cast<int>(way)])
      return text(kWayNames[static_cast<int>(way)], " does not compute ", feature.name, "; what does: ", ways_with(feature));
  return "";
}

int feature_count() { return static_cast<int>(std::size(kFeatures)); }
int way_count() { return kWays; }
FeatureCell feature_cell(int feature, int way) { return {kFeatures[feature].name, kWayNames[way], kFeatures[feature].has[way]}; }

}  // namespace fattn::core
