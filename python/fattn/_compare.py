"""fattn.transformers.compare: a model with fattn beside the same model with another attention: time, memory, and whether the outputs agree."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._memory import most_held


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Seconds are medians of a forward pass, bytes the most that torch's allocator held during one beyond the model and its inputs, outputs included (None on other
    devices than the CPU and CUDA). `error` and `error_baseline` are the largest differences of the outputs from the baseline computed in float64."""

    baseline: str
    seconds: float
    seconds_baseline: float
    bytes: int | None
    bytes_baseline: int | None
    error: float
    error_baseline: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        lines = [f"{'':>12}{'time':>12}{'memory':>12}{'error':>12}"]
        for name, seconds, size, error in (("fattn", self.seconds, self.bytes, self.error),
                                           (self.baseline, self.seconds_baseline, self.bytes_baseline, self.error_baseline)):
            memory = "-" if size is None else f"{size / 2**20:.1f} MiB"
            lines.append(f"{name:>12}{seconds * 1e3:>9.3f} ms{memory:>12}{error:>12.3g}")
        verdict = "agree" if self.passed else "DIFFER"
        lines.append(f"{self.seconds_baseline / self.seconds:.2f} times as fast; the outputs {verdict}: error {self.error:.3g} of {self.allowed:.3g} allowed")
        return "\n".join(lines)


class Float64(TorchFunctionMode):
    """What a model of float64 computes in float32 for safety (softmax, normalisation) is computed in float64; where a mask of float64 becomes -inf in float32,
    rows that see nothing would even be NaN."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        if function is torch.Tensor.float:
            return arguments[0].double()
        if arguments and isinstance(arguments[0], torch.Tensor) and options.get("dtype") == torch.float32:
            options["dtype"] = torch.float64
        if function is torch.Tensor.to:
            arguments = tuple(torch.float64 if x is torch.float32 else x for x in arguments)
        if function is getattr(torch, "_grouped_mm", None) and arguments[0].dtype == torch.float64:
            return _grouped_mm(arguments[0], arguments[1], options["offs"])
        return function(*arguments, **options)


def _grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As torch's, which has no float64: the rows of each group times its matrix. Mixtures of experts are made of it."""
    bounds = [0, *ends.tolist()]
    return torch.cat([rows[begin:end] @ matrix for begin, end, matrix in zip(bounds, bounds[1:], matrices)])


def _outputs(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The first result, of the tokens that are no padding."""
    with torch.no_grad():
        first = model(**inputs)[0]
    mask = inputs.get("attention_mask")
    return first[mask.bool()] if isinstance(mask, torch.Tensor) and mask.shape == first.shape[:2] else first


def _measure(model: torch.nn.Module, inputs: Mapping[str, Any], repeat: int) -> tuple[torch.Tensor, float, int | None]:
    device = next(model.parameters()).device
    outputs = _outputs(model, inputs)  # warms up
    size = most_held(lambda: _outputs(model, inputs), device)
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        _outputs(model, inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return outputs.double(), statistics.median(seconds), size


def compare(model: torch.nn.Module, inputs: Mapping[str, Any], *, baseline: str = "eager", repeat: int = 10) -> Comparison:
    """Runs the model's forward pass with attn_implementation "fattn" and with `baseline`, prints and returns what was measured.

    The outputs agree if fattn's error is at most twice that of the baseline in the model's dtype, both against the baseline in float64 (on the CPU, in a copy of the
    model), plus one unit in the last place. The model is left as it was.

    Args:
        model: a model of transformers, in eval mode (dropout makes outputs random).
        inputs: the keyword arguments of its forward pass; `attention_mask` says which tokens count.
        baseline: "eager", "sdpa", ...
        repeat: forward passes that are timed.

    Raises:
        TypeError: inputs are no keyword arguments.
        ValueError: the model is in training mode.
        NotImplementedError: fattn does not compute the model's attention; the message says why.
    """
    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs is a {type(inputs).__name__}; it must be the keyword arguments of the model's forward pass, {{'input_ids': ...}}")
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes outputs random; call model.eval() first")
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(baseline)
        usual, seconds_baseline, bytes_baseline = _measure(model, inputs, repeat)
        wide = copy.deepcopy(model).to("cpu", torch.float64)
        with Float64():
            exact = _outputs(wide, {name: _to_cpu(x) for name, x in inputs.items()})
        del wide
        model.set_attn_implementation("fattn")
        ours, seconds, size = _measure(model, inputs, repeat)
    finally:
        model.set_attn_implementation(before)
    error, error_baseline = (float((x.cpu() - exact).abs().max()) for x in (ours, usual))
    unit = torch.finfo(next(model.parameters()).dtype).eps * float(exact.abs().max())
    result = Comparison(baseline, seconds, seconds_baseline, size, bytes_baseline, error, error_baseline, 2 * error_baseline + unit)
    print(result)
    return result


def _to_cpu(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.cpu().double() if x.is_floating_point() else x.cpu()
