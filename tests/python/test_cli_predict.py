"""fattn predict: memory without a calibration, time from one, whose arithmetic is checked here; records scored; held-out shapes, stopped and gone on with."""
import json
import pathlib
import re

import pytest

from conftest import schema_of, screen

FAMILIES = ["cpu v2 forward", "cpu v2 decode", "cpu v2 backward"]
EACH = {"products": 2e-11, "scores": 1e-9, "calls": 2e-6, "tasks": 1e-7, "bytes beyond L3": 3e-11, "keys read": 5e-11}
PROBLEM = ["--batch", "2", "--seqlen", "200", "--nheads", "4", "--nheads-k", "2", "--headdim", "64", "--causal"]
HELD_OUT = ["predict", "--held-out", "3", "--seed", "4", "--held-out-seconds", "0.002"]


@pytest.fixture(scope="module")
def env(fattn, tmp_path_factory) -> dict:
    """A folder with a calibration whose constants are EACH."""
    env = {"FATTN_CACHE_DIR": str(tmp_path_factory.mktemp("calibrated"))}
    fattn("calibrate", "--repeats", "1", "--kernel-seconds", "0", env=env)
    file = pathlib.Path(env["FATTN_CACHE_DIR"]) / "calibration-cpu.json"
    record = json.loads(file.read_text())
    isa = record["machine"]["instruction set"]
    names = [f"{family} {dtype} {name}" for family in FAMILIES for dtype in ("fp32", "fp16", "bf16") for name in (isa, "avx512")]
    names += [f"reference {way} fp64" for way in ("forward", "backward")]
    family = {"samples": 30, "mean_error_fraction": 0.05, "error_90_fraction": 0.1, "seconds_each": EACH}
    record["kernels"] = {"seconds": 1.0, "families": {name: family for name in names}}
    schema_of(record).validate(record)
    file.write_text(json.dumps(record))
    return env


@pytest.fixture(scope="module")
def measured(fattn) -> dict:
    """The record of the problem, measured."""
    return fattn.json("bench", *PROBLEM, "--repeats", "2", "--min-time", "0", "--max-time", "0.1", "--warmup", "0")


@pytest.fixture()
def bare(tmp_path) -> dict:
    return {"FATTN_CACHE_DIR": str(tmp_path)}


def test_memory_needs_no_calibration(fattn, bare, measured):
    record = fattn.json("predict", *PROBLEM, env=bare)
    assert [row["extra_bytes"] for row in record["rows"]] == [row["extra_bytes"] for row in measured["rows"]]
    assert record["calibrated"] is None and all(row["predicted_s"] is None and "fattn calibrate" in row["unknown"] for row in record["rows"])
    assert "fattn calibrate" in fattn("predict", *PROBLEM, env=bare).stdout


def test_time_is_counts_times_constants(fattn, env):
    record = fattn.json("predict", *PROBLEM, env=env)
    forward, backward, both = record["rows"]
    for row in (forward, backward):
        for amount in row["amounts"]:
            assert amount["seconds"] == pytest.approx(amount["count"] * EACH.get(amount["name"], 0))
        assert row["predicted_s"] == pytest.approx(sum(amount["seconds"] for amount in row["amounts"]))
        assert row["predicted_low_s"] == pytest.approx(row["predicted_s"] / 1.1) and row["predicted_high_s"] == pytest.approx(row["predicted_s"] * 1.1)
        assert row["binds"] == max(row["amounts"], key=lambda amount: amount["seconds"])["name"]
    assert both["predicted_s"] == pytest.approx(forward["predicted_s"] + backward["predicted_s"])
    window = fattn.json("predict", *PROBLEM, "--window-left", "16", "--no-grad", env=env)
    assert window["rows"][0]["predicted_s"] < forward["predicted_s"]
    options = fattn.json("predict", *PROBLEM, "--dropout", "0.1", env=env)
    assert all(row["predicted_s"] is None and "dropout" in row["unknown"] for row in options["rows"])
    assert [row["without_options_s"] for row in options["rows"]] == [row["predicted_s"] for row in record["rows"]]
    assert "Without dropout it takes fwd " in fattn("predict", *PROBLEM, "--dropout", "0.1", env=env).stdout


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_the_terminal(fattn, env, width):
    lines = screen(fattn.in_terminal("predict", *PROBLEM, "--explain", width=width, env=env))
    assert all(len(line) <= width for line in lines), lines
    assert any("products" in line for line in lines)


