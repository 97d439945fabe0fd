"""torch.ops.fattn: loads the operators and gives torch.compile their shapes, and vmap their batching. They are differentiated in
_autograd.py: an operator without a rule of its own is the cheapest to call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from . import _abi

MINIMUM_TORCH = (2, 10)


def _load() -> Any:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(f"torch is {torch.__version__}; fattn.attention needs {'.'.join(map(str, MINIMUM_TORCH))} or later")
    path = _abi.PACKAGE / "lib" / "fattn_torch.so"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"torch {torch.__version__} cannot load '{path}': {error.__cause__ or error}") from error
    return torch.ops.fattn


_namespace = _load()
forward = _namespace.forward.default
backward = _namespace.backward.default
forward_with_scores = _namespace.forward_with_scores.default
backward_with_scores = _namespace.backward_with_scores.default
backward_with_more = _namespace.backward_with_more.default
forward_varlen = _namespace.forward_varlen.default
backward_varlen = _namespace.backward_varlen.default
backward_varlen_with_more = _namespace.backward_varlen_with_more.default
forward_out = _namespace.forward_out.default
backward_out = _namespace.backward_out.default
append = _namespace.append.default
# What `forward` calls itself, a frame of Python later. torch.compile knows `forward` alone.
forward_at_once = forward._op


# Of the arguments behind the tensors that are always there, in the order of the schema (torch/operators.cpp): the options, and how many they are.
# `forward` and `backward` take all but the last three: the probability of dropout, whether new outputs are fp32, and batch_invariant; the others have them, then
# the tensors of _scores.Scores, what Sequences has if they are of packed sequences, and in a backward pass the gradient of lse. Zeros are integers, which
# torch.compile takes as they are: it would try a float as a variable first, and compile twice.
OPTIONS = (None, False, False, False, -1, -1, 0, 0, 0, 0, False, False)
FEW_OPTIONS = len(OPTIONS) - 3  # those that every operator takes
BHSD, FP32_OUTPUTS = 3, len(OPTIONS) - 2
# Behind the tensors that a score depends on: softmax_scale and softcap, where torch.compile has them as symbols.
NUMBERS = ("softmax_scale_at", "softcap_at")
SCORES = (*(row.name for row in _abi.SCORES), *NUMBERS)
_BIAS, _SINKS = (len(OPTIONS) + SCORES.index(name) for name in ("bias", "sinks"))
# Of the tensors behind them, those that may have no batch, or whose numbers depend on a place in it.
_UNFOLDED = [len(OPTIONS) + SCORES.index(name)
             for name in (*(row.name for row in _abi.SCORES if row.dims in ("Heads", "Pairs", "Two", "Table")), *NUMBERS)]


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The core takes any strides with a contiguous last dimension; the gradient of a sum, for one, has strides of 0."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def _output_dtype(x: torch.Tensor, options: Sequence) -> torch.dtype:
    """Of a new output beside the input x."""
    wide = len(options) > FP32_OUTPUTS and options[FP32_OUTPUTS] and x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if wide else x.dtype


def _like(x: torch.Tensor, options: Sequence, headdim: int) -> torch.Tensor:
    """As the operators make their results: in memory always (batch, seqlen, heads, headdim), whatever the order of the dimensions."""
    bhsd = len(options) > BHSD and options[BHSD]
    swapped = x.transpose(1, 2) if bhsd else x
    new = x.new_empty((*swapped.shape[:3], headdim), dtype=_output_dtype(x, options))
    return new.transpose(1, 2) if bhsd else new


def _require_one_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> None:
    """torch takes fakes for tensors on meta too, among which others may be: their results would be memory that nothing was written to."""
    for name, x in (("k", k), ("v", v), *(("a tensor beside them", x) for x in others)):
        if isinstance(x, torch.Tensor) and x.device != q.device and x.dim():  # NUMBERS have none, and are on the CPU
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; all tensors of a call must be on one device")


@torch.library.register_fake("fattn::forward_with_scores")
@torch.library.register_fake("fattn::forward")
def _(q, k, v, *options):
    _require_one_device(q, k, v, *options)
    batch, seqlen_q, nheads = (q.transpose(1, 2) if len(options) > BHSD and options[BHSD] else q).shape[:3]
    lse = q.new_empty((batch, nheads, seqlen_q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return _like(q, options, v.shape[3]), lse


@torch.library.register_fake("fattn::backward_with_scores")
@torch.library.register_fake("fattn::backward")
def _(dout, q, k, v, o, lse, *options):
    _require_one_device(q, k, v, dout, o, lse, *options)
    return tuple(_like(x, options, x.shape[3]) for x in (q, k, v))


def _more(q: torch.Tensor, options: tuple, before: int) -> tuple[torch.Tensor, ...]:
    """The gradients of bias and sinks, or what has no elements in their place. Which are wanted stands behind scores, `before` more and dlse; of arguments
    the last ones that are defaults are left out."""
    wanted = (*options[len(OPTIONS) + len(SCORES) + before + 1 :], False, False)
    return tuple(options[i].new_empty(options[i].shape) if wants else q.new_empty(0) for i, wants in zip((_BIAS, _SINKS), wanted))


@torch.library.register_fake("fattn::backward_with_more")
def _(dout, q, k, v, o, lse, *options):
    _require_one_device(q, k, v, dout, o, lse, *options)
    return *(_like(x, options, x.shape[3]) for x in (q, k, v)), *_more(q, options, 0)


@torch.library.register_fake("fattn::forward_varlen")
def _(q, k, v, *options, **packed):
    _require_one_device(q, k, v, *options, *packed.values())
    total_q, nheads, _ = q.shape
    lse = q.new_empty((nheads, total_q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((total_q, nheads, v.shape[-1]), dtype=_output_dtype(q, options)), lse  # of a paged cache v has 4 dimensions


@torch.library.register_fake("fattn::backward_varlen")
def _(dout, q, k, v, o, lse, *options, **packed):
    _require_one_device(q, k, v, dout, o, lse, *options, *packed.values())
    return tuple(x.new_empty(x.shape, dtype=_output_dtype(x, options)) for x in (q, k, v))


@torch.library.register_fake("fattn::backward_varlen_with_more")
def _(dout, q, k, v, o, lse, *options, **packed):
    _require_one_device(q, k, v, dout, o, lse, *options, *packed.values())
    return *(x.new_empty(x.shape, dtype=_output_dtype(x, options)) for x in (q, k, v)), *_more(q, options, 4)


@torch.library.register_fake("fattn::forward_out")
def _(*arguments):
    _require_one_device(*arguments)


@torch.library.register_fake("fattn::backward_out")
def _(dout, *arguments):
    _require_one_device(*arguments, dout)


@torch.library.register_fake("fattn::append")
def _(k, v, k_cache, v_cache, cache_seqlen=0, cache_seqlens=None, block_table=None, q=None, *more, **others):
    return k.new_empty(0) if q is None else torch.empty_like(q, memory_format=torch.contiguous_format), k.new_empty(
        0 if cache_seqlens is None else cache_seqlens.shape[0], dtype=torch.int32)


# torch counts what is written to a tensor, so that a backward pass that needs what was there before is an error: of its own operators by itself.
_counted = torch.library.Library("fattn", "IMPL")


def _append_counted(keys, k, v, k_cache, v_cache, *more, **others):
    increment_version((k_cache, v_cache))
    return append.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, k, v, k_cache, v_cache, *more, **others)


_counted.impl("append", _append_counted, "ADInplaceOrView", with_keyset=True)


def append_at_once(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`append` on tensors whose gradients nobody asks for, counted here: 4 us sooner than where torch calls Python for it."""
    increment_version((k_cache, v_cache))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return append(k, v, k_cache, v_cache, *more)


