"""The C ABI (include/fattn/fattn.h) by ctypes: its functions and constants, and the library that is loaded; _abi_structs.py has its structs."""

import ctypes
from pathlib import Path

from . import _abi_structs
from ._abi_structs import (ABI_VERSION, TENSORS, CacheInfo, CpuInfo, CudaInfo, EnvInfo, LibraryInfo, PlanInfo, Problem, RingProblem,
                           RingSchedule)
from ._errors import exception_of

PACKAGE = Path(__file__).parent
Tensor = _abi_structs.Tensor

DTYPES = {"fp32": 1, "fp16": 2, "bf16": 3, "fp64": 4}
INT32, UINT8, INT64 = 5, 6, 7  # of what stands beside q, k and v
DEVICES = {"cpu": 0, "cuda": 1}
BACKENDS = {"auto": 0, "reference": 1, "cpu": 2, "cuda": 3}
ALGORITHMS = {"auto": 0, "standard": 1, "v2": 2, "v3": 3, "v1": 4}
CHECKS = {"none": 1, "sync": 2}
ISAS = {"auto": 0, "scalar": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "amx": 5, "neon": 6}

_i32, _u32, _i64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64

# What a score depends on beside q and k, and where packed sequences begin: each in the order of the operators' schemas.
SCORES = tuple(row for row in TENSORS if row.role in ("List", "Term", "Row") and row.dims != "Bounds")
BOUNDS = tuple(row for row in TENSORS if row.dims == "Bounds")


def _load() -> ctypes.CDLL:
    path = PACKAGE / "lib" / "libfattn.so"
    if not path.is_file():
        raise ImportError(f"'{path}' is absent: this is the source of fattn, which is built and installed by `pip install .` in its root; then start Python in another "
                          "folder, or without this one in PYTHONPATH")
    library = ctypes.CDLL(str(path))
    library.fattn_version.restype = ctypes.c_char_p
    library.fattn_last_error.restype = ctypes.c_char_p
    library.fattn_status_name.restype = ctypes.c_char_p
    library.fattn_abi_version.restype = _u32
    if library.fattn_abi_version() != ABI_VERSION:
        raise ImportError(f"'{path}' has C ABI version {library.fattn_abi_version()}; this package needs {ABI_VERSION}. Install fattn again")
    for name, *arguments in (
        ("execute", ctypes.POINTER(Problem)),
        ("supported", ctypes.POINTER(Problem), ctypes.c_char_p, ctypes.c_size_t),
        ("plan_create", ctypes.POINTER(Problem), ctypes.POINTER(ctypes.c_void_p)),
        ("plan_query", ctypes.c_void_p, ctypes.POINTER(PlanInfo)),
        ("query_cpu", ctypes.POINTER(CpuInfo)),
        ("query_library", _i32, ctypes.POINTER(LibraryInfo)),
        ("query_environment", _i32, ctypes.POINTER(EnvInfo)),
        ("set_check", _i32),
        ("set_trace", ctypes.c_void_p),
        ("dropout_mask", _i64, _i64, ctypes.c_double, _i64, _i64, _i64, _i64, ctypes.c_void_p),
        ("cuda_count", ctypes.POINTER(_i32), ctypes.c_char_p, ctypes.c_size_t),
        ("cuda_query", _i32, ctypes.POINTER(CudaInfo)),
        ("cache_query", ctypes.POINTER(CacheInfo)),
        ("ring_create", ctypes.POINTER(RingProblem), ctypes.POINTER(ctypes.c_void_p)),
        ("ring_query", ctypes.c_void_p, ctypes.POINTER(RingSchedule)),
    ):
        function = getattr(library, f"fattn_{name}")
        function.restype, function.argtypes = _i32, arguments
    for destroy in (library.fattn_plan_destroy, library.fattn_ring_destroy):
        destroy.restype, destroy.argtypes = None, [ctypes.c_void_p]
    return library


library = _load()


def check(status: int) -> None:
    """Raises Python's customary exception with the library's message, unless status is FATTN_OK. The global interpreter lock is given back
    during a call, but the message is kept for each thread."""
    if status != 0:
        raise exception_of(library.fattn_status_name(status).decode(), library.fattn_last_error().decode(errors="replace"))


def version() -> str:
    return library.fattn_version().decode()
