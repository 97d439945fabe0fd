// Everything in tokenizer.json that can change ids is either done or refused.
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "files/json.h"
#include "files/printable.h"
#include "gpt2/error.h"
#include "gpt2/tokenizer/byte_alphabet.h"
#include "gpt2/tokenizer/model_tokens.h"
#include "gpt2/tokenizer/utf8.h"
#include "gpt2/tokenizer/vocabulary_files.h"

namespace fattn::gpt2 {
namespace {

using Json = nlohmann::json;
using files::kind_of;
using files::printable;

constexpr size_t kLongestAdded = 4096;  // each place of a text may be compared with all of it

std::string show(const std::string& token) { return "'" + printable(token, 80) + "'"; }

// The value of a key; null where there is none.
const Json& value_of(const Json& object, const char* key) {
  static const Json none;
  const auto at = object.find(key);
  return at == object.end() ? none : *at;
}

bool flag_of(const Json& object, const char* key, bool otherwise, const char* where) {
  const Json& value = value_of(object, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) throw Error(std::string(where) + "." + key + " is " + kind_of(value) + "; it must be true or false");
  return value.get<bool>();
}

std::string type_of(const Json& object) {
  const Json& type = value_of(object, "type");
  return type.is_string() ? type.get<std::string>() : "";
}

// A part that is missing, or an empty sequence, does nothing; a sequence of one part is that part.
const Json& only_part(const Json& part, const char* list) {
  static const Json none;
  const Json& parts = value_of(part, list);
  if (!part.is_object() || type_of(part) != "Sequence" || !parts.is_array() || parts.size() > 1) return part;
  return parts.empty() ? none : parts[0];
}

// A template that adds nothing to a text: transformers writes one.
bool is_plain_template(const Json& part) {
  const Json& single = value_of(part, "single");
  return type_of(part) == "TemplateProcessing" && single.is_array() && single.size() == 1 && single[0].is_object() && single[0].contains("Sequence");
}

void require_byte_level_or_nothing(const Json& root, const char* key, const char* list) {
  const Json& part = only_part(value_of(root, key), list);
  if (part.is_null() || (part.is_object() && (type_of(part) == "ByteLevel" || is_plain_template(part)))) return;
  throw Error(std::string(key) + " is " + (part.is_object() ? "of type " + show(type_of(part)) : kind_of(part)) + "; GPT-2 has ByteLevel, or none");
}

void read_splitter(const Json& root, VocabularySource& source) {
  const Json& part = only_part(value_of(root, "pre_tokenizer"), "pretokenizers");
  if (!part.is_object() || type_of(part) != "ByteLevel")
    throw Error("pre_tokenizer is " + (part.is_object() ? "of type " + show(type_of(part)) : std::string(kind_of(part))) + "; GPT-2's is ByteLevel");
  if (!flag_of(part, "use_regex", true, "pre_tokenizer"))
    throw Error("pre_tokenizer.use_regex is false, so that the text is split in another way than GPT-2's; it must be true");
  source.add_prefix_space = flag_of(part, "add_prefix_space", true, "pre_tokenizer");
}

void refuse_unless_empty(const Json& model, const char* key, const char* why) {
  const Json& value = value_of(model, key);
  if (value.is_null() || value == "" || value == false || value == 0 || value == 0.0) return;
  throw Error(std::string("model.") + key + " is set: " + why);
}

AddedToken added_token(const Json& entry) {
  if (!entry.is_object()) throw Error(std::string("added_tokens holds ") + kind_of(entry) + "; each is an object with id and content");
  const Json &id = value_of(entry, "id"), &content = value_of(entry, "content");
  if (!content.is_string() || content.get_ref<const std::string&>().empty())
    throw Error("an added token has no content; it must be text that is not empty");
  AddedToken token;
  token.content = content.get<std::string>();
  if (token.content.size() > kLongestAdded)
    throw Error("an added token has " + std::to_string(token.content.size()) + " bytes; at most " + std::to_string(kLongestAdded) + " are allowed");
  if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX)
    throw Error("the added token " + show(token.content) + " has no id from 0 to 2^31 - 1");
  token.id = id.get<Token>();
  token.special = flag_of(entry, "special", false, "added_tokens");
  token.single_word = flag_of(entry, "single_word", false, "added_tokens");
  token.lstrip = flag_of(entry, "lstrip", false, "added_tokens");
  token.rstrip = flag_of(entry, "rstrip", false, "added_tokens");
  token.normalized = flag_of(entry, "normalized", !token.special, "added_tokens");
  return token;
}

std::vector<AddedToken> read_added(const Json& root, const ModelTokens& model) {
  const Json& entries = value_of(root, "added_tokens");
  if (!entries.is_null() && !entries.is_array()) throw Error(std::string("added_tokens is ") + kind_of(entries) + "; it must be an array");
  std::vector<AddedToken> tokens;
  std::set<std::string> seen;
  for (const Json& entry : entries) {
    tokens.push_back(added_token(entry));
    const AddedToken& token = tokens.back();
    if (!seen.insert(token.content).second) throw Error("added_tokens has " + show(token.content) + " twice");
    const Token in_model = model.find(token.content);
    if (in_model >= 0 && in_model != token.id)
      throw Error("the added token " + show(token.content) + " has the id " + std::to_string(token.id) + ", but " + std::to_string(in_model) +
                  " in the model's vocabulary");
  }
  return tokens;
}

void read_merges(const Json& model, ModelTokens& tokens) {
  const Json& merges = value_of(model, "merges");
  if (!merges.is_array()) throw Error(std::string("model.merges is ") + kind_of(merges) + "; it must be an array");
  for (const Json& merge : merges) {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      tokens.add_merge(merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>());
      continue;
    }
    const std::string text = merge.is_string() ? merge.get<std::string>() : "";
    const size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
      throw Error("model.merges holds " + (text.empty() ? std::string(kind_of(merge)) : show(text)) +
                  "; a merge is two tokens, as an array or as text with a space between them");
    tokens.add_merge(text.substr(0, space), text.substr(space + 1));
  }
}

}  // namespace

