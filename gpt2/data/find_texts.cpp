// Folders are walked in the order of names, so that the same texts give the same tokens everywhere.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "gpt2/data/texts.h"
#include "gpt2/error.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kLookedAt = 8192;  // bytes at the beginning of a file

// The beginning of a text: no zero byte, and hardly anything that is no UTF-8.
bool is_text(std::string_view beginning) {
  if (beginning.find('\0') != std::string_view::npos) return false;
  std::string repaired;
  append_repaired(beginning, false, repaired);
  size_t replaced = 0;
  for (size_t at = 0; (at = repaired.find("\xef\xbf\xbd", at)) != std::string::npos; at += 3) ++replaced;
  return replaced * 10 <= beginning.size();
}

bool has_ending(const std::string& path, const std::set<std::string>& endings) {
  std::string ending = fs::path(path).extension().string();
  for (char& c : ending)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return endings.count(ending) > 0;
}

bool is_lines_of_json(const std::string& path) { return has_ending(path, {".jsonl", ".ndjson"}); }

bool is_code(const std::string& path) {
  return has_ending(path, {".py",    ".pyi", ".c",     ".h",    ".cc",   ".cpp", ".cxx",  ".hpp", ".hh",   ".cu",   ".cuh", ".js",   ".mjs",
                           ".ts",    ".tsx", ".jsx",   ".java", ".go",   ".rs",  ".rb",   ".php", ".pl",   ".pm",   ".sh",  ".bash", ".lua",
                           ".swift", ".kt",  ".scala", ".hs",   ".ml",   ".r",   ".jl",   ".sql", ".cs",   ".m",    ".vim", ".el",   ".lisp",
                           ".clj",   ".erl", ".ex",    ".css",  ".html", ".xml", ".yaml", ".yml", ".toml", ".cmake"});
}

// What the first line of a file that has objects says.
TextFormat format_of_lines(const files::InputFile& file) {
  constexpr uint64_t kLongest = 1 << 26;
  std::string line;
  for (uint64_t at = 0; at < file.size();) {
    std::string part(std::min<uint64_t>(file.size() - at, 1 << 16), '\0');
    file.read_at(at, part.data(), part.size());
    at += part.size();
    const size_t begin = line.find_first_not_of(" \t\r\n") == std::string::npos ? part.find_first_not_of(" \t\r\n") : 0;
    if (begin == std::string::npos) continue;
    const size_t end = part.find('\n', begin);
    line += part.substr(begin, end == std::string::npos ? end : end - begin);
    if (end != std::string::npos || line.size() > kLongest) break;
  }
  std::string found;
  try {
    const nlohmann::json object = files::parse_json(line);
    if (object.is_object()) {
      if (object.contains("messages") || object.contains("conversations")) return TextFormat::kDialogue;
      if (object.contains("prompt") && object.contains("completion")) return TextFormat::kCompletion;
      if (object.contains("text")) return TextFormat::kLines;
      for (const auto& [key, value] : object.items()) found += (found.empty() ? "" : ", ") + key;
      found = "an object with the keys " + files::printable(found.empty() ? "(none)" : found, 200);
    } else {
      found = files::kind_of(object);
    }
  } catch (const files::JsonError& e) {
    found = std::string("no JSON: ") + e.what();
  }
  throw Error("the first line of '" + file.shown() + "' is " + found +
              "; allowed are objects with \"messages\" (dialogue), \"prompt\" and \"completion\", or \"text\"; name the format by --format");
}

class Finder {
 public:
  explicit Finder(TextFormat format) : format_(format) {}

  void add(const std::string& path) {
    std::error_code ignored;
    if (fs::is_directory(path, ignored))
      walk(path, 0);
    else
      add_file(path);
  }
  TextFiles take() { return std::move(found_); }

 private:
  void walk(const fs::path& folder, int depth) {
    constexpr int kDeepest = 100;
    if (depth > kDeepest) throw Error("'" + files::printable(folder.string()) + "' is nested deeper than " + std::to_string(kDeepest) + " folders");
    std::vector<fs::path> entries;
    std::error_code error;
    for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) entries.push_back(at->path());
    if (error) throw Error("the folder '" + files::printable(folder.string()) + "' cannot be read: " + error.message());
    std::sort(entries.begin(), entries.end());
    for (const fs::path& entry : entries) {
      std::error_code ignored;
      if (entry.filename().string()[0] == '.')
        ++found_.hidden;
      else if (fs::is_symlink(entry, ignored))
        ++found_.links;
      else if (fs::is_directory(entry, ignored))
        walk(entry, depth + 1);
      else if (fs::is_regular_file(entry, ignored))
        add_file(entry.string());
    }
  }

  void add_file(const std::string& path) {
    try {
      const files::InputFile file(path);
      if (file.size() == 0) {
        ++found_.empty;
        return;
      }
      std::string beginning(std::min(file.size(), kLookedAt), '\0');
      file.read_at(0, beginning.data(), beginning.size());
      if (!is_text(beginning)) {
        ++found_.binary;
        return;
      }
      TextFormat format = format_;
      if (format == TextFormat::kText && is_lines_of_json(path)) format = TextFormat::kLines;
      if (format == TextFormat::kAuto)
        format = is_lines_of_json(path) ? format_of_lines(file) : is_code(path) ? TextFormat::kCode : TextFormat::kText;
      found_.files.push_back({path, format, file.size()});
      found_.bytes += file.size();
    } catch (const files::FileError& e) {
      throw Error(e.what());
    }
  }

  const TextFormat format_;
  TextFiles found_;
};

}  // namespace

TextFiles find_texts(const std::vector<std::string>& inputs, TextFormat format) {
  Finder finder(format);
  for (const std::string& input : inputs) finder.add(input);
  TextFiles found = finder.take();
  if (found.files.empty()) {
    std::string left;
    for (const auto& [count, what] : {std::pair<uint64_t, const char*>{found.binary, " are no text"},
                                      {found.hidden, " are hidden"},
                                      {found.links, " are links"},
                                      {found.empty, " are empty"}})
      if (count > 0) left += (left.empty() ? ": " : ", ") + std::to_string(count) + what;
    throw Error("there is no text in what was given" + left + "; give files of text, or folders of them");
  }
  return found;
}

}  // namespace fattn::gpt2
