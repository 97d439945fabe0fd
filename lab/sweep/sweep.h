// A sweep as its record has it (docs/sweep.schema.json): what was swept, and a cell for each value, contestant and pass. Tables, figures and
// sentences are made from this, so that a record that is read again gives the same ones.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lab/power_law.h"
#include "lab/sweep/axis.h"

namespace fattn::lab {

inline constexpr int kSweepVersion = 1;

struct Cell {
  int64_t value = 0;
  std::string contestant, pass;  // "fwd", "bwd", "fwdbwd"
  std::string status, reason;    // as in any record's rows
  std::string problem;           // "B4 S1024 H12 D64 fp32"
  // Of cells that are ok; else, and where it is not known, nothing.
  std::optional<double> seconds, seconds_low, seconds_high, flops_per_s, tokens_per_s, extra_bytes, peak_flops_per_s;
  std::optional<double> speedup, memory_share;  // over the baseline's, of its memory: where both are ok
  bool undecided = false;                       // the speed-up: the intervals overlap
  std::string peak;                             // of peak_flops_per_s
  std::optional<double> ceiling_fraction;       // of the least time that this machine's rates allow (lab/ceiling.h)
  std::string rating;                           // "good", "fair", "poor"; empty: not known
  std::string error;                            // the one nearest to its bound: "o 1.2e-07 of 4.5e-07"

  bool ok() const { return status == "ok" && seconds.has_value(); }
};

struct Sweep {
  SweepAxis axis = SweepAxis::kSeqlen;
  std::vector<int64_t> values;
  std::vector<std::string> passes, contestants;
  std::string baseline;  // empty: none of the contestants is one
  std::string preset;    // empty: none
  std::string problem;   // what stays as it is: "B4 H12 D64 fp32"
  std::string device, fix;
  bool complete = true;
  std::vector<Cell> cells;

  const Cell* cell(int64_t value, const std::string& contestant, const std::string& pass) const;
};

// Adds to rows what a sweep's have beyond any record's: tokens_per_s, and the comparison with the baseline's row of the same value and pass.
void add_comparisons(nlohmann::ordered_json& rows, const std::string& baseline);

// Throws std::runtime_error that says what it is instead, or what is missing.
Sweep read_sweep(const nlohmann::ordered_json& record);

// How the time of a contestant grows with what is swept.
struct Growth {
  std::string contestant, pass;
  std::optional<PowerLaw> law;
  std::string reason;  // why there is none
};
// Of every contestant and pass where seqlen is swept; nothing of other axes.
std::vector<Growth> growth_of(const Sweep& sweep);
// What the count of operations grows with: seqlen^2, or seqlen where the tokens are fixed.
double expected_exponent(const Sweep& sweep);
nlohmann::ordered_json to_json(const std::vector<Growth>& growth);

// In sentences, and never more than the cells carry: from where on who is faster, who runs out of memory where, how time grows.
std::vector<std::string> findings(const Sweep& sweep);

// What a JSON library says of what it misses, without its own number of it.
std::string without_code(const std::string& said);

std::string words_for_pass(const std::string& pass);  // "forward pass"

}  // namespace fattn::lab
