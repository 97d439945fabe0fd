"""What the fronts for torch refuse before an operator sees it, or explain when torch has refused it."""

from typing import Any

import torch
from torch.autograd import forward_ad

from ._errors import dtensor_message, kind_message

_NO_JVP = ("fattn.attention has no derivative in forward mode (jvp, jacfwd, hessian); take reverse mode (grad, vjp, jacrev), or standard attention, which has all: "
           "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)")
_WAYS_OUT = {
    "softmax_scale": "multiply q by it, and give softmax_scale=1: that has its gradient. Or give a number, softmax_scale.item()",
    "softcap": "give a number, softcap.item()",
    "dropout_p": "give a number, dropout_p.item()",
}


def is_dtensor(x: Any) -> bool:
    """Of torch.distributed.tensor, which is not imported for it."""
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    if torch.compiler.is_compiling():  # which cannot walk through base classes
        return kind.__name__ == "DTensor"
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def can_be_read(x: torch.Tensor) -> bool:
    """Whether its numbers are there, and looking at them waits for no GPU. Meta and fake tensors have none; inside torch.compile and vmap nobody knows them."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) if type(x) is torch.Tensor else not is_fake(x)


def is_fake(x: torch.Tensor) -> bool:
    """Of torch._subclasses, which is not imported for it."""
    return type(x) is not torch.Tensor and any(base.__name__ == "FakeTensor" for base in type(x).__mro__)


def require_dense(name: str, x: Any, allowed: str = "") -> None:
    if type(x) is not torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor{allowed}")
        if is_dtensor(x):
            raise NotImplementedError(dtensor_message(name))
    if x.is_nested or x.layout is not torch.strided:
        raise NotImplementedError(kind_message(name, "NestedTensor" if x.is_nested else str(x.layout)))


def require_numbers(softmax_scale: Any, softcap: Any, dropout_p: Any) -> None:
    """A tensor of one element is taken as a number, and would lose its gradient."""
    for name, x in (("softmax_scale", softmax_scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        if not isinstance(x, torch.Tensor):
            continue
        if x.is_nested or x.numel() != 1:
            raise ValueError(f"{name} is a tensor {'of several' if x.is_nested else f'with the shape {tuple(x.shape)}'}; allowed: a number, or a tensor of one")
        asks = x.requires_grad and torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            asks = asks or torch._C._functorch.is_functorch_wrapped_tensor(x) or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None)
        if asks:
            raise NotImplementedError(f"{name} is a tensor that asks for a gradient or is mapped over, which is not computed; {_WAYS_OUT[name]}")


def explained(error: NotImplementedError) -> NotImplementedError:
    """torch's words for a function that has no forward-mode derivative, in ours."""
    return NotImplementedError(_NO_JVP) if "implement the jvp function" in str(error) else error
