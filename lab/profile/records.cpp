// The profile as JSON and as a table for spreadsheets.
#include <fmt/format.h>

#include <cstdlib>

#include "lab/profile/profile.h"

namespace fattn::lab::profile {
namespace {

using Json = nlohmann::ordered_json;

Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }
Json known(double value) { return value > 0 ? Json(value) : Json(nullptr); }
Json maybe(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

Json as_json(const Operation& o) {
  return {{"name", o.name},           {"kind", name_of(o.kind)},  {"detail", text_or_null(o.detail)}, {"times", o.times},
          {"time_s", o.seconds},      {"self_s", o.self_seconds}, {"wall_s", o.wall_seconds},         {"on", o.on_gpu() ? "gpu" : "host"},
          {"self_fraction", o.share}, {"flops", known(o.flops)},  {"bytes", known(o.bytes)},          {"memory_bytes", known(o.memory_bytes)}};
}

Json as_json(const Counter& c) {
  return {{"name", c.name},
          {"unit", c.unit},
          {"words", c.words},
          {"source", c.source},
          {"value", maybe(c.value)},
          {"reason", text_or_null(c.reason)},
          {"model", maybe(c.model)},
          {"model_words", text_or_null(c.model_words)},
          {"difference_fraction", maybe(c.difference())}};
}

// For each side and pass what `part` makes of it.
template <class Part>
Json for_passes(const Profile& profile, const Part& part) {
  Json all = Json::array();
  for (const Side& side : profile.sides)
    for (const PassProfile& pass : side.passes) {
      Json json = {
          {"side", side.name}, {"pass", pass.pass}, {"calls", pass.calls}, {"elapsed_s", pass.seconds}, {"reason", text_or_null(pass.reason)}};
      part(json, pass);
      all.push_back(std::move(json));
    }
  return all;
}

// A field of CSV; a text that a spreadsheet would take for a formula is made text.
std::string csv(std::string text) {
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  const bool number = !text.empty() && *end == 0;
  if (number) return text;
  if (!text.empty() && std::string("=+-@\t\r").find(text[0]) != std::string::npos) text.insert(0, "'");
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? "\"\"" : std::string(1, c == '\n' || c == '\r' ? ' ' : c);
  return out + "\"";
}

}  // namespace

std::string csv_line(const std::vector<std::string>& fields) {
  std::string line;
  for (const std::string& field : fields) line += (line.empty() ? "" : ",") + csv(field);
  return line + "\n";
}

double seconds_of(const Profile& profile, const std::string& side, const std::string& pass) {
  for (const measure::Row& row : profile.rows)
    if (row.ok() && row.time && row.who.provider == side && name_of(row.pass) == pass) return row.time->median;
  return 0;
}

Json counters_json(const Profile& profile) {
  return for_passes(profile, [](Json& json, const PassProfile& pass) {
    json["counters"] = Json::array();
    for (const Counter& counter : pass.counters) json["counters"].push_back(as_json(counter));
  });
}

Json operations_json(const Profile& profile) {
  return for_passes(profile, [&](Json& json, const PassProfile& pass) {
    std::vector<Operation> operations = pass.operations;
    sort_operations(operations, profile.sort);
    const Totals totals = totals_of(operations);
    json["totals"] = {{"host_s", totals.host_seconds},
                      {"gpu_s", totals.gpu_seconds},
                      {"flops", known(totals.flops)},
                      {"bytes", known(totals.bytes)},
                      {"memory_bytes", known(totals.memory_bytes)}};
    json["operations"] = Json::array();
    for (const Operation& operation : operations) json["operations"].push_back(as_json(operation));
  });
}

std::string operations_csv(const Profile& profile) {
  std::string out = "side,pass,kind,name,detail,times,time_s,self_s,wall_s,on,self_fraction,flops,bytes,memory_bytes\n";
  const auto number = [](double value) { return fmt::format("{:.9g}", value); };
  for (const Side& side : profile.sides)
    for (const PassProfile& pass : side.passes) {
      std::vector<Operation> operations = pass.operations;
      sort_operations(operations, profile.sort);
      for (const Operation& o : operations)
        out += csv_line({side.name, pass.pass, name_of(o.kind), o.name, o.detail, std::to_string(o.times), number(o.seconds), number(o.self_seconds),
                         number(o.wall_seconds), o.on_gpu() ? "gpu" : "host", number(o.share), number(o.flops), number(o.bytes),
                         number(o.memory_bytes)});
    }
  return out;
}

Json memory_json(const Profile& profile) {
  Json all = Json::array();
  for (const Side& side : profile.sides) {
    Json changes = Json::array(), samples = Json::array();
    for (const MemoryChange& c : side.memory.changes)
      changes.push_back({{"at_s", static_cast<double>(c.ns - profile.begin_ns) * 1e-9},
                         {"what", c.what},
                         {"bytes", c.bytes},
                         {"total_bytes", c.total},
                         {"on", c.device >= 0 ? fmt::format("cuda:{}", c.device) : "host"}});
    for (const MemorySample& s : side.memory.samples)
      samples.push_back({{"at_s", static_cast<double>(s.ns - profile.begin_ns) * 1e-9}, {"bytes", s.bytes}});
    all.push_back({{"side", side.name},
                   {"peak_allocated_bytes", known(side.memory.peak_changes())},
                   {"peak_resident_bytes", known(side.memory.peak_samples())},
                   {"changes", changes},
                   {"resident", samples},
                   {"resident_reason", text_or_null(side.memory.samples_reason)}});
  }
  return all;
}

Json to_json(const Profile& p, const std::vector<std::string>& files) {
  Json verdict = Json::array(), tools = Json::array(), program = nullptr, rows = Json::array();
  for (const Finding& finding : p.verdict) verdict.push_back({{"topic", finding.topic}, {"text", finding.text}});
  for (const Tool& tool : p.tools) tools.push_back({{"name", tool.name}, {"status", tool.status}, {"words", tool.words}, {"files", tool.files}});
  if (p.program)
    program = {{"command", p.program->command},
               {"exit_code", p.program->exit_code},
               {"signal", p.program->signal > 0 ? Json(p.program->signal) : Json(nullptr)},
               {"processes", p.program->processes}};
  for (const measure::Row& row : p.rows) rows.push_back(measure::to_json(row));
  return {{"fattn_profile", 1},
          {"flags", p.flags},
          {"complete", p.interrupted.empty()},
          {"interrupted", text_or_null(p.interrupted)},
          {"problem", p.spec ? measure::to_json(*p.spec) : Json(nullptr)},
          {"program", program},
          {"device", p.device},
          {"device_name", p.device_name},
          {"verdict", verdict},
          {"rows", rows},
          {"operations", operations_json(p)},
          {"counters", counters_json(p)},
          {"memory", memory_json(p)},
          {"tools", tools},
          {"notes", p.notes},
          {"files", files},
          {"gpu", p.gpu},
          {"environment", p.environment}};
}

}  // namespace fattn::lab::profile
