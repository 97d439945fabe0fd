"""Processes that are forked from one that has torch imported, which takes seconds of a processor, and Python programs in such processes."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile


def context() -> multiprocessing.context.BaseContext:
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fattn.distributed"])  # optimizers import dynamo
    return forkserver


def _program(arguments: tuple[str, ...], environment: dict[str, str], said: str, error: str) -> None:
    os.environ.clear()  # the process that it is forked from has the variables of its start
    os.environ.update(environment)
    for stream, path in ((1, said), (2, error)):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, stream)
        os.close(file)
    what, *rest = arguments
    sys.argv = [what, *rest[1:]] if what in ("-c", "-m") else list(arguments)
    if what == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif what == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(pathlib.Path(what).parent))
        runpy.run_path(what, run_name="__main__")


def python(*arguments: str | pathlib.Path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess:
    """As `python ARGUMENTS` (-c CODE, -m MODULE or FILE) is, but for two things: torch and fattn are imported already, and what runs at the end of an
    interpreter does not. `environment`: variables beside this process's."""
    with tempfile.TemporaryDirectory() as folder:
        said, error = pathlib.Path(folder, "said"), pathlib.Path(folder, "error")
        said.touch(), error.touch()
        process = context().Process(target=_program, args=(tuple(map(str, arguments)), {**os.environ, **environment}, str(said), str(error)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout, said.read_text(), error.read_text())
        return subprocess.CompletedProcess(arguments, process.exitcode, said.read_text(), error.read_text())
