"""Watches one run of a model: which calls of attention it makes, in which layers, and how long each takes. What is put in the place of other functions for
that is taken back at the end, whatever happens."""

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import _operators
from . import subject
from .calls import Call, Like, mark
from .operators import Operators

_TORCH, _FATTN = (os.path.dirname(x) + os.sep for x in (torch.__file__, _operators.__file__))
_FORWARD = ("forward", "forward_at_once", "forward_out", "forward_varlen", "forward_with_scores")
_RUNS = subject.__file__  # above its frames there is whoever asks


def _where() -> str:
    """The nearest line of the model that is not torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _RUNS:
            break
        if not path.startswith((_TORCH, _FATTN)):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Watch:
    """`calls` are those of the run. `operators`: each operator is looked at, which finds all that is there, at a price for those between two of them. `closely`: what
    is computed is looked at too, which is no part of the time that a call takes. `eagerly`: nothing runs compiled, where no call can be seen."""

    def __init__(self, model: Any, closely: bool = False, operators: bool = False, eagerly: bool = True) -> None:
        self.calls: list[Call] = []
        self.closely, self._by_operator, self._eagerly, self._thread = closely, operators, eagerly, threading.get_ident()
        self.open: Call | None = None
        self._names = {id(module): name for name, module in model.named_modules()} if isinstance(model, torch.nn.Module) else {}
        self._stack: list[torch.nn.Module] = []
        self._operators = Operators(self)

    # What the parts of the watch ask it.

    def is_ours(self) -> bool:
        """Whether this is the thread that is watched."""
        return threading.get_ident() == self._thread

    def layer(self) -> torch.nn.Module | None:
        return self._stack[-1] if self._stack else None

    def add(self, call: Call) -> Call:
        owner = self.layer()
        if owner is not None:
            name = self._names.get(id(owner), type(owner).__name__)
            call.layer, call.module = ".".join(x for x in name.split(".") if x != "_orig_mod"), type(owner).__name__  # torch.compile's own name
        call.owner, call.where = owner, _where() if self.closely else ""
        self.calls.append(call)
        return call

    def run(self, call: Call, function: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """`function(q, k, v)`, timed; nothing inside of it is a call of its own."""
        backward = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        q, k, v = (_told(x, call) if backward and x.requires_grad else x for x in (q, k, v))
        self.open = self.add(call)
        begin = mark(q.device)
        try:
            result = function(q, k, v)
        finally:
            self.open = None
        call.marks = [begin, mark(q.device)]
        o = result[0] if isinstance(result, tuple) else result
        if backward and isinstance(o, torch.Tensor) and o.grad_fn is not None:
            o.grad_fn.register_prehook(lambda _: setattr(call, "backward_begin", mark(call.q.device)))
        return result

    # The functions that it puts in the place of others.

    def _sdpa(self, original: Callable) -> Callable:
        def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
            rest = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            if not self.is_ours() or self.open is not None or torch._C._are_functorch_transforms_active():
                return original(query, key, value, **rest)
            call = Call("sdpa", "F.scaled_dot_product_attention", q=Like.of(query, True), k=Like.of(key, True), v=Like.of(value, True), causal=is_causal, mask=attn_mask,
                        dropout_p=dropout_p, options={"scale": scale, "enable_gqa": enable_gqa, "flash": torch.backends.cuda.flash_sdp_enabled()})
            call.again = lambda q, k, v: original(q, k, v, **rest)
            return self.run(call, call.again, query, key, value)

        return scaled_dot_product_attention

    def _interfaces(self, original: Callable) -> Callable:
        def get_interface(interfaces: Any, name: str, default: Callable) -> Callable:
            chosen = original(interfaces, name, default)
            return self._interface(name or "eager", chosen) if self.is_ours() else chosen

        return get_interface

    def _interface(self, name: str, chosen: Callable) -> Callable:
        from ..transformers import _weights_are_collected as weights_are_collected  # it is there: `at_work` has imported it

        def interface(module, query, key, value, attention_mask, *arguments, **options):
            if self.open is not None or arguments or torch._C._are_functorch_transforms_active():
                return chosen(module, query, key, value, attention_mask, *arguments, **options)
            if name == "sdpa" and options.get("position_bias") is not None:  # a mask for torch's function, which is the one to look at
                return chosen(module, query, key, value, attention_mask, **options)
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            call = Call("interface", f'transformers\' attn_implementation="{name}"', q=Like.of(query, True), k=Like.of(key, True), v=Like.of(value, True), causal=bool(causal),
                        mask=attention_mask, dropout_p=options.get("dropout") or 0.0,
                        options={**options, "implementation": name, "weights": bool(options.get("output_attentions")) or weights_are_collected()})
            call.again = lambda q, k, v: chosen(module, q, k, v, attention_mask, **options)
            result = self.run(call, call.again, query, key, value)
            call.owner = module
            return result

        return interface

    def _forward(self, original: Callable) -> Callable:
        """Of fattn's own operators: those that torch's kernels have become are called where nobody looks at operators."""

        def forward(*arguments: Any) -> Any:
            if self.is_ours() and self.open is not None:
                self.open.ours = True
            return original(*arguments)

        return forward

    # At work.

    def _push(self, module: torch.nn.Module, _: Any) -> None:
        if not self.is_ours():
            return
        if not self._stack and id(module) not in self._names:  # of a function: its modules are known when they are called
            prefix = type(module).__name__
            self._names |= {id(x): f"{prefix}.{name}" if name else prefix for name, x in module.named_modules()}
        self._stack.append(module)

    def _pop(self, module: torch.nn.Module, *_: Any) -> None:
        if self.is_ours() and self._stack and self._stack[-1] is module:
            self._stack.pop()

    @contextlib.contextmanager
    def at_work(self) -> Iterator["Watch"]:
        interfaces = _interfaces_of_transformers()  # which imports modules, that should see torch's own function
        with contextlib.ExitStack() as stack:
            for handle in (register_module_forward_pre_hook(self._push), register_module_forward_hook(self._pop, always_call=True)):
                stack.callback(handle.remove)
            original = F.scaled_dot_product_attention
            watched = self._sdpa(original)
            for name, module in list(sys.modules.items()):  # whoever imported it by name has it under that name
                if name.startswith("torch.") and module is not F:  # the compiler knows torch's functions by those names, and remembers them
                    continue
                names = getattr(module, "__dict__", None)
                for name in [name for name, x in list(names.items()) if x is original] if isinstance(names, dict) else ():
                    _put(stack, names, name, watched)
            if interfaces is not None:
                stack.callback(setattr, interfaces, "get_interface", interfaces.get_interface)
                interfaces.get_interface = self._interfaces(interfaces.get_interface)
            for name in _FORWARD if self.closely else ():
                _put(stack, vars(_operators), name, self._forward(getattr(_operators, name)))
            if self._eagerly and "torch._dynamo" in sys.modules:  # else nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(warnings.catch_warnings())  # that hooks see a compiled model twice, which does no harm
                warnings.filterwarnings("ignore", message="Using `torch.compile")
            if self._by_operator:
                stack.enter_context(self._operators)
            yield self


def _interfaces_of_transformers() -> type | None:
    """Where models of transformers get their attention from, if there can be such a model, of a version that fattn knows."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    try:
        from .. import transformers
    except ImportError:
        return None
    interfaces = transformers.AttentionInterface
    return interfaces if hasattr(interfaces, "get_interface") else None


def _put(stack: contextlib.ExitStack, names: dict[str, Any], name: str, x: Any) -> None:
    stack.callback(names.__setitem__, name, names[name])
    names[name] = x


def _told(x: torch.Tensor, call: Call) -> torch.Tensor:
    """A view whose gradient tells when it comes."""
    x = x.view_as(x)
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(lambda _: call.backward_ends.append(mark(call.q.device)))
    return x
