"""Attention on NumPy arrays, and on whatever NumPy can view without a copy: DLPack tensors in host memory and buffers.

dtypes: float32, float16, bfloat16 (of the package ml_dtypes), and float64, which the slow backend "reference" computes. Any strides but
negative ones, with a contiguous last dimension. The global interpreter lock is given back while the library computes.
"""

from typing import Any

import numpy as np

from . import _abi, _problem
from ._options import Window, is_bhsd

__all__ = ["backward", "forward"]

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def _array(name: str, x: Any) -> np.ndarray:
    """A view of x; never a copy."""
    if isinstance(x, np.ndarray):
        return x
    try:
        return np.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(memoryview(x))
    except (BufferError, TypeError, RuntimeError) as error:
        raise TypeError(f"{name} is a {type(x).__name__} that NumPy cannot view: {error}. Pass a NumPy array, a DLPack tensor in host memory or "
                        "a buffer") from error


def _dtype_of(name: str, x: np.ndarray) -> int:
    if x.dtype.name not in _DTYPES or not x.dtype.isnative:
        raise TypeError(f"{name} has the dtype {x.dtype}; allowed: {', '.join(_DTYPES)} in native byte order. Convert it with astype")
    return _abi.DTYPES[_DTYPES[x.dtype.name]]


def _described(name: str, x: np.ndarray, bhsd: bool) -> _abi.Tensor:
    dtype, size = _dtype_of(name, x), x.dtype.itemsize
    if any(stride % size for stride in x.strides):
        raise ValueError(f"{name} has the strides {x.strides} in bytes, which are no multiples of its {size} byte elements. Copy it first")
    # NumPy may give an empty array strides of 0, which reach nothing and mean nothing.
    strides = [stride // size for stride in x.strides] if x.size else _problem.row_major(x.shape)
    return _problem.tensor(name, x.shape, dtype, strides, bhsd=bhsd, data=x.__array_interface__["data"][0])


def _lse_shape(q: np.ndarray, bhsd: bool) -> tuple[int, ...]:
    batch, *middle = q.shape[:3]
    return (batch, *(middle if bhsd else reversed(middle)))


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    algorithm: str = "auto",
    layout: str = "bshd",
    num_threads: int = 0,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """o = softmax(cap(softmax_scale * q k^T) + mask) v, without storing the matrix of scores (FlashAttention-2, Dao 2023).

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_k, headdim); nheads is a multiple of nheads_k (GQA, MQA).
        v: (batch, seqlen_k, nheads_k, headdim_v).
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: 1 / sqrt(headdim) unless given.
        window: (left, right): query i sees the keys j with -left <= j - (i + seqlen_k - seqlen_q) <= right; None or -1 is no limit on that side.
            With `causal` right is 0, whatever it says. None: no window.
        softcap: scaled scores s become softcap * tanh(s / softcap) before the mask; None or 0: they stay as they are.
        return_lse: returns the log-sum-exp too, which `backward` needs.
        backend: "auto", "cpu", or "reference" (float64 inside, slow).
        algorithm: "auto", "v2", or "standard" (stores the matrix of scores).
        layout: "bshd" as above, or "bhsd": heads before seqlen in q, k, v and o.
        num_threads: 0 takes every CPU that may be used; the result does not depend on it.

    Returns:
        o (batch, seqlen_q, nheads, headdim_v) in q's dtype, a new array; with `return_lse` (o, lse) with lse (batch, nheads, seqlen_q), the natural
        logarithm of the sum of exponentials, in float32 (float64 if q is). A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: something that NumPy cannot view, or a dtype that attention is not computed in.
        ValueError: shapes, strides or options that do not fit together.
        NotImplementedError: valid, but not computed by this backend or algorithm; the message says why.
        MemoryError: no memory for the workspace.
    """
    bhsd = is_bhsd(layout)
    problem = _problem.describe(causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, backend=backend, algorithm=algorithm,
                                deterministic=False, num_threads=num_threads, backward=False)
    q, k, v = _array("q", q), _array("k", k), _array("v", v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        setattr(problem, name, _described(name, x, bhsd))
    o = np.empty(q.shape[:3] + v.shape[3:], q.dtype)
    problem.o = _described("o", o, bhsd)
    lse = None
    if return_lse:
        lse = np.empty(_lse_shape(q, bhsd), np.float64 if q.dtype == np.float64 else np.float32)
        problem.lse = _described("lse", lse, bhsd)
    _abi.check(_abi.library.fattn_execute(problem))
    return (o, lse) if return_lse else o


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    algorithm: str = "auto",
    layout: str = "bshd",
    num_threads: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients of q, k and v (FlashAttention-2, Dao 2023, algorithm 2). The same bits in every run.

    Args:
        dout: the gradient of o, in its shape and dtype.
        q, k, v: as they were given to `forward`.
        o, lse: as `forward` returned them.
        causal, softmax_scale, window, softcap, backend, algorithm, layout, num_threads: as in `forward`.

    Returns:
        (dq, dk, dv), new arrays in the shapes and the dtype of q, k and v.

    Raises:
        As `forward`.
    """
    bhsd = is_bhsd(layout)
    problem = _problem.describe(causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, backend=backend, algorithm=algorithm,
                                deterministic=False, num_threads=num_threads, backward=True)
    inputs = {name: _array(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("dout", dout))}
    gradients = {f"d{name}": np.empty(inputs[name].shape, inputs[name].dtype) for name in ("q", "k", "v")}
    for name, x in (inputs | gradients).items():
        setattr(problem, name, _described(name, x, bhsd))
    _abi.check(_abi.library.fattn_execute(problem))
    return gradients["dq"], gradients["dk"], gradients["dv"]
