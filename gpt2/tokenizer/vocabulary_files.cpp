// Which files there are, and the two formats of plain text. tokenizer.json has a file of its own.
#include "gpt2/tokenizer/vocabulary_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "gpt2/error.h"
#include "gpt2/tokenizer/model_tokens.h"
#include "gpt2/tokenizer/tokenizer.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;
using files::printable;

constexpr uint64_t kMostBytes = uint64_t{1} << 26;  // of a file
constexpr const char* kEndOfText = "<|endoftext|>";

// Calls `each` with every line, without its end, and its number from 1.
template <class Each>
void for_lines(std::string_view text, const Each& each) {
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    each(line, number);
  }
}

std::string from_base64(std::string_view text, size_t line) {
  const auto fail = [&]() -> Error {
    return Error("line " + std::to_string(line) + " of the ranks begins with no base64: '" + printable(text, 40) + "'");
  };
  if (text.size() % 4 != 0 || text.empty()) throw fail();
  const size_t padding = text.substr(text.size() - 2) == "==" ? 2 : text.back() == '=' ? 1 : 0;
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    uint32_t value = 0;
    if (c >= 'A' && c <= 'Z')
      value = static_cast<uint32_t>(c - 'A');
    else if (c >= 'a' && c <= 'z')
      value = static_cast<uint32_t>(c - 'a') + 26;
    else if (c >= '0' && c <= '9')
      value = static_cast<uint32_t>(c - '0') + 52;
    else if (c == '+')
      value = 62;
    else if (c == '/')
      value = 63;
    else if (i < text.size() - padding)
      throw fail();
    bits = bits << 6 | value;
    if (i % 4 == 3)
      for (const int shift : {16, 8, 0}) bytes += static_cast<char>(bits >> shift & 255);
  }
  return bytes.substr(0, bytes.size() - padding);
}

// A number from 0 to 2^31 - 1, or -1.
int64_t number_of(std::string_view text) {
  if (text.empty() || text.size() > 10) return -1;
  int64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return -1;
    value = value * 10 + (c - '0');
  }
  return value <= INT32_MAX ? value : -1;
}

// Every way to part a token into two tokens is a merge: what tiktoken does with ranks alone.
void add_merges_of_ranks(VocabularySource& source) {
  std::unordered_map<std::string_view, Token> ranks;
  for (const SourceToken& token : source.tokens)
    if (!ranks.emplace(token.bytes, token.id).second) throw Error("the ranks have the token '" + printable(token.bytes, 80) + "' twice");
  constexpr size_t kLongest = 256;  // the time is the square of it
  for (const SourceToken& token : source.tokens) {
    const std::string_view bytes = token.bytes;
    if (bytes.size() > kLongest)
      throw Error("a token of the ranks has " + std::to_string(bytes.size()) + " bytes; at most " + std::to_string(kLongest) + " are allowed");
    for (size_t i = 1; i < bytes.size(); ++i) {
      const auto left = ranks.find(bytes.substr(0, i));
      if (left == ranks.end()) continue;
      const auto right = ranks.find(bytes.substr(i));
      if (right != ranks.end()) source.merges.push_back({left->second, right->second, token.id, static_cast<uint32_t>(token.id)});
    }
  }
}

template <class Parse>
VocabularySource with_name(const fs::path& path, const Parse& parse) {
  try {
    return parse(files::read_whole(path.string(), kMostBytes));
  } catch (const files::FileError& e) {
    throw Error(e.what());
  } catch (const std::runtime_error& e) {
    throw Error("'" + printable(path.string()) + "': " + e.what());
  }
}

