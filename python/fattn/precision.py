"""Which part of a model computes in which dtype: a `Policy`, `apply` to have it so, a `Tracker` to see where it is not, and attention on mixed dtypes.

    policy = fattn.precision.Policy(mlp=torch.float16)
    with fattn.precision.apply(model, policy), fattn.precision.Tracker(model, policy) as tracker:
        loss = model(**inputs).loss
        loss.backward()
    tracker.check_gradients()
    print(tracker.report())

One set of rules (`RULES`) says what 16 bits spoil, and why; policies that break one are refused, and the tracker finds models that do.
"""

import dataclasses
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._attention import attention

__all__ = ["RULES", "Applied", "Policy", "Tracker", "Violation", "apply", "safe_attention"]

_HALVES = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)

# Of each rule, why 16 bits are not enough. The first four are also the roles of a Policy that take float32 and float64 only.
RULES = {
    "layernorm": "a variance is a mean of squares: in float16 it is Inf from values of 256 on, in bfloat16 it has 8 bits",
    "attention_weights": "softmax sums weights of very different size: in 16 bits small ones are lost, and a row no longer sums to 1",
    "loss": "the loss is a mean of many logarithms: 16 bits keep two or three digits of it, and float16 gradients vanish",
    "optimizer": "an update below half a unit in the last place changes nothing: bfloat16 parameters stop learning at 1/512 of their size, float16 at 1/4096",
    "mask": "a number beyond the dtype's range is Inf, and softmax of a row of -Inf, as 0 * Inf, is NaN: hide scores with torch.finfo(dtype).min, not with -1e9",
    "gradients": "float16 gradients below 6e-8 are 0 and beyond 65504 Inf: scale the loss (torch.amp.GradScaler), or take bfloat16",
    "policy": "the module computed in another dtype than the policy says",
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes by role. Parameters are never changed: a module computes with copies of them in its role's dtype.

    Attributes:
        qkv: projections of attention, and so q, k and v.
        attention_weights: softmax. fattn's own is in float32 in every dtype of q; a softmax in torch is looked at by the tracker.
        mlp: all other matrices.
        layernorm: normalisations, statistics and all.
        loss: what the model returns, and with it the loss.
        optimizer: parameters, as the optimizer updates them; the tracker looks at their dtype.
        embeddings: tables that are looked up.

    Raises:
        ValueError: a dtype that is no float of torch, or 16 bits in a role that does not bear them (`RULES`).
    """

    qkv: torch.dtype = torch.bfloat16
    attention_weights: torch.dtype = torch.float32
    mlp: torch.dtype = torch.bfloat16
    layernorm: torch.dtype = torch.float32
    loss: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32
    embeddings: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype, allowed = getattr(self, field.name), _WIDE if field.name in RULES else _WIDE + _HALVES
            if dtype not in allowed:
                why = f": {RULES[field.name]}" if dtype in _HALVES else ""
                raise ValueError(f"{field.name} is {dtype}; allowed: {', '.join(map(str, allowed))}{why}")


def _role(name: str, module: torch.nn.Module) -> str | None:
    """Of a module that has parameters of its own, or None."""
    if not any(True for _ in module.parameters(recurse=False)):
        return None
    if isinstance(module, torch.nn.Embedding):
        return "embeddings"
    if "norm" in type(module).__name__.lower():
        return "layernorm"
    if isinstance(module, torch.nn.MultiheadAttention) or "attn" in name.lower() or "attention" in name.lower():
        return "qkv"
    return "mlp"


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Tensors of floats, in whatever holds them, as a model's inputs and results do."""
    if isinstance(x, torch.Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if isinstance(x, dict):  # transformers' results are dictionaries too; of the same type, so that their attributes stay
        changed = {key: _cast(value, dtype) for key, value in x.items()}
        return changed if type(x) is dict else type(x)(**changed)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_cast(value, dtype) for value in x))
    return type(x)(_cast(value, dtype) for value in x) if isinstance(x, (tuple, list)) else x


class Applied:
    """A policy at work, until `remove` or the end of a `with` block."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Hooks:
    """One module computes in one dtype: copies of its parameters take their place while it runs, and gradients reach the parameters through the copies."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        # MultiheadAttention uses the parameters of a module inside it.
        self.owners = list(module.modules()) if isinstance(module, torch.nn.MultiheadAttention) else [module]
        self.replaced: list[list[tuple[torch.nn.Module, str, torch.nn.Parameter]]] = []

    def before(self, _: torch.nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict]:
        own = [(owner, name, x) for owner in self.owners for name, x in owner._parameters.items() if x is not None and x.is_floating_point()]
        self.replaced.append(own)
        for owner, name, x in own:
            owner._parameters[name] = x.to(self.dtype)
        return _cast(arguments, self.dtype), _cast(options, self.dtype)

    def after(self, *_: object) -> None:
        for owner, name, x in self.replaced.pop():
            owner._parameters[name] = x


def apply(model: torch.nn.Module, policy: Policy) -> Applied:
    """Has the model's modules compute as the policy says, by hooks: inputs and copies of the parameters are cast, results stay as they come; what the model
    returns is cast to `policy.loss`. Parameters, and what is saved of them, stay as they are. Take it back with `remove()` or a `with` block.

    Args:
        model: any module; the role of a module follows from its kind and name (embeddings; ...Norm; within "attn" or "attention"; all others).
        policy: the dtypes.
    """
    applied = Applied()
    for name, module in model.named_modules():
        if role := _role(name, module):
            hooks = _Hooks(module, getattr(policy, role))
            applied._handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
            # The last to come is the first to go: of two policies on one module the second has found the copies of the first.
            applied._handles.append(module.register_forward_hook(hooks.after, prepend=True, always_call=True))
    applied._handles.append(model.register_forward_hook(lambda _, __, output: _cast(output, policy.loss)))
    return applied


