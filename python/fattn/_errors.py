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
_KIND_MESSAGE = re.compile(r"Could not run 'fattn::\w+' with arguments from the '(?:Autograd)?(\w+)' backend")


def exception_of(status_name: str, message: str) -> Exception:
    return _EXCEPTIONS.get(status_name, RuntimeError)(message)


def exception_of_operator(error: RuntimeError) -> Exception:
    """The exception for an error of a torch operator; the error itself if it is none of fattn's."""
    message = str(error)
    if match := _OPERATOR_MESSAGE.match(message):
        return exception_of(*match.groups())
    if match := _TYPE_MESSAGE.match(message):
        allowed, name, given = match.groups()
        return TypeError(f"{name} is of the type {given}; it must be of the type {allowed}")
    if match := _KIND_MESSAGE.match(message):
        return NotImplementedError(f"a tensor is of torch's kind {match[1]}, which fattn does not compute; allowed: dense tensors on the CPU or a CUDA device. "
                                   "Sequences of unequal lengths go to fattn.attention_varlen, or with seqused_k")
    return error
