"""xformers.ops.fmha.attn_bias: which keys a query sees, without a matrix of it."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fattn.compat._sequences import band

from ._sequences import _SeqLenInfo, _UsedSeqLenInfo

__all__ = ["AttentionBias", "BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
           "BlockDiagonalCausalLocalAttentionMask", "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalCausalMask",
           "BlockDiagonalCausalWithOffsetGappyKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalGappyKeysMask", "BlockDiagonalMask",
           "BlockDiagonalPaddedKeysMask", "LocalAttentionFromBottomRightMask", "LowerTriangularFromBottomRightLocalAttentionMask",
           "LowerTriangularFromBottomRightMask", "LowerTriangularMask", "LowerTriangularMaskWithTensorBias",
           "PagedBlockDiagonalCausalWithOffsetGappyKeysMask", "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", "PagedBlockDiagonalGappyKeysMask",
           "PagedBlockDiagonalPaddedKeysMask"]


def _added(seen, dtype):
    """0 where a key is seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -math.inf)


class AttentionBias:
    """What is added to the scores. `_limits` says which keys a query sees: from -left to right of its own position, aligned to the bottom right; None is no
    limit, and negative numbers are limits on the other side."""

    def _limits(self, seqlen_q, seqlen_k):
        return None, None

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        """As a tensor of this shape (..., seqlen_q, seqlen_k)."""
        seqlen_q, seqlen_k = shape[-2:]
        seen = band(torch.device(device), seqlen_q, seqlen_k, seqlen_q, seqlen_k, *self._limits(seqlen_q, seqlen_k))[0, 0]
        return _added(seen, dtype).expand(shape)

    def to(self, device):
        return self


class LowerTriangularMask(AttentionBias):
    """Query i sees the keys j <= i."""

    def __init__(self, *tensor_args, **tensor_kwargs):
        pass

    def _limits(self, seqlen_q, seqlen_k):
        return None, seqlen_q - seqlen_k

    def add_bias(self, bias):
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """LowerTriangularMask and a tensor, which has a gradient."""

    def __init__(self, bias):
        super().__init__()
        self._bias = bias

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype, device) + self._bias.to(device=device, dtype=dtype)

    def to(self, device):
        return type(self)(self._bias.to(device))


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Query i sees the keys j <= i + seqlen_k - seqlen_q."""

    def _limits(self, seqlen_q, seqlen_k):
        return None, 0

    def make_local_attention(self, window_size):
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The last _window_size of those keys."""

    _window_size: int

    def __post_init__(self):
        _require_window(self._window_size)

    def _limits(self, seqlen_q, seqlen_k):
        return self._window_size - 1, 0


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """The keys from window_left before a query's position to window_right behind it."""

    window_left: int
    window_right: int

    def __post_init__(self):
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError(f"window_left is {self.window_left} and window_right {self.window_right}; allowed: numbers from 0 on")

    def _limits(self, seqlen_q, seqlen_k):
        return self.window_left, self.window_right


def _require_window(size):
    if size <= 0:
        raise ValueError(f"the window has {size} keys; allowed: 1 and more")


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Sequences behind each other in tensors with a batch of 1: each sees itself alone."""

    q_seqinfo: Any
    k_seqinfo: Any
    _batch_sizes: Any = None

    # Whether query 0 of a sequence stands beside its key 0; else its last query beside its last key.
    _from_top_left = False

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        """The lengths of the sequences in q, and in k and v unless they are the same."""
        if kv_seqlen is not None and len(q_seqlen) != len(kv_seqlen):
            raise ValueError(f"q_seqlen has {len(q_seqlen)} sequences and kv_seqlen {len(kv_seqlen)}; they must have the same")
        q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(q_seqinfo, q_seqinfo if same else _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors):
        """The mask of tensors (batch, seqlen, ...), and the tensors as one (1, total, ...)."""
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])])
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _in_one(tensors)

    @classmethod
    def from_tensor_lists_qkv(cls, tensors_q, tensors_k, tensors_v=None):
        """The mask, and each list as one tensor; None for values that are not given."""
        mask = cls.from_seqlens(*([x.shape[1] for x in tensors for _ in range(x.shape[0])] for tensors in (tensors_q, tensors_k)))
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        return mask, _in_one(tensors_q), _in_one(tensors_k), None if tensors_v is None else _in_one(tensors_v)

    def split_queries(self, tensor):
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor):
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor):
        """The inverse of from_tensor_list."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("q and k have other lengths; take split_queries or split_kv")
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def to(self, device):
        q_seqinfo = self.q_seqinfo.to(device)
        return replace(self, q_seqinfo=q_seqinfo, k_seqinfo=q_seqinfo if self.k_seqinfo is self.q_seqinfo else self.k_seqinfo.to(device))

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        seen = torch.zeros(shape[-2:], dtype=torch.bool, device=device)
        for (first, last), (begin, end) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals()):
            left, right = self._limits(0, 0)
            offset = 0 if self._from_top_left else (end - begin) - (last - first)
            distance = torch.arange(end - begin, device=device) - torch.arange(last - first, device=device)[:, None] - offset
            block = torch.ones_like(distance, dtype=torch.bool)
            block = block if left is None else block & (distance >= -left)
            seen[first:last, begin:end] = block if right is None else block & (distance <= right)
        return _added(seen, dtype).expand(shape)

    def _as(self, cls, **more):
        return cls(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, **more)

    def make_causal(self):
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self):
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size):
        return self._as(BlockDiagonalCausalLocalAttentionMask, _window_size=window_size)

    def make_local_attention_from_bottomright(self, window_size):
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, _window_size=window_size)


