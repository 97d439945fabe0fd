// Predictions come from the plan and the calibration of this machine; what is measured here is measured to score them.
#include "cli/predict.h"

#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <optional>

#include "cli/compile_beside.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/predict_report.h"
#include "cli/problem_flags.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/target_flags.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "lab/held_out.h"
#include "lab/record_file.h"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;
using lab::Calibration;
using lab::Scored;
using measure::Pass;

struct PredictFlags {
  ProblemFlags problem;
  OutputFlags output;
  std::string json, against;
  lab::HeldOutOptions held_out;
  bool explain = false, resume = false;
};

// The calibration with times of kernels; nothing where there is none, and `why`.
std::optional<Calibration> kept_calibration(const std::string& device, std::string& why) {
  try {
    Calibration c = lab::stored_calibration(device);
    if (c.kernels) return c;
    why = "the calibration of this machine has no times of kernels; `fattn calibrate --force` measures them in less than a minute";
  } catch (const lab::CalibrationError& error) {
    why = error.what();
  }
  return std::nullopt;
}

Calibration needed_calibration(const std::string& device) {
  std::string why;
  std::optional<Calibration> c = kept_calibration(device, why);
  if (!c) throw std::runtime_error(why);
  return *c;
}

Json record_of(const char* what, const std::vector<std::string>& flags, const Calibration* c, const std::vector<Scored>& rows) {
  Json all = Json::array(), scores = Json::object();
  for (const Scored& row : rows) all.push_back(lab::to_json(row));
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward})
    scores[measure::name_of(pass)] = lab::to_json(lab::score_of(rows, pass));
  return {{"fattn_predict", 1},
          {"what", what},
          {"flags", flags},
          {"complete", true},
          {"environment", measure::environment()},
          {"calibrated", c ? Json(c->environment.value("date", "")) : Json(nullptr)},
          {"held_out", nullptr},
          {"scores", scores},
          {"rows", all}};
}

int predict_problem(const PredictFlags& flags) {
  const ProblemFlags& problem = flags.problem;
  const measure::ProblemSpec spec = problem.spec();
  std::string why;
  const std::optional<Calibration> calibration = kept_calibration(problem.target.device, why);
  const lab::Predictor predictor(calibration ? *calibration->kernels : lab::KernelTimes(), problem.options(), problem.place());
  std::vector<lab::Prediction> predictions;
  std::vector<Scored> rows;
  for (const Pass pass : problem.passes()) {
    lab::Prediction p = predictor.of(spec, pass);
    if (!calibration) p.unknown = why;
    rows.push_back({p, std::nullopt, "", std::nullopt});
    predictions.push_back(std::move(p));
  }
  Output out(flags.output, flags.json);
  const bool on_cpu = !problem.target.on_cuda();
  out.say(fmt::format("{}: {}{}", describe(spec), printable(predictions.front().kernel), on_cpu ? "" : " on " + problem.target.device), 2);
  print_predictions(out, predictions, calibration ? &*calibration : nullptr);
  if (flags.explain && calibration)
    for (const lab::Prediction& p : predictions) print_amounts(out, p, *calibration);
  std::vector<std::string> repeating = problem.repeating_flags();
  const auto samples = std::find(repeating.begin(), repeating.end(), "--repeats");  // of measuring, which is not done
  repeating.erase(samples, repeating.end());
  if (!flags.json.empty()) write_json(record_of("problem", repeating, calibration ? &*calibration : nullptr, rows), flags.json);
  return kExitFine;
}

// Where a record's times are from: "cuda:0" if one of fattn's rows, or the flags that it was made with, say so. Else the CPU.
std::string device_of(const Json& record) {
  const auto gpu_named = [](const Json& name) {
    return name.is_string() && name != "cpu" && not_a_device(name.get<std::string>()).empty() ? name.get<std::string>() : std::string();
  };
  const auto list_of = [&](const char* name) {
    return record.is_object() && record.contains(name) && record[name].is_array() ? record[name] : Json();
  };
  for (const Json& row : list_of("rows"))
    if (row.is_object() && row.contains("device") && row.contains("provider") && row["provider"] == "fattn")
      if (const std::string gpu = gpu_named(row["device"]); !gpu.empty()) return gpu;
  const Json flags = list_of("flags");
  for (size_t i = 0; i + 1 < flags.size(); ++i)
    if (flags[i] == "--device")
      if (const std::string gpu = gpu_named(flags[i + 1]); !gpu.empty()) return gpu;
  return "cpu";
}

