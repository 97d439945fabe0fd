// Tokens and merges written in the alphabet of bytes, as vocab.json and tokenizer.json have them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>

#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

class ModelTokens {
 public:
  // `vocab` is an object of tokens and their ids; `where` names it in errors. Throws Error.
  ModelTokens(const nlohmann::json& vocab, const char* where);

  // The next merge; throws Error if one of its tokens, or what they give, is not in the vocabulary.
  void add_merge(const std::string& left, const std::string& right);
  Token find(const std::string& token) const;  // -1 if there is none
  VocabularySource take() { return std::move(source_); }

 private:
  VocabularySource source_;
  std::unordered_map<std::string, Token> ids_;
};

}  // namespace fattn::gpt2