def _in_one(tensors):
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]


class _Causal:
    def _limits(self, seqlen_q, seqlen_k):
        return None, 0


@dataclass
class _Local:
    _window_size: int = 0  # behind fields with defaults; there is none of its own

    def __post_init__(self):
        _require_window(self._window_size)

    def _limits(self, seqlen_q, seqlen_k):
        return self._window_size - 1, 0


@dataclass
class BlockDiagonalCausalMask(_Causal, BlockDiagonalMask):
    """Each sequence causal, its first query beside its first key."""

    _from_top_left = True


@dataclass
class BlockDiagonalCausalFromBottomRightMask(_Causal, BlockDiagonalMask):
    """Each sequence causal, its last query beside its last key."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(_Local, BlockDiagonalCausalMask):
    """The last _window_size of the keys that BlockDiagonalCausalMask shows."""


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(_Local, BlockDiagonalCausalFromBottomRightMask):
    """The last _window_size of the keys that BlockDiagonalCausalFromBottomRightMask shows."""


def _in_pages(bias, starts, block_tables, page_size, paged_type):
    if isinstance(bias, _Local):
        raise NotImplementedError(f"{type(bias).__name__} has a window, and {paged_type.__name__} has none; give fattn.attention_varlen a window and block_table")
    lengths = bias.k_seqinfo.seqlen_py
    if block_tables.dim() != 2 or len(block_tables) != len(lengths):
        raise ValueError(f"block_tables has the shape {tuple(block_tables.shape)}; allowed: ({len(lengths)}, columns), the pages of each sequence")
    return paged_type.from_seqlens(bias.q_seqinfo.lengths(), *starts, lengths, block_tables, page_size, device=bias.q_seqinfo.seqstart.device)


@dataclass
class BlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    """Keys of each sequence in kv_padding rows, of which kv_seqlen are used."""

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding, kv_seqlen, causal_diagonal=None, *, device=None):
        if len(q_seqlen) != len(kv_seqlen):
            raise ValueError(f"q_seqlen has {len(q_seqlen)} sequences and kv_seqlen {len(kv_seqlen)}; they must have the same")
        if max(kv_seqlen, default=0) > kv_padding:
            raise ValueError(f"kv_seqlen has {max(kv_seqlen)} and kv_padding is {kv_padding}; the rows of a sequence must be at least its keys")
        starts = range(0, kv_padding * (len(kv_seqlen) + 1), kv_padding)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), _UsedSeqLenInfo.of(starts, kv_seqlen, device))

    def make_causal(self):
        return self._as(BlockDiagonalCausalWithOffsetPaddedKeysMask)

    def make_paged(self, block_tables, page_size, paged_type):
        """The same keys in pages: block_tables has a row of pages for each sequence."""
        return _in_pages(self, [], block_tables, page_size, paged_type)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(_Causal, BlockDiagonalPaddedKeysMask):
    """The same, causal: the last query stands beside the last key that is used."""


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(_Local, BlockDiagonalPaddedKeysMask):
    """The last _window_size of those keys."""

    @classmethod
    def from_seqlens_local(cls, q_seqlen, kv_padding, kv_seqlen, window_size, *, device=None):
        padded = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen, device=device)
        return padded._as(cls, _window_size=window_size)


@dataclass
class BlockDiagonalGappyKeysMask(BlockDiagonalMask):
    """Keys of sequence b from kv_seqstarts[b] on, kv_seqlen[b] of them; kv_seqstarts has one number more, where the last one's rows end."""

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqstarts, kv_seqlen, *, device=None):
        if len(q_seqlen) != len(kv_seqlen) or len(kv_seqstarts) != len(kv_seqlen) + 1:
            raise ValueError(f"q_seqlen has {len(q_seqlen)} numbers, kv_seqstarts {len(kv_seqstarts)} and kv_seqlen {len(kv_seqlen)}; allowed: n, n + 1 and n")
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), _UsedSeqLenInfo.of(kv_seqstarts, kv_seqlen, device))

    def make_causal(self):
        return self._as(BlockDiagonalCausalWithOffsetGappyKeysMask)

    def make_paged(self, block_tables, page_size, notional_padding, paged_type):
        """The same keys in pages, as if each sequence had notional_padding rows of its own: its first key is that many rows earlier for each before it."""
        starts = [begin - b * notional_padding for b, begin in enumerate(self.k_seqinfo.seqstart_py[:-1])]
        return _in_pages(self, [starts], block_tables, page_size, paged_type)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(_Causal, BlockDiagonalGappyKeysMask):
    """The same, causal: the last query stands beside the last key that is used."""


