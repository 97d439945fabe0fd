"""What the fronts for torch share, of dense tensors as of packed sequences: autocast, the choice of the function that differentiates, what is returned."""

import torch

from ._autograd import AttentionInFunctorch, AttentionWithScores, distinct, run_forward
from ._scores import NONE, Scores, Sequences


def autocast(device_type: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch's own attention does it: to autocast's dtype, but float64 and integers stay."""
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def wants_fp32(q: torch.Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether o is to be fp32 beside a q of 16 bits."""
    if out_dtype is None or out_dtype == q.dtype:
        return False
    if out_dtype != torch.float32 or q.dtype not in (torch.float16, torch.bfloat16):
        allowed = f"None, {q.dtype} and torch.float32" if q.dtype in (torch.float16, torch.bfloat16) else f"None and {q.dtype}"
        raise ValueError(f"out_dtype is {out_dtype!r} and q {q.dtype}; allowed: {allowed}. Convert the result with .to()")
    return True


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple, scores: Scores | None, sequences: Sequences | None, needs_grad: bool,
        in_functorch: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse. `options` as the operators have them."""
    if not needs_grad:
        return run_forward(q, k, v, options, scores, sequences)
    inputs = (q, k, v, *(scores or NONE), *(sequences or ()))
    if in_functorch:
        return AttentionInFunctorch.apply(*inputs, options)
    return AttentionWithScores.apply(*(distinct(*inputs) if torch.compiler.is_compiling() else inputs), options)


def results(o: torch.Tensor, lse: torch.Tensor | None, scores: Scores | None, return_lse: bool,
            return_dropout_state: bool) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """What a front returns."""
    if return_dropout_state:
        state = scores and scores.dropout_state
        return (o, lse, state) if return_lse else (o, state)
    return (o, lse) if return_lse else o
