// What the library as a contestant is, wherever it computes: the tensors of a problem, plans made once, memory of its outputs.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "fattn/plan.hpp"
#include "measure/contestant.h"

namespace fattn::measure {

// Where the tensors of a call lie; null where that is not known yet.
struct Addresses {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr;
  void *o = nullptr, *lse = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr, *dbias = nullptr;
  ScoreAddresses scores = {};
};
ForwardTensors forward_tensors(const ProblemSpec& spec, const Placement& place, const Addresses& at = {});
BackwardTensors backward_tensors(const ProblemSpec& spec, const Placement& place, const Addresses& at = {});

class LibraryPlans {
 public:
  LibraryPlans(std::string provider, const Options& options, const Placement& place);

  const std::string& provider() const { return provider_; }
  Identity identity() const;
  void make(const ProblemSpec& spec, bool grad);
  size_t workspace_bytes(Pass pass) const;
  void execute(Pass pass, const Addresses& at, void* workspace, size_t bytes) const;

 private:
  std::string provider_;
  Options options_;
  Placement place_;
  ProblemSpec spec_;
  std::optional<Plan> forward_, backward_;
};

// Calls need(tensor, bytes) for what the pass writes; `Set` has o, lse, dq, dk, dv and dbias.
template <class Set, class Need>
void for_outputs(Set& outputs, const ProblemSpec& spec, Pass pass, const Need& need) {
  need(outputs.o, spec.o_bytes());
  need(outputs.lse, spec.lse_bytes());
  if (pass == Pass::kForward) return;
  need(outputs.dq, spec.q_bytes());
  need(outputs.dk, spec.k_bytes());
  need(outputs.dv, spec.v_bytes());
  if (spec.dbias) need(outputs.dbias, spec.bias_bytes());
}

// Runs body(); what it throws becomes a Failure.
template <class Body>
void guarded(const Body& body) {
  try {
    body();
  } catch (const std::exception& e) {
    throw as_failure(e);
  }
}

}  // namespace fattn::measure
