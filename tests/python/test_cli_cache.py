"""`fattn cache`: the folder of compiled kernels. Compiling needs NVRTC; those tests are skipped without it."""
import json
import os
import pathlib

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv("FATTN_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compiler(fattn, folder) -> None:
    nvrtc = [library for library in fattn.json("info")["libraries"] if library["name"] == "NVRTC"]
    if not nvrtc or not nvrtc[0]["loaded"]:
        pytest.skip("there is no NVRTC here")


def test_help_lists_every_command(fattn):
    text = fattn("cache", "--help").stdout
    for command in ("list", "path", "clear", "warm", "pack"):
        assert f"\n  {command} " in text
        assert "FILE|-" in fattn("cache", command, "--help").stdout


def test_path(fattn, folder):
    assert fattn("cache", "path").stdout == f"{folder}\n"
    record = fattn.json("cache", "path")
    assert record["path"] == str(folder) and record["usable"] is True and record["entries"] == 0


def test_path_that_cannot_be_used(fattn):
    done = fattn("cache", "path", status=1, env={"FATTN_CACHE_DIR": "/dev/null/x"})
    assert done.stdout == "/dev/null/x/kernels\n" and "not usable: the folder /dev/null/x/kernels cannot be made" in done.stderr
    done = fattn("cache", "path", status=1, env={"FATTN_CACHE_DIR": "relative"})
    assert "FATTN_CACHE_DIR is 'relative'; it must be an absolute path" in done.stderr


def test_a_folder_with_a_wild_name_is_printed_harmlessly(fattn, tmp_path):
    done = fattn("cache", "path", env={"FATTN_CACHE_DIR": f"{tmp_path}/a\x1b[2Jb"})
    assert "\x1b" not in done.stdout and "a\\x1b[2Jb" in done.stdout


def test_empty(fattn, folder):
    assert fattn("cache", "list").stdout.startswith("0 kernels, ")
    assert fattn.json("cache", "list")["entries"] == []
    assert fattn.json("cache", "clear")["entries"] == 0


def test_damaged_entries_are_listed_and_cleared(fattn, folder):
    folder.mkdir(mode=0o700)
    (folder / ("a" * 64 + "-13.0.cubin")).write_text("no kernel")
    assert "damaged: it is cut off" in fattn("cache", "list").stdout
    assert fattn.json("cache", "list")["entries"][0]["damage"] == "it is cut off"
    assert "removed 1 kernels" in fattn("cache", "clear").stdout
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["cache"], "fattn cache needs a command: list, path, clear, warm or pack"),
        (["cache", "lits"], "fattn cache has no command 'lits'; did you mean 'list'?"),
        (["cache", "warm", "--acrh", "80"], "fattn cache warm has no flag '--acrh'; did you mean '--arch'?"),
        (["cache", "list", "surplus"], "fattn cache list has no argument 'surplus'"),
        (["cache", "pack", "--arch", "80"], "--output is required"),
        (["cache", "warm", "--arch", "many"], "many"),
        (["cache", "warm", "--arch", "80,2000"], "2000 is not in range; allowed: from 50 to 999"),
        (["cache", "warm", "--arch", "61"], "there are no kernels for architecture 61"),
        (["cache", "warm", "--arch", "80", "--pack", "/nonexistent.pack"], "/nonexistent.pack cannot be opened"),
    ],
)
def test_bad_usage(fattn, folder, arguments, expected):
    assert expected in fattn.refuses(*arguments)


def test_warm_without_a_gpu_needs_an_architecture(fattn, folder):
    assert "/nonexistent/libcuda.so.1" in fattn.refuses("cache", "warm", env={"FATTN_CUDA_DRIVER": "/nonexistent/libcuda.so.1"})


def test_warm_without_nvrtc_says_why(fattn, folder):
    error = fattn.refuses("cache", "warm", "--arch", "80", env={"FATTN_NVRTC": "/nonexistent/libnvrtc.so"})
    assert "there is no usable NVRTC" in error and "pip install nvidia-cuda-nvrtc" in error


