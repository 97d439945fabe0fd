#include "lab/record_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

namespace fattn::lab {
namespace {

constexpr size_t kMostBytes = size_t{256} << 20, kMostText = 4096;

std::string what_is(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_number()) return value.dump();
  return std::string("of type ") + value.type_name();
}

}  // namespace

Json read_json(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) throw RecordError("'" + path + "' cannot be read: " + std::strerror(errno));
  std::string text;
  std::array<char, 65536> buffer;
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), file.get())) > 0;) {
    text.append(buffer.data(), n);
    if (text.size() > kMostBytes) throw RecordError(fmt::format("'{}' has more than {} MiB; no record of fattn is so large", path, kMostBytes >> 20));
  }
  if (std::ferror(file.get())) throw RecordError("'" + path + "' cannot be read: " + std::strerror(errno));
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) throw RecordError("'" + path + "' is empty; give a record that --json FILE wrote");
  Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) {
    const char last = text[text.find_last_not_of(" \t\r\n")], first = text[text.find_first_not_of(" \t\r\n")];
    const bool cut = (first == '{' && last != '}') || (first == '[' && last != ']');
    throw RecordError(fmt::format("'{}' is {}; give a record that --json FILE wrote", path, cut ? "cut off" : "no JSON"));
  }
  return json;
}

std::string kind_of(const Json& record) {
  if (record.is_object()) {
    for (const auto& [key, value] : record.items())
      if (key.rfind("fattn_", 0) == 0) return key;
    return "";
  }
  if (!record.is_array() || record.empty() || !record.front().is_object()) return "";
  const Json& row = record.front();
  if (row.contains("rms_ratio") && row.contains("sigma")) return "accuracy";
  if (row.contains("ratio") && row.contains("values")) return "values";
  return "";
}

const Json* JsonPart::find(std::string_view key) const {
  if (!json_->is_object()) throw RecordError((name_.empty() ? "the whole" : name_) + " is " + what_is(*json_) + "; an object is wanted there");
  const auto at = json_->find(std::string(key));
  return at == json_->end() || at->is_null() ? nullptr : &*at;
}
bool JsonPart::has(std::string_view key) const { return find(key) != nullptr; }
void JsonPart::fail(std::string_view key, std::string_view wanted) const {
  const Json* value = find(key);
  throw RecordError(
      fmt::format("{}{}{} is {}; {} is wanted there", name_, name_.empty() ? "" : ".", key, value ? what_is(*value) : "missing", wanted));
}

std::string JsonPart::text(std::string_view key) const {
  const Json* value = find(key);
  if (!value || !value->is_string() || value->get_ref<const std::string&>().size() > kMostText) fail(key, "text");
  return value->get<std::string>();
}
std::string JsonPart::text(std::string_view key, std::string otherwise) const { return has(key) ? text(key) : std::move(otherwise); }
double JsonPart::number(std::string_view key) const {
  const Json* value = find(key);
  if (!value || !value->is_number() || !std::isfinite(value->get<double>())) fail(key, "a number");
  return value->get<double>();
}
double JsonPart::number(std::string_view key, double otherwise) const { return has(key) ? number(key) : otherwise; }
std::optional<double> JsonPart::maybe(std::string_view key) const { return has(key) ? std::optional<double>(number(key)) : std::nullopt; }
bool JsonPart::flag(std::string_view key, bool otherwise) const {
  const Json* value = find(key);
  if (value && !value->is_boolean()) fail(key, "true or false");
  return value ? value->get<bool>() : otherwise;
}
JsonPart JsonPart::object(std::string_view key) const {
  static const Json nothing = Json::object();
  const Json* value = find(key);
  if (value && !value->is_object()) fail(key, "an object");
  return {value ? *value : nothing, name_.empty() ? std::string(key) : name_ + "." + std::string(key)};
}
std::vector<JsonPart> JsonPart::list(std::string_view key) const {
  const Json* value = find(key);
  std::vector<JsonPart> parts;
  if (!value) return parts;
  if (!value->is_array()) fail(key, "a list");
  for (size_t i = 0; i < value->size(); ++i) parts.emplace_back((*value)[i], fmt::format("{}{}{}[{}]", name_, name_.empty() ? "" : ".", key, i));
  return parts;
}
std::vector<double> JsonPart::numbers(std::string_view key) const {
  std::vector<double> all;
  for (const JsonPart& part : list(key)) {
    if (!part.json().is_number() || !std::isfinite(part.json().get<double>())) fail(key, "a list of numbers");
    all.push_back(part.json().get<double>());
  }
  return all;
}
std::vector<std::string> JsonPart::texts(std::string_view key) const {
  std::vector<std::string> all;
  for (const JsonPart& part : list(key)) {
    if (!part.json().is_string()) fail(key, "a list of texts");
    all.push_back(part.json().get<std::string>());
  }
  return all;
}

