// Every cell is the answer of fattn_supported for a problem of that kind, so the table cannot differ from what the planner says.
#include "cli/support.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/usage_error.h"
#include "fattn/fattn.hpp"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Way {
  std::string name;
  Device device = Device::kCpu;
  int index = 0;
  Options options;
};

std::vector<Way> ways() {
  std::vector<Way> all;
  const auto add = [&](const std::string& name, Backend backend, Algorithm algorithm) -> Way& {
    Way& way = all.emplace_back();
    way.name = name;
    way.options.backend = backend;
    way.options.algorithm = algorithm;
    return way;
  };
  add("reference", Backend::kReference, Algorithm::kAuto);
  add("cpu standard", Backend::kCpu, Algorithm::kStandard);
  add("cpu v1", Backend::kCpu, Algorithm::kV1);
  add("cpu v2", Backend::kCpu, Algorithm::kV2);
  for (int i = 0, n = cuda::count(); i < n; ++i) {
    for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3}) {
      Way& way = add(fmt::format("cuda:{} {}", i, name_of(algorithm)), Backend::kCuda, algorithm);
      way.device = Device::kCuda;
      way.index = i;
    }
  }
  return all;
}

// What a way may have beside causal masks.
struct Feature {
  const char* name;
  void (*use)(Options&, ScoreTensors&);
};
// For tensors of (1, 64, 2, headdim).
constexpr Feature kFeatures[] = {
    {"window", [](Options& options, ScoreTensors&) { options.window_left = 16; }},
    {"softcap", [](Options& options, ScoreTensors&) { options.softcap = 30; }},
    {"key_lengths", [](Options&, ScoreTensors& scores) { scores.seqused_k = Tensor(nullptr, DType::kI32, {1}); }},
    {"alibi", [](Options&, ScoreTensors& scores) { scores.alibi_slopes = Tensor(nullptr, DType::kF32, {2}); }},
    {"bias",
     [](Options&, ScoreTensors& scores) {
       scores.bias = Tensor(nullptr, DType::kF32, {1, 2, 64, 64});
     }},
    {"mask",
     [](Options&, ScoreTensors& scores) {
       scores.mask = Tensor(nullptr, DType::kU8, {1, 2, 64, 64});
     }},
    {"dropout",
     [](Options& options, ScoreTensors& scores) {
       options.p_dropout = 0.1;
       scores.dropout_state = Tensor(nullptr, DType::kI64, {2});
     }},
    {"documents",
     [](Options&, ScoreTensors& scores) {
       scores.document_q = scores.document_k = Tensor(nullptr, DType::kI32, {1, 64});
     }},
    {"packed",  // one sequence of 64 rows
     [](Options& options, ScoreTensors& scores) {
       options.max_seqlen_q = options.max_seqlen_k = 64;
       scores.cu_seqlens_q = scores.cu_seqlens_k = Tensor(nullptr, DType::kI32, {2});
     }},
};

Support ask(const Way& way, DType dtype, bool backward, int64_t headdim, const Feature* feature = nullptr) {
  const auto at = [&](const Tensor& t) { return way.device == Device::kCpu || !t ? t : t.on(way.device, way.index, nullptr); };
  Options options = way.options;
  options.causal = true;
  ScoreTensors s;
  if (feature) feature->use(options, s);
  const bool packed = static_cast<bool>(s.cu_seqlens_q);
  const DType lse_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const Tensor x = packed ? Tensor(nullptr, dtype, {64, 2, headdim}) : Tensor(nullptr, dtype, {1, 64, 2, headdim});
  const Tensor lse = packed ? Tensor(nullptr, lse_dtype, {2, 64}) : Tensor(nullptr, lse_dtype, {1, 2, 64});
  return supported(backward ? describe(each_tensor(BackwardTensors{x, x, x, x, lse, x, x, x, x, s, s.bias}, at), options)
                            : describe(each_tensor(ForwardTensors{x, x, x, x, lse, {}, s}, at), options));
}

