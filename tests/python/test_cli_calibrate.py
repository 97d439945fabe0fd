"""fattn calibrate: measured once, kept, shown, refused to another machine; a GPU's by the stubs of driver and compiler."""
import json
import pathlib

import pytest

from conftest import schema_of, screen

QUICK = ["--repeats", "1", "--kernel-seconds", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def env(folder):
    return {"FATTN_CACHE_DIR": str(folder)}


@pytest.fixture(scope="module")
def kept(fattn, env, folder) -> pathlib.Path:
    assert "there is no calibration" in fattn.refuses("calibrate", "--show", env=env)
    fattn("calibrate", *QUICK, env=env)
    return folder / "calibration-cpu.json"


@pytest.fixture(scope="module")
def gpu(fattn, cuda_stub, env):
    tests = pathlib.Path(cuda_stub["FATTN_CUDA_DRIVER"]).parent
    return {**env, **cuda_stub, "FATTN_NVRTC": str(tests / "libfattn_stub_nvrtc.so"), "STUB_CUDA": "memory=67108864"}


def test_it_is_kept_and_shown(fattn, env, kept):
    record = json.loads(kept.read_text())
    schema_of(record).validate(record)
    shown = fattn("calibrate", "--show", "--json", "-", env=env)
    assert json.loads(shown.stdout) == record and "Measured before" in shown.stderr
    assert json.loads(fattn("calibrate", *QUICK, "--json", "-", env=env).stdout) == record, "it was measured anew"
    assert record["facts"]["threads"] >= 1 and record["measured"]["fma_flops_per_s"]["value"] > 1e8


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits(fattn, env, kept, width):
    lines = screen(fattn.in_terminal("calibrate", "--show", width=width, env=env))
    assert max(map(len, lines)) <= width and any("DRAM read" in line for line in lines)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda r: r["machine"].update(processor="Other"), "another machine's: its processor was 'Other', here it is"),
        (lambda r: r["machine"].update({"fattn version": "0.0.1"}), "its fattn version was '0.0.1'"),
        (lambda r: r.update(fattn_calibration=9), "version 9"),
        (lambda r: r["measured"].pop("call_s"), "no 'call_s'"),
        (lambda r: r["machine"].update(processor="\x1b[2J<script>"), "its processor was '\\x1b[2J<script>'"),
    ],
)
def test_anothers_is_refused(fattn, env, kept, spoil, words):
    good = kept.read_text()
    record = json.loads(good)
    spoil(record)
    kept.write_text(json.dumps(record))
    try:
        error = fattn.refuses("calibrate", "--show", env=env)
        assert words in " ".join(error.split()) and "fattn calibrate --force" in " ".join(error.split())
        assert json.loads(kept.read_text()) == record
    finally:
        kept.write_text(good)


def test_broken_ones_are_replaced(fattn, env, kept):
    kept.write_text(kept.read_text()[:500])
    assert "cut off" in fattn.refuses("calibrate", "--show", env=env)
    fattn("calibrate", *QUICK, env=env)
    schema_of(json.loads(kept.read_text())).validate(json.loads(kept.read_text()))


def test_bad_flags(fattn, env):
    assert "give one of them" in fattn.refuses("calibrate", "--show", "--force", env=env)
    assert "did you mean 'cuda'" in fattn.refuses("calibrate", "--device", "gpu", env=env)
    assert "calibration" in fattn.refuses("calibrate", *QUICK, env={"FATTN_CACHE_DIR": "/proc/nowhere"})
    error = fattn.refuses("calibrate", "--device", "cuda", env={**env, "FATTN_CUDA_DRIVER": "/nonexistent/libcuda.so.1"})
    assert "no usable CUDA driver" in error


