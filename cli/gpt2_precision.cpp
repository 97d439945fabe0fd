// `fattn gpt2 precision`: which part of a network is in which dtype, and why.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>
#include <string>

#include "cli/gpt2.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "gpt2/train/precision.h"

namespace fattn::cli {
namespace {

struct PrecisionFlags {
  std::string dtype = "bf16", json;
  OutputFlags output;
};

int precision(const PrecisionFlags& flags) {
  require_writable(flags.json);
  const gpt2::Precision table(gpt2_dtype(flags.dtype));
  Output out(flags.output, flags.json);
  Table rules({Column::text("part").as_key(), Column::text("stored"), Column::text("computed"), Column::text("summed")},
              fmt::format("Precision of GPT-2 with --dtype {}", flags.dtype));
  nlohmann::ordered_json record = gpt2_record("precision");
  record["dtype"] = flags.dtype;
  record["loss_scale"] = table.scales_loss();
  record["largest_safe_logit"] = gpt2::largest_safe_logit(table.network());
  record["rules"] = nlohmann::ordered_json::array();
  for (const gpt2::PrecisionRule& rule : table.rules()) {
    rules.add({rule.name, name_of(rule.stored), name_of(rule.computed), name_of(rule.summed)});
    rules.note(fmt::format("What: {}.", rule.what));
    rules.note(fmt::format("Why: {}.", rule.why));
    rules.note(fmt::format("Broken: {}.", rule.broken));
    record["rules"].push_back({{"part", rule.name},
                               {"what", rule.what},
                               {"stored", name_of(rule.stored)},
                               {"computed", name_of(rule.computed)},
                               {"summed", name_of(rule.summed)},
                               {"fixed", rule.fixed},
                               {"why", rule.why},
                               {"broken", rule.broken}});
  }
  out.print(rules);
  out.say("Computed is what goes into the arithmetic, summed what its sums are kept in.");
  out.say(table.scales_loss() ? "The loss is scaled: by 65,536 at first, half of it after a gradient that overflows." : "The loss is not scaled.");
  out.say("`fattn gpt2 train --track-precision FILE.jsonl` looks at every tensor of a run.");
  if (!flags.json.empty()) write_json(record, flags.json);
  return kExitFine;
}

}  // namespace

void add_gpt2_precision(CLI::App& gpt2, int& exit_code) {
  CLI::App* command = gpt2.add_subcommand("precision", "Which part of a network is stored, computed and summed in which dtype, and why");
  auto flags = std::make_shared<PrecisionFlags>();
  command->add_option("--dtype", flags->dtype, "Of the network, as train has it")
      ->transform(one_dtype_of({"fp32", "fp16", "bf16"}))
      ->type_name("NAME")
      ->capture_default_str();
  add_gpt2_json(*command, flags->json);
  flags->output.add_to(*command);
  command->footer(
      "The table is what the plans of a network ask. Each rule has a test that breaks it and shows the failure in numbers.\n\nFor example:\n"
      "  fattn gpt2 precision\n  fattn gpt2 precision --dtype fp16 --json -");
  command->callback([flags, &exit_code] { exit_code = precision(*flags); });
}

}  // namespace fattn::cli
