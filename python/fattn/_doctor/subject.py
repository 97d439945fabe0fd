"""What is looked at: a model or a function with its inputs. It is run, and left as it was."""

import copy
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Module, str, bytes, int, float, complex, type(None))


def tensors(x: Any) -> Iterator[torch.Tensor]:
    """In whatever holds them."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from tensors(value)
    elif isinstance(x, (tuple, list)):
        for value in x:
            yield from tensors(value)


def _fresh(x: Any) -> Any:
    """As it was given, for every run: a cache would have grown. Tensors are handed on."""
    if isinstance(x, _PLAIN) or callable(x):
        return x
    if isinstance(x, Mapping):
        return {name: _fresh(value) for name, value in x.items()}
    if type(x) in (tuple, list):
        return type(x)(_fresh(value) for value in x)
    try:
        return copy.deepcopy(x)
    except Exception:  # what cannot be copied is handed on
        return x


def _leaves(x: torch.Tensor) -> list[torch.Tensor]:
    """What a gradient of it reaches."""
    found, seen, todo = [], set(), [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions]
    return found


class Subject:
    def __init__(self, model: Any, inputs: Any, backward: bool) -> None:
        if not callable(model):
            raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module or a function")
        self.model, self.backward = model, backward
        self._options = inputs if isinstance(inputs, Mapping) else {}
        self._arguments = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        self.is_module = isinstance(model, torch.nn.Module)
        parameters = list(model.parameters()) if self.is_module else []
        there = [*tensors(inputs), *parameters]
        self.device = next((x.device for x in there if x.device.type == "cuda"), there[0].device if there else torch.device("cpu"))
        self._devices = sorted({x.device.index or 0 for x in there if x.device.type == "cuda"})

    @property
    def name(self) -> str:
        return type(getattr(self.model, "_orig_mod", self.model)).__name__ if self.is_module else getattr(self.model, "__name__", type(self.model).__name__)

    def is_compiled(self) -> bool:
        """Whether torch.compile has it, or a part of it that can be seen."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return False
        if not self.is_module:
            return hasattr(self.model, "_torchdynamo_orig_callable")
        return any(isinstance(x, dynamo.OptimizedModule) or x._compiled_call_impl is not None or hasattr(x.forward, "_torchdynamo_orig_callable")
                   for x in self.model.modules())

    def _wait(self) -> None:
        for index in self._devices:
            torch.cuda.synchronize(index)

    def kept(self) -> "_Kept":
        return _Kept(self.model if self.is_module else None, self._devices)

    def run(self, kept: "_Kept") -> float:
        """Seconds of a pass: forward, and backward if that is asked for. Gradients go nowhere: no `grad` is written, and nothing learns."""
        kept.rewind()
        arguments, options = _fresh(self._arguments), _fresh(self._options)
        self._wait()
        begin = time.perf_counter()
        result = self.model(*arguments, **options)
        self._wait()
        seconds = time.perf_counter() - begin
        if not self.backward:
            return seconds
        loss = getattr(result, "loss", None)
        outputs = [x for x in ([loss] if isinstance(loss, torch.Tensor) else tensors(result)) if x.requires_grad and x.is_floating_point()]
        leaves = list({id(leaf): leaf for x in outputs for leaf in ([x] if x.grad_fn is None else _leaves(x))}.values())
        if not leaves:
            raise ValueError("backward=True, and no result asks for a gradient: parameters or inputs must have requires_grad, and no torch.no_grad() be around the call")
        gradients = [torch.ones_like(x) for x in outputs]
        self._wait()
        begin = time.perf_counter()
        torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        self._wait()
        return seconds + time.perf_counter() - begin


class _Kept:
    """The state of random numbers, and the buffers of a model (running means, counters), as they were: for every run, and at the end."""

    def __init__(self, model: torch.nn.Module | None, devices: list[int]) -> None:
        modules = [] if model is None else [module for module in model.modules() if module._buffers]
        self._names = [(module, dict(module._buffers)) for module in modules]
        self._buffers = [(x, x.clone()) for _, names in self._names for x in names.values() if x is not None and not x.is_inference()]
        states = [(random.getstate, random.setstate), (torch.get_rng_state, torch.set_rng_state)]
        if (numpy := sys.modules.get("numpy")) is not None:
            states.append((numpy.random.get_state, numpy.random.set_state))
        self._kept: list[tuple[Callable, Any]] = [(put, get()) for get, put in states]
        self._kept_on_cuda = [(index, torch.cuda.get_rng_state(index)) for index in devices]

    def rewind(self) -> None:
        for put, state in self._kept:
            put(state)
        for index, state in self._kept_on_cuda:
            torch.cuda.set_rng_state(state, index)
        for module, names in self._names:
            if any(names.get(name) is not x for name, x in module._buffers.items()) or len(names) != len(module._buffers):
                module._buffers.clear()
                module._buffers.update(names)
        with torch.no_grad():
            for x, value in self._buffers:
                if not torch.equal(x, value):
                    x.copy_(value)

    def __enter__(self) -> "_Kept":
        return self

    def __exit__(self, *_: object) -> None:
        self.rewind()
