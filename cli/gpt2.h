// `fattn gpt2`: GPT-2's weights and text, in Hugging Face's files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/parser.h"
#include "fattn/types.hpp"

namespace fattn::cli {

void add_gpt2(CLI::App& app, int& exit_code);

// Its commands, a file each.
void add_gpt2_info(CLI::App& gpt2, int& exit_code);
void add_gpt2_save(CLI::App& gpt2, int& exit_code);  // init and export
void add_gpt2_text(CLI::App& gpt2, int& exit_code);  // encode and decode
void add_gpt2_generate(CLI::App& gpt2, int& exit_code);
void add_gpt2_eval(CLI::App& gpt2, int& exit_code);
void add_gpt2_compare(CLI::App& gpt2, int& exit_code);
void add_gpt2_bench(CLI::App& gpt2, int& exit_code);
void add_gpt2_train(CLI::App& gpt2, int& exit_code);
void add_gpt2_precision(CLI::App& gpt2, int& exit_code);
void add_gpt2_tokenize(CLI::App& gpt2, int& exit_code);
void add_gpt2_tokenizer(CLI::App& gpt2, int& exit_code);  // train

// What they share: how a record begins, the flag that asks for it, the number of threads, dtypes by name.
nlohmann::ordered_json gpt2_record(const char* command);
void add_gpt2_json(CLI::App& command, std::string& json);
void add_gpt2_threads(CLI::App& command, int& threads);
DType gpt2_dtype(const std::string& name);
std::string grouped_number(int64_t n);           // "124,439,808"
std::string gpt2_size_in_words(uint64_t bytes);  // "1,912 bytes", "70.6 MiB"

}  // namespace fattn::cli
