// The alphabet in which GPT-2's vocabulary is written: a printable character for each byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fattn::gpt2 {

// The character of a byte, as UTF-8.
std::string letter_of_byte(uint8_t byte);

// The bytes that a token's text stands for; text with any other character stands for itself, as Hugging Face has it. `text` is valid UTF-8.
std::string bytes_of_token(std::string_view text);

}  // namespace fattn::gpt2
