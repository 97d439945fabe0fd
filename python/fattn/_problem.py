"""A problem of the C ABI from Python's options, and tensor descriptions from shapes."""

from collections.abc import Sequence

from . import _abi
from ._options import Options, choose, flags, number, window_limits, within


def describe(options: Options, *, backward: bool, num_threads: int = 0) -> _abi.Problem:
    """Without its tensors and their lengths."""
    problem = _abi.Problem()
    problem.abi_version = _abi.ABI_VERSION
    problem.pass_ = int(backward)
    problem.backend = choose("backend", options.backend, _abi.BACKENDS)
    problem.algorithm = choose("algorithm", options.algorithm, _abi.ALGORITHMS)
    causal, deterministic, problem.batch_invariant = flags(causal=options.causal, deterministic=options.deterministic, batch_invariant=options.batch_invariant)
    problem.causal, problem.deterministic = causal, bool(deterministic)
    problem.num_threads = within("num_threads", num_threads, 32)
    if options.softmax_scale is not None:
        problem.has_softmax_scale = 1
        problem.softmax_scale = number("softmax_scale", options.softmax_scale)
    problem.has_window = options.window is not None
    problem.window_left, problem.window_right = window_limits(options.window)
    problem.softcap = 0.0 if options.softcap is None else number("softcap", options.softcap)
    problem.p_dropout = number("dropout_p", options.dropout_p)
    return problem


def tensor(name: str, shape: Sequence[int], dtype: int, strides: Sequence[int], *, bhsd: bool, data: int | None = None, packed: bool = False) -> _abi.Tensor:
    """A view of 3 (lse) or 4 dimensions, of packed sequences one less; strides count elements. `bhsd`: shape and strides have heads before seqlen."""
    if packed and len(shape) not in (2, 3):
        raise ValueError(f"{name} has {len(shape)} dimensions; allowed: 3 (total, heads, headdim), the rows of all sequences behind each other")
    if not packed and len(shape) not in (3, 4):
        raise ValueError(f"{name} has {len(shape)} dimensions; allowed: 4 (batch, seqlen, heads, headdim). Add a dimension of 1 where one is missing")
    order = (0, 2, 1, 3) if bhsd and len(shape) == 4 else range(len(shape))
    described = _abi.Tensor(data=data, dtype=dtype, ndim=len(shape))
    for i, j in enumerate(order):
        described.shape[i] = within(f"dimension {j} of {name}", shape[j], 64)
        described.strides[i] = within(f"the stride of {name} in dimension {j}", strides[j], 64)
    return described


def beside(name: str, shape: Sequence[int], dtype: int, strides: Sequence[int], data: int | None = None) -> _abi.Tensor:
    """Of what stands beside q, k and v: any number of dimensions up to 4 (which the core checks), in their own order."""
    if not 1 <= len(shape) <= 4:
        raise ValueError(f"{name} has {len(shape)} dimensions; allowed: 1 to 4")
    described = _abi.Tensor(data=data, dtype=dtype, ndim=len(shape))
    for i in range(len(shape)):
        described.shape[i] = within(f"dimension {i} of {name}", shape[i], 64)
        described.strides[i] = within(f"the stride of {name} in dimension {i}", strides[i], 64)
    return described


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    return strides
