"""What a score depends on beside q and k: lengths, ALiBi, bias, mask, dropout, documents; sinks. Made ready here for the operators, in the order of their schema."""

from collections import namedtuple
from typing import NamedTuple

import torch

from . import _abi
from ._operators import NUMBERS, SCORES, rows_contiguous
from ._refused import require_dense


Scores = namedtuple("Scores", SCORES, defaults=[None] * len(SCORES))
NONE = Scores()
# Those that a caller gives: all but the numbers.
GIVEN = tuple(row.name for row in _abi.SCORES)
_DROPOUT_STATE, _DOCUMENT_Q, _DOCUMENT_K = map(Scores._fields.index, ("dropout_state", "document_q", "document_k"))


class Sequences(NamedTuple):
    """Packed sequences: (batch + 1), int32, where each begins, and the most rows of one. cu_seqlens_k: None of a paged cache."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
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


def keys_of(k: torch.Tensor, block_table: torch.Tensor | None, bhsd: bool) -> int:
    """seqlen_k: of a paged cache as many as its table has room for."""
    rows = k.shape[2 if bhsd else 1]
    return rows if block_table is None or not isinstance(block_table, torch.Tensor) or block_table.dim() != 2 else rows * block_table.shape[1]


def require_no_gradient_of_pages(needs_grad: bool) -> None:
    if needs_grad:
        raise NotImplementedError("block_table is given and a tensor asks for a gradient, or torch.func maps over the call; a paged cache has neither. Call it in "
                                  "torch.inference_mode(), or give k and v as they were written, without block_table")


def _ids(name: str, x: torch.Tensor) -> torch.Tensor:
    """Of documents. int64 is not converted here: different ids could become the same."""
    if x.dtype != torch.int32:
        raise ValueError(f"{name} is a tensor of {x.dtype}; allowed: torch.int32. Convert it with .to(torch.int32), if that keeps different ids apart")
    return rows_contiguous(x) if x.dim() else x


# How each of Scores is made ready for the operators: (tensor, q, seqlen_k) -> tensor.


def _slopes(slopes: torch.Tensor, q: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    if slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("alibi_slopes asks for a gradient, which is not computed; detach it, or pass slope * distance as bias, which has one")
    return slopes.float() if slopes.dtype in (torch.float16, torch.bfloat16) else slopes


def _bias(bias: torch.Tensor, q: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    bias = of_pairs("bias", bias, seqlen_k)
    if bias.dtype != q.dtype and bias.dtype in (torch.float16, torch.bfloat16):
        bias = bias.float()
    if bias.is_floating_point() and bias.dtype not in (torch.float32, q.dtype):
        raise ValueError(f"bias is a tensor of {bias.dtype}; allowed: torch.float32 and q's dtype, {q.dtype}. Convert it with .to()")
    return bias


def _sinks(sinks: torch.Tensor, q: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    if not sinks.is_floating_point():
        raise ValueError(f"sinks is a tensor of {sinks.dtype}; allowed: floating point, one number a query head")
    return sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


_READY = {
    "seqused_k": lambda x, q, seqlen_k: as_int32(x),
    "alibi_slopes": _slopes,
    "bias": _bias,
    "mask": lambda x, q, seqlen_k: of_pairs("mask", x, seqlen_k),
    "document_q": lambda x, q, seqlen_k: _ids("document_q", x),
    "document_k": lambda x, q, seqlen_k: _ids("document_k", x),
    "sinks": _sinks,
    "block_table": lambda x, q, seqlen_k: rows_contiguous(as_int32(x)) if x.dim() else x,
}
_PREPARATIONS = tuple((name, _READY.get(name)) for name in GIVEN)


def prepare(q: torch.Tensor, seqlen_k: int, dropout_p: float, *given: torch.Tensor | None) -> Scores:
    """Of GIVEN, in that order. Without dropout no state is looked at; document_k is document_q unless given."""
    tensors = list(given)
    if tensors[_DOCUMENT_K] is None:
        tensors[_DOCUMENT_K] = tensors[_DOCUMENT_Q]
    for i, x in enumerate(tensors):
        if x is not None:
            name, ready = _PREPARATIONS[i]
            require_dense(name, x, " or None")
            if ready is not None:
                tensors[i] = ready(x, q, seqlen_k)
    if not dropout_p:
        tensors[_DROPOUT_STATE] = None
    elif tensors[_DROPOUT_STATE] is None:
        tensors[_DROPOUT_STATE] = new_dropout_state(q.device)
    return Scores(*tensors)


def _is_symbol(x: float | None) -> bool:
    """Whether torch.compile has it as a symbol, as it has a float that has changed once. Then nothing is known of it."""
    if x is None:
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not (statically_known_true(x == 0.5) or statically_known_true(x != 0.5))


def with_symbols(options: tuple, scores: Scores | None) -> tuple[tuple, Scores | None]:
    """`options` of the operators, and scores, with softmax_scale and softcap as tensors where they are symbols: as floats each value would be compiled anew."""
    for place, name, default in ((0, NUMBERS[0], None), (6, NUMBERS[1], 0)):
        if len(options) > place and _is_symbol(options[place]):
            # A product: torch.compile makes one with a symbol to an operation on tensors, and knows no other way from one to the other.
            scores = (scores or NONE)._replace(**{name: torch.ones((), dtype=torch.float64, device="cpu") * options[place]})
            options = (*options[:place], default, *options[place + 1 :])
    return options, scores


def wants_gradient(scores: Scores) -> bool:
    """Of what has one."""
    return (scores.bias is not None and scores.bias.requires_grad) or (scores.sinks is not None and scores.sinks.requires_grad)
