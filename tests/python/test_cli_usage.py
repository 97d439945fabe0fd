"""The command line's skeleton: help, versions, exit codes, errors that help, output that is only what it should be."""
import json
import os
import re
import subprocess

import pytest

COMMANDS = ["info", "support", "run", "check", "bench", "compare", "cache"]


def words(text: str) -> str:
    """Without line breaks: where a line ends depends on the width."""
    return " ".join(text.split())


def test_help_lists_every_command(fattn):
    text = fattn("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.M), text
    assert "Exit codes" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(fattn, command):
    text = fattn(command, "--help").stdout
    assert "--json" in text and "FILE|-" in text


def test_version(fattn):
    assert re.fullmatch(r"fattn \d+\.\d+\.\d+\n", fattn("--version").stdout)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["inof"], "has no command 'inof'; did you mean 'info'?"),
        (["--verson"], "has no flag '--verson'; did you mean '--version'?"),
        (["check", "--bakend", "cpu"], "fattn check has no flag '--bakend'; did you mean '--backend'?"),
        (["run", "--cuasal"], "fattn run has no flag '--cuasal'; did you mean '--causal'?"),
        (["info", "--zzzzzzzzzz"], "fattn info has no flag '--zzzzzzzzzz'"),
        (["info", "surplus"], "fattn info has no argument 'surplus'"),
        (["info", "--jsn=x"], "has no flag '--jsn'; did you mean '--json'?"),
        (["run", "--input", "x"], "--output is required"),
        (["check", "--backend", "gpus"], "--backend: 'gpus' is not known; allowed: auto, reference, cpu or cuda; did you mean 'cuda'?"),
        (["check", "--device", "gpu"], "'gpu' is no device; allowed: cpu, cuda, cuda:0, cuda:1, ...; did you mean 'cuda'?"),
        (["bench", "--preset", "gpt2-smal"], "did you mean 'gpt2-small'?"),
        (["bench", "--num-heads", "4"], "fattn bench has no flag '--num-heads'; did you mean '--nheads'?"),
        (["bench", "--window", "5"], "did you mean '--window-left'?"),
        (["check", "--only", "x"], "fattn check has no flag '--only'\nSee"),  # '--help' has dashes in common with it, and a letter
        (["bench", "--head-dim=64"], "did you mean '--headdim'?"),
        (["bench", "--is-causal"], "did you mean '--causal'?"),
        (["bench", "--seqlen", "1.5"], "--seqlen: '1.5' is no whole number; allowed: 1 or more"),
        (["bench", "--seqlen", "99999999999999999999"], "99999999999999999999 is not in range; allowed: 1 or more"),
        (["bench", "--min-time", "nan"], "--min-time: nan is not in range; allowed: from 0 to 3600"),
        (["bench", "--dtype", "bfoat16"], "'bfoat16' is not known; allowed: fp32, bf16, fp16 or fp64; did you mean 'bf16'?"),
        (["run", "a", "b", "c"], "fattn run has no argument 'c'"),
        (["check", "--threads", "many"], "--threads: 'many' is no whole number; allowed: from 0 to 1024"),
        (["check", "--threads", "-1"], "-1 is not in range; allowed: from 0 to 1024"),
        (["check", "--dtype", "fp8"], "'fp8' is not known; allowed: all, fp32, fp16 or bf16"),
        (["check", "--filter"], "--filter needs a value behind it: TEXT"),
        (["info", "--json"], "--json needs a value behind it: FILE|-"),
        (["bench", "--seqlen"], "--seqlen needs a value behind it: N, a whole number, 1 or more"),
        (["lab", "--step", "3", "--step", "4"], "--step is given 2 times; give it once"),
        (["gpt2", "tokenizer"], "fattn gpt2 tokenizer needs a command: train"),
        (["regress"], "--baseline is required: The earlier record"),
        (["bench", "--preset", "gpt2-smal"], "there is no preset 'gpt2-smal'; did you mean 'gpt2-small'? `--preset list` shows all"),
        (["bench", "--seqlen", "1000000000"], "choose smaller sizes"),
        (["memory", "--seqlen", "10000000000"], "more bytes than any machine can address; choose smaller sizes"),
        (["bench", "--memory-limit", "-1GiB"], "--memory-limit: -1GiB is not in range; allowed: 0 or more, with a unit, as 512MiB or 16GiB"),
        (["bench", "--memory-limit", "12 parsecs"], "--memory-limit: '12 parsecs' has a unit that is not known; allowed: 0 or more"),
        (["bench", "--memory-limit", "nanGiB"], "--memory-limit: 'nanGiB' is no size; allowed: 0 or more"),
        (["bench", "--memory-limit", "8EiB"], "--memory-limit: 8EiB is too much; allowed: less than 8EiB"),
        (["bench", "--memory-limit", "0.4", "--seqlen", "16"], "--memory-limit allows"),
        (["gpt2", "tokenize", "t", "x"], "--out is required"),
        (["gpt2", "tokenize", "t", "x", "--out", "o", "--format", "dialog"], "'dialog' is not known; allowed: auto, text, code, lines, dialogue or completion; did you mean 'dialogue'?"),
        (["gpt2", "tokenize", "t", "x", "--out", "o", "--validation", "0.9"], "--validation: 0.9 is not in range; allowed: from 0 to 0.5"),
        (["gpt2", "tokenizer", "train", "x", "--out", "o", "--vocab-size", "256"], "--vocab-size: 256 is not in range; allowed: from 257 to 16777216"),
    ],
)
def test_bad_usage(fattn, arguments, expected):
    assert expected in fattn.refuses(*arguments)


