// The one exception type of the C++ API, and the check that turns a C status into it.
#pragma once

#include <stdexcept>
#include <string>

#include "fattn/fattn.h"

namespace fattn {

enum class ErrorCode : int32_t {
  kInvalidArgument = FATTN_ERROR_INVALID_ARGUMENT,
  kUnsupported = FATTN_ERROR_UNSUPPORTED,
  kOutOfMemory = FATTN_ERROR_OUT_OF_MEMORY,
  kWorkspace = FATTN_ERROR_WORKSPACE,
  kAbi = FATTN_ERROR_ABI,
  kInternal = FATTN_ERROR_INTERNAL,
  kDevice = FATTN_ERROR_DEVICE,
  kCompile = FATTN_ERROR_COMPILE,
};

// what() says what was given, what is allowed and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

// Throws Error with the library's message unless status is FATTN_OK.
inline void check(fattn_status status) {
  if (status != FATTN_OK) throw Error(static_cast<ErrorCode>(status), fattn_last_error());
}

}  // namespace fattn
