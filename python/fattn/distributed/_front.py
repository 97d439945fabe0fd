"""fattn.distributed.ring_attention."""

from collections.abc import Sequence
from typing import Any

import torch

from .._options import Window, flag
from ._call import Attention
from ._compiled import compiled_call
from ._prepare import TIMEOUT, prepared
from ._ranks import ranks_of


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    layout: str = "zigzag",
    method: str = "ring",
    ulysses_degree: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    dropout_state: torch.Tensor | None = None,
    document_q: torch.Tensor | None = None,
    document_k: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | Sequence[int] | None = None,
    cu_seqlens_k: torch.Tensor | Sequence[int] | None = None,
    sinks: torch.Tensor | None = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    algorithm: str = "auto",
    check: bool = True,
    timeout: float = TIMEOUT,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`fattn.attention` of sequences whose rows are spread over the ranks of a group of torch.distributed; differentiable in q, k, v, bias and sinks, and so is
    the log-sum-exp. Every rank of the group calls it, with its own rows, as `fattn.distributed.shard` gives them.

    Args:
        q: (batch, rows, nheads, headdim): this rank's queries. Of packed sequences (rows, nheads, headdim).
        k, v: (batch, rows, nheads_k, headdim or headdim_v): its keys and values, of fewer heads than q where heads share keys.
        group: of torch.distributed, or a DeviceMesh of one dimension; None: all ranks. gloo for tensors on the CPU, NCCL for CUDA.
        layout: which rows are whose. "zigzag": of 2 n parts of the sequence rank r of n has the r-th from the front and from the end, so that all have the
            same work under a causal mask; "contiguous": the r-th of n parts.
        method: "ring": keys and values of the next rank travel while a block is computed. "all_gather": they come all at once, for short sequences;
            a rank's memory holds all keys. "ulysses": ranks exchange heads for rows, and each computes some heads of whole sequences: nheads and nheads_k must
            be multiples of the number of ranks. "mixed": groups of `ulysses_degree` ranks that follow each other exchange heads, and the groups are the ranks
            of a ring, whose hops are fewer. Results are the same but for rounding.
        ulysses_degree: of "mixed": divides the number of ranks, nheads and nheads_k; None: the largest that does. Ranks of one host should be in one group.
        causal, softmax_scale, window, softcap: as in `fattn.attention`, of positions in the whole sequence.
        alibi_slopes: (nheads) or (batch, nheads), on every rank the same.
        bias, mask: what broadcasts to (batch, nheads, rows of this rank, keys of all ranks), columns in the order of positions. Not with cu_seqlens_q.
        dropout_p, dropout_state: the state on every rank the same: the weights dropped are those of a call in one process.
        document_q, document_k: (batch, rows), int32, of this rank's rows (packed: (rows)): as in `fattn.attention`. Give both.
        cu_seqlens_q, cu_seqlens_k: of packed sequences, where each begins among the positions of all ranks, on every rank the same; numbers, or a tensor (one
            on a GPU is waited for). Ranks may cut sequences anywhere. cu_seqlens_k None: as cu_seqlens_q.
        sinks: (nheads), on every rank the same, as in `fattn.attention`.
        seqlen_q, seqlen_k: rows of all ranks together; needed with check=False only.
        return_lse: returns the log-sum-exp too.
        deterministic, backend, algorithm: as in `fattn.attention`. Parts are always merged in one order.
        check: all ranks compare shapes, dtypes and options before anything is sent, by the store of the group (a few round trips of messages of 1 KB). False:
            they do not, and a mismatch hangs or gives wrong numbers.
        timeout: seconds that a rank waits for another one.

    Returns:
        o (batch, rows, nheads, headdim_v), packed (rows, nheads, headdim_v), this rank's rows in q's dtype; with `return_lse` (o, lse), lse (batch, nheads, rows),
        packed (nheads, rows). Gradients of bias and sinks are what this rank's rows give; those of sinks, as of all parameters that every rank has, are summed
        over ranks by whoever sums those of other parameters.

    Raises:
        TypeError, ValueError, NotImplementedError: on every rank, naming the rank and what it gave, before anything is sent; of return_lse on that rank alone.
        RuntimeError: a rank has ended, or did not answer in time; it is named.
    """
    return_lse = flag("return_lse", return_lse)
    gradients = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v, bias, sinks))
    arguments = dict(q=q, k=k, v=v, layout=layout, method=method, ulysses_degree=ulysses_degree, causal=causal, softmax_scale=softmax_scale, window=window,
                     softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, dropout_p=dropout_p, dropout_state=dropout_state, document_q=document_q,
                     document_k=document_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks, deterministic=deterministic, backend=backend,
                     algorithm=algorithm)
    if torch.compiler.is_compiling():
        o, lse = compiled_call(group, arguments, timeout, check, gradients, seqlen_q, seqlen_k)
        return (o, lse) if return_lse else o
    given, _, call = prepared(ranks_of(group), arguments, timeout, check, gradients, seqlen_q, seqlen_k)
    o, lse = Attention.apply(call, *given.tensors)
    if given.packed:
        o, lse = o.squeeze(0), lse.squeeze(0)
    return (o, lse) if return_lse else o