std::string RowOfRecord::problem() const {
  const auto sizes = [](const char* name, double first, double second) {
    return first == second ? fmt::format("{}{:.0f}", name, first) : fmt::format("{}{:.0f}/{:.0f}", name, first, second);
  };
  std::string text = sizes("B", batch, batch) + " " + sizes("S", seqlen_q, seqlen_k) + " " + sizes("H", nheads, nheads_k) + " " +
                     sizes("D", headdim, headdim_v) + " " + dtype;
  if (causal) text += " causal";
  return options.empty() ? text : text + " " + options;
}

namespace {

TimeOfRow time_of(const JsonPart& row) {
  TimeOfRow time;
  time.median = row.number("time_median_s");
  if (!(time.median > 0)) row.fail("time_median_s", "a time above 0");
  time.low = row.number("time_ci_low_s", time.median);
  time.high = row.number("time_ci_high_s", time.median);
  time.level = row.number("time_ci_level", 0);
  time.samples = row.number("samples", 0);
  if (!(time.low > 0 && time.low <= time.median && time.median <= time.high)) row.fail("time_ci_low_s", "an interval around the median");
  time.turn_medians = row.numbers("time_turn_medians_s");
  for (const JsonPart& turn : row.list("time_turn_samples_s")) {
    const Json holder = {{"turn", turn.json()}};
    time.turns.push_back(JsonPart(holder, turn.name()).numbers("turn"));
    if (time.turns.back().empty()) row.fail("time_turn_samples_s", "a list of turns with a sample each");
  }
  const auto positive = [](double t) { return t > 0; };
  for (const std::vector<double>& turn : time.turns)
    if (!std::all_of(turn.begin(), turn.end(), positive)) row.fail("time_turn_samples_s", "times above 0");
  if (!std::all_of(time.turn_medians.begin(), time.turn_medians.end(), positive)) row.fail("time_turn_medians_s", "times above 0");
  return time;
}

// What of a problem is in a row only where it is set.
constexpr std::array kOptions = {"window_left", "window_right", "softcap",         "p_dropout",    "alibi",     "bias",     "bias_dtype",
                                 "dbias",       "mask",         "least_seqused_k", "least_packed", "documents", "page_size"};

}  // namespace

