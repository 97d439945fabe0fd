"""Dropout of a block: the weights that one process drops. Random numbers follow from a pair's place in the whole matrix (docs/NUMERICS.md), and the operators
take that of a block which begins where 16 rows and 64 keys of them do."""

from typing import NamedTuple

import torch

from .._operators import FEW_OPTIONS
from .._scores import Scores
from ._compute import compute_backward, compute_forward
from ._schedule import Block

_ROWS, _KEYS = 16, 64


class Dropout(NamedTuple):
    p: float
    seed: int
    offset: int
    nheads: int  # of all ranks
    head: int  # the first of this rank's

    def options(self, options: tuple) -> tuple:
        return (*options[:FEW_OPTIONS], self.p, *options[FEW_OPTIONS + 1 :])

    def state(self, entry: int, row: int, key: int, device: torch.device) -> torch.Tensor:
        """Of batch entry or packed sequence `entry`, at the place of a whole matrix."""
        first = (self.offset + entry * self.nheads + self.head + 2**63) % 2**64 - 2**63
        return torch.tensor([self.seed, first] + ([row, key] if row or key else []), dtype=torch.int64, device=device)


def _behind(x: torch.Tensor | None, dim: int, count: int, value: float = 0) -> torch.Tensor | None:
    """x behind `count` rows of that value."""
    if x is None or count == 0:
        return x
    shape = list(x.shape)
    shape[dim] = count
    return torch.cat([x.new_full(shape, value), x], dim)


class _Call:
    """A block that begins earlier, where random numbers do: with queries whose results are thrown away, and keys that a mask hides."""

    def __init__(self, dropout: Dropout, block: Block, q: torch.Tensor, k: torch.Tensor, scores: Scores) -> None:
        self.rows, self.keys = block.q_place % _ROWS, block.k_place % _KEYS
        self._dropout, self._first = dropout, block.sequence
        self._place = block.q_place - self.rows, block.k_place - self.keys
        mask = scores.mask
        if mask is None and self.keys:
            mask = torch.ones((1, 1, 1, k.shape[1]), dtype=torch.bool, device=q.device)
        of_rows = [self.rows if x is not None and x.shape[2] != 1 else 0 for x in (scores.bias, mask)]
        self._scores = scores._replace(bias=_behind(_behind(scores.bias, 3, self.keys), 2, of_rows[0]), mask=_behind(_behind(mask, 3, self.keys), 2, of_rows[1]),
                                       document_q=_behind(scores.document_q, 1, self.rows), document_k=_behind(scores.document_k, 1, self.keys))
        # Random numbers of entry b and head h are those of b * nheads + h: one call has them all if it has all heads.
        batch = q.shape[0]
        self.entries = [slice(0, batch)] if batch == 1 or q.shape[2] == dropout.nheads else [slice(b, b + 1) for b in range(batch)]

    def scores_of(self, entry: slice, device: torch.device) -> Scores:
        s = self._scores
        parts = {name: x[entry] if (x := getattr(s, name)) is not None and x.shape[0] != 1 else x for name in ("bias", "mask", "document_q", "document_k")}
        slopes = s.alibi_slopes
        if slopes is not None and slopes.dim() == 2 and slopes.shape[0] != 1:
            slopes = slopes[entry]
        return s._replace(**parts, alibi_slopes=slopes, dropout_state=self._dropout.state(self._first + entry.start, *self._place, device))


def forward(dropout: Dropout, block: Block, q, k, v, options: tuple, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """As compute_forward."""
    call = _Call(dropout, block, q, k, scores)
    q, k, v = _behind(q, 1, call.rows), _behind(k, 1, call.keys), _behind(v, 1, call.keys)
    parts = [compute_forward(q[b], k[b], v[b], dropout.options(options), call.scores_of(b, q.device)) for b in call.entries]
    return torch.cat([o for o, _ in parts])[:, call.rows :], torch.cat([lse for _, lse in parts])[:, :, call.rows :]


def backward(dropout: Dropout, block: Block, dout, dlse, q, k, v, o, lse, options: tuple, scores: Scores, wants_dbias: bool) -> tuple[torch.Tensor, ...]:
    """As compute_backward. dbias has a batch of 1 only if every entry has the same bias."""
    call = _Call(dropout, block, q, k, scores)
    dout, q, o = (_behind(x, 1, call.rows) for x in (dout, q, o))
    k, v = (_behind(x, 1, call.keys) for x in (k, v))
    dlse, lse = _behind(dlse, 2, call.rows), _behind(lse, 2, call.rows, -torch.inf)  # rows without a gradient
    parts = [compute_backward(dout[b], None if dlse is None else dlse[b], q[b], k[b], v[b], o[b], lse[b], dropout.options(options), call.scores_of(b, q.device),
                              wants_dbias) for b in call.entries]
    dq, dk, dv = (torch.cat([part[i] for part in parts]) for i in range(3))
    found = (dq[:, call.rows :], dk[:, call.keys :], dv[:, call.keys :])
    if not wants_dbias:
        return found
    dbias = torch.cat([part[3] for part in parts])
    return *found, dbias[:, :, call.rows if dbias.shape[2] != 1 else 0 :, call.keys :]
