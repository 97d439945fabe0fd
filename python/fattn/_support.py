"""Asks the library whether it computes a problem here, without tensors."""

import ctypes
import dataclasses
from collections.abc import Sequence

from . import _abi, _problem
from ._options import Window, choose, is_bhsd


@dataclasses.dataclass(frozen=True)
class Support:
    """True where the problem can run; `reason` says why not where it cannot."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        return self.supported


def supported(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int] | None = None,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    device_index: int = 0,
    backward: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    algorithm: str = "auto",
    layout: str = "bshd",
) -> Support:
    """Whether attention on contiguous tensors of these shapes can run on this machine.

    Args:
        q, k, v: shapes, (batch, seqlen_q, nheads, headdim), (batch, seqlen_k, nheads_k, headdim), (batch, seqlen_k, nheads_k, headdim_v);
            that of v is k's unless given.
        dtype: "fp32", "fp16", "bf16", "fp64".
        device, device_index: "cpu", or "cuda" and which one.
        backward: asks for the backward pass instead of the forward pass.
        causal, softmax_scale, window, softcap, deterministic, backend, algorithm, layout: as in `fattn.attention`.

    Returns:
        A `Support`, true or false, with the library's reason.

    Raises:
        ValueError: no configuration accepts the problem (nheads is no multiple of nheads_k, an unknown name, ...).
    """
    bhsd = is_bhsd(layout)
    problem = _problem.describe(causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, backend=backend, algorithm=algorithm,
                                deterministic=deterministic, num_threads=0, backward=backward)
    code = choose("dtype", dtype, _abi.DTYPES)
    device_type = choose("device", device, _abi.DEVICES)

    def place(name: str, shape: Sequence[int], dtype: int = code) -> None:
        described = _problem.tensor(name, shape, dtype, _problem.row_major(shape), bhsd=bhsd)
        described.device_type, described.device_index = device_type, device_index
        setattr(problem, name, described)

    v = k if v is None else v
    for name, shape in (("q", q), ("k", k), ("v", v)):
        place(name, shape)
    o = (*q[:3], *v[3:])
    place("o", o)
    if backward:
        for name, shape in (("dout", o), ("dq", q), ("dk", k), ("dv", v)):
            place(name, shape)
        batch, *middle = q[:3]
        place("lse", (batch, *(middle if bhsd else reversed(middle))), _abi.DTYPES["fp64" if dtype == "fp64" else "fp32"])

    reason = ctypes.create_string_buffer(1024)
    status = _abi.library.fattn_supported(problem, reason, len(reason))
    text = reason.value.decode(errors="replace")
    if _abi.library.fattn_status_name(status) != b"unsupported":
        _abi.check(status)
    return Support(status == 0, text)
