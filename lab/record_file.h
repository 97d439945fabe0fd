// Records as the lab reads them: files that people hand over, so that nothing in them is taken for granted.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lab/record_error.h"

namespace fattn::lab {

using Json = nlohmann::ordered_json;

// The content of a file as JSON. Throws RecordError: not there, no file, empty, cut off, no JSON, above 256 MiB.
Json read_json(const std::string& path);

// The kind of a record: "fattn_record", "fattn_sweep", ... and, of lists without such a key, "accuracy" and "values"; "" of what is none.
std::string kind_of(const Json& record);

// A part of a record and its name there, which errors give: "rows[3]".
class JsonPart {
 public:
  JsonPart(const Json& json, std::string name) : json_(&json), name_(std::move(name)) {}

  const Json& json() const { return *json_; }
  const std::string& name() const { return name_; }
  bool has(std::string_view key) const;  // and it is not null
  // Values of an object. Without `otherwise` the key has to be there; a value of another type is an error in any case, and so is a number that is not
  // finite or text longer than 4096 bytes.
  std::string text(std::string_view key) const;
  std::string text(std::string_view key, std::string otherwise) const;
  double number(std::string_view key) const;
  double number(std::string_view key, double otherwise) const;
  std::optional<double> maybe(std::string_view key) const;
  bool flag(std::string_view key, bool otherwise) const;
  JsonPart object(std::string_view key) const;  // an empty one where it is not there
  std::vector<JsonPart> list(std::string_view key) const;
  std::vector<double> numbers(std::string_view key) const;
  std::vector<std::string> texts(std::string_view key) const;
  [[noreturn]] void fail(std::string_view key, std::string_view wanted) const;

 private:
  const Json* find(std::string_view key) const;

  const Json* json_;
  std::string name_;
};

// A time in a row of bench, compare, a suite or a sweep.
struct TimeOfRow {
  double median = 0, low = 0, high = 0, level = 0;  // seconds; the interval's probability
  double samples = 0;
  std::vector<double> turn_medians;
  std::vector<std::vector<double>> turns;  // samples of each turn; empty in older records
};

struct RowOfRecord {
  std::string provider, algorithm, label;  // label: "fattn", "v2", "torch-sdpa:flash"
  bool ours = false;                       // of the library
  double batch = 0, seqlen_q = 0, seqlen_k = 0, nheads = 0, nheads_k = 0, headdim = 0, headdim_v = 0;
  bool causal = false;
  std::string dtype, options;  // options: what the problem has besides, "window_left=128 softcap=20"
  std::string pass, device, kernel, version;
  double threads = 0;
  std::string status, reason;
  std::optional<TimeOfRow> time;
  std::optional<double> flops_per_s, peak_fraction, extra_bytes, moved_bytes, sm_clock_mhz, power_w;
  std::string extra_bytes_method, peak;
  std::vector<std::string> held_back_by, warnings;
  std::optional<double> value;  // of a sweep
  double worst_check = -1;      // the largest error as a share of what is allowed; -1: not known
  double rms_ratio = -1;        // the largest RMS error over FlashAttention-2's; -1: not known
  bool ok() const { return status == "ok" && time.has_value(); }
  std::string problem() const;  // "B16 S1024 H32 D64 fp16 causal window_left=128"
};

struct MeasuredRecord {
  std::string file;     // as it was given
  std::string command;  // bench, compare, suite, sweep
  std::vector<std::string> flags;
  bool complete = true;
  std::string over;                               // of a sweep: what it changes
  Json environment, peaks, disturbance, summary;  // objects, arrays or null
  std::vector<RowOfRecord> rows;
};

// A record of bench, compare, a suite or a sweep. Throws RecordError where it is another, or another version.
MeasuredRecord measured_record(const Json& json, const std::string& file);
RowOfRecord row_of(const JsonPart& row);

// The command line that repeats a record, quoted for a shell: "fattn bench --seqlen 1024 ...".
std::string command_line(const std::string& command, const std::vector<std::string>& flags);

}  // namespace fattn::lab