def test_unknown_flag_of_a_wild_user_is_printed_harmlessly(fattn):
    error = fattn.refuses("info", "--\x1b[31mred\x07\u202e")
    assert "\\x1b[31mred\\x07\\u202e" in error
    assert len(fattn.refuses("info", "--" + "x" * 100_000)) < 1000


@pytest.mark.parametrize("given, dtype", [("float32", "fp32"), ("float", "fp32"), ("f32", "fp32"), ("FP32", "fp32"), ("torch.float16", "fp16"), ("half", "fp16"),
                                          ("f16", "fp16"), ("bfloat16", "bf16"), ("BF16", "bf16")])
def test_dtypes_by_their_other_names(fattn, given, dtype):
    cases = fattn("check", "--list", "--filter", "-q7-", "--dtype", given).stdout
    assert cases and cases == fattn("check", "--list", "--filter", "-q7-", "--dtype", dtype).stdout
    if given not in ("float32", "half", "BF16"):  # of each dtype one is measured
        return
    tiny = ["bench", "--batch", "1", "--seqlen", "8", "--nheads", "1", "--headdim", "8", "--no-grad", "--min-time", "0", "--repeats", "1", "--warmup", "0"]
    assert {row["dtype"] for row in fattn.json(*tiny, "--dtype", given)["rows"]} == {dtype}


@pytest.mark.parametrize("size", ["300TiB", "7.99EiB", "-0", "0", "1.1GB"])
def test_sizes_that_are_allowed(fattn, size):
    fattn("bench", "--batch", 1, "--seqlen", 8, "--nheads", 1, "--headdim", 8, "--no-grad", "--min-time", 0, "--repeats", 1, "--warmup", 0, "--memory-limit", size)


def test_names_in_any_spelling(fattn):
    for flags in (["--isa", "AVX-512"], ["--algorithm", "FlashAttention-2"], ["--algorithm", "math"], ["--backend", "CPU"]):
        assert fattn("check", "--list", "--filter", "-q7-", *flags).stdout


def test_info(fattn):
    text = fattn("info").stdout
    for word in ("CPU", "ISAs", "Caches", "Memory", "Threads", "GPU", "Libraries", "Environment variables", "FATTN_CPU_ISA"):
        assert word in text
    info = fattn.json("info")
    assert "scalar" in info["cpu"]["isas_available"]
    assert 1 <= info["cpu"]["usable_threads"] <= info["cpu"]["logical_cpus"]
    assert info["gpu"]["available"] == bool(info["gpu"]["devices"]) != bool(info["gpu"]["reason"])
    assert {"OpenBLAS", "CUDA driver", "cuBLASLt", "NCCL", "NVRTC"} <= {library["name"] for library in info["libraries"]}
    for library in info["libraries"]:
        assert bool(library["path"]) == library["loaded"] and bool(library["reason"]) != library["loaded"]


def test_support_of_options_together(fattn):
    env = {"FATTN_CUDA_DRIVER": "/nonexistent/libcuda.so.1"}
    done = fattn.json("support", "--with", "dropout,SoftCap", "--headdim", "128", env=env)["with"]
    assert done["options"] == ["softcap", "dropout"] and (done["dtype"], done["headdim"]) == ("bf16", 128)
    ways = {(row["name"], row["pass"]): row for row in done["ways"]}
    assert [ways[name, "fwd"]["supported"] for name in ("reference", "cpu v1", "cpu v2", "sm_90 v2", "sm_90 v3")] == [True, False, True, True, False]
    assert "v3's backward pass has no registers for softcap with dropout" in ways["sm_90 v3", "bwd"]["reason"]
    assert all(row["supported"] for row in fattn.json("support", "--with", "softcap", env=env)["with"]["ways"] if row["name"] == "sm_90 v3")
    text = words(fattn("support", "--with", "dbias,softcap", "--arch", "80", env=env).stdout)
    assert "softcap and dbias together" in text and "sm_80 v2 yes no backend cuda: the CUDA kernels have no dbias with softcap" in text


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--with", "softcup"], "did you mean 'softcap'?"),
        (["--with", "softcap", "--arch", "33"], "--arch: there are no kernels for architecture 33; allowed: 75, 80"),
        (["--headdim", "64"], "--headdim requires --with"),
        (["--with", "softcap", "--dtype", "int8"], "bf16"),
        (["--with", "softcap", "--headdim", "0"], "--headdim"),
    ],
)
def test_support_refuses(fattn, flags, error):
    done = fattn("support", *flags, status=2)
    assert error in done.stderr and not done.stdout


