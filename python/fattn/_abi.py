"""The C ABI (include/fattn/fattn.h) by ctypes: its structs, functions and constants, and the library that is loaded."""

import ctypes
from pathlib import Path

from ._errors import exception_of

ABI_VERSION = 6
PACKAGE = Path(__file__).parent

DTYPES = {"fp32": 1, "fp16": 2, "bf16": 3, "fp64": 4}
INT32, UINT8, INT64 = 5, 6, 7  # of what stands beside q, k and v
DEVICES = {"cpu": 0, "cuda": 1}
BACKENDS = {"auto": 0, "reference": 1, "cpu": 2, "cuda": 3}
ALGORITHMS = {"auto": 0, "standard": 1, "v2": 2, "v3": 3, "v1": 4}
CHECKS = {"none": 1, "sync": 2}
ISAS = {"auto": 0, "scalar": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "amx": 5, "neon": 6}

_i32, _u32, _i64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", _i32),
        ("ndim", _i32),
        ("device_type", _i32),
        ("device_index", _i32),
        ("shape", _i64 * 4),
        ("strides", _i64 * 4),
    ]


class _Sized(ctypes.Structure):
    """A struct that begins with its size: zeroed, with the size set."""

    def __init__(self) -> None:
        super().__init__()
        self.struct_size = ctypes.sizeof(self)


class Problem(_Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("abi_version", _u32),
        ("pass_", _i32),
        ("backend", _i32),
        ("algorithm", _i32),
        ("causal", _i32),
        ("has_softmax_scale", _i32),
        ("cpu_isa", _i32),
        ("softmax_scale", ctypes.c_double),
        ("num_threads", _i32),
        ("deterministic", _i32),
        ("cuda_level", _i32),
        ("has_window", _i32),
        ("executor", ctypes.c_void_p),
        ("window_left", _i64),
        ("window_right", _i64),
        ("softcap", ctypes.c_double),
        ("p_dropout", ctypes.c_double),
        *((name, Tensor) for name in ("q", "k", "v", "o", "lse", "weights", "dout", "dq", "dk", "dv")),
        *((name, Tensor) for name in ("seqused_k", "alibi_slopes", "bias", "mask", "dropout_state", "dbias", "dlse")),
        *((name, Tensor) for name in ("cu_seqlens_q", "cu_seqlens_k")),
        ("max_seqlen_q", _i64),
        ("max_seqlen_k", _i64),
        *((name, Tensor) for name in ("document_q", "document_k", "status")),
        ("check", _i32),
        ("reserved", _u32),
    ]


class PlanInfo(_Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("backend", _i32),
        ("algorithm", _i32),
        ("cpu_isa", _i32),
        ("num_threads", _i32),
        ("cuda_level", _i32),
        ("workspace_bytes", ctypes.c_size_t),
        ("flops", ctypes.c_double),
        ("flops_nominal", ctypes.c_double),
        ("bytes", ctypes.c_double),
        ("kernel", ctypes.c_char_p),
        ("why", ctypes.c_char_p),
    ]


class CpuInfo(_Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("logical_cpus", _i32),
        ("usable_threads", _i32),
        ("isa_default", _i32),
        ("isas_available", _u32),
        ("reserved", _u32),
        ("l1d_bytes", _i64),
        ("l2_bytes", _i64),
        ("l3_bytes", _i64),
        ("memory_bytes", _i64),
        ("memory_available_bytes", _i64),
        ("vendor", ctypes.c_char * 32),
        ("model", ctypes.c_char * 128),
    ]


class LibraryInfo(_Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("loaded", _i32),
        ("name", ctypes.c_char * 32),
        ("purpose", ctypes.c_char * 128),
        ("path", ctypes.c_char * 512),
        ("reason", ctypes.c_char * 512),
    ]


class EnvInfo(_Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("is_set", _i32),
        ("name", ctypes.c_char * 32),
        ("meaning", ctypes.c_char * 256),
        ("value", ctypes.c_char * 512),
    ]


class CudaInfo(_Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("index", _i32),
        ("capability_major", _i32),
        ("capability_minor", _i32),
        ("multiprocessors", _i32),
        ("clock_khz", _i32),
        ("memory_clock_khz", _i32),
        ("memory_bus_bits", _i32),
        ("shared_per_block", _i32),
        ("shared_per_multiprocessor", _i32),
        ("registers_per_multiprocessor", _i32),
        ("driver_version", _i32),
        ("memory_bytes", _i64),
        ("l2_bytes", _i64),
        ("name", ctypes.c_char * 128),
        ("pci_bus_id", ctypes.c_char * 32),
        ("uuid", ctypes.c_char * 64),
    ]


class CacheInfo(_Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("usable", _i32),
        ("entries", _i64),
        ("bytes", _i64),
        ("limit_bytes", _i64),
        ("path", ctypes.c_char * 1024),
        ("reason", ctypes.c_char * 512),
        ("pack", ctypes.c_char * 1024),
    ]


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
        ("dropout_mask", _i64, _i64, ctypes.c_double, _i64, _i64, _i64, _i64, ctypes.c_void_p),
        ("cuda_count", ctypes.POINTER(_i32), ctypes.c_char_p, ctypes.c_size_t),
        ("cuda_query", _i32, ctypes.POINTER(CudaInfo)),
        ("cache_query", ctypes.POINTER(CacheInfo)),
    ):
        function = getattr(library, f"fattn_{name}")
        function.restype, function.argtypes = _i32, arguments
    library.fattn_plan_destroy.restype, library.fattn_plan_destroy.argtypes = None, [ctypes.c_void_p]
    return library


library = _load()


def check(status: int) -> None:
    """Raises Python's customary exception with the library's message, unless status is FATTN_OK. The global interpreter lock is given back
    during a call, but the message is kept for each thread."""
    if status != 0:
        raise exception_of(library.fattn_status_name(status).decode(), library.fattn_last_error().decode(errors="replace"))


def version() -> str:
    return library.fattn_version().decode()
