"""Carries out a schedule: keys and values travel while blocks are computed; their gradients travel back."""

from typing import Any, NamedTuple

import torch

from ._blocks import Gradients, Inputs, add_block, add_gradients, gradient_of_sinks, join_sinks, sums_like
from ._compute import accumulator
from ._dropout import Dropout
from ._groups import add_group, add_group_gradients
from ._ranks import Part, Ranks
from ._schedule import Hop, Schedule
from ._timeline import NOTHING, Nothing
from ._transfer import Transfer, add_rows, put_rows, rows_of


class Plan(NamedTuple):
    """Of a call, beside its tensors."""

    ranks: Ranks | Part
    schedule: Schedule
    seqlen_k: int
    rows_of_sequences: int  # of this rank's queries; those behind the last packed sequence belong to none
    gathered: bool
    options: tuple
    dropout: Dropout | None
    timeout: float
    timeline: Nothing = NOTHING


class Tensors(NamedTuple):
    """(batch, rows, heads, headdim) each; the others (batch or 1, nheads) and so on, or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    document_q: torch.Tensor | None
    document_k: torch.Tensor | None
    sinks: torch.Tensor | None


GRADIENTS_BEHIND = 3  # tags of k, v and documents are below it


class _Keys:
    """Brings the keys of every hop: those of the next are on their way while a hop is computed, gathered all are at once."""

    def __init__(self, plan: Plan, tensors: Tensors, tag: int) -> None:
        self.plan, self.tag = plan, tag
        self.own = [tensors.k, tensors.v] + ([] if tensors.document_k is None else [tensors.document_k])
        self._sent: dict[Any, list[torch.Tensor]] = {}
        self._under_way: dict[int, Transfer] = {}

    def start(self, h: int) -> None:
        hop = self.plan.schedule.hops[h]
        if hop.rows_sent and hop.sent not in self._sent:  # hops mostly send the same rows
            self._sent[hop.sent] = [rows_of(x, hop.sent) for x in self.own]
        sent = self._sent[hop.sent] if hop.rows_sent else []
        received = [x.new_empty((x.shape[0], hop.rows_received, *x.shape[2:])) for x in self.own]
        self._under_way[h] = Transfer(self.plan.ranks, self.plan.timeout, hop.send_to, sent, hop.receive_from, received, self.tag, self.plan.timeline.sends("keys", h))

    def of(self, h: int) -> list[torch.Tensor]:
        if h == 0:
            return self.own
        transfer = self._under_way.pop(h)
        with self.plan.timeline.span("wait"):
            transfer.wait()
        return list(transfer.received)

    def hops(self) -> Any:
        """(hop, its keys) for each hop with blocks, in their order."""
        hops = self.plan.schedule.hops
        if self.plan.gathered:
            for h in range(1, len(hops)):
                self.start(h)
            whole = [x.new_empty((x.shape[0], self.plan.seqlen_k, *x.shape[2:])) for x in self.own]
            for h, hop in enumerate(hops):
                for x, part in zip(whole, self.of(h)):
                    put_rows(x, hop.received if h else self.plan.schedule.held_k, part)
            with self.plan.timeline.hop(len(hops) - 1):
                yield hops[-1], whole
            return
        for h, hop in enumerate(hops):
            if h + 1 < len(hops):
                self.start(h + 1)
            with self.plan.timeline.hop(h):
                yield hop, self.of(h)


def _tag(ranks: Ranks | Part) -> int:
    ranks.begin()
    return ranks.tag()


def _key_documents(keys: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    k, v, *documents = keys
    return k, v, documents[0] if documents else None


def forward(plan: Plan, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    q, kind = tensors.q, accumulator(tensors.q.dtype)
    batch, rows, nheads, _ = q.shape
    o = lse = None
    if not plan.schedule.begins_with_all_queries():
        o = q.new_empty((batch, rows, nheads, tensors.v.shape[3]), dtype=kind)
        lse = q.new_full((batch, nheads, rows), -torch.inf, dtype=torch.float64)
        if not plan.schedule.writes_all_queries():
            o.zero_()
    inputs = Inputs(plan.options, tensors.slopes, tensors.bias, tensors.mask, tensors.document_q, accumulator(q.dtype), plan.dropout, plan.timeline)
    for hop, keys in _Keys(plan, tensors, _tag(plan.ranks)).hops():
        k, v, document_k = _key_documents(keys)
        for block in hop.blocks:
            o, lse = add_block(inputs, block, q, k, v, document_k, o, lse)
        for group in hop.groups:
            add_group(inputs, group, q, k, v, document_k, o, lse)
    if tensors.sinks is not None:
        join_sinks(tensors.sinks, o[:, : plan.rows_of_sequences], lse[:, :, : plan.rows_of_sequences])
    plan.ranks.end()
    return o.to(q.dtype), lse.to(kind)


class _KeyGradients:
    """Of this rank's keys, from every rank that saw them: its own first, then in the order of the hops."""

    def __init__(self, plan: Plan, k: torch.Tensor, v: torch.Tensor, tag: int) -> None:
        self.plan, self.tag = plan, tag + GRADIENTS_BEHIND
        written = not plan.gathered and plan.schedule.hops[0].writes_all_keys(k.shape[1])
        self.own = [sums_like(x, written) for x in (k, v)]
        self._under_way: list[tuple[Hop, Transfer]] = []
        self._begun = 0

    def send_back(self, hop: Hop, parts: list[torch.Tensor]) -> None:
        """The way of the keys, backwards."""
        received = [x.new_empty((x.shape[0], hop.rows_sent, *x.shape[2:])) for x in self.own]
        self._begun += 1
        transfer = Transfer(self.plan.ranks, self.plan.timeout, hop.receive_from, parts, hop.send_to, received, self.tag, self.plan.timeline.sends("gradients", self._begun))
        self._under_way.append((hop, transfer))

    def take(self, but: int = 0) -> None:
        """Adds what came, but for the last ones."""
        while len(self._under_way) > but:
            hop, transfer = self._under_way.pop(0)
            with self.plan.timeline.span("wait"):
                transfer.wait()
            with self.plan.timeline.span("merge"):
                for x, part in zip(self.own, transfer.received):
                    add_rows(x, hop.sent, part)


