"""What a call of attention costs by itself, with what computes it now and with fattn, in turns on random numbers."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from .calls import Call, wait

_SECONDS = 0.5  # for one call, all ways together
_SAMPLES = 5  # at least
_LEAST = 1e-3  # of a sample, on a GPU: launches are waited for together


@dataclasses.dataclass(frozen=True)
class Price:
    """Seconds of a forward pass, and of a forward and a backward pass if both were asked for."""

    forward: float
    both: float | None


def _result(x: Any) -> torch.Tensor:
    return x[0] if isinstance(x, tuple) else x


def _once(function: Callable, inputs: tuple[torch.Tensor, ...], backward: bool) -> None:
    o = _result(function(*inputs))
    wanted = [x for x in inputs if x.requires_grad]
    if backward and o.requires_grad and wanted:
        torch.autograd.grad(o, wanted, torch.ones_like(o))


def _sample(function: Callable, inputs: tuple[torch.Tensor, ...], backward: bool, times: int) -> float:
    device = inputs[0].device
    wait(device)
    begin = time.perf_counter()
    for _ in range(times):
        _once(function, inputs, backward)
    wait(device)
    return (time.perf_counter() - begin) / times


def _in_turns(ways: dict[str, Callable], inputs: tuple[torch.Tensor, ...], backward: bool) -> dict[str, float]:
    """The least of each."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    times = {}
    for name, function in ways.items():
        _once(function, inputs, backward)  # compiles what there is to compile
        first = _sample(function, inputs, backward, 1)
        times[name] = 1 if inputs[0].device.type == "cpu" else max(1, round(_LEAST / first))
    end = time.perf_counter() + _SECONDS
    while len(samples[next(iter(ways))]) < _SAMPLES or (time.perf_counter() < end and len(samples[next(iter(ways))]) < 10 * _SAMPLES):
        for name, function in ways.items():
            samples[name].append(_sample(function, inputs, backward, times[name]))
    return {name: min(x) for name, x in samples.items()}


def price_of(call: Call, ways: dict[str, Callable], backward: bool) -> dict[str, Price]:
    """Of each way.

    Raises:
        NotImplementedError, ValueError, RuntimeError: a way does not compute it; the message is its own.
    """
    below_autograd = call.kind in ("written", "operator")  # where tensors no longer say whether they ask for a gradient
    inputs = tuple(x.random(torch.is_grad_enabled() and (x.requires_grad or (below_autograd and backward))) for x in (call.q, call.k, call.v))
    asks = backward and any(x.requires_grad for x in inputs)
    forward = _in_turns(ways, inputs, False)
    both = _in_turns(ways, inputs, True) if asks else {}
    return {name: Price(forward[name], both.get(name)) for name in ways}
