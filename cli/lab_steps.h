// The five steps of `fattn lab`: what each computes, shows, asks and answers.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/lab_words.h"
#include "cli/output.h"
#include "measure/contestant.h"

namespace fattn::cli {

// A sentence of the catalogue.
const char* lab_sentence(LabText text, bool chinese);

// Where a step computes and shows what it finds.
struct LabStage {
  Output& out;
  measure::Placement place;
  bool chinese = false;

  template <class... Values>
  std::string words(LabText text, const Values&... values) const {
    return fmt::format(fmt::runtime(lab_sentence(text, chinese)), values...);
  }
};

struct LabStep {
  const char* name;  // in records
  LabText title;
  // Shows all but the question; returns what it found, with "question" and "answer" in it.
  nlohmann::ordered_json (*run)(LabStage& stage);
};

const std::vector<LabStep>& lab_steps();

}  // namespace fattn::cli
