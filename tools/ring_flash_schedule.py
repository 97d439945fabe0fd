"""The schedule of the package ring-flash-attn (zigzag, causal) on fattn's kernels, for tools/bench_ring.py to compare with: what is different is the schedule alone.

Rank r of n has parts r and 2 n - 1 - r of 2 n. In each of n hops it computes what it sees of the keys at hand, while all of them go on to the next rank and others
come; the next hop begins when they have come. Each hop's results are rounded to the inputs' dtype and merged by torch's operators. Gradients of keys travel with
them in fp32, each rank adds its own, and after n hops they are home."""
import torch
import torch.distributed as distributed
from fattn._autograd import _run_backward, run_forward
from fattn._scores import NONE

OPTIONS = (None, False, False)  # softmax_scale, causal, deterministic


class _Pass:
    """Tensors on their way to the next rank, and the same of the rank before."""

    def __init__(self, *tensors):
        rank, n = distributed.get_rank(), distributed.get_world_size()
        self.sent = [x.contiguous() for x in tensors]
        self.came = [torch.empty_like(x) for x in self.sent]
        operations = [distributed.P2POp(distributed.isend, x, (rank + 1) % n) for x in self.sent] + [distributed.P2POp(distributed.irecv, x, (rank - 1) % n) for x in self.came]
        self.works = distributed.batch_isend_irecv(operations)

    def wait(self):
        for work in self.works:
            work.wait()
        return self.came


def _part(hop, rows):
    """Which queries see which keys in a hop, and whether under a causal mask."""
    whole, half = slice(None), rows // 2
    if hop == 0:
        return whole, whole, True
    return (whole, slice(0, half), False) if hop <= distributed.get_rank() else (slice(half, None), whole, False)


def _options(causal):
    return (OPTIONS[0], causal, *OPTIONS[2:])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.mine = k, v
        n, rows = distributed.get_world_size(), q.shape[1]
        for hop in range(n):
            going = _Pass(k, v) if hop + 1 < n else None
            queries, keys, causal = _part(hop, rows)
            o_hop, lse_hop = run_forward(q[:, queries], k[:, keys], v[:, keys], _options(causal), NONE)
            if hop == 0:
                o, lse = o_hop.float(), lse_hop
            else:
                o_rows, lse_rows = o[:, queries], lse[:, :, queries]
                weight = torch.sigmoid(lse_hop - lse_rows).transpose(1, 2).unsqueeze(3)
                o[:, queries] = o_rows - weight * (o_rows - o_hop.float())
                lse[:, :, queries] = torch.logaddexp(lse_rows, lse_hop)
            if going:
                k, v = going.wait()
        o = o.to(q.dtype)
        ctx.save_for_backward(q, o, lse)
        return o

    @staticmethod
    def backward(ctx, dout):
        (q, o, lse), (k, v) = ctx.saved_tensors, ctx.mine
        n, rows = distributed.get_world_size(), q.shape[1]
        dq, going_home = torch.zeros_like(q, dtype=torch.float32), None
        for hop in range(n):
            going = _Pass(k, v) if hop + 1 < n else None
            queries, keys, causal = _part(hop, rows)
            gradients = _run_backward(dout[:, queries].contiguous(), None, q[:, queries], k[:, keys], v[:, keys], o[:, queries], lse[:, :, queries].contiguous(), NONE, None, _options(causal))
            dq[:, queries] += gradients[0]
            dk, dv = going_home.wait() if going_home else (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
            dk[:, keys] += gradients[1]
            dv[:, keys] += gradients[2]
            if going:
                k, v = going.wait()
            going_home = _Pass(dk, dv)
        dk, dv = going_home.wait()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def ring_flash_attention(q, k, v):
    """q, k, v (batch, rows, heads, headdim): this rank's rows of a zigzag, of which every rank has as many. Causal."""
    if q.shape[1] != k.shape[1] or q.shape[1] % 2:
        raise ValueError(f"q has {q.shape[1]} rows and k {k.shape[1]}; this schedule takes as many of both, an even number, the same on every rank")
    return _Attention.apply(q, k, v)
