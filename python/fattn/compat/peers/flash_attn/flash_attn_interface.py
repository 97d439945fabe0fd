"""The functions of flash_attn 2: their arguments, in their order, and what they return."""

from fattn.compat._calls import attention, attention_varlen, peer_error, refuse, window_of
from fattn.compat._kvcache import with_kvcache as _with_kvcache
from fattn.compat._sequences import attention_of
from fattn.compat._weights import with_weights, with_weights_varlen

from . import _passes

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]

_ALL = (-1, -1)

# Private, and called by programs all the same.
_flash_attn_forward, _flash_attn_backward = _passes._flash_attn_forward, _passes._flash_attn_backward
_flash_attn_varlen_forward, _flash_attn_varlen_backward = _passes._flash_attn_varlen_forward, _passes._flash_attn_varlen_backward


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                    return_attn_probs=False):
    """q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim) -> out (batch, seqlen_q, nheads, headdim); with return_attn_probs
    (out, softmax_lse, S_dmask), the last empty without dropout."""
    try:
        window = None if window_size == _ALL else window_of(window_size)
        if return_attn_probs:
            return with_weights(q, k, v, dropout_p, softmax_scale=softmax_scale, causal=causal, window=window, softcap=softcap or None,
                                alibi_slopes=alibi_slopes, deterministic=deterministic or None)
        return attention(q, k, v, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap or None, alibi_slopes=alibi_slopes,
                         dropout_p=dropout_p or 0, deterministic=deterministic or None)
    except ValueError as error:
        raise peer_error(error) from None


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                             return_attn_probs=False):
    """kv (batch, seqlen_k, 2, nheads_k, headdim); else as flash_attn_func."""
    return flash_attn_func(q, *kv.unbind(-3), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                              return_attn_probs=False):
    """qkv (batch, seqlen, 3, nheads, headdim); else as flash_attn_func."""
    return flash_attn_func(*qkv.unbind(-3), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
                           window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None):
    """q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim), cu_seqlens (batch + 1) int32 -> out (total_q, nheads, headdim); softmax_lse is
    (nheads, total_q)."""
    try:
        options = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
                   "softmax_scale": softmax_scale, "causal": causal, "window": None if window_size == _ALL else window_of(window_size),
                   "softcap": softcap or None, "alibi_slopes": alibi_slopes, "deterministic": deterministic or None}
        if block_table is not None:
            del options["cu_seqlens_k"], options["max_seqlen_k"]
            if dropout_p:
                refuse("dropout_p beside block_table", "pages are read where nothing is trained")
            o, lse = attention_of(q, k, v, seqused_k=cu_seqlens_k.diff(), pages=block_table, **options)
            return (o, lse, o.new_empty(0)) if return_attn_probs else o
        if return_attn_probs:
            return with_weights_varlen(q, k, v, dropout_p, **options)
        return attention_varlen(q, k, v, dropout_p=dropout_p or 0, **options)
    except ValueError as error:
        raise peer_error(error) from None


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
                                    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """kv (total_k, 2, nheads_k, headdim); else as flash_attn_varlen_func."""
    return flash_attn_varlen_func(q, *kv.unbind(-3), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
                                  softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                     alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """qkv (total, 3, nheads, headdim); else as flash_attn_varlen_func."""
    return flash_attn_varlen_func(*qkv.unbind(-3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
                                  alibi_slopes, deterministic, return_attn_probs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
                            block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None,
                            num_splits=0, return_softmax_lse=False):
    """k_cache and v_cache (batch_cache, seqlen_cache, nheads_k, headdim), k and v (batch, seqlen_new, nheads_k, headdim), which are written into them in place
    -> out, or (out, softmax_lse). No gradient. num_splits is planned, whatever it says."""
    try:
        o, lse = _with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, pages=block_table,
                               rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, causal=causal,
                               window=None if window_size == _ALL else window_of(window_size), softmax_scale=softmax_scale, softcap=softcap or None,
                               alibi_slopes=alibi_slopes)
    except ValueError as error:
        raise peer_error(error) from None
    return (o, lse) if return_softmax_lse else o
