// What `fattn advise` prints of an advice: the settings, memory and time with their arithmetic, what standard attention would take.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/output.h"
#include "lab/advise/advice.h"
#include "lab/advise/step_time.h"

namespace fattn::cli {

// The times of an advice; absent rates: `unknown` says why.
struct AdviceTimes {
  std::optional<lab::StepRates> rates;
  std::string unknown;
  lab::StepTime micro_batch, standard;  // of the same plan with standard attention
  double optimizer = 0;
  double step(const lab::Advice& advice, bool of_standard = false) const {
    return static_cast<double>(advice.accumulation) * (of_standard ? standard : micro_batch).seconds + optimizer;
  }
};

void print_advice(Output& out, const lab::AdviceRequest& request, const lab::Advice& advice, const AdviceTimes& times);
void print_refusal(Output& out, const lab::AdviceRequest& request, const lab::Advice& advice);
nlohmann::ordered_json to_json(const lab::AdviceRequest& request, const lab::Advice& advice, const AdviceTimes& times);

}  // namespace fattn::cli
