// The small files beside a model's weights, which are copied as they are: its tokenizer, above all.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fattn::cli {

using Gpt2Texts = std::vector<std::pair<std::string, std::string>>;  // names and contents

std::string gpt2_read_text(const std::string& path);  // throws gpt2::Error

// Those of a folder that belong to a tokenizer or say how to generate; none for "".
Gpt2Texts gpt2_texts_beside(const std::string& folder);
// What a tokenizer that was named by its folder or one of its files is made of, under the names that it has in a folder of its own.
Gpt2Texts gpt2_tokenizer_texts(const std::string& path);

}  // namespace fattn::cli
