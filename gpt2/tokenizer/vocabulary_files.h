// Reads a vocabulary from the files that tokenizers are kept in. Nothing in them is trusted; every function throws Error.
#pragma once

#include <string>
#include <string_view>

#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

// Hugging Face's tokenizer.json: a BPE on bytes with GPT-2's splitter. What would give other ids is refused; truncation and padding are the
// caller's affair and are not applied.
VocabularySource parse_tokenizer_json(std::string_view json);

// GPT-2's own two files. "<|endoftext|>" is a special token where the vocabulary has it, as in `transformers`.
VocabularySource parse_vocab_and_merges(std::string_view vocab_json, std::string_view merges_txt);

// Lines of a token in base64 and its rank, which is its id. "<|endoftext|>" follows behind the last, as in `tiktoken`.
VocabularySource parse_tiktoken(std::string_view ranks);

// From a folder with tokenizer.json, or vocab.json and merges.txt, or one *.tiktoken file; or from one of these files.
VocabularySource read_vocabulary(const std::string& path);

}  // namespace fattn::gpt2
