"""The records of the commands, and status files: real ones keep to their schemas (every test that reads a record checks that), and the
schemas refuse what is none."""
import base64
import json

import pytest
from conftest import schema_of, schemas

SMALL = "examples/data/small.safetensors"


def regress(fattn, folder) -> dict:
    fattn("bench", "--batch", 1, "--seqlen", 32, "--nheads", 1, "--headdim", 16, "--no-grad", "--min-time", 0, "--repeats", 6, "--warmup", 0, "--json", folder / "bench.json")
    return fattn.json("regress", "--baseline", folder / "bench.json", "--current", folder / "bench.json")


def gpt2_config(folder):
    path = folder / "config.json"
    path.write_text('{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 20, "n_positions": 4}')
    return path


def gpt2_ranks(folder):
    path = folder / "bytes.tiktoken"
    path.write_text("".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)))
    return path


@pytest.fixture(scope="module")
def records(fattn, root, tmp_path_factory) -> dict[str, dict]:
    """One of every kind, of successes and of failures."""
    folder = tmp_path_factory.mktemp("records")
    cache = {"FATTN_CACHE_DIR": str(folder / "cache")}
    run = ["run", "--input", root / SMALL, "--output", folder / "out.safetensors"]
    one = ["check", "--dtype", "fp32", "--filter", fattn("check", "--list", "--dtype", "fp32").stdout.split()[0]]
    failed = folder / "failed.json"
    status = folder / "status.json"
    tiny = ["--nheads", "1", "--headdim", "16", "--min-time", "0", "--repeats", "2", "--max-time", "0.1", "--warmup", "1"]
    profile = fattn.json("profile", *tiny, "--seqlen", "16", "--no-grad", "--out", folder / "profile")
    sweep = fattn.json("sweep", "--over", "seqlen", "--values", "16,32", "--pass", "fwd", *tiny, "--status", status)
    fattn(*run, "--device", "cuda", "--json", failed, status=2, env={"FATTN_CUDA_DRIVER": "/nonexistent/libcuda.so.1"})
    return {
        "info": fattn.json("info"),
        "support": fattn.json("support"),
        "support_with": fattn.json("support", "--with", "softcap,dropout"),
        "run": fattn.json(*run, "--causal", "--window-left", "9", "--softcap", "20", "--verify", "--softmax-scale", "0.5"),
        "run_failed": json.loads(failed.read_text()),
        "check": fattn.json(*one, "--backend", "reference"),
        "check_list": fattn.json(*one, "--list"),
        "regress": regress(fattn, folder),
        "report": fattn.json("report", "--from", root / "docs/results/h200-headline.json", "--out", folder / "report"),
        "cache_path": fattn.json("cache", "path", env=cache),
        "cache_list": fattn.json("cache", "list", env=cache),
        "cache_clear": fattn.json("cache", "clear", env=cache),
        "memory_bare": fattn.json("memory", "--seqlen", "64", env=cache),
        "calibrate": fattn.json("calibrate", "--repeats", "1", "--kernel-seconds", "0", env=cache),
        "memory": fattn.json("memory", "--seqlen", "64", env=cache),
        "sweep": sweep,
        "status": json.loads(status.read_text()),
        "watch": fattn.json("watch", status, "--once"),
        "profile": profile,
        "timeline": json.loads((folder / "profile/timeline.json").read_text()),
        "predict": fattn.json("predict", "--seqlen", "64", env=cache),
        "advice": fattn.json("advise", "--preset", "8gb"),
        "lab": fattn.json("lab"),
        "gpt2_info": fattn.json("gpt2", "info", "gpt2", "--memory"),
        "gpt2_init": fattn.json("gpt2", "init", "--config", gpt2_config(folder), folder / "gpt2"),
        "gpt2_export": fattn.json("gpt2", "export", folder / "gpt2", folder / "gpt2-bf16", "--dtype", "bf16"),
        "gpt2_encode": fattn.json("gpt2", "encode", gpt2_ranks(folder), "a b"),
        "gpt2_decode": fattn.json("gpt2", "decode", gpt2_ranks(folder), "97", "98"),
        "gpt2_generate": fattn.json("gpt2", "generate", folder / "gpt2", "--ids", "1 2", "--batch-invariant", "-n", "2"),
        "gpt2_eval": fattn.json("gpt2", "eval", folder / "gpt2", "--ids", input="1 2 3"),
        "gpt2_precision": fattn.json("gpt2", "precision"),
        "gpt2_compare": fattn.json("gpt2", "compare", folder / "gpt2", "--seqlen", "4", "--repeats", "1"),
        "gpt2_bench": fattn.json("gpt2", "bench", folder / "gpt2", "--context", "4", "--batch", "1", "--seconds", "0"),
        "gpt2_train_memory": fattn.json("gpt2", "train", "--preset", "gpt2", "--seqlen", "16", "--memory"),
        "gpt2_tokenizer_train": fattn.json("gpt2", "tokenizer", "train", root / "AGENTS.md", "--vocab-size", "300", "--out", folder / "tokenizer"),
        "gpt2_tokenize": fattn.json("gpt2", "tokenize", folder / "tokenizer", root / "AGENTS.md", "--out", folder / "tokens", "--validation", "0.1"),
        "advice_refused": fattn.json("advise", "--gpu-memory", "1GiB", "--model", "xl"),
    }


def test_they_keep_to_their_schemas(records):
    for record in records.values():
        schema_of(record).validate(record)
    assert records["run_failed"]["status"] == "unsupported" and "no usable CUDA driver" in records["run_failed"]["reason"]
    assert {next(iter(record)) for record in records.values()} | {"fattn_record"} == {f"fattn_{name}" for name in schemas()}


