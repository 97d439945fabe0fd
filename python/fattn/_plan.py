"""What the library decides for a problem, and its kernels made ahead of the first call."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _abi
from ._shapes import of_shapes, takes_shapes


class Plan(NamedTuple):
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


@takes_shapes
def plan(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None = None, **options: Any) -> Plan:
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
    problem = of_shapes(q, k, v, function="fattn.plan", **options)
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
