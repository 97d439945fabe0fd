"""The structs of the C ABI and the list of tensors. Made by tools/make_abi.py from include/fattn; do not edit."""

import ctypes
from typing import NamedTuple

ABI_VERSION = 9

_i32, _u32, _i64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64


class Sized(ctypes.Structure):
    """A struct that begins with its size: zeroed, with the size set."""

    def __init__(self) -> None:
        super().__init__()
        self.struct_size = ctypes.sizeof(self)


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


class Problem(Sized):
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
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("lse", Tensor),
        ("weights", Tensor),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("seqused_k", Tensor),
        ("alibi_slopes", Tensor),
        ("bias", Tensor),
        ("mask", Tensor),
        ("dropout_state", Tensor),
        ("dbias", Tensor),
        ("dlse", Tensor),
        ("cu_seqlens_q", Tensor),
        ("cu_seqlens_k", Tensor),
        ("max_seqlen_q", _i64),
        ("max_seqlen_k", _i64),
        ("document_q", Tensor),
        ("document_k", Tensor),
        ("status", Tensor),
        ("sinks", Tensor),
        ("dsinks", Tensor),
        ("block_table", Tensor),
        ("check", _i32),
        ("batch_invariant", _i32),
    ]


class PlanInfo(Sized):
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


class CpuInfo(Sized):
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


class LibraryInfo(Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("loaded", _i32),
        ("name", ctypes.c_char * 32),
        ("purpose", ctypes.c_char * 128),
        ("path", ctypes.c_char * 512),
        ("reason", ctypes.c_char * 512),
    ]


class EnvInfo(Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("is_set", _i32),
        ("name", ctypes.c_char * 32),
        ("meaning", ctypes.c_char * 256),
        ("value", ctypes.c_char * 512),
    ]


class CudaInfo(Sized):
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


class CacheInfo(Sized):
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


class RingProblem(Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("layout", _i32),
        ("nranks", _i32),
        ("rank", _i32),
        ("causal", _i32),
        ("has_window", _i32),
        ("gathered", _i32),
        ("has_alibi", _i32),
        ("keep_positions", _i32),
        ("nsequences", _i32),
        ("seqlen_q", _i64),
        ("seqlen_k", _i64),
        ("window_left", _i64),
        ("window_right", _i64),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
    ]


class RingRange(ctypes.Structure):
    _fields_ = [
        ("first", _i64),
        ("count", _i64),
    ]


class RingHop(ctypes.Structure):
    _fields_ = [
        ("send_to", _i32),
        ("receive_from", _i32),
        ("nsent", _i64),
        ("nreceived", _i64),
        ("nblocks", _i64),
        ("rows_sent", _i64),
        ("rows_received", _i64),
    ]


class RingBlock(ctypes.Structure):
    _fields_ = [
        ("q_row", _i64),
        ("q_rows", _i64),
        ("k_row", _i64),
        ("k_rows", _i64),
        ("q_position", _i64),
        ("k_position", _i64),
        ("window_left", _i64),
        ("window_right", _i64),
        ("distance", _i64),
        ("sequence", _i32),
        ("side", _i32),
    ]


class RingSchedule(Sized):
    _fields_ = [
        ("struct_size", _u32),
        ("nhops", _i32),
        ("rows_q", _i64),
        ("rows_k", _i64),
        ("nheld_q", _i64),
        ("nheld_k", _i64),
        ("nblocks", _i64),
        ("held_q", ctypes.c_void_p),
        ("held_k", ctypes.c_void_p),
        ("sent", ctypes.c_void_p),
        ("received", ctypes.c_void_p),
        ("hops", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
    ]


class TensorRow(NamedTuple):
    """As include/fattn/tensors.hpp has it."""

    name: str
    dtype: str
    dims: str
    role: str
    passes: str


TENSORS = (
    TensorRow("q", "OfQ", "Rows", "Input", "Both"),
    TensorRow("k", "OfQ", "Rows", "Input", "Both"),
    TensorRow("v", "OfQ", "Rows", "Input", "Both"),
    TensorRow("o", "OfQOrF32", "Rows", "Result", "Both"),
    TensorRow("lse", "OfLse", "Lse", "Result", "Both"),
    TensorRow("weights", "OfQ", "Pairs", "Output", "Forward"),
    TensorRow("dout", "OfQ", "Rows", "Input", "Backward"),
    TensorRow("dq", "OfQOrF32", "Rows", "Output", "Backward"),
    TensorRow("dk", "OfQOrF32", "Rows", "Output", "Backward"),
    TensorRow("dv", "OfQOrF32", "Rows", "Output", "Backward"),
    TensorRow("seqused_k", "I32", "Entries", "List", "Both"),
    TensorRow("alibi_slopes", "F32", "Heads", "Term", "Both"),
    TensorRow("bias", "OfQOrF32", "Pairs", "Term", "Both"),
    TensorRow("mask", "U8", "Pairs", "Term", "Both"),
    TensorRow("dropout_state", "I64", "Two", "Term", "Both"),
    TensorRow("dbias", "OfQOrF32", "Pairs", "Output", "Backward"),
    TensorRow("dlse", "OfLse", "Lse", "Input", "Backward"),
    TensorRow("cu_seqlens_q", "I32", "Bounds", "List", "Both"),
    TensorRow("cu_seqlens_k", "I32", "Bounds", "List", "Both"),
    TensorRow("document_q", "I32", "Ids", "Term", "Both"),
    TensorRow("document_k", "I32", "Ids", "Term", "Both"),
    TensorRow("status", "I32", "Two", "Output", "Both"),
    TensorRow("sinks", "OfLse", "Heads", "Row", "Both"),
    TensorRow("dsinks", "OfLse", "Heads", "Output", "Backward"),
    TensorRow("block_table", "I32", "Table", "List", "Both"),
)
