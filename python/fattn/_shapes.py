"""A problem of the C ABI from shapes alone: contiguous tensors that are nowhere yet."""

import operator
from collections.abc import Sequence

from . import _abi, _problem
from ._options import Window, choose, device_and_index, is_bhsd, short_dtype, within


def of_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None, *, dtype: str, device: str, device_index: int, backward: bool, causal: bool,
              softmax_scale: float | None, window: Window | None, softcap: float | None, seqused_k: bool, alibi_slopes: bool, documents: bool,
              packed: tuple[int, int, int] | None, bias: Sequence[int] | None, mask: Sequence[int] | None, dropout_p: float, deterministic: bool, backend: str,
              algorithm: str, layout: str, num_threads: int = 0) -> _abi.Problem:
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if hasattr(shape, "shape"):
            raise TypeError(f"{name} is a {type(shape).__name__}; it must be a shape: give {name}.shape, and dtype and device as options")
    dtype, (device, device_index) = short_dtype(dtype), device_and_index(device, device_index)
    bhsd = is_bhsd(layout)
    problem = _problem.describe(causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, backend=backend, algorithm=algorithm,
                                deterministic=deterministic, num_threads=num_threads, backward=backward, dropout_p=dropout_p)
    code = choose("dtype", dtype, _abi.DTYPES)
    device_type = choose("device", device, _abi.DEVICES)

    def put(name: str, described: _abi.Tensor) -> None:
        described.device_type, described.device_index = device_type, device_index
        setattr(problem, name, described)

    def place(name: str, shape: Sequence[int], dtype: int = code) -> None:
        put(name, _problem.tensor(name, shape, dtype, _problem.row_major(shape), bhsd=bhsd, packed=packed is not None))

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
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            place_beside(name, (sequences + 1,), _abi.INT32)
    v = k if v is None else v
    for name, shape in (("q", q), ("k", k), ("v", v)):
        place(name, shape)
    o = (*q[:-1], *v[-1:])
    place("o", o)
    if backward:
        for name, shape in (("dout", o), ("dq", q), ("dk", k), ("dv", v)):
            place(name, shape)
        middle = q[:-1] if packed is not None else q[1:-1]
        place("lse", (*(() if packed is not None else batch), *(middle if bhsd else reversed(middle))), _abi.DTYPES["fp64" if dtype == "fp64" else "fp32"])
    if seqused_k:
        place_beside("seqused_k", batch, _abi.INT32)
    if alibi_slopes:
        place_beside("alibi_slopes", (q[-3 if bhsd else -2],), _abi.DTYPES["fp32"])
    if bias is not None:
        place_beside("bias", bias, code)
        if backward:
            place_beside("dbias", bias, code)
    if mask is not None:
        place_beside("mask", mask, _abi.UINT8)
    if documents:
        rows = slice(0, 1) if packed is not None else slice(0, 4, 2) if bhsd else slice(0, 2)
        place_beside("document_q", q[rows], _abi.INT32)
        place_beside("document_k", k[rows], _abi.INT32)
    if dropout_p:
        place_beside("dropout_state", (2,), _abi.INT64)
    return problem
