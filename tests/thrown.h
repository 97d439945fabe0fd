// What a call throws, as text.
#pragma once

#include <exception>
#include <string>

namespace fattn::test {

template <class Call>
std::string thrown_by(const Call& call, const std::string& if_nothing = "nothing was thrown") {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return if_nothing;
}

}  // namespace fattn::test
