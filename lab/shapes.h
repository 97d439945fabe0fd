// Problems drawn at random, the same for the same seed on every machine: of sizes that real calls have, log-uniform, odd ones too.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "measure/problem.h"

namespace fattn::lab {

struct ShapeRange {
  std::vector<DType> dtypes = {DType::kF32, DType::kF16, DType::kBF16, DType::kF64};
  std::vector<int64_t> headdims;  // one of these; empty: multiples of 8 from 32 to 256, log-uniform
  double decode = 0.25;           // the share of problems with 1 to 8 queries
};

// What may be drawn: a shape beyond is drawn again, whatever it would take, so that shapes are chosen by their sizes and never by a result.
struct ShapeLimit {
  double flops = 0, flops_f32 = 0, flops_f64 = 0;  // forward and backward together: of 16-bit dtypes, fp32 and fp64
  int64_t bytes = 0;                               // of all tensors
  bool admits(const measure::ProblemSpec& spec) const;
};
// Of calls, forward and backward together, that last some `seconds` where `peak` FLOP/s are done at 0.4 of it (fp64, on the reference backend: at 1
// GFLOP/s), in a quarter of `memory_bytes`. `peak_f32`: of fp32.
ShapeLimit limit_of(double seconds, double peak, double peak_f32, int64_t memory_bytes);

class Shapes {
 public:
  Shapes(uint64_t seed, ShapeRange range) : generator_(seed), range_(std::move(range)) {}
  // batch 1..32, nheads 1..64, half of them with fewer heads of keys, seqlen 1..16384, causal or not.
  measure::ProblemSpec any();
  measure::ProblemSpec within(const ShapeLimit& limit);

 private:
  double uniform() { return static_cast<double>(generator_() >> 11) * 0x1p-53; }
  int64_t log_uniform(int64_t least, int64_t most);

  std::mt19937_64 generator_;
  ShapeRange range_;
};

}  // namespace fattn::lab
