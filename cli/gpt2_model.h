// What the commands that run a GPT-2 share: its flags, and text and tokens from files.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/output.h"
#include "cli/parser.h"
#include "gpt2/model/session.h"
#include "gpt2/tokenizer/tokenizer.h"

namespace fattn::cli {

struct Gpt2ModelFlags {
  std::string model, dtype, algorithm = "auto", device = "auto";
  int threads = 0;

  void add_to(CLI::App& command, bool with_algorithm = true);
  void add_threads_to(CLI::App& command);  // and the device
  gpt2::Compute compute() const;
  Algorithm attention() const;
  gpt2::Model load() const;
  gpt2::Model load(DType dtype) const;
};

Algorithm gpt2_algorithm(const std::string& name);
// --device of all of them, and the CUDA device that it means; none: the CPU.
void add_gpt2_device(CLI::App& command, std::string& device);
std::optional<int> gpt2_gpu(const std::string& device);

// --page-size and --cache-tokens: a cache that sequences share.
void add_gpt2_cache(CLI::App& command, gpt2::SessionOptions& session);

// The tokenizer of `given`, or of the model's folder; none if that has none and `given` is empty.
std::optional<gpt2::Tokenizer> gpt2_tokenizer(const std::string& given, const std::string& model);

// Of these, in rising order, those that the model has positions for; all of its positions where it has fewer than the first.
std::vector<int64_t> lengths_within(std::vector<int64_t> lengths, const gpt2::Config& config);

// A file's bytes, or those of stdin, part by part as they come; pipes are welcome.
void gpt2_read_parts(const std::string& file, const std::function<void(std::string_view)>& take);
std::string gpt2_read_all(const std::string& file);
// Ids of tokens, as they come: numbers between spaces, commas, brackets and newlines. Throws Error for anything else.
class Gpt2IdReader {
 public:
  void feed(std::string_view text, const std::function<void(gpt2::Token)>& take);
  void finish(const std::function<void(gpt2::Token)>& take);

 private:
  [[noreturn]] void refuse() const;
  std::string word_;
};
std::vector<gpt2::Token> gpt2_ids(std::string_view text);
// put() as it is, but that a terminal is shown what would move its cursor instead of obeying it.
void gpt2_show(std::FILE* stream, std::string_view text);

// "fp32, 2 threads, avx512", "bf16, cuda:0, NVIDIA H200": how a model computes.
std::string gpt2_compute_words(const gpt2::Model& model);
nlohmann::ordered_json gpt2_compute_json(const gpt2::Model& model, const std::string& name);

}  // namespace fattn::cli