@dataclasses.dataclass(frozen=True)
class Violation:
    """One operation that breaks a rule. `count` is how often."""

    rule: str
    name: str  # of the module
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    count: int = 1

    def __str__(self) -> str:
        tensors = ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in zip(self.shapes, self.dtypes))
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.rule}: {self.name or 'the model'}: {self.operation} on {tensors}{times}"


_STATISTICS = {"pow", "square", "var", "var_mean", "mean", "sum", "rsqrt"}
_LOSSES = {"_log_softmax", "log_softmax", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "binary_cross_entropy"}


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x] if x.is_floating_point() else []
    if isinstance(x, dict):
        x = list(x.values())
    return [tensor for value in x for tensor in _tensors(value)] if isinstance(x, (tuple, list)) else []


class Tracker(TorchDispatchMode):
    """Looks at every operation in a `with` block and notes what breaks a rule. It slows the model down.

    Args:
        model: the module that runs in the block.
        policy: what is asked of it.

    Attributes:
        violations: what was found, each operation of a module once.
    """

    def __init__(self, model: torch.nn.Module, policy: Policy = Policy()):
        super().__init__()
        self._model, self._policy = model, policy
        self._found: dict[tuple, Violation] = {}
        self._stack: list[tuple[str, str | None]] = []
        self._handles: list[Any] = []

    @property
    def violations(self) -> list[Violation]:
        return list(self._found.values())

    def __enter__(self) -> "Tracker":
        for name, x in self._model.named_parameters():
            if x.requires_grad and x.dtype in _HALVES:
                self._note("optimizer", name, "parameter", [x])
        for name, module in self._model.named_modules():
            role = _role(name, module)
            self._handles.append(module.register_forward_pre_hook(lambda *_, entry=(name, role): self._stack.append(entry)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _leave(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        name, role = self._stack.pop()
        wrong = [x for x in _tensors(output) if role and x.dtype != getattr(self._policy, role)]
        if wrong:
            self._note("policy", name, f"result of a module of role {role}", wrong)

    def _note(self, rule: str, name: str, operation: str, tensors: list[torch.Tensor]) -> None:
        key = (rule, name, operation, *(x.dtype for x in tensors))
        before = self._found.get(key)
        self._found[key] = Violation(rule, name, operation, tuple(tuple(x.shape) for x in tensors), tuple(x.dtype for x in tensors),
                                     before.count + 1 if before else 1)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        operation = function.overloadpacket.__name__
        tensors = _tensors(arguments)
        name, role = self._stack[-1] if self._stack else ("", None)
        halves = [x for x in tensors if x.dtype in _HALVES]
        if halves:
            if role == "layernorm" and operation in _STATISTICS:
                self._note("layernorm", name, operation, halves)
            if operation in ("_softmax", "softmax"):
                self._note("attention_weights", name, operation, halves)
            if operation in _LOSSES:
                self._note("loss", name, operation, halves)
            largest = min(torch.finfo(x.dtype).max for x in halves)
            if any(isinstance(x, float | int) and not isinstance(x, bool) and largest < abs(x) < float("inf") for x in arguments):
                self._note("mask", name, operation, halves)
        return function(*arguments, **(options or {}))

    def check_gradients(self) -> list[Violation]:
        """Notes gradients of the model's parameters that are Inf or NaN, or, in 16 bits, 0 throughout; returns those violations. After backward()."""
        for name, x in self._model.named_parameters():
            if x.grad is None:
                continue
            if not bool(torch.isfinite(x.grad).all()):
                self._note("gradients", name, "a gradient with Inf or NaN", [x.grad])
            elif x.grad.dtype == torch.float16 and not bool(x.grad.any()):
                self._note("gradients", name, "a gradient of zeros", [x.grad])
        return [violation for violation in self.violations if violation.rule == "gradients"]

    def report(self) -> str:
        """For people: the violations by rule, and why each rule is one."""
        if not self._found:
            return "no violation"
        lines = []
        for rule in dict.fromkeys(violation.rule for violation in self.violations):
            lines.append(f"{rule}: {RULES[rule]}")
            lines += [f"  {str(violation).removeprefix(rule + ': ')}" for violation in self.violations if violation.rule == rule]
        return "\n".join(lines)


def safe_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`fattn.attention` on tensors of different dtypes, computed in the narrowest dtype that loses nothing of any: float16 with bfloat16, and anything
    with float32, in float32; anything with float64 in float64. The result is in q's dtype. A warning says what was cast.

    Args:
        q, k, v, options: as in `fattn.attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fattn.attention`.
    """
    dtypes = [x.dtype for x in (q, k, v) if isinstance(x, torch.Tensor)]
    if len(dtypes) < 3 or len(set(dtypes)) == 1 or not all(dtype.is_floating_point for dtype in dtypes):
        return attention(q, k, v, **options)
    common = torch.promote_types(torch.promote_types(*dtypes[:2]), dtypes[2])
    names = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in zip("qkv", dtypes))
    warnings.warn(f"attention on {names} is computed in {str(common).removeprefix('torch.')}, its result is in q's dtype", stacklevel=2)
    result = attention(q.to(common), k.to(common), v.to(common), **options)
    return (result[0].to(q.dtype), *result[1:]) if isinstance(result, tuple) else result.to(q.dtype)
