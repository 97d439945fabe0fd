#include "testing/run.h"

namespace fattn::testing {

bool same_bits(const Outputs& a, const Outputs& b) {
  return same_bits(a.o, b.o) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

Options options_of(const Case& c, const Target& target) {
  Options options;
  options.causal = c.causal;
  options.softmax_scale = c.softmax_scale;
  options.backend = target.backend;
  options.algorithm = target.algorithm;
  options.cpu_isa = target.isa;
  options.num_threads = target.num_threads;
  return options;
}

Outputs run_passes(const Case& c, const CaseInputs& in, const Options& options) {
  Outputs result;
  const CaseForward out = make_forward(c);
  ForwardTensors t;
  t.q = in.q;
  t.k = in.k;
  t.v = in.v;
  t.o = out.o;
  t.lse = out.lse;
  forward(t, options);
  result.o = read(out.o);
  result.lse = read(out.lse);
  if (!c.backward) return result;
  const CaseGradients grads = make_gradients(c);
  backward({in.q, in.k, in.v, out.o, out.lse, in.dout, grads.dq, grads.dk, grads.dv}, options);
  result.dq = read(grads.dq);
  result.dk = read(grads.dk);
  result.dv = read(grads.dv);
  return result;
}

}  // namespace fattn::testing
