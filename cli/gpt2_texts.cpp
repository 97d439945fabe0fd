// Which files these are, and their contents.
#include "cli/gpt2_texts.h"

#include <filesystem>
#include <system_error>

#include "cli/sanitize.h"
#include "files/input_file.h"
#include "gpt2/error.h"

namespace fattn::cli {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostBytes = uint64_t{1} << 28;
constexpr const char* kFilesBeside[] = {"tokenizer.json",    "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                                        "added_tokens.json", "generation_config.json"};

}  // namespace

std::string gpt2_read_text(const std::string& path) {
  try {
    return files::read_whole(path, kMostBytes);
  } catch (const files::FileError& e) {
    throw gpt2::Error(e.what());
  }
}

Gpt2Texts gpt2_texts_beside(const std::string& folder) {
  Gpt2Texts texts;
  std::error_code ignored;
  if (folder.empty()) return texts;
  if (!fs::is_directory(folder, ignored)) throw gpt2::Error("'" + printable(folder) + "' is no folder; give the folder of a tokenizer");
  for (const char* name : kFilesBeside)
    if (fs::exists(fs::path(folder) / name, ignored)) texts.emplace_back(name, gpt2_read_text(folder + "/" + name));
  for (fs::directory_iterator at(folder, ignored), end; at != end; at.increment(ignored))
    if (at->path().extension() == ".tiktoken") texts.emplace_back(at->path().filename().string(), gpt2_read_text(at->path().string()));
  return texts;
}

Gpt2Texts gpt2_tokenizer_texts(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return gpt2_texts_beside(path);
  const std::string name = fs::path(path).filename().string();
  if (fs::path(path).extension() == ".tiktoken") return {{name, gpt2_read_text(path)}};
  for (const std::string one : {"vocab.json", "merges.txt"}) {
    if (path.size() < one.size() || path.compare(path.size() - one.size(), one.size(), one) != 0) continue;
    const std::string front = path.substr(0, path.size() - one.size());
    return {{"vocab.json", gpt2_read_text(front + "vocab.json")}, {"merges.txt", gpt2_read_text(front + "merges.txt")}};
  }
  return {{"tokenizer.json", gpt2_read_text(path)}};
}

}  // namespace fattn::cli
