"""Attention of transformers' models by fattn (transformers 5 and later):

    import fattn.transformers
    model = AutoModel.from_pretrained(name, attn_implementation="fattn")     # or, of a model that is there:
    model.set_attn_implementation("fattn")

All models whose attention goes through transformers' AttentionInterface: GPT-2, BERT, Llama, Mistral, Gemma 2, GPT-OSS, ... Weights and dtypes stay as they are.
Dropout of the weights in training and sinks are computed.

What becomes of transformers' masks:

- none, causal, causal with a sliding window: fattn's own masks;
- a static cache, one token at a time, without padding: fattn's own masks and lengths of keys, which stay on the device: `generate` compiles the step once;
- padding (`attention_mask` of ones and zeros, on any side): sequences of the same range of tokens are one call each, of views without the padding. Rows
  of queries that are padding are 0. Where the range has holes (prompts padded on the right, and tokens generated behind), the mask itself is given to fattn;
- packed sequences: with `cu_seq_lens_q` and `cu_seq_lens_k` one call of `fattn.attention_varlen`, or, where the device has none, one for each sequence; with
  `position_ids` that start again, documents (or a mask, where the device has none). Inside `torch.compile` all `position_ids` are taken for such that the caller
  gives, if there is neither an `attention_mask` nor a cache;
- any other mask (a 4-dimensional one, chunks): given to fattn as mask or bias;
- inside `torch.compile` numbers cannot be looked at: an `attention_mask` is given to fattn as it is, for the keys, beside fattn's own masks; behind a cache the mask
  of pairs is made.

Where a device computes no masks (`fattn.support`), torch's `scaled_dot_product_attention` takes those that are given whole, or, with softcap, sinks, dropout or a mask
of numbers, standard attention, which stores the matrix of scores; holes are gathered.

`output_attentions=True` is computed by standard attention too. Position biases and paged caches are refused.
"""

import functools
import itertools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.comptime import comptime

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(f"fattn.transformers needs transformers 5 or later: {error}") from error
try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # older versions hand `output_attentions` to every attention
    _collector = None

from ._attention import attention as _attention
from ._compare import Comparison, compare
from ._options import short_dtype
from ._support import support
from ._transformers_masks import mask_for
from ._varlen import attention_varlen as _attention_varlen

__all__ = ["NAME", "Comparison", "compare"]

NAME = "fattn"

