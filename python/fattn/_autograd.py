"""Differentiates the operators. Without gradients the front calls the operator itself; with them a function, which is cheap where q, k and v are
all that there is; inside torch.func a twin, which torch.func needs and which costs more."""

from collections.abc import Sequence
from typing import Any

import torch

from . import _operators
from ._errors import exception_of_operator
from ._operators import FEW_OPTIONS, FP32_OUTPUTS, OPTIONS, rows_contiguous
from ._scores import NONE, Scores, Sequences

# The options of the operators, or the first of those, the rest being defaults.
Options = tuple[float | bool | int | None, ...]
_BIAS, _SINKS = Scores._fields.index("bias"), Scores._fields.index("sinks")


def run_forward(q, k, v, options: Options, scores: Scores | None = None, sequences: Sequences | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        if sequences is not None:
            return _operators.forward_varlen(q, k, v, *options, *OPTIONS[len(options) :], *scores, *sequences)
        if scores is None:
            return (_operators.forward if torch.compiler.is_dynamo_compiling() else _operators.forward_at_once)(q, k, v, *options)
        return _operators.forward_with_scores(q, k, v, *options, *OPTIONS[len(options) :], *scores)
    except RuntimeError as error:
        raise exception_of_operator(error) from None


def _run_backward(dout, dlse, q, k, v, o, lse, scores: Scores, sequences: Sequences | None, options: Options, more: tuple[bool, ...] = ()) -> tuple[torch.Tensor, ...]:
    if sequences is not None:
        operator = _operators.backward_varlen_with_more if more else _operators.backward_varlen
        options += (*OPTIONS[len(options) :], *scores, *sequences, dlse, *more)
    elif dlse is not None or scores is not NONE or len(options) > FEW_OPTIONS:
        operator = _operators.backward_with_more if more else _operators.backward_with_scores
        options += (*OPTIONS[len(options) :], *scores, dlse, *more)
    else:
        operator = _operators.backward
    try:
        return operator(dout, q, k, v, o, lse, *options)
    except RuntimeError as error:
        raise exception_of_operator(error) from None


class _Gradients(torch.autograd.Function):
    """The backward pass where a graph of it is asked for: an error if that graph is used, which would else be silently wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dout, dlse, q, k, v, o, lse, *rest):
        *tensors, longest, options, more = rest
        return _run_backward(dout, dlse, q, k, v, o, lse, *_parts(tensors, longest), options, more)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("fattn.attention has no second derivative; differentiate it once, or take standard attention where you need two "
                                  "(torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))")


def _parts(tensors: Sequence[torch.Tensor | None], longest: tuple[int, int] | None) -> tuple[Scores, Sequences | None]:
    """Of what was saved beside q, k, v, o and lse: nothing, the scores, or those and where packed sequences begin."""
    count = len(Scores._fields)
    return Scores(*tensors[:count]) if tensors else NONE, None if longest is None else Sequences(*tensors[count:], *longest)


def _in(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """x itself where it has that dtype: torch.compile of torch 2.11 makes gradients of 0 where an output is saved through a `.to()` that changes nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None, more: tuple[bool, ...] = ()) -> tuple[torch.Tensor, ...]:
    """`more`: whether the gradients of bias and sinks are wanted; () if neither is."""
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    inputs = torch.zeros_like(o) if dout is None else rows_contiguous(_in(o.dtype, dout)), dlse, q, k, v, o, lse
    if torch.is_grad_enabled():
        return _Gradients.apply(*inputs, *tensors, ctx.longest, ctx.options, more)
    return _run_backward(*inputs, *_parts(tensors, ctx.longest), ctx.options, more)


def gradients(dout, dlse, q, k, v, o, lse, scores: Scores, sequences: Sequences | None, options: Options, more: tuple[bool, ...]) -> tuple[torch.Tensor, ...]:
    """The backward pass that is called by itself. Where torch records operations, its results cannot be differentiated again, and say so."""
    inputs = dout, dlse, q, k, v, o, lse
    tensors = (*scores, *(sequences or ())[:2])
    compiling = torch.compiler.is_compiling()
    in_functorch = torch._C._are_functorch_transforms_active() and not compiling
    if in_functorch or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *tensors))):
        longest = None if sequences is None else (sequences.max_seqlen_q, sequences.max_seqlen_k)
        tensors = () if scores is NONE and sequences is None else tensors
        return _Gradients.apply(*(distinct(*inputs, *tensors) if compiling else (*inputs, *tensors)), longest, options, more)
    return _run_backward(*inputs, scores, sequences, options, more)


