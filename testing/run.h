// Runs a case's tensors through the library and hands the outputs back as plain numbers, for tests of properties.
#pragma once

#include "fattn/attention.hpp"
#include "testing/check.h"
#include "testing/tensors.h"

namespace fattn::testing {

struct Outputs {
  Dense o, lse;
  Dense dq, dk, dv;  // empty if the case is forward only
  Dense dbias;       // empty, too, without bias
  Dense dsinks;      // or without sinks
};

bool same_bits(const Outputs& a, const Outputs& b);

// The options of a case on a target.
Options options_of(const Case& c, const Target& target);

// Forward, then backward with what forward returned. Throws Error. Backend cuda: on a copy of everything on that device.
Outputs run_passes(const Case& c, const CaseInputs& inputs, const Options& options, int device_index = 0);

}  // namespace fattn::testing
