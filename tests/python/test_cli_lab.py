"""`fattn lab`: every step in both languages, and what it does on a terminal."""
import json
import math
import re
import unicodedata

import pytest

from terminal import Terminal

NAMES = ["whole_matrix", "tiles", "online_softmax", "backward", "masks"]


@pytest.fixture(scope="module")
def english(fattn, tmp_path_factory):
    """What all steps print in a pipe, and their record."""
    file = tmp_path_factory.mktemp("lab") / "lab.json"
    done = fattn("lab", "--json", file)
    assert done.stderr == ""
    return done.stdout, json.loads(file.read_text())


def columns_of(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def test_all_steps_in_a_pipe(english):
    text, record = english
    assert [step["name"] for step in record["steps"]] == NAMES
    assert len(re.findall(r"^Step \d of 5: ", text, re.M)) == text.count("Question: ") == text.count("Answer: ") == 5
    assert "\x1b" not in text and "Enter" not in text
    assert all(columns_of(line) <= 80 for line in text.splitlines())
    assert len(re.findall(r"[\u2801-\u28ff]", text)) > 200, "no plots"


def test_numbers_are_right(english):
    steps = {step["name"]: step for step in english[1]["steps"]}
    for name in ("whole_matrix", "backward"):
        v2 = [row for row in steps[name]["rows"] if row["algorithm"] == "v2"]
        assert len(v2) == 4 and all(row["status"] == "ok" for row in v2)
        # Memory grows less than twice for twice the length.
        assert all(a["extra_bytes"] < b["extra_bytes"] < 2.01 * a["extra_bytes"] for a, b in zip(v2, v2[1:]))
    moved = steps["tiles"]["rows"]
    assert 3.5 < moved[-1]["v2_bytes"] / moved[-2]["v2_bytes"] <= 4 < moved[-1]["standard_bytes"] / moved[-1]["inputs_and_outputs_bytes"]
    scores, last = [1, 3, 2, -1, 7, 0, 6, 7.5], steps["online_softmax"]["rows"][-1]
    weights = [math.exp(s - 7.5) for s in scores]
    assert math.isclose(last["l"], sum(weights), rel_tol=1e-12) and math.isclose(last["a"], sum(i * w for i, w in enumerate(weights)), rel_tol=1e-12)
    causal = [row for row in steps["masks"]["rows"] if row["causal"] and row["window_left"] < 0]
    for row in causal:
        tiles = row["seqlen"] // 64
        assert math.isclose(row["tiles_fraction"], (tiles + 1) / (2 * tiles))


@pytest.mark.parametrize("step", range(1, 6))
def test_one_step_in_chinese(fattn, step):
    text = fattn("lab", "--step", step, "--lang", "zh-TW").stdout
    assert len(re.findall(rf"^第 {step} 步，共 5 步：", text, re.M)) == 1 and text.count("答案：") == 1
    assert all(columns_of(line) <= 80 for line in text.splitlines()), text
    # No line begins with what closes something.
    assert not re.search(r"^\s*[，。、；：！？）]", text, re.M)


def test_a_terminal_waits_for_enter(fattn):
    """The answer comes behind Enter, not before."""
    with Terminal([fattn.path, "lab", "--step", "3"]) as terminal:
        assert "Answer" not in terminal.until("(Enter shows the answer)")
        terminal.write(b"\n")
        assert "exp(3 - 7)" in terminal.until("approximated.")
        terminal.rest(timeout=20)
        assert terminal.process.returncode == 0


def test_the_end_of_the_input_is_no_end(fattn):
    """Ctrl-D goes on."""
    with Terminal([fattn.path, "lab", "--step", "3"]) as terminal:
        terminal.write(b"\x04")
        assert "approximated." in terminal.rest(timeout=60)
        assert terminal.process.returncode == 0


@pytest.mark.parametrize("arguments, expected", [
    (["--step", "6"], "--step: 6 is not in range; allowed: from 1 to 5"),
    (["--lang", "fr"], "'fr' is not known; allowed: en or zh-TW"),
    (["--json", "/nonexistent/x.json"], "/nonexistent"),
    (["--device", "cuda", "--step", "1"], "no usable CUDA driver"),
])
def test_bad_input(fattn, arguments, expected):
    assert expected in " ".join(fattn.refuses("lab", *arguments, env={"FATTN_CUDA_DRIVER": "/nonexistent/libcuda.so.1"}).split())
