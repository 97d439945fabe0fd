// What `fattn predict` prints: predictions with what binds them, and scores.
#pragma once

#include <vector>

#include "cli/output.h"
#include "lab/calibration.h"
#include "lab/prediction_score.h"

namespace fattn::cli {

// Of one problem, a pass each. `calibration`: null where there is none.
void print_predictions(Output& out, const std::vector<lab::Prediction>& predictions, const lab::Calibration* calibration);
// What each of a kernel's amounts takes.
void print_amounts(Output& out, const lab::Prediction& prediction, const lab::Calibration& calibration);
// Of the passes that there are; with words for each, and the rows that could not be scored.
void print_scores(Output& out, const std::vector<lab::Scored>& rows);

}  // namespace fattn::cli
