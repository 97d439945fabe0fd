"""What `fattn check --values` puts where: the calls, the places that nobody or few see, and the values."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

BLOCK = 64
HIDDEN = ("seqused_k", "causal", "window", "mask_keys", "mask_pairs", "bias_inf", "documents", "packed")
OPTIONS = ("none", *HIDDEN, "scores")
EXTENTS = ("one element", "one key", "one block", "all")
TENSORS = ("q", "k", "v")


def values_of(dtype: torch.dtype) -> dict[str, float]:
    """Huge: products overflow, the number does not. Subnormal: of the dtype."""
    info = torch.finfo(dtype)
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": float(info.max) / 4, "subnormal": float(info.tiny) / 4, "zero": 0.0}


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen: int
    nheads: int
    headdim: int


class Call:
    """A call with one option: its arguments, which keys may be spoiled, and which query sees which key: (seqlen_q, seqlen), of packed sequences (total, total)."""

    def __init__(self, option: str, shape: Shape, device: torch.device) -> None:
        self.option, self.shape, self.device = option, shape, device
        n, rows = shape.seqlen, shape.seqlen_q
        self.arguments: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}  # what `fattn.warmup` is told beside shapes
        self.packed = option == "packed"
        if self.packed:
            n = rows = shape.batch * shape.seqlen
        keys = torch.arange(n, device=device)
        own = torch.arange(rows, device=device) + n - rows
        self.sees = torch.ones(rows, n, dtype=torch.bool, device=device)
        # Keys that are spoiled: those of the end, or of the middle, mostly not whole blocks of them.
        end = torch.arange(n - max(1, n // 40), n, device=device)
        middle = torch.arange(n // 3, n // 3 + max(1, n // 20), device=device)
        self.keys = end
        if option == "seqused_k":
            self.arguments["seqused_k"] = torch.full((shape.batch,), int(end[0]), dtype=torch.int32, device=device)
            self.plan["seqused_k"] = True
            self.sees[:, end] = False
        elif option == "causal":  # seen by the last queries alone
            self.arguments["causal"] = self.plan["causal"] = True
            self.sees = keys[None] <= own[:, None]
        elif option == "window":  # seen by the first queries alone
            window = (max(1, n // 8), 0)
            self.arguments["window"] = self.plan["window"] = window
            self.sees = (keys[None] <= own[:, None]) & (keys[None] >= own[:, None] - window[0])
            self.keys = torch.arange(max(1, n // 20), device=device)
        elif option == "mask_keys":
            mask = torch.ones(1, 1, 1, n, dtype=torch.bool, device=device)
            mask[..., end] = False
            self._mask(mask, end)
        elif option == "mask_pairs":
            mask = torch.ones(1, 1, rows, n, dtype=torch.bool, device=device)
            mask[..., middle] = False
            self._mask(mask, middle)
        elif option == "bias_inf":
            bias = torch.zeros(1, 1, rows, n, device=device)
            bias[..., middle] = -math.inf
            self.arguments["bias"], self.plan["bias"] = bias, tuple(bias.shape)
            self.sees[:, middle] = False
            self.keys = middle
        elif option == "documents":  # seen by the queries of the first document
            ids = (keys // max(1, n // 3 - 1)).int()
            self.arguments["document_q"] = ids[own].expand(shape.batch, -1).contiguous()
            self.arguments["document_k"] = ids.expand(shape.batch, -1).contiguous()
            self.plan["documents"] = True
            self.sees = ids[own][:, None] == ids[None]
            self.keys = keys[ids == 0]
        elif option == "packed":  # rows behind the last sequence
            offsets = torch.arange(shape.batch + 1, device=device) * shape.seqlen
            offsets[-1] = end[0]
            self.arguments |= {"cu_seqlens_q": offsets.int(), "max_seqlen_q": shape.seqlen, "max_seqlen_k": shape.seqlen}
            self.plan["packed"] = (shape.batch, shape.seqlen, shape.seqlen)
            entry = torch.bucketize(keys, offsets[1:], right=True)
            self.sees = (entry[:, None] == entry[None]) & (entry < shape.batch)
        if option in ("none", "scores"):
            self.keys = middle

    def _mask(self, mask: torch.Tensor, keys: torch.Tensor) -> None:
        self.arguments["mask"], self.plan["mask"] = mask, tuple(mask.shape)
        self.sees[:, keys] = False
        self.keys = keys

    def inputs(self, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
        """q, k, v and dout of randn."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return {name: torch.randn(self.tensor_shape(name), generator=generator, device=self.device).to(dtype) for name in ("q", "k", "v", "dout")}

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        lead = () if self.packed else (self.shape.batch,)
        return *lead, self.sees.shape[0 if name in ("q", "dout") else 1], self.shape.nheads, self.shape.headdim

    def untouched(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of spoiled keys: the queries that see none of them, and the keys that no other query sees."""
        touched = self.sees[:, keys].any(1)
        return ~touched, ~self.sees[touched].any(0)


@dataclasses.dataclass(frozen=True)
class Spoiler:
    """`apply` spoils inputs in place. `keys`: of k and v, where nothing else is; their values may change no bit of what does not see them."""

    values: str
    where: str
    apply: Callable[[dict[str, torch.Tensor]], None]
    keys: torch.Tensor | None = None


def _put(names: tuple[str, ...], rows: torch.Tensor, value: float, extent: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Into these rows of the tensors; rows is the dimension before heads and headdim."""
    def apply(inputs: dict[str, torch.Tensor]) -> None:
        for name in names:
            x = inputs[name]
            if extent == "one element":
                x[(0,) * (x.dim() - 3) + (int(rows[0]), 0, 0)] = value
            else:
                x[..., rows[rows < x.shape[-3]], :, :] = value
    return apply


def _rows(rows: torch.Tensor, extent: str) -> torch.Tensor:
    last = rows[-1:]
    return last if extent in ("one element", "one key") else rows[-BLOCK:] if extent == "one block" else rows


def _multiply(factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(inputs: dict[str, torch.Tensor]) -> None:
        for name in ("q", "k"):
            inputs[name].mul_(factor)
    return apply


def _fill(names: tuple[str, ...], value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(inputs: dict[str, torch.Tensor]) -> None:
        for name in names:
            inputs[name].fill_(value)
    return apply


def of_call(call: Call, dtype: torch.dtype, full: bool, quick: bool) -> Iterator[Spoiler]:
    """NaN everywhere; other values, unless it is to be full, where they cost most. Quick: NaN in one element and in all."""
    values = values_of(dtype)
    if call.option in HIDDEN:
        for name, value in values.items():
            for extent in EXTENTS if full or (name == "nan" and not quick) else ("one element", "all") if name == "nan" else () if quick else ("all",):
                rows = _rows(call.keys, extent)
                yield Spoiler(name, f"hidden, {extent}", _put(("k", "v"), rows, value, extent), rows)
    elif call.option == "none":
        for name, value in values.items():
            for extent in EXTENTS if full or (name == "nan" and not quick) else ("one element",) if quick else ("one element", "all"):
                for tensor in TENSORS:
                    everything = torch.arange(call.sees.shape[0 if tensor == "q" else 1], device=call.device)
                    rows = everything if extent == "all" else _rows(everything[: len(everything) // 2 + 1], extent)
                    yield Spoiler(name, f"visible, {extent} of {tensor}", _put((tensor,), rows, value, extent))
    else:
        yield Spoiler("times 8", "q and k", _multiply(8))
        yield Spoiler("times 64", "q and k", _multiply(64))
        yield Spoiler("constant", "q and k", _fill(("q", "k"), 0.75))
        yield Spoiler("zero", "k and v", _fill(("k", "v"), 0.0))
