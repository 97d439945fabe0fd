"""The core's status codes as Python's exceptions. The message is the core's: what was given, what is allowed, what to do."""

import re

_EXCEPTIONS: dict[str, type[Exception]] = {
    "invalid_argument": ValueError,
    "unsupported": NotImplementedError,
    "out_of_memory": MemoryError,
}
_OPERATOR_MESSAGE = re.compile(r"fattn: (\w+): (.*)", re.DOTALL)


def exception_of(status_name: str, message: str) -> Exception:
    return _EXCEPTIONS.get(status_name, RuntimeError)(message)


def exception_of_operator(error: RuntimeError) -> Exception:
    """The exception for an error of a torch operator; the error itself if it is none of fattn's."""
    match = _OPERATOR_MESSAGE.match(str(error))
    return exception_of(*match.groups()) if match else error
