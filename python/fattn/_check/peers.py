"""Exact attention in float64, and the peers whose rounding errors are the measure: an emulation of FlashAttention-2's, and torch's own attention.

Every function takes problems.Inputs and returns {name: tensor}, of o, lse and, of a problem with a backward pass, dq, dk, dv; (batch, seqlen, heads, headdim),
lse (batch, heads, seqlen)."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import _attention, _varlen
from .problems import Inputs

Results = dict[str, torch.Tensor]


def _scores(x: Inputs, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In q's dtype, and the slope of softcap."""
    s, slope = (q @ k.transpose(-1, -2)).mul_(x.scale), None
    if x.softcap:
        capped = (s / x.softcap).tanh_()
        s, slope = capped * x.softcap, 1 - capped * capped
    if x.terms is not None:
        s += x.terms.to(s.dtype)
    return s.masked_fill_(x.hidden, -math.inf), slope


def _softmax(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(s - maximum), its sums, and the log-sum-exp; a row that sees nothing has sums of 0."""
    maximum = s.amax(-1, keepdim=True)
    p = (s - maximum.masked_fill(maximum == -math.inf, 0)).exp_()
    total = p.sum(-1, keepdim=True)
    return p, total, (maximum + total.log()).squeeze(-1)


def _by_heads(x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(t.transpose(1, 2).to(dtype) for t in (x.q, x.k, x.v, x.dout))


def exact(x: Inputs) -> Results:
    q, k, v, dout = _by_heads(x, torch.float64)
    s, slope = _scores(x, q, k)
    p, total, lse = _softmax(s)
    p /= total.clamp_min(1e-300)
    o = p @ v
    found = {"o": o.transpose(1, 2), "lse": lse}
    if x.problem.backward:
        found["dv"] = (p.transpose(-1, -2) @ dout).transpose(1, 2)
        ds = (dout @ v.transpose(-1, -2)).sub_((o * dout).sum(-1, keepdim=True)).mul_(p)
        if slope is not None:
            ds *= slope
        found["dq"] = ((ds @ k) * x.scale).transpose(1, 2)
        found["dk"] = ((ds.transpose(-1, -2) @ q) * x.scale).transpose(1, 2)
    return found


def emulation(x: Inputs) -> Results:
    """FlashAttention-2's rounding: weights relative to the true maximum, rounded once for their product with v, an unrounded sum, o rounded once. Backward delta of the
    rounded o, P rounded for dv, dS once for dq and dk."""
    dtype = x.q.dtype

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype).float()

    q, k, v, dout = _by_heads(x, torch.float32)
    s, slope = _scores(x, q, k)
    p, total, lse = _softmax(s)
    o = ((rounded(p) @ v) / total.clamp_min(1e-30)).to(dtype)
    found = {"o": o.transpose(1, 2), "lse": lse}
    if x.problem.backward:
        delta = (o.float() * dout).sum(-1, keepdim=True)
        p = (s - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp_()
        found["dv"] = (rounded(p).transpose(-1, -2) @ dout).to(dtype).transpose(1, 2)
        ds = (dout @ v.transpose(-1, -2)).sub_(delta).mul_(p)
        if slope is not None:
            ds *= slope
        ds = rounded(ds)
        found["dq"] = ((ds @ k) * x.scale).to(dtype).transpose(1, 2)
        found["dk"] = ((ds.transpose(-1, -2) @ q) * x.scale).to(dtype).transpose(1, 2)
    return found


def _with_gradients(x: Inputs, call: Callable[..., tuple[torch.Tensor, torch.Tensor | None]], backward: bool = True) -> Results:
    backward = backward and x.problem.backward
    tensors = [x.pack(t).detach().requires_grad_(backward) for t in (x.q, x.k, x.v)]
    o, lse = call(*tensors)
    found = {"o": x.unpack(o.detach())}
    if lse is not None:
        found["lse"] = x.unpack_lse(lse.detach())
    if backward:
        gradients = torch.autograd.grad(o, tensors, x.pack(x.dout))
        found |= {name: x.unpack(g) for name, g in zip(("dq", "dk", "dv"), gradients)}
    return found


def fattn(x: Inputs, **options: Any) -> Results:
    if x.cu_seqlens is None:
        return _with_gradients(x, lambda q, k, v: _attention.attention(q, k, v, return_lse=True, **x.arguments, **options))
    return _with_gradients(x, lambda q, k, v: _varlen.attention_varlen(q, k, v, cu_seqlens_q=x.cu_seqlens, max_seqlen_q=x.problem.seqlen,
                                                                       max_seqlen_k=x.problem.seqlen, return_lse=True, **x.arguments, **options))


def flash(x: Inputs) -> Results:
    """FlashAttention-2 as torch has it, by its own operator, which knows windows and packed sequences."""
    p = x.problem
    if p.option not in ("none", "decode", "window", "packed"):
        raise NotImplementedError(f"torch's FlashAttention-2 has no {p.option}, or no gradients of it")
    left, right = p.window or (None, None)

    def call(q, k, v):
        o, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, x.cu_seqlens, x.cu_seqlens, p.seqlen_q, p.seqlen, 0.0, p.causal, False, scale=x.scale,
                                                             window_size_left=left, window_size_right=right)
        return o, lse

    return _with_gradients(x, call)


def _sdpa(x: Inputs, backend: SDPBackend) -> Results:
    p = x.problem
    if p.option not in ("none", "decode") or (p.causal and p.seqlen_q != p.seqlen):
        raise NotImplementedError(f"not asked for {p.option}")

    def call(q, k, v):
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=p.causal, scale=x.scale)
        return o.transpose(1, 2), None

    try:
        return _with_gradients(x, call)
    except RuntimeError:  # cuDNN has no backward pass above headdim 128
        return _with_gradients(x, call, backward=False)


def cudnn(x: Inputs) -> Results:
    return _sdpa(x, SDPBackend.CUDNN_ATTENTION)


def torch_cpu(x: Inputs) -> Results:
    return _sdpa(x, SDPBackend.FLASH_ATTENTION)


# By device, the peers beside the emulation; the goals hold against the first of them that runs, else against the emulation.
PEERS = {"cuda": {"flash": flash, "cudnn": cudnn}, "cpu": {"torch": torch_cpu}}
