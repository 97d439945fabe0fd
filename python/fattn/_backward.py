"""fattn.attention_backward and attention_varlen_backward: the backward pass by itself, for programs that keep o and lse and differentiate themselves."""

from typing import Any

import torch

from . import _abi
from ._autograd import gradients
from ._core import autocast, wants_fp32
from ._operators import rows_contiguous
from ._options import Options, choose, flag, flags, is_bhsd, names_of_options, taken, takes_options, window_limits
from ._refused import require_dense, require_numbers
from ._scores import GIVEN, NONE, Scores, prepare, with_symbols
from ._varlen import packed_inputs, require_packed

_OPTIONS = names_of_options(but=("block_table",))
_OWN = ("dlse", "return_dbias", "return_dsinks")
_SCORES = tuple(map(Options._fields.index, GIVEN))


def _given(function: str, own: tuple[str, ...], options: dict[str, Any], wanted: dict[str, bool]) -> Options:
    """What is given, if a backward pass has it."""
    if options.get("block_table") is not None:
        raise NotImplementedError(f"{function}: block_table is given; a paged cache has no gradient. Give k and v as they were written, without block_table")
    given = taken(function, _OPTIONS, own, {name: x for name, x in options.items() if name != "block_table"})
    if given.dropout_p and given.dropout_state is None:
        raise ValueError(f"dropout_p is {given.dropout_p} and dropout_state is None; a backward pass drops what its forward pass has dropped: give the state that "
                         "fattn.attention returns with return_dropout_state=True")
    for name, asked in wanted.items():
        if flag(f"return_d{name}", asked) and getattr(given, name) is None:
            raise ValueError(f"return_d{name} asks for the gradient of {name}, and {name} is absent; give the {name} of the forward pass")
    return given


