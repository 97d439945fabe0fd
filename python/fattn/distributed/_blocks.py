"""One block of a schedule, and the merging of two results."""

import torch

from .._operators import OPTIONS
from .._scores import NONE, Scores
from . import _dropout
from ._compute import WINDOW, accumulator, compute_backward, compute_forward
from ._schedule import Block
from ._timeline import Nothing


class Inputs:
    """What all blocks of a call share, beside q, k and v: options, and what a score depends on."""

    def __init__(self, options: tuple, slopes: torch.Tensor | None, bias: torch.Tensor | None, mask: torch.Tensor | None, document_q: torch.Tensor | None,
                 kind: torch.dtype, dropout: _dropout.Dropout | None, timeline: Nothing) -> None:
        self.options = (*options, *OPTIONS[len(options):])
        self.slopes = slopes  # (batch or 1, nheads), or None
        self.bias, self.mask = bias, mask  # rows of this rank, columns of all keys
        if bias is not None and bias.shape[2] == 1:  # its gradient is summed over blocks, none of which should round it
            self.bias = bias.to(kind)
        self.document_q = document_q
        self.kind = kind
        self.dropout = dropout
        self.timeline = timeline

    def options_of(self, window: tuple[int, int]) -> tuple:
        return (*self.options[:WINDOW], *window, *self.options[WINDOW + 2 :])

    def scores_of(self, block: Block, document_k: torch.Tensor | None) -> Scores:
        """`document_k` of the block's keys. Behind ALiBi's diagonal the distance of a pair is a number of the query less one of the key: the one cancels in
        the softmax (`row_terms`), the other is a bias. It counts from the key next to the queries, whose weight is the greatest."""
        rows, columns = slice(block.q_row, block.q_row + block.q_rows), slice(block.k_position, block.k_position + block.k_rows)
        scores = NONE._replace(bias=_part(self.bias, rows, columns), mask=_part(self.mask, rows, columns))
        if document_k is not None:
            scores = scores._replace(document_q=self.document_q[:, rows], document_k=document_k)
        if self.slopes is None:
            return scores
        if block.side == 0:
            return scores._replace(alibi_slopes=self.slopes if self.slopes.shape[0] > 1 else self.slopes[0])
        keys = torch.arange(block.k_rows, device=self.slopes.device, dtype=torch.float64)
        away = block.k_rows - 1 - keys if block.side > 0 else keys
        of_keys = (-self.slopes[:, :, None, None].double() * away).to(self.kind)
        return scores._replace(bias=of_keys if scores.bias is None else scores.bias + of_keys)

    def row_terms(self, block: Block) -> torch.Tensor | None:
        """(batch or 1, nheads, rows): what ALiBi takes from every score of a row, and `scores_of` does not."""
        if self.slopes is None or block.side == 0:
            return None
        rows = torch.arange(block.q_rows, device=self.slopes.device, dtype=torch.float64) + block.distance
        away = rows - (block.k_rows - 1) if block.side > 0 else -rows
        return (self.slopes[:, :, None].double() * away)


def _part(x: torch.Tensor | None, rows: slice, columns: slice) -> torch.Tensor | None:
    if x is None:
        return None
    return x[:, :, rows if x.shape[2] != 1 else slice(None), columns]


def merge_into(o: torch.Tensor, lse: torch.Tensor, o_part: torch.Tensor, lse_part: torch.Tensor) -> None:
    """o (batch, rows, nheads, headdim_v) and lse (batch, nheads, rows) become those of the keys of both. A part whose lse is lower by 1e4 has the weight 0, rows
    that see no key in either stay empty, and NaN stays. lse may be of a wider dtype than lse_part: that keeps its last places over many parts."""
    lse_part = lse_part.to(lse.dtype)
    weight = torch.where(lse_part == -torch.inf, 0, torch.sigmoid(lse_part - lse))
    o.lerp_(o_part.to(o.dtype), weight.to(o.dtype).transpose(1, 2).unsqueeze(3))
    lse.copy_(torch.logaddexp(lse, lse_part))


