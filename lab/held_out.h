// Predictions held against shapes that nothing was fitted to: drawn by a seed, chosen by their sizes, measured, scored.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "lab/calibration.h"
#include "lab/prediction_score.h"
#include "lab/shapes.h"

namespace fattn::lab {

struct HeldOutOptions {
  int count = 200;
  uint64_t seed = 1;
  double seconds = 1.5;  // of the rule: of a forward and a backward call, by limit_of()
};

// The limit that a shape is held against before it is measured, and the same in words.
struct HeldOutRule {
  ShapeLimit limit;
  std::string words;
};
HeldOutRule rule_of(const Calibration& calibration, const HeldOutOptions& options, const measure::Placement& place);

// `count` shapes; the same for the same seed and rule.
std::vector<measure::ProblemSpec> held_out_shapes(const HeldOutOptions& options, const HeldOutRule& rule, const measure::Placement& place);

// Both passes of one shape: predicted, then measured; a shape that cannot be has its reason.
std::vector<Scored> measure_shape(const measure::ProblemSpec& spec, const Predictor& predictor);

// Of a row of a record of `fattn predict --held-out`: what was measured of it, with today's prediction. Throws RecordError.
Scored kept_row(const nlohmann::ordered_json& row, const Predictor& predictor);

}  // namespace fattn::lab
