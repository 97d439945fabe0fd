#include "cli/training_group.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdlib>

#include "cli/gpt2.h"
#include "cli/sanitize.h"
#include "cli/training_flags.h"
#include "cli/training_setup.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "gpt2/data/token_set.h"
#include "gpt2/train/checkpoint_files.h"
#include "gpt2/train/options.h"

namespace fattn::cli {

void GroupFlags::add_to(CLI::App& command) {
  command.option_defaults()->group("Processes");
  command
      .add_option("--context-parallel", context_parallel,
                  "Processes that share each sequence, by ring attention; it divides their number, and the rest share batches")
      ->check(whole_number(1, 4096))
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--rendezvous", rendezvous,
                  "Where processes meet: a FILE that is not there yet, in a folder that all see, or HOST:PORT of rank 0 [MASTER_ADDR and the port "
                  "behind MASTER_PORT]")
      ->type_name("PLACE");
  command.add_option("--timeout", timeout, "Seconds that a process may be silent, or let others wait in a step, before all end with its rank")
      ->check(number(0.5, 86400))
      ->type_name("X")
      ->capture_default_str();
  command.add_option("--start-timeout", start_timeout, "Seconds to wait for all processes to come")
      ->check(number(0.5, 86400))
      ->type_name("X")
      ->capture_default_str();
  command.add_option("--bucket", bucket, "Gradients that are summed over processes at a time, while the backward pass goes on")
      ->transform(byte_size(4, "4 bytes or more"))
      ->type_name("SIZE")
      ->default_str("25MiB");
}

std::unique_ptr<gpt2::Group> join_group(const GroupFlags& flags, const gpt2::Launch& launch) {
  if (!launch.several()) return nullptr;
  gpt2::ControlOptions options;
  options.launch = launch;
  options.timeout = flags.timeout;
  options.start_timeout = flags.start_timeout;
  options.abandon = [rank = launch.rank](const std::string& why) {
    print_error(fmt::format("rank {}: {}; this process hung, and is ended", rank, printable(why)));
    std::_Exit(kExitBadInput);
  };
  return std::make_unique<gpt2::Group>(options);
}

gpt2::Facts facts_of(const TrainingFlags& flags, const TrainingSetup& setup) {
  const gpt2::RunDescription& run = setup.run;
  // First, because --accumulate depends on it where it is not given.
  gpt2::Facts facts{{"--context-parallel", std::to_string(flags.group.context_parallel)}};
  for (const auto& option : gpt2::flags_of(run.options)) facts.push_back(option);
  facts.emplace_back("the model", gpt2::to_json(run.config, run.options.dtype));
  facts.emplace_back("data of checksum", gpt2::hex_word(run.fingerprint));
  facts.emplace_back("validation of checksum", run.validation.empty() ? "none" : gpt2::hex_word(gpt2::TokenSet(run.validation).fingerprint()));
  // When ranks meet, and how much they sum at once.
  facts.emplace_back("--every", std::to_string(flags.every));
  facts.emplace_back("--eval-every", std::to_string(flags.eval_every));
  facts.emplace_back("--eval-batches", std::to_string(flags.eval_batches));
  facts.emplace_back("--bucket", std::to_string(flags.group.bucket));
  facts.emplace_back("a beginning at step", std::to_string(setup.from ? setup.from->state.step : 0));
  return facts;
}

}  // namespace fattn::cli