// Without `of_record` the device is what the flags say.
int predict_record(PredictFlags& flags, bool of_record) {
  const Json record = lab::read_json(flags.against);
  if (of_record) flags.problem.target.device = device_of(record);
  const Calibration calibration = needed_calibration(flags.problem.target.device);
  std::vector<Scored> rows;
  if (record.is_object() && record.contains("fattn_predict")) {
    const lab::Predictor predictor(*calibration.kernels, flags.problem.options(), flags.problem.place());
    if (!record.contains("rows") || !record["rows"].is_array()) throw std::runtime_error("'" + flags.against + "' has no 'rows'");
    for (const Json& row : record["rows"]) rows.push_back(lab::kept_row(row, predictor));
  } else {
    rows = lab::score_record(record, measure::environment(), *calibration.kernels, flags.problem.place());
  }
  Output out(flags.output, flags.json);
  out.say_line(fmt::format("{} rows of {}", rows.size(), printable(flags.against)));
  print_scores(out, rows);
  if (!flags.json.empty())
    write_json(record_of("against", {"--against", flags.against, "--device", flags.problem.target.device}, &calibration, rows), flags.json);
  return kExitFine;
}

// What of an earlier run of the same flags was measured; the file is not touched if it is another's.
std::vector<Scored> resumed(const PredictFlags& flags, const std::vector<measure::ProblemSpec>& specs, const Json& head,
                            const lab::Predictor& predictor) {
  std::vector<Scored> rows;
  if (!flags.resume || access(flags.json.c_str(), F_OK) != 0) return rows;
  const Json before = lab::read_json(flags.json);
  const bool same = before.is_object() && before.value("fattn_predict", 0) == 1 && before.contains("held_out") && before["held_out"] == head &&
                    before.contains("rows") && before["rows"].is_array();
  if (!same) throw std::runtime_error("'" + flags.json + "' is of other flags or another machine; name another file, or leave --resume out");
  for (const Json& row : before["rows"]) rows.push_back(lab::kept_row(row, predictor));
  if (rows.size() % 2 != 0 || rows.size() > 2 * specs.size()) throw std::runtime_error("'" + flags.json + "' has rows that are none of its shapes'");
  for (size_t i = 0; i < rows.size(); ++i)
    if (!(rows[i].prediction.spec == specs[i / 2])) throw std::runtime_error("'" + flags.json + "' has rows that are none of its shapes'");
  return rows;
}

int predict_held_out(const PredictFlags& flags) {
  require_writable(flags.json);
  if (flags.resume && (flags.json.empty() || flags.json == "-")) throw CLI::ValidationError("--resume", "needs --json FILE, where the rows are");
  const std::string& device = flags.problem.target.device;
  const Calibration calibration = needed_calibration(device);
  const measure::Placement place = flags.problem.place();
  const lab::HeldOutRule rule = lab::rule_of(calibration, flags.held_out, place);
  const std::vector<measure::ProblemSpec> specs = lab::held_out_shapes(flags.held_out, rule, place);
  const lab::Predictor predictor(*calibration.kernels, flags.problem.options(), place);
  Json machine = Json::object();
  for (const auto& [name, value] : calibration.machine) machine[name] = value;
  const Json head = {{"count", flags.held_out.count},
                     {"seed", flags.held_out.seed},
                     {"seconds", flags.held_out.seconds},
                     {"rule", rule.words},
                     {"machine", machine}};
  std::vector<Scored> rows = resumed(flags, specs, head, predictor);
  const std::vector<std::string> repeating = {
      "--held-out",         std::to_string(flags.held_out.count),      "--seed",   std::to_string(flags.held_out.seed),
      "--held-out-seconds", fmt::format("{}", flags.held_out.seconds), "--device", device};
  const auto write = [&](bool complete) {
    if (flags.json.empty() || (flags.json == "-" && !complete)) return;
    Json record = record_of("held_out", repeating, &calibration, rows);
    record["complete"] = complete;
    record["held_out"] = head;
    write_json(record, flags.json);
  };
  Output out(flags.output, flags.json);
  out.say("Shapes: " + rule.words + ".");
  if (!rows.empty()) out.say_line(fmt::format("{} of {} shapes were measured before.", rows.size() / 2, specs.size()));
  if (!flags.json.empty() && flags.json != "-")
    out.say_line(fmt::format("Every shape is kept in {} when it is done; after Ctrl-C --resume goes on.", printable(flags.json)));
  if (place.device == Device::kCuda && rows.size() < 2 * specs.size()) {
    Progress progress("compiling kernels", 100);
    int shown = 0;
    compile_beside(specs, flags.problem.options(), [&](double share) {
      for (; shown < static_cast<int>(100 * share); ++shown) progress.step();
    });
  }
  {
    Progress progress("held-out shapes");
    // What a shape takes: its warm-up and samples, and making its tensors.
    const auto weight = [&](const measure::ProblemSpec& spec) {
      double seconds = 0.02 + static_cast<double>(spec.input_bytes(true)) / 2e9;
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        const double once = [&] {
          try {
            return predictor.of(spec, pass).seconds.value_or(0.01);
          } catch (const std::exception&) {
            return 0.0;
          }
        }();
        seconds += std::max(0.1, 6 * once) + 2 * once;
      }
      return seconds;
    };
    std::vector<double> weights;
    for (size_t i = rows.size() / 2; i < specs.size(); ++i) weights.push_back(weight(specs[i]));
    for (const double w : weights) progress.expect(w, true);
    const size_t begin = rows.size() / 2;
    for (size_t i = begin; i < specs.size(); ++i) {
      for (Scored& row : lab::measure_shape(specs[i], predictor)) rows.push_back(std::move(row));
      write(false);
      progress.step(weights[i - begin]);
    }
  }
  print_scores(out, rows);
  write(true);
  return kExitFine;
}

}  // namespace

