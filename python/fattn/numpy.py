"""Attention on NumPy arrays, and on whatever NumPy can view without a copy: DLPack tensors in host memory and buffers.

dtypes: float32, float16, bfloat16 (of the package ml_dtypes), and float64, which the slow backend "reference" computes. Any strides but
negative ones, with a contiguous last dimension. The global interpreter lock is given back while the library computes.
"""

import math
from typing import Any

import numpy as np

from . import _abi, _merge_arrays, _merge_shapes, _problem
from ._options import Options, flag, is_bhsd, names_of_options, taken, takes_options, within

__all__ = ["backward", "dropout_mask", "forward", "merge"]

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
_ANY = {name: _abi.DTYPES[short] for name, short in _DTYPES.items()}
_BESIDE = {"F32": {"float32": _abi.DTYPES["fp32"]}, "I32": {"int32": _abi.INT32}, "U8": {"bool": _abi.UINT8, "uint8": _abi.UINT8}, "I64": {"int64": _abi.INT64}}
# Of each tensor beside q and k: which dtypes it may have, and how the C ABI calls them.
_DTYPES_OF = {row.name: _BESIDE.get(row.dtype, _ANY) for row in _abi.SCORES}
_OPTIONS = names_of_options(but=("deterministic",))
_PAIRS = {row.name for row in _abi.SCORES if row.dims == "Pairs"}


def _array(name: str, x: Any) -> np.ndarray:
    """A view of x; never a copy."""
    if isinstance(x, np.ndarray):
        return x
    try:
        return np.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(memoryview(x))
    except (BufferError, TypeError, RuntimeError) as error:
        raise TypeError(f"{name} is a {type(x).__name__} that NumPy cannot view: {error}. Pass a NumPy array, a DLPack tensor in host memory or "
                        "a buffer") from error


