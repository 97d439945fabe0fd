"""Looks at a run operator by operator: which kernel a call of attention ran, attention that is written out (matmul, softmax, matmul), and operators of
attention that no known function called."""

import re
from collections import deque
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .calls import Call, Like, mark

_FORWARD = re.compile(r"aten::_scaled_dot_product_\w*attention(_for_cpu|_overrideable)?$|aten::_(flash|efficient|cudnn)_attention_forward$|fattn::forward\w*$"
                      r"|(flash_attn\w*|xformers\w*)::\w*(fwd|forward)\w*$")
_BACKWARD = re.compile(r"aten::_scaled_dot_product_\w*attention\w*_backward$|aten::_(flash|efficient|cudnn)_attention_backward$|fattn::backward\w*$"
                       r"|(flash_attn\w*|xformers\w*)::\w*(bwd|backward)\w*$")
# Whole layers in one operator: (the argument that is the input, the one that is the number of heads).
LAYERS = {"aten::_transformer_encoder_layer_fwd": (0, 2), "aten::_native_multi_head_attention": (0, 4)}
# (q, k, v, dropout_p, is_causal, ...)
FLASH = {"aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention"}
HIDDEN = -1e4  # a score that is no larger is meant to hide the key
FLEX = "flex_attention"
_COMPOSED = ("aten::scaled_dot_product_attention", "aten::matmul", "aten::softmax", "aten::linear")
_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class _Written:
    """Attention in the making: a product, then a softmax of it."""

    def __init__(self, product: Call, weights: torch.Tensor) -> None:
        self.call, self.size, self.keys = product, weights.numel(), weights.shape[-1]


class Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, watch: Any) -> None:
        super().__init__()
        self._watch = watch
        self._products: deque[tuple[torch.Size, Call]] = deque(maxlen=4)
        self._written: _Written | None = None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        options, watch = options or {}, self._watch
        schema, call = getattr(function, "_schema", None), watch.open
        if schema is None:  # of a higher order
            name = function.name()
            return self._alone(name, function, arguments, options) if name == FLEX and call is None else function(*arguments, **options)
        name = schema.name
        if name in _COMPOSED and torch.is_inference_mode_enabled():  # else torch has composed it of others before they come here
            with self:
                return function.decompose(*arguments, **options)
        if call is not None:
            if _FORWARD.match(name) or name in _SOFTMAX:
                call.operators.add(name)
                call.ours |= name.startswith("fattn::")
            return function(*arguments, **options)
        if _FORWARD.match(name) or name in LAYERS:
            return self._alone(name, function, arguments, options)
        if _BACKWARD.match(name):
            return self._backward(name, function, arguments, options)
        return self._part(name, function, arguments, options)

    def _alone(self, name: str, function: Any, arguments: tuple, options: dict) -> Any:
        """An operator of attention by itself."""
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        call = Call("operator", name.replace("::", "."), ours=name.startswith("fattn::"), operators={name})
        if name in LAYERS:
            source, heads = LAYERS[name]
            x, nheads = arguments[source], arguments[heads]
            shape = (x.shape[0], nheads, x.shape[1], x.shape[2] // nheads) if x.dim() == 3 else ()
            call.q = call.k = call.v = Like(shape, (), x.dtype, x.device, False)
        elif len(tensors) >= 3:
            call.q, call.k, call.v = map(Like.of, tensors[:3])
            if name.startswith("fattn::"):
                call.causal = len(arguments) > 4 and bool(arguments[4])
            if not name.startswith("aten::") and not (name.startswith("fattn::") and len(arguments) > 6 and arguments[6]) and name != FLEX:
                call.q, call.k, call.v = (x.heads_first() for x in (call.q, call.k, call.v))
        else:
            call.q = call.k = call.v = Like((), (), torch.float32, torch.device("cpu"), False)
        if name in FLASH:
            call.causal, call.mask = len(arguments) > 4 and bool(arguments[4]), options.get("attn_mask")
            call.dropout_p = arguments[3] if len(arguments) > 3 else 0.0
        self._watch.add(call)
        begin, self._watch.open = mark(call.q.device), call  # fattn may have taken its place
        try:
            result = function(*arguments, **options)
        finally:
            self._watch.open = None
        call.marks = [begin, mark(call.q.device)]
        return result

    def _backward(self, name: str, function: Any, arguments: tuple, options: dict) -> Any:
        """Of the last of those whose backward pass was not there yet; those of a call that was open tell by themselves."""
        library = name.partition("::")[0]
        call = next((x for x in reversed(self._watch.calls) if x.kind == "operator" and x.backward_begin is None and next(iter(x.operators)).startswith(library)), None)
        if call is None:
            return function(*arguments, **options)
        call.backward_begin = mark(call.q.device)
        result = function(*arguments, **options)
        call.backward_ends.append(mark(call.q.device))
        return result

    def _part(self, name: str, function: Any, arguments: tuple, options: dict) -> Any:
        """Of attention that is written out, perhaps."""
        if name in _PRODUCTS:
            left, right = arguments[-2:]
            written = self._written
            if written is not None and left.numel() == written.size and left.shape[-1] == written.keys:
                self._written = None
                result, call = function(*arguments, **options), written.call
                call.marks.append(mark(call.q.device))
                batch, nheads, _, _ = call.q.shape
                call.v = Like((batch, nheads, written.keys, right.shape[-1]), (), right.dtype, right.device, right.requires_grad)
                self._watch.add(call)
                return result
            call = Call("written", "matmul, softmax and matmul", q=Like.of(left), k=Like.of(right))
            begin = mark(left.device)
            result = function(*arguments, **options)
            call.marks = [begin]
            self._products.append((result.shape, call))
            return result
        result = function(*arguments, **options)
        if name in _SOFTMAX:
            self._softmax(arguments[0], result)
        elif self._written is not None and name in ("aten::native_dropout", "aten::bernoulli_") and isinstance(arguments[1], float):
            self._written.call.dropout_p = arguments[1] if name == "aten::native_dropout" else 1 - arguments[1]
        return result

    def _softmax(self, scores: torch.Tensor, weights: torch.Tensor) -> None:
        keys, size = weights.shape[-1] if weights.dim() else 0, weights.numel()
        for shape, call in reversed(self._products):
            if shape.numel() == size and shape[-1] == keys and weights.dim() >= 3:
                break
        else:
            return
        self._products.clear()
        rows, headdim = weights.shape[-2], call.q.shape[-1]
        nheads = weights.shape[-3]
        batch = size // (nheads * rows * keys) if size else 0
        like = call.q
        call.q = Like((batch, nheads, rows, headdim), (), like.dtype, like.device, like.requires_grad)
        call.k = Like((batch, nheads, keys, headdim), (), like.dtype, like.device, like.requires_grad)
        if self._watch.closely and weights.device.type in ("cpu", "cuda") and size:
            hidden = scores.detach().reshape(-1, rows, keys)[0] <= HIDDEN
            above = torch.ones_like(hidden).triu(keys - rows + 1)
            call.causal = rows > 1 and bool(hidden[above].all())
            call.masked = bool(hidden[~above].any()) if call.causal else bool(hidden.any())
        self._written = _Written(call, weights)
