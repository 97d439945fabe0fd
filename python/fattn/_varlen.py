"""fattn.attention_varlen: sequences of unequal lengths behind each other, without padding."""

from typing import Any

import torch
from torch.autograd import forward_ad

from . import _abi
from ._core import autocast, results, run, wants_fp32
from ._dtensor import on_shards
from ._operators import rows_contiguous
from ._options import Options, choose, flags, is_bhsd, names_of_options, taken, takes_options, window_limits
from ._refused import explained, is_dtensor, is_fake, require_dense, require_numbers
from ._scores import GIVEN, Scores, Sequences, as_int32, keys_of, prepare, require_no_gradient_of_pages, wants_gradient, with_symbols


def _longest(name: str, cu_seqlens: torch.Tensor) -> int:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} has the shape {tuple(cu_seqlens.shape)}; allowed: (batch + 1), where each sequence begins, and where the last one ends")
    if cu_seqlens.is_meta or is_fake(cu_seqlens):
        raise ValueError(f"{name} is on {'meta' if cu_seqlens.is_meta else 'a fake device'}, where its numbers are not; give max_seqlen_{name[-1]}")
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def _longest_keys(cu_seqlens_k: torch.Tensor, seqused_k: torch.Tensor | None, *pairs: torch.Tensor | None) -> int:
    """With seqused_k cu_seqlens_k says where sequences begin, in any order: the most keys that one uses, or what bias and mask have."""
    if not isinstance(seqused_k, torch.Tensor):
        return _longest("cu_seqlens_k", cu_seqlens_k)
    if seqused_k.is_meta or is_fake(seqused_k):
        raise ValueError(f"seqused_k is on {'meta' if seqused_k.is_meta else 'a fake device'}, where its numbers are not; give max_seqlen_k")
    used = int(seqused_k.max()) if seqused_k.numel() else 0
    return max(0, used, *(x.shape[-1] for x in pairs if isinstance(x, torch.Tensor) and x.dim()))


_OPTIONS = names_of_options(but=("cu_seqlens_q",))
_SCORES = tuple(map(Options._fields.index, GIVEN))


def require_packed(cu_seqlens_q: torch.Tensor | None, layout: str) -> None:
    """Of a call of `fattn.attention`, or of its backward pass, that gives something of packed sequences."""
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is None and others of packed sequences are given; say where each sequence begins in q")
    if is_bhsd(layout):
        raise ValueError(f"layout is {layout!r} and cu_seqlens_q is given; packed sequences are (total, heads, headdim), leave layout out")


def packed_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                  given: Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple, Scores, Sequences]:
    """What the operators on packed sequences take: q, k and v, the options, and what else."""
    paged = given.block_table is not None
    cu_seqlens_k = cu_seqlens_q if given.cu_seqlens_k is None and not paged else given.cu_seqlens_k
    for name, x in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is None and name == "cu_seqlens_k" and paged:
            continue
        require_dense(name, x)
        if paged and name in ("k", "v"):
            if x.dim() != 4:
                raise ValueError(f"{name} has {x.dim()} dimensions; allowed with block_table: 4 (pages, page_size, heads, headdim)")
        elif x.dim() != 3 and name in ("q", "k", "v"):
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: 3 (total, heads, headdim), the rows of all sequences behind each other")
    if (given.softmax_scale is not None and type(given.softmax_scale) is not float) or given.softcap is not None or type(given.dropout_p) is not int:
        require_numbers(given.softmax_scale, given.softcap, given.dropout_p)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device_type := "cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast(device_type, q, k, v)
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    causal, batch_invariant, deterministic = given.causal, given.batch_invariant, given.deterministic
    if not (type(causal) is type(batch_invariant) is bool and (deterministic is None or type(deterministic) is bool)):
        causal, batch_invariant, deterministic = flags(causal=causal, batch_invariant=batch_invariant, deterministic=deterministic)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    most_q, most_k = given.max_seqlen_q, given.max_seqlen_k
    if most_q is None:
        most_q = _longest("cu_seqlens_q", cu_seqlens_q)
    if most_k is None:
        most_k = 0 if paged else _longest_keys(cu_seqlens_k, given.seqused_k, given.bias, given.mask)
    sequences = Sequences(as_int32(cu_seqlens_q), None if cu_seqlens_k is None else as_int32(cu_seqlens_k), most_q, most_k)
    scores = prepare(q, keys_of(k, given.block_table, False) if paged else most_k, given.dropout_p, *[given[i] for i in _SCORES])
    for_operator = (given.softmax_scale, causal, deterministic, False, *window_limits(given.window), given.softcap or 0.0,
                    0 if given.backend == "auto" else choose("backend", given.backend, _abi.BACKENDS),
                    0 if given.algorithm == "auto" else choose("algorithm", given.algorithm, _abi.ALGORITHMS), given.dropout_p, wants_fp32(q, given.out_dtype),
                    batch_invariant)
    if torch.compiler.is_compiling():
        for_operator, scores = with_symbols(for_operator, scores)
    return q, k, v, for_operator, scores, sequences


@takes_options(_OPTIONS)
def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, return_lse: bool = False,
                     return_dropout_state: bool = False, **options: Any) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
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
        block_table: as in `fattn.attention`: queries alone are packed, k and v are (pages, page_size, nheads_k, ...), seqused_k says how many keys each
            sequence has, and seqlen_k of bias, mask and document_k, (batch, seqlen_k), is columns * page_size. Leave cu_seqlens_k and max_seqlen_k out.
        document_q, document_k: (total_q) and (total_k), int32: as in `fattn.attention`, within each sequence; None for the latter: as document_q.
        causal, softmax_scale, window, softcap, dropout_p, dropout_state, sinks, return_lse, return_dropout_state, out_dtype, batch_invariant, deterministic, backend,
        algorithm: as in `fattn.attention`.

    Returns:
        o (total_q, nheads, headdim_v); with `return_lse` lse (nheads, total_q), too, and with `return_dropout_state` the state, last.

    Raises:
        As `fattn.attention`.
    """
    if not type(return_lse) is type(return_dropout_state) is bool:
        return_lse, return_dropout_state = flags(return_lse=return_lse, return_dropout_state=return_dropout_state)
    try:
        given = Options(**options)
    except TypeError:
        taken("fattn.attention_varlen", _OPTIONS, ("cu_seqlens_q", "return_lse", "return_dropout_state"), options)  # says which it does not know
        raise
    if type(q) is not torch.Tensor and is_dtensor(q):
        return on_shards(attention_varlen, q, k, v, packed=True, cu_seqlens_q=cu_seqlens_q, return_lse=return_lse, return_dropout_state=return_dropout_state,
                         **options)
    q, k, v, for_operator, scores, sequences = packed_inputs(q, k, v, cu_seqlens_q, given)
    compiling = torch.compiler.is_compiling()
    in_functorch = torch._C._are_functorch_transforms_active() and not compiling
    needs_grad = in_functorch or (not compiling and forward_ad._current_level >= 0) or (  # of tangents the operator knows nothing, torch refuses the function
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or wants_gradient(scores)))
    if given.block_table is not None:
        require_no_gradient_of_pages(needs_grad)
    try:
        o, lse = run(q, k, v, for_operator, scores, sequences, needs_grad, in_functorch)
    except NotImplementedError as error:
        raise explained(error) from None
    return results(o, lse, scores, return_lse, return_dropout_state)
