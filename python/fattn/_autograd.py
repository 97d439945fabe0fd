"""Differentiates the operators. Without gradients the front calls the operator itself; with them this function, which is cheap; inside
torch.func its twin, which torch.func needs and which costs more."""

from typing import Any

import torch

from . import _operators
from ._errors import exception_of_operator


# The last arguments of the operators (torch/operators.cpp), or the first of those, the rest being defaults.
Options = tuple[float | bool | int | None, ...]


def run_forward(q, k, v, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        return _operators.forward(q, k, v, *options)
    except RuntimeError as error:
        raise exception_of_operator(error) from None


def _run_backward(dout, q, k, v, o, lse, options: Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        return _operators.backward(dout, q, k, v, o, lse, *options)
    except RuntimeError as error:
        raise exception_of_operator(error) from None


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The core takes any strides with a contiguous last dimension; the gradient of a sum, for one, has strides of 0."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


class _Gradients(torch.autograd.Function):
    """The backward pass where a graph of it is asked for: an error if that graph is used, which would else be silently wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dout, q, k, v, o, lse, options):
        return _run_backward(dout, q, k, v, o, lse, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("fattn.attention has no second derivative; differentiate it once, or take standard attention where you need two")


def _backward(ctx: Any, dout: torch.Tensor) -> tuple:
    inputs = (rows_contiguous(dout), *ctx.saved_tensors, ctx.options)
    gradients = _Gradients.apply(*inputs) if torch.is_grad_enabled() else _run_backward(*inputs)
    return *gradients, None


def _save(ctx: Any, q, k, v, options, o, lse) -> None:
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.options = options


class Attention(torch.autograd.Function):
    """(q, k, v, options) -> o."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        o, lse = run_forward(q, k, v, options)
        _save(ctx, q, k, v, options, o, lse)
        return o

    @staticmethod
    def backward(ctx, dout):
        return _backward(ctx, dout)


class AttentionAndLse(torch.autograd.Function):
    """(q, k, v, options) -> (o, lse). A second result costs two microseconds and more, so that it has a function of its own."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        o, lse = run_forward(q, k, v, options)
        _save(ctx, q, k, v, options, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the gradient that lse has not
        return o, lse

    @staticmethod
    def backward(ctx, dout, _):
        return _backward(ctx, dout)


class AttentionInFunctorch(torch.autograd.Function):
    """The same for torch.func.grad, vjp and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, options):
        return run_forward(q, k, v, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, *inputs, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dout, _):
        return _backward(ctx, dout)
