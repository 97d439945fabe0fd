// Runs cases on a backend and judges every output tensor against the float64 oracle.
//
// The bound. Let the yardstick be the largest error that standard attention, computed in the same dtype
// (standard_model.h), makes anywhere in a tensor. A result may be wrong by
//     2 * yardstick + floor for o, lse and weights,    3 * yardstick + floor for dq, dk, dv,
// The floor is one unit in the last place of the output's dtype at the tensor's largest magnitude, because the yardstick can
// be 0 by luck (one key: o = v exactly) while an output that is rounded once more may still differ by one unit; and at
// least what the last places of the fp32 sums inside make of it, each relative to the sum of the absolute terms:
//     o with dropout: two units of a fp32 weight, relative to o
//     lse: one unit of a score, and in the 16-bit dtypes an eighth of a unit of a weight    dv: one unit of a score (and of lse), times sum p |dout|
//     dq, dk: one unit of dP and one of rowsum(o dout) - dlse, times softmax_scale and sum p |k| or sum p |q|; dbias: times sum p
// (With one key dP - rowsum(o dout) is exactly 0 in the oracle, and no order of summation can promise that in fp32.)
//
// Of o, dq, dk and dv in 16 bits a peer is asked, too: attention with FlashAttention-2's rounding on the same inputs (standard_model.h, `fused`).
// Where scores are large its error is far below the textbook's, which rounds them. So the bound above holds with the peer's largest error as the
// yardstick, and half a unit beside the last places of the sums, which are rounded once more. (o in fp32: an eighth of a unit of a 16-bit weight,
// relative to o. A row's greatest weight is 1 in FlashAttention-2, and may be rounded here; no rounding of o hides that.) A second bound tells how
// weights were rounded, which a largest error does not. Let M be the mean square of its error, R the tensor's rows (of headdim elements), and S the
// standard deviation of the rows' mean squares. The mean square of a result's error may be
//     1.10^2 (M + 4 sqrt(2 / R) S) + U / R + (last places of the fp32 sums, as above)^2
// where those of dq and dk include one of a score, which is relative to a weight: biases of -6e4 leave weights 8 bits.
// 1.10 is what docs/NUMERICS.md promises. Rows, whose elements share their weights, are the samples: the mean squares of two computations that err
// alike differ by sqrt(2 / R) S in standard deviation, and by 4 of these in one tensor of 30,000. U / R is for tensors of a few rows, where M and S
// themselves are chance: one row may be off by a unit in the last place of each of its elements (U is the mean of their squares, in the row where
// that is largest). It fades with R, and as rounding once has a mean square of U / 12 it is nothing from some hundred rows on. dq and dk of calls
// with dropout, and in fp16 of algorithms v1 and v2 on a GPU beside bias, mask, documents and dbias or of unequal headdims above 128, may have 1.10
// sqrt(3 / 2) in place of 1.10: beside dS and the result, P is rounded for dS. Rows of the inputs `rising` and `constant` have the same weights, so
// that they are one sample: such cases have no second bound. Rows that have no finite number in the oracle or the peer, or an lse below -2^25, are
// not counted. Algorithm `standard` rounds all of its matrices, and so do other programs: they have the bound by standard attention only.
//
// An expected Inf or NaN must be met by an Inf or NaN, -inf in lse by -inf, an lse below -2^25 by one that is, too (in fp16 by one below -6e4); NaN
// passes nowhere else.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fattn/attention.hpp"
#include "testing/cases.h"

namespace fattn::testing {

// How a computation rounds, which says what it is held against beside standard attention.
enum class Rounding {
  kTextbook,          // every matrix is stored in the dtype: nothing else
  kFused,             // FlashAttention-2's rounding
  kOfRoundedWeights,  // the same, but that in fp16 beside terms of pairs and for some headdims dS is made of P as it was rounded for dv
};
// Of fattn's own algorithms.
Rounding rounding_of(Device device, Algorithm algorithm);

struct TensorVerdict {
  std::string tensor;  // "o", "lse", "dq", ...
  double error = 0;    // largest absolute error; infinity where a non-finite value is wrong
  double allowed = 0;
  double rms = 0;          // root of the mean square of the error, over the rows that are counted
  double rms_peer = 0;     // the peer's on the same rows; 0 where there is no second bound
  double rms_allowed = 0;  // infinity where there is no second bound
  bool pass = false;
  int64_t first_bad = -1;  // row-major index into the tensor's shape
  std::string message;     // of a failure: where, what was got, what was expected
};

struct CaseResult {
  std::vector<TensorVerdict> tensors;
  std::string skipped;          // the library's reason why it does not support the case; empty if it ran
  std::string failure;          // what went wrong beside the numbers: an error, a write outside an output; empty if nothing did
  bool passed() const;          // ran, and every verdict is a pass
  std::string summary() const;  // "o 1.2e-07 of 3.4e-07, ..." or the reason, for people
};

// Where to run.
struct Target {
  Backend backend = Backend::kAuto;
  Algorithm algorithm = Algorithm::kAuto;
  Isa isa = Isa::kAuto;
  int num_threads = 0;
  Device device = Device::kCpu;  // where the tensors are
  int device_index = 0;
  bool deterministic = false;
  int cuda_level = 0;
  bool batch_invariant = false;
};

// A case with its inputs, the oracle's outputs and the bounds: made once, run on any number of targets.
class PreparedCase {
 public:
  explicit PreparedCase(const Case& c);
  ~PreparedCase();
  PreparedCase(PreparedCase&&) noexcept;
  CaseResult run(const Target& target) const;
  const Case& description() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

// PreparedCase(c).run(target).
CaseResult run_case(const Case& c, const Target& target);

// Judges outputs that are already there, of any shape and layout, against the oracle on the same inputs.
// Absent tensors (lse, dbias) are not judged; options give the mask and the scale.
// The second bound is that of `rounding`, and none if the algorithm of options is `standard`; rms and rms_peer are there in any case.
std::vector<TensorVerdict> verify(const ForwardTensors& tensors, const Options& options, Rounding rounding = Rounding::kFused);
std::vector<TensorVerdict> verify(const BackwardTensors& tensors, const Options& options, Rounding rounding = Rounding::kFused);

}  // namespace fattn::testing