def _new(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        processor = _abi.CpuInfo()
        _abi.check(_abi.library.fattn_query_cpu(processor))
        raise MemoryError(f"no memory for {name} of {math.prod(shape) * np.dtype(dtype).itemsize} bytes; {processor.memory_available_bytes} of "
                          f"{processor.memory_bytes} bytes are free; use a smaller problem or free memory") from None


def _dtype_of(name: str, x: np.ndarray) -> int:
    if x.dtype.name not in _DTYPES or not x.dtype.isnative:
        raise TypeError(f"{name} has the dtype {x.dtype}; allowed: {', '.join(_DTYPES)} in native byte order. Convert it with astype")
    return _abi.DTYPES[_DTYPES[x.dtype.name]]


def _described(name: str, x: np.ndarray, bhsd: bool, packed: bool = False) -> _abi.Tensor:
    dtype, size = _dtype_of(name, x), x.dtype.itemsize
    if any(stride % size for stride in x.strides):
        raise ValueError(f"{name} has the strides {x.strides} in bytes, which are no multiples of its {size} byte elements. Copy it first")
    # NumPy may give an empty array strides of 0, which reach nothing and mean nothing.
    strides = [stride // size for stride in x.strides] if x.size else _problem.row_major(x.shape)
    return _problem.tensor(name, x.shape, dtype, strides, bhsd=bhsd, data=x.__array_interface__["data"][0], packed=packed)


def _of_pairs(name: str, x: Any, seqlen_k: int) -> np.ndarray:
    """(batch or 1, nheads or 1, seqlen_q or 1, seqlen_k) of what broadcasts to it."""
    x = _array(name, x)
    if x.ndim > 4:
        raise ValueError(f"{name} has {x.ndim} dimensions; allowed: up to 4, (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k) or the last of those")
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if x.shape[3] == 1 and seqlen_k != 1:
        x = np.broadcast_to(x, (*x.shape[:3], seqlen_k))
    return x if x.shape[3] < 2 or x.strides[3] == x.itemsize else np.ascontiguousarray(x)


def _set_sequences(problem: _abi.Problem, layout: str, given: Options) -> list[np.ndarray] | None:
    """Packed sequences: the arrays, which must live as long as the problem; None where there are none."""
    if given.cu_seqlens_q is None:
        for name in ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
            if getattr(given, name) is not None:
                raise ValueError(f"{name} is given and cu_seqlens_q is not; give cu_seqlens_q, where each packed sequence begins in q, or neither")
        return None
    if layout != "bshd":
        raise ValueError(f"layout is {layout!r} and cu_seqlens_q is given; packed sequences are (total, heads, headdim), leave layout out")
    arrays = []
    for side, longest in (("q", given.max_seqlen_q), ("k", given.max_seqlen_k)):
        name = f"cu_seqlens_{side}"
        x = getattr(given, name)
        if x is None and side == "k" and given.block_table is not None:
            problem.max_seqlen_k = within("max_seqlen_k", longest or 0, 64)
            continue
        x = np.ascontiguousarray(_array(name, given.cu_seqlens_q if x is None else x))
        if x.dtype == np.int64:
            x = np.clip(x, -1, 2**31 - 1).astype(np.int32)  # what does not fit stays outside of what is allowed
        if x.dtype != np.int32:
            raise TypeError(f"{name} has the dtype {x.dtype}; allowed: int32, int64 in native byte order. Convert it with astype")
        if x.ndim != 1 or not x.size:
            raise ValueError(f"{name} has the shape {x.shape}; allowed: (batch + 1), where each sequence begins, and where the last one ends")
        if longest is None and side == "k" and given.seqused_k is not None:  # then cu_seqlens_k says only where sequences begin, in any order
            longest = max(0, int(_array("seqused_k", given.seqused_k).max(initial=0)), *(x.shape[-1] for x in (given.bias, given.mask) if getattr(x, "ndim", 0)))
        if longest is None:
            longest = max(0, int(np.diff(x.astype(np.int64)).max(initial=0)))
        setattr(problem, f"max_seqlen_{side}", within(f"max_seqlen_{side}", longest, 64))
        setattr(problem, name, _problem.beside(name, x.shape, _abi.INT32, [1], x.__array_interface__["data"][0]))
        arrays.append(x)
    return arrays


def _set_scores(problem: _abi.Problem, q: np.ndarray, k: np.ndarray, bhsd: bool, given: Options) -> dict[str, np.ndarray]:
    """What a score depends on beside q and k. Returns the arrays, some of which are copies, and must live as long as the problem."""
    if given.document_k is None:
        given = given._replace(document_k=given.document_q)
    seqlen_k = problem.max_seqlen_k if problem.cu_seqlens_k.ndim else k.shape[2 if bhsd else 1]
    if given.block_table is not None and len(columns := _array("block_table", given.block_table).shape) == 2:
        seqlen_k *= columns[1]
    arrays = {row.name: x for row in _abi.SCORES if (x := getattr(given, row.name)) is not None}
    for name, x in arrays.items():
        if name in _PAIRS:
            x = _of_pairs(name, x, seqlen_k)
        else:
            x = np.ascontiguousarray(_array(name, x))
        dtypes = _DTYPES_OF[name]
        if name in ("seqused_k", "block_table") and x.dtype == np.int64:
            x = np.clip(x, -1, 2**31 - 1).astype(np.int32)  # what does not fit stays outside of what is allowed
        if x.dtype.name not in dtypes or not x.dtype.isnative:
            raise TypeError(f"{name} has the dtype {x.dtype}; allowed: {', '.join(dtypes)} in native byte order. Convert it with astype")
        if any(stride % x.itemsize for stride in x.strides):
            x = x.copy()
        arrays[name] = x
        strides = [stride // x.itemsize for stride in x.strides] if x.size else _problem.row_major(x.shape)
        setattr(problem, name, _problem.beside(name, x.shape, dtypes[x.dtype.name], strides, x.__array_interface__["data"][0]))
    return arrays


def _lse_shape(q: np.ndarray, bhsd: bool) -> tuple[int, ...]:
    batch, *middle = q.shape[:3]
    return (batch, *(middle if bhsd else reversed(middle)))


@takes_options(_OPTIONS)
def forward(q: Any, k: Any, v: Any, *, return_lse: bool = False, layout: str = "bshd", num_threads: int = 0,
            **options: Any) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """o = dropout(softmax(cap(softmax_scale * q k^T) + alibi + bias + mask)) v, without storing the matrix of scores (FlashAttention-2, Dao 2023).

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_k, headdim); nheads is a multiple of nheads_k (GQA, MQA).
        v: (batch, seqlen_k, nheads_k, headdim_v).
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: 1 / sqrt(headdim) unless given.
        window: (left, right): query i sees the keys j with -left <= j - (i + seqlen_k - seqlen_q) <= right; None or -1 is no limit on that side.
            With `causal` right is 0, whatever it says. None: no window.
        softcap: scaled scores s become softcap * tanh(s / softcap) before the mask; None or 0: they stay as they are.
        seqused_k: (batch), int32 or int64: batch entry b has the keys [0, seqused_k[b]) only, and causal masks, windows and ALiBi align with the last of them.
        alibi_slopes: (nheads) or (batch, nheads), float32: adds -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j (Press et al. 2022).
        bias: what broadcasts to (batch, nheads, seqlen_q, seqlen_k) in every layout, in float32 or q's dtype: added to scores; -inf hides the key.
            A row whose keys all have a finite one that is meant to hide (an lse below -2^25) has no gradient, though its o depends on v.
        mask: the same shapes, bool or uint8: a query sees the keys where it is not 0.
        dropout_p: a weight becomes 0 with this probability (a multiple of 2^-16), else is divided by 1 - dropout_p.
        dropout_state: (2), int64: seed and offset of the random numbers, which dropout needs; (4): and the places of a part's first query and key.
        document_q, document_k: (batch, seqlen_q) and (batch, seqlen_k), int32: a query sees the keys of its own id only; None for the latter: as document_q.
        sinks: (nheads), float32 (float64 if q is): a logit of each head that joins the softmax's sum and has no value; lse counts it.
        block_table: (batch, columns), int32 or int64: k and v are a paged cache, (pages, page_size, nheads_k, ...); key j of batch entry b is row j % page_size of page
            block_table[b, j // page_size], seqused_k says how many keys it has, and seqlen_k is columns * page_size. With cu_seqlens_q queries alone are packed.
        cu_seqlens_q: (batch + 1), int32 or int64: packed sequences, where each begins in q, 0 first, and where the last one ends. q is (total_q, nheads, headdim)
            then, k and v (total_k, nheads_k, ...), o likewise, lse (nheads, total_q), document_q (total_q), document_k (total_k).
        cu_seqlens_k: the same in k and v; None: as cu_seqlens_q. With seqused_k where each begins alone counts, in any order.
        max_seqlen_q, max_seqlen_k: with them: the most rows of a sequence (with seqused_k: that one uses), or more; bias and mask have these lengths. None: looked up.
        out_dtype: of o; None: q's. float32 beside a q of 16 bits: the sums as they are, not rounded once more.
        batch_invariant: a row of o and lse has the same bits whatever else is in the call, and whether the queries of its sequence come together or one by one,
            if the other options are the same; it takes time where rows are few.
        return_lse: returns the log-sum-exp too, which `backward` needs.
        backend: "auto", "cpu", or "reference" (float64 inside, slow).
        algorithm: "auto", "v2", "v1" (the first FlashAttention), or "standard" (stores the matrix of scores).
        layout: "bshd" as above, or "bhsd": heads before seqlen in q, k, v and o.
        num_threads: 0 takes every CPU that may be used; the result does not depend on it.

    Returns:
        o (batch, seqlen_q, nheads, headdim_v) in q's dtype or out_dtype, a new array; with `return_lse` (o, lse) with lse (batch, nheads, seqlen_q), the natural
        logarithm of the sum of exponentials, in float32 (float64 if q is). A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: something that NumPy cannot view, or a dtype that attention is not computed in.
        ValueError: shapes, strides or options that do not fit together.
        NotImplementedError: valid, but not computed by this backend or algorithm; the message says why.
        MemoryError: no memory for the workspace.
    """
    given = taken("fattn.numpy.forward", _OPTIONS, ("return_lse", "layout", "num_threads"), options)
    return_lse = flag("return_lse", return_lse)
    bhsd = is_bhsd(layout)
    problem = _problem.describe(given, num_threads=num_threads, backward=False)
    sequences = _set_sequences(problem, layout, given)
    packed = sequences is not None
    q, k, v = _array("q", q), _array("k", k), _array("v", v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        setattr(problem, name, _described(name, x, bhsd, packed and (name == "q" or given.block_table is None)))
    arrays = _set_scores(problem, q, k, bhsd, given)
    o = _new("o", q.shape[:-1] + v.shape[-1:], q.dtype if given.out_dtype is None else np.dtype(given.out_dtype))
    problem.o = _described("o", o, bhsd, packed)
    lse = None
    if return_lse:
        lse = _new("lse", q.shape[-2::-1] if packed else _lse_shape(q, bhsd), np.float64 if q.dtype == np.float64 else np.float32)
        problem.lse = _described("lse", lse, bhsd, packed)
    _abi.check(_abi.library.fattn_execute(problem))
    del arrays, sequences
    return (o, lse) if return_lse else o


@takes_options(_OPTIONS)
def backward(dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, layout: str = "bshd", num_threads: int = 0, dlse: Any = None, return_dbias: bool = False,
             return_dsinks: bool = False, **options: Any) -> tuple[np.ndarray, ...]:
    """The gradients of q, k and v (FlashAttention-2, Dao 2023, algorithm 2). The same bits in every run.

    Args:
        dout: the gradient of o, in its shape and dtype.
        q, k, v: as they were given to `forward`.
        o, lse: as `forward` returned them, o in q's dtype.
        out_dtype: of dq, dk and dv; None: q's. float32 beside a q of 16 bits: the sums as they are.
        causal, softmax_scale, window, softcap, seqused_k, alibi_slopes, bias, mask, dropout_p, dropout_state, document_q, document_k, sinks, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, backend, algorithm, layout, num_threads: as in `forward`.
        dlse: the gradient of lse, in its shape and dtype; None: 0.
        return_dbias: returns the gradient of bias too.
        return_dsinks: returns the gradient of sinks too, last.

    Returns:
        (dq, dk, dv), new arrays in the shapes of q, k and v and their dtype, or out_dtype; with `return_dbias` (dq, dk, dv, dbias), dbias with the dtype of bias and its
        shape with dimensions of 1 put before, summed over every dimension that is 1; a last dimension that is broadcast has all keys.

    Raises:
        As `forward`.
    """
    given = taken("fattn.numpy.backward", _OPTIONS, ("layout", "num_threads", "dlse", "return_dbias", "return_dsinks"), options)
    bhsd = is_bhsd(layout)
    problem = _problem.describe(given, num_threads=num_threads, backward=True)
    sequences = _set_sequences(problem, layout, given)
    inputs = {name: _array(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("dout", dout))}
    gradients = {f"d{name}": _new(f"d{name}", inputs[name].shape, inputs[name].dtype if given.out_dtype is None else np.dtype(given.out_dtype))
                 for name in ("q", "k", "v")}
    if dlse is not None:
        inputs["dlse"] = _array("dlse", dlse)
    for name, x in (inputs | gradients).items():
        setattr(problem, name, _described(name, x, bhsd, sequences is not None))
    arrays = _set_scores(problem, inputs["q"], inputs["k"], bhsd, given)
    more = []
    for name, wanted in (("bias", return_dbias), ("sinks", return_dsinks)):
        if not wanted:
            continue
        if getattr(given, name) is None:
            raise ValueError(f"return_d{name} asks for the gradient of {name}, and {name} is absent; give the {name} of the forward pass")
        x = _new(f"d{name}", arrays[name].shape, arrays[name].dtype)
        described = _problem.beside(f"d{name}", x.shape, getattr(problem, name).dtype, _problem.row_major(x.shape), x.__array_interface__["data"][0])
        setattr(problem, f"d{name}", described)
        more.append(x)
    _abi.check(_abi.library.fattn_execute(problem))
    del arrays, sequences
    return gradients["dq"], gradients["dk"], gradients["dv"], *more


def merge(*parts: Any, out_dtype: Any = None, layout: str = "bshd") -> tuple[np.ndarray, np.ndarray]:
    """Attention over all keys from attention over parts of them, as `forward(..., return_lse=True)` returns it for each part: o = sum(exp(lse_i - lse) o_i) with
    lse = log(sum(exp(lse_i))), in fp32 (fp64 where a part has it).

    Args:
        parts: o1, lse1, o2, lse2, ... of any number of parts: o (batch, seqlen_q, nheads, headdim_v) and lse (batch, nheads, seqlen_q), or of packed sequences
            (total_q, nheads, headdim_v) and (nheads, total_q). A row of a part whose lse is -inf saw no key there, and counts nothing. Parts in fp32
            (`out_dtype="float32"` of `forward`) are not rounded before they are added.
        out_dtype: of the result's o; None: that of the parts.
        layout: "bshd" as above, or "bhsd": heads before seqlen in o.

    Returns:
        (o, lse), new arrays; a row that no part sees has o = 0 and lse = -inf. lse is float32 (float64 where a part has it).

    Raises:
        TypeError: the number of arrays is odd, NumPy cannot view one, or a dtype is none of attention's.
        ValueError: shapes do not fit together.
    """
    _merge_shapes.check_number("fattn.numpy.merge", len(parts))
    bhsd = is_bhsd(layout)
    arrays = [_array(_merge_shapes.name_of(i), x) for i, x in enumerate(parts)]
    for i, x in enumerate(arrays):
        _dtype_of(_merge_shapes.name_of(i), x)
    _merge_shapes.check_shapes([x.shape for x in arrays], bhsd)
    outs, lses = arrays[::2], arrays[1::2]
    with np.errstate(invalid="ignore", over="ignore"):  # NaN of a part is NaN of its rows
        o, lse = _merge_arrays.merged(outs, lses if bhsd else [x.swapaxes(-1, -2) for x in lses])
    if out_dtype is None:
        same = all(x.dtype == outs[0].dtype for x in outs)
        out_dtype = outs[0].dtype if same else o.dtype
    return np.ascontiguousarray(o, np.dtype(out_dtype)), np.ascontiguousarray(lse if bhsd else lse.swapaxes(-1, -2))


def dropout_mask(seed: int, offset: int, dropout_p: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Which weights dropout keeps, on every backend, for tests.

    Args:
        seed, offset: as in `dropout_state`.
        dropout_p: the probability with which a weight is dropped.
        shape: (batch, nheads, seqlen_q, seqlen_k); of packed sequences each is a batch entry.

    Returns:
        bool of that shape: True where the weight stays.

    Raises:
        ValueError: dropout_p is not within 0 and 1 - 2^-16, or a length is below 0 or above 2^31 - 1.
    """
    names = ("batch", "nheads", "seqlen_q", "seqlen_k")
    if len(shape) != len(names):
        raise ValueError(f"shape is {shape}; allowed: ({', '.join(names)})")
    for name, n in zip(names, shape):
        if not 0 <= n < 2**31:
            raise ValueError(f"{name} is {n}; allowed: 0 to 2^31 - 1")
    batch, nheads, seqlen_q, seqlen_k = shape
    mask = _new("the mask", shape, np.bool_)
    _abi.check(_abi.library.fattn_dropout_mask(within("seed", seed, 64), within("offset", offset, 64), dropout_p, batch, nheads, seqlen_q, seqlen_k, mask.ctypes.data))
    return mask
