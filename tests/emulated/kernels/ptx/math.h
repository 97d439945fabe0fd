// In place of kernels/ptx/math.h where the host runs device code.
#pragma once

#include "kernels/ptx/convert.h"

namespace fattn::ptx {

inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1 / x; }

template <class Element>
unsigned fma2(unsigned a, unsigned b, unsigned c) {
  return pack2<Element>(std::fma(low_float<Element>(a), low_float<Element>(b), low_float<Element>(c)),
                        std::fma(high_float<Element>(a), high_float<Element>(b), high_float<Element>(c)));
}

}  // namespace fattn::ptx
