// Every cell is the answer of fattn_supported for a problem of that kind, so the table cannot differ from what the planner says.
#include "cli/support.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

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
#include "cli/values.h"
#include "fattn/fattn.hpp"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Way {
  std::string name;
  Device device = Device::kCpu;
  int index = 0;
  int arch = 0;  // > 0: of a GPU with this compute capability, which need not be there
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

// As `ways()`, by compute capability.
std::vector<Way> ways_on(int arch) {
  std::vector<Way> all;
  for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3}) {
    Way& way = all.emplace_back();
    way.name = fmt::format("sm_{} {}", arch, name_of(algorithm));
    way.device = Device::kCuda;
    way.arch = arch;
    way.options.backend = Backend::kCuda;
    way.options.algorithm = algorithm;
  }
  return all;
}

// Which of kOptions, in their order.
using Chosen = std::vector<const OptionRow*>;

// Of tensors of (1, 64, 2, headdim), under a causal mask.
Support ask(const Way& way, DType dtype, bool backward, int64_t headdim, const Chosen& with = {}) {
  const auto at = [&](const Tensor& t) { return way.device == Device::kCpu || !t ? t : t.on(way.device, way.index, nullptr); };
  Options options = way.options;
  options.causal = true;
  const Tensor x(nullptr, dtype, {1, 64, 2, headdim}), lse(nullptr, dtype == DType::kF64 ? DType::kF64 : DType::kF32, {1, 2, 64});
  fattn_problem problem = backward ? describe(each_tensor(BackwardTensors{x, x, x, x, lse, x, x, x, x}, at), options)
                                   : describe(each_tensor(ForwardTensors{x, x, x, x, lse, {}}, at), options);
  for (const OptionRow* option : with) option->add(problem);
  return way.arch > 0 ? supported_on(problem, way.arch) : supported(problem);
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
    for (const OptionRow& option : kOptions) {
      Support answer = ask(way, DType::kBF16, false, 64, {&option});
      if (answer && !option.forward_only) answer = ask(way, DType::kBF16, true, 64, {&option});
      json["features"].push_back({{"name", way.name},
                                  {"feature", option.name},
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

// What is asked of a set of options.
struct Together {
  Chosen options;
  DType dtype = DType::kBF16;
  int64_t headdim = 64;
  int arch = 0;  // 0: of the devices here; without any, of kUsualArch
};
constexpr int kUsualArch = 90;

Json together_json(const Together& asked) {
  Json json = {{"options", Json::array()}, {"dtype", name_of(asked.dtype)}, {"headdim", asked.headdim}, {"ways", Json::array()}};
  for (const OptionRow* option : asked.options) json["options"].push_back(option->name);
  std::vector<Way> all = ways();
  if (asked.arch > 0 || cuda::count() == 0)
    for (Way& way : ways_on(asked.arch > 0 ? asked.arch : kUsualArch)) all.push_back(std::move(way));
  for (const Way& way : all)
    for (const bool backward : {false, true}) {
      const Support answer = ask(way, asked.dtype, backward, asked.headdim, asked.options);
      json["ways"].push_back({{"name", way.name},
                              {"pass", backward ? "bwd" : "fwd"},
                              {"supported", answer.ok},
                              {"reason", answer.ok ? Json(nullptr) : Json(printable(answer.reason, 600))}});
    }
  return json;
}

// Throws where there are no kernels for this compute capability at all.
void require_kernels(int arch) {
  for (const Way& way : ways_on(arch))
    if (way.options.algorithm == Algorithm::kV2)
      if (const Support answer = ask(way, DType::kF16, false, 64); !answer) throw CLI::ValidationError("--arch", printable(answer.reason, 600));
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

// Which options no way has in a backward pass.
std::string only_forward() {
  std::string names;
  for (const OptionRow& option : kOptions)
    if (option.forward_only) names += (names.empty() ? "" : ", ") + std::string(option.name);
  return names.empty() ? "" : " (" + names + ": forward)";
}

void print_features(Output& out, const Json& rows) {
  std::vector<Column> columns = {Column::text("option").as_key()};
  const std::vector<std::string> ways = names_in(rows, "name");
  for (const std::string& way : ways) columns.push_back(Column::text(way).ranked(rank_of(way)));
  Table table(columns, "Options of attention here; bf16, both passes" + only_forward());
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

void print_together(Output& out, const Json& json) {
  std::string names;
  const size_t count = json["options"].size();
  for (size_t i = 0; i < count; ++i) names += (i == 0 ? "" : i + 1 == count ? " and " : ", ") + json["options"][i].get<std::string>();
  Table table({Column::text("way").as_key(), Column::text("forward"), Column::text("backward")},
              fmt::format("{}{}; {}, headdim {}, under a causal mask", names, count > 1 ? " together" : "", json["dtype"].get<std::string>(),
                          json["headdim"].get<int64_t>()));
  for (const std::string& name : names_in(json["ways"], "name")) {
    std::vector<Cell> cells = {name};
    std::vector<std::string> reasons;
    for (const Json& row : json["ways"]) {
      if (row["name"] != name) continue;
      cells.push_back(yes_or_no(row["supported"].get<bool>()));
      if (row["supported"].get<bool>()) continue;
      const auto reason = row["reason"].get<std::string>();
      if (reasons.empty() || reasons.back() != reason) reasons.push_back(reason);  // said once for both passes
    }
    table.add(std::move(cells));
    for (std::string& reason : reasons) table.note(std::move(reason));
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
  struct Flags {
    std::vector<std::string> with;
    std::string dtype = name_of(DType::kBF16), json;
    int64_t headdim = 64;
    int arch = 0;
    OutputFlags output;
  };
  auto flags = std::make_shared<Flags>();
  std::vector<std::string> names;
  for (const OptionRow& option : kOptions) names.emplace_back(option.name);
  CLI::Option* with = command->add_option("--with", flags->with, "Say instead what computes these options together, with commas between them")
                          ->transform(one_of(names))
                          ->delimiter(',')
                          ->type_name("NAMES");
  command->add_option("--dtype", flags->dtype, "With --with: type of the tensors")
      ->transform(one_dtype_of({name_of(DType::kF32), name_of(DType::kBF16), name_of(DType::kF16), name_of(DType::kF64)}))
      ->type_name("NAME")
      ->capture_default_str()
      ->needs(with);
  command->add_option("--headdim", flags->headdim, "With --with: size of a head")
      ->check(whole_number(1))
      ->type_name("N")
      ->capture_default_str()
      ->needs(with);
  command
      ->add_option("--arch", flags->arch,
                   fmt::format("With --with: also of GPUs of this compute capability, which need not be here [{} without a GPU]", kUsualArch))
      ->check(whole_number(1, 1000))
      ->type_name("N")
      ->needs(with);
  command->add_option("--json", flags->json, "Write it as JSON to a file, or - for stdout")->type_name("FILE|-")->group("Output");
  flags->output.add_to(*command);
  command->footer("Example: fattn support --with softcap,dropout --headdim 128");
  command->callback([flags, &exit_code] {
    require_writable(flags->json);
    Together asked;
    for (const OptionRow& option : kOptions)
      if (std::find(flags->with.begin(), flags->with.end(), option.name) != flags->with.end()) asked.options.push_back(&option);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64})
      if (flags->dtype == name_of(dtype)) asked.dtype = dtype;
    asked.headdim = flags->headdim;
    asked.arch = flags->arch;
    if (asked.arch > 0) require_kernels(asked.arch);
    Json support = as_json();
    if (!asked.options.empty()) support["with"] = together_json(asked);
    Output out(flags->output, flags->json);
    if (flags->json != "-") asked.options.empty() ? print(out, support) : print_together(out, support["with"]);
    if (!flags->json.empty()) write_json(support, flags->json);
    exit_code = kExitFine;
  });
}

}  // namespace fattn::cli