ModelTokens::ModelTokens(const Json& vocab, const char* where) {
  if (!vocab.is_object()) throw Error(std::string(where) + " is " + kind_of(vocab) + "; it must be an object of tokens and their ids");
  for (const auto& [token, id] : vocab.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX)
      throw Error("the token " + show(token) + " has the id " + printable(id.dump(), 40) + "; ids are whole numbers from 0 to 2^31 - 1");
    std::string bytes = bytes_of_token(token);
    bool in_text = true;
    if (bytes == token && !token.empty()) {  // of ASCII that stands for itself, or no text of the alphabet
      std::string letters;
      for (const char c : bytes) letters += letter_of_byte(static_cast<uint8_t>(c));
      in_text = letters == token;
    }
    source_.tokens.push_back({std::move(bytes), id.get<Token>(), in_text});
    ids_.emplace(token, id.get<Token>());
  }
}

Token ModelTokens::find(const std::string& token) const {
  const auto at = ids_.find(token);
  return at == ids_.end() ? -1 : at->second;
}

void ModelTokens::add_merge(const std::string& left, const std::string& right) {
  const auto id = [&](const std::string& token) {
    const Token found = find(token);
    if (found < 0)
      throw Error("the merge of " + show(left) + " and " + show(right) + " needs the token " + show(token) + ", which is not in the vocabulary");
    return found;
  };
  const auto rank = static_cast<uint32_t>(source_.merges.size());
  if (rank >= Vocabulary::kNoRank) throw Error("there are more merges than 2^31 - 2");
  source_.merges.push_back({id(left), id(right), id(left + right), rank});
}

VocabularySource parse_tokenizer_json(std::string_view text) {
  const Json root = files::parse_json(text);
  if (!root.is_object()) throw Error(std::string("tokenizer.json is ") + kind_of(root) + "; it must be an object");
  const Json& model = value_of(root, "model");
  if (!model.is_object()) throw Error(std::string("model is ") + kind_of(model) + "; it must be an object with vocab and merges");
  if (value_of(model, "type") != Json() && type_of(model) != "BPE") throw Error("model.type is " + show(type_of(model)) + "; GPT-2's is BPE");
  if (!only_part(value_of(root, "normalizer"), "normalizers").is_null())
    throw Error("normalizer is set, which changes the text before it is read; GPT-2 has none");
  require_byte_level_or_nothing(root, "post_processor", "processors");
  require_byte_level_or_nothing(root, "decoder", "decoders");
  refuse_unless_empty(model, "dropout", "merges left out at random give other ids each time; set it to null");
  refuse_unless_empty(model, "continuing_subword_prefix", "GPT-2 has none");
  refuse_unless_empty(model, "end_of_word_suffix", "GPT-2 has none");
  refuse_unless_empty(model, "byte_fallback", "a byte-level vocabulary needs none");
  ModelTokens tokens(value_of(model, "vocab"), "model.vocab");
  read_merges(model, tokens);
  std::vector<AddedToken> added = read_added(root, tokens);
  VocabularySource source = tokens.take();
  source.added = std::move(added);
  source.whole_pieces = flag_of(model, "ignore_merges", false, "model");
  read_splitter(root, source);
  return source;
}

}  // namespace fattn::gpt2
