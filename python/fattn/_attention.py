"""fattn.attention: the front for torch tensors."""

from typing import Any, NoReturn

try:
    import torch.nn  # not torch alone, whose name any folder on the way can have
except ModuleNotFoundError as error:
    raise ImportError("fattn.attention needs PyTorch 2.10 or later, which is not installed; fattn.numpy works without it") from error

from torch.autograd import forward_ad

from . import _abi, _flops
from ._autograd import Attention, AttentionAndLse, attention_and_lse_at_once, attention_at_once, distinct, run_forward
from ._core import autocast, results, run, wants_fp32
from ._dtensor import on_shards
from ._operators import rows_contiguous
from ._options import Window, choose, flags, is_bhsd, window_limits
from ._refused import explained, is_dtensor, require_dense, require_numbers
from ._scores import NONE, keys_of, prepare, require_no_gradient_of_pages, wants_gradient, with_symbols
from ._unknown import options_of, unknown_options
from ._varlen import attention_varlen, require_packed

_flops.register()


def _no_tensors_of_4_dimensions(**tensors: object) -> Exception:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            arrays = ". Arrays of NumPy go to fattn.numpy.forward" if hasattr(x, "__array_interface__") else ""
            return TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor{arrays}")
    name, x = next((name, x) for name, x in tensors.items() if x.dim() != 4)
    return ValueError(f"{name} has {x.dim()} dimensions; allowed: 4 (batch, seqlen, heads, headdim). Add a dimension of 1 where one is missing")


