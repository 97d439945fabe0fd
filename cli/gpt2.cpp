// The commands of GPT-2, and what they share.
#include "cli/gpt2.h"

#include <CLI/CLI.hpp>
#include <string>

#include "cli/table.h"
#include "cli/values.h"

namespace fattn::cli {

nlohmann::ordered_json gpt2_record(const char* command) { return {{"fattn_gpt2", 1}, {"command", command}}; }

void add_gpt2_json(CLI::App& command, std::string& json) {
  command.add_option("--json", json, "Write what was found or done (docs/RECORD.md) to a file, or - for stdout")
      ->type_name("FILE|-")
      ->group("Output");
}

void add_gpt2_threads(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "Threads; 0: all that affinity and the control group allow")
      ->check(whole_number(0, 4096))
      ->type_name("N")
      ->capture_default_str();
}

DType gpt2_dtype(const std::string& name) { return name == "fp32" ? DType::kF32 : name == "fp16" ? DType::kF16 : DType::kBF16; }

std::string grouped_number(int64_t n) {
  std::string text = std::to_string(n);
  for (size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

std::string gpt2_size_in_words(uint64_t bytes) {
  return bytes < 1 << 20 ? grouped_number(static_cast<int64_t>(bytes)) + " bytes" : bytes_text(static_cast<double>(bytes));
}

void add_gpt2(CLI::App& app, int& exit_code) {
  CLI::App* gpt2 = app.add_subcommand("gpt2", "GPT-2 without torch: its weights, its tokenizer and its text, from Hugging Face's files");
  gpt2->require_subcommand(1);
  add_gpt2_info(*gpt2, exit_code);
  add_gpt2_save(*gpt2, exit_code);
  add_gpt2_text(*gpt2, exit_code);
  add_gpt2_generate(*gpt2, exit_code);
  add_gpt2_eval(*gpt2, exit_code);
  add_gpt2_compare(*gpt2, exit_code);
  add_gpt2_bench(*gpt2, exit_code);
  add_gpt2_train(*gpt2, exit_code);
  add_gpt2_precision(*gpt2, exit_code);
  add_gpt2_tokenize(*gpt2, exit_code);
  add_gpt2_tokenizer(*gpt2, exit_code);
  gpt2->footer(
      "A model is a folder with config.json and model.safetensors, or the shards that model.safetensors.index.json names. A tokenizer is a folder "
      "with "
      "tokenizer.json, or vocab.json and merges.txt, or one *.tiktoken file. Every one of these commands takes --json FILE|-.\n\nFor example:\n"
      "  fattn gpt2 info gpt2 --memory\n"
      "  fattn gpt2 init --preset gpt2 --seed 1 model\n"
      "  fattn gpt2 generate gpt2 'Hello world' -n 20");
}

}  // namespace fattn::cli
