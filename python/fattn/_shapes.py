"""A problem of the C ABI from shapes alone: contiguous tensors that are nowhere yet."""

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from . import _abi, _problem
from ._options import choose, device_and_index, is_bhsd, names_of_options, short_dtype, taken, takes_options, within

# What `support` and `plan` take beside shapes of q, k and v: of the options, seqused_k, alibi_slopes and sinks as whether they are there, bias, mask and block_table by their shapes.
_OPTIONS = names_of_options(but=("dropout_state", "document_q", "document_k", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))


@takes_options(_OPTIONS)
def of_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None = None, *, dtype: str = "fp32", device: str = "cpu", device_index: int = 0,
              backward: bool = False, documents: bool = False, packed: tuple[int, int, int] | None = None, layout: str = "bshd", num_threads: int = 0,
              function: str, **options: Any) -> _abi.Problem:
    """`function`: what an error calls the one that was called."""
    given = taken(function, _OPTIONS, ("dtype", "device", "device_index", "backward", "documents", "packed", "layout", "num_threads"), options)
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if hasattr(shape, "shape"):
            raise TypeError(f"{name} is a {type(shape).__name__}; it must be a shape: give {name}.shape, and dtype and device as options")
    dtype, (device, device_index) = short_dtype(dtype), device_and_index(device, device_index)
    bhsd = is_bhsd(layout)
    problem = _problem.describe(given, backward=backward, num_threads=num_threads)
    code = choose("dtype", dtype, _abi.DTYPES)
    device_type = choose("device", device, _abi.DEVICES)

    def put(name: str, described: _abi.Tensor) -> None:
        described.device_type, described.device_index = device_type, device_index
        setattr(problem, name, described)

    def place(name: str, shape: Sequence[int], dtype: int = code) -> None:
        rows = packed is not None and not (given.block_table is not None and name in ("k", "v"))
        put(name, _problem.tensor(name, shape, dtype, _problem.row_major(shape), bhsd=bhsd, packed=rows))

    def place_beside(name: str, shape: Sequence[int], dtype: int) -> None:
        put(name, _problem.beside(name, shape, dtype, _problem.row_major(shape)))

    batch = q[:1]
    if packed is not None:
        if bhsd:
            raise ValueError(f"layout is {layout!r} and packed is {packed!r}; packed sequences are (total, heads, headdim), leave layout out")
        try:
            sequences, *longest = (operator.index(x) for x in packed)
            max_seqlen_q, max_seqlen_k = longest
        except (TypeError, ValueError):
            raise ValueError(f"packed is {packed!r}; allowed: None, or (batch, max_seqlen_q, max_seqlen_k) of packed sequences") from None
        problem.max_seqlen_q, problem.max_seqlen_k = within("max_seqlen_q", max_seqlen_q, 64), within("max_seqlen_k", max_seqlen_k, 64)
        batch = (sequences,)
        for name in ("cu_seqlens_q", "cu_seqlens_k") if given.block_table is None else ("cu_seqlens_q",):
            place_beside(name, (sequences + 1,), _abi.INT32)
    v = k if v is None else v
    for name, shape in (("q", q), ("k", k), ("v", v)):
        place(name, shape)
    o = (*q[:-1], *v[-1:])
    place("o", o, code if given.out_dtype is None or backward else choose("out_dtype", short_dtype(given.out_dtype), _abi.DTYPES))
    if backward:
        for name, shape in (("dout", o), ("dq", q), ("dk", k), ("dv", v)):
            place(name, shape)
        middle = q[:-1] if packed is not None else q[1:-1]
        place("lse", (*(() if packed is not None else batch), *(middle if bhsd else reversed(middle))), _abi.DTYPES["fp64" if dtype == "fp64" else "fp32"])
    if given.seqused_k:
        place_beside("seqused_k", batch, _abi.INT32)
    if given.alibi_slopes:
        place_beside("alibi_slopes", (q[-3 if bhsd else -2],), _abi.DTYPES["fp32"])
    if given.sinks:
        for name in ("sinks", "dsinks") if backward else ("sinks",):
            place_beside(name, (q[-3 if bhsd else -2],), _abi.DTYPES["fp64" if dtype == "fp64" else "fp32"])
    if given.bias is not None:
        for name in ("bias", "dbias") if backward else ("bias",):
            place_beside(name, given.bias, code)
    if given.mask is not None:
        place_beside("mask", given.mask, _abi.UINT8)
    if documents:
        rows = slice(0, 1) if packed is not None else slice(0, 4, 2) if bhsd else slice(0, 2)
        place_beside("document_q", q[rows], _abi.INT32)
        place_beside("document_k", k[rows] if given.block_table is None else (*batch, k[2 if bhsd else 1] * given.block_table[-1]), _abi.INT32)
    if given.block_table is not None:
        place_beside("block_table", given.block_table, _abi.INT32)
    if given.dropout_p:
        place_beside("dropout_state", (2,), _abi.INT64)
    return problem


def takes_shapes(function: Callable) -> Callable:
    """For a function that hands **options to `of_shapes`: its signature says them."""
    signature = inspect.signature(function)
    own = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    rest = [x for x in inspect.signature(of_shapes).parameters.values() if x.kind is x.KEYWORD_ONLY and x.name != "function"]
    function.__signature__ = signature.replace(parameters=own + rest)
    return function