def test_with_devices(fattn, cuda_stub):
    info = fattn.json("info", env=cuda_stub)
    assert [device["device"] for device in info["gpu"]["devices"]] == ["cuda:0", "cuda:1"]
    support = fattn.json("support", env={**cuda_stub, "FATTN_NVRTC": "/nonexistent/libnvrtc.so.13"})
    assert {"cuda:0 v2", "cuda:1 v2"} <= {row["name"] for row in support["backends"]}


@pytest.mark.parametrize(
    "name, spoil",
    [
        ("info", lambda r: r.update(fattn_info=2)),
        ("info", lambda r: r["cpu"].pop("model")),
        ("info", lambda r: r["gpu"].update(available=True, reason=None, devices=[])),
        ("info", lambda r: r["libraries"][0].update(loaded=False, path=None, reason=None)),
        ("info", lambda r: r["cpu"]["picked"]["fp32"].update(kernel=None)),
        ("info", lambda r: r["cpu"].update(isa_default="sse2")),
        ("regress", lambda r: r["rows"][0].update(verdict="slower")),
        ("regress", lambda r: r["rows"][0].update(verdict="same", reason=None, ratio=None)),
        ("regress", lambda r: r["counts"].pop("worse")),
        ("report", lambda r: r["files"][0].update(path="../index.html")),
        ("report", lambda r: r.update(records=[])),
        ("support", lambda r: r["backends"][0].update(headdim_max=0)),
        ("support", lambda r: r["backends"][0].update({"pass": "both"})),
        ("support", lambda r: r.pop("gpu_architectures")),
        ("support_with", lambda r: r["with"]["options"].append("softcup")),
        ("support_with", lambda r: r["with"]["ways"][0].update(supported=False)),
        ("support", lambda r: r["table"][0]["ways"].update({"backend cpu": "yes"})),
        ("support", lambda r: r["features"][0].update(supported=False)),
        ("run", lambda r: r.update(status="fine")),
        ("run", lambda r: r.update(reason="why not")),
        ("run", lambda r: r.pop("plan_fwd")),
        ("run", lambda r: r["tensors"].pop("o")),
        ("run", lambda r: r["verdicts"][0].update({"pass": False})),
        ("run", lambda r: r["verdicts"][0].update(error=None)),
        ("run", lambda r: r["environment"].pop("date")),
        ("run_failed", lambda r: r.update(reason=None)),
        ("check", lambda r: r.update(failed=1)),
        ("check", lambda r: r.update(passed=0)),
        ("check", lambda r: r["cases"][0].update(outcome="skipped")),
        ("check", lambda r: r["cases"][0].update(verdicts=[])),
        ("check", lambda r: r["cases"][0]["verdicts"][0].update(allowed=None)),
        ("check_list", lambda r: r.update(cases=[])),
        ("check_list", lambda r: r.update(passed=1)),
        ("cache_path", lambda r: r.update(usable="yes")),
        ("cache_list", lambda r: r["entries"].append({"key": "0"})),
        ("cache_clear", lambda r: r.update(command="list")),
        ("calibrate", lambda r: r["measured"].pop("call_s")),
        ("calibrate", lambda r: r["measured"]["call_s"].update(value=-1)),
        ("calibrate", lambda r: r["measured"].update(call_s={"value": None})),
        ("calibrate", lambda r: r.update(device="cuda")),
        ("calibrate", lambda r: r["facts"].update(threads=0)),
        ("memory", lambda r: r["passes"].clear()),
        ("memory", lambda r: r["passes"][0]["algorithms"][0].update(counted_by="guess")),
        ("memory", lambda r: r["passes"][0]["algorithms"][0].update(bound_s=None)),
        ("memory", lambda r: r["passes"][0]["algorithms"][0]["terms"][0].update(bytes=-1)),
        ("memory", lambda r: r["steps"][-1].pop("peak_bytes")),
        ("memory_bare", lambda r: r["machine"].pop("lacks")),
        ("sweep", lambda r: r.update(fattn_sweep=2)),
        ("sweep", lambda r: r["sweep"].update(over="length")),
        ("sweep", lambda r: r["sweep"].update(values=[])),
        ("sweep", lambda r: r["rows"][0].pop("value")),
        ("sweep", lambda r: r["rows"][0].update(tokens_per_s=None)),
        ("sweep", lambda r: r["rows"][0].update(time_median_s=0)),
        ("sweep", lambda r: r["fits"][0].update(reason=None)),
        ("sweep", lambda r: r["environment"].pop("cpu")),
        ("sweep", lambda r: r.pop("findings")),
        ("status", lambda r: r.update(state="asleep")),
        ("status", lambda r: r.pop("pid")),
        ("predict", lambda r: r["rows"][0].update(extra_bytes=None)),
        ("lab", lambda r: r["steps"][0]["rows"][0].update(time_median_s=0)),
        ("lab", lambda r: r["steps"][3]["rows"][0].update(status="failed")),
        ("lab", lambda r: r["steps"][2].update(name="tiles")),
        ("lab", lambda r: r["steps"][4].pop("answer")),
        ("predict", lambda r: r["rows"][0].update(error_fraction=0.1)),
        ("predict", lambda r: r.update(what="held_out")),
        ("predict", lambda r: r["scores"].pop("bwd")),
        ("advice", lambda r: r.update(batch=0)),
        ("advice", lambda r: r.update(why="because")),
        ("advice", lambda r: r["settings"].clear()),
        ("advice_refused", lambda r: r.update(batch=1)),
        ("advice_refused", lambda r: r.update(would_fit=None)),
    ],
)
def test_they_refuse_what_is_no_record(records, name, spoil):
    spoilt = json.loads(json.dumps(records[name]))
    spoil(spoilt)
    assert not schema_of(spoilt).is_valid(spoilt)