def _save(ctx: Any, q, k, v, options, o, lse, *tensors, longest: tuple[int, int] | None = None) -> None:
    """The backward pass takes o in q's dtype, and gradients have that of what they belong to."""
    ctx.save_for_backward(q, k, v, _in(q.dtype, o), lse, *tensors)
    ctx.options = (*options[:FP32_OUTPUTS], False, *options[FP32_OUTPUTS + 1 :]) if len(options) > FP32_OUTPUTS else options
    ctx.longest = longest


def distinct(*inputs: Any) -> tuple:
    """The same for a function inside torch.compile, which takes no tensor twice: views where one repeats."""
    return tuple(x.view_as(x) if isinstance(x, torch.Tensor) and any(x is y for y in inputs[:i]) else x for i, x in enumerate(inputs))


class Attention(torch.autograd.Function):
    """(q, k, v, options) -> o. What most training calls: written out, which saves five microseconds in a backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        o, lse = run_forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options
        ctx.longest = None
        return o

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            return *_backward(ctx, dout), None
        q, k, v, o, lse = ctx.saved_tensors
        try:
            return *_operators.backward(dout if dout.is_contiguous() else rows_contiguous(dout), q, k, v, o, lse, *ctx.options), None
        except RuntimeError as error:
            raise exception_of_operator(error) from None


class AttentionAndLse(torch.autograd.Function):
    """(q, k, v, options) -> (o, lse). A second result costs two microseconds and more, so that it has a function of its own."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        o, lse = run_forward(q, k, v, options)
        _save(ctx, q, k, v, options, o, lse)
        ctx.set_materialize_grads(False)  # no zeros for the gradient of what was not used
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return *_backward(ctx, dout, dlse), None


def _at_once(function: type[torch.autograd.Function]) -> Any:
    """Its `apply` for (q, k, v, options) outside of torch.func and of torch.compile. Where torch's own is written in Python (as in 2.10) it costs
    up to nine microseconds, for what is not needed here but this: tensors that outlived a transform of torch.func are those that they stood for."""
    if "apply" not in vars(torch.autograd.Function):
        return function.apply
    apply, unwrap = super(torch.autograd.Function, function).apply, torch._C._functorch.unwrap_if_dead
    return lambda q, k, v, options: apply(unwrap(q), unwrap(k), unwrap(v), options)


attention_at_once, attention_and_lse_at_once = _at_once(Attention), _at_once(AttentionAndLse)


def _inputs(rest: Sequence) -> tuple[tuple, tuple[Scores, Sequences | None]]:
    """What is behind q, k and v: the tensors of scores and sequences, the longest sequences and the options; and the former as they are called."""
    *tensors, options = rest
    longest = None
    if len(tensors) > len(Scores._fields):
        *tensors, max_seqlen_q, max_seqlen_k = tensors
        longest = max_seqlen_q, max_seqlen_k
    return (tensors, longest, options), _parts(tensors, longest)


def _backward_with_scores(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
    wanted = ctx.needs_input_grad[3 + _BIAS], ctx.needs_input_grad[3 + _SINKS]
    dq, dk, dv, *more = _backward(ctx, dout, dlse, wanted if any(wanted) else ())
    dbias, dsinks = (x if wants else None for x, wants in zip(more or (None, None), wanted))
    none = (None,) * (1 if ctx.longest is None else 5)
    return dq, dk, dv, *NONE._replace(bias=dbias, sinks=dsinks), *none


class AttentionWithScores(torch.autograd.Function):
    """(q, k, v, *Scores, *Sequences or none, options) -> (o, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, *rest):
        (tensors, longest, options), (scores, sequences) = _inputs(rest)
        o, lse = run_forward(q, k, v, options, scores, sequences)
        _save(ctx, q, k, v, options, o, lse, *tensors, longest=longest)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward_with_scores(ctx, dout, dlse)


class AttentionInFunctorch(torch.autograd.Function):
    """The same for torch.func.grad, vjp and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, *rest):
        (_, _, options), parts = _inputs(rest)
        return run_forward(q, k, v, options, *parts)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *rest = inputs
        (tensors, longest, options), _ = _inputs(rest)
        _save(ctx, q, k, v, options, *output, *tensors, longest=longest)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward_with_scores(ctx, dout, dlse)