# A problem whose kernels are quick to compile, so that the whole list need not be.
PROBLEM = ["--headdim", "64", "--dtype", "fp16", "--no-grad"]


def test_warm_list_pack(fattn, folder, compiler, tmp_path):
    first = fattn.json("cache", "warm", "--arch", "80", *PROBLEM, timeout=600)
    assert first["kernels"] and {kernel["origin"] for kernel in first["kernels"]} <= {"compiled", "disk cache"}
    again = fattn.json("cache", "warm", "--arch", "80", *PROBLEM)
    assert {kernel["origin"] for kernel in again["kernels"]} == {"disk cache"}
    # A line for each, whatever its length, so that they can be counted.
    lines = fattn("cache", "warm", "--arch", "80", *PROBLEM).stdout.splitlines()
    assert len(lines) == len(first["kernels"]) and all(line.endswith(" disk cache") for line in lines), lines
    names = {kernel["name"] for kernel in first["kernels"]}
    listed = fattn.json("cache", "list")["entries"]
    assert {entry["name"] for entry in listed} == names
    assert all(entry["target"] == "sm_80" and entry["registers"] > 0 and entry["damage"] is None for entry in listed)
    text = fattn("cache", "list").stdout
    assert all(name in text for name in names)
    assert {entry["description"] for entry in listed} == {"fp16, headdim 64, tile 128 x 128, level 80"}
    assert "fp16, headdim 64, tile 128 x 128, level 80" in fattn("cache", "list", "--wide").stdout

    # The same as a line on standard input, beside lines that are no problem.
    row = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "nheads": 8, "nheads_k": 8, "headdim": 64, "headdim_v": 64, "causal": False, "dtype": "fp16"}
    lines = "\n".join([json.dumps(row), "{", json.dumps({"batch": 1})])
    answers = fattn("cache", "warm", "--stdin", "--no-grad", "--arch", "80", status=1, input=lines).stdout.splitlines()
    assert answers[0] == f"{len(names)} kernels" and len(answers) == 3, answers
    assert all(answer.startswith("not compiled: ") for answer in answers[1:]) and "no 'seqlen_q'" in answers[2]
    assert {entry["name"] for entry in fattn.json("cache", "list")["entries"]} == names

    pack = tmp_path / "kernels.pack"
    assert len(fattn.json("cache", "pack", "--output", pack, "--arch", "80", *PROBLEM)["kernels"]) == len(first["kernels"])
    fattn("cache", "clear")
    nowhere = {"FATTN_NVRTC": "/nonexistent/libnvrtc.so"}
    packed = fattn.json("cache", "warm", "--arch", "80", *PROBLEM, "--pack", pack, env=nowhere)
    assert {kernel["origin"] for kernel in packed["kernels"]} == {"pack"}
    pack.write_bytes(pack.read_bytes()[:1000])
    assert "is cut off" in fattn.refuses("cache", "warm", "--arch", "80", *PROBLEM, "--pack", pack, env=nowhere)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--dropout", "0.1", "--alibi"], {"dropout", "ALiBi"}),
        (["--bias", "heads", "--mask", "one"], {"bias", "mask"}),
        (["--documents", "3"], {"documents"}),
        (["--packed", "100"], {"packed"}),
        (["--seqused-k", "100"], {"lengths"}),
    ],
)
def test_warm_with_options_compiles_their_kernels(fattn, folder, compiler, options, words):
    kernels = fattn.json("cache", "warm", "--arch", "80", *PROBLEM, *options, timeout=600)["kernels"]
    assert words <= {word for kernel in kernels if kernel["name"] == "fattn_v2_fwd" for word in kernel["description"].split(", ")}


def test_record_in_a_file(fattn, folder, tmp_path):
    done = fattn("cache", "list", "--json", tmp_path / "list.json")
    assert "0 kernels" in done.stdout
    assert json.loads((tmp_path / "list.json").read_text())["fattn_cache"] == 1
