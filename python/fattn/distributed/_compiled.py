"""ring_attention inside torch.compile: two operators, of which a graph knows shapes and gradients and nothing of what is sent. The group is known by its name."""

from typing import Any

import torch
from torch.distributed import distributed_c10d

from .._core import autocast
from .._options import window_limits
from . import _call
from ._prepare import call_of, given_of, prepared
from ._ranks import Ranks, ranks_of

# Arguments of ring_attention, in the order of the operators' schema.
_TENSORS = ("q", "k", "v", "alibi_slopes", "bias", "mask", "dropout_state", "document_q", "document_k", "cu_seqlens_q", "cu_seqlens_k", "sinks")
_OPTIONS = {"bounds_q": "SymInt[]?", "bounds_k": "SymInt[]?", "layout": "str", "method": "str", "ulysses_degree": "int?", "causal": "bool", "softmax_scale": "float?",
            "window": "SymInt[]", "softcap": "float", "dropout_p": "float", "deterministic": "bool?", "backend": "str", "algorithm": "str", "group": "str", "timeout": "float"}
_GIVEN = ", ".join([f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in _TENSORS] + [f"{kind} {name}" for name, kind in _OPTIONS.items()])
_GRADIENTS = ("q", "k", "v", "bias", "sinks")


def _ranks(name: str) -> Ranks:
    return ranks_of(distributed_c10d._resolve_process_group(name) if name else None)


def _arguments(given: tuple) -> tuple[dict[str, Any], Ranks, float]:
    """As `prepared` takes them, of what the schema has."""
    arguments = dict(zip((*_TENSORS, *_OPTIONS), given))
    for name in "qk":
        bounds = arguments.pop(f"bounds_{name}")
        if bounds is not None:
            arguments[f"cu_seqlens_{name}"] = bounds
    return arguments, _ranks(arguments.pop("group")), arguments.pop("timeout")


def _finished(packed: bool, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a graph expects them: contiguous, packed ones without the batch of 1."""
    return tuple((x.squeeze(0) if packed else x).contiguous() for x in results)


@torch.library.custom_op("fattn::ring_attention", mutates_args=(), schema=f"({_GIVEN}, bool check, bool gradients, SymInt? seqlen_q, SymInt? seqlen_k) -> "
                         "(Tensor, Tensor, Tensor)")
def _forward(*given):
    """o, lse, and how many rows of q and k all ranks hold, which the backward pass asks nobody for again."""
    *given, check, gradients, seqlen_q, seqlen_k = given
    arguments, ranks, timeout = _arguments(tuple(given))
    ready, lengths, call = prepared(ranks, arguments, timeout, check, gradients, seqlen_q, seqlen_k)
    *_, o, lse = _call.forward(call, ready.tensors)
    return *_finished(ready.packed, o, lse), torch.tensor(lengths)


@_forward.register_fake
def _(q, k, v, *rest):
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    *batch, rows, nheads, _ = q.shape
    return q.new_empty((*batch, rows, nheads, v.shape[-1])), q.new_empty((*batch, nheads, rows), dtype=kind), torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("fattn::ring_attention_backward", mutates_args=(), schema=f"(Tensor dout, Tensor? dlse, Tensor o, Tensor lse, Tensor lengths, bool wants_dbias, "
                         f"bool wants_dsinks, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def _backward(dout, dlse, o, lse, lengths, wants_dbias, wants_dsinks, *given):
    """Of heads that were exchanged the graph has kept none: they are brought once more."""
    arguments, ranks, timeout = _arguments(given)
    ready = given_of(**arguments)
    call = call_of(ranks, ready, tuple(lengths.tolist()), timeout)
    if ready.packed:
        dout, dlse, o, lse = (None if x is None else x.unsqueeze(0) for x in (dout, dlse, o, lse))
    brought = _call.brought_again(call, ready.tensors, o, lse)
    dq, dk, dv, dbias, dsinks = _call.backward(call, *brought, dout, dlse, ready.tensors.bias.shape if wants_dbias else None, wants_dsinks)
    others = [gradient.to(of.dtype).sum_to_size(of.shape).contiguous() if wants else lengths.new_empty(0)
              for gradient, of, wants in ((dbias, arguments["bias"], wants_dbias), (dsinks, arguments["sinks"], wants_dsinks))]
    return *_finished(ready.packed, dq, dk, dv), *others


@_backward.register_fake
def _(dout, dlse, o, lse, lengths, wants_dbias, wants_dsinks, q, k, v, alibi_slopes, bias, *rest):
    sinks = rest[_TENSORS.index("sinks") - 5]
    return *(x.new_empty(x.shape) for x in (q, k, v)), *(x.new_empty(x.shape) if wants else lengths.new_empty(0) for x, wants in ((bias, wants_dbias), (sinks, wants_dsinks)))


def _setup(ctx, inputs, output):
    count = len(_TENSORS)
    ctx.save_for_backward(*inputs[:count], *output)
    ctx.options = inputs[count : count + len(_OPTIONS)]


def _differentiated(ctx, dout, dlse, _):
    *tensors, o, lse, lengths = ctx.saved_tensors
    wants = [ctx.needs_input_grad[_TENSORS.index(name)] for name in ("bias", "sinks")]
    dq, dk, dv, dbias, dsinks = torch.ops.fattn.ring_attention_backward(dout, dlse, o, lse, lengths, *wants, *tensors, *ctx.options)
    found = {"q": dq, "k": dk, "v": dv, "bias": dbias if wants[0] else None, "sinks": dsinks if wants[1] else None}
    return *(found.get(name) for name in _TENSORS), *(None,) * (len(_OPTIONS) + 4)


_forward.register_autograd(_differentiated, setup_context=_setup)


def compiled_call(group: Any, arguments: dict[str, Any], timeout: float, check: bool, gradients: bool, seqlen_q: int | None,
                  seqlen_k: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; `arguments` are ring_attention's."""
    given = dict(arguments)
    if torch.is_autocast_enabled(device := given["q"].device.type):
        given["q"], given["k"], given["v"] = autocast(device, given["q"], given["k"], given["v"])
    for name in "qk":
        bounds = given[f"cu_seqlens_{name}"]
        given[f"bounds_{name}"] = None if bounds is None or isinstance(bounds, torch.Tensor) else list(bounds)
        if given[f"bounds_{name}"] is not None:
            given[f"cu_seqlens_{name}"] = None
    given["window"] = list(window_limits(given["window"]))
    given["softcap"] = float(given["softcap"] or 0)
    group = group.get_group() if hasattr(group, "get_group") else group
    given["group"], given["timeout"] = "" if group is None else group.group_name, float(timeout)
    o, lse, _ = torch.ops.fattn.ring_attention(*(given[name] for name in (*_TENSORS, *_OPTIONS)), check, gradients, seqlen_q, seqlen_k)
    return o, lse
