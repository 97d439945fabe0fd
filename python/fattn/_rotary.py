"""fattn.rotary: rotary position embeddings (Su et al. 2021), by operations of torch: differentiable in x, and in cos and sin."""

import operator

import torch

from ._options import is_bhsd
from ._refused import can_be_read, require_dense

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (..., heads, headdim); cos and sin broadcast to (..., 1, rotary_dim / 2). In fp32 (fp64 where x is)."""
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"cos has {half} columns, for a rotary_dim of {2 * half}; headdim is {x.shape[-1]}, which must be at least that")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    cos, sin = cos.to(dtype), sin.to(dtype)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def rotate_at(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rows of cos and sin (seqlen_rotary, rotary_dim / 2) by position, of x (..., heads, headdim) with positions (...)."""
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(f"cos has the shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; allowed: both (seqlen_rotary, rotary_dim / 2)")
    if can_be_read(positions) and positions.numel():
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= cos.shape[0]:
            raise ValueError(f"positions {first} to {last} are rotated and cos has {cos.shape[0]} rows; make cos and sin for more positions")
    return rotate(x, cos[positions][..., None, :], sin[positions][..., None, :], interleaved)


def sequence_of(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of a packed tensor: which sequence it belongs to, and its place there."""
    row = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return sequence, row - cu_seqlens[sequence]


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, offsets: int | torch.Tensor = 0,
           cu_seqlens: torch.Tensor | None = None, layout: str = "bshd") -> torch.Tensor:
    """Turns the pairs of the first rotary_dim dimensions of each head by the angles of its position: (a, b) becomes (a cos - b sin, a sin + b cos). Computed in
    fp32; differentiable in x, cos and sin.

    Args:
        x: (batch, seqlen, nheads, headdim), queries or keys; with cu_seqlens (total, nheads, headdim).
        cos, sin: (positions, rotary_dim / 2), of every position that there is, scaled as the model wants them (NTK, YaRN, ...); rotary_dim is at most headdim, and
            the dimensions behind it stay as they are.
        interleaved: pairs are neighbours (0, 1), (2, 3), ... (GPT-J); otherwise the halves of the rotary_dim dimensions (GPT-NeoX, Llama).
        offsets: the position of the first row: a number, or (batch), int32 or int64, one of each sequence.
        cu_seqlens: (batch + 1): packed sequences, where each begins, and where the last one ends.
        layout: "bshd" as above, or "bhsd": heads before seqlen.

    Returns:
        A new tensor like x.

    Raises:
        TypeError: a tensor is none.
        ValueError: shapes that do not fit together, or a position that cos has no row for (on a GPU torch's own check of indices stops the device).
    """
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        require_dense(name, t)
        if t.dtype not in _DTYPES:
            raise ValueError(f"{name} is a tensor of {t.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    bhsd = is_bhsd(layout)
    packed = cu_seqlens is not None
    if packed:
        require_dense("cu_seqlens", cu_seqlens, " or None")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in _INTEGERS:
            raise ValueError(f"cu_seqlens is a tensor of {cu_seqlens.dtype} with the shape {tuple(cu_seqlens.shape)}; allowed: int32 or int64, (batch + 1), where each "
                             "sequence begins, and where the last one ends")
    if isinstance(offsets, torch.Tensor):
        require_dense("offsets", offsets)
    elif not isinstance(offsets, (int, torch.SymInt)) and not torch.compiler.is_compiling():  # NumPy's, say
        try:
            offsets = operator.index(offsets)
        except TypeError:
            raise TypeError(f"offsets is a {type(offsets).__name__}; it must be an int or a torch.Tensor") from None
    beside_x = ("x", x)
    beside_positions = ("cu_seqlens", cu_seqlens) if packed else beside_x  # made where cu_seqlens is, which may be the CPU
    for name, t, (other, of) in (("cos", cos, beside_x), ("sin", sin, beside_x), ("offsets", offsets, beside_positions)):
        if isinstance(t, torch.Tensor) and t.device != of.device:
            raise ValueError(f"{name} is on {t.device} and {other} on {of.device}; they must be on one device")
    if x.dim() != (3 if packed else 4) or (packed and bhsd):
        raise ValueError(f"x has {x.dim()} dimensions and layout is {layout!r}; allowed: 4 (batch, seqlen, nheads, headdim), or with cu_seqlens 3 (total, nheads, "
                         "headdim) and no layout")
    if x.shape[-1] < 2 * (cos.shape[-1] if cos.dim() else 1):
        raise ValueError(f"cos has the shape {tuple(cos.shape)} and headdim is {x.shape[-1]}; allowed: (positions, rotary_dim / 2) with a rotary_dim of at most headdim")
    if bhsd:
        x = x.transpose(1, 2)
    batch = cu_seqlens.shape[0] - 1 if packed else x.shape[0]
    if isinstance(offsets, torch.Tensor) and (offsets.shape != (batch,) or offsets.dtype not in _INTEGERS):
        raise ValueError(f"offsets is a tensor of {offsets.dtype} with the shape {tuple(offsets.shape)}; allowed: a number, or int32 or int64, ({batch})")
    if packed:
        sequence, place = sequence_of(cu_seqlens, x.shape[0])
        positions = place.long() + (offsets.long()[sequence] if isinstance(offsets, torch.Tensor) else offsets)
    else:
        place = torch.arange(x.shape[1], device=x.device)
        positions = offsets.long()[:, None] + place if isinstance(offsets, torch.Tensor) else (place + offsets).expand(x.shape[:2])
    turned = rotate_at(x, cos, sin, positions, interleaved)
    return turned.transpose(1, 2) if bhsd else turned
