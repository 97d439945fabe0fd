"""flash_attn.modules.mha: modules of attention, as far as they are attention."""

import math

import torch
import torch.utils.checkpoint
from torch import nn

from fattn.compat._calls import refuse

from ..flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ..layers.rotary import RotaryEmbedding

__all__ = ["CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "MHA", "SelfAttention", "get_alibi_slopes"]


def get_alibi_slopes(nheads):
    """The slopes of Press et al. 2022: powers of 2^(-8 / nheads), and for another number of heads those of the next powers of two."""
    def of_power(n):
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** int(math.log2(nheads))
    return of_power(power) + of_power(2 * power)[0::2][: nheads - power]


class _Inner(nn.Module):
    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0, window_size=(-1, -1), alibi_slopes=None, deterministic=False):
        super().__init__()
        self.causal, self.softmax_scale, self.window_size, self.deterministic = causal, softmax_scale, window_size, deterministic
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _options(self, causal):
        return {"dropout_p": self.drop.p if self.training else 0.0, "softmax_scale": self.softmax_scale, "causal": self.causal if causal is None else causal,
                "window_size": self.window_size, "alibi_slopes": self.alibi_slopes, "deterministic": self.deterministic}


class FlashSelfAttention(_Inner):
    """qkv (batch, seqlen, 3, nheads, headdim), or (total, 3, nheads, headdim) with cu_seqlens and max_seqlen."""

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None):
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal))
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal))


class FlashCrossAttention(_Inner):
    """q (batch, seqlen_q, nheads, headdim) and kv (batch, seqlen_k, 2, nheads_k, headdim), or both packed with the lengths of each."""

    def forward(self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None):
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal))
        return flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self._options(causal))


class _Padded(nn.Module):
    """What upstream computes by operations of torch: with a mask of keys, without windows."""

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def _attention(self, q, k, v, causal, key_padding_mask):
        from fattn import attention

        return attention(q, k, v, causal=self.causal if causal is None else causal, softmax_scale=self.softmax_scale, dropout_p=self.drop.p if self.training else 0,
                         mask=None if key_padding_mask is None else key_padding_mask.bool()[:, None, None])


class SelfAttention(_Padded):
    """key_padding_mask (batch, seqlen): True where a key is seen."""

    def forward(self, qkv, causal=None, key_padding_mask=None):
        return self._attention(*qkv.unbind(2), causal, key_padding_mask)


class CrossAttention(_Padded):
    def forward(self, q, kv, causal=None, key_padding_mask=None):
        return self._attention(q, *kv.unbind(2), causal, key_padding_mask)


def _convolution(channels, of_module):
    """Of each channel by itself, over three tokens; with what `_convolved` cuts off the last one is the token's own."""
    return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **of_module)


def _convolved(x, convolution):
    """x (batch, seqlen, channels)."""
    return convolution(x.transpose(1, 2))[..., :-2].transpose(1, 2)


