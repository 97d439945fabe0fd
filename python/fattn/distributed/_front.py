"""fattn.distributed.ring_attention: what is given is checked here, agreed on by all ranks, and handed to a method."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _abi
from .._core import autocast
from .._operators import rows_contiguous
from .._options import Window, choose, window_limits
from .._refused import require_dense, require_numbers
from .._scores import of_pairs
from ._heads import exchange_heads
from ._ranks import Ranks, ranks_of, require_agreement
from ._ring import Plan, RingAttention, Tensors
from ._schedule import LAYOUTS, Problem, held, schedule_of

METHODS = ("ring", "all_gather", "ulysses")
TIMEOUT = 25.0  # seconds: with what is needed to find out who it was, a rank is named within 30
FUNCTION = "fattn.distributed.ring_attention"


class Given(NamedTuple):
    """The arguments, ready: tensors have 4 dimensions, packed ones a batch of 1."""

    tensors: Tensors
    packed: bool
    cu_seqlens_q: tuple[int, ...] | None
    cu_seqlens_k: tuple[int, ...] | None
    causal: bool
    window: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    dropout_state: torch.Tensor | None
    layout: str
    method: str
    backend: str
    algorithm: str
    deterministic: bool

    @property
    def options(self) -> tuple:
        """Of the operators; window and mask are the blocks' own."""
        return (self.softmax_scale, False, self.deterministic, False, -1, -1, self.softcap, choose("backend", self.backend, _abi.BACKENDS),
                choose("algorithm", self.algorithm, _abi.ALGORITHMS))


def _bounds(name: str, bounds: Any) -> tuple[int, ...]:
    values = tuple(int(x) for x in (bounds.tolist() if isinstance(bounds, torch.Tensor) else bounds))
    if not values:
        raise ValueError(f"{name} is empty; allowed: (sequences + 1) numbers, where each begins among all positions, and where the last one ends")
    return values


def _of_rows(name: str, x: Any, packed: bool) -> torch.Tensor:
    require_dense(name, x)
    if x.dim() != (3 if packed else 4):
        raise ValueError(f"{name} has {x.dim()} dimensions; allowed: " + ("3 (rows, heads, headdim), because cu_seqlens_q is given" if packed else
                                                                          "4 (batch, rows, heads, headdim); packed sequences have 3, and cu_seqlens_q"))
    return rows_contiguous(x.unsqueeze(0) if packed else x)


def _ids(name: str, x: torch.Tensor, rows: torch.Tensor, packed: bool) -> torch.Tensor:
    require_dense(name, x)
    ids = x.unsqueeze(0) if packed else x
    if ids.shape != rows.shape[:2] or ids.dtype != torch.int32:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; allowed: torch.int32 {tuple(rows.shape[:2])[packed:]}, an id for each row of this rank")
    return ids.contiguous()


def _pairs(name: str, x: torch.Tensor | None, q: torch.Tensor, packed: bool) -> torch.Tensor | None:
    if x is None:
        return None
    require_dense(name, x)
    if packed:
        raise NotImplementedError(f"{name} is given with cu_seqlens_q, which is not computed here; leave cu_seqlens_q out and give document_q, or attention without it")
    if x.dim() and x.shape[-1] == 1:
        raise ValueError(f"{name} has one column; allowed: a column for each key of all ranks. Expand it")
    x = of_pairs(name, x, 0)
    for i, (size, whole) in enumerate(((x.shape[0], q.shape[0]), (x.shape[1], q.shape[2]), (x.shape[2], q.shape[1]))):
        if size not in (1, whole):
            raise ValueError(f"{name} has the shape {tuple(x.shape)}; its dimension {i} must be {whole} or 1: (batch, nheads, rows of this rank, keys of all ranks)")
    return x


def _taken(q, k, v, packed: bool, alibi_slopes, bias, mask, document_q, document_k, sinks) -> Tensors:
    q, k, v = (_of_rows(name, x, packed) for name, x in (("q", q), ("k", k), ("v", v)))
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device := q.device.type):
        q, k, v = autocast(device, q, k, v)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}; allowed: one dtype, one device")
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3] or q.shape[2] % max(k.shape[2], 1):
        raise ValueError(f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; allowed: one batch, k and v of the same rows and heads, q and k of the same headdim, "
                         "heads of q a multiple of those of k")
    if (document_q is None) != (document_k is None):
        raise ValueError("one of document_q and document_k is None; give both, the ids of this rank's queries and of its keys, or neither")
    if document_q is not None:
        document_q, document_k = _ids("document_q", document_q, q, packed), _ids("document_k", document_k, k, packed)
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    if alibi_slopes is not None:
        require_dense("alibi_slopes", alibi_slopes)
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("alibi_slopes asks for a gradient, which is not computed; detach it")
        if alibi_slopes.shape not in ((q.shape[2],), (q.shape[0], q.shape[2])):
            raise ValueError(f"alibi_slopes has the shape {tuple(alibi_slopes.shape)}; allowed: ({q.shape[2]}) or ({q.shape[0]}, {q.shape[2]})")
        alibi_slopes = alibi_slopes.to(torch.float32).reshape(-1, q.shape[2])
    if sinks is not None:
        require_dense("sinks", sinks)
        if sinks.shape != (q.shape[2],):
            raise ValueError(f"sinks has the shape {tuple(sinks.shape)}; allowed: ({q.shape[2]}), a number a query head")
        sinks = sinks.to(kind)
    bias = _pairs("bias", bias, q, packed)
    if bias is not None and bias.dtype not in (torch.float32, q.dtype):
        raise ValueError(f"bias is a tensor of {bias.dtype}; allowed: torch.float32 and q's dtype, {q.dtype}. Convert it with .to()")
    return Tensors(q, k, v, alibi_slopes, bias, _pairs("mask", mask, q, packed), document_q, document_k, sinks)


