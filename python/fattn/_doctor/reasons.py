"""Why a call of attention does not run fattn, what to do about it, and the same call by fattn."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _abi, sdpa
from .._attention import attention
from .._options import short_dtype
from .._support import support
from .calls import Call
from .operators import FLASH, FLEX, HIDDEN, LAYERS

_KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "torch's flash kernel for the CPU",
    "aten::_scaled_dot_product_flash_attention": "torch's flash kernel",
    "aten::_scaled_dot_product_efficient_attention": "torch's memory-efficient kernel",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN's kernel",
    "aten::_softmax": "standard attention, which stores the matrix of scores",
    "aten::_safe_softmax": "standard attention, which stores the matrix of scores",
}
_ACTIVATE = "fattn.sdpa.activate()"
_CALL = 'call fattn.attention(q, k, v, ..., layout="bhsd") there'


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`why` not fattn, what to `change`, and the call `by_fattn` of q, k and v where it can be computed."""

    runs: str
    why: str = ""
    change: str = ""
    by_fattn: Callable[..., Any] | None = None
    masked: bool | None = None  # whether fattn needs a mask for it, where that differs from what was given


def runs(call: Call) -> str:
    """What computes it, for people."""
    if call.ours:
        return "fattn"
    if call.kind == "written":
        return "standard attention, which stores the matrix of scores"
    names = [_KERNELS[name] for name in sorted(call.operators) if name in _KERNELS]
    return names[0] if names else call.function


def _unsupported(call: Call, backward: bool, **options: Any) -> str:
    """The planner's reason, or ""."""
    q, k, v = call.q, call.k, call.v
    if short_dtype(q.dtype) not in _abi.DTYPES:
        return f"its dtype is {q.dtype}; fattn computes float32, float16, bfloat16 and (on the CPU) float64"
    if q.device.type not in ("cpu", "cuda"):
        return f"it is on the device {q.device}; fattn computes on the CPU and on CUDA devices"
    if not q.dim() == k.dim() == v.dim() == 4:
        return ""
    try:
        answer = support(q.shape, k.shape, v.shape, dtype=q.dtype, device=q.device.type, device_index=q.device.index or 0, backward=backward,
                         causal=call.causal, dropout_p=call.dropout_p, layout="bhsd", **options)
    except ValueError as error:
        return str(error)
    return answer.reason


def _pairs(mask: torch.Tensor | None) -> dict[str, Any]:
    return {} if mask is None else {"mask" if mask.dtype == torch.bool else "bias": mask}


def _sdpa(call: Call, backward: bool) -> Verdict:
    q, k, options = call.q, call.k, call.options
    pairs = _pairs(call.mask)
    refused = _unsupported(call, backward, **{name: (1,) * (4 - x.dim()) + tuple(x.shape) for name, x in pairs.items() if x.dim() <= 4})
    ran = runs(call)
    if refused:
        return Verdict(ran, refused)
    if call.q.dim() == 0:
        return Verdict(ran, "its tensors are nested or sparse", "fattn.attention_varlen takes sequences of unequal lengths behind each other")
    flash = bool(call.operators & FLASH)
    if q.dim() != 4 and not flash:
        return Verdict(ran, f"q has {q.dim()} dimensions, for which torch takes no kernel that fattn takes the place of",
                       "give F.scaled_dot_product_attention 4 dimensions (unsqueeze), then fattn.sdpa.activate()")
    if call.causal and q.shape[-2] != k.shape[-2]:
        return Verdict(ran, "is_causal with unequal lengths: torch aligns to the top left, fattn to the bottom right",
                       "where the bottom right is meant, " + _CALL + " with causal=True")
    by_fattn = functools.partial(attention, causal=call.causal, softmax_scale=options["scale"], dropout_p=call.dropout_p, layout="bhsd", **pairs)
    if q.dtype == torch.float64:
        return Verdict(ran, "float64 stays with torch's own kernels", _CALL + ", by its slow backend reference")
    if q.dim() == 3:
        of_four = by_fattn
        by_fattn = lambda q, k, v: of_four(q[None], k[None], v[None])  # noqa: E731
    elif q.dim() != 4:
        by_fattn = None
    if flash:
        taken = sdpa._is_ours(q, k, call.dropout_p, call.causal)
        why = "" if taken else "dropout on a GPU stays with torch's own kernel"
    else:
        taken = q.device.type == "cpu" and options["flash"] and sdpa._is_ours_of_math(q, k, call.v, call.mask, call.dropout_p, call.causal, options["enable_gqa"])
        why = "" if taken else f"torch gave it to another backend than flash ({ran})"
        if not taken and not options["flash"]:
            why = "torch's flash backend, which fattn takes the place of, is switched off (sdpa_kernel, enable_flash_sdp)"
    if not taken:
        return Verdict(ran, why, _CALL, by_fattn)
    if sdpa.is_active():
        return Verdict(ran, f"torch took {ran} all the same", _CALL, by_fattn)
    return Verdict(ran, "torch's function runs torch's own kernels until fattn is put in their place", _ACTIVATE, by_fattn)


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= HIDDEN