_SHORT = {dtype: short_dtype(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}  # a table, for compiled code


@functools.cache
def _asked(feature: str, device: str, index: int, dtype: torch.dtype, headdim: int, headdim_v: int, backward: bool) -> bool:
    """Whether the library computes lengths of keys, documents, masks, biases, dropout or packed sequences there."""
    options = {"lengths": {"seqused_k": True}, "documents": {"documents": True}, "mask": {"mask": (1, 1, 1, 1)}, "bias": {"bias": (1, 1, 1, 1)},
               "dropout": {"dropout_p": 0.5}, "packed": {"packed": (1, 1, 1)}}[feature]
    q, v = ((1, 1, headdim), (1, 1, headdim_v)) if feature == "packed" else ((1, 1, 1, headdim), (1, 1, 1, headdim_v))
    return bool(support(q, q, v, dtype=_SHORT[dtype], device=device, device_index=index, backward=backward, **options))


@torch.compiler.assume_constant_result
def _computed(*arguments: Any) -> bool:
    return _asked(*arguments)


def _can(feature: str, q: torch.Tensor, v: torch.Tensor) -> bool:
    if q.dtype not in _SHORT or q.device.type not in ("cpu", "cuda"):
        return q.device.type == "meta"
    backward = torch.is_grad_enabled() and q.requires_grad
    return _computed(feature, q.device.type, q.device.index or 0, q.dtype, q.shape[3], v.shape[3], backward)


def _ranges(mask: torch.Tensor) -> list[tuple[int, int, bool]]:
    """Of each sequence the range [begin, end) of the keys that are there, and whether all in it are. Asked once for all layers: it waits for the device."""
    known = getattr(mask, "_fattn_ranges", None)
    if known is None:
        there = mask.to(torch.int32)
        begin, end, count = there.argmax(1), mask.shape[1] - there.flip(1).argmax(1), there.sum(1)
        known = [(begin, end if count else begin, count in (0, end - begin)) for begin, end, count in torch.stack([begin, end, count], 1).tolist()]
        mask._fattn_ranges = known
    return known


def _padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, causal: bool, options: dict[str, Any]) -> torch.Tensor:
    """(batch, seqlen_q, heads, headdim_v) of (batch, heads, seqlen, headdim) and the keys that are there. With a causal mask the queries are the last tokens."""
    ranges, seqlen_q = _ranges(mask), q.shape[2]
    before = mask.shape[1] - seqlen_q  # tokens in the cache before the first query
    parts = []
    for (begin, end, whole), group in itertools.groupby(range(len(ranges)), key=lambda b: ranges[b]):
        batch = list(group)
        for b in [slice(batch[0], batch[-1] + 1)] if whole else [slice(b, b + 1) for b in batch]:
            if whole:
                keys = slice(begin, end)
                rows = slice(max(begin - before, 0), max(end - before, 0)) if causal else slice(0, seqlen_q)
            else:
                keys = mask[b.start].nonzero()[:, 0]
                rows = keys[keys >= before] - before if causal else slice(0, seqlen_q)
            o = _attention(q[b, :, rows], k[b, :, keys], v[b, :, keys], causal=causal, layout="bhsd", **options).transpose(1, 2)
            if o.shape[1] < seqlen_q:
                part = o.new_zeros(o.shape[0], seqlen_q, *o.shape[2:])
                part[:, rows] = o
                o = part
            parts.append(o)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ends(cu_seqlens: torch.Tensor) -> list[int]:
    """Asked once for all layers, and again when the tensor was written."""
    if torch.compiler.is_compiling() or cu_seqlens.is_inference():  # the latter does not tell when it is written
        return cu_seqlens.tolist()
    version, known = getattr(cu_seqlens, "_fattn_ends", (None, []))
    if version != cu_seqlens._version:
        known = cu_seqlens.tolist()
        cu_seqlens._fattn_ends = cu_seqlens._version, known
    return known


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, longest: tuple[Any, Any], causal: bool,
            options: dict[str, Any]) -> torch.Tensor:
    """(1, tokens, heads, headdim_v) of sequences behind each other, (1, heads, tokens, headdim)."""
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is given with a batch of {q.shape[0]}; packed sequences are one row of tokens, a batch of 1")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if not torch.compiler.is_compiling():
        ends_q, ends_k = _ends(cu_seqlens_q), _ends(cu_seqlens_k)
        if len(ends_q) != len(ends_k) or ends_q[-1] != q.shape[2] or ends_k[-1] != k.shape[2]:
            raise ValueError(f"cu_seq_lens_q ends with {ends_q[-1]} and cu_seq_lens_k with {ends_k[-1]} ({len(ends_q)} and {len(ends_k)} numbers); expected as many "
                             f"in both, and {q.shape[2]} and {k.shape[2]} at the end, the tokens of query and key")
        longest = tuple(max((end - begin for begin, end in itertools.pairwise(ends)), default=0) for ends in (ends_q, ends_k))
    if _can("packed", q, v):
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        return _attention_varlen(*rows, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1], causal=causal,
                                 **options)[None]
    sequences = zip(itertools.pairwise(_ends(cu_seqlens_q)), itertools.pairwise(_ends(cu_seqlens_k)))
    parts = [_attention(q[:, :, i:j], k[:, :, m:n], v[:, :, m:n], causal=causal, layout="bhsd", **options) for (i, j), (m, n) in sequences]
    return torch.cat(parts, dim=2).transpose(1, 2)


