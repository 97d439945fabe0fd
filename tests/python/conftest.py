"""Runs the built command line, whose path is in FATTN_CLI, as a person would."""
import base64
import functools
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import jsonschema
import pytest
import referencing

from terminal import Terminal

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # what a tool imports lies beside it


@functools.cache
def schemas() -> dict[str, jsonschema.Draft202012Validator]:
    """docs/NAME.schema.json by NAME; they refer to each other by their file names."""
    contents = {path.name: json.loads(path.read_text()) for path in (ROOT / "docs").glob("*.schema.json")}
    registry = referencing.Registry().with_resources((name, referencing.Resource.from_contents(schema)) for name, schema in contents.items())
    for schema in contents.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    return {name.split(".")[0]: jsonschema.Draft202012Validator(schema, registry=registry) for name, schema in contents.items()}


def schema_of(record: dict) -> jsonschema.Draft202012Validator:
    """A record begins with the key that names it: fattn_run."""
    return schemas()[next(iter(record)).removeprefix("fattn_")]


class Cli:
    def __init__(self, path: str):
        self.path = path

    def __call__(self, *arguments, status: int = 0, timeout: float = 120, env: dict | None = None, **options) -> subprocess.CompletedProcess:
        """Runs `fattn ARGUMENTS`, which must end with this status; stdout and stderr are text. `input` is what comes on stdin, if anything does."""
        if "input" not in options:
            options["stdin"] = subprocess.DEVNULL
        done = subprocess.run(
            [self.path, *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout,
            env={**os.environ, **(env or {})},
            **options,
        )
        assert done.returncode == status, f"exit {done.returncode}, not {status}\n{done.stdout}\n{done.stderr}"
        return done

    def unread(self, *arguments, **options) -> subprocess.CompletedProcess:
        """Runs `fattn ARGUMENTS` with a pipe as stdout whose reader has left already: nothing depends on who is faster."""
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return subprocess.run([self.path, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, **options)
        finally:
            os.close(writer)

    def in_terminal(self, *arguments, width: int, status: int = 0, env: dict | None = None) -> str:
        """What `fattn ARGUMENTS` writes to a terminal of so many columns, escape sequences and all; stdout and stderr are the same."""
        with Terminal([self.path, *arguments], width, env, stdin=subprocess.DEVNULL) as terminal:
            text = terminal.rest().replace("\r\n", "\n")
            assert terminal.process.returncode == status, text
            return text

    def json(self, *arguments, **options) -> dict:
        """The record of `fattn ARGUMENTS --json -`, which must keep to its schema; stdout must hold nothing else."""
        record = json.loads(self(*arguments, "--json", "-", **options).stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        schema_of(record).validate(record)
        return record

    def refuses(self, *arguments, **options) -> str:
        """The error of a run that must end with 2, say why on stderr, and print nothing else there than text."""
        done = self(*arguments, status=2, **options)
        assert done.stderr.startswith("fattn: "), done.stderr
        assert all(c == "\n" or c.isprintable() for c in done.stderr), repr(done.stderr)
        return done.stderr


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end: without colours, with what was written over an erased line."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in re.split("\r|(?=\x1b\\[K)", line):
            if part.startswith("\x1b[K"):
                shown, part = "", part[3:]
            shown = part + shown[len(part):]
        lines.append(re.sub(r"\x1b\[[0-9;]*m", "", shown))
    return lines


@pytest.fixture(scope="session")
def fattn() -> Cli:
    path = os.environ.get("FATTN_CLI", str(ROOT / "build" / "cli" / "fattn"))
    if not pathlib.Path(path).exists():
        pytest.fail(f"'{path}' does not exist; build the command line, or say in FATTN_CLI where it is")
    return Cli(os.path.abspath(path))


@pytest.fixture(scope="session")
def schema() -> jsonschema.Draft202012Validator:
    """Of bench, compare and the suite."""
    return schemas()["record"]


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


@pytest.fixture(scope="session")
def data(fattn, tmp_path_factory) -> pathlib.Path:
    """Texts of bytes as token files, for runs of GPT-2: the last step of an epoch has less than all batches."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "tok").mkdir()
    (folder / "tok" / "bytes.tiktoken").write_text("".join(f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256)))
    draw = random.Random(1)
    for i in range(6):
        (folder / f"{i}.txt").write_text(" ".join(draw.choice(["alpha", "beta", "gamma", "delta", "one", "two"]) for _ in range(70)))
    fattn("gpt2", "tokenize", folder / "tok", *(folder / f"{i}.txt" for i in range(6)), "--out", folder / "tokens", "--validation", 0.2, "--threads", 1)
    return folder / "tokens"
