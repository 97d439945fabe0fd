// `fattn gpt2 info`: what is in a model, and how much memory it takes.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "gpt2/memory.h"
#include "gpt2/weights/tensors.h"
#include "gpt2/weights/weights.h"

namespace fattn::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Gpt2InfoFlags {
  std::string model, dtype, json, device = "auto";
  bool memory = false, all = false;
  int64_t batch = 1, seqlen = 0;
  gpt2::SessionOptions session;  // the cache's pages; the rest is filled in
  OutputFlags output;
};

// A folder, or a preset, of which there are no files.
struct Gpt2Model {
  gpt2::Config config;
  std::vector<gpt2::Weight> weights;
  size_t files = 0;
  bool prefix = false;
};

Gpt2Model open_model(const std::string& name) {
  Gpt2Model model;
  std::error_code ignored;
  const std::vector<std::string>& presets = gpt2::preset_names();
  if (!std::filesystem::exists(name + "/config.json", ignored) && std::find(presets.begin(), presets.end(), name) != presets.end()) {
    model.config = gpt2::preset(name);
    for (const gpt2::TensorSpec& t : gpt2::tensors_of(model.config))
      model.weights.push_back({t.name, DType::kF32, t.shape, t.conv1d, nullptr, static_cast<uint64_t>(t.size()) * 4});
    return model;
  }
  model.config = gpt2::read_config(name);
  const gpt2::Weights weights = gpt2::Weights::open(name, model.config);
  model.weights = weights.tensors();
  for (gpt2::Weight& weight : model.weights) weight.data = nullptr;  // the files are closed again
  model.files = weights.files();
  model.prefix = weights.has_prefix();
  return model;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t n : shape) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return text;
}

// "h.*.ln_1.weight" of "h.3.ln_1.weight".
std::string without_layer(const std::string& name) {
  const size_t dot = name.compare(0, 2, "h.") == 0 ? name.find('.', 2) : std::string::npos;
  return dot == std::string::npos ? name : "h.*" + name.substr(dot);
}

struct Gpt2Row {
  std::string name;
  gpt2::Weight first;
  int64_t count = 0;
};

// Tensors of all layers that are alike are one row, unless each is asked for.
std::vector<Gpt2Row> rows_of(const Gpt2Model& model, bool all) {
  std::vector<Gpt2Row> rows;
  for (const gpt2::Weight& weight : model.weights) {
    const std::string name = all ? weight.name : without_layer(weight.name);
    auto row = std::find_if(rows.begin(), rows.end(), [&](const Gpt2Row& r) { return r.name == name && r.first.dtype == weight.dtype; });
    if (row == rows.end()) row = rows.insert(rows.end(), {name, weight, 0});
    ++row->count;
  }
  return rows;
}

void print_tensors(Output& out, const Gpt2Model& model, bool all) {
  Table table({Column::text("tensor").as_key(), Column::text("shape"), Column::text("dtype").ranked(1), Column::number("count").ranked(2),
               Column::number("parameters"), Column::number("share").ranked(3)},
              "Parameters by tensor");
  int64_t total = 0;
  for (const gpt2::Weight& weight : model.weights) total += weight.size();
  for (const Gpt2Row& row : rows_of(model, all)) {
    const int64_t n = row.first.size() * row.count;
    table.add({row.name, shape_text(row.first.shape), name_of(row.first.dtype), std::to_string(row.count), Cell(grouped_number(n), std::to_string(n)),
               percent_cell(static_cast<double>(n) / static_cast<double>(total))});
  }
  out.print(table);
}

std::string bytes_words(int64_t bytes) {
  return bytes < 1 << 20 ? fmt::format("{} bytes", grouped_number(bytes)) : bytes_text(static_cast<double>(bytes));
}

void print_memory(Output& out, const Gpt2Model& model, const std::vector<gpt2::MemoryUse>& uses, DType dtype, int64_t batch, int64_t seqlen,
                  std::optional<int> gpu) {
  Table table({Column::text("use").as_key(), Column::text("what").as_key(), Column::text("shape"), Column::number("memory", "bytes")},
              fmt::format("Memory in {}, batch {}, seqlen {}{}", name_of(dtype), batch, seqlen, gpu ? fmt::format(", on cuda:{}", *gpu) : ""));
  int64_t total = 0;
  for (const gpt2::MemoryUse& use : uses) {
    table.add({use.kind, use.what, use.shape, Cell(bytes_words(use.bytes), std::to_string(use.bytes))});
    if (__builtin_add_overflow(total, use.bytes, &total))
      throw CLI::ValidationError("--batch", "the sum of bytes does not fit 64 bits; use a smaller batch or seqlen");
  }
  out.print(table);
  out.say(fmt::format("\n{} in all, known before anything runs; {} of KV cache for each token. Prompts are computed in chunks of {} tokens.{}",
                      bytes_words(total), bytes_words(gpt2::kv_bytes_per_token(model.config, dtype)), gpu ? 8192 : 256,
                      gpu ? "" : " An embedding in the files' own dtype stays in the files."));
}

std::string config_words(const gpt2::Config& c) {
  return fmt::format("{} layers, {} heads of width {}{}, embedding {}, MLP {}, {} positions ({}), vocabulary {} (padded to {}), {}, {}", c.n_layer,
                     c.n_head, c.headdim(), c.n_kv_head == c.n_head ? "" : fmt::format(" ({} of k and v)", c.n_kv_head), c.n_embd, c.n_inner,
                     c.n_positions, c.positions == gpt2::Positions::kLearned ? "learned" : "rotary", c.vocab_size, c.padded_vocab(),
                     c.causal ? "causal" : "not causal", c.tied_head ? "the head is the embedding" : "a head of its own");
}

