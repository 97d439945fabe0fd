"""What one rank does wrong, or does not do at all, while the others are in a call of fattn.distributed."""

import os
import time

import torch
import torch.distributed as distributed

import fattn.distributed as fd
from fattn.distributed import _transfer


def _rows(rank: int, rows: int = 6, **options) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    return [torch.randn(1, rows, 2, 8, **options) for _ in range(3)]


def mismatch(rank: int, name: str) -> str:
    """The error of this rank, where rank 1 gives something else; then that all can go on."""
    q, k, v = _rows(rank)
    wrong = rank == 1
    calls = {
        "causal": lambda: fd.ring_attention(q, k, v, causal=wrong),
        "dtype": lambda: fd.ring_attention(*(x.double() if wrong else x for x in (q, k, v)), backend="reference"),
        "window": lambda: fd.ring_attention(q, k, v, window=(3, 0) if wrong else (4, 0)),
        "headdim_v": lambda: fd.ring_attention(q, k, v[..., :4] if wrong else v),
        "cu_seqlens_q": lambda: fd.ring_attention(q[0], k[0], v[0], cu_seqlens_q=[0, 5 + wrong, 12]),
        "rows": lambda: fd.ring_attention(*(x[:, :5] if wrong else x for x in (q, k, v))),
        "gradients": lambda: fd.ring_attention(q.clone().requires_grad_(wrong), k, v),
        "wrong": lambda: fd.ring_attention(q, k[:, :2] if wrong else k, v),
        "sinks": lambda: fd.ring_attention(q, k, v, sinks=torch.zeros(2) if wrong else None),
        "unsupported": lambda: fd.ring_attention(q, k, v, alibi_slopes=torch.ones(q.shape[2], requires_grad=wrong)),
    }
    try:
        calls[name]()
        return "no error"
    except (ValueError, NotImplementedError) as error:
        text = f"{type(error).__name__}: {error}"
    assert fd.ring_attention(q, k, v).shape == q.shape
    return text


def end_inside(rank: int, culprit: int, how: str, backward: bool, timeout: float) -> tuple[str, float]:
    """One rank ends or stalls after the ranks have agreed. The error of the others, and after which time."""
    q, k, v = _rows(rank)
    if rank == culprit:
        ends = [1 if backward else 0]
        original = _transfer.Transfer.__init__

        def init(self, ranks, *arguments):
            if ranks.phase > ends[0]:
                os._exit(1) if how == "dies" else time.sleep(3600)
            original(self, ranks, *arguments)

        _transfer.Transfer.__init__ = init
    distributed.barrier()
    start = time.monotonic()
    try:
        fd.ring_attention(q.requires_grad_(), k, v, timeout=timeout).sum().backward()
        distributed.barrier()  # as a program goes on; another rank is named before this hangs for good
        return "no error", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - start


def does_not_call(rank: int, culprit: int, timeout: float) -> tuple[str, float]:
    q, k, v = _rows(rank)
    fd.ring_attention(q, k, v)
    if rank == culprit:
        time.sleep(3600)
    start = time.monotonic()
    try:
        fd.ring_attention(q, k, v, timeout=timeout)
        return "no error", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - start
