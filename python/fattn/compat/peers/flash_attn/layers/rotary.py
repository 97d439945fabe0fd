"""flash_attn.layers.rotary: rotary embeddings, by operations of torch; differentiable."""

import torch

from fattn.compat._calls import PeerError
from fattn.compat._rotary import rotate, rotate_at
from fattn.compat._sequences import sequence_of

__all__ = ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_", "apply_rotary_emb_torch", "rotate_half"]


def rotate_half(x, interleaved=False):
    """(a, b) to (-b, a), where the pairs are halves, or neighbours."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x (batch, seqlen, nheads, headdim), cos and sin (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2)."""
    return rotate(x, cos[..., None, :], sin[..., None, :], interleaved)


def _offsets(x, seqlen_offsets):
    place = torch.arange(x.shape[1], device=x.device)
    if isinstance(seqlen_offsets, torch.Tensor):
        return seqlen_offsets.long()[:, None] + place
    return (place + seqlen_offsets).expand(x.shape[:2])


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """x (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with cu_seqlens; cos and sin (seqlen_rotary, rotary_dim / 2); seqlen_offsets: a number,
    or (batch), the position of the first row. The first rotary_dim dimensions are turned; inplace: in x itself."""
    if cu_seqlens is None:
        positions = _offsets(x, seqlen_offsets)
    else:
        sequence, place = sequence_of(cu_seqlens, x.shape[0])
        positions = place.long() + (seqlen_offsets.long()[sequence] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets)
    turned = rotate_at(x, cos, sin, positions, interleaved)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
    """Turns q and k of qkv (batch, seqlen, 3, nheads, headdim), or of (batch, seqlen, num_heads_q + 2 * num_heads_k, headdim), in place."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is None:
        raise PeerError(f"qkv has {qkv.dim()} dimensions and num_heads_q is None; allowed: 5 (batch, seqlen, 3, nheads, headdim), or 4 with num_heads_q")
    else:
        nheads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + nheads_k]
    turned = [apply_rotary_emb(q, cos, sin, interleaved, False, seqlen_offsets),
              apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, False, seqlen_offsets)]
    for x, y in zip((q, k), turned):
        x.copy_(y)
    return qkv


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Turns k of kv (batch, seqlen, 2, nheads, headdim) in place."""
    kv[:, :, 0].copy_(apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, False, seqlen_offsets))
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embeddings (Su et al. 2021); with scale_base as XPos (Sun et al. 2022) scales them."""

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, pos_idx_in_fp32=True, device=None):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base, self.pos_idx_in_fp32 = dim, float(base), interleaved, scale_base, pos_idx_in_fp32
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        scale = None if scale_base is None else (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seqlen, self._tables = 0, None

    def _frequencies(self, device):
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _of_length(self, seqlen, device, dtype):
        """cos and sin for q, then for k."""
        if self._tables is None or seqlen > self._seqlen or self._tables[0].device != device or self._tables[0].dtype != dtype:
            self._seqlen = seqlen
            frequencies = self._frequencies(device) if self.pos_idx_in_fp32 else self.inv_freq.to(device)
            place = torch.arange(seqlen, device=device, dtype=frequencies.dtype)
            angles = torch.outer(place, frequencies)
            cos, sin = angles.cos(), angles.sin()
            if self.scale is None:
                self._tables = (cos.to(dtype), sin.to(dtype)) * 2
            else:
                scale = self.scale.to(device) ** ((place - seqlen // 2) / self.scale_base)[:, None]
                self._tables = tuple(x.to(dtype) for x in (cos * scale, sin * scale, cos / scale, sin / scale))
        return self._tables

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Turns in place what it returns: qkv (batch, seqlen, 3, nheads, headdim), or q (batch, seqlen, nheads, headdim) and kv (batch, seqlen, 2, ...)."""
        if max_seqlen is None:
            if isinstance(seqlen_offset, torch.Tensor):
                max_seqlen = qkv.shape[1] + int(seqlen_offset.max())
            else:
                max_seqlen = qkv.shape[1] + seqlen_offset
        cos, sin, cos_k, sin_k = self._of_length(max_seqlen, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        return apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset), apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
