"""What the library decides for a problem, and its kernels made ahead of the first call."""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from . import _abi
from ._options import Window
from ._shapes import of_shapes
from ._unknown import options_of, unknown_options


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a problem is computed. `workspace_bytes` is what a call needs beside its inputs and outputs; `flops` counts the pairs that masks leave, `bytes`
    every input and output once; `kernel` and `why` are for people, as `str` of a plan is."""

    backend: str
    algorithm: str
    isa: str
    num_threads: int
    workspace_bytes: int
    flops: float
    bytes: float
    kernel: str
    why: str

    def __str__(self) -> str:
        threads = f", {self.num_threads} threads, instruction set {self.isa}" if self.num_threads else ""
        work = f"{self.flops / 1e9:.4g} GFLOP, {self.bytes / 2**20:.4g} MiB of inputs and outputs, {self.workspace_bytes / 2**20:.4g} MiB of workspace"
        return "\n".join((f"{self.kernel} (backend {self.backend}, algorithm {self.algorithm}{threads})", self.why, work))


def _name(names: dict[str, int], value: int) -> str:
    return next(name for name, code in names.items() if code == value)


def plan(
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
    seqused_k: bool = False,
    alibi_slopes: bool = False,
    documents: bool = False,
    packed: tuple[int, int, int] | None = None,
    bias: Sequence[int] | None = None,
    mask: Sequence[int] | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
    algorithm: str = "auto",
    layout: str = "bshd",
    num_threads: int = 0,
    **unknown: NoReturn,
) -> Plan:
    """Plans attention on contiguous tensors of these shapes, as the first call with them does: on a GPU its kernels are compiled now, and kept on disk.

    Args:
        As `fattn.support` takes them; num_threads: of the CPU, 0 for all that may be used.

    Returns:
        A `Plan`: backend, algorithm and kernel, why they were chosen, memory and work.

    Raises:
        ValueError: no configuration accepts the problem.
        NotImplementedError: it is not computed here, with the library's reason (`fattn.support` asks without an exception).
        RuntimeError: a CUDA device or its driver failed, or a kernel could not be compiled.
    """
    if unknown:
        raise unknown_options("fattn.plan", unknown, options_of(plan))
    problem = of_shapes(q, k, v, dtype=dtype, device=device, device_index=device_index, backward=backward, causal=causal, softmax_scale=softmax_scale,
                        window=window, softcap=softcap, seqused_k=seqused_k, alibi_slopes=alibi_slopes, documents=documents, packed=packed, bias=bias, mask=mask, dropout_p=dropout_p,
                        deterministic=deterministic, backend=backend, algorithm=algorithm, layout=layout, num_threads=num_threads)
    handle, info = ctypes.c_void_p(), _abi.PlanInfo()
    _abi.check(_abi.library.fattn_plan_create(problem, handle))
    try:
        _abi.check(_abi.library.fattn_plan_query(handle, info))
        return Plan(_name(_abi.BACKENDS, info.backend), _name(_abi.ALGORITHMS, info.algorithm), _name(_abi.ISAS, info.cpu_isa), info.num_threads,
                    info.workspace_bytes, info.flops, info.bytes, info.kernel.decode(), info.why.decode())
    finally:
        _abi.library.fattn_plan_destroy(handle)


def warmup(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None = None, *, backward: bool = True, **options: Any) -> tuple[Plan, ...]:
    """Has everything ready for attention on tensors of these shapes, so that no call waits for a compiler: on a GPU the kernels of both passes, compiled and on
    disk for every process; on the CPU there is nothing to compile, and the plans say what will run.

    Args:
        q, k, v: shapes as in `fattn.support`.
        backward: the backward pass too.
        options: the others of `fattn.plan`.

    Returns:
        The plan of the forward pass, and that of the backward pass if it is asked for.

    Raises:
        As `fattn.plan`.
    """
    return tuple(plan(q, k, v, backward=direction, **options) for direction in ((False, True) if backward else (False,)))