def test_info_without_a_cuda_driver(fattn):
    env = {"FATTN_CUDA_DRIVER": "/nonexistent/libcuda.so.1"}
    text = fattn("info", env=env).stdout
    assert "GPU      none: no usable CUDA driver" in text and "FATTN_CUDA_DRIVER" in text
    info = fattn.json("info", env=env)
    assert info["gpu"]["available"] is False and info["gpu"]["devices"] == [] and "no usable CUDA driver" in info["gpu"]["reason"]
    assert "/nonexistent/libcuda.so.1" in next(lib for lib in info["libraries"] if lib["name"] == "CUDA driver")["reason"]


@pytest.mark.parametrize(
    "settings, reason",
    [("devices=0", "no usable CUDA device"), ("version=11040", "supports CUDA 11.4; fattn needs 12.0"), ("cuInit=999", "nvidia-smi")],
)
def test_info_says_why_there_is_no_gpu(fattn, cuda_stub, settings, reason):
    info = fattn.json("info", env={**cuda_stub, "STUB_CUDA": settings})
    assert info["gpu"]["available"] is False and reason in info["gpu"]["reason"]


def test_info_of_gpus(fattn, cuda_stub):
    env = {**cuda_stub, "STUB_CUDA": "version=12080"}
    text = words(fattn("info", env=env).stdout)
    for part in ("cuda:0: Stub GPU 0, capability 9.0, 132 SMs, 1024 MiB memory, 1024 MiB free", "cuda:1: ", "1980 MHz", "0000:60:00.0", "CUDA up to 12.8"):
        assert part in text
    gpu = fattn.json("info", env=env)["gpu"]
    assert gpu["available"] is True and gpu["reason"] is None and len(gpu["devices"]) == 2
    second = gpu["devices"][1]
    assert second["device"] == "cuda:1" and second["memory_free_bytes"] == second["memory_bytes"] == 2**30 and second["driver_cuda_version"] == "12.8"


def test_info_of_a_gpu_that_cannot_be_used(fattn, cuda_stub):
    env = {**cuda_stub, "STUB_CUDA": "cuDevicePrimaryCtxRetain=46"}
    assert "cannot be used: cuda:0 (Stub GPU 0)" in words(fattn("info", env=env).stdout)
    device = fattn.json("info", env=env)["gpu"]["devices"][0]
    assert device["memory_free_bytes"] is None and "another process has the device" in device["reason"]


def test_info_says_why_it_has_these_threads(fattn):
    cpus = sorted(os.sched_getaffinity(0))
    one = fattn.json("info", preexec_fn=lambda: os.sched_setaffinity(0, cpus[:1]))["cpu"]
    assert one["usable_threads"] == 1
    if len(cpus) > 1:
        assert "affinity" in one["usable_threads_why"]
    set_to = fattn.json("info", env={"FATTN_NUM_THREADS": "1"})["cpu"]
    assert set_to["usable_threads"] == 1 and "FATTN_NUM_THREADS" in set_to["usable_threads_why"]


def test_values_of_variables_are_printed_harmlessly(fattn):
    value = "/no\x1b[2J\nsuch"
    done = fattn("info", env={"FATTN_OPENBLAS": value})
    assert "\x1b" not in done.stdout and "/no\\x1b[2J\\nsuch" in done.stdout
    info = fattn.json("info", env={"FATTN_OPENBLAS": value})
    assert "/no\\x1b[2J\\nsuch" in [v["value"] for v in info["environment_variables"]]


def test_a_variable_that_is_no_utf8_does_not_break_the_json(fattn):
    done = fattn("info", "--json", "-", env={"FATTN_OPENBLAS": "/no/\udcff"})
    assert "/no/\\xff" in json.dumps(json.loads(done.stdout), ensure_ascii=False).replace("\\\\", "\\")


def test_json_file_is_whole(fattn, tmp_path):
    target = tmp_path / "info.json"
    target.write_text("old")
    done = fattn("info", "--json", target)
    assert "CPU" in done.stdout
    assert json.loads(target.read_text())["fattn_info"] == 1
    assert os.listdir(tmp_path) == ["info.json"]


@pytest.mark.parametrize("target", ["/nonexistent/folder/x.json", "/dev/null", "/"])
def test_json_that_cannot_be_written(fattn, target):
    assert target in fattn.refuses("info", "--json", target)
    assert os.path.exists("/dev/null")


def test_stdout_that_is_full(fattn):
    with open("/dev/full", "w") as full:
        for arguments in (["info"], ["info", "--json", "-"]):
            done = subprocess.run([fattn.path, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
            assert done.returncode == 2 and "stdout" in done.stderr
