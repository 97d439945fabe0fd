"""What a score depends on beside q and k: lengths, ALiBi, bias, mask, dropout, documents. Made ready here for the operators, in the order of their schema."""

from collections import namedtuple
from typing import NamedTuple

import torch

from . import _abi
from ._operators import rows_contiguous
from ._refused import require_dense


Scores = namedtuple("Scores", [row.name for row in _abi.SCORES], defaults=[None] * len(_abi.SCORES))
NONE = Scores()


class Sequences(NamedTuple):
    """Packed sequences: (batch + 1), int32, where each begins, and the most rows of one."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def new_dropout_state(device: torch.device) -> torch.Tensor:
    """Seed and offset from torch's generator of the device: torch.manual_seed repeats them, and checkpointing does."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def of_pairs(name: str, x: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """(batch or 1, nheads or 1, seqlen_q or 1, seqlen_k) of what broadcasts to it."""
    if x.dim() > 4:
        raise ValueError(f"{name} has {x.dim()} dimensions; allowed: up to 4, (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k) or the last of those")
    while x.dim() < 4:
        x = x.unsqueeze(0)
    if x.shape[3] == 1 and seqlen_k != 1:
        x = x.expand(*x.shape[:3], seqlen_k)
    return rows_contiguous(x)


def as_int32(x: torch.Tensor) -> torch.Tensor:
    """What does not fit stays outside of what is allowed."""
    return x.clamp(-1, 2**31 - 1).to(torch.int32) if x.dtype == torch.int64 else x


def _ids(name: str, x: torch.Tensor | None) -> torch.Tensor | None:
    """Of documents. int64 is not converted here: different ids could become the same."""
    if x is None:
        return None
    if x.dtype != torch.int32:
        raise ValueError(f"{name} is a tensor of {x.dtype}; allowed: torch.int32. Convert it with .to(torch.int32), if that keeps different ids apart")
    return rows_contiguous(x) if x.dim() else x


def prepare(q: torch.Tensor, seqlen_k: int, seqused_k: torch.Tensor | None, alibi_slopes: torch.Tensor | None, bias: torch.Tensor | None,
            mask: torch.Tensor | None, dropout_p: float, dropout_state: torch.Tensor | None, document_q: torch.Tensor | None,
            document_k: torch.Tensor | None) -> Scores:
    document_k = document_q if document_k is None else document_k
    given = {"seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "dropout_state": dropout_state, "document_q": document_q,
             "document_k": document_k}
    for name, x in given.items():
        if x is not None:
            require_dense(name, x, " or None")
    if seqused_k is not None:
        seqused_k = as_int32(seqused_k)
    if alibi_slopes is not None:
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("alibi_slopes asks for a gradient, which is not computed; detach it, or pass slope * distance as bias, which has one")
        if alibi_slopes.dtype in (torch.float16, torch.bfloat16):
            alibi_slopes = alibi_slopes.float()
    if bias is not None:
        bias = of_pairs("bias", bias, seqlen_k)
        if bias.dtype != q.dtype and bias.dtype in (torch.float16, torch.bfloat16):
            bias = bias.float()
        if bias.is_floating_point() and bias.dtype not in (torch.float32, q.dtype):
            raise ValueError(f"bias is a tensor of {bias.dtype}; allowed: torch.float32 and q's dtype, {q.dtype}. Convert it with .to()")
    if mask is not None:
        mask = of_pairs("mask", mask, seqlen_k)
    if not dropout_p:
        dropout_state = None
    elif dropout_state is None:
        dropout_state = new_dropout_state(q.device)
    return Scores(seqused_k, alibi_slopes, bias, mask, dropout_state, _ids("document_q", document_q), _ids("document_k", document_k))