def _require_tensors(dimensions: int, allowed: str, lse_allowed: str, dlse: torch.Tensor | None, lse: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        require_dense(name, x)
        if x.dim() != dimensions:
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: {dimensions} {allowed}")
    for name, x in (("lse", lse), ("dlse", dlse)):
        if name == "dlse" and x is None:
            continue
        require_dense(name, x, " or None" if name == "dlse" else "")
        if x.dim() != dimensions - 1:
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: {dimensions - 1} {lse_allowed}, as the forward pass returns it with return_lse=True")


def _like(gradient: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """In the shape and dtype of what was given: `prepare` and autocast may have changed both."""
    return gradient.to(of.dtype).sum_to_size(of.shape)


def _finish(inputs: list, options: tuple, scores: Scores, sequences: Any, given: Options, wanted: dict[str, bool], of: tuple) -> tuple[torch.Tensor, ...]:
    """`inputs`: dout, dlse, q, k, v, o, lse, as the operator takes them; `of`: q, k and v as they were given."""
    more = tuple(wanted.values()) if any(wanted.values()) else ()
    inputs = [x if x is None else rows_contiguous(x) for x in inputs]
    dq, dk, dv, *others = gradients(*inputs, scores, sequences, options, more)
    asked = [_like(x, getattr(given, name)) for x, (name, wants) in zip(others, wanted.items()) if wants]
    return *(x.to(given.out_dtype or to.dtype) for x, to in zip((dq, dk, dv), of)), *asked


@takes_options(_OPTIONS)
def attention_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *,
                       dlse: torch.Tensor | None = None, return_dbias: bool = False, return_dsinks: bool = False, layout: str = "bshd",
                       **options: Any) -> tuple[torch.Tensor, ...]:
    """The backward pass of `fattn.attention` by itself: the gradients of q, k and v from what the forward pass returned. The same bits as autograd's.

    Args:
        dout: (batch, seqlen_q, nheads, headdim_v), the gradient of o, in o's dtype.
        q: (batch, seqlen_q, nheads, headdim), as the forward pass had it, as are all others.
        k: (batch, seqlen_k, nheads_k, headdim).
        v: (batch, seqlen_k, nheads_k, headdim_v).
        o, lse: what `fattn.attention` returned with return_lse=True: (batch, seqlen_q, nheads, headdim_v) and (batch, nheads, seqlen_q). They may come from
            parts of the keys that were combined: then the gradients are those of all keys.
        dlse: (batch, nheads, seqlen_q), the gradient of lse; None: 0.
        return_dbias, return_dsinks: returns the gradient of bias and of sinks too, which must be given.
        layout: "bshd" as above, or "bhsd", heads before seqlen in dout, q, k, v, o and the gradients.
        out_dtype: of dq, dk and dv; torch.float32 beside a q of 16 bits: the sums as they are, to be added up. o and dout are in q's dtype all the same.
        batch_invariant: not looked at.
        deterministic: the same bits in every run on a GPU, too; None follows `torch.use_deterministic_algorithms`.
        causal, softmax_scale, window, softcap, seqused_k, alibi_slopes, bias, mask, document_q, document_k, sinks, backend, algorithm: as in the forward pass.
        dropout_p, dropout_state: as in the forward pass, which returned the state with return_dropout_state=True.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences: the call is `fattn.attention_varlen_backward`.

    Returns:
        (dq, dk, dv), in the shapes and the dtypes of q, k and v, or in out_dtype; then dbias and dsinks, where asked for, in those of bias and sinks. What has no
        gradient in the forward pass (masks, lengths, slopes) has none here.

    Raises:
        As `fattn.attention`; NotImplementedError also where a result is differentiated.
    """
    wanted = {"bias": return_dbias, "sinks": return_dsinks}
    given = _given("fattn.attention_backward", (*_OWN, "layout"), options, wanted)
    if given.cu_seqlens_q is not None or given.cu_seqlens_k is not None or given.max_seqlen_q is not None or given.max_seqlen_k is not None:
        require_packed(given.cu_seqlens_q, layout)
        return attention_varlen_backward(dout, q, k, v, o, lse, dlse=dlse, return_dbias=return_dbias, return_dsinks=return_dsinks, **options)
    bhsd = is_bhsd(layout)
    _require_tensors(4, "(batch, seqlen, heads, headdim)", "(batch, heads, seqlen_q)", dlse, lse, dout=dout, q=q, k=k, v=v, o=o)
    require_numbers(given.softmax_scale, given.softcap, given.dropout_p)
    of = q, k, v
    if torch.is_autocast_enabled(device_type := "cuda" if q.is_cuda else "cpu"):
        dout, q, k, v, o = autocast(device_type, dout, q, k, v, o)
    causal, deterministic = flags(causal=given.causal, deterministic=given.deterministic)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    for_operator = (given.softmax_scale, causal, deterministic, bhsd, *window_limits(given.window), given.softcap or 0.0,
                    choose("backend", given.backend, _abi.BACKENDS), choose("algorithm", given.algorithm, _abi.ALGORITHMS))
    scores = prepare(q, k.shape[2 if bhsd else 1], given.dropout_p, *(given[i] for i in _SCORES))
    if all(x is None for x in scores):
        scores = NONE
    if torch.compiler.is_compiling():
        for_operator, scores = with_symbols(for_operator, scores)
    if wants_fp32(q, given.out_dtype):
        for_operator += (given.dropout_p, True)
    elif given.dropout_p:
        for_operator += (given.dropout_p,)
    return _finish([dout, dlse, q, k, v, o, lse], for_operator, scores, None, given, wanted, of)


@takes_options({name: x for name, x in _OPTIONS.items() if name != "cu_seqlens_q"})
def attention_varlen_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *,
                              cu_seqlens_q: torch.Tensor, dlse: torch.Tensor | None = None, return_dbias: bool = False, return_dsinks: bool = False,
                              **options: Any) -> tuple[torch.Tensor, ...]:
    """The backward pass of `fattn.attention_varlen` by itself, as `fattn.attention_backward` is that of `fattn.attention`.

    Args:
        dout, o: (total_q, nheads, headdim_v), the gradient of o, and o.
        q: (total_q, nheads, headdim).
        k: (total_k, nheads_k, headdim).
        v: (total_k, nheads_k, headdim_v).
        lse: (nheads, total_q), as the forward pass returned it with return_lse=True.
        dlse: (nheads, total_q), the gradient of lse; None: 0.
        return_dbias, return_dsinks: returns the gradient of bias and of sinks too, which must be given.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and all others: as in the forward pass.

    Returns:
        (dq, dk, dv), in the shapes and the dtypes of q, k and v; then dbias and dsinks, where asked for. Rows of no sequence have a gradient of 0.

    Raises:
        As `fattn.attention_backward`.
    """
    wanted = {"bias": return_dbias, "sinks": return_dsinks}
    given = _given("fattn.attention_varlen_backward", _OWN, options, wanted)
    _require_tensors(3, "(total, heads, headdim)", "(heads, total_q)", dlse, lse, dout=dout, q=q, k=k, v=v, o=o)
    of = q, k, v
    q, k, v, for_operator, scores, sequences = packed_inputs(q, k, v, cu_seqlens_q, given)
    if torch.is_autocast_enabled(device_type := "cuda" if q.is_cuda else "cpu"):
        dout, o = autocast(device_type, dout, o)
    return _finish([dout, dlse, q, k, v, o, lse], for_operator, scores, sequences, given, wanted, of)
