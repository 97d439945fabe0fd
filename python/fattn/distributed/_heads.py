"""Ulysses (Jacobs et al. 2023): ranks exchange heads for rows, so that each has some heads of whole sequences, and back."""

from collections.abc import Callable
from typing import Any

import torch

from .._attention import attention
from .._varlen import attention_varlen
from ._ranks import Ranks
from ._schedule import Ranges, held
from ._transfer import Transfer


def _order(ranges: list[Ranges]) -> list[int]:
    """Where the rows of all ranks, behind each other, are among positions."""
    return [first + i for of_rank in ranges for first, count in of_rank for i in range(count)]


def _exchange(ranks: Ranks, parts: list[torch.Tensor], received: list[torch.Tensor], timeout: float) -> None:
    """parts[r] goes to rank r, received[r] comes from it."""
    ranks.begin()
    received[ranks.rank].copy_(parts[ranks.rank])
    transfers = []
    for away in range(1, ranks.count):
        to, come = (ranks.rank + away) % ranks.count, (ranks.rank - away) % ranks.count
        transfers.append(Transfer(ranks, timeout, to, [parts[to]], come, [received[come]], (ranks.phase & 0xFFFFFF) * 8))
    for transfer in transfers:
        transfer.wait()
    ranks.end()


def _to_heads(ranks: Ranks, x: torch.Tensor, rows: list[int], places: torch.Tensor, timeout: float) -> torch.Tensor:
    """(batch, rows, heads, d) of this rank's rows to (batch, positions, heads / ranks, d)."""
    n, each = ranks.count, x.shape[2] // ranks.count
    parts = [x[:, :, r * each : (r + 1) * each].contiguous() for r in range(n)]
    received = [x.new_empty((x.shape[0], rows[r], each, x.shape[3])) for r in range(n)]
    _exchange(ranks, parts, received, timeout)
    whole = x.new_empty((x.shape[0], sum(rows), each, x.shape[3]))
    whole[:, places] = torch.cat(received, 1)
    return whole


def _to_rows(ranks: Ranks, x: torch.Tensor, rows: list[int], places: torch.Tensor, timeout: float) -> torch.Tensor:
    """The way back."""
    parts = [part.contiguous() for part in x[:, places].split(rows, 1)]
    received = [x.new_empty((x.shape[0], rows[ranks.rank], x.shape[2], x.shape[3])) for _ in range(ranks.count)]
    _exchange(ranks, parts, received, timeout)
    return torch.cat(received, 2)


class _Exchanged(torch.autograd.Function):
    """One of the two ways; the gradient takes the other."""

    @staticmethod
    def forward(ctx, x, way: Callable, back: Callable, *of):
        ctx.back, ctx.of = back, of
        return way(of[0], x, *of[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        return ctx.back(ctx.of[0], dx, *ctx.of[1:]), *(None,) * (2 + len(ctx.of))


def _require_heads(ranks: Ranks, nheads: int, nheads_k: int) -> None:
    for name, heads in (("nheads", nheads), ("nheads_k", nheads_k)):
        if heads % ranks.count:
            raise ValueError(f"{name} is {heads} and there are {ranks.count} ranks; method=\"ulysses\" gives each rank as many heads, so that it must be a multiple. "
                             "method=\"ring\" takes any number")


def _of_heads(given: Any, begin: int, each: int, heads: int) -> dict[str, Any]:
    """What belongs to query heads, of this rank's."""
    t, mine = given.tensors, slice(begin, begin + each)
    return {"alibi_slopes": None if t.slopes is None else (t.slopes[:, mine] if t.slopes.shape[0] > 1 else t.slopes[0, mine]),
            "sinks": None if t.sinks is None else t.sinks[mine]}


def _with_dropout(attend: Callable, q, k, v, given: Any, begin: int, heads: int, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of batch entry b and head h follow from offset + b * heads + h: an entry at a time, with the offset of its first head here."""
    seed, offset = given.dropout_state.tolist()
    results = []
    for b in range(q.shape[0]):
        first = (offset + b * heads + begin + 2**63) % 2**64 - 2**63
        state = torch.tensor([seed, first], dtype=torch.int64, device=q.device)
        entry = {name: x[b : b + 1] if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] == q.shape[0] else x for name, x in options.items()}
        results.append(attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], dropout_p=given.dropout_p, dropout_state=state, **entry))
    return torch.cat([x[0] for x in results]), torch.cat([x[1] for x in results])


def exchange_heads(ranks: Ranks, given: Any, lengths: tuple[int, int], timeout: float) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of this rank's rows."""
    t = given.tensors
    _require_heads(ranks, t.q.shape[2], t.k.shape[2])
    for name, x in (("bias", t.bias), ("mask", t.mask), ("document_q", t.document_q)):
        if x is not None:
            raise NotImplementedError(f"{name} is given with method=\"ulysses\", which does not bring it to the rank that needs it; take method=\"ring\"")
    if given.packed and given.dropout_p and len(given.cu_seqlens_q) > 2:
        raise NotImplementedError("dropout_p is given with several packed sequences, whose random numbers follow from the sequence and the head; method=\"ulysses\" has some heads "
                                  "only. Give a batch, or dropout_p=0")
    ways = []
    for length in lengths:
        ranges = [held(ranks.count, given.layout, length, r) for r in range(ranks.count)]
        ways.append(([sum(count for _, count in x) for x in ranges], torch.tensor(_order(ranges), dtype=torch.int64, device=t.q.device)))
    of_q, of_k = ((ranks, *way, timeout) for way in ways)
    q, k, v = (_Exchanged.apply(x, _to_heads, _to_rows, *of) for x, of in ((t.q, of_q), (t.k, of_k), (t.v, of_k)))
    each = q.shape[2]
    begin = ranks.rank * each
    options = {"causal": given.causal, "softmax_scale": given.softmax_scale, "window": given.window, "softcap": given.softcap, "deterministic": given.deterministic,
               "backend": given.backend, "algorithm": given.algorithm, "return_lse": True, **_of_heads(given, begin, each, t.q.shape[2])}
    attend = attention
    if given.packed:
        bounds = {f"cu_seqlens_{x}": torch.tensor(getattr(given, f"cu_seqlens_{x}"), dtype=torch.int32, device=q.device) for x in "qk"}

        def attend(q, k, v, **more):
            return tuple(x.unsqueeze(0) for x in attention_varlen(q[0], k[0], v[0], **bounds, **more))

    o, lse = _with_dropout(attend, q, k, v, given, begin, t.q.shape[2], options) if given.dropout_p else attend(q, k, v, **options)
    o = _Exchanged.apply(o, _to_rows, _to_heads, *of_q)
    lse = _Exchanged.apply(lse.transpose(1, 2).unsqueeze(3), _to_rows, _to_heads, *of_q)
    return o, lse.squeeze(3).transpose(1, 2)
