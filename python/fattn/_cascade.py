"""fattn.cascade: many sequences that begin with the same keys, which are read once for all of them."""

from typing import Any

import torch

from ._attention import attention
from ._merge import merge
from ._options import flags
from ._refused import can_be_read, require_dense
from ._unknown import unknown_options

# Of fattn.attention: what follows from the numbers of scores alone, and how the sequences' own keys lie.
_OPTIONS = ("causal", "softmax_scale", "softcap", "seqused_k", "sinks", "block_table", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
            "batch_invariant", "deterministic", "backend", "algorithm")
_OF_BOTH = ("softmax_scale", "softcap", "batch_invariant", "deterministic", "backend", "algorithm")


def _check(q: torch.Tensor, k_prefix: torch.Tensor, v_prefix: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool, options: dict[str, Any]) -> None:
    for name, x in (("q", q), ("k_prefix", k_prefix), ("v_prefix", v_prefix), ("k", k), ("v", v)):
        require_dense(name, x)
    for name, x in (("k", k), ("v", v)):
        if not packed and x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: 4 (batch, seqlen_k, nheads_k, headdim), each sequence's own keys")
    for name, x in (("k_prefix", k_prefix), ("v_prefix", v_prefix)):
        if x.dim() != 3:
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: 3 (seqlen_prefix, nheads_k, headdim), one prefix for all sequences")
    if k_prefix.shape[0] != v_prefix.shape[0]:
        raise ValueError(f"k_prefix has {k_prefix.shape[0]} keys and v_prefix {v_prefix.shape[0]}; they must have the same")
    if q.dim() != (3 if packed else 4):
        raise ValueError(f"q has {q.dim()} dimensions; allowed: 4 (batch, seqlen_q, nheads, headdim), or with cu_seqlens_q 3 (total_q, nheads, headdim)")
    if not options.get("causal") or packed or q.shape[1] < 2:
        return
    lengths, own = options.get("seqused_k"), k.shape[1] if options.get("block_table") is None else None
    if isinstance(lengths, torch.Tensor) and can_be_read(lengths) and lengths.numel():
        own = int(lengths.min())
    if own is not None and q.shape[1] > own:
        raise ValueError(f"causal is set, a sequence has {own} keys behind the prefix, and q has {q.shape[1]} queries each; queries must be of keys behind the "
                         "prefix. Leave the last keys of the prefix to the sequences, or call fattn.attention with all keys")


def cascade(q: torch.Tensor, k_prefix: torch.Tensor, v_prefix: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False,
            **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences that all begin with the same keys, as those of a system prompt: two calls and a merge. The first has the queries of all sequences and
    the prefix, which is read once and not once a sequence; the second each sequence's own keys. Differentiable, but for a paged cache.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or with cu_seqlens_q (total_q, nheads, headdim).
        k_prefix, v_prefix: (seqlen_prefix, nheads_k, headdim or headdim_v): the keys that every query sees.
        k, v: the keys behind them, each sequence's own: (batch, seqlen_k, nheads_k, ...), with block_table a paged cache, with cu_seqlens_k packed.
        causal: aligned to the end of a sequence's own keys, of which it has at least as many as queries.
        seqused_k: (batch): how many keys of its own a sequence has.
        sinks: (nheads): counted once.
        softmax_scale, softcap, block_table, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, batch_invariant, deterministic, backend, algorithm: as in
            `fattn.attention`.
        return_lse: returns the log-sum-exp over all keys too.

    Returns:
        o in q's dtype, as `fattn.attention` of prefix and own keys together would return it; with `return_lse` (o, lse).

    Raises:
        As `fattn.attention`; TypeError for an option whose meaning depends on a key's place (window, alibi_slopes, bias, mask, documents) and for dropout.
    """
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise unknown_options("fattn.cascade", unknown, [*_OPTIONS, "return_lse"])
    return_lse, _ = flags(return_lse=return_lse, causal=options.get("causal", False))
    packed = options.get("cu_seqlens_q") is not None
    _check(q, k_prefix, v_prefix, k, v, packed, options)
    dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else None
    shared = {name: options[name] for name in _OF_BOTH if name in options}
    rows = q.flatten(0, -3)[None]
    o, lse = attention(rows, k_prefix[None], v_prefix[None], out_dtype=dtype, return_lse=True, **shared)
    o, lse = o[0], lse[0]  # (rows, nheads, headdim_v), (nheads, rows)
    if not packed:
        o, lse = o.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    own, own_lse = attention(q, k, v, out_dtype=dtype, return_lse=True, **options)
    o, lse = merge(o, lse, own, own_lse, out_dtype=q.dtype)
    return (o, lse) if return_lse else o
