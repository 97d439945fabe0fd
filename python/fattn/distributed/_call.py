"""A call of ring_attention with gradients: heads are exchanged for rows where the method does that, the ring is carried out, heads go back."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import _ring
from ._compute import accumulator
from ._heads import Heads
from ._ring import Plan, Tensors


class Call(NamedTuple):
    heads: Heads | None  # of "ulysses" and "mixed"
    plan: Plan


@contextlib.contextmanager
def _exchanging(call: Call) -> Iterator[None]:
    """Heads and rows are exchanged inside."""
    with call.plan.timeline.span("heads"):
        call.heads.begin()
        yield
        call.heads.end()


def _brought(call: Call, t: Tensors) -> Tensors:
    """The heads of this rank, of the rows of all that exchange."""
    heads = call.heads
    if heads is None:
        return t
    with _exchanging(call):
        brought = t._replace(q=heads.to_heads(t.q), k=heads.to_heads(t.k, True), v=heads.to_heads(t.v, True),
                             slopes=None if t.slopes is None else t.slopes[:, heads.mine], sinks=None if t.sinks is None else t.sinks[heads.mine])
        # Its gradient is summed over what ranks return where heads or rows share it, and none of these should round it. (How many rows it has, a rank cannot
        # tell for others.)
        bias = None if t.bias is None else t.bias.to(accumulator(t.q.dtype))
        brought = brought._replace(bias=heads.pairs_to_heads(bias, t.q.shape[1]), mask=heads.pairs_to_heads(t.mask, t.q.shape[1]))
        if t.document_q is not None:
            brought = brought._replace(document_q=heads.of_rows(t.document_q), document_k=heads.of_rows(t.document_k, True))
    return brought


def forward(call: Call, tensors: Tensors) -> tuple[Tensors, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors, o and lse as the ring has them, which the backward pass wants; o and lse."""
    call.plan.timeline.begins("forward")
    brought = _brought(call, tensors)
    here = _ring.forward(call.plan, brought)
    if call.heads is None:
        return brought, *here, *here
    with _exchanging(call):
        o, lse = call.heads.to_rows(here[0]), call.heads.lse_to_rows(here[1])
    return brought, *here, o, lse


def backward(call: Call, brought: Tensors, o, lse, dout, dlse, dbias_size: torch.Size | None, wants_dsinks: bool) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, dbias and dsinks, from what `forward` says that it wants, and the gradients of this rank's rows. `dbias_size` is that of the bias which this
    rank was given; None: its gradient is not wanted."""
    call.plan.timeline.begins("backward")
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    heads = call.heads
    if heads is None:
        return _ring.backward(call.plan, brought, o, lse, dout, dlse, dbias_size is not None, wants_dsinks)
    with _exchanging(call):
        dout, dlse = heads.to_heads(dout), None if dlse is None else heads.lse_to_heads(dlse)
    dq, dk, dv, dbias, dsinks = _ring.backward(call.plan, brought, o, lse, dout, dlse, dbias_size is not None, wants_dsinks)
    with _exchanging(call):
        dq, dk, dv = heads.to_rows(dq), heads.to_rows(dk, True), heads.to_rows(dv, True)
        if dbias_size is not None:
            dbias = heads.pairs_to_rows(dbias, dbias_size)
    if dsinks is not None:
        of_all = dsinks.new_zeros(heads.each * heads.part.count)
        of_all[heads.mine] = dsinks
        dsinks = of_all
    return dq, dk, dv, dbias, dsinks


def brought_again(call: Call, tensors: Tensors, o: torch.Tensor, lse: torch.Tensor) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """What `forward` has returned first, from what it has returned last."""
    brought = _brought(call, tensors)
    if call.heads is None:
        return brought, o, lse
    with _exchanging(call):
        o, lse = call.heads.to_heads(o), call.heads.lse_to_heads(lse)
    return brought, o, lse


class Attention(torch.autograd.Function):
    """(call, *Tensors) -> (o, lse)."""

    @staticmethod
    def forward(ctx, call: Call, *tensors):
        brought, o_here, lse_here, o, lse = forward(call, Tensors(*tensors))
        ctx.save_for_backward(*brought, o_here, lse_here)
        ctx.call, bias = call, tensors[Tensors._fields.index("bias")]
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        *given, o, lse = ctx.saved_tensors
        tensors = Tensors(*given)
        if dout is None:
            rows = tensors.q.shape[1] if ctx.call.heads is None else dlse.shape[2]
            dout = o.new_zeros((o.shape[0], rows, dlse.shape[1], o.shape[3]))
        wants_dbias, wants_dsinks = (ctx.needs_input_grad[1 + Tensors._fields.index(name)] for name in ("bias", "sinks"))
        dq, dk, dv, dbias, dsinks = backward(ctx.call, tensors, o, lse, dout, dlse, ctx.bias[0] if wants_dbias else None, wants_dsinks)
        dbias = dbias.to(ctx.bias[1]) if wants_dbias else None
        return None, *tensors._replace(q=dq, k=dk, v=dv, slopes=None, bias=dbias, mask=None, document_q=None, document_k=None, sinks=dsinks)
