// What a call throws, as text.
#pragma once

#include <exception>
#include <string>

#include "fattn/error.hpp"

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

// The same of the library's errors, the name of the code before it: "unsupported: backend cuda ...".
template <class Call>
std::string error_thrown_by(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(fattn_status_name(static_cast<fattn_status>(error.code()))) + ": " + error.what();
  }
  return "nothing was thrown";
}

}  // namespace fattn::test