def add_block(inputs: Inputs, block: Block, q, k, v, document_k, o, lse) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a block and merges it into o and lse of all rows, which it returns: the block's own where they are None, that is where it is the first and has all rows."""
    rows, keys = slice(block.q_row, block.q_row + block.q_rows), slice(block.k_row, block.k_row + block.k_rows)
    scores = inputs.scores_of(block, None if document_k is None else document_k[:, keys])
    given = q[:, rows], k[:, keys], v[:, keys], inputs.options_of(block.window), scores
    with inputs.timeline.span("block"):
        o_part, lse_part = compute_forward(*given) if inputs.dropout is None else _dropout.forward(inputs.dropout, block, *given)
    terms = inputs.row_terms(block)
    if terms is not None:
        lse_part = (lse_part - terms).double()
    if o is None:
        return o_part.to(accumulator(q.dtype)), lse_part.double()
    with inputs.timeline.span("merge"):
        if block.merges:
            merge_into(o[:, rows], lse[:, :, rows], o_part, lse_part)
        else:
            o[:, rows], lse[:, :, rows] = o_part, lse_part
    return o, lse


def sums_like(x: torch.Tensor, written: bool) -> torch.Tensor:
    """Of x's shape in its accumulator's dtype, zeros unless every row is `written` before it is added to."""
    return (torch.empty_like if written else torch.zeros_like)(x, dtype=accumulator(x.dtype))


class Gradients:
    """Of this rank's rows, summed over blocks."""

    def __init__(self, q: torch.Tensor, written: bool, bias: torch.Tensor | None) -> None:
        kind = accumulator(q.dtype)
        self.dq = sums_like(q, written)
        self.dbias = None if bias is None else torch.zeros_like(bias, dtype=kind)


def add_gradients(inputs: Inputs, block: Block, dout, dlse, q, k, v, document_k, o, lse, to: Gradients, dk, dv) -> None:
    """`o` and `lse` are those of all keys; dk and dv those of the keys at hand."""
    rows, keys = slice(block.q_row, block.q_row + block.q_rows), slice(block.k_row, block.k_row + block.k_rows)
    scores = inputs.scores_of(block, None if document_k is None else document_k[:, keys])
    terms = inputs.row_terms(block)
    lse_of_block = lse[:, :, rows] if terms is None else (lse[:, :, rows] + terms).to(lse.dtype)
    given = (dout[:, rows], None if dlse is None else dlse[:, :, rows], q[:, rows], k[:, keys], v[:, keys], o[:, rows], lse_of_block,
             inputs.options_of(block.window), scores, to.dbias is not None)
    with inputs.timeline.span("block"):
        gradients = compute_backward(*given) if inputs.dropout is None else _dropout.backward(inputs.dropout, block, *given)
    with inputs.timeline.span("merge"):
        for x, part, gradient, adds in ((to.dq, rows, gradients[0], block.merges), (dk, keys, gradients[1], block.adds), (dv, keys, gradients[2], block.adds)):
            if adds:
                x[:, part] += gradient
            else:
                x[:, part] = gradient
        if to.dbias is not None:
            part = _part(to.dbias, rows, slice(block.k_position, block.k_position + block.k_rows))
            part += gradients[3].sum_to_size(part.shape)


def join_sinks(sinks: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
    """A key without a value for every row: once, when all keys are done."""
    sink = sinks.to(lse.dtype)[:, None]
    o.mul_(torch.where(lse == -torch.inf, 1, torch.sigmoid(lse - sink)).to(o.dtype).transpose(1, 2).unsqueeze(3))
    lse.copy_(torch.logaddexp(lse, sink.expand_as(lse)))


LOWEST_LSE = -(2.0**25)  # below it a row has no gradient (docs/NUMERICS.md)


def gradient_of_sinks(sinks: torch.Tensor, dout, dlse, o, lse) -> torch.Tensor:
    """Of this rank's rows."""
    kind = lse.dtype
    delta = (dout.to(kind) * o.to(kind)).sum(3).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    sink = sinks.to(kind)[:, None].expand_as(lse)
    none = (lse < LOWEST_LSE) | (sink == -torch.inf)
    return torch.where(none, 0, -torch.exp(sink - lse) * delta).sum((0, 2)).to(sinks.dtype)
