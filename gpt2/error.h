// What the GPT-2 layer throws.
#pragma once

#include <stdexcept>

namespace fattn::gpt2 {

// what() says what was given, what is allowed and what to do, in printable characters.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace fattn::gpt2
