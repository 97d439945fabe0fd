"""The passes by themselves, which flash_attn keeps private and which programs for several GPUs (rings, Ulysses) call: as 2.8 has them."""

import torch

from fattn._backward import attention_backward, attention_varlen_backward
from fattn._scores import new_dropout_state
from fattn.compat._calls import peer_error, refuse_given, window_of
from fattn.compat._sequences import attention_of
from fattn.compat._weights import with_weights, with_weights_varlen

_PAGES = "call flash_attn_varlen_func or flash_attn_with_kvcache, which have it"


def _forward(weights, q, k, v, dropout_p, window, options):
    """out, softmax_lse, S_dmask and rng_state, the last of dropout."""
    state = new_dropout_state(q.device) if dropout_p else torch.zeros(2, dtype=torch.int64, device=q.device)
    try:
        with torch.no_grad():
            return *weights(q, k, v, dropout_p, window=window_of(window), dropout_state=state, **options), state
    except ValueError as error:
        raise peer_error(error) from None


def _backward(function, given, dout, q, k, v, out, softmax_lse, options):
    """softmax_d, the sum over headdim of dout * out; the gradients go into the tensors that are given."""
    try:
        with torch.no_grad():
            for to, gradient in zip(given, function(dout, q, k, v, out, softmax_lse, **options)):
                if to is not None:
                    to.copy_(gradient)
            return (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    except ValueError as error:
        raise peer_error(error) from None


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax):
    options = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap or None, "alibi_slopes": alibi_slopes}
    weights = with_weights if return_softmax else _without_weights
    return _forward(weights, q, k, v, dropout_p, (window_size_left, window_size_right), options)


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
                               window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
                               zero_tensors=False):
    refuse_given(_PAGES, block_table=block_table, leftpad_k=leftpad_k)
    options = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap or None, "alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q,
               "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if seqused_k is not None:
        options["seqused_k"] = seqused_k
    weights = with_weights_varlen if return_softmax else _without_weights
    return _forward(weights, q, k, v, dropout_p, (window_size_left, window_size_right), options)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                         deterministic, rng_state=None):
    options = {"dropout_p": dropout_p or 0, "dropout_state": rng_state, "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap or None,
               "window": window_of((window_size_left, window_size_right)), "alibi_slopes": alibi_slopes, "deterministic": deterministic or None}
    return _backward(attention_backward, (dq, dk, dv), dout, q, k, v, out, softmax_lse, options)


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                                window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False):
    options = {"dropout_p": dropout_p or 0, "dropout_state": rng_state, "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap or None,
               "window": window_of((window_size_left, window_size_right)), "alibi_slopes": alibi_slopes, "deterministic": deterministic or None,
               "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _backward(attention_varlen_backward, (dq, dk, dv), dout, q, k, v, out, softmax_lse, options)


def _without_weights(q, k, v, dropout_p, **options):
    o, lse = attention_of(q, k, v, dropout_p=dropout_p or 0, **options)
    return o, lse, o.new_empty(0)
