// `fattn gpt2 init` and `fattn gpt2 export`: folders of weights, written whole.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_texts.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "gpt2/error.h"
#include "gpt2/weights/save.h"

namespace fattn::cli {
namespace {

using Texts = Gpt2Texts;

struct Gpt2SaveFlags {
  std::string preset = "gpt2", config, dtype, out, model, tokenizer, json;
  int64_t seed = 0, shard_mib = 0;
  std::string prefix = "keep";
  OutputFlags output;
};

int save(const Gpt2SaveFlags& flags, const char* command, const std::vector<gpt2::TensorSpec>& tensors, const gpt2::Fill& fill, const Texts& texts,
         gpt2::SaveOptions options) {
  require_writable(flags.json);
  const uint64_t bytes = gpt2::saved_bytes(tensors, options.dtype);
  options.most_bytes = static_cast<uint64_t>(flags.shard_mib) << 20;
  Progress progress("writing weights");
  progress.expect(static_cast<double>(bytes), false);
  options.progress = [&progress](uint64_t written) { progress.step(static_cast<double>(written)); };
  gpt2::save_model(flags.out, tensors, fill, texts, options);
  progress.wipe();
  int64_t parameters = 0;
  for (const gpt2::TensorSpec& tensor : tensors) parameters += tensor.size();
  const Output out(flags.output, flags.json);
  out.say(fmt::format("wrote {}: {} parameters in {}, {}", printable(flags.out), grouped_number(parameters), name_of(options.dtype),
                      bytes_text(static_cast<double>(bytes))));
  if (!flags.json.empty()) {
    nlohmann::ordered_json record = gpt2_record(command);
    record["output"] = printable(flags.out);
    record["parameters"] = parameters;
    record["dtype"] = name_of(options.dtype);
    record["bytes"] = bytes;
    write_json(record, flags.json);
  }
  return kExitFine;
}

int init(const Gpt2SaveFlags& flags) {
  const gpt2::Config config = flags.config.empty() ? gpt2::preset(flags.preset) : gpt2::parse_config(gpt2_read_text(flags.config));
  gpt2::SaveOptions options;
  options.dtype = gpt2_dtype(flags.dtype);
  Texts texts = gpt2_texts_beside(flags.tokenizer);
  texts.emplace_back("config.json",
                     flags.config.empty() ? gpt2::to_json(config, options.dtype) : gpt2::with_dtype(gpt2_read_text(flags.config), options.dtype));
  return save(flags, "init", gpt2::tensors_of(config), gpt2::fill_at_random(config, options.dtype, static_cast<uint64_t>(flags.seed)), texts,
              options);
}

int export_model(const Gpt2SaveFlags& flags) {
  const gpt2::Config config = gpt2::read_config(flags.model);
  const gpt2::Weights weights = gpt2::Weights::open(flags.model, config);
  gpt2::SaveOptions options;
  options.dtype = flags.dtype.empty() ? weights.tensors().front().dtype : gpt2_dtype(flags.dtype);
  options.prefix = flags.prefix == "keep" ? weights.has_prefix() : flags.prefix == "yes";
  Texts texts = gpt2_texts_beside(flags.model);
  texts.emplace_back("config.json", gpt2::with_dtype(gpt2_read_text(flags.model + "/config.json"), options.dtype));
  return save(flags, "export", gpt2::tensors_of(config), gpt2::fill_from(weights, options.dtype), texts, options);
}

void add_shared(CLI::App& command, Gpt2SaveFlags& flags) {
  command.add_option("--output,OUT", flags.out, "The folder to write, new or empty")->type_name("DIR")->required();
  command.add_option("--shard", flags.shard_mib, "Several files of at most so many MiB, with an index; 0: one file")
      ->check(whole_number(0, int64_t{1} << 30))
      ->type_name("MIB")
      ->capture_default_str();
}

}  // namespace

void add_gpt2_save(CLI::App& gpt2, int& exit_code) {
  CLI::App* init_command = gpt2.add_subcommand("init", "Write a model with random weights, as transformers begins with them");
  auto flags = std::make_shared<Gpt2SaveFlags>();
  flags->dtype = "fp32";
  add_shared(*init_command, *flags);
  CLI::Option* preset = init_command->add_option("--preset", flags->preset, "Its size")
                            ->transform(one_of(gpt2::preset_names()))
                            ->type_name("NAME")
                            ->capture_default_str();
  init_command->add_option("--config", flags->config, "Its size and switches, from a config.json")->type_name("FILE")->excludes(preset);
  init_command->add_option("--tokenizer", flags->tokenizer, "Copy the tokenizer of this folder")->type_name("DIR");
  init_command->add_option("--dtype", flags->dtype, "Of the weights")
      ->transform(one_dtype_of({"fp32", "fp16", "bf16"}))
      ->type_name("NAME")
      ->capture_default_str();
  init_command->add_option("--seed", flags->seed, "Another one, other weights; the same one, the same")
      ->check(whole_number(0))
      ->type_name("N")
      ->capture_default_str();
  add_gpt2_json(*init_command, flags->json);
  flags->output.add_to(*init_command);
  init_command->footer(
      "Matrices and embeddings are N(0, initializer_range), those that add to the residual stream by 1 / sqrt(2 n_layer); LayerNorm is 1 and 0, "
      "biases "
      "are 0. config.json may have, beside transformers' keys, num_key_value_heads (GQA), is_causal, position_embedding_type (absolute, rotary) and "
      "rope_theta.\n\nFor example:\n  fattn gpt2 init --preset gpt2 --dtype bf16 --seed 1 model");
  init_command->callback([flags, &exit_code] { exit_code = init(*flags); });

  CLI::App* export_command =
      gpt2.add_subcommand("export", "Write a model's weights in another dtype, with or without the prefix, in one file or several");
  auto export_flags = std::make_shared<Gpt2SaveFlags>();
  export_command->add_option("--model,MODEL", export_flags->model, "The model's folder")->type_name("DIR")->required();
  add_shared(*export_command, *export_flags);
  export_command->add_option("--dtype", export_flags->dtype, "Of the weights, rounded to the nearest [as they are]")
      ->transform(one_dtype_of({"fp32", "fp16", "bf16"}))
      ->type_name("NAME");
  export_command->add_option("--prefix", export_flags->prefix, "Whether names begin with \"transformer.\"")
      ->transform(one_of({"keep", "yes", "no"}))
      ->type_name("NAME")
      ->capture_default_str();
  add_gpt2_json(*export_command, export_flags->json);
  export_flags->output.add_to(*export_command);
  export_command->footer(
      "The tokenizer's files and generation_config.json go along. A number that is too large for fp16 is an error with its tensor's name.\n\nFor "
      "example:\n  fattn gpt2 export model half --dtype bf16\n  fattn gpt2 export model shards --shard 200");
  export_command->callback([export_flags, &exit_code] { exit_code = export_model(*export_flags); });
}

}  // namespace fattn::cli
