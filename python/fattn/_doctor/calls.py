"""What doctor knows of one call of attention, and the clock that times it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Like:
    """A tensor without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(x: torch.Tensor, autocast: bool = False) -> "Like":
        """With `autocast` in the dtype that a function of attention is given then."""
        nested, kind, dtype = x.is_nested or x.layout is not torch.strided, x.device.type, x.dtype
        if autocast and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return Like(() if nested else tuple(x.shape), () if nested else x.stride(), dtype, x.device, x.requires_grad)

    def dim(self) -> int:
        return len(self.shape)

    def heads_first(self) -> "Like":
        """Of (batch, seqlen, heads, headdim)."""
        if self.dim() != 4:
            return self
        shape, strides = ((x[0], x[2], x[1], x[3]) for x in (self.shape, self.strides))
        return dataclasses.replace(self, shape=shape, strides=strides)

    def random(self, requires_grad: bool) -> torch.Tensor:
        """Numbers in the same order in memory, where that is known, so that a call costs the same."""
        x = torch.randn(self.shape, device=self.device, dtype=torch.float32).to(self.dtype)
        if len(self.strides) == x.dim() and 0 not in self.strides:
            x = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).copy_(x)
        return x.requires_grad_(requires_grad)


@dataclasses.dataclass
class Call:
    """One call of attention: heads before seqlen in q, k and v, as torch's function has them."""

    kind: str  # "sdpa", "interface" (of transformers), "written" (matmul, softmax, matmul), "operator" (seen as such alone)
    function: str  # its name, for people
    layer: str = ""
    module: str = ""  # the class of the layer
    where: str = ""  # file and line
    q: Like | None = None
    k: Like | None = None
    v: Like | None = None
    causal: bool = False
    mask: Any = None  # a tensor; FlexAttention has one of its own kind
    masked: bool = False  # a mask that was seen at work only
    dropout_p: float = 0.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    again: Callable[..., Any] | None = None  # the same call on other q, k and v
    owner: torch.nn.Module | None = None
    operators: set[str] = dataclasses.field(default_factory=set)
    ours: bool = False
    marks: list[Any] = dataclasses.field(default_factory=list)  # begin and end of the forward pass
    backward_begin: Any = None
    backward_ends: list[Any] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple:
        """The same for calls that cost the same and have the same reasons."""
        mask = (tuple(self.mask.shape), self.mask.dtype, self.mask.requires_grad) if isinstance(self.mask, torch.Tensor) else type(self.mask)
        plain = tuple(sorted((name, x) for name, x in self.options.items() if isinstance(x, (int, float, str, bool))))
        return (self.kind, self.function, self.module, self.q, self.k, self.v, self.causal, mask, self.masked, self.dropout_p, plain, self.ours,
                frozenset(self.operators))

    def seconds(self) -> tuple[float, float | None]:
        """Of the forward pass, and of the backward pass if it was seen."""
        begin, end = self.marks
        ended = self.backward_begin is not None and self.backward_ends
        return between(begin, end), max(between(self.backward_begin, x) for x in self.backward_ends) if ended else None


def mark(device: torch.device) -> Any:
    """This moment: on a GPU an event between its kernels."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(begin: Any, end: Any) -> float:
    """Seconds."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
