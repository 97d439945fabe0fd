"""What fattn.distributed.ring_attention is given is checked here, agreed on by all ranks, and made to a call of one rank."""

import zlib
from typing import Any, NamedTuple

import torch

from .. import _abi
from .._core import autocast
from .._operators import rows_contiguous
from .._options import choose, flags, window_limits
from .._refused import require_dense, require_numbers
from .._scores import of_pairs
from ._call import Call
from ._dropout import Dropout
from ._heads import Heads, choose_degree, require_heads
from ._ranks import Part, Ranks, require_agreement
from ._ring import Plan, Tensors
from ._schedule import LAYOUTS, Problem, held, schedule_of

METHODS = ("ring", "all_gather", "ulysses", "mixed")
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
    ulysses_degree: int | None
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


def _described(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def _digest(bounds: tuple[int, ...] | None) -> str | None:
    """They may be many."""
    return None if bounds is None else f"{len(bounds)} numbers, crc32 {zlib.crc32(repr(bounds).encode()):08x}"


def _signature(given: Given, gradients: bool) -> dict[str, Any]:
    """What all ranks must have the same of."""
    t = given.tensors
    there = [name for name in ("slopes", "bias", "mask", "document_q", "sinks") if getattr(t, name) is not None]
    return {"method": given.method, "ulysses_degree": given.ulysses_degree, "layout": given.layout, "dtype": str(t.q.dtype), "device": t.q.device.type, "batch": t.q.shape[0], "nheads": t.q.shape[2],
            "nheads_k": t.k.shape[2], "headdim": t.q.shape[3], "headdim_v": t.v.shape[3], "packed": given.packed,
            "cu_seqlens_q": _digest(given.cu_seqlens_q), "cu_seqlens_k": _digest(given.cu_seqlens_k), "causal": given.causal, "window": list(given.window),
            "softmax_scale": given.softmax_scale, "softcap": given.softcap, "dropout_p": given.dropout_p,
            "dropout_state": given.dropout_state.tolist() if given.dropout_p and given.dropout_state is not None else None,
            "tensors that are given": there, "gradients": gradients,
            "dtype, batch and heads of bias and mask": [None if x is None else [str(x.dtype), *x.shape[:2]] for x in (t.bias, t.mask)] if given.method in ("ulysses", "mixed") else None,
            "gradient of the bias": gradients and t.bias is not None and t.bias.requires_grad,
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


def _degree(ranks: Ranks, given: Given) -> int:
    """How many ranks exchange heads."""
    nheads, nheads_k = given.tensors.q.shape[2], given.tensors.k.shape[2]
    if given.method not in ("ulysses", "mixed"):
        return 1
    degree = ranks.count if given.method == "ulysses" else given.ulysses_degree
    if degree is None:
        degree = choose_degree(ranks.count, nheads, nheads_k)
    if degree < 1 or ranks.count % degree:
        raise ValueError(f"ulysses_degree is {degree} and there are {ranks.count} ranks; allowed: a number that divides them, here "
                         f"{', '.join(str(d) for d in range(1, ranks.count + 1) if ranks.count % d == 0)}")
    require_heads(given.method, degree, nheads, nheads_k)
    return degree


def _dropout(given: Given, heads: Heads | None) -> Dropout | None:
    if not given.dropout_p:
        return None
    seed, offset = given.dropout_state.tolist()
    return Dropout(given.dropout_p, seed, offset, given.tensors.q.shape[2], 0 if heads is None else heads.mine.start)


def call_of(ranks: Ranks, given: Given, lengths: tuple[int, int], timeout: float) -> Call:
    """Of this rank. Ranks that exchange heads follow each other; together they hold what one rank of a ring does that has them as one."""
    t = given.tensors
    degree = _degree(ranks, given)
    rings = ranks.count // degree
    heads, ring = None, ranks
    if given.method in ("ulysses", "mixed"):
        first = ranks.rank // degree * degree
        heads = Heads(Part(ranks, tuple(range(first, first + degree))), given.layout, lengths, t.q.shape[2], timeout, t.q.device)
        ring = Part(ranks, tuple(range(ranks.rank % degree, ranks.count, degree)))
    dropout = _dropout(given, heads)
    problem = Problem(rings, given.layout, *lengths, given.causal, given.window, given.cu_seqlens_q, given.cu_seqlens_k, given.method == "all_gather",
                      t.slopes is not None, t.bias is not None or t.mask is not None or dropout is not None)
    schedule = schedule_of(problem, ring.rank)
    end = lengths[0] if given.cu_seqlens_q is None else given.cu_seqlens_q[-1]
    rows_of_sequences = sum(max(0, min(count, end - first)) for first, count in schedule.held_q)
    return Call(heads, Plan(ring, schedule, lengths[1], rows_of_sequences, given.method == "all_gather", given.options, dropout, timeout))


def given_of(q, k, v, *, layout, method, ulysses_degree, causal, softmax_scale, window, softcap, alibi_slopes, bias, mask, dropout_p, dropout_state, document_q, document_k,
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
    if ulysses_degree is not None and method != "mixed":
        raise ValueError(f"ulysses_degree is {ulysses_degree} and method {method!r}; it is for method=\"mixed\" alone, whose groups of as many ranks exchange heads")
    if dropout_p and not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; allowed: 0 (none) to 1 - 2^-16")
    if dropout_p and dropout_state is None:
        raise ValueError("dropout_p is given and dropout_state is not; all ranks must drop the same weights: give every rank the same two numbers, a torch.int64 tensor (2)")
    if dropout_p and not (isinstance(dropout_state, torch.Tensor) and dropout_state.shape == (2,) and dropout_state.dtype == torch.int64):
        raise ValueError(f"dropout_state is {_described(dropout_state)}; allowed: torch.int64 (2), seed and offset of the whole matrix")
    causal, deterministic = flags(causal=causal, deterministic=deterministic)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    limits = window_limits(window)
    return Given(_taken(q, k, v, packed, alibi_slopes, bias, mask, document_q, document_k, sinks), packed, bounds_q, bounds_k, causal,
                 limits, None if softmax_scale is None else float(softmax_scale), float(softcap or 0), float(dropout_p), dropout_state, layout, method, ulysses_degree, backend,
                 algorithm, deterministic)


def _agree(ranks: Ranks, arguments: dict[str, Any], timeout: float, check: bool, gradients: bool) -> tuple[Given, list[dict[str, Any]] | None]:
    """A rank whose arguments are wrong says so to the others before it raises."""
    if not check:
        return given_of(**arguments), None
    try:
        given = given_of(**arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = type(error).__name__
        ranks.exchange({"error": str(error), "kind": kind}, timeout)
        raise
    said = ranks.exchange(_signature(given, gradients) | {"rows": [given.tensors.q.shape[1], given.tensors.k.shape[1]]}, timeout)
    require_agreement(ranks, FUNCTION, [{name: x for name, x in each.items() if name != "rows"} for each in said])
    return given, said


def prepared(ranks: Ranks, arguments: dict[str, Any], timeout: float, check: bool, gradients: bool, seqlen_q: int | None,
             seqlen_k: int | None) -> tuple[Given, tuple[int, int], Call]:
    """The arguments of ring_attention, how many rows of q and k all ranks hold, and what this one does."""
    given, said = _agree(ranks, arguments, timeout, check, gradients)
    lengths = _lengths(ranks, given, said, seqlen_q, seqlen_k)
    call = call_of(ranks, given, lengths, timeout)
    ranks.connect(given.tensors.q.device)
    return given, lengths, call
