// Flags, files and words that the commands of a model share.
#include "cli/gpt2_model.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "cli/contestants.h"
#include "cli/gpt2.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/terminal.h"
#include "cli/values.h"
#include "fattn/device.hpp"
#include "fattn/fattn.hpp"
#include "gpt2/error.h"

namespace fattn::cli {

void Gpt2ModelFlags::add_to(CLI::App& command, bool with_algorithm) {
  command.add_option("--model,MODEL", model, "A model's folder: config.json and model.safetensors")->type_name("DIR")->required();
  command.option_defaults()->group("How");
  command.add_option("--dtype", dtype, "What weights, cache and activations are in [the weights' own]")
      ->transform(one_dtype_of({"fp32", "fp16", "bf16"}))
      ->type_name("NAME");
  if (with_algorithm)
    command.add_option("--algorithm", algorithm, "Of attention")
        ->transform(one_of({"auto", "standard", "v1", "v2", "v3"}))
        ->type_name("NAME")
        ->capture_default_str();
  add_threads_to(command);
  command.option_defaults()->group("Options");
}
void Gpt2ModelFlags::add_threads_to(CLI::App& command) {
  add_gpt2_device(command, device);
  add_gpt2_threads(command, threads);
}

void add_gpt2_cache(CLI::App& command, gpt2::SessionOptions& session) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  command.add_option("--cache-tokens", session.cache_tokens, "Tokens that the cache of all holds together, in pages [batch x context]")
      ->check(whole_number(1, kMost))
      ->type_name("N");
  command.add_option("--page-size", session.page_size, "Tokens of a page; 0: each has a place for its context [0, with --cache-tokens 64]")
      ->check(whole_number(0, kMost))
      ->type_name("N");
}

void add_gpt2_device(CLI::App& command, std::string& device) {
  const auto not_a_device = [](const std::string& text) {
    const std::string digits = text.rfind("cuda:", 0) == 0 ? text.substr(5) : "";
    const bool numbered = !digits.empty() && digits.size() <= 3 && digits.find_first_not_of("0123456789") == std::string::npos;
    if (text == "auto" || text == "cpu" || text == "cuda" || numbered) return std::string();
    return "'" + printable(text, 40) + "' is no device; allowed: auto, cpu, cuda, cuda:0, cuda:1, ...";
  };
  command.add_option("--device", device, "cpu, cuda or cuda:INDEX; auto: a GPU where there is one")
      ->check(CLI::Validator(not_a_device, ""))
      ->type_name("DEVICE")
      ->capture_default_str();
}

std::optional<int> gpt2_gpu(const std::string& device) {
  if (device == "cpu") return std::nullopt;
  std::string reason;
  const int count = cuda::count(&reason);
  if (device == "auto") return count > 0 && cuda::info(0).capability_major >= 8 ? std::optional<int>(0) : std::nullopt;
  if (count == 0) throw gpt2::Error("--device " + device + ": " + reason);
  const int index = device.size() > 5 ? std::stoi(device.substr(5)) : 0;
  if (index >= count) throw gpt2::Error(fmt::format("--device {}: there are {} CUDA devices; allowed: cuda:0 to cuda:{}", device, count, count - 1));
  return index;
}

Algorithm gpt2_algorithm(const std::string& name) { return algorithm_named(name).value_or(Algorithm::kAuto); }
Algorithm Gpt2ModelFlags::attention() const { return gpt2_algorithm(algorithm); }

gpt2::Compute Gpt2ModelFlags::compute() const {
  gpt2::Compute compute;
  if (!dtype.empty()) compute.dtype = gpt2_dtype(dtype);
  compute.threads = threads;
  compute.gpu = gpt2_gpu(device);
  return compute;
}
gpt2::Model Gpt2ModelFlags::load() const { return gpt2::Model::load(model, compute()); }
gpt2::Model Gpt2ModelFlags::load(DType in) const {
  gpt2::Compute how = compute();
  how.dtype = in;
  return gpt2::Model::load(model, how);
}

std::optional<gpt2::Tokenizer> gpt2_tokenizer(const std::string& given, const std::string& model) {
  if (!given.empty()) return gpt2::Tokenizer::load(given);
  std::error_code ignored;
  for (const char* name : {"/tokenizer.json", "/vocab.json"})
    if (std::filesystem::exists(model + name, ignored)) return gpt2::Tokenizer::load(model);
  for (const auto& entry : std::filesystem::directory_iterator(model, ignored))
    if (entry.path().extension() == ".tiktoken") return gpt2::Tokenizer::load(model);
  return std::nullopt;
}

