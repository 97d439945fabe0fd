#include "testing/run.h"

#include "testing/device_mirror.h"

namespace fattn::testing {

bool same_bits(const Outputs& a, const Outputs& b) {
  return same_bits(a.o, b.o) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv) &&
         same_bits(a.dbias, b.dbias) && same_bits(a.dsinks, b.dsinks);
}

Options options_of(const Case& c, const Target& target) {
  Options options;
  options.causal = c.causal;
  options.window_left = c.window_left;
  options.window_right = c.window_right;
  options.softcap = c.softcap;
  options.p_dropout = c.p_dropout;
  options.softmax_scale = c.softmax_scale;
  if (c.varlen) {
    options.max_seqlen_q = c.seqlen_q;
    options.max_seqlen_k = c.page_size > 0 ? 0 : c.seqlen_k;
  }
  options.backend = target.backend;
  options.algorithm = target.algorithm;
  options.cpu_isa = target.isa;
  options.num_threads = target.num_threads;
  options.deterministic = target.deterministic;
  options.batch_invariant = target.batch_invariant;
  options.cuda_level = target.cuda_level;
  return options;
}

Outputs run_passes(const Case& c, const CaseInputs& in, const Options& options, int device_index) {
  CaseForward out = make_forward(c);
  CaseGradients grads = c.backward ? make_gradients(c) : CaseGradients();
  const bool on_device = options.backend == Backend::kCuda;
  DeviceMirror mirror(device_index);
  if (on_device) {
    mirror.add(in.blocks);
    mirror.add(out.blocks);
    mirror.add(grads.blocks);
  }
  const auto at = [&](const Tensor& t) { return on_device ? mirror.at(t) : t; };
  forward(each_tensor(ForwardTensors{in.q, in.k, in.v, out.o, out.lse, {}, in.scores}, at), options);
  CaseForward saved;  // for the backward pass
  if (c.backward && c.fp32_outputs) {
    if (on_device) mirror.fetch();
    saved = make_saved(c);
    write(saved.o, read(out.o));
    write(saved.lse, read(out.lse));
    if (on_device) mirror.add(saved.blocks);
  }
  const CaseForward& given = c.fp32_outputs ? saved : out;
  if (c.backward)
    backward(each_tensor(BackwardTensors{in.q, in.k, in.v, given.o, given.lse, in.dout, grads.dq, grads.dk, grads.dv, in.scores, grads.dbias, in.dlse,
                                         grads.dsinks},
                         at),
             options);
  if (on_device) mirror.fetch();
  Outputs result;
  result.o = read(out.o);
  result.lse = read(out.lse);
  if (!c.backward) return result;
  result.dq = read(grads.dq);
  result.dk = read(grads.dk);
  result.dv = read(grads.dv);
  result.dbias = read(grads.dbias);
  result.dsinks = read(grads.dsinks);
  return result;
}

}  // namespace fattn::testing
