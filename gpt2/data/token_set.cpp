// Which files a path means, and whether they belong together.
#include "gpt2/data/token_set.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "files/checksum.h"
#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;

std::string shown(const std::string& path) { return "'" + files::printable(path) + "'"; }

std::vector<std::string> files_in(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (at->path().extension() == ".tokens") found.push_back(at->path().string());
  std::sort(found.begin(), found.end());
  return found;
}

// Files of one folder are numbered from 0, and the last one says so.
void require_whole(const std::vector<std::unique_ptr<TokenFile>>& files, size_t from, const std::string& folder) {
  const auto missing = [&](const std::string& what) {
    throw Error("the folder " + shown(folder) + " lacks " + what +
                "; it was not copied whole, or tokenizing did not end: make it again by `fattn gpt2 tokenize`");
  };
  for (size_t i = from; i < files.size(); ++i) {
    const TokenTrailer& trailer = files[i]->trailer();
    if (trailer.shard != i - from) missing("its file number " + std::to_string(i - from));
    if (trailer.last && i + 1 < files.size())
      throw Error("the folder " + shown(folder) + " has files of two sets: " + files[i + 1]->shown() +
                  " follows the last of the first; remove one of them");
  }
  if (files.size() > from && !files.back()->trailer().last) missing("the last of its files");
}

}  // namespace

std::vector<std::string> token_files_of(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return {path};
  std::vector<std::string> found = files_in(path);
  if (found.empty()) found = files_in(fs::path(path) / "train");
  if (found.empty()) throw Error("the folder " + shown(path) + " has no token files (*.tokens); `fattn gpt2 tokenize` makes them");
  return found;
}

std::vector<std::string> validation_files_of(const std::string& path) { return files_in(fs::path(path) / "validation"); }

TokenSet::TokenSet(const std::vector<std::string>& paths) {
  if (paths.empty()) throw Error("no token files were given; give files, or a folder that `fattn gpt2 tokenize` made");
  for (const std::string& path : paths) {
    const size_t from = files_.size();
    for (const std::string& name : token_files_of(path)) files_.push_back(std::make_unique<TokenFile>(name));
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) require_whole(files_, from, path);
  }
  begin_ = {0};
  for (const auto& file : files_) {
    begin_.push_back(begin_.back() + file->tokens());
    const TokenTrailer &first = files_.front()->trailer(), &trailer = file->trailer();
    if (trailer.vocabulary != first.vocabulary || trailer.vocab_size != first.vocab_size || trailer.end_of_text != first.end_of_text)
      throw Error("'" + file->shown() + "' was made with another tokenizer than '" + files_.front()->shown() + "'; tokenize all texts with one");
  }
}

uint64_t TokenSet::documents() const {
  uint64_t sum = 0;
  for (const auto& file : files_) sum += file->trailer().documents;
  return sum;
}

uint64_t TokenSet::text_bytes() const {
  uint64_t sum = 0;
  for (const auto& file : files_) sum += file->trailer().text_bytes;
  return sum;
}

uint64_t TokenSet::fingerprint() const {
  std::string all;
  for (size_t i = 0; i < files_.size(); ++i) {
    const TokenTrailer& trailer = files_[i]->trailer();
    for (const uint64_t number : {trailer.tokens, trailer.documents, trailer.table_checksum, static_cast<uint64_t>(trailer.shard)})
      all.append(reinterpret_cast<const char*>(&number), sizeof number);
    all += fs::path(files_[i]->shown()).filename().string() + '\n';
  }
  return files::xxh64(all.data(), all.size());
}

void TokenSet::require_fits(int64_t vocab_size) const {
  for (const auto& file : files_) {
    const TokenTrailer& trailer = file->trailer();
    if (static_cast<int64_t>(trailer.largest_id) >= vocab_size)
      throw Error("'" + file->shown() + "' has the id " + std::to_string(trailer.largest_id) + " as its token number " +
                  std::to_string(trailer.largest_at) + ", but the model's vocabulary has " + std::to_string(vocab_size) +
                  " tokens; tokenize with the model's tokenizer, or make a model whose vocab_size is " + std::to_string(trailer.vocab_size));
  }
}

size_t TokenSet::file_of(uint64_t token) const {
  return static_cast<size_t>(std::upper_bound(begin_.begin(), begin_.end(), token) - begin_.begin()) - 1;
}

}  // namespace fattn::gpt2
