"""flash_attn 3, computed by fattn (fattn.compat): the functions of flash_attn_interface."""

import torch

from fattn.compat._calls import EIGHT_BITS, TWO_QUERIES, PeerError, attention, peer_error, refuse_given, window_of
from fattn._merge import merge_rows
from fattn.compat._kvcache import with_kvcache as _with_kvcache
from fattn.compat._peers import version_of
from fattn.compat._sequences import attention_of

__version__ = version_of("flash-attn-3")
__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"]

_ALL = (-1, -1)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k, headdim_v) -> out; with return_attn_probs
    (out, softmax_lse). num_splits, pack_gqa and sm_margin are planned, whatever they say."""
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        refuse_given(TWO_QUERIES, qv=qv)
        refuse_given(EIGHT_BITS, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    try:
        window = None if window_size == _ALL else window_of(window_size)
        if attention_chunk:
            o, lse = attention_of(q, k, v, causal=causal, window=window, chunk=attention_chunk, softmax_scale=softmax_scale, softcap=softcap or None,
                                  deterministic=deterministic or None)
            return (o, lse) if return_attn_probs else o
        return attention(q, k, v, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap or None, deterministic=deterministic or None,
                         return_lse=return_attn_probs)
    except ValueError as error:
        raise peer_error(error) from None


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                              softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False):
    """qkv (batch, seqlen, 3, nheads, headdim), or with num_heads_q (batch, seqlen, num_heads_q + 2 * num_heads_k, headdim)."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    elif num_heads_q is None:
        raise PeerError(f"qkv has {qkv.dim()} dimensions and num_heads_q is None; allowed: 5 (batch, seqlen, 3, nheads, headdim), or 4 with num_heads_q")
    else:
        nheads_k = (qkv.shape[2] - num_heads_q) // 2
        if num_heads_q < 1 or num_heads_q + 2 * nheads_k != qkv.shape[2]:
            raise PeerError(f"qkv has {qkv.shape[2]} heads and num_heads_q is {num_heads_q}; what is left must be as many heads of k as of v")
        q, k, v = qkv.split((num_heads_q, nheads_k, nheads_k), dim=2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
                           deterministic=deterministic, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False,
                           qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """q (total_q, nheads, headdim), k and v (total_k, nheads_k, ...), cu_seqlens (batch + 1) int32; seqused_q, seqused_k (batch): how many rows of each
    sequence are used -> out, whose rows that are not used are 0; with return_attn_probs (out, softmax_lse (nheads, total_q))."""
    refuse_given(TWO_QUERIES, qv=qv)
    refuse_given(EIGHT_BITS, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    try:
        o, lse = attention_of(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                              seqused_q=seqused_q, seqused_k=seqused_k, causal=causal, window=None if window_size == _ALL else window_of(window_size),
                              chunk=attention_chunk, softmax_scale=softmax_scale, softcap=softcap or None, deterministic=deterministic or None)
    except ValueError as error:
        raise peer_error(error) from None
    return (o, lse) if return_attn_probs else o


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                            cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
                            softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False):
    """k_cache and v_cache (batch_cache, seqlen_cache, nheads_k, ...), k and v (batch, seqlen_new, nheads_k, ...), or packed with cu_seqlens_k_new, which are
    written into them in place -> out, or (out, softmax_lse). No gradient. scheduler_metadata, num_splits, pack_gqa and sm_margin are planned, whatever they say."""
    refuse_given(TWO_QUERIES, qv=qv)
    refuse_given(EIGHT_BITS, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    try:
        o, lse = _with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
                               rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens,
                               cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, pages=page_table, causal=causal,
                               window=None if window_size == _ALL else window_of(window_size), chunk=attention_chunk, softmax_scale=softmax_scale,
                               softcap=softcap or None)
    except ValueError as error:
        raise peer_error(error) from None
    return (o, lse) if return_softmax_lse else o


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """out_partial (num_splits, batch, seqlen, nheads, headdim), lse_partial (num_splits, batch, seqlen, nheads) -> (out, softmax_lse (batch, seqlen, nheads))."""
    if out_partial.shape[:-1] != lse_partial.shape:
        raise PeerError(f"out_partial has the shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; allowed: "
                        "(num_splits, batch, seqlen, nheads, headdim) and the same without headdim")
    o, lse = merge_rows(out_partial, lse_partial)
    o = o.to(out_dtype or (out_partial if out is None else out).dtype)
    return (o if out is None else out.copy_(o)), lse


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None,
                           cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,
                           window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """Nothing is to be scheduled ahead: an empty tensor, which flash_attn_with_kvcache takes as scheduler_metadata."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
