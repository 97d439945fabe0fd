"""Blocks of packed sequences that one call computes: many short sequences would else be as many calls a hop."""

import torch

from .._scores import NONE, Scores, Sequences
from ._blocks import Gradients, Inputs, merge_into
from ._compute import compute_backward, compute_forward
from ._schedule import Block

Group = tuple[Block, ...]


def _rows(group: Group) -> slice:
    """Of the queries, from the first block's to the last one's."""
    return slice(group[0].q_row, group[-1].q_row + group[-1].q_rows)


def _sequences(group: Group, device: torch.device) -> tuple[Sequences, torch.Tensor]:
    """The blocks as packed sequences, and how many keys each has. Queries between two blocks are a sequence without keys."""
    first, begins_q, begins_k, used = group[0].q_row, [0], [], []
    for block in group:
        if block.q_row - first > begins_q[-1]:
            begins_q.append(block.q_row - first)
            begins_k.append(0), used.append(0)
        begins_q.append(block.q_row - first + block.q_rows)
        begins_k.append(block.k_row), used.append(block.k_rows)
    lists = torch.tensor([begins_q, [*begins_k, 0], [*used, 0]], dtype=torch.int32).to(device)
    longest = max(b - a for a, b in zip(begins_q, begins_q[1:]))
    return Sequences(lists[0], lists[1], longest, max(used)), lists[2, :-1]


def _scores(inputs: Inputs, group: Group, used: torch.Tensor, document_k: torch.Tensor | None) -> Scores:
    scores = NONE._replace(seqused_k=used)
    if document_k is not None:
        scores = scores._replace(document_q=inputs.document_q[0, _rows(group)], document_k=document_k[0])
    return scores if inputs.slopes is None else scores._replace(alibi_slopes=inputs.slopes[0])


def add_group(inputs: Inputs, group: Group, q, k, v, document_k, o, lse) -> None:
    """As `add_block`."""
    rows, (sequences, used) = _rows(group), _sequences(group, q.device)
    with inputs.timeline.span("block"):
        o_part, lse_part = compute_forward(q[0, rows], k[0], v[0], inputs.options_of(group[0].window), _scores(inputs, group, used, document_k), sequences)
    with inputs.timeline.span("merge"):
        merge_into(o[:, rows], lse[:, :, rows], o_part.unsqueeze(0), lse_part.unsqueeze(0))


def add_group_gradients(inputs: Inputs, group: Group, dout, dlse, q, k, v, document_k, o, lse, to: Gradients, dk, dv) -> None:
    """As `add_gradients`."""
    rows, (sequences, used) = _rows(group), _sequences(group, q.device)
    with inputs.timeline.span("block"):
        dq, dk_part, dv_part = compute_backward(dout[0, rows], None if dlse is None else dlse[0, :, rows], q[0, rows], k[0], v[0], o[0, rows], lse[0, :, rows],
                                                inputs.options_of(group[0].window), _scores(inputs, group, used, document_k), False, sequences)
    with inputs.timeline.span("merge"):
        to.dq[0, rows] += dq
        dk[0] += dk_part
        dv[0] += dv_part
