// How good predictions are: held against measured times, of shapes drawn for it or of records that are there.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lab/predict.h"
#include "lab/record_error.h"
#include "measure/statistics.h"

namespace fattn::lab {

// A prediction and what was measured; `reason`: why nothing was.
struct Scored {
  Prediction prediction;
  std::optional<measure::Statistics> measured;
  std::string reason;
  std::optional<int64_t> measured_bytes;  // the extra_bytes of a record

  bool counts() const { return prediction.seconds.has_value() && measured.has_value(); }
  double error() const { return *prediction.seconds / measured->median - 1; }  // > 0: predicted too long
};

struct Score {
  int count = 0;
  double mean_error = 0;  // the mean absolute percentage error, as a share
  double error_95 = 0, bias = 0;
  double covered = 0;  // the share of measured times between low and high
  double worst_error = 0;
  std::string worst;                       // by name
  int memory_count = 0, memory_exact = 0;  // predictions of extra_bytes, and those that were right to the byte
};
// Of one pass.
Score score_of(const std::vector<Scored>& rows, measure::Pass pass);
nlohmann::ordered_json to_json(const Score& score);
nlohmann::ordered_json to_json(const Scored& row);

// The problem of a row; throws RecordError where it has none.
measure::ProblemSpec spec_from_json(const nlohmann::ordered_json& row);

// The rows of a record of bench, compare, a suite or a sweep that the library computed and timed, each with its prediction. Throws RecordError for
// what is no such record, is of another version, has no such row, or was made on another machine (processor, threads, GPU).
std::vector<Scored> score_record(const nlohmann::ordered_json& record, const nlohmann::ordered_json& environment_here, const KernelTimes& times,
                                 const measure::Placement& place);

}  // namespace fattn::lab