def fattns_mask(mask: Any, rows: int, keys: int, causal: bool, window: int | None) -> torch.Tensor | None:
    """What fattn would be given in the place of a mask that another implementation was given: none, which keys are there (batch, keys), or the mask as it is."""
    if not isinstance(mask, torch.Tensor):  # none, or FlexAttention's, of which what is beside causal and a window is not known
        return None
    if mask.dim() != 4 or mask.device.type not in ("cpu", "cuda"):
        return mask
    hidden = _hidden(mask[..., :keys])
    distance = torch.arange(keys, device=mask.device) - torch.arange(keys - rows, keys, device=mask.device)[:, None]
    own = distance > (0 if causal else keys)
    if window is not None:
        own |= (distance <= -window) if causal else (distance.abs() > window)
    if hidden.shape[2] == rows and bool((hidden == own).all()):
        return None
    if hidden.shape[1] != 1:
        return mask
    there = ~hidden[:, 0, -1]
    if window is not None:
        there = ~(hidden[:, 0].all(1))
    counts = there[:, -rows:] if causal and hidden.shape[2] == rows else torch.ones_like(there[:, :1])
    same = hidden[:, 0] == (own | ~there[:, None])
    return there.to(torch.int64) if bool(same[counts.expand(same.shape[:2])].all()) else mask


def _interface(call: Call, backward: bool) -> Verdict:
    ran, name = runs(call), call.options["implementation"]
    if name == "eager":
        ran = _KERNELS["aten::_softmax"]
    options = {key: x for key, x in call.options.items() if key not in ("implementation", "weights")}
    refused = _unsupported(call, backward)
    if refused:
        return Verdict(ran, refused)
    if options.get("position_bias") is not None:
        return Verdict(ran, "the model adds a position bias, which fattn does not compute for transformers")
    if name == "fattn":
        if call.options["weights"]:
            return Verdict(ran, "output_attentions=True: the weights are asked for, which standard attention computes", "ask for no weights")
        return Verdict(ran, "this device does not compute such a mask by fattn", "fattn.support says what it computes")
    if call.options["weights"]:
        return Verdict(ran, "output_attentions=True: the weights are asked for, which fattn does not store", "ask for no weights, then set attn_implementation")
    from ..transformers import attention as by_transformers  # which is there, since the model is one of transformers'

    mask = fattns_mask(call.mask, call.q.shape[2], call.k.shape[2], call.causal, options.get("sliding_window"))
    owner = call.owner

    def by_fattn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return by_transformers(owner, q, k, v, mask, **options)

    change = 'import fattn.transformers; model.set_attn_implementation("fattn")'
    if name == "sdpa" and not sdpa.is_active():
        change += ", or " + _ACTIVATE
    return Verdict(ran, f'attn_implementation is "{name}"', change, by_fattn, mask is not None)


def _of_weights(call: Call) -> bool:
    return isinstance(call.owner, torch.nn.MultiheadAttention)


def _written(call: Call, backward: bool) -> Verdict:
    ran = runs(call)
    refused = _unsupported(call, backward)
    if refused:
        return Verdict(ran, refused)
    pairs = {}
    if call.masked:
        pairs["mask"] = torch.ones(1, 1, call.q.shape[2], call.k.shape[2], dtype=torch.bool, device=call.q.device)
    by_fattn = functools.partial(attention, causal=call.causal, dropout_p=call.dropout_p, layout="bhsd", **pairs)
    if _of_weights(call):
        return Verdict(ran, "torch.nn.MultiheadAttention is asked for the weights (need_weights=True, which it is unless said otherwise)",
                       f"call it with need_weights=False, then {_ACTIVATE}", by_fattn)
    return Verdict(ran, "the scores are computed, and softmax is taken, by functions of their own", _CALL, by_fattn)


def _operator(call: Call, backward: bool) -> Verdict:
    name = next(iter(call.operators))
    ran = runs(call)
    if name in LAYERS:
        by_fattn = functools.partial(attention, layout="bhsd") if call.q.dim() == 4 else None
        return Verdict(ran, "torch.nn.TransformerEncoderLayer and MultiheadAttention have a fast path in one operator, in eval mode without gradients",
                       f"torch.backends.mha.set_fastpath_enabled(False), then {_ACTIVATE}", by_fattn)
    if name == FLEX:
        return Verdict(ran, "torch's FlexAttention is called", "fattn.attention has windows, softcap, ALiBi, documents, biases and masks of its own")
    if name.startswith("aten::"):
        refused = _unsupported(call, backward)
        taken = not refused and name in FLASH and sdpa._is_ours(call.q, call.k, call.dropout_p, call.causal)
        by_fattn = functools.partial(attention, causal=call.causal, dropout_p=call.dropout_p, layout="bhsd", **_pairs(call.mask)) if taken else None
        why = "torch's function is called by another name, by torch.func, or by compiled or scripted code, and runs torch's own kernel"
        return Verdict(ran, refused or why, _ACTIVATE if taken else "" if refused else _CALL, by_fattn)
    return Verdict(ran, "another library's attention is called", "docs/MIGRATION.md of fattn says what to write in its place")


def verdict(call: Call, backward: bool) -> Verdict:
    if call.ours:
        return Verdict("fattn")
    return {"sdpa": _sdpa, "interface": _interface, "written": _written, "operator": _operator}[call.kind](call, backward)


def standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, masked: bool, dropout_p: float) -> torch.Tensor:
    """Attention as it is written out, for its time."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal or masked:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return (torch.nn.functional.dropout(weights, dropout_p) if dropout_p else weights) @ v


def as_now(call: Call) -> Callable[..., Any] | None:
    """The call of q, k and v by what computes it now; None where that is unknown."""
    if call.again is not None:
        return call.again
    if call.operators & FLASH:
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, call.mask, call.dropout_p, call.causal)
    if call.kind == "written" or (call.operators & set(LAYERS) and call.q.dim() == 4):
        return lambda q, k, v: standard(q, k, v, call.causal, call.masked, call.dropout_p)
    return None
