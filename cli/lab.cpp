// Shows the steps one by one; on a terminal it waits for Enter before an answer and before the next step.
#include "cli/lab.h"

#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>
#include <string>

#include "cli/json_output.h"
#include "cli/lab_steps.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/target_flags.h"
#include "cli/terminal.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "fattn/device.hpp"
#include "fattn/system.hpp"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

struct LabFlags {
  int step = 0;
  std::string device = "cpu", language = "en", json;
  OutputFlags output;
};

std::string machine_of(const measure::Placement& place) {
  if (place.device == Device::kCuda) return printable(cuda::info(place.index).name, 80);
  const fattn_cpu_info cpu = cpu_info();
  return printable(cpu.model[0] != 0 ? cpu.model : "CPU", 80);
}

// Until Enter, or the end of the input.
void wait_for_enter(const Output& out, const std::string& prompt) {
  put(out.words(), prompt);
  for (int c = std::getchar(); c != '\n' && c != EOF;) c = std::getchar();
  if (std::feof(stdin)) put(out.words(), "\n");
}

int run(const LabFlags& flags) {
  require_writable(flags.json);
  Output out(flags.output, flags.json);
  LabStage stage{out, measure::placement_of(flags.device, true), flags.language == "zh-TW"};
  const bool asks = isatty(STDIN_FILENO) != 0 && is_terminal(out.words()) && !out.for_programs();
  const auto& steps = lab_steps();
  out.say(stage.words(LabText::kHead, machine_of(stage.place)));
  nlohmann::ordered_json shown = nlohmann::ordered_json::array();
  for (size_t i = 0; i < steps.size(); ++i) {
    if (flags.step > 0 && static_cast<size_t>(flags.step) != i + 1) continue;
    if (asks && !shown.empty()) wait_for_enter(out, stage.words(LabText::kEnterNext));
    const std::string title = stage.words(LabText::kStepTitle, i + 1, steps.size(), stage.words(steps[i].title));
    out.say("\n" + out.in(Mood::kTitle, title));
    nlohmann::ordered_json found = {{"step", i + 1}, {"name", steps[i].name}, {"title", stage.words(steps[i].title)}};
    found.update(steps[i].run(stage));
    out.say("\n" + out.in(Mood::kUnsure, stage.words(LabText::kQuestion)) + found.at("question").get<std::string>(), 2);
    if (asks) wait_for_enter(out, stage.words(LabText::kEnterAnswer));
    out.say(out.in(Mood::kGood, stage.words(LabText::kAnswer)) + found.at("answer").get<std::string>(), 2);
    shown.push_back(std::move(found));
  }
  if (flags.step == 0) out.say("\n" + stage.words(LabText::kEnd));
  if (!flags.json.empty())
    write_json({{"fattn_lab", 1},
                {"device", flags.device},
                {"language", flags.language},
                {"environment", measure::environment()},
                {"steps", std::move(shown)}},
               flags.json);
  return kExitFine;
}

}  // namespace

void add_lab(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("lab", "FlashAttention explained in five steps, each computed on this machine");
  auto flags = std::make_shared<LabFlags>();
  const auto last = static_cast<int64_t>(lab_steps().size());
  command->add_option("--step", flags->step, "One step alone")->check(whole_number(1, last))->type_name("N");
  command->add_option("--lang", flags->language, "The language")
      ->transform(one_of({"en", "zh-TW"}, {{"english", "en"}, {"zh", "zh-TW"}, {"chinese", "zh-TW"}}))
      ->type_name("NAME")
      ->capture_default_str();
  add_device(*command, flags->device);
  command->add_option("--json", flags->json, "Write what the steps found as JSON (docs/RECORD.md) to a file, or - for stdout")
      ->type_name("FILE|-")
      ->group("Output");
  flags->output.add_to(*command);
  command->footer(
      "1 the whole matrix; 2 tiles; 3 online softmax step by step on eight numbers; 4 the backward pass computes again; 5 skipping blocks under a "
      "mask. Every number is computed or measured when it is shown, and results are held against each other before they are timed. On a terminal it "
      "waits for Enter before each answer; in a pipe it goes on. docs/lab has the whole course.\n\n"
      "Examples:\n"
      "  fattn lab\n"
      "  fattn lab --step 3\n"
      "  fattn lab --lang zh-TW --device cuda");
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace fattn::cli
