"""Output as people see it: it fits the terminal, is aligned, has colours where they belong, and loses nothing in a pipe or a file."""
import csv
import io
import json
import os
import re
import subprocess
import unicodedata

import pytest

from conftest import screen

TINY = ["--batch", "1", "--seqlen", "64", "--nheads", "2", "--headdim", "16", "--min-time", "0", "--repeats", "2", "--max-time", "0.1", "--warmup", "1"]
HELP = [[], ["info"], ["support"], ["run"], ["check"], ["bench"], ["compare"], ["sweep"], ["memory"], ["calibrate"], ["predict"], ["advise"], ["profile"], ["regress"], ["report"], ["watch"], ["lab"], ["cache"], *(["cache", sub] for sub in ("list", "path", "clear", "warm", "pack")), ["gpt2"], *(["gpt2", sub] for sub in ("info", "init", "export", "encode", "decode", "generate", "eval", "compare", "bench", "precision", "tokenize", "tokenizer", "train")), ["gpt2", "tokenizer", "train"]]
RULE = re.compile(r"-+(  -+)+")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def columns_of(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def too_long(lines: list[str], width: int) -> list[str]:
    return [line for line in lines if columns_of(line) > width]


NAMES = ["info", "support", "run", "check", "bench", "compare", "sweep", "memory", "calibrate", "predict", "advise", "profile", "regress", "lab", "cache", "gpt2"]


class Outputs:
    """Of one of every command that prints a table. Each is run once in each way that tests ask for."""

    def __init__(self, fattn, root, folder):
        self.fattn, self.known = fattn, {}
        # A kernel that nothing can load, so that there is a table of the cache without a compiler.
        kernels = folder / "kernels"
        kernels.mkdir(mode=0o700)
        (kernels / ("0123456789abcdef" * 4 + "-13.0.cubin")).write_bytes(b"no kernel")
        self.environment = {"FATTN_CACHE_DIR": str(folder)}
        self.commands = {
            "info": ["info"],
            "support": ["support"],
            "run": ["run", root / "examples/data/small.safetensors", folder / "out.safetensors", "--causal", "--verify"],
            "check": ["check", "--dtype", "bf16", "--filter", "-q7-"],
            "bench": ["bench", *TINY, "--causal", "--explain"],
            "compare": ["compare", *TINY, "--no-grad", "--causal", "--provider", "fattn", "--provider", "standard"],
            # Measured once, then taken from the record.
            "sweep": ["sweep", "--over", "seqlen", "--values", "16,32", "--pass", "fwd", *TINY[:2], *TINY[4:], "--json", folder / "sweep.json", "--resume"],
            "memory": ["memory", "--seqlen", "64", "--algorithm", "standard,v2"],
            "calibrate": ["calibrate", "--show"],
            "predict": ["predict", "--batch", "1", "--seqlen", "64", "--nheads", "2", "--headdim", "16"],
            "advise": ["advise", "--preset", "8gb", "--peak", "1e14", "--bandwidth", "1e12"],
            "profile": ["profile", *TINY, "--no-grad", "--calls", "1", "--out", folder / "profile"],
            "regress": ["regress", "--baseline", root / "docs/results/h200-headline.json", "--current", root / "docs/results/h200-headline.json", "--all"],
            "lab": ["lab", "--step", "3"],
            "cache": ["cache", "list"],
            "gpt2": ["gpt2", "info", "gpt2", "--memory"],
        }
        fattn("calibrate", "--repeats", "1", "--kernel-seconds", "0", env=self.environment)

    def terminal(self, name: str, width: int, *flags: str, **env: str) -> str:
        key = (name, width, flags, tuple(sorted(env.items())))
        if key not in self.known:
            self.known[key] = self.fattn.in_terminal(*self.commands[name], *flags, width=width, env={**self.environment, **env})
        return self.known[key]

    def lines(self, name: str, width: int, *flags: str, **env: str) -> list[str]:
        return screen(self.terminal(name, width, *flags, **env))

    def piped(self, name: str, *flags: str) -> str:
        """Stdout, with the ends of lines that it has."""
        if (name, flags) not in self.known:
            done = subprocess.run([self.fattn.path, *self.commands[name], *flags], capture_output=True, stdin=subprocess.DEVNULL, check=True,
                                  env={**os.environ, "COLUMNS": "", **self.environment})
            self.known[name, flags] = done.stdout.decode()
        return self.known[name, flags]

    def csv(self, name: str) -> list[list[list[str]]]:
        return tables_in(self.piped(name, "--format", "csv"))


@pytest.fixture(scope="session")
def outputs(fattn, root, tmp_path_factory) -> Outputs:
    return Outputs(fattn, root, tmp_path_factory.mktemp("terminal"))


def tables_in(text: str) -> list[list[list[str]]]:
    """Of CSV: tables of other columns come after an empty line."""
    assert text.endswith("\r\n") and "\n" not in text.replace("\r\n", "")
    tables = [[]]
    for row in csv.reader(io.StringIO(text, newline=""), strict=True):
        if row:
            tables[-1].append(row)
        else:
            tables.append([])
    return tables


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_fits(fattn, command, width):
    text = fattn.in_terminal(*command, "--help", width=width)
    lines = screen(text)
    assert not too_long(lines, width)
    assert len(lines) > 5 and COLOUR.search(text)


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_limits_in_help_are_words(fattn, command):
    text = fattn(*command, "--help").stdout
    assert not too_long(text.splitlines(), 80)
    assert not re.search(r"\b(U?INT|FLOAT|NONNEGATIVE|POSITIVE|NUMBER)\b|\bin \[|\{\w|\w:\w+ ?in ", text), text
    assert "\x1b" not in text


def test_limits_are_said(fattn):
    text = " ".join(fattn("bench", "--help").stdout.split())
    for words in ("(a whole number, 1 or more) [1024]", "(a whole number from 0 to 1024) [0]", "(fp32, bf16, fp16 or fp64) [fp32]", "(a number from 0 to 3600) [3]"):
        assert words in text, words


def test_alone_it_prints_its_help(fattn):
    assert fattn().stdout == fattn("--help").stdout
    assert fattn().stderr == ""


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("name", NAMES)
def test_tables_fit(outputs, name, width):
    lines = outputs.lines(name, width)
    assert not too_long(lines, width), "\n".join(lines)
    assert any(RULE.fullmatch(line) for line in lines), "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_piped_tables_fit_and_lose_nothing(outputs, name):
    piped = outputs.piped(name)
    assert not too_long(piped.splitlines(), 80), piped
    assert "\x1b" not in piped and "--wide" not in piped
    words = set(re.findall(r"[\w%]+", piped))
    for heading, *rows in outputs.csv(name):
        for column, cell in enumerate(heading):
            if cell not in ("table", "note", "what", "found") and any(row[column] for row in rows):
                missing = set(re.findall(r"[\w%]+", re.sub(r" \((s|bytes)\)$", "", cell))) - words
                assert not missing, (cell, missing)


def test_what_a_narrow_terminal_leaves_out_is_said(outputs):
    narrow, wide = outputs.lines("compare", 80), outputs.lines("compare", 80, "--wide")
    note = next(line for line in narrow if "more with --wide" in line)
    left_out = int(re.match(r"(\d+) columns? more with --wide: ", note).group(1))
    assert not any("more with --wide" in line for line in wide) and max(map(len, wide)) > 80

    def columns(lines: list[str]) -> int:
        return len(next(line for line in lines if RULE.fullmatch(line)).split())

    assert columns(wide) == columns(narrow) + left_out > columns(narrow) > 4
    assert columns(outputs.lines("compare", 200)) == columns(wide)


def test_columns_are_aligned(outputs):
    """Numbers end where their column ends, text begins where it begins, and no heading is broken inside a word."""
    lines = outputs.lines("compare", 80)
    at = next(i for i, line in enumerate(lines) if RULE.fullmatch(line))
    spans = [match.span() for match in re.finditer("-+", lines[at])]
    heading = lines[lines.index("forward (fwd)") + 1:at]
    names = [" ".join(line[begin:end].strip() for line in heading if line[begin:end].strip()) for begin, end in spans]
    assert names[0] == "provider" and "vs standard" in names and "extra memory" in names, names
    rows = lines[at + 1:at + 3]
    assert rows[0].startswith("fattn ") and rows[1].startswith("standard ")
    text = [name for name in names if name in ("provider", "rating") or name.startswith("worst error")]
    for row in [*heading, *rows]:
        for (begin, end), name in zip(spans, names):
            cell = row[begin:end]
            assert not cell.strip() or (cell[0] if name in text else cell.ljust(end - begin)[-1]) != " ", (name, row)
        assert not "".join(row[end:begin] for (_, end), (begin, _) in zip(spans, spans[1:])).strip(), row


@pytest.mark.parametrize("name", ["info", "check", "compare", "run"])
def test_colours(outputs, name):
    assert COLOUR.search(outputs.terminal(name, 80))
    assert "\x1b" not in outputs.piped(name)


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("name", ["info", "check", "run"])
def test_no_colours_where_they_are_not_wanted(outputs, name, plain):
    assert not COLOUR.search(outputs.terminal(name, 80, **plain))


def test_colours_say_what_is_good(outputs):
    text = outputs.terminal("check", 80)
    assert re.search(r"\x1b\[32mAll \d+ cases passed\x1b\[0m", text)
    assert "\x1b[31m" not in text


def test_columns_variable(fattn):
    for columns, most in (("60", 60), ("120", 120), ("10", 40), ("nonsense", 80), ("0", 80)):
        lines = fattn("bench", "--help", env={"COLUMNS": columns}).stdout.splitlines()
        assert most - 15 < max(map(columns_of, lines)) <= most, columns
    assert not too_long(screen(fattn.in_terminal("info", width=200, env={"COLUMNS": "70"})), 70)


@pytest.mark.parametrize("name", NAMES)
def test_csv(outputs, name):
    for table in outputs.csv(name):
        assert len(table) > 1 and len({len(row) for row in table}) == 1, table
        assert all(table[0]) and len(set(table[0])) == len(table[0]), table[0]


def test_csv_has_all_digits(outputs):
    heading, *rows = outputs.csv("compare")[0]
    assert heading[:3] == ["table", "provider", "median (s)"] and len(rows) == 2
    for row in (dict(zip(heading, row)) for row in rows):
        assert 0 < float(row["median (s)"]) < 10 and len(row["median (s)"]) > 8
        assert int(row["extra memory (bytes)"]) > 0


def test_csv_words_go_to_stderr(fattn):
    done = fattn("check", "--dtype", "bf16", "--filter", "-q7-", "--format", "csv")
    assert "passed" in done.stderr and done.stdout.startswith("dtype,")


@pytest.mark.parametrize("name", NAMES)
def test_markdown(outputs, name):
    found = 0
    for table in outputs.piped(name, "--format", "markdown").strip().split("\n\n"):
        rows = [line for line in table.splitlines() if line.startswith("|")]
        if not rows:
            assert re.fullmatch(r"\*\*.+\*\*", table), table
            continue
        found += 1
        assert len(rows) == len(table.splitlines()) > 2 and re.fullmatch(r"\|((:--|--:)\|)+", rows[1]), table
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, table
    assert found > 0


def test_bars_and_commas_in_cells(fattn):
    """A value from outside that holds what the formats are made of, and characters of two columns."""
    nasty = '/no|such,"folder"/' + "多" * 30
    env = {"FATTN_OPENBLAS": nasty}
    done = subprocess.run([fattn.path, "info", "--format", "csv"], capture_output=True, env={**os.environ, **env}, check=True)
    row = next(row for table in tables_in(done.stdout.decode()) for row in table if "FATTN_OPENBLAS" in row)
    assert f"'{nasty}'" in row
    lines = fattn("info", "--format", "markdown", env=env).stdout.splitlines()
    line = next(line for line in lines if "FATTN_OPENBLAS |" in line)
    assert "/no\\|such" in line and len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", lines[lines.index(line) - 1]))
    for width in (60, 80, 200):
        assert not too_long(screen(fattn.in_terminal("info", width=width, env=env)), width)


def test_json_beside_a_format(fattn):
    done = fattn("info", "--json", "-", "--format", "csv")
    assert json.loads(done.stdout)["fattn_info"] == 1


def test_conclusion_of_a_comparison(outputs):
    """What `make run` is for, in words, at its end."""
    lines = outputs.piped("compare").splitlines()
    words = " ".join(" ".join(lines[lines.index("In short"):]).split())
    assert re.search(r"Same answer: o and lse are within the error bound of attention in float64", words)
    assert re.search(r"(times as fast|times slower|As fast, within what can be measured): the forward pass takes [\d.]+ [mu]?s, standard attention [\d.]+ [mu]?s", words)
    assert "beside the inputs" in words and "compare --seqlen" in words.partition("Next")[2] and "--help" in words


def test_conclusion_needs_both(fattn):
    assert "In short" not in fattn("compare", *TINY, "--no-grad", "--provider", "fattn").stdout


def test_errors_fit_the_terminal(fattn):
    lines = screen(fattn.in_terminal("check", "--dtype", "fp8", width=60, status=2))
    assert lines[0].startswith("fattn: ") and not too_long(lines, 60)