class MHA(nn.Module):
    """Projections around attention, with the names of upstream's parameters (Wqkv, or Wq and Wkv; dwconv_qkv, or dwconv_q and dwconv_kv; out_proj)."""

    def __init__(self, embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, dropout=0.0, softmax_scale=None,
                 causal=False, layer_idx=None, dwconv=False, rotary_emb_dim=0, rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False,
                 use_alibi=False, window_size=(-1, -1), fused_bias_fc=False, use_flash_attn=False, return_residual=False, checkpointing=False, device=None,
                 dtype=None):
        super().__init__()
        self.embed_dim, self.num_heads, self.cross_attn, self.causal, self.layer_idx = embed_dim, num_heads, cross_attn, causal, layer_idx
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads or num_heads % self.num_heads_kv:
            raise ValueError(f"embed_dim is {embed_dim}, num_heads {num_heads} and num_heads_kv {self.num_heads_kv}; each must be a multiple of the next")
        if cross_attn and rotary_emb_dim:
            refuse("rotary_emb_dim beside cross_attn", "positions of other sequences have no rotary embedding")
        self.head_dim, self.rotary_emb_dim = embed_dim // num_heads, rotary_emb_dim
        self.return_residual, self.checkpointing = return_residual, checkpointing
        self.window_size, self.softmax_scale, self.use_flash_attn = window_size, softmax_scale, use_flash_attn
        of_linear = {"device": device, "dtype": dtype}
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **of_linear)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **of_linear)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **of_linear)
        self.dwconv = dwconv
        if dwconv and not cross_attn and self.num_heads_kv == num_heads:
            self.dwconv_qkv = _convolution(embed_dim + kv_dim, of_linear)
        elif dwconv:
            self.dwconv_q, self.dwconv_kv = _convolution(embed_dim, of_linear), _convolution(kv_dim, of_linear)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **of_linear)
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device=device)
        slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
        self.inner_attn = FlashSelfAttention(causal, softmax_scale, dropout, window_size, slopes)
        self.inner_cross_attn = FlashCrossAttention(causal, softmax_scale, dropout, window_size, slopes)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        weight = self.out_proj.weight
        return torch.empty(batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def _heads(self, x, x_kv, mixer_subset):
        if self.cross_attn:
            q, kv = self.Wq(x if mixer_subset is None else x[:, mixer_subset]), self.Wkv(x if x_kv is None else x_kv)
        else:
            qkv = self.Wqkv(x)
            if hasattr(self, "dwconv_qkv"):
                qkv = _convolved(qkv, self.dwconv_qkv)
            q, kv = qkv.split((self.embed_dim, 2 * self.head_dim * self.num_heads_kv), -1)
        if hasattr(self, "dwconv_q"):
            q, kv = _convolved(q, self.dwconv_q), _convolved(kv, self.dwconv_kv)
        return q.unflatten(-1, (self.num_heads, self.head_dim)), kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))

    def _decode(self, q, kv, state):
        """With a cache: `state` is upstream's InferenceParams."""
        if self.layer_idx is None:
            raise ValueError("layer_idx is None and inference_params is given; give each layer its number, by which its cache is found")
        if self.layer_idx not in state.key_value_memory_dict:
            state.key_value_memory_dict[self.layer_idx] = self.allocate_inference_cache(state.max_batch_size, state.max_seqlen, q.dtype)
        begin = state.batch_size_offset
        cache = state.key_value_memory_dict[self.layer_idx][begin : begin + q.shape[0]]
        lengths = state.seqlen_offset if state.lengths_per_sample is None else state.lengths_per_sample
        inner = self.inner_cross_attn
        return flash_attn_with_kvcache(q, *cache.unbind(2), *kv.unbind(2), cache_seqlens=lengths, softmax_scale=inner.softmax_scale, causal=inner.causal,
                                       window_size=inner.window_size, alibi_slopes=inner.alibi_slopes)

    def _positions(self, state):
        if state is None:
            return 0
        return state.seqlen_offset if state.lengths_per_sample is None else state.lengths_per_sample

    def _inner(self, q, kv, key_padding_mask, cu_seqlens, max_seqlen):
        if key_padding_mask is not None:
            from fattn import attention

            options = self.inner_cross_attn._options(None)
            options["window"] = options.pop("window_size")
            return attention(q, *kv.unbind(2), mask=key_padding_mask.bool()[:, None, None], **options)
        if cu_seqlens is not None:
            return self.inner_cross_attn(q, kv, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen)
        return flash_attn_func(q, *kv.unbind(2), **self.inner_cross_attn._options(None))

    def forward(self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, mixer_subset=None, inference_params=None):
        """x (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens and max_seqlen; key_padding_mask (batch, seqlen): True where a key is seen;
        mixer_subset: what indexes seqlen, with cross_attn: the queries that there are, as the one of a classifier's last layer."""
        if not self.cross_attn and (mixer_subset is not None or x_kv is not None):
            raise ValueError("mixer_subset and x_kv are of a module with cross_attn=True; this one has False: q, k and v come from x alone")
        if self.dwconv and (cu_seqlens is not None or inference_params is not None):
            refuse("dwconv beside cu_seqlens or inference_params", "the convolution reads the tokens before: give whole sequences, (batch, seqlen, embed_dim)")
        q, kv = self._heads(x, x_kv, mixer_subset)
        if self.rotary_emb_dim > 0:
            if cu_seqlens is not None:
                refuse("rotary_emb_dim beside cu_seqlens", "apply_rotary_emb of flash_attn.layers.rotary has cu_seqlens")
            length = max_seqlen if inference_params is None else inference_params.max_seqlen
            q, kv = self.rotary_emb(q.clone(), kv.clone(), self._positions(inference_params), length)
        if inference_params is not None:
            o = self._decode(q, kv, inference_params)
        elif self.checkpointing:
            o = torch.utils.checkpoint.checkpoint(self._inner, q, kv, key_padding_mask, cu_seqlens, max_seqlen, use_reentrant=False)
        else:
            o = self._inner(q, kv, key_padding_mask, cu_seqlens, max_seqlen)
        o = self.out_proj(o.flatten(-2))
        return (o, x) if self.return_residual else o
