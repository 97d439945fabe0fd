"""A call of the operators whose result is merged or added to others: of fp32 at least."""

import torch

from .._autograd import _run_backward, run_forward
from .._operators import FP32_OUTPUTS
from .._scores import Scores, Sequences

WINDOW = 4  # where window_left is in the operators' options


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Results are summed in it over hops."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _summed(options: tuple, q: torch.Tensor) -> tuple:
    """The options of a call whose results are merged or added up: those of 16-bit inputs come in fp32, or each hop would round them once more."""
    return (*options[:FP32_OUTPUTS], q.dtype in (torch.float16, torch.bfloat16), *options[FP32_OUTPUTS + 1 :])


def compute_forward(q, k, v, options: tuple, scores: Scores, sequences: Sequences | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """o, in the accumulator's dtype, and lse."""
    return run_forward(q, k, v, _summed(options, q), scores, sequences)


def compute_backward(dout, dlse, q, k, v, o, lse, options: tuple, scores: Scores, wants_dbias: bool,
                     sequences: Sequences | None = None) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, and dbias if it is wanted. On a GPU those of 16-bit inputs are rounded once: its fastest backward pass has no others."""
    options = _summed(options, q) if q.device.type == "cpu" else options
    return _run_backward(dout, dlse, q, k, v, o, lse, scores, sequences, options, (True, False) if wants_dbias else ())