std::vector<int64_t> lengths_within(std::vector<int64_t> lengths, const gpt2::Config& config) {
  while (lengths.size() > 1 && lengths.back() > config.n_positions) lengths.pop_back();
  lengths.front() = std::min(lengths.front(), config.n_positions);
  return lengths;
}

void gpt2_read_parts(const std::string& file, const std::function<void(std::string_view)>& take) {
  const bool is_stdin = file.empty() || file == "-";
  const int fd = is_stdin ? STDIN_FILENO : open(file.c_str(), O_RDONLY | O_CLOEXEC);
  const std::string shown = is_stdin ? "stdin" : "'" + printable(file) + "'";
  if (fd < 0) throw std::runtime_error("cannot open " + shown + ": " + std::strerror(errno));
  std::string part(1 << 16, '\0');
  ssize_t n = 0;
  while ((n = read(fd, part.data(), part.size())) != 0) {
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;
    take(std::string_view(part).substr(0, static_cast<size_t>(n)));
  }
  const int error = errno;
  if (!is_stdin) close(fd);
  if (n < 0) throw std::runtime_error("cannot read " + shown + ": " + std::strerror(error));
}

std::string gpt2_read_all(const std::string& file) {
  std::string text;
  gpt2_read_parts(file, [&](std::string_view part) { text += part; });
  return text;
}

void Gpt2IdReader::feed(std::string_view text, const std::function<void(gpt2::Token)>& take) {
  for (const char c : text) {
    if (c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == ',' || c == '[' || c == ']') {
      finish(take);
    } else {
      word_ += c;
      if (word_.size() > 20) refuse();
    }
  }
}
void Gpt2IdReader::finish(const std::function<void(gpt2::Token)>& take) {
  if (word_.empty()) return;
  int64_t id = 0;
  for (const char c : word_) {
    if (c < '0' || c > '9' || id > INT32_MAX) refuse();
    id = id * 10 + (c - '0');
  }
  if (id > INT32_MAX) refuse();
  word_.clear();
  take(static_cast<gpt2::Token>(id));
}
void Gpt2IdReader::refuse() const {
  throw gpt2::Error("'" + printable(word_, 40) + "' is no token's id; ids are whole numbers from 0 on, with spaces between them");
}

std::vector<gpt2::Token> gpt2_ids(std::string_view text) {
  std::vector<gpt2::Token> ids;
  Gpt2IdReader reader;
  const auto take = [&](gpt2::Token id) { ids.push_back(id); };
  reader.feed(text, take);
  reader.finish(take);
  return ids;
}

void gpt2_show(std::FILE* stream, std::string_view text) {
  if (!is_terminal(stream)) return put(stream, text);
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find_first_of("\n\t", begin), text.size());
    put(stream, printable(text.substr(begin, end - begin), text.size() * 8));
    if (end < text.size()) put(stream, text.substr(end, 1));
    begin = end + 1;
  }
}

namespace {
Isa isa_of(const gpt2::Model& model) { return model.compute().isa != Isa::kAuto ? model.compute().isa : static_cast<Isa>(cpu_info().isa_default); }
int threads_of(const gpt2::Model& model) { return model.compute().threads > 0 ? model.compute().threads : cpu_info().usable_threads; }
}  // namespace

std::string gpt2_compute_words(const gpt2::Model& model) {
  if (const auto& gpu = model.compute().gpu) return fmt::format("{}, cuda:{}, {}", name_of(model.dtype()), *gpu, printable(cuda::info(*gpu).name));
  const int threads = threads_of(model);
  return fmt::format("{}, {} thread{}, {}", name_of(model.dtype()), threads, threads == 1 ? "" : "s", name_of(isa_of(model)));
}

nlohmann::ordered_json gpt2_compute_json(const gpt2::Model& model, const std::string& name) {
  const std::optional<int> gpu = model.compute().gpu;
  return {{"model", printable(name)},
          {"dtype", name_of(model.dtype())},
          {"device", gpu ? fmt::format("cuda:{}", *gpu) : "cpu"},
          {"device_name", gpu ? nlohmann::ordered_json(printable(cuda::info(*gpu).name)) : nlohmann::ordered_json()},
          {"threads", threads_of(model)},
          {"isa", name_of(isa_of(model))}};
}

}  // namespace fattn::cli