// The largest headdim that is computed; 0, and why, if none is.
int64_t largest_headdim(const Way& way, DType dtype, bool backward, std::string& reason) {
  for (const int64_t headdim : {576, 512, 256, 192, 128, 64}) {
    const Support answer = ask(way, dtype, backward, headdim);
    if (answer) return headdim;
    reason = answer.reason;
  }
  return 0;
}

Json as_json() {
  Json json = {
      {"fattn_support", 1}, {"backends", Json::array()}, {"features", Json::array()}, {"table", Json::array()}, {"gpu_architectures", Json::array()}};
  for (const Way& way : ways())
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64})
      for (const bool backward : {false, true}) {
        std::string reason;
        const int64_t headdim = largest_headdim(way, dtype, backward, reason);
        json["backends"].push_back({{"name", way.name},
                                    {"dtype", name_of(dtype)},
                                    {"pass", backward ? "bwd" : "fwd"},
                                    {"headdim_max", headdim},
                                    {"reason", headdim > 0 ? Json(nullptr) : Json(printable(reason, 600))}});
      }
  for (const Way& way : ways())
    for (const Feature& feature : kFeatures) {
      Support answer = ask(way, DType::kBF16, false, 64, &feature);
      if (answer) answer = ask(way, DType::kBF16, true, 64, &feature);
      json["features"].push_back({{"name", way.name},
                                  {"feature", feature.name},
                                  {"supported", answer.ok},
                                  {"reason", answer.ok ? Json(nullptr) : Json(printable(answer.reason, 600))}});
    }
  for (const std::vector<fattn_feature_info>& row : features()) {
    Json ways = Json::object();
    for (const fattn_feature_info& cell : row) ways[cell.way] = cell.supported != 0;
    json["table"].push_back({{"feature", row.front().feature}, {"ways", std::move(ways)}});
  }
  for (const fattn_architecture_info& a : architectures())
    json["gpu_architectures"].push_back(
        {{"capability", a.capability}, {"name", a.name}, {"executed_on", *a.executed_on ? Json(a.executed_on) : Json(nullptr)}});
  return json;
}

Cell yes_or_no(bool yes) { return yes ? Cell("yes").in(Mood::kGood) : Cell("no").in(Mood::kUnsure); }

// "algorithm v2 of backend cuda" as the first table has it: "cuda v2".
std::string short_name(const std::string& way) {
  const std::string of = " of backend ";
  const size_t at = way.find(of);
  std::string what = way.substr(0, at), backend = at == std::string::npos ? "" : way.substr(at + of.size()) + " ";
  for (const std::string prefix : {"algorithm ", "backend "})
    if (what.rfind(prefix, 0) == 0) what.erase(0, prefix.size());
  return backend + what;
}

// Two devices of a kind say the same; the later ones are the first that a narrow terminal leaves out.
int rank_of(const std::string& way) { return way.rfind("cuda:", 0) == 0 ? std::atoi(way.c_str() + 5) : 0; }