def _digest(bounds: tuple[int, ...] | None) -> str | None:
    """They may be many."""
    return None if bounds is None else f"{len(bounds)} numbers, crc32 {zlib.crc32(repr(bounds).encode()):08x}"


def _signature(given: Given) -> dict[str, Any]:
    """What all ranks must have the same of."""
    t = given.tensors
    there = [name for name in ("slopes", "bias", "mask", "document_q", "sinks") if getattr(t, name) is not None]
    return {"method": given.method, "layout": given.layout, "dtype": str(t.q.dtype), "device": t.q.device.type, "batch": t.q.shape[0], "nheads": t.q.shape[2],
            "nheads_k": t.k.shape[2], "headdim": t.q.shape[3], "headdim_v": t.v.shape[3], "packed": given.packed,
            "cu_seqlens_q": _digest(given.cu_seqlens_q), "cu_seqlens_k": _digest(given.cu_seqlens_k), "causal": given.causal, "window": list(given.window),
            "softmax_scale": given.softmax_scale, "softcap": given.softcap, "dropout_p": given.dropout_p,
            "dropout_state": given.dropout_state.tolist() if given.dropout_p and given.dropout_state is not None else None,
            "tensors that are given": there, "gradients": torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in t),
            "algorithm": given.algorithm, "backend": given.backend}