@dataclass
class _Paged(AttentionBias):
    """Keys of each sequence in pages: k and v are (1, pages * page_size, ...), and block_tables (batch, columns) has the pages of each sequence. No gradient."""

    q_seqinfo: Any
    k_seqinfo: Any  # seqlen is where the keys of each sequence end, among the rows of its pages
    block_tables: torch.Tensor
    page_size: int

    def _firsts(self):
        """Where the keys of each sequence begin, among the rows of its pages."""
        return [0] * len(self.k_seqinfo.seqlen_py)

    def to(self, device):
        return replace(self, q_seqinfo=self.q_seqinfo.to(device), k_seqinfo=self.k_seqinfo.to(device), block_tables=self.block_tables.to(device))

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        seen = torch.zeros(shape[-2:], dtype=torch.bool, device=device)
        for (first, last), begin, end, pages in zip(self.q_seqinfo.intervals(), self._firsts(), self.k_seqinfo.seqlen_py, self.block_tables.to(device).long()):
            rows = (pages[:, None] * self.page_size + torch.arange(self.page_size, device=device)).flatten()[begin:end]
            seen[first:last, rows] = band(torch.device(device), last - first, end - begin, last - first, end - begin, *self._limits(0, 0))[0, 0]
        return _added(seen, dtype).expand(shape)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(_Paged):
    """BlockDiagonalPaddedKeysMask whose keys lie in pages."""

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device=None):
        longest = block_tables.shape[1] * page_size
        padded = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, longest, kv_seqlen, device=device)
        return cls(padded.q_seqinfo, padded.k_seqinfo, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(_Causal, PagedBlockDiagonalPaddedKeysMask):
    """The same, causal: the last query stands beside the last key that is used."""


@dataclass
class PagedBlockDiagonalGappyKeysMask(_Paged):
    """BlockDiagonalGappyKeysMask whose keys lie in pages: kv_seqstarts[b] is a row among those of sequence b's own pages, and kv_seqlen[b] keys are there."""

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, *, device=None):
        if not len(q_seqlen) == len(kv_seqstarts) == len(kv_seqlen) == block_tables.shape[0]:
            raise ValueError(f"q_seqlen has {len(q_seqlen)} numbers, kv_seqstarts {len(kv_seqstarts)}, kv_seqlen {len(kv_seqlen)} and block_tables {block_tables.shape[0]} "
                             "rows; they must have the same")
        longest, ends = block_tables.shape[1] * page_size, [begin + n for begin, n in zip(kv_seqstarts, kv_seqlen)]
        if min(kv_seqstarts, default=0) < 0 or min(kv_seqlen, default=0) < 0 or max(ends, default=0) > longest:
            raise ValueError(f"kv_seqstarts is {list(kv_seqstarts)} and kv_seqlen {list(kv_seqlen)}; allowed: rows within {block_tables.shape[1]} pages of {page_size}")
        k_seqinfo = _UsedSeqLenInfo.of([*kv_seqstarts, -1], ends, device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), k_seqinfo, block_tables, page_size)

    def _firsts(self):
        return self.k_seqinfo.seqstart_py[:-1]


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(_Causal, PagedBlockDiagonalGappyKeysMask):
    """The same, causal: the last query stands beside the last key that is used."""
