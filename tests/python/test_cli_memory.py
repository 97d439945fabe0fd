"""fattn memory: counts and their arithmetic, with and without a calibration, against what allocation takes; figures; refusals."""
import json
import pathlib
import re
import xml.etree.ElementTree as xml

import pytest

from conftest import schema_of, screen

SMALL = ["--batch", "2", "--seqlen", "200", "--nheads", "4", "--nheads-k", "2", "--headdim", "32", "--causal"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return {"FATTN_CACHE_DIR": str(tmp_path_factory.mktemp("bare"))}


@pytest.fixture(scope="module")
def calibrated(fattn, tmp_path_factory):
    env = {"FATTN_CACHE_DIR": str(tmp_path_factory.mktemp("calibrated"))}
    fattn("calibrate", "--repeats", "1", "--kernel-seconds", "0", env=env)
    return env


def counted(record: dict, pass_: str = "fwd") -> dict[str, dict]:
    (traffic,) = [p for p in record["passes"] if p["pass"] == pass_]
    return {a["algorithm"]: a for a in traffic["algorithms"] if a["reason"] is None}


def test_without_a_calibration_it_counts_and_says_what_it_lacks(fattn, bare):
    record = fattn.json("memory", *SMALL, env=bare)
    assert "fattn calibrate" in record["machine"]["lacks"]
    for pass_ in ("fwd", "bwd"):
        for algorithm in counted(record, pass_).values():
            assert algorithm["binding"] is None and all(limit["seconds"] is None for limit in algorithm["limits"])
    text = fattn("memory", *SMALL, env=bare).stdout
    assert "No limits and no roofline" in text and "fattn calibrate" in " ".join(text.split())


def test_with_one_the_longest_limit_binds(fattn, calibrated):
    record = fattn.json("memory", *SMALL, env=calibrated)
    assert record["machine"]["lacks"] is None
    for pass_ in ("fwd", "bwd"):
        for algorithm in counted(record, pass_).values():
            known = {limit["name"]: limit["seconds"] for limit in algorithm["limits"] if limit["seconds"] is not None}
            assert algorithm["bound_s"] == max(known.values()) == known[algorithm["binding"]]
            assert algorithm["moved_bytes"] == sum(t["bytes"] for t in algorithm["terms"])
            assert algorithm["dram_bytes"] == pytest.approx(sum(t["dram_bytes"] for t in algorithm["terms"]))


@pytest.mark.parametrize("flags", [[*SMALL, "--dtype", "bf16"], ["--seqlen", "5", "--seqlen-k", "700", "--causal"]], ids=str)
def test_memory_is_what_a_call_allocates(fattn, bare, flags):
    """Of our kernels to the byte: what bench counted as it allocated it."""
    step = {s["algorithm"]: s for s in fattn.json("memory", *flags, "--algorithm", "v2", env=bare)["steps"]}["v2"]
    rows = fattn.json("bench", *flags, "--backend", "cpu", "--min-time", "0", "--repeats", "1", "--warmup", "0")["rows"]
    extra = {row["pass"]: row["memory"]["extra_bytes"] if "memory" in row else row["extra_bytes"] for row in rows}
    tensors = {t["name"]: t["bytes"] for t in step["tensors"]}
    inputs = tensors["q"] + tensors["k and v"]
    assert step["exact"] and extra["fwd"] == step["forward_bytes"] - inputs
    assert extra["bwd"] == step["backward_bytes"] - inputs - tensors["dout"]
    assert step["peak_bytes"] == max(step["forward_bytes"], step["backward_bytes"])


def test_every_number_has_its_arithmetic(fattn, calibrated):
    text = " ".join(fattn("memory", *SMALL, "--algorithm", "v2,standard", "--explain", env=calibrated).stdout.split())
    assert "Theta(N^2 d^2 / M)" in text and not re.search(r"\bO\(N\)", text)
    found = re.findall(r"(\d+) (?:key )?heads \* ([\d* a-z]+?) bytes = (\d+)", text)
    assert len(found) > 10
    for heads, factors, product in found:
        value = int(heads)
        for factor in re.findall(r"\d+", factors):
            value *= int(factor)
        assert value == int(product)
    assert "<- binds" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits(fattn, calibrated, width):
    lines = screen(fattn.in_terminal("memory", *SMALL, "--explain", width=width, env=calibrated))
    assert max(map(len, lines)) <= width, [line for line in lines if len(line) > width]
    assert any("roof" in line for line in lines)


def test_the_figure(fattn, calibrated, bare, tmp_path):
    drawn = tmp_path / "memory.svg"
    fattn("memory", *SMALL, "--figure", drawn, env=calibrated)
    texts = ["".join(e.itertext()) for e in xml.parse(drawn).iter() if e.tag.endswith("text")]
    assert "Forward: core to L3" in texts and "Backward: bytes moved" in texts
    assert "FATTN" not in drawn.read_text() and "nan" not in drawn.read_text()
    fattn("memory", *SMALL, "--no-grad", "--figure", drawn, env=bare)
    assert "no calibration" in drawn.read_text()


def test_a_gpu(fattn, cuda_stub, bare):
    tests = pathlib.Path(cuda_stub["FATTN_CUDA_DRIVER"]).parent
    env = {**bare, **cuda_stub, "FATTN_NVRTC": str(tests / "libfattn_stub_nvrtc.so"), "STUB_CUDA": "registers=168"}
    record = fattn.json("memory", *SMALL, "--device", "cuda", "--dtype", "bf16", env=env)
    assert record["machine"]["workers"] == 132 and record["machine"]["cache"] == "L2"
    forward = counted(record)
    assert set(forward) == {"standard", "v1", "v2", "v3"} and all(a["counted_by"] == "our loops" for a in forward.values())
    steps = {s["algorithm"]: s for s in record["steps"]}
    assert steps["v3"]["exact"] and steps["v2"]["peak_bytes"] < steps["textbook"]["peak_bytes"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--window-left", "8"], "leave out window"),
        (["--alibi"], "leave out"),
        (["--dropout", "0.1"], "leave out"),
        (["--softcap", "20"], "leave out"),
        (["--dtype", "fp64"], "fp64 runs on the reference alone"),
        (["--algorithm", "v2,v4"], "v4"),
        (["--algorithm", ""], "--algorithm"),
        (["--seqlen", "0"], "--seqlen"),
        (["--seqlen", str(2**40), "--batch", str(2**40)], "more bytes than any machine"),
        (["--seqlen", "99999999999999", "--causal"], "more bytes than any machine"),  # at once: no loop goes through its blocks
        (["--nheads", "3", "--nheads-k", "2"], "nheads"),
        (["--preset", "gpt2-smal"], "did you mean 'gpt2-small'"),
        (["--device", "cuda"], "no usable CUDA driver"),
    ],
    ids=str,
)
def test_bad_input(fattn, bare, tmp_path, flags, words):
    record = tmp_path / "kept.json"
    record.write_text("{}")
    error = fattn.refuses("memory", *flags, "--json", record, env={**bare, "FATTN_CUDA_DRIVER": "/nonexistent/libcuda.so.1"})
    assert words in " ".join(error.split()), error
    assert record.read_text() == "{}"


def test_no_record_where_it_cannot_be_written(fattn, bare):
    assert "/nonexistent" in fattn.refuses("memory", *SMALL, "--json", "/nonexistent/x.json", env=bare)
    assert "/nonexistent" in fattn.refuses("memory", *SMALL, "--figure", "/nonexistent/x.svg", env=bare)
    assert "'x.png' is not the name of an .svg file" in fattn.refuses("memory", *SMALL, "--figure", "x.png", env=bare)


def test_another_machines_calibration_is_not_used(fattn, calibrated, tmp_path):
    record = json.loads((pathlib.Path(calibrated["FATTN_CACHE_DIR"]) / "calibration-cpu.json").read_text())
    schema_of(record).validate(record)
    record["machine"]["processor"] = "Another"
    (tmp_path / "kernels").mkdir(mode=0o700)
    (tmp_path / "calibration-cpu.json").write_text(json.dumps(record))
    found = fattn.json("memory", *SMALL, env={"FATTN_CACHE_DIR": str(tmp_path)})
    assert "another machine's" in found["machine"]["lacks"] and found["machine"]["flops_per_s"] is None