void add_predict(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("predict", "Say how long a problem takes and what memory, before it runs");
  auto flags = std::make_shared<PredictFlags>();
  flags->problem.add_problem_to(*command);
  flags->problem.target.add_to(*command);
  command->add_flag("--explain", flags->explain, "Print what of a kernel's work takes how long");
  command
      ->add_option("--against", flags->against,
                   "Instead of a problem: hold predictions against the times of a record, on its own device if --device is not given")
      ->type_name("FILE");
  CLI::Option* held_out = command
                              ->add_option("--held-out", flags->held_out.count,
                                           "Instead of a problem: draw N shapes, predict and measure each, and say how good the predictions are")
                              ->check(whole_number(1, 100000))
                              ->type_name("N");
  held_out->excludes("--against");
  command->add_option("--seed", flags->held_out.seed, "Held out: seed of the shapes")->capture_default_str()->needs(held_out);
  command
      ->add_option("--held-out-seconds", flags->held_out.seconds,
                   "Held out: draw again what takes longer, forward and backward, at 0.4 of the peak; the rule knows no times")
      ->check(number(0.001, 1000))
      ->capture_default_str()
      ->needs(held_out);
  command->add_flag("--resume", flags->resume, "Held out: go on with what --json FILE has of the same shapes")->needs(held_out);
  command->option_defaults()->group("Output");
  command->add_option("--json", flags->json, "Write the record (docs/RECORD.md) to a file, or - for stdout")->type_name("FILE|-");
  flags->output.add_to(*command);
  command->footer(
      "Time comes from the library's plan (kernel, tiles, split), counts of what it makes the kernel do, and what one of each takes on this machine, "
      "which `fattn calibrate` measures once. Memory comes from the plan alone. Nothing runs but with --held-out.\n\n"
      "Examples:\n"
      "  fattn predict --preset gpt2-small --explain\n"
      "  fattn predict --seqlen 16384 --nheads 16 --headdim 128 --causal --dtype bf16\n"
      "  fattn predict --against bench.json\n"
      "  fattn predict --held-out 200 --seed 7 --json held-out.json");
  command->callback([flags, held_out, command, &exit_code] {
    const bool of_record = !flags->against.empty(), of_shapes = held_out->count() > 0;
    if ((of_record || of_shapes) && flags->problem.problem_given())
      throw CLI::ValidationError(of_record ? "--against" : "--held-out", "has problems of its own; leave the flags of a problem out");
    require_writable(flags->json);
    exit_code = of_shapes ? predict_held_out(*flags) : of_record ? predict_record(*flags, command->count("--device") == 0) : predict_problem(*flags);
  });
}

}  // namespace fattn::cli