def _standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, softmax_scale: float | None,
              window: tuple[int, int] | None, softcap: float | None, sinks: torch.Tensor | None = None, dropout_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """o (batch, seqlen_q, heads, headdim_v) and the weights, with softmax in float32 at least. A mask of pairs says all, one of keys is joined by the others."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None or mask.dim() == 2:
        distance = torch.arange(seqlen_k, device=q.device) - torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            seen &= distance <= 0
        if window is not None:
            seen &= (-distance <= window[0]) & ((distance <= window[1]) | (window[1] < 0))
        mask = seen if mask is None else seen & mask[:, None, None, :]
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    empty = (scores == float("-inf")).all(-1, keepdim=True)  # rows of 0, as are their gradients
    weights = torch.softmax(scores.masked_fill(empty, 0), dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).masked_fill(empty, 0).to(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = F.dropout(weights, dropout_p)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def _pairs(numbers: torch.Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int] | None) -> torch.Tensor:
    """The mask of pairs, for a causal mask behind so many keys (batch, 1, 1, 1), or inside of documents (batch, 1, seqlen_q, 1)."""
    lengths = numbers if numbers.shape[2] == 1 else seqlen_k
    distance = torch.arange(seqlen_k, device=numbers.device) - (lengths - seqlen_q + torch.arange(seqlen_q, device=numbers.device)[:, None])
    seen = distance <= (0 if causal else seqlen_k)
    if window is not None:
        seen = seen & (-distance <= window[0]) & (distance <= window[1])
    return seen if numbers.shape[2] == 1 else seen & (numbers == numbers.transpose(2, 3))


def _weights_are_collected() -> bool:
    """What transformers collects of the modules' results while a model runs. Where the configuration asks for weights, and in GPT-2 always, it does not hand
    `output_attentions` on."""
    if _collector is None:
        return False
    names = (_collector.global_var if _collector.compiling else None) if torch.compiler.is_dynamo_compiling() else _collector.get()
    return names is not None and ("attentions" in names or "cross_attentions" in names)


def _tell_of_weights(*_: Any) -> None:
    warnings.warn("output_attentions=True: the weights are computed by standard attention, which stores them", stacklevel=3)


_SPECIAL = frozenset(("position_bias", "cache", "output_attentions", "cu_seq_lens_q"))  # options that say more than a mask


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
              dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
              softcap: float | None = None, s_aux: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers calls its attention: query (batch, heads, seqlen, headdim), key and value with their own number of heads. Returns
    (batch, seqlen, heads, headdim) and, if `output_attentions` asks for them, the weights."""
    if torch.compiler.is_dynamo_compiling() and scaling == query.shape[-1] ** -0.5:
        scaling = None  # a constant of the model's; with dynamic=True torch.compile has it as a symbol, until it is asked
    weights = bool(options.get("output_attentions")) or _weights_are_collected()
    if attention_mask is None and not dropout and sliding_window is None and softcap is None and s_aux is None and not weights and _SPECIAL.isdisjoint(options):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # what training does in every layer, at the least cost
        return _attention(query, key, value, causal=bool(causal), softmax_scale=scaling, layout="bhsd").transpose(1, 2), None
    for name, what, instead in (("position_bias", "a position bias", "'eager' or 'sdpa' for this model"),
                                ("cache", "a paged cache", "'flash_attention_2' after fattn.compat.install(), or 'sdpa'")):
        if options.get(name) is not None:
            raise NotImplementedError(f"attn_implementation='fattn' does not compute {what} ({name}); take {instead}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None else (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    mask = attention_mask
    if mask is not None and mask.dim() == 2:  # a static cache is longer than what is in it
        key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
    of_pairs = mask is not None and mask.dim() == 4
    numbers = {}
    if of_pairs and mask.dtype == torch.int32 and mask.shape[1] == mask.shape[3] == 1:
        name, feature = ("seqused_k", "lengths") if mask.shape[2] == 1 else ("document_q", "documents")
        if not weights and _can(feature, query, value):
            numbers, mask, of_pairs = {name: mask.flatten() if mask.shape[2] == 1 else mask[:, 0, :, 0]}, None, False
        else:
            mask = _pairs(mask, query.shape[2], key.shape[2], causal, window)
    if of_pairs and mask.dtype == torch.uint8:
        if not weights and _can("mask", query, value):
            numbers, mask, of_pairs = {"mask": mask}, None, False
        else:
            all_of_them = torch.full((1, 1, 1, 1), key.shape[2], device=mask.device)
            mask = mask.bool() & _pairs(all_of_them, query.shape[2], key.shape[2], causal, window)
    if of_pairs:
        mask = mask[..., : key.shape[2]]

    if weights:
        if torch.compiler.is_dynamo_compiling():
            comptime(_tell_of_weights)  # while it traces: no warning can be in a graph
        else:
            _tell_of_weights()
        return _standard(query, key, value, mask, causal, scaling, window, softcap, s_aux, dropout)
    arguments = {"softmax_scale": scaling, "window": window, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    if dropout > 0 and not _can("dropout", query, value):
        raise NotImplementedError(f"dropout of the weights (it is {dropout}) is not computed on {query.device}; set the model's attention dropout to 0 (GPT-2: "
                                  "config.attn_pdrop, BERT: attention_probs_dropout_prob, Llama: attention_dropout), or take model.eval()")
    begins = options.get("cu_seq_lens_q")
    if begins is not None and "seqused_k" not in numbers and "mask" not in numbers and (mask is None or (of_pairs and not torch.compiler.is_compiling())):
        longest = options.get("max_length_q"), options.get("max_length_k")
        return _packed(query, key, value, begins, options.get("cu_seq_lens_k"), longest, causal, arguments), None
    if mask is None:
        return _attention(query, key, value, causal=causal, layout="bhsd", **numbers, **arguments).transpose(1, 2), None
    if of_pairs:
        kind = "mask" if mask.dtype == torch.bool else "bias"
        if _can(kind, query, value):
            arguments["window"] = None  # the mask has it
            return _attention(query, key, value, layout="bhsd", **{kind: mask}, **arguments).transpose(1, 2), None
        if kind == "bias" or softcap or s_aux is not None or dropout > 0:
            return _standard(query, key, value, mask, causal, scaling, window, softcap, s_aux, dropout)[0], None
        # torch's function with a mask: most of its kernels do not store the scores.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2).contiguous(), None
    if not all(whole for _, _, whole in _ranges(mask)):
        if _can("mask", query, value):
            return _attention(query, key, value, causal=causal, layout="bhsd", mask=mask[:, None, None].bool(), **arguments).transpose(1, 2), None
        if window is not None:
            return _standard(query, key, value, mask, causal, scaling, window, softcap, s_aux, dropout)[0], None
    return _padded(query, key, value, mask, causal, arguments), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask_for)