Json record_of(const Gpt2InfoFlags& flags, const Gpt2Model& model, const std::vector<gpt2::MemoryUse>& uses, DType dtype) {
  Json record = gpt2_record("info");
  record["model"] = printable(flags.model);
  record["config"] = Json::parse(gpt2::to_json(model.config, dtype));
  record["files"] = model.files;
  record["prefix"] = model.prefix;
  int64_t parameters = 0;
  Json tensors = Json::array();
  for (const gpt2::Weight& weight : model.weights) {
    parameters += weight.size();
    tensors.push_back(
        {{"name", weight.name}, {"shape", weight.shape}, {"dtype", name_of(weight.dtype)}, {"conv1d", weight.conv1d}, {"bytes", weight.bytes}});
  }
  record["parameters"] = parameters;
  record["tensors"] = tensors;
  record["memory"] = nullptr;
  if (!flags.memory) return record;
  const std::optional<int> gpu = gpt2_gpu(flags.device);
  Json memory = {{"dtype", name_of(dtype)}, {"device", gpu ? fmt::format("cuda:{}", *gpu) : "cpu"}, {"batch", flags.batch}, {"seqlen", flags.seqlen}};
  memory["kv_bytes_per_token"] = gpt2::kv_bytes_per_token(model.config, dtype);
  for (const gpt2::MemoryUse& use : uses) memory["uses"].push_back({{"use", use.kind}, {"what", use.what}, {"bytes", use.bytes}});
  record["memory"] = memory;
  return record;
}

int info(Gpt2InfoFlags flags) {
  require_writable(flags.json);
  const Gpt2Model model = open_model(flags.model);
  const DType dtype = flags.dtype.empty() ? model.weights[0].dtype : gpt2_dtype(flags.dtype);
  if (flags.seqlen == 0) flags.seqlen = model.config.n_positions;
  if (model.config.positions == gpt2::Positions::kLearned && flags.seqlen > model.config.n_positions)
    throw CLI::ValidationError("--seqlen", fmt::format("{} is more than the model's {} positions", flags.seqlen, model.config.n_positions));
  gpt2::SessionOptions& session = flags.session;
  session.batch = flags.batch;
  session.context = flags.seqlen;
  gpt2::Compute compute;
  if (flags.memory) compute.gpu = gpt2_gpu(flags.device);
  const std::vector<gpt2::MemoryUse> uses = flags.memory ? gpt2::memory_of(model.config, dtype, compute, session) : std::vector<gpt2::MemoryUse>();
  Output out(flags.output, flags.json);
  int64_t parameters = 0;
  for (const gpt2::Weight& weight : model.weights) parameters += weight.size();
  out.say(fmt::format("{}: {} parameters. {}.", printable(flags.model), grouped_number(parameters), config_words(model.config)));
  if (model.files > 0)
    out.say(fmt::format("Weights in {}; names {}.", model.files == 1 ? "one file" : std::to_string(model.files) + " files",
                        model.prefix ? "begin with \"transformer.\"" : "have no prefix"));
  else
    out.say("A preset: there are no files. `fattn gpt2 init` makes some with random weights.");
  print_tensors(out, model, flags.all);
  if (flags.memory) print_memory(out, model, uses, dtype, flags.batch, flags.seqlen, compute.gpu);
  if (!flags.json.empty()) write_json(record_of(flags, model, uses, dtype), flags.json);
  return kExitFine;
}

}  // namespace

void add_gpt2_info(CLI::App& gpt2, int& exit_code) {
  CLI::App* command = gpt2.add_subcommand("info", "Parameters by tensor and in all, dtypes, and the memory that a model takes");
  auto flags = std::make_shared<Gpt2InfoFlags>();
  command->add_option("--model,MODEL", flags->model, "A model's folder, or a preset: gpt2, gpt2-medium, gpt2-large, gpt2-xl")
      ->type_name("DIR")
      ->required();
  command->add_flag("--all", flags->all, "Every tensor of every layer, not one row for all layers");
  command->option_defaults()->group("Memory");
  command->add_flag("--memory", flags->memory, "Memory by use: weights, KV cache, activations, workspace");
  command->add_option("--batch", flags->batch, "Sequences at once")->check(whole_number(1))->type_name("N")->capture_default_str();
  command->add_option("--seqlen", flags->seqlen, "Tokens of each [the model's positions]")->check(whole_number(1))->type_name("N");
  add_gpt2_cache(*command, flags->session);
  add_gpt2_device(*command, flags->device);
  command->add_option("--dtype", flags->dtype, "What weights, cache and activations are in [the weights' own]")
      ->transform(one_dtype_of({"fp32", "fp16", "bf16"}))
      ->type_name("NAME");
  command->option_defaults()->group("Options");
  add_gpt2_json(*command, flags->json);
  flags->output.add_to(*command);
  command->footer(
      "Tensors that are missing, of another model or of another shape than config.json says are errors.\n\nFor example:\n  fattn gpt2 info gpt2 "
      "--memory\n  fattn gpt2 info MODEL --memory --batch 8 --seqlen 512 --dtype bf16");
  command->callback([flags, &exit_code] { exit_code = info(*flags); });
}

}  // namespace fattn::cli
