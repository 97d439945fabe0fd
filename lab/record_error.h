// What is wrong with a record.
#pragma once

#include <stdexcept>

namespace fattn::lab {

// In one line: where, what was found, what is allowed. Text of the record in it is not yet printable.
struct RecordError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace fattn::lab
