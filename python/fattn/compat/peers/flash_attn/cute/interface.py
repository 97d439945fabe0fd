"""The functions of flash_attn 4: their arguments, in their order. They return (out, lse) always."""

import torch

from fattn.compat._calls import TWO_QUERIES, PeerError, attention, peer_error, refuse_given
from fattn._merge import merge_rows
from fattn.compat._sequences import attention_of

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

_EXPRESSIONS = "functions of scores are not compiled into kernels; bias, mask, document_q, softcap and alibi_slopes of fattn.attention say most of them"
_BLOCKS = "lists of blocks are not read; blocks that causal masks, windows and documents hide are skipped without one"
_ALL = (None, None)
_GATHER = "keys that are chosen for each query are not gathered; a mask of fattn.attention says which are seen"


def _peer_error(error):
    return peer_error(error, sinks="learnable_sink")


def _window(window_size, causal):
    """None is no limit, and so are two negative numbers; one that is negative is a limit on the other side of the query's own position."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise PeerError(f"window_size is {window_size!r}; allowed: (left, right), None for no limit") from None
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return None if left is None and (right is None or causal) else (left, right)


def _attention(q, k, v, causal, window_size, learnable_sink, softcap, deterministic, softmax_scale, **sequences):
    try:
        return attention_of(q, k, v, causal=causal, window=_window(window_size, causal), sinks=learnable_sink, softcap=softcap or None,
                            deterministic=deterministic or None, softmax_scale=softmax_scale, **sequences)
    except ValueError as error:
        raise _peer_error(error) from None


def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
                    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None,
                    block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None):
    """q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k, headdim_v), learnable_sink (nheads) ->
    (out, lse (batch, nheads, seqlen_q)), whatever return_lse says. num_splits and pack_gqa are planned, whatever they say."""
    if (qv is not None or gather_kv_indices is not None or score_mod is not None or score_mod_bwd is not None or mask_mod is not None or aux_tensors is not None
            or aux_scalars is not None or block_sparse_tensors is not None or block_sparse_tensors_bwd is not None):
        refuse_given(TWO_QUERIES, qv=qv)
        refuse_given(_GATHER, gather_kv_indices=gather_kv_indices)
        refuse_given(_EXPRESSIONS, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
        refuse_given(_BLOCKS, block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    try:
        if window_size == _ALL:
            return attention(q, k, v, causal=causal, softmax_scale=softmax_scale, softcap=softcap or None, sinks=learnable_sink,
                             deterministic=deterministic or None, return_lse=True)
    except ValueError as error:
        raise _peer_error(error) from None
    return _attention(q, k, v, causal, window_size, learnable_sink, softcap, deterministic, softmax_scale)


def flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, seqused_q=None,
                           seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None),
                           learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
                           mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None,
                           seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None):
    """q and k, v each packed (total, heads, headdim) with cu_seqlens, or padded (batch, seqlen, heads, headdim) without; seqused_q, seqused_k (batch): how
    many rows of each sequence are used -> (out, lse), lse (nheads, total_q), or (batch, nheads, seqlen_q) where q is padded."""
    refuse_given(TWO_QUERIES, qv=qv)
    refuse_given(_GATHER, gather_kv_indices=gather_kv_indices)
    refuse_given(_EXPRESSIONS, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
    refuse_given(_BLOCKS, block_sparse_tensors=block_sparse_tensors)
    return _attention(q, k, v, causal, window_size, learnable_sink, softcap, deterministic, softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k, pages=page_table)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, virtual_batch_idx=None, return_lse=True):
    """out_partial (num_splits, batch, seqlen, nheads, headdim) or (num_splits, total, nheads, headdim), lse_partial the same without headdim ->
    (out, lse), lse None without return_lse. With cu_seqlens every row is combined."""
    refuse_given("a batch in another order is not combined; index the partial results by it", virtual_batch_idx=virtual_batch_idx)
    refuse_given("every row is combined; leave it out, and do not read the rows behind", seqused=seqused)
    if out_partial.shape[:-1] != lse_partial.shape:
        raise PeerError(f"out_partial has the shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; allowed: "
                        "(num_splits, batch, seqlen, nheads, headdim) and the same without headdim")
    o, lse = merge_rows(out_partial, lse_partial)
    o = o.to(out_dtype or (out_partial if out is None else out).dtype)
    return (o if out is None else out.copy_(o)), (lse if return_lse else None)


def get_scheduler_metadata(max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, causal=False,
                           window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
                           seqused_q=None, seqused_k=None, leftpad_k=None, seqlen_k_per_split=None):
    """Nothing is to be scheduled ahead: an empty tensor, which flash_attn_varlen_func takes as scheduler_metadata."""
    return torch.empty(0, dtype=torch.int32)