def _of_others(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None, layout: str, **options: Any) -> Any:
    """Of packed sequences and of DTensors."""
    packed = [name for name in ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k") if options[name] is not None]
    if cu_seqlens_q is None and not packed:
        return on_shards(attention, q, k, v, packed=False, layout="bhsd" if is_bhsd(layout) else "bshd", **options)
    require_packed(cu_seqlens_q, layout)
    return attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, **options)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    dropout_state: torch.Tensor | None = None,
    document_q: torch.Tensor | None = None,
    document_k: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sinks: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_lse: bool = False,
    return_dropout_state: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    algorithm: str = "auto",
    layout: str = "bshd",
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """o = dropout(softmax(cap(softmax_scale * q k^T) + alibi + bias + mask)) v, without storing the matrix of scores; differentiable in q, k, v, bias and
    sinks, and so is the log-sum-exp.

    Args:
        q: (batch, seqlen_q, nheads, headdim), float32, float16 or bfloat16, on the CPU or a CUDA device (float64 on the CPU, by the slow
            backend "reference"). Strides are free; a last dimension that is not contiguous is copied. A DTensor may be split by batch and heads: then all tensors
            are DTensors of its mesh, which are moved to fit it, and the results are split as q is. Without dropout.
        k: (batch, seqlen_k, nheads_k, headdim); nheads is a multiple of nheads_k (GQA, MQA).
        v: (batch, seqlen_k, nheads_k, headdim_v).
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (aligned to the bottom right).
        softmax_scale: 1 / sqrt(headdim) unless given.
        window: (left, right): query i sees the keys j with -left <= j - (i + seqlen_k - seqlen_q) <= right; None or -1 is no limit on that side.
            With `causal` right is 0, whatever it says. None: no window.
        softcap: scaled scores s become softcap * tanh(s / softcap) before the mask; None or 0: they stay as they are.
        seqused_k: (batch), int32 or int64: batch entry b has the keys [0, seqused_k[b]) only, and causal masks, windows and ALiBi align with the last of them.
            On the CPU a length outside of [0, seqlen_k] is an error, on a GPU it gives NaN, unless `fattn.set_check("sync")`.
        alibi_slopes: (nheads) or (batch, nheads): adds -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j (Press et al. 2022).
        bias: what broadcasts to (batch, nheads, seqlen_q, seqlen_k) in every layout, in float32 or q's dtype: added to scores; -inf hides the key. Its gradient
            has its shape. A row whose keys all have a finite one that is meant to hide (an lse below -2^25) has no gradient, though its o depends on v.
        mask: the same shapes, bool or uint8: a query sees the keys where it is not 0.
        dropout_p: a weight becomes 0 with this probability (a multiple of 2^-16), else is divided by 1 - dropout_p. There is no training mode: 0 is none.
        dropout_state: (2), int64, on q's device: seed and offset of the random numbers, from which dropout follows on every backend; (4): and the places of the
            first query and key, multiples of 16 and 64, of a part of a matrix. None: from torch's generator of the device, so that
            `torch.manual_seed` repeats it. Without dropout it is not looked at.
        document_q: (batch, seqlen_q), int32: the id of each query's document. A query sees the keys of its own id only, in addition to all masks; positions stay
            those of the whole sequence. Sorted ids cost least.
        document_k: (batch, seqlen_k), the ids of the keys; None: as document_q.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of sequences behind each other in tensors of 3 dimensions, (total, heads, headdim): the call is
            `fattn.attention_varlen`, which says what they are.
        sinks: (nheads), a learned logit of each head that joins the softmax's sum and has no value (GPT-OSS); differentiable. lse counts it: a row that
            sees no key has its sink for lse. -inf: none.
        block_table: (batch, columns), int32 or int64: k and v are a paged cache, (pages, page_size, nheads_k, headdim or headdim_v), and key j of batch entry b
            is row j % page_size of page block_table[b, j // page_size]. seqlen_k is columns * page_size, and seqused_k says how many of them an entry has;
            numbers of pages behind them are not looked at. Entries may share pages. No gradients. With "bhsd" (pages, nheads_k, page_size, ...).
            With cu_seqlens_q queries alone are packed: leave cu_seqlens_k and max_seqlen_k out.
        return_lse: returns the log-sum-exp too.
        return_dropout_state: returns the state too, last, to give it to another call; None without dropout.
        out_dtype: of o; None: q's. torch.float32 beside a q of 16 bits: the sums as they are, for results that are merged or added up. The backward pass rounds
            o and its gradient to q's dtype first.
        batch_invariant: a row of o and lse has the same bits whatever else is in the call, and whether the queries of its sequence come together (prefill) or one by one
            (decoding), if the other options are the same. Keys are not split among workers then, which takes time where rows are few; on a GPU algorithm v2 computes
            it. The backward pass is as it is without.
        deterministic: the backward pass on a GPU gives the same bits in every run, at a price; None follows
            `torch.use_deterministic_algorithms`. All else gives the same bits always.
        backend: "auto", "cpu", "cuda", or "reference" (float64 inside, slow, CPU).
        algorithm: "auto", "v2" (FlashAttention-2, Dao 2023), "v3" (for Hopper, as FlashAttention-3, Shah et al. 2024), "standard" (stores the
            matrix of scores), "v1" (the first FlashAttention, Dao et al. 2022).
        layout: "bshd" as above, or "bhsd": heads before seqlen in q, k, v and o, as `torch.nn.functional.scaled_dot_product_attention` has them.

    Returns:
        o (batch, seqlen_q, nheads, headdim_v) in q's dtype (autocast's inside `torch.autocast`), or out_dtype; with "bhsd" a view with that order of dimensions.
        With `return_lse` (o, lse) and with `return_dropout_state` (o, state) or (o, lse, state); lse (batch, nheads, seqlen_q) is the natural logarithm of
        the sum of exponentials, in float32 (float64 if q is). A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: a tensor is none.
        ValueError: shapes, dtypes, devices or options that do not fit together.
        NotImplementedError: valid, but not computed by this backend, algorithm or device, the message says why; a second derivative.
        RuntimeError: a CUDA device or its driver failed, or a kernel could not be compiled.
    """
    if unknown:
        raise unknown_options("fattn.attention", unknown, options_of(attention))
    if not (type(causal) is type(return_lse) is type(return_dropout_state) is type(batch_invariant) is bool and (deterministic is None or type(deterministic) is bool)):
        causal, return_lse, return_dropout_state, batch_invariant, deterministic = flags(
            causal=causal, return_lse=return_lse, return_dropout_state=return_dropout_state, batch_invariant=batch_invariant, deterministic=deterministic)
    if (cu_seqlens_q is not None or cu_seqlens_k is not None or max_seqlen_q is not None or max_seqlen_k is not None
            or (type(q) is not torch.Tensor and is_dtensor(q))):
        return _of_others(q, k, v, cu_seqlens_q, layout, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
                          softmax_scale=softmax_scale, window=window, softcap=softcap, seqused_k=seqused_k, alibi_slopes=alibi_slopes, bias=bias, mask=mask,
                          dropout_p=dropout_p, dropout_state=dropout_state, document_q=document_q, document_k=document_k, sinks=sinks, block_table=block_table, out_dtype=out_dtype,
                          batch_invariant=batch_invariant, return_lse=return_lse,
                          return_dropout_state=return_dropout_state, deterministic=deterministic, backend=backend, algorithm=algorithm)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and q.dim() == k.dim() == v.dim() == 4):
        raise _no_tensors_of_4_dimensions(q=q, k=k, v=v)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device_type := "cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast(device_type, q, k, v)
    try:
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    except RuntimeError:  # sparse tensors have no such thing
        require_dense("q", q), require_dense("k", k), require_dense("v", v)
        raise
    if (softmax_scale is not None and type(softmax_scale) is not float) or softcap is not None or type(dropout_p) is not int:
        require_numbers(softmax_scale, softcap, dropout_p)
    bhsd = layout == "bhsd" or is_bhsd(layout)
    scores = None
    if (seqused_k is not None or alibi_slopes is not None or bias is not None or mask is not None or dropout_p or document_q is not None
            or document_k is not None or sinks is not None or block_table is not None):
        scores = prepare(q, keys_of(k, block_table, bhsd), dropout_p, seqused_k, alibi_slopes, bias, mask, dropout_state, document_q, document_k, sinks, block_table)
    compiling = torch.compiler.is_compiling()
    in_functorch = torch._C._are_functorch_transforms_active() and not compiling
    needs_grad = in_functorch or (not compiling and forward_ad._current_level >= 0) or (  # of tangents the operator knows nothing, torch refuses the function
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or (scores is not None and wants_gradient(scores))))
    if block_table is not None:
        require_no_gradient_of_pages(needs_grad)
    if deterministic is None:  # matters in a backward pass only
        deterministic = needs_grad and torch.are_deterministic_algorithms_enabled()
    # As few as say it: the operator takes a third of a microsecond for each.
    if window is not None or softcap or backend != "auto" or algorithm != "auto" or dropout_p or out_dtype is not None or batch_invariant:
        options = (softmax_scale, causal, deterministic, bhsd, *window_limits(window), softcap or 0.0, choose("backend", backend, _abi.BACKENDS),
                   choose("algorithm", algorithm, _abi.ALGORITHMS))
        if (fp32 := wants_fp32(q, out_dtype)) or batch_invariant:
            options += (dropout_p, fp32, batch_invariant)
            scores = scores or NONE
        elif dropout_p:
            options += (dropout_p,)
    elif bhsd or deterministic:
        options = softmax_scale, causal, deterministic, bhsd
    elif causal or softmax_scale is not None:
        options = softmax_scale, causal
    else:
        options = ()
    if compiling and (softmax_scale is not None or softcap):
        options, scores = with_symbols(options, scores)
    if (q is k or q is v or k is v) and needs_grad and compiling:
        q, k, v = distinct(q, k, v)
    try:
        if scores is not None or in_functorch:
            o, lse = run(q, k, v, options, scores, None, needs_grad, in_functorch)
        elif not needs_grad:
            o, lse = run_forward(q, k, v, options)
        elif return_lse:
            o, lse = (AttentionAndLse.apply if compiling else attention_and_lse_at_once)(q, k, v, options)
        else:
            o, lse = (Attention.apply if compiling else attention_at_once)(q, k, v, options), None
    except NotImplementedError as error:
        raise explained(error) from None
    if return_lse or return_dropout_state:
        return results(o, lse, scores, return_lse, return_dropout_state)
    return o