def backward(plan: Plan, tensors: Tensors, o, lse, dout, dlse, wants_dbias: bool, wants_dsinks: bool) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, dbias, dsinks."""
    q, k, v = tensors.q, tensors.k, tensors.v
    inputs = Inputs(plan.options, tensors.slopes, tensors.bias, tensors.mask, tensors.document_q, accumulator(q.dtype), plan.dropout, plan.timeline)
    to = Gradients(q, plan.schedule.writes_all_queries(), tensors.bias if wants_dbias else None)
    tag = _tag(plan.ranks)
    of_keys = _KeyGradients(plan, k, v, tag)
    hops = plan.schedule.hops
    for hop, keys in _Keys(plan, tensors, tag).hops():
        k_here, v_here, document_k = _key_documents(keys)
        here = of_keys.own if not plan.gathered and hop is hops[0] else [sums_like(x, hop.writes_all_keys(x.shape[1])) for x in (k_here, v_here)]
        for block in hop.blocks:
            add_gradients(inputs, block, dout, dlse, q, k_here, v_here, document_k, o, lse, to, *here)
        for group in hop.groups:
            add_group_gradients(inputs, group, dout, dlse, q, k_here, v_here, document_k, o, lse, to, *here)
        if plan.gathered:
            for x, part in zip(of_keys.own, here):
                x += rows_of(part, plan.schedule.held_k) if plan.schedule.held_k else 0
            for other in hops[1:]:
                of_keys.send_back(other, [rows_of(x, other.received) for x in here] if other.rows_received else [])
        elif hop is not hops[0]:
            of_keys.send_back(hop, here)
            of_keys.take(but=1)
    of_keys.take()
    dsinks = gradient_of_sinks(tensors.sinks, dout, dlse, o, lse) if wants_dsinks else None
    plan.ranks.end()
    return (to.dq.to(q.dtype), *(x.to(k.dtype) for x in of_keys.own), None if to.dbias is None else to.dbias.to(tensors.bias.dtype), dsinks)
