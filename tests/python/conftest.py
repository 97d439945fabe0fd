"""Runs the built command line, whose path is in FATTN_CLI, as a person would."""
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Cli:
    def __init__(self, path: str):
        self.path = path

    def __call__(self, *arguments, status: int = 0, timeout: float = 120, env: dict | None = None, **options) -> subprocess.CompletedProcess:
        """Runs `fattn ARGUMENTS`, which must end with this status; stdout and stderr are text."""
        done = subprocess.run(
            [self.path, *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            **options,
        )
        assert done.returncode == status, f"exit {done.returncode}, not {status}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments, **options) -> dict:
        """The record of `fattn ARGUMENTS --json -`; stdout must hold nothing else."""
        return json.loads(self(*arguments, "--json", "-", **options).stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    def refuses(self, *arguments, **options) -> str:
        """The error of a run that must end with 2, say why on stderr, and print nothing else there than text."""
        done = self(*arguments, status=2, **options)
        assert done.stderr.startswith("fattn: "), done.stderr
        assert all(c == "\n" or c.isprintable() for c in done.stderr), repr(done.stderr)
        return done.stderr


@pytest.fixture(scope="session")
def fattn() -> Cli:
    path = os.environ.get("FATTN_CLI", str(ROOT / "build" / "cli" / "fattn"))
    if not pathlib.Path(path).exists():
        pytest.fail(f"'{path}' does not exist; build the command line, or say in FATTN_CLI where it is")
    return Cli(os.path.abspath(path))


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    return ROOT


@pytest.fixture(scope="session")
def cuda_stub(fattn) -> dict:
    """The environment in which the library opens the tests' stub of the CUDA driver (tests/stub)."""
    path = pathlib.Path(fattn.path).parent.parent / "tests" / "libfattn_stub_cuda.so"
    if not path.exists():
        pytest.fail(f"'{path}' does not exist; build the target fattn_stub_cuda")
    return {"FATTN_CUDA_DRIVER": str(path)}
