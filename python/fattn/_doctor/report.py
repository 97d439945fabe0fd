"""What doctor found: a `Diagnosis`, for programs and for people."""

import dataclasses
import itertools
import re
import textwrap
from typing import Any

_WIDTH = 78
_GROUPS = 8  # that are written out: a generation has one for each length


@dataclasses.dataclass(frozen=True)
class Layer:
    """The calls of attention of one layer that are alike.

    Attributes:
        name, module: of the layer in the model, and its class; "" outside of every module.
        where: file and line of the call, where that is not in torch, transformers or fattn.
        calls: in one pass.
        function: what the model calls.
        fattn: whether fattn computes it.
        runs: what computes it.
        why: the reason why that is not fattn.
        change: what to do about it; "" where nothing helps.
        q, k, v: shapes, heads before seqlen.
        dtype, device, causal, masked, dropout_p: of the call.
        seconds: of all its calls in a pass, in the model.
        speedup: how many times as fast fattn is, measured on the same shapes; None if it is fattn already or cannot compute it.
    """

    name: str
    module: str
    where: str
    calls: int
    function: str
    fattn: bool
    runs: str
    why: str
    change: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: str
    device: str
    causal: bool
    masked: bool
    dropout_p: float
    seconds: float
    speedup: float | None


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds < 10 else f"{seconds:.4g} s"


def _names(names: list[str]) -> str:
    """h.0.attn, h.1.attn, h.2.attn: h.{0..2}.attn, where they differ in one number only."""
    parts = [re.split(r"(\d+)", name) for name in names]
    if len(names) > 1 and len({len(x) for x in parts}) == 1:
        differing = [i for i, column in enumerate(zip(*parts)) if len(set(column)) > 1]
        if len(differing) == 1 and all(x[differing[0]].isdecimal() for x in parts):
            i = differing[0]
            numbers = [int(x[i]) for x in parts]
            text = f"{numbers[0]}..{numbers[-1]}" if numbers == list(range(numbers[0], numbers[-1] + 1)) else ",".join(map(str, numbers))
            return "".join((*parts[0][:i], "{", text, "}", *parts[0][i + 1 :]))
    return ", ".join(names)


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent), break_on_hyphens=False)


def _labelled(label: str, text: str) -> str:
    return _fill(text, f"  {label:<9}")


def _plural(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _problem(layer: Layer) -> str:
    if not layer.q:
        return layer.dtype
    shapes = [" x ".join(map(str, x)) for x in (layer.q, layer.k, layer.v)]
    same = len(set(shapes)) == 1
    text = f"q, k and v {shapes[0]}" if same else f"q {shapes[0]}, k {shapes[1]}" + (f", v {shapes[2]}" if shapes[2] != shapes[1] else " as v")
    options = [name for name, there in (("causal", layer.causal), ("with a mask", layer.masked), (f"dropout {layer.dropout_p:.4g}", layer.dropout_p)) if there]
    return ", ".join((text, layer.dtype, layer.device, *options))


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `fattn.doctor` returns. `str` of it says it in words; `to_dict` is for JSON.

    Attributes:
        model: its class, or the function's name.
        layers: each layer's calls of attention.
        backward: whether a pass is forward and backward.
        device, compiled: where it ran, and whether torch.compile has it or a part of it.
        seconds: of a pass of the whole.
        attention_seconds: of that, in attention.
        share: attention's part of it, from 0 to 1.
        expected_seconds, expected_speedup: of the whole, where all layers run fattn that can and are faster by it.
        limit: how many times as fast the whole were if attention took no time.
        notes: what else there is to know.
    """

    model: str
    layers: tuple[Layer, ...]
    backward: bool
    device: str
    compiled: bool
    seconds: float
    attention_seconds: float
    expected_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        return min(self.attention_seconds / self.seconds, 1.0)

    @property
    def expected_speedup(self) -> float:
        return self.seconds / self.expected_seconds

    @property
    def limit(self) -> float:
        return float("inf") if self.share == 1 else 1 / (1 - self.share)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; the limit is None where it is infinite."""
        limit = None if self.share == 1 else self.limit
        return {**dataclasses.asdict(self), "share": self.share, "expected_speedup": self.expected_speedup, "limit": limit}

    def _group(self, layers: list[Layer]) -> str:
        first, calls, seconds = layers[0], sum(x.calls for x in layers), sum(x.seconds for x in layers)
        names = _names([x.name for x in layers if x.name])
        title = (names or self.model) + (f" ({first.module})" if first.module not in ("", names or self.model) else "")
        places = f", {', '.join(sorted({x.where for x in layers}))}" if first.where else ""
        lines = [_fill(f"{title}: {_plural(calls, 'call')} of {first.function}{places}"), _labelled("computes", _problem(first)), _labelled("runs", first.runs)]
        time = f"{_milliseconds(seconds)} of a pass"
        if not first.fattn:
            lines.append(_labelled("why not", first.why))
            if first.change:
                lines.append(_labelled("change", first.change))
            if first.speedup is not None:
                time += f"; with fattn {_milliseconds(seconds / first.speedup)}, {first.speedup:.2f} times as fast"
        lines.append(_labelled("time", time))
        return "\n".join(lines)

    def _summary(self) -> str:
        one_pass = "a forward and a backward pass" if self.backward else "a forward pass"
        text = f"Attention takes {100 * self.share:.0f} % of {one_pass}, {_milliseconds(self.attention_seconds)} of {_milliseconds(self.seconds)}. "
        if all(x.fattn for x in self.layers):
            return text + "All of it runs fattn."
        if all(x.speedup is None for x in self.layers):
            return text + "What does not run fattn could not be measured by it."
        if self.expected_seconds == self.seconds:
            return text + "No layer is expected to be faster by fattn than by what it runs now."
        limit = f" (at most {self.limit:.2f}, if attention took no time)" if self.share < 1 else ""
        return text + (f"With fattn where it is faster {one_pass} is expected to take {_milliseconds(self.expected_seconds)}: {self.expected_speedup:.2f} times as fast{limit}.")

    def __str__(self) -> str:
        calls, ours = sum(x.calls for x in self.layers), sum(x.calls for x in self.layers if x.fattn)
        if not calls:
            found = [_fill(f"{self.model}: no attention was found: no call of F.scaled_dot_product_attention, fattn, flash_attn or transformers' attention, and no softmax "
                           "between two products of matrices.")]
        else:
            if calls == 1:
                head = f"{self.model}: fattn {'computes' if ours else 'does not compute'} its one call of attention."
            else:
                head = f"{self.model}: fattn computes {'all' if ours == calls else 'none' if not ours else ours} of its {calls} calls of attention."
            groups = [list(group) for _, group in itertools.groupby(sorted(self.layers, key=_alike_order(self.layers)), key=_alike)]
            rest = [layer for group in groups[_GROUPS:] for layer in group]
            more = [f"And {_plural(len(groups) - _GROUPS, 'more kind')} of calls, {_milliseconds(sum(x.seconds for x in rest))} of a pass."] if rest else []
            found = [_fill(head), *map(self._group, groups[:_GROUPS]), *more, _fill(self._summary())]
        return "\n\n".join([*found, *(_fill(note) for note in self.notes)])


def _alike(layer: Layer) -> tuple:
    return tuple(x for field, x in dataclasses.asdict(layer).items() if field not in ("name", "seconds", "calls", "where"))


def _alike_order(layers: tuple[Layer, ...]) -> Any:
    """By where the first that is alike stands."""
    first: dict[tuple, int] = {}
    for i, layer in enumerate(layers):
        first.setdefault(_alike(layer), i)
    return lambda layer: first[_alike(layer)]
