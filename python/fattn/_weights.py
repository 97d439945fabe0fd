"""fattn.weights and fattn.largest_logits: what attention stores nowhere, computed again for who wants to look at it. By operations of torch, in fp32."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import _abi, _problem
from ._options import Options, Window, choose, flag, is_bhsd, short_dtype, window_limits
from ._refused import can_be_read, require_dense, require_numbers
from ._scores import GIVEN, Scores, prepare
from ._unknown import unknown_options

_SCORES = ("seqused_k", "alibi_slopes", "bias", "mask", "document_q", "document_k", "sinks")
_INTEGERS = {torch.int32: _abi.INT32, torch.bool: _abi.UINT8, torch.uint8: _abi.UINT8}
_DTYPES = {"seqused_k": (torch.int32, torch.int64), "alibi_slopes": (torch.float32, torch.float16, torch.bfloat16), "mask": (torch.bool, torch.uint8)}
_ELEMENTS = 1 << 24  # of a block of scores


def _dtype(name: str, x: torch.Tensor) -> int:
    return choose(f"the dtype of {name}", short_dtype(x.dtype), _abi.DTYPES)


def _require_as_attention(q: torch.Tensor, k: torch.Tensor, scores: Scores, bhsd: bool, **numbers: Any) -> None:
    """Refuses what `fattn.attention` refuses: the library is asked, by shapes alone. k may have another dtype than q."""
    if torch.compiler.is_compiling() or not all(type(n) is int for n in (*q.shape, *k.shape)):
        return
    for name, x in (("k", k), *zip(GIVEN, scores)):
        if x is None:
            continue
        if x.dtype not in _DTYPES.get(name, (x.dtype,)):
            raise ValueError(f"{name} is a tensor of {x.dtype}; allowed: {', '.join(map(str, _DTYPES[name]))}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; all tensors of a call must be on one device")
    problem = _problem.describe(Options(backend="reference", **numbers), backward=False)
    dtype, _ = _dtype("q", q), _dtype("k", k)
    for name, x in (("q", q), ("k", k), ("v", k), ("o", q)):
        setattr(problem, name, _problem.tensor(name, x.shape, dtype, _problem.row_major(x.shape), bhsd=bhsd))
    for name, x in zip(GIVEN, scores):
        if x is not None:
            code = _INTEGERS[x.dtype] if x.dtype in _INTEGERS else _dtype(name, x)
            setattr(problem, name, _problem.beside(name, x.shape, code, _problem.row_major(x.shape)))
    reason = ctypes.create_string_buffer(1024)
    status = _abi.library.fattn_supported(problem, reason, len(reason))
    if _abi.library.fattn_status_name(status) != b"unsupported":
        _abi.check(status)
    lengths = scores.seqused_k
    if lengths is not None and can_be_read(lengths) and lengths.numel():
        least, most, seqlen_k = int(lengths.min()), int(lengths.max()), k.shape[2 if bhsd else 1]
        if least < 0 or most > seqlen_k:
            raise ValueError(f"seqused_k has {least if least < 0 else most}; allowed: 0 to {seqlen_k}, for k has {seqlen_k} rows")


class _Problem:
    """Heads before rows; keys and what is added to scores as every block of rows wants them."""

    def __init__(self, function: str, q: torch.Tensor, k: torch.Tensor, causal: bool, softmax_scale: float | None, window: Window | None, softcap: float | None,
                 layout: str, options: dict[str, Any]) -> None:
        unknown = [name for name in options if name not in _SCORES]
        if unknown:
            raise unknown_options(function, unknown, ["causal", "softmax_scale", "window", "softcap", "layout", *_SCORES])
        for name, x in (("q", q), ("k", k)):
            require_dense(name, x)
            if x.dim() != 4:
                raise ValueError(f"{name} has {x.dim()} dimensions; allowed: 4 (batch, seqlen, heads, headdim)")
        bhsd = is_bhsd(layout)
        self.q, self.k = (q, k) if bhsd else (q.transpose(1, 2), k.transpose(1, 2))
        (batch, nheads, self.seqlen_q, headdim), (_, nheads_k, self.seqlen_k, _) = self.q.shape, self.k.shape
        if (batch, headdim) != (self.k.shape[0], self.k.shape[3]) or not nheads_k or nheads % nheads_k:
            raise ValueError(f"q has batch {batch}, {nheads} heads and headdim {headdim}, and k batch {self.k.shape[0]}, {nheads_k} heads and headdim "
                             f"{self.k.shape[3]}; batch and headdim must be the same, and the heads of q a multiple of those of k")
        require_numbers(softmax_scale, softcap, 0)
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.scale = headdim**-0.5 if softmax_scale is None else softmax_scale
        self.softcap, self.causal = softcap or 0.0, flag("causal", causal)
        self.left, self.right = window_limits(window)
        self.scores = prepare(q, self.seqlen_k, 0, *(options.get(name) for name in Scores._fields))
        _require_as_attention(q, k, self.scores, bhsd, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap)
        lengths = self.scores.seqused_k
        self.keys = torch.arange(self.seqlen_k, device=q.device)
        self.length = self.keys.new_full((batch,), self.seqlen_k) if lengths is None else lengths.long()

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Of query heads, by key head: (batch, nheads_k, group, ...)."""
        return x.unflatten(1, (self.k.shape[1], -1))

    def scores_of(self, rows: torch.Tensor) -> torch.Tensor:
        """(batch, nheads, rows, seqlen_k), -inf where a pair is hidden. `rows`: numbers of queries."""
        q = self.heads(self.q[:, :, rows].to(self.dtype))
        with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
            s = (torch.matmul(q, self.k.to(self.dtype).transpose(-1, -2).unsqueeze(2)) * self.scale).flatten(1, 2)
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        of = self.scores
        own = rows[None] + (self.length - self.seqlen_q)[:, None]  # the key that each query is aligned with
        away = (self.keys - own[..., None])[:, None]
        if of.alibi_slopes is not None:
            slopes = of.alibi_slopes if of.alibi_slopes.dim() == 2 else of.alibi_slopes[None]
            s = s - slopes[..., None, None].to(self.dtype) * away.abs()
        if of.bias is not None:
            s = s + _rows_of(of.bias, rows).to(self.dtype)
        seen = (self.keys < self.length[:, None])[:, None, None]
        if self.causal or self.right >= 0:
            seen = seen & (away <= (0 if self.causal else self.right))
        if self.left >= 0:
            seen = seen & (away >= -self.left)
        if of.mask is not None:
            seen = seen & (_rows_of(of.mask, rows) != 0)
        if of.document_q is not None:
            seen = seen & (of.document_q[:, rows, None] == of.document_k[:, None])[:, None]
        return s.masked_fill(~seen, -torch.inf)

    def blocks(self) -> Iterator[torch.Tensor]:
        """All rows, as many at once as their scores take a bounded memory."""
        step = max(1, _ELEMENTS // max(1, self.q.shape[0] * self.q.shape[1] * self.seqlen_k))
        for begin in range(0, self.seqlen_q, step):
            yield torch.arange(begin, min(begin + step, self.seqlen_q), device=self.q.device)


def _rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x if x.shape[2] == 1 else x[:, :, rows]


def _numbers(rows: Any, seqlen_q: int, device: torch.device) -> torch.Tensor:
    if isinstance(rows, slice):
        return torch.arange(seqlen_q, device=device)[rows]
    try:
        numbers = torch.as_tensor(rows, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"rows is a {type(rows).__name__}; allowed: numbers of queries, as a sequence, a tensor or a slice") from error
    require_dense("rows", numbers)
    if numbers.dim() != 1 or (numbers.numel() and (numbers.is_floating_point() or numbers.dtype == torch.bool)):
        raise ValueError(f"rows is of {numbers.dtype} with the shape {tuple(numbers.shape)}; allowed: whole numbers, (rows)")
    numbers = numbers.long()
    if can_be_read(numbers) and numbers.numel():
        least, most = int(numbers.min()), int(numbers.max())
        if least < -seqlen_q or most >= seqlen_q:
            raise ValueError(f"rows has {least if least < -seqlen_q else most}; allowed: {-seqlen_q} to {seqlen_q - 1}, for there are {seqlen_q} queries")
    return torch.where(numbers < 0, numbers + seqlen_q, numbers)


def weights(q: torch.Tensor, k: torch.Tensor, *, rows: Sequence[int] | torch.Tensor | slice, causal: bool = False, softmax_scale: float | None = None,
            window: Window | None = None, softcap: float | None = None, layout: str = "bshd", **options: Any) -> torch.Tensor:
    """The weights that chosen queries give to all keys: rows of softmax(cap(softmax_scale * q k^T) + alibi + bias + mask), in O(rows * seqlen_k) memory.
    Differentiable.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_k, headdim).
        rows: which queries, counted from 0, or from the end if below 0: [-1] for the last, slice(0, 4) for the first four.
        causal, softmax_scale, window, softcap, layout: as in `fattn.attention`.
        options: seqused_k, alibi_slopes, bias, mask, document_q, document_k, sinks, as in `fattn.attention`. Dropout is not applied.

    Returns:
        (batch, nheads, rows, seqlen_k), float32 (float64 if q is). A row that sees no key is 0; with sinks a row sums to less than 1.

    Raises:
        TypeError: a tensor is none, or an option that is not there.
        ValueError: shapes that do not fit together, or a row that is none.
    """
    problem = _Problem("fattn.weights", q, k, causal, softmax_scale, window, softcap, layout, options)
    scores = problem.scores_of(_numbers(rows, problem.seqlen_q, q.device))
    top = scores.detach().amax(-1, keepdim=True) if problem.seqlen_k else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    sinks = problem.scores.sinks
    if sinks is not None:
        sinks = sinks.to(problem.dtype)[None, :, None, None]
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(top == -torch.inf, 0)
    shares = (scores - top).exp()
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    return shares / total.masked_fill(total == 0, 1)


@torch.no_grad()
def largest_logits(q: torch.Tensor, k: torch.Tensor, *, causal: bool = False, softmax_scale: float | None = None, window: Window | None = None,
                   softcap: float | None = None, layout: str = "bshd", **options: Any) -> torch.Tensor:
    """The largest score of each head over all pairs that a query sees, as clipping by head wants it (QK-Clip) and for finding scores that grow. It computes
    all scores again, a block of rows at a time.

    Args:
        As `fattn.weights` without rows; sinks count nothing.

    Returns:
        (nheads), float32 (float64 if q is); -inf where no query sees a key, NaN where a score is.

    Raises:
        As `fattn.weights`.
    """
    problem = _Problem("fattn.largest_logits", q, k, causal, softmax_scale, window, softcap, layout, options)
    largest = torch.full((problem.q.shape[1],), -torch.inf, dtype=problem.dtype, device=q.device)
    if problem.seqlen_k and problem.q.shape[0]:
        for rows in problem.blocks():
            largest = torch.maximum(largest, problem.scores_of(rows).amax((0, 2, 3)))
    return largest