RowOfRecord row_of(const JsonPart& part) {
  RowOfRecord row;
  row.provider = part.text("provider");
  row.algorithm = part.text("algorithm", "");
  row.ours = row.provider == "fattn" || (row.provider == row.algorithm && (row.provider == "v1" || row.provider == "v2" || row.provider == "v3"));
  row.label = row.ours || row.provider == row.algorithm || row.algorithm.empty() ? row.provider : row.provider + ":" + row.algorithm;
  const auto size = [&](const char* key) {
    const double value = part.number(key);
    if (!(value >= 1 && value <= 1e15 && value == std::floor(value))) part.fail(key, "a whole number from 1 on");
    return value;
  };
  row.batch = size("batch"), row.seqlen_q = size("seqlen_q"), row.seqlen_k = size("seqlen_k"), row.nheads = size("nheads");
  row.nheads_k = size("nheads_k"), row.headdim = size("headdim"), row.headdim_v = size("headdim_v");
  row.causal = part.flag("causal", false);
  row.dtype = part.text("dtype");
  for (const char* key : kOptions)
    if (part.has(key)) {
      const Json& value = part.json()[key];
      row.options += fmt::format("{}{}={}", row.options.empty() ? "" : " ", key, value.is_string() ? value.get<std::string>() : value.dump());
    }
  row.pass = part.text("pass");
  row.value = part.maybe("value");
  row.device = part.text("device", part.text("backend", ""));
  row.kernel = part.text("kernel", "");
  row.version = part.text("version", "");
  row.threads = part.number("threads", 0);
  row.status = part.text("status");
  row.reason = part.text("reason", "");
  if (part.has("time_median_s")) row.time = time_of(part);
  row.flops_per_s = part.maybe("flops_per_s");
  row.peak_fraction = part.maybe("peak_fraction");
  row.extra_bytes = part.maybe("extra_bytes");
  row.moved_bytes = part.maybe("moved_bytes_model");
  row.sm_clock_mhz = part.maybe("sm_clock_mhz");
  row.power_w = part.maybe("power_w");
  row.extra_bytes_method = part.text("extra_bytes_method", "");
  row.peak = part.text("peak", "");
  row.held_back_by = part.texts("held_back_by");
  row.warnings = part.texts("warnings");
  for (const JsonPart& check : part.list("checks")) {
    const std::optional<double> error = check.maybe("error"), allowed = check.maybe("allowed"), rms = check.maybe("rms_error"),
                                peer = check.maybe("rms_peer");
    if (error && allowed && *error > 0 && *allowed > 0) row.worst_check = std::max(row.worst_check, *error / *allowed);
    if (rms && peer && *peer > 0) row.rms_ratio = std::max(row.rms_ratio, *rms / *peer);
  }
  if (row.status == "ok" && !row.time) part.fail("time_median_s", "the time of a row that is ok");
  return row;
}

MeasuredRecord measured_record(const Json& json, const std::string& file) {
  const auto refuse = [&](const std::string& what) { throw RecordError("'" + file + "' " + what); };
  const std::string kind = kind_of(json);
  if (kind != "fattn_record" && kind != "fattn_sweep")
    refuse("is no record of fattn bench, compare, sweep or a suite; give one that their --json FILE wrote");
  try {
    const JsonPart whole(json, "");
    if (const double version = whole.number(kind); version != 1)
      refuse(fmt::format("is a record of version {:g}; this program reads version 1", version));
    MeasuredRecord record;
    record.file = file;
    record.command = whole.text("command");
    record.flags = whole.texts("flags");
    record.complete = whole.flag("complete", true);
    record.over = whole.object("sweep").text("over", "");
    record.environment = whole.object("environment").json();
    record.peaks = whole.object("peaks").json();
    record.disturbance = whole.object("disturbance").json();
    if (whole.has("summary")) record.summary = json.at("summary");
    for (const JsonPart& row : whole.list("rows")) record.rows.push_back(row_of(row));
    if (record.rows.empty()) refuse("has no rows: nothing was measured");
    return record;
  } catch (const RecordError& error) {
    const std::string what = error.what();
    if (what.rfind("'" + file + "'", 0) == 0) throw;
    throw RecordError("'" + file + "': " + what);
  }
}

std::string command_line(const std::string& command, const std::vector<std::string>& flags) {
  std::string line = "fattn " + (command == "suite" ? std::string("bench") : command);
  for (const std::string& flag : flags) {
    const bool plain =
        !flag.empty() && flag.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+,./:@%") == std::string::npos;
    line += ' ';
    if (plain) {
      line += flag;
      continue;
    }
    line += '\'';
    for (const char c : flag) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += '\'';
  }
  return line;
}

}  // namespace fattn::lab