// Names of `rows` in the order in which they come, each once.
std::vector<std::string> names_in(const Json& rows, const char* key) {
  std::vector<std::string> names;
  for (const Json& row : rows)
    if (const auto name = row[key].get<std::string>(); std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  return names;
}

void print_backends(Output& out, const Json& rows) {
  std::vector<Column> columns = {Column::text("backend").as_key(), Column::text("pass").as_key()};
  const std::vector<std::string> dtypes = names_in(rows, "dtype");
  for (const std::string& dtype : dtypes) columns.push_back(Column::number(dtype));
  Table table(columns, "The largest headdim that each backend computes here");
  std::string told;  // a reason is given once
  for (const std::string& name : names_in(rows, "name"))
    for (const std::string pass : {"fwd", "bwd"}) {
      std::vector<Cell> cells = {name, pass};
      std::vector<std::string> reasons;
      for (const Json& row : rows) {
        if (row["name"] != name || row["pass"] != pass) continue;
        const auto headdim = row["headdim_max"].get<int64_t>();
        cells.push_back(headdim > 0 ? count_cell(headdim) : Cell("no", "0").in(Mood::kUnsure));
        if (headdim > 0) continue;
        const auto reason = row["reason"].get<std::string>();
        if (reason != told) reasons.push_back(reason);
        told = reason;
      }
      table.add(std::move(cells));
      for (std::string& reason : reasons) table.note(std::move(reason));
    }
  out.print(table);
}

void print_features(Output& out, const Json& rows) {
  std::vector<Column> columns = {Column::text("option").as_key()};
  const std::vector<std::string> ways = names_in(rows, "name");
  for (const std::string& way : ways) columns.push_back(Column::text(way).ranked(rank_of(way)));
  Table table(columns, "Options of attention here; bf16, both passes");
  for (const std::string& feature : names_in(rows, "feature")) {
    std::vector<Cell> cells = {feature};
    for (const Json& row : rows)
      if (row["feature"] == feature) cells.push_back(yes_or_no(row["supported"].get<bool>()));
    table.add(std::move(cells));
  }
  out.print(table);
  out.say("Why not: `fattn support --json -`, under \"features\".");
}

void print_everywhere(Output& out, const Json& rows) {
  std::vector<Column> columns = {Column::text("option").as_key().wrapping(14)};
  for (const auto& [way, has] : rows.front()["ways"].items()) columns.push_back(Column::text(short_name(way)));
  Table table(columns, "Options of attention on every machine");
  for (const Json& row : rows) {
    std::vector<Cell> cells = {row["feature"].get<std::string>()};
    for (const auto& [way, has] : row["ways"].items()) cells.push_back(yes_or_no(has.get<bool>()));
    table.add(std::move(cells));
  }
  out.print(table);
}

void print(Output& out, const Json& json) {
  print_backends(out, json["backends"]);
  print_features(out, json["features"]);
  print_everywhere(out, json["table"]);
  std::string reason;
  if (cuda::count(&reason) == 0) out.say("\ncuda: " + printable(reason, 600), 2);
  for (const fattn_library_info& library : libraries())
    if (std::string(library.name) == "NVRTC" && !library.loaded && cuda::count() > 0)
      out.say("\ncuda: without NVRTC only kernels of the cache or of a pack file run: " + printable(library.reason, 600), 2);
  out.say(
      "\nEvery way computes causal masks, GQA and MQA, seqlen_q other than seqlen_k, any strides (v3: multiples of 16 bytes; v2 computes the "
      "others), and log-sum-exp.");
  Table architectures({Column::text("capability").as_key(), Column::text("name"), Column::text("run on").wrapping(20)}, "GPU architectures");
  for (const Json& a : json["gpu_architectures"])
    architectures.add({std::to_string(a["capability"].get<int>()), a["name"].get<std::string>(),
                       a["executed_on"].is_null() ? "never: compiled by the tests" : a["executed_on"].get<std::string>()});
  out.print(architectures);
  out.say(
      "A GPU runs what is compiled for its own capability or for an earlier minor version of it; Jetson boards (7.2, 8.7, 10.1, 11.0) only what is "
      "compiled for their own.");
}

}  // namespace

void add_support(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("support", "What each backend computes on this machine, and why not where it does not");
  auto json = std::make_shared<std::string>();
  auto output = std::make_shared<OutputFlags>();
  command->add_option("--json", *json, "Write it as JSON to a file, or - for stdout")->type_name("FILE|-")->group("Output");
  output->add_to(*command);
  command->callback([json, output, &exit_code] {
    const Json support = as_json();
    Output out(*output, *json);
    if (*json != "-") print(out, support);
    if (!json->empty()) write_json(support, *json);
    exit_code = kExitFine;
  });
}

}  // namespace fattn::cli
