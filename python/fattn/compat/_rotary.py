"""Rotary embeddings by operations of torch."""

import torch

from ._calls import PeerError


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (..., heads, headdim); cos and sin broadcast to (..., 1, rotary_dim / 2). Pairs are neighbours, or the halves of the first rotary_dim dimensions."""
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise PeerError(f"cos has {half} columns, for a rotary_dim of {2 * half}; headdim is {x.shape[-1]}, which must be at least that")
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.float(), sin.float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def rotate_at(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rows of cos and sin (seqlen_rotary, rotary_dim / 2) by position, of x (..., heads, headdim) with positions (...)."""
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise PeerError(f"cos has the shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; allowed: both (seqlen_rotary, rotary_dim / 2)")
    if not positions.is_cuda and not torch.compiler.is_compiling() and positions.numel():
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= cos.shape[0]:
            raise PeerError(f"positions {first} to {last} are rotated and cos has {cos.shape[0]} rows; make cos and sin for more positions")
    return rotate(x, cos[positions][..., None, :], sin[positions][..., None, :], interleaved)