VocabularySource read_two(const fs::path& vocab, const fs::path& merges) {
  return with_name(
      vocab, [&](const std::string& json) { return with_name(merges, [&](const std::string& text) { return parse_vocab_and_merges(json, text); }); });
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

VocabularySource read_folder(const fs::path& folder) {
  if (is_there(folder / "tokenizer.json")) return read_vocabulary((folder / "tokenizer.json").string());
  if (is_there(folder / "vocab.json")) return read_two(folder / "vocab.json", folder / "merges.txt");
  std::vector<fs::path> ranks;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (at->path().extension() == ".tiktoken") ranks.push_back(at->path());
  if (ranks.size() == 1) return read_vocabulary(ranks[0].string());
  throw Error("'" + printable(folder.string()) + "' has no tokenizer" +
              (ranks.size() > 1 ? " that is the only one: it has several *.tiktoken files" : "") +
              "; put tokenizer.json there, or vocab.json and merges.txt, or one *.tiktoken file");
}

}  // namespace

VocabularySource parse_vocab_and_merges(std::string_view vocab_json, std::string_view merges_txt) {
  const nlohmann::json vocab = files::parse_json(vocab_json);
  ModelTokens model(vocab, "vocab.json");
  for_lines(merges_txt, [&](std::string_view line, size_t number) {
    if (line.substr(0, 8) == "#version" || line.empty()) return;
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos || !is_utf8(line))
      throw Error("line " + std::to_string(number) + " of the merges is '" + printable(line, 80) +
                  "'; a merge is two tokens with a space between them");
    model.add_merge(std::string(line.substr(0, space)), std::string(line.substr(space + 1)));
  });
  const Token end = model.find(kEndOfText);
  VocabularySource source = model.take();
  if (end >= 0) source.added.push_back({kEndOfText, end, true});
  return source;
}

VocabularySource parse_tiktoken(std::string_view ranks) {
  VocabularySource source;
  source.whole_pieces = true;
  Token most = -1;
  for_lines(ranks, [&](std::string_view line, size_t number) {
    if (line.empty()) return;
    const size_t space = line.find(' ');
    const int64_t rank = space == std::string_view::npos ? -1 : number_of(line.substr(space + 1));
    if (rank < 0)
      throw Error("line " + std::to_string(number) + " of the ranks is '" + printable(line, 80) +
                  "'; a line is a token in base64, a space, and its rank from 0 to 2^31 - 1");
    source.tokens.push_back({from_base64(line.substr(0, space), number), static_cast<Token>(rank)});
    most = std::max(most, static_cast<Token>(rank));
  });
  if (source.tokens.empty()) throw Error("the file of ranks is empty");
  if (most == INT32_MAX) throw Error("the rank 2147483647 leaves no id for " + std::string(kEndOfText));
  add_merges_of_ranks(source);
  source.added.push_back({kEndOfText, most + 1, true});
  return source;
}

VocabularySource read_vocabulary(const std::string& path) {
  std::error_code ignored;
  const fs::path file(path);
  if (fs::is_directory(file, ignored)) return read_folder(file);
  const std::string name = file.filename().string();
  const bool is_vocab = name.size() >= 10 && name.compare(name.size() - 10, 10, "vocab.json") == 0;
  const bool is_merges = name.size() >= 10 && name.compare(name.size() - 10, 10, "merges.txt") == 0;
  if (is_vocab || is_merges) {
    const std::string front = name.substr(0, name.size() - 10);
    return read_two(file.parent_path() / (front + "vocab.json"), file.parent_path() / (front + "merges.txt"));
  }
  if (file.extension() == ".tiktoken") return with_name(file, [](const std::string& text) { return parse_tiktoken(text); });
  if (file.extension() == ".json" || !is_there(file)) return with_name(file, [](const std::string& text) { return parse_tokenizer_json(text); });
  throw Error("'" + printable(path) + "' has a name that no tokenizer has; allowed: a folder, tokenizer.json, vocab.json, merges.txt, *.tiktoken");
}

Tokenizer Tokenizer::load(const std::string& path) {
  VocabularySource source = read_vocabulary(path);
  try {
    return Tokenizer(std::move(source));
  } catch (const Error& e) {
    throw Error("'" + printable(path) + "': " + e.what());
  }
}

}  // namespace fattn::gpt2