def test_against_a_record(fattn, env, measured, tmp_path):
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(measured))
    record = fattn.json("predict", "--against", bench, env=env)
    scores = record["scores"]
    for row, other in zip(record["rows"], measured["rows"], strict=True):
        assert row["measured_s"] == other["time_median_s"]
        assert row["error_fraction"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert scores[row["pass"]]["mean_absolute_error_fraction"] == pytest.approx(abs(row["error_fraction"]))
        assert scores[row["pass"]]["memory_exact"] == scores[row["pass"]]["memory_count"] == 1
    of_gpu = json.loads(bench.read_text())
    for row in of_gpu["rows"]:
        row["device"] = "cuda:0"
    bench.write_text(json.dumps(of_gpu))
    assert "cuda" in fattn.refuses("predict", "--against", bench, env=env | {"FATTN_CUDA_DRIVER": "/nonexistent"}), "the record's own device"
    assert "on the CPU" in fattn.refuses("predict", "--against", bench, "--device", "cpu", env=env)
    bench.write_text(json.dumps(measured))
    spoiled = json.loads(bench.read_text())
    spoiled["environment"]["cpu"]["model"] = "Another <script>"
    bench.write_text(json.dumps(spoiled))
    assert "another machine" in fattn.refuses("predict", "--against", bench, env=env)
    bench.write_text(bench.read_text()[:200])
    assert "cut off" in fattn.refuses("predict", "--against", bench, env=env)
    bench.write_text("{}")
    assert "no record" in fattn.refuses("predict", "--against", bench, env=env)
    assert "cannot be read: Is a directory" in fattn.refuses("predict", "--against", tmp_path, env=env)


def test_against_a_race_of_algorithms(fattn, env, tmp_path):
    """Each that this library computed counts: rows of v2 are predicted, of v1, which no calibration times, the reason is said."""
    race = tmp_path / "race.json"
    fattn("compare", *PROBLEM, "--no-grad", "--algorithm", "standard,v1,v2", "--repeats", "2", "--min-time", "0", "--max-time", "0.1", "--warmup", "0", "--json", race, env=env)
    record = fattn.json("predict", "--against", race, env=env)
    standard, v1, v2 = record["rows"]
    assert "cpu standard" in standard["kernel"] and "cpu v1" in v1["kernel"] and "cpu v2" in v2["kernel"]
    assert v2["predicted_s"] > 0 and record["scores"]["fwd"]["count"] == 1
    assert "fattn bench --algorithm v1" in v1["unknown"] and "--kernel-seconds" in standard["unknown"]
    alone = fattn("predict", *PROBLEM, "--algorithm", "v1", env=env).stdout
    assert "fattn bench --algorithm v1" in " ".join(alone.split())


def test_held_out_shapes_and_going_on(fattn, env, tmp_path):
    file = tmp_path / "held.json"
    fattn(*HELD_OUT, "--json", file, env=env)
    record = json.loads(file.read_text())
    schema_of(record).validate(record)
    assert record["complete"] and len(record["rows"]) == 6 and [row["pass"] for row in record["rows"]] == ["fwd", "bwd"] * 3
    for name in ("fwd", "bwd"):
        rows = [row for row in record["rows"] if row["pass"] == name]
        errors = sorted(abs(row["error_fraction"]) for row in rows)
        assert record["scores"][name]["mean_absolute_error_fraction"] == pytest.approx(sum(errors) / len(errors))
        assert record["scores"][name]["error_95_fraction"] == pytest.approx(errors[-1])
        assert record["scores"][name]["memory_exact"] == record["scores"][name]["memory_count"] == 3
    assert all(row["measured_extra_bytes"] == row["extra_bytes"] > row["workspace_bytes"] for row in record["rows"])
    # Stopped after the first shape.
    record["rows"], record["complete"] = record["rows"][:2], False
    file.write_text(json.dumps(record))
    out = fattn(*HELD_OUT, "--json", file, "--resume", env=env).stdout
    again = json.loads(file.read_text())
    assert "1 of 3 shapes were measured before" in out and again["complete"] and len(again["rows"]) == 6
    assert again["rows"][0]["measured_s"] == record["rows"][0]["measured_s"]
    assert again["rows"][0]["measured_extra_bytes"] == record["rows"][0]["extra_bytes"] and again["scores"]["fwd"]["memory_count"] == 3
    other = [*HELD_OUT[:4], "5", *HELD_OUT[5:]]
    before = file.read_bytes()
    assert "other flags" in fattn.refuses(*other, "--json", file, "--resume", env=env)
    assert file.read_bytes() == before


def test_what_is_refused(fattn, env, bare):
    assert "problems of its own" in fattn.refuses("predict", "--held-out", "2", "--batch", "3", env=env)
    assert "fattn calibrate" in fattn.refuses(*HELD_OUT, env=bare)
    assert "needs --json FILE" in fattn.refuses(*HELD_OUT, "--resume", env=env)
    assert "cannot be read: No such file" in fattn.refuses("predict", "--against", "/nonexistent", env=env)
    fattn.refuses("predict", "--held-out", "0", env=env)
    fattn.refuses("predict", "--headdim", "-1", env=env)


def test_constants_are_measured(fattn, bare):
    fattn("calibrate", "--repeats", "1", "--kernel-seconds", "1.5", env=bare)
    record = json.loads(fattn("calibrate", "--show", "--json", "-", env=bare).stdout)
    schema_of(record).validate(record)
    said = " ".join(fattn("calibrate", "--show", env=bare).stdout.split())
    seldom = record["kernels"]["too_few"]
    assert seldom and not seldom.keys() & record["kernels"]["families"].keys()
    assert f"{len(seldom)} of {len(seldom) + len(record['kernels']['families'])} families of kernels were called too few times" in said
    assert re.search(r"with --kernel-seconds \d+, `fattn calibrate --force` makes more calls", said)
    assert record["kernels"]["seconds"] >= 1.5 and all(family["samples"] > 1 for family in record["kernels"]["families"].values())
    record["kernels"]["families"] = {"x": {"samples": 1}}
    next(pathlib.Path(bare["FATTN_CACHE_DIR"]).glob("calibration-*.json")).write_text(json.dumps(record))
    assert "of its 'kernels'" in fattn.refuses("calibrate", "--show", env=bare)
