"""The core's status codes as Python's exceptions. The message is the core's: what was given, what is allowed, what to do."""

import re

_EXCEPTIONS: dict[str, type[Exception]] = {
    "invalid_argument": ValueError,
    "unsupported": NotImplementedError,
    "out_of_memory": MemoryError,
}
_OPERATOR_MESSAGE = re.compile(r"fattn: (\w+): (.*)", re.DOTALL)
# What torch says of its own accord: an option of another type than the operator takes, and tensors of a kind that it has no kernel for.
_TYPE_MESSAGE = re.compile(r"fattn::\w+\(\) Expected a value of type '(?:Optional\[)?(\w+)\]?' for argument '(\w+)' but instead found type '([\w.]+)'")
_SHARDS_MESSAGE = re.compile(r"Operator fattn\.\w+\.default does not have a sharding strategy|fattn\.\w+\.default[: ]+got mixed torch\.Tensor and DTensor")
_KIND_MESSAGE = re.compile(r"Could not run 'fattn::\w+' with arguments from the '(?:Autograd)?(\w+)' backend")
# What an operator says where torch's allocator refused.
_NO_MEMORY = re.compile(r"(CUDA out of memory\. Tried|DefaultCPUAllocator: can't allocate memory: you tried) to allocate (\d+) bytes on (\S+)")
# How the core ends on tensors of several dtypes; with torch there is a function that casts.
_CAST = "; all tensors of a call share one dtype. Cast one of them"
_NO_CUDA_MEMORY = "CUDA out of memory"


def exception_of(status_name: str, message: str) -> Exception:
    return _EXCEPTIONS.get(status_name, RuntimeError)(message)


def kind_message(name: str, kind: str) -> str:
    return (f"{name} is of torch's kind {kind}, which fattn does not compute; allowed: dense tensors on the CPU or a CUDA device (to_dense() makes one). "
            "Sequences of unequal lengths go to fattn.attention_varlen, or with seqused_k")


def dtensor_message(name: str) -> str:
    return (f"{name} is a DTensor, which is computed only where q is one too, in fattn.attention, attention_varlen and their packed forms; call fattn on each rank's part, "
            "x.to_local() of tensors that are sharded by batch or heads alone (torch.distributed.tensor.experimental.local_map does it, with gradients)")


def _of_memory(message: str) -> Exception:
    """torch's own error, by which programs that look for the largest batch know it: the operator cannot hand it on, so the same memory is asked for again. Where
    it is there by now, or a GPU's driver had none, an error of the same class."""
    import torch

    if match := _NO_MEMORY.match(message):
        try:
            torch.UntypedStorage(int(match[2]), device=match[3])
        except RuntimeError as error:
            return error.with_traceback(None)
    if message.startswith(_NO_CUDA_MEMORY):
        return torch.OutOfMemoryError(message)
    return RuntimeError(message) if match else MemoryError(message)


def exception_of_operator(error: RuntimeError) -> Exception:
    """The exception for an error of a torch operator; the error itself if it is none of fattn's."""
    message = str(error)
    if match := _OPERATOR_MESSAGE.match(message.replace(_CAST, f"{_CAST}, or call fattn.precision.safe_attention: it computes in the dtype that loses nothing")):
        return _of_memory(match[2]) if match[1] == "out_of_memory" else exception_of(*match.groups())
    if match := _TYPE_MESSAGE.match(message):
        allowed, name, given = match.groups()
        return TypeError(f"{name} is of the type {given}; it must be of the type {allowed}")
    if match := _KIND_MESSAGE.match(message):
        return NotImplementedError(kind_message("a tensor", match[1]))
    if _SHARDS_MESSAGE.match(message):
        return NotImplementedError(dtensor_message("a tensor"))
    return error
