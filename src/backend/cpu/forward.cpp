// The forward pass: a task a tile of queries.
#include <algorithm>

#include "backend/cpu/call.h"

namespace fattn::core {

void cpu_forward(const CpuCall& call) {
  const Problem& p = call.p;
  const auto blocks_of = [&](const Sequence& s) { return (s.seqlen_q + call.c.rows - 1) / call.c.rows; };
  const Entries entries = call.entries([&](const Sequence& s) { return p.nheads * blocks_of(s); }, [](const Sequence& s) { return s.keys; });
  run_tasks(call.plan, "tiles of queries", entries.tasks(), [&](int64_t i, int worker) {
    const auto [n, index] = entries.task(i);
    const Sequence s = sequence_of(p, call.b, n);
    const int64_t blocks = blocks_of(s), block = blocks - 1 - index % blocks;  // a causal mask makes the last rows the longest: first
    const int64_t h = index / blocks, hk = h / p.group();
    ForwardTask t{};
    t.q = at(call.b.q, place(p.q, n, s.q_begin, h), call.element);
    t.k = at(call.b.k, place(p.k, n, s.k_begin, hk), call.element);
    t.v = at(call.b.v, place(p.v, n, s.k_begin, hk), call.element);
    t.o = at(call.b.o, place(p.o, n, s.q_begin, h), call.out_element);
    t.fp32_out = p.fp32_out;
    t.lse = p.want_lse ? at(static_cast<float*>(call.b.lse), place(p.lse, n, s.q_begin, h)) : nullptr;
    t.q_stride = p.q.row;
    t.k_stride = p.k.row;
    t.v_stride = p.v.row;
    t.o_stride = p.o.row;
    t.lse_stride = p.lse.row;
    t.row_begin = block * call.c.rows;
    t.row_end = std::min(s.seqlen_q, t.row_begin + call.c.rows);
    t.seqlen_k = s.keys;
    t.diagonal = call.diagonal(s);
    t.left_diagonal = call.left_diagonal(s);
    t.block_k = call.c.block_k;
    t.own_blocks = p.batch_invariant;
    t.headdim = static_cast<int>(p.headdim);
    t.headdim_v = static_cast<int>(p.headdim_v);
    t.scale = static_cast<float>(p.softmax_scale);
    t.softcap = static_cast<float>(p.softcap);
    t.pages = call.pages(n);
    t.inputs = call.inputs(n, h, s);
    t.scratch = call.scratch(worker);
    call.kernels.forward(call.dtype, t);
  });
  if (p.packed) finish_packed_rows(call);
}

}  // namespace fattn::core
