// A tokenizer's files, as Hugging Face's `tokenizers` writes them.
#include <nlohmann/json.hpp>

#include "gpt2/tokenizer/byte_alphabet.h"
#include "gpt2/tokenizer/train.h"

namespace fattn::gpt2 {
namespace {

using Written = nlohmann::ordered_json;

// The name of a token: that of the first, which is in no text, is itself.
std::vector<std::string> names_of(const TrainedBpe& bpe) {
  std::vector<std::string> names = {bpe.tokens[0]};
  for (size_t id = 1; id < bpe.tokens.size(); ++id) {
    std::string& name = names.emplace_back();
    for (const char c : bpe.tokens[id]) name += letter_of_byte(static_cast<uint8_t>(c));
  }
  return names;
}

// Thousands of tokens: an ordered object would search through all of them for each.
std::string vocabulary_text(const std::vector<std::string>& names, const char* before, const char* between) {
  std::string text = "{";
  for (size_t id = 0; id < names.size(); ++id) text += (id > 0 ? "," : "") + (before + Written(names[id]).dump()) + between + std::to_string(id);
  return text;
}

}  // namespace

std::string vocab_json(const TrainedBpe& bpe) { return vocabulary_text(names_of(bpe), "", ":") + "}"; }

std::string merges_txt(const TrainedBpe& bpe) {
  const std::vector<std::string> names = names_of(bpe);
  std::string text = "#version: 0.2\n";
  for (const auto& [left, right] : bpe.merges) text += names[static_cast<size_t>(left)] + " " + names[static_cast<size_t>(right)] + "\n";
  return text;
}

std::string tokenizer_json(const TrainedBpe& bpe) {
  const std::vector<std::string> names = names_of(bpe);
  const Written end = {{"id", 0},         {"content", names[0]}, {"single_word", false}, {"lstrip", false},
                       {"rstrip", false}, {"normalized", false}, {"special", true}};
  const auto byte_level = [](bool prefix_space) {
    return Written{{"type", "ByteLevel"}, {"add_prefix_space", prefix_space}, {"trim_offsets", true}, {"use_regex", true}};
  };
  Written merges = Written::array();
  for (const auto& [left, right] : bpe.merges) merges.push_back({names[static_cast<size_t>(left)], names[static_cast<size_t>(right)]});
  const Written root = {{"version", "1.0"},
                        {"truncation", nullptr},
                        {"padding", nullptr},
                        {"added_tokens", Written::array({end})},
                        {"normalizer", nullptr},
                        {"pre_tokenizer", byte_level(false)},
                        {"post_processor", nullptr},
                        {"decoder", byte_level(true)},
                        {"model",
                         {{"type", "BPE"},
                          {"dropout", nullptr},
                          {"unk_token", nullptr},
                          {"continuing_subword_prefix", nullptr},
                          {"end_of_word_suffix", nullptr},
                          {"fuse_unk", false},
                          {"byte_fallback", false},
                          {"ignore_merges", false},
                          {"vocab", "the vocabulary"},
                          {"merges", std::move(merges)}}}};
  std::string text = root.dump(2);
  const std::string place = "\"the vocabulary\"";
  return text.replace(text.find(place), place.size(), vocabulary_text(names, "\n      ", ": ") + "\n    }") + "\n";
}

}  // namespace fattn::gpt2