def _fold(size: int, x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The dimension that vmap adds, folded into the batch; a tensor that has none is the same for every entry."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return rows_contiguous(x.reshape(size * x.shape[1], *x.shape[2:]))


def _of_nothing(operator: Any, in_dims: tuple, arguments: tuple) -> tuple[torch.Tensor, ...]:
    """vmap over no entries: results have the shapes that those of an entry of zeros have."""
    entry = [x if dim is None else x.new_zeros([n for i, n in enumerate(x.shape) if i != dim]) for x, dim in zip(arguments, in_dims)]
    return tuple(x.new_empty((0, *x.shape)) for x in operator(*entry))


def _one_by_one(operator: Any, size: int, in_dims: tuple, arguments: tuple) -> tuple[torch.Tensor, ...]:
    """What depends on a place in the batch, as the numbers of dropout, or may have no batch, as a bias, cannot be folded into it."""
    if not size:
        return _of_nothing(operator, in_dims, arguments)
    results = []
    for i in range(size):
        entry = [x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims)]
        results.append(operator(*(rows_contiguous(x) if isinstance(x, torch.Tensor) else x for x in entry)))
    return tuple(torch.stack(x) for x in zip(*results))


def _batched(operator: Any, ntensors: int) -> Any:
    def rule(info, in_dims, *arguments):
        size, options = info.batch_size, arguments[ntensors:]
        if not size or any(options[i] is not None for i in _UNFOLDED if i < len(options)):
            outputs = _one_by_one(operator, size, in_dims, arguments)
            return outputs, (0,) * len(outputs)
        folded = [_fold(size, x, dim) if isinstance(x, torch.Tensor) else x for x, dim in zip(arguments, in_dims)]
        outputs = operator(*folded)
        return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in outputs), (0,) * len(outputs)

    return rule


def _unbatched(operator: Any) -> Any:
    """Packed sequences have no batch to fold into."""
    def rule(info, in_dims, *arguments):
        outputs = _one_by_one(operator, info.batch_size, in_dims, arguments)
        return outputs, (0,) * len(outputs)

    return rule


torch.library.register_vmap("fattn::forward", _batched(forward, 3))
torch.library.register_vmap("fattn::backward", _batched(backward, 6))
torch.library.register_vmap("fattn::forward_with_scores", _batched(forward_with_scores, 3))
torch.library.register_vmap("fattn::backward_with_scores", _batched(backward_with_scores, 6))
torch.library.register_vmap("fattn::backward_with_more", _batched(backward_with_more, 6))
torch.library.register_vmap("fattn::forward_varlen", _unbatched(forward_varlen))
torch.library.register_vmap("fattn::backward_varlen", _unbatched(backward_varlen))
torch.library.register_vmap("fattn::backward_varlen_with_more", _unbatched(backward_varlen_with_more))
