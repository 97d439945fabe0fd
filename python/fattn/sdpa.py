"""`torch.nn.functional.scaled_dot_product_attention` computed by fattn, in eager and compiled code, without a change of the model:

    import fattn.sdpa
    fattn.sdpa.activate()

or `torch.nn.attention.activate_flash_attention_impl("fattn")` after the import; `deactivate` (in torch 2.11 and later also
`torch.nn.attention.restore_flash_attention_impl`) takes it back.

fattn computes what torch gives to its flash backend: on CUDA fp16 and bf16 without a mask, on the CPU all dtypes, with masks (`attn_mask`) of either kind. On the CPU
it computes what torch else gives to its math backend because of dropout (`dropout_p`) or a mask that asks for a gradient, too. Of that, torch's own kernels still compute

- `is_causal` with unequal lengths, which torch aligns to the top left and fattn to the bottom right,
- float64,
- dropout on CUDA.

Dropout takes its seed from torch's generator, but other numbers than torch's own. Whatever else fattn cannot compute is an error, as in `fattn.attention`. What torch
gives to another backend (math, efficient, cuDNN) stays there; `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` asks for flash, and where it is not
allowed fattn computes nothing.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.attention

from . import _operators
from ._attention import attention
from ._errors import exception_of_operator
from ._operators import OPTIONS, rows_contiguous
from ._scores import Scores, of_pairs

__all__ = ["activate", "deactivate", "is_active"]

NAME = "fattn"


def _is_ours(q: torch.Tensor, k: torch.Tensor, dropout_p: float, is_causal: bool) -> bool:
    return dropout_p == 0 and not (is_causal and q.shape[-2] != k.shape[-2]) and q.dtype != torch.float64


def _run(operator: Any, *arguments: Any) -> None:
    try:
        operator(*arguments)
    except RuntimeError as error:
        raise exception_of_operator(error) from None


def _options(k: torch.Tensor, is_causal: bool, scale: float | None, deterministic: bool, attn_mask: torch.Tensor | None = None) -> tuple:
    options = scale, is_causal, deterministic, True
    if attn_mask is None:
        return options
    pairs = of_pairs("attn_mask", attn_mask, k.shape[2])
    return *options, *OPTIONS[len(options) :], *(Scores(mask=pairs) if pairs.dtype == torch.bool else Scores(bias=pairs))


def _backward(dout, q, k, v, o, lse, is_causal, scale, gradients, attn_mask=None) -> tuple[torch.Tensor, ...]:
    # Of all tensors only dout may have rows that are not contiguous.
    deterministic = torch.are_deterministic_algorithms_enabled()
    _run(_operators.backward_out, rows_contiguous(dout), q, k, v, o, lse, *gradients, *_options(k, is_causal, scale, deterministic, attn_mask))
    return gradients


def _like(q: torch.Tensor, headdim: int) -> torch.Tensor:
    """o in the order in memory that q has: compiled code was told so."""
    if q.shape[3] == headdim:
        return torch.empty_like(q)
    order = sorted(range(4), key=lambda i: (q.stride(i), -i), reverse=True)
    return torch.empty_permuted((*q.shape[:3], headdim), order, dtype=q.dtype, device=q.device)


# Each takes what torch's kernel takes, after the set of dispatch keys, and gives results of the same strides.


def _cpu_forward(original, keys, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if not _is_ours(q, k, dropout_p, is_causal):
        return original(keys, q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    batch, nheads, seqlen_q, _ = q.shape
    o, lse = torch.empty_like(q), q.new_empty((batch, seqlen_q, nheads), dtype=torch.float32).transpose(1, 2)
    _run(_operators.forward_out, q, k, v, o, lse, *_options(k, is_causal, scale, False, attn_mask))
    return o, lse


def _cpu_backward(original, keys, dout, q, k, v, o, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
    if not _is_ours(q, k, dropout_p, is_causal):
        return original(keys, dout, q, k, v, o, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    gradients = tuple(torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device) for x in (q, k, v))
    return _backward(dout, q, k, v, o, lse, is_causal, scale, gradients, attn_mask)


def _is_ours_of_math(q, k, v, attn_mask, dropout_p: float, is_causal: bool, enable_gqa: bool) -> bool:
    """Of what torch gives to its math backend on the CPU."""
    heads_fit = q.dim() == k.dim() == v.dim() == 4 and (enable_gqa or q.shape[1] == k.shape[1]) and q.shape[0] == k.shape[0]
    needed = dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad)
    return (needed and heads_fit and _is_ours(q, k, 0, is_causal) and torch.backends.cuda.flash_sdp_enabled()
            and not (is_causal and attn_mask is not None))


def _math(original, keys, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, *, scale=None, enable_gqa=False):
    """torch's function for what no other kernel of its own computes, which is differentiated piece by piece. Of its two results
    scaled_dot_product_attention takes the first; the weights are not there."""
    if dropout_mask is not None or not _is_ours_of_math(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
        return original(keys, q, k, v, attn_mask, dropout_p, is_causal, dropout_mask, scale=scale, enable_gqa=enable_gqa)
    pairs = {} if attn_mask is None else {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}
    o = attention(q, k, v, causal=is_causal, softmax_scale=scale, dropout_p=dropout_p, layout="bhsd", **pairs)
    return o, q.new_empty((0,))


def _cuda_forward(original, keys, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if return_debug_mask or not _is_ours(q, k, dropout_p, is_causal):
        return original(keys, q, k, v, dropout_p, is_causal, return_debug_mask, scale=scale)
    o, lse = _like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    _run(_operators.forward_out, q, k, v, o, lse, scale, is_causal, False, True)
    # The state of dropout, of which there is none.
    seed, offset = q.new_empty((2,), dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    return o, lse, None, None, q.shape[2], k.shape[2], seed, offset, q.new_empty((0,))


def _cuda_backward(original, keys, dout, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, *,
                   scale=None):
    if not _is_ours(q, k, dropout_p, is_causal):
        return original(keys, dout, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale=scale)
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    return _backward(dout, q, k, v, o, lse, is_causal, scale, gradients)


_KERNELS = (
    ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _cpu_forward),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU", _cpu_backward),
    ("_scaled_dot_product_attention_math", "AutogradCPU", _math),
    ("_scaled_dot_product_attention_math", "CPU", _math),
    ("_scaled_dot_product_flash_attention", "CUDA", _cuda_forward),
    ("_scaled_dot_product_flash_attention_backward", "CUDA", _cuda_backward),
)


class _Handle:
    """Ours in the place of torch's kernels, until `remove`."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        for name, key, ours in _KERNELS:
            if key == "CUDA" and not torch.backends.cuda.is_built():
                continue
            original = torch.library.get_kernel(f"aten::{name}", key).call_boxed
            with warnings.catch_warnings():  # torch warns that a kernel is replaced, which is what was asked for
                warnings.simplefilter("ignore", UserWarning)
                self._library.impl(name, functools.partial(ours, original), key, with_keyset=True)

    @property
    def at_work(self) -> bool:
        return self._library is not None

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


_last: _Handle | None = None


def _register() -> _Handle:
    global _last
    if _last is not None:
        _last.remove()  # torch 2.10 does not
    _last = _Handle()
    return _last


def activate() -> None:
    """From now on `F.scaled_dot_product_attention` is computed by fattn, where the rules above say so, in every thread."""
    torch.nn.attention.activate_flash_attention_impl(NAME)
    if _last is None or not _last.at_work:  # torch 2.10 takes for active what was taken back
        _register()


def is_active() -> bool:
    """Whether fattn is in the place of torch's kernels now."""
    return _last is not None and _last.at_work


def deactivate() -> None:
    """torch's own kernels again. Nothing happens if fattn is not active."""
    restore = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
    if restore is not None and torch.nn.attention.current_flash_attention_impl() == NAME:
        restore()
    elif _last is not None:
        _last.remove()


torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_register)
