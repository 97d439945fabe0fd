"""The problems that are measured: options of attention, the tensors of a call, and its kernels compiled ahead."""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import os
from collections.abc import Iterable
from typing import Any

import torch

from .. import _plan
from .terminal import Progress

OPTIONS = ("none", "bias", "window", "documents", "packed", "decode", "softcap", "alibi")
DECODE_QUERIES = 4
SOFTCAP = 30.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """Of self-attention with one of OPTIONS; decode has few queries and no backward pass."""

    dtype: str
    headdim: int
    causal: bool
    option: str
    batch: int
    seqlen: int
    nheads: int

    @property
    def seqlen_q(self) -> int:
        return min(DECODE_QUERIES, self.seqlen) if self.option == "decode" else self.seqlen

    @property
    def backward(self) -> bool:
        return self.option != "decode"

    @property
    def window(self) -> tuple[int, int] | None:
        return (self.seqlen // 4, self.seqlen // 8) if self.option == "window" else None

    @property
    def lengths(self) -> list[int]:
        """Of the sequences of a batch: all rows, then less and less."""
        return [max(1, self.seqlen - b * self.seqlen // (self.batch + 1)) for b in range(self.batch)]

    def plan_arguments(self, device_index: int) -> dict[str, Any]:
        """Of `fattn.warmup`."""
        q, k = (self.batch, self.seqlen_q, self.nheads, self.headdim), (self.batch, self.seqlen, self.nheads, self.headdim)
        packed = None
        if self.option == "packed":
            q = k = (sum(self.lengths), self.nheads, self.headdim)
            packed = (self.batch, self.seqlen, self.seqlen)
        return dict(q=q, k=k, dtype=self.dtype, device="cuda", device_index=device_index, backward=self.backward, causal=self.causal, window=self.window,
                    softcap=SOFTCAP if self.option == "softcap" else None, alibi_slopes=self.option == "alibi", documents=self.option == "documents",
                    packed=packed, bias=(1, self.nheads, self.seqlen, self.seqlen) if self.option == "bias" else None)

    def __str__(self) -> str:
        return f"{self.dtype} d{self.headdim}{' causal' if self.causal else ''} {self.option}"


class Inputs:
    """q, k, v = sigma randn in the dtype, dout = randn, (batch, seqlen, heads, headdim), and what the option adds. Sequences of a packed problem are the first
    rows of the batch entries."""

    def __init__(self, problem: Problem, sigma: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
        p = self.problem = problem

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.q = (sigma * normal(p.batch, p.seqlen_q, p.nheads, p.headdim)).to(dtype)
        self.k, self.v = ((sigma * normal(p.batch, p.seqlen, p.nheads, p.headdim)).to(dtype) for _ in range(2))
        self.dout = normal(*self.q.shape).to(dtype)
        self.scale = 1 / math.sqrt(p.headdim)
        rows = torch.arange(p.seqlen_q, device=device)[:, None] + p.seqlen - p.seqlen_q  # where a query stands among the keys
        keys = torch.arange(p.seqlen, device=device)[None]
        self.hidden = keys > rows if p.causal else torch.zeros(p.seqlen_q, p.seqlen, dtype=torch.bool, device=device)
        self.terms = None  # what is added to scores, float32
        self.softcap = SOFTCAP if p.option == "softcap" else None
        self.arguments: dict[str, Any] = {"causal": p.causal}
        self.cu_seqlens = None
        if p.option == "bias":
            self.arguments["bias"] = self.terms = normal(1, p.nheads, p.seqlen_q, p.seqlen)
        elif p.option == "alibi":
            slopes = torch.exp2(-8 * torch.arange(1, p.nheads + 1, device=device) / p.nheads)
            self.arguments["alibi_slopes"] = slopes
            self.terms = -slopes[None, :, None, None] * (rows - keys).abs().float()
        elif p.option == "window":
            left, right = p.window
            self.arguments["window"] = (left, right)
            self.hidden = self.hidden | (keys < rows - left) | (keys > rows + right)
        elif p.option == "documents":
            ids = (torch.arange(p.seqlen, device=device) // max(1, p.seqlen // 3 - 1)).int()
            self.arguments["document_q"] = ids.expand(p.batch, -1).contiguous()
            self.hidden = self.hidden | (ids[:, None] != ids[None])
        elif p.option == "softcap":
            self.arguments["softcap"] = SOFTCAP
        elif p.option == "packed":
            lengths = torch.tensor(p.lengths, device=device)
            self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            self.kept = torch.arange(p.seqlen, device=device)[None] < lengths[:, None]  # (batch, seqlen)
            beyond = ~self.kept
            self.hidden = self.hidden[None] | beyond[:, None, :] | beyond[:, :, None]
            self.hidden = self.hidden[:, None]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.cu_seqlens is None else x[self.kept]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of no sequence are 0, as the exact results have them."""
        if self.cu_seqlens is None:
            return x
        whole = x.new_zeros(*self.kept.shape, *x.shape[1:])
        whole[self.kept] = x
        return whole

    def unpack_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """(nheads, total) to (batch, nheads, seqlen), -inf in rows of no sequence. torch's may have the latter shape already."""
        if self.cu_seqlens is None:
            return lse
        whole = lse if lse.dim() == 3 else self.unpack(lse.t().contiguous()).transpose(1, 2)
        return whole.masked_fill(~self.kept[:, None], -math.inf)


def _compile(arguments: dict[str, Any]) -> None:
    try:
        _plan.warmup(**arguments)
    except Exception:  # its call will say so
        pass


def compile_ahead(problems: Iterable[dict[str, Any]]) -> None:
    """Each in a process of its own core: NVRTC compiles one kernel at a time in a process. Afterwards the kernels are on disk."""
    todo = list(problems)
    workers = min(len(todo), len(os.sched_getaffinity(0)), 16)
    if workers < 2:
        return
    progress = Progress("compiling", len(todo))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for _ in concurrent.futures.as_completed([pool.submit(_compile, arguments) for arguments in todo]):
                progress.step()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.clear()
