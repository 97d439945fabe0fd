"""Rotary embeddings as fattn.rotary computes them, with the peers' type of errors."""

from typing import Any

import torch

from .. import _rotary
from ._calls import peer_error


def _with_errors(function: Any, *arguments: Any) -> torch.Tensor:
    try:
        return function(*arguments)
    except ValueError as error:
        raise peer_error(error) from None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return _with_errors(_rotary.rotate, x, cos, sin, interleaved)


def rotate_at(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return _with_errors(_rotary.rotate_at, x, cos, sin, positions, interleaved)