def test_a_gpu(fattn, gpu, folder):
    record = json.loads(fattn("calibrate", "--device", "cuda", *QUICK, "--json", "-", env=gpu).stdout)
    schema_of(record).validate(record)
    assert record["device"] == "cuda" and record["machine"]["GPU"] == "Stub GPU 0"
    assert all(m["value"] > 0 for m in record["measured"].values())
    assert record["facts"]["multiprocessors"] == 132
    one, other = (json.loads(fattn("calibrate", "--device", f"cuda:{i}", *QUICK, "--json", "-", env=gpu).stdout) for i in (0, 1))
    assert one == record and other["machine"]["GPU"] == "Stub GPU 1"
    assert len(list(folder.glob("calibration-GPU-*.json"))) == 2


def test_kernels_of_a_gpu_are_compiled_before_they_are_timed(fattn, gpu, tmp_path):
    """By processes of their own; the time to measure in, which is too short for one call, compiles none."""
    flags = ["--device", "cuda", "--repeats", "1", "--kernel-seconds", "0.0001"]
    fattn("calibrate", *flags, "--json", tmp_path / "out.json", env={**gpu, "FATTN_CACHE_DIR": str(tmp_path)})
    described = [entry["description"] for entry in fattn.json("cache", "list", env={**gpu, "FATTN_CACHE_DIR": str(tmp_path)})["entries"]]
    assert {text.split(",")[0] for text in described} >= {"bf16", "fp32"} and len(described) > 100, described


def test_a_gpu_without_a_compiler(fattn, gpu, tmp_path):
    env = {**gpu, "FATTN_CACHE_DIR": str(tmp_path), "FATTN_NVRTC": "/nonexistent/libnvrtc.so.13"}
    record = json.loads(fattn("calibrate", "--device", "cuda", *QUICK, "--json", "-", env=env).stdout)
    schema_of(record).validate(record)
    assert all("libnvrtc" in m["reason"] for m in record["measured"].values())


def test_ratings_come_from_what_was_measured_here(fattn, tmp_path):
    """The words of bench, compare and sweep: without a calibration nothing is poor; with one, beside what fattn reached on this machine."""
    env = {"FATTN_CACHE_DIR": str(tmp_path)}
    tiny = ["--seqlen", "64", "--nheads", "2", "--headdim", "32", "--no-grad", "--repeats", "6", "--min-time", "0", "--warmup", "1"]
    [row] = fattn.json("bench", *tiny, env=env)["rows"]
    assert row["ceiling"]["rates"] == "run" and row["ceiling"]["rating"] in ("good", "fair", None) and row["ceiling"]["reach_fraction"] is None
    assert row["ceiling"]["fraction"] == pytest.approx(row["ceiling"]["least_s"] / row["time_median_s"])
    assert "least that is certain" in " ".join(fattn("bench", *tiny, env=env).stdout.split())
    fattn("calibrate", "--repeats", "1", "--kernel-seconds", "0", env=env)
    file = tmp_path / "calibration-cpu.json"
    calibration = json.loads(file.read_text())
    for reach, rating in ((1e-3, "good"), (1e6, "poor")):
        calibration["kernels"] = {"seconds": 1.0, "reach_fraction": reach, "reach_calls": 40, "families": {}}
        schema_of(calibration).validate(calibration)
        file.write_text(json.dumps(calibration))
        [row] = fattn.json("bench", *tiny, env=env)["rows"]
        assert row["ceiling"]["rates"] == "calibration" and row["ceiling"]["rating"] == rating and row["ceiling"]["reach_fraction"] == reach
        assert 0 < row["ceiling"]["fraction"] <= row["ceiling"]["accounted_fraction"]
        for arguments in (["bench", *tiny], ["compare", *tiny, "--provider", "fattn", "--provider", "standard"],
                          ["sweep", "--over", "seqlen", "--values", "32,64", *tiny[2:6], "--pass", "fwd", "--provider", "fattn", "--repeats", "6", "--min-time", "0"]):
            lines = screen(fattn.in_terminal(*arguments, width=80, env=env))
            assert all(len(line) <= 80 for line in lines)
            first = next(i for i, line in enumerate(lines) if line.startswith("---") and "rating" in lines[i - 1])
            assert rating in lines[first + 1], lines[first - 3:first + 3]
            assert "calls of `fattn calibrate`" in " ".join(lines)