def _lengths(ranks: Ranks, given: Given, said: list[dict[str, Any]] | None, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
    """Of all ranks' rows; each must hold as many as its layout says."""
    t = given.tensors
    if said is None:
        if seqlen_q is None:
            raise ValueError("check is False and seqlen_q is None; without the check nobody knows how many rows other ranks have, say it (and seqlen_k, unless it is as many)")
        lengths = seqlen_q, seqlen_q if seqlen_k is None else seqlen_k
        rows = {ranks.rank: (t.q.shape[1], t.k.shape[1])}
    else:
        rows = {rank: tuple(x["rows"]) for rank, x in enumerate(said)}
        lengths = sum(x[0] for x in rows.values()), sum(x[1] for x in rows.values())
        for name, length, stated in (("seqlen_q", lengths[0], seqlen_q), ("seqlen_k", lengths[1], seqlen_k)):
            if stated is not None and stated != length:
                raise ValueError(f"{name} is {stated}; all ranks together hold {length} rows of {name[-1]}")
    for i, (name, length) in enumerate(zip("qk", lengths)):
        wanted = {rank: sum(count for _, count in held(ranks.count, given.layout, length, rank)) for rank in rows}
        wrong = [rank for rank, have in rows.items() if have[i] != wanted[rank]]
        if wrong:
            raise ValueError(f"{name} has {', '.join(str(have[i]) for have in rows.values())} rows on {ranks.names(list(rows))}; {length} positions over {ranks.count} ranks in "
                             f"layout {given.layout!r} are {', '.join(map(str, wanted.values()))}. fattn.distributed.shard gives each rank its rows")
    for name, x in (("bias", t.bias), ("mask", t.mask)):
        if x is not None and x.shape[3] != lengths[1]:
            raise ValueError(f"{name} has {x.shape[3]} columns; all ranks together hold {lengths[1]} keys, and a column is wanted for each")
    for name, bounds, length in (("cu_seqlens_q", given.cu_seqlens_q, lengths[0]), ("cu_seqlens_k", given.cu_seqlens_k, lengths[1])):
        if bounds is not None and bounds[-1] > length:
            raise ValueError(f"{name} ends at {bounds[-1]}; all ranks together hold {length} rows")
    return lengths


def _problem(ranks: Ranks, given: Given, lengths: tuple[int, int]) -> Problem:
    t = given.tensors
    return Problem(ranks.count, given.layout, *lengths, given.causal, given.window, given.cu_seqlens_q, given.cu_seqlens_k, given.method == "all_gather",
                   t.slopes is not None, t.bias is not None or t.mask is not None)


def _given(q, k, v, *, layout, method, causal, softmax_scale, window, softcap, alibi_slopes, bias, mask, dropout_p, dropout_state, document_q, document_k,
           cu_seqlens_q, cu_seqlens_k, sinks, deterministic, backend, algorithm) -> Given:
    choose("layout", layout, LAYOUTS)
    choose("method", method, dict.fromkeys(METHODS, 0))
    choose("backend", backend, _abi.BACKENDS), choose("algorithm", algorithm, _abi.ALGORITHMS)
    require_numbers(softmax_scale, softcap, dropout_p)
    packed = cu_seqlens_q is not None
    if not packed and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_q is None and cu_seqlens_k is given; say where each sequence begins among the queries")
    bounds_q = _bounds("cu_seqlens_q", cu_seqlens_q) if packed else None
    bounds_k = bounds_q if cu_seqlens_k is None else _bounds("cu_seqlens_k", cu_seqlens_k)
    if packed and len(bounds_q) != len(bounds_k):
        raise ValueError(f"cu_seqlens_q has {len(bounds_q)} numbers and cu_seqlens_k {len(bounds_k)}; allowed: as many")
    if dropout_p and method != "ulysses":
        raise NotImplementedError(f"dropout_p is {dropout_p} and method {method!r}; which weights are dropped depends on a pair's place in the whole matrix, which blocks of it "
                                  "do not know. Give method=\"ulysses\", whose ranks see whole sequences, or dropout_p=0")
    if dropout_p and dropout_state is None:
        raise ValueError("dropout_p is given and dropout_state is not; all ranks must drop the same weights: give every rank the same two numbers, a torch.int64 tensor (2)")
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    limits = window_limits(window)
    return Given(_taken(q, k, v, packed, alibi_slopes, bias, mask, document_q, document_k, sinks), packed, bounds_q, bounds_k, bool(causal),
                 limits, None if softmax_scale is None else float(softmax_scale), float(softcap or 0), float(dropout_p), dropout_state, layout, method, backend,
                 algorithm, bool(deterministic))


def _agree(ranks: Ranks, arguments: dict[str, Any], timeout: float, check: bool) -> tuple[Given, list[dict[str, Any]] | None]:
    """A rank whose arguments are wrong says so to the others before it raises."""
    if not check:
        return _given(**arguments), None
    try:
        given = _given(**arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = type(error).__name__
        ranks.exchange({"error": str(error), "kind": kind}, timeout)
        raise
    said = ranks.exchange(_signature(given) | {"rows": [given.tensors.q.shape[1], given.tensors.k.shape[1]]}, timeout)
    require_agreement(ranks, FUNCTION, [{name: x for name, x in each.items() if name != "rows"} for each in said])
    return given, said


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    layout: str = "zigzag",
    method: str = "ring",
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
            be multiples of the number of ranks. Results are the same but for rounding.
        causal, softmax_scale, window, softcap: as in `fattn.attention`, of positions in the whole sequence.
        alibi_slopes: (nheads) or (batch, nheads), on every rank the same.
        bias, mask: what broadcasts to (batch, nheads, rows of this rank, keys of all ranks), columns in the order of positions. Not with cu_seqlens_q.
        dropout_p, dropout_state: with method "ulysses" only, the state on every rank the same: the weights dropped are those of a call in one process.
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
        TypeError, ValueError, NotImplementedError: on every rank, naming the rank and what it gave, before anything is sent.
        RuntimeError: a rank has ended, or did not answer in time; it is named.
    """
    ranks = ranks_of(group)
    arguments = dict(q=q, k=k, v=v, layout=layout, method=method, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes,
                     bias=bias, mask=mask, dropout_p=dropout_p, dropout_state=dropout_state, document_q=document_q, document_k=document_k,
                     cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks, deterministic=deterministic, backend=backend, algorithm=algorithm)
    given, said = _agree(ranks, arguments, timeout, check)
    lengths = _lengths(ranks, given, said, seqlen_q, seqlen_k)
    problem = _problem(ranks, given, lengths)
    ranks.connect(given.tensors.q.device)
    if method == "ulysses":
        o, lse = exchange_heads(ranks, given, lengths, timeout)
    else:
        schedule = schedule_of(problem, ranks.rank)
        end = lengths[0] if given.cu_seqlens_q is None else given.cu_seqlens_q[-1]
        rows_of_sequences = sum(max(0, min(count, end - first)) for first, count in schedule.held_q)
        plan = Plan(ranks, schedule, lengths[1], rows_of_sequences, method == "all_gather", given.options, timeout)
        o, lse = RingAttention.apply(plan, *given.tensors)
    if given.packed:
        o, lse = o.squeeze(0), lse.squeeze(0)
    return (o, lse) if return_lse else o
