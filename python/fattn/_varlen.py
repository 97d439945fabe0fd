"""fattn.attention_varlen: sequences of unequal lengths behind each other, without padding."""

from typing import NoReturn

import torch
from torch.autograd import forward_ad

from . import _abi
from ._attention import autocast
from ._autograd import AttentionInFunctorch, AttentionWithScores, distinct, run_forward
from ._operators import rows_contiguous
from ._options import Window, choose, window_limits
from ._refused import explained, require_dense, require_numbers
from ._scores import Sequences, as_int32, prepare
from ._sinks import join
from ._unknown import options_of, unknown_options


def _longest(name: str, cu_seqlens: torch.Tensor) -> int:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} has the shape {tuple(cu_seqlens.shape)}; allowed: (batch + 1), where each sequence begins, and where the last one ends")
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def _longest_keys(cu_seqlens_k: torch.Tensor, seqused_k: torch.Tensor | None, *pairs: torch.Tensor | None) -> int:
    """With seqused_k cu_seqlens_k says where sequences begin, in any order: the most keys that one uses, or what bias and mask have."""
    if not isinstance(seqused_k, torch.Tensor):
        return _longest("cu_seqlens_k", cu_seqlens_k)
    used = int(seqused_k.max()) if seqused_k.numel() else 0
    return max(0, used, *(x.shape[-1] for x in pairs if isinstance(x, torch.Tensor) and x.dim()))


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    dropout_state: torch.Tensor | None = None,
    document_q: torch.Tensor | None = None,
    document_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    return_dropout_state: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    algorithm: str = "auto",
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """`fattn.attention` on packed sequences: each sees itself alone, as if it were a call of its own; differentiable in q, k, v, bias and sinks.

    Args:
        q: (total_q, nheads, headdim), the queries of all sequences behind each other.
        k: (total_k, nheads_k, headdim).
        v: (total_k, nheads_k, headdim_v).
        cu_seqlens_q: (batch + 1), int32 or int64, on q's device: where each sequence begins in q, 0 first, and where the last one ends. Rows behind
            that see nothing.
        cu_seqlens_k: the same in k and v; None: as cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: the most rows of a sequence (with seqused_k: that one uses), or more. None: looked up, which waits for a GPU and is not
            possible in torch.compile.
        seqused_k: (batch), int32 or int64: sequence b has the keys [cu_seqlens_k[b], cu_seqlens_k[b] + seqused_k[b]) only. Nothing else of cu_seqlens_k is
            looked at then: sequences may be in any order, with anything between them, and share keys, of which then there is no gradient. Keys that no
            sequence uses have a gradient of 0. On a GPU lengths and offsets out of range give NaN, unless `fattn.set_check("sync")`.
        alibi_slopes, bias, mask: as in `fattn.attention`, with max_seqlen_q and max_seqlen_k for seqlen_q and seqlen_k, the first element being that of a
            sequence's first query and key.
        document_q, document_k: (total_q) and (total_k), int32: as in `fattn.attention`, within each sequence; None for the latter: as document_q.
        causal, softmax_scale, window, softcap, dropout_p, dropout_state, sinks, return_lse, return_dropout_state, deterministic, backend, algorithm: as in
            `fattn.attention`.

    Returns:
        o (total_q, nheads, headdim_v); with `return_lse` lse (nheads, total_q), too, and with `return_dropout_state` the state, last.

    Raises:
        As `fattn.attention`.
    """
    if unknown:
        raise unknown_options("fattn.attention_varlen", unknown, options_of(attention_varlen))
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, x in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        require_dense(name, x)
        if x.dim() != 3 and name in ("q", "k", "v"):
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: 3 (total, heads, headdim), the rows of all sequences behind each other")
    require_numbers(softmax_scale, softcap, dropout_p)
    device_type = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device_type):
        q, k, v = autocast(device_type, q, k, v)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    sequences = Sequences(as_int32(cu_seqlens_q), as_int32(cu_seqlens_k), _longest("cu_seqlens_q", cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q,
                          _longest_keys(cu_seqlens_k, seqused_k, bias, mask) if max_seqlen_k is None else max_seqlen_k)
    options = (softmax_scale, causal, deterministic, False, *window_limits(window), softcap or 0.0, choose("backend", backend, _abi.BACKENDS),
               choose("algorithm", algorithm, _abi.ALGORITHMS), dropout_p)
    scores = prepare(q, sequences.max_seqlen_k, seqused_k, alibi_slopes, bias, mask, dropout_p, dropout_state,
                     document_q, document_k)
    compiling = torch.compiler.is_compiling()
    needs_grad = (not compiling and forward_ad._current_level >= 0) or (  # of tangents the operator knows nothing, torch refuses the function
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, scores.bias)))
    try:
        if torch._C._are_functorch_transforms_active() and not compiling:
            o, lse = AttentionInFunctorch.apply(q, k, v, *scores, *sequences, options)
        elif needs_grad:
            inputs = q, k, v, *scores, *sequences
            o, lse = AttentionWithScores.apply(*(distinct(*inputs) if compiling else inputs), options)
        else:
            o, lse = run_forward(q, k, v, options, scores, sequences)
    except NotImplementedError as error:
        raise explained(error) from None
    if sinks is not None:
        o, lse = join(o, lse, sinks, False)
    results = (o, lse) if return_lse else (o,)
    if return_dropout_state:
        results += (scores.dropout_state,)
    return results if len(results) > 1 else o
