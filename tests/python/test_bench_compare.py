"""`fattn bench` and `fattn compare`: records that keep to their schema, refusals, presets, bad usage."""
import json
import re

import compact_records
import pytest

TINY = ["--backend", "reference", "--seqlen", "32", "--nheads", "2", "--headdim", "8", "--repeats", "6", "--min-time", "0", "--warmup", "1"]
ONLY = ["--provider", "fattn", "--provider", "standard"]


def test_schema_refuses_what_is_no_record(schema, fattn):
    record = fattn.json("bench", *TINY, "--no-grad")
    schema.validate(record)
    for spoil in (
        lambda r: r.pop("environment"),
        lambda r: r["rows"][0].pop("time_median_s"),
        lambda r: r["rows"][0].update(status="fine"),
        lambda r: r["rows"][0].update(status="failed"),
        lambda r: r.update(fattn_record=2),
        lambda r: r["rows"][0]["checks"][0].update({"pass": False}),
    ):
        spoilt = json.loads(json.dumps(record))
        spoil(spoilt)
        assert not schema.is_valid(spoilt)


def test_bench_record(schema, fattn):
    record = fattn.json("bench", *TINY, "--causal", "--seqlen-k", "40")
    schema.validate(record)
    assert [row["pass"] for row in record["rows"]] == ["fwd", "bwd", "fwdbwd"]
    forward, backward, both = record["rows"]
    # 32 queries and 40 keys, aligned to the bottom right: query i sees i + 9 keys.
    pairs = sum(i + 9 for i in range(32))
    assert forward["flops"] == 2 * pairs * 4 * 8
    assert forward["flops_nominal"] == 2 * 32 * 40 / 2 * 4 * 8
    assert backward["flops"] == 2.5 * forward["flops"] and both["flops"] == 3.5 * forward["flops"]
    for row in record["rows"]:
        assert row["status"] == "ok" and row["samples"] >= 6
        assert row["flops_per_s"] == pytest.approx(row["flops"] / row["time_median_s"])
        assert row["peak_fraction"] == pytest.approx(row["flops_per_s"] / row["peak_flops_per_s"])
        assert row["time_min_s"] <= row["time_ci_low_s"] <= row["time_median_s"] <= row["time_ci_high_s"] <= row["time_max_s"]
        assert row["time_ci_level"] >= 0.95
    assert {c["tensor"] for c in forward["checks"]} == {"o", "lse"}
    assert {c["tensor"] for c in backward["checks"]} == {"dq", "dk", "dv"}
    # o, lse and, for gradients, dq, dk, dv; the reference backend has no workspace.
    o, lse, kv = 32 * 2 * 8 * 4, 32 * 2 * 4, 40 * 2 * 8 * 4
    assert forward["extra_bytes"] == o + lse
    assert backward["extra_bytes"] == both["extra_bytes"] == o + lse + o + 2 * kv


def test_flags_repeat_the_run(fattn):
    first = fattn.json("bench", *TINY, "--preset", "llama3-8b", "--dtype", "bf16", "--no-grad", "--nheads-k", "1")
    again = fattn.json("bench", *first["flags"])
    assert again["flags"] == first["flags"]
    same = ["batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim", "headdim_v", "causal", "dtype", "seed"]
    assert [again["rows"][0][key] for key in same] == [first["rows"][0][key] for key in same]
    assert first["rows"][0]["nheads_k"] == 1 and first["rows"][0]["causal"] is True


def test_bench_table_and_json_file(schema, fattn, tmp_path):
    target = tmp_path / "record.json"
    text = fattn("bench", *TINY, "--no-grad", "--json", target).stdout
    schema.validate(json.loads(target.read_text()))
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
    assert "GFLOP/s" in text and "MiB" in text and "float64 oracle" in text and re.search(r"^o +\S+ +\S+ +ok +all$", text, re.M) and "Peak of this machine" in text


OPTIONS = [
    ["--dropout", "0.25"],
    ["--alibi"],
    ["--bias", "heads", "--dbias"],
    ["--bias", "keys", "--bias-fp32", "--dtype", "bf16"],
    ["--mask", "batch"],
    ["--seqused-k", "5", "--causal"],
    ["--packed", "3", "--window-left", "9"],
    ["--documents", "3"],
    ["--packed", "4", "--dropout", "0.25", "--alibi", "--bias", "all", "--dbias", "--mask", "one", "--softcap", "5.0", "--causal"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_options_are_checked_timed_and_repeated(fattn, options):
    flags = [*TINY, "--backend", "cpu", "--batch", "2", "--nheads-k", "1", *options]
    record = fattn.json("bench", *flags)
    forward, backward, _ = record["rows"]
    assert [row["status"] for row in record["rows"]] == ["ok"] * 3
    assert {c["tensor"] for c in forward["checks"]} == {"o", "lse"}
    assert {c["tensor"] for c in backward["checks"]} == {"dq", "dk", "dv"} | ({"dbias"} if "--dbias" in options else set())
    assert {c["where"] for row in record["rows"] for c in row["checks"]} == {"all"}
    again = fattn.json("bench", *record["flags"])
    assert again["flags"] == record["flags"]
    kept = ["p_dropout", "alibi", "bias", "bias_dtype", "dbias", "mask", "least_seqused_k", "least_packed", "documents", "flops", "bytes"]
    assert [again["rows"][1].get(key) for key in kept] == [backward.get(key) for key in kept]
    assert sum(key in forward for key in kept[:-2]) >= 1


@pytest.mark.parametrize("options", [[], ["--seqused-k", "5", "--causal", "--mask", "keys"]], ids=" ".join)
def test_a_paged_cache_is_checked_timed_and_repeated(fattn, options):
    flags = [*TINY, "--backend", "cpu", "--batch", "2", "--nheads-k", "1", "--seqlen-k", "48", "--page-size", "16", "--no-grad", *options]
    record = fattn.json("bench", *flags)
    (row,) = record["rows"]
    assert row["status"] == "ok" and row["page_size"] == 16 and {c["tensor"] for c in row["checks"]} == {"o", "lse"}
    again = fattn.json("bench", *record["flags"])
    assert again["flags"] == record["flags"] and again["rows"][0]["page_size"] == 16


def test_a_large_paged_cache_is_checked_in_samples(fattn):
    flags = ["--seqlen", "1504", "--nheads", "6", "--nheads-k", "2", "--batch", "2", "--repeats", "1", "--min-time", "0", "--warmup", "0", "--page-size", "16", "--no-grad"]
    (row,) = fattn.json("bench", *flags)["rows"]
    assert all(check["pass"] for check in row["checks"])
    assert {check["tensor"] for check in row["checks"] if check["where"].startswith("smaller problem B2 ")} == {"o", "lse"}
    assert any(check["where"].startswith("batch ") for check in row["checks"])


@pytest.mark.parametrize(("options", "words"), [
    (["--page-size", "16"], "a paged cache is of the forward pass; add --no-grad"),
    (["--page-size", "7", "--no-grad"], "7 does not divide the keys, 64; give --seqlen-k a multiple of it"),
    (["--page-size", "16", "--no-grad", "--documents", "2"], "it is measured without --packed and --documents"),
])
def test_pages_that_do_not_fit_are_refused(fattn, options, words):
    refused = fattn("bench", "--seqlen", "64", *options, status=2)
    assert words in " ".join(refused.stderr.split())


@pytest.mark.parametrize("options", [OPTIONS[i] for i in (0, 5, 6, -1)], ids=" ".join)
def test_options_of_large_problems_are_checked_in_samples(fattn, options):
    flags = ["--seqlen", "1500", "--nheads", "6", "--nheads-k", "2", "--batch", "2", "--repeats", "1", "--min-time", "0", "--warmup", "0", *options]
    record = fattn.json("bench", *flags)
    checks = [check for row in record["rows"][:2] for check in row["checks"]]
    assert all(check["pass"] for check in checks)
    smaller = {check["tensor"] for check in checks if check["where"].startswith("smaller problem B2 ")}
    assert smaller == {"o", "lse", "dq", "dk", "dv"} | ({"dbias"} if "--dbias" in options else set())
    # Rows of the real result, but where a piece of it is no problem of its own.
    assert any(check["where"].startswith("batch ") for check in checks)


def test_providers_are_not_asked_for_options(fattn):
    record = fattn.json("compare", *TINY, "--alibi", "--provider", "fattn", "--provider", "torch-sdpa", "--python", "python3")
    assert {row["status"] for row in record["rows"] if row["provider"] == "fattn"} == {"ok"}
    other = [row for row in record["rows"] if row["provider"] == "torch-sdpa"]
    assert other and all(row["status"] in ("unsupported", "unavailable") for row in other)


def test_prices_of_options(schema, fattn, tmp_path):
    # Nothing fits, so nothing is measured, and every option has rows that say so.
    target = tmp_path / "prices.json"
    text = fattn("bench", "--suite", "prices", "--quick", "--no-grad", "--isa", "scalar", "--memory-limit", "1MiB", "--json", target, status=2).stdout
    record = json.loads(target.read_text())
    schema.validate(record)
    assert record["complete"] is True and record["summary"] == [] and {row["status"] for row in record["rows"]} == {"out_of_memory"}
    assert "bias heads in fp32" in text and "out_of_memory" in text


def test_part_of_a_suite(fattn, tmp_path):
    target = tmp_path / "prices.json"
    fattn("bench", "--suite", "prices", "--only", "D64 bf16", "--no-grad", "--isa", "scalar", "--memory-limit", "1MiB", "--json", target, status=2)
    record = json.loads(target.read_text())
    assert record["complete"] is True and {(row["headdim"], row["dtype"]) for row in record["rows"]} == {(64, "bf16")}
    assert record["flags"][:5] == ["--suite", "prices", "--no-grad", "--only", "D64 bf16"]
    fattn("bench", "--suite", "cpu", "--quick", "--only", "Small", "--isa", "scalar", "--memory-limit", "1KiB", "--json", target, status=2)
    assert {row["seqlen_q"] for row in json.loads(target.read_text())["rows"]} == {64}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_large_problems_are_checked_in_samples(fattn, dtype):
    record = fattn.json("bench", "--backend", "reference", "--seqlen", "512", "--nheads", "10", "--headdim", "32", "--dtype", dtype, "--causal",
                        "--repeats", "1", "--min-time", "0", "--warmup", "0", "--no-grad")
    where = {c["where"] for c in record["rows"][0]["checks"]}
    assert "all" not in where and len(where) == 3, where
    assert all(c["pass"] for c in record["rows"][0]["checks"])


def test_memory_limit(fattn):
    error = fattn.refuses("bench", "--seqlen", "4096", "--memory-limit", "1MiB")
    assert "--memory-limit allows 1.000 MiB" in error and "needs" in error
    assert "machine can address" in fattn.refuses("bench", "--seqlen", str(2**40), "--batch", str(2**40))
    assert "available are" in fattn.refuses("bench", "--seqlen", str(2**31), "--backend", "reference")
    # The inputs (6144 bytes) fit, the outputs (2304) do not: a row says so.
    record = fattn.json("bench", *TINY, "--memory-limit", "8000", "--no-grad", status=2)
    assert [row["status"] for row in record["rows"]] == ["out_of_memory"]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--nheads", "6", "--nheads-k", "4"], "nheads"),
        (["--headdim", "600"], "headdim"),
        (["--seqlen", "0"], "--seqlen"),
        (["--batch", "-1"], "--batch"),
        (["--dtype", "int8"], "--dtype"),
        (["--preset", "zzz"], "--preset: there is no preset 'zzz'; `--preset list` shows all"),
        (["--memory-limit", "lots"], "--memory-limit"),
        (["--repeats", "0"], "--repeats"),
        (["--softcap", "inf"], "softcap is inf; allowed: 0 (none)"),
        (["--softcap", "-1"], "softcap is -1; allowed: 0 (none)"),
        (["--dropout", "1.5"], "p_dropout is 1.5"),
        (["--bias", "rows"], "--bias"),
        (["--dbias"], "--dbias: there is no bias; add --bias, or leave it out"),
        (["--bias-fp32"], "--bias-fp32: there is no bias"),
        (["--bias", "one", "--dbias", "--no-grad"], "--dbias: the gradient of a bias is of the backward pass"),
        (["--seqlen", "64", "--seqused-k", "65"], "--seqused-k: 65 is more than the keys, 64"),
        (["--seqlen", "64", "--packed", "65"], "--packed: 65 is more than the rows of the longest, --seqlen, 64"),
        (["--seqlen", "64", "--documents", "65"], "--documents: 65 is more than the queries, 64"),
        (["--seqlen", "64", "--seqlen-k", "80", "--documents", "2"], "--documents: queries and keys are the same rows here; leave --seqlen-k out"),
        (["--packed", "9", "--documents", "2"], "--documents: --seqused-k, --packed and --documents are measured one at a time"),
        (["--packed", "9", "--seqused-k", "2"], "--packed: --seqused-k, --packed and --documents are measured one at a time"),
        (["--batch", "1025", "--packed", "2"], "--packed: 1025 is more than the batch entries whose lengths are measured, 1024"),
        (["--batch", str(2**48), "--seqused-k", "2"], "--seqused-k: 281474976710656 is more than the batch entries"),
        (["--seqlen", str(2**48), "--documents", str(2**48)], "--documents: 281474976710656 is more than the documents that are measured, 1024"),
        (["--dropout", "nan"], "p_dropout is nan"),
        (["--suite", "prices", "--alibi"], "--alibi"),
        (["--suite", "gpu"], "--suite"),
        (["--suite", "prices", "--only", "D63"], "--only: no part of the suite has 'D63' in its title; the titles are 'B2 S2048 H4 D64 fp32', "),
        (["--suite", "cpu", "--only", "headdim 64"], "'Speed, fp32', 'Speed, bf16'"),
        (["--suite", "cpu", "--only", ""], "--only: is empty"),
        (["--only", "D64"], "--suite"),
        (["--seqlen", "99999999999999999999"], "--seqlen"),
        (["--quick"], "--suite"),
        (["--suite", "cpu", "--seqlen", "64"], "--seqlen"),
        (["--suite", "cpu", "--dtype", "bf16"], "--dtype"),
        (["--suite", "cpu", "--preset", "gpt2-small"], "--preset"),
        (["--suite", "cpu", "--repeats", "6"], "--repeats"),
        (["--suite", "cpu", "--seed", "2"], "--seed"),
        (["--suite", "cpu", "--explain"], "--explain"),
    ],
)
def test_bad_usage(fattn, arguments, expected):
    assert expected in fattn.refuses("bench", *arguments)


@pytest.mark.parametrize("command", [("bench",), ("bench", "--suite", "cpu"), ("compare",), ("check",)])
def test_a_record_that_cannot_be_written_is_refused_before_the_work(fattn, command):
    done = fattn(*command, "--json", "/nonexistent/record.json", status=2)
    assert done.stdout == "" and "'/nonexistent/record.json' cannot be created in its folder" in done.stderr


def test_suite_says_once_why_a_provider_is_unavailable(fattn):
    # Only the two smallest problems fit.
    text = fattn("bench", "--suite", "cpu", "--quick", "--no-grad", "--memory-limit", "600KiB", "--python", "/nonexistent/python").stdout
    assert text.count("unavailable  ") + text.count("unavailable\n") == 2, text
    assert " ".join(text.split()).count("cannot start /nonexistent/python") == 1, text


def test_columns_of_gpus_are_left_out_on_the_cpu(fattn):
    text = fattn("compare", *TINY, "--no-grad", "--provider", "fattn", "--provider", "standard").stdout
    assert "memory" in text and "moved" not in text, text


def test_suite_takes_the_flags_that_say_where_and_how(schema, fattn, tmp_path):
    flags = ["--no-grad", "--deterministic", "--cuda-level", "80", "--warm-l2", "--memory-limit", "1", "--threads", "1"]
    # Nothing fits, so nothing is measured, and every problem of the suite has rows that say so.
    record = fattn.json("bench", "--suite", "cpu", "--quick", "--providers", tmp_path, *flags, status=2)
    schema.validate(record)
    assert {(row["pass"], row["status"], row["provider"]) for row in record["rows"]} == {("fwd", "out_of_memory", "fattn")}
    assert len(record["rows"]) > 20
    for flag in flags:
        assert flag in record["flags"]
    again = fattn.json("bench", *record["flags"], status=2)
    assert again["flags"] == record["flags"] and len(again["rows"]) == len(record["rows"])
    with_grad = fattn.json("bench", "--suite", "cpu", "--quick", "--providers", tmp_path, "--memory-limit", "1", status=2)
    assert "bwd" in {row["pass"] for row in with_grad["rows"]}


def test_peaks_that_cannot_be_measured_say_why(schema, fattn, cuda_stub, tmp_path):
    environment = {**cuda_stub, "FATTN_NVRTC": "/nonexistent/libnvrtc.so.13", "FATTN_CACHE_DIR": str(tmp_path)}
    flags = ["--device", "cuda", "--seqlen", "64", "--no-grad"]
    (tmp_path / "another.py").write_text("raise SystemExit('ends at once')\n")  # what another process computes is not known before
    record = fattn.json("compare", *flags, "--provider", "fattn", "--provider", "another", "--providers", tmp_path, status=2, env=environment)
    schema.validate(record)
    for peaks in record["peaks"].values():
        assert "no usable NVRTC" in peaks["problem"]
        assert peaks["fma_flops_per_s"] is None and peaks["bf16_flops_per_s"] is None and peaks["read_bytes_per_s"] is None
    alone = fattn.json("bench", *flags, status=2, env=environment)  # nobody can run, so that nothing is measured
    schema.validate(alone)
    assert alone["peaks"]["before"]["problem"] is None and "no usable NVRTC" in alone["rows"][0]["reason"]
    assert "no usable NVRTC" in fattn("bench", *flags, status=2, env=environment).stdout


def test_a_record_has_a_row_a_line(fattn, tmp_path):
    fattn("compare", *TINY, *ONLY, "--no-grad", "--json", tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text()
    record = json.loads(text)
    rows = [json.loads(line.strip().rstrip(",")) for line in text.splitlines() if line.startswith('    {"')]
    assert rows[:2] == record["rows"] and len(rows) == 2 + len(record["summary"])
    assert text.count("\n") == compact_records.text(record).count("\n") + 1, "tools/compact_records.py writes as files/json_text.cpp does"


def test_compare(schema, fattn):
    record = fattn.json("compare", *TINY, *ONLY, "--no-grad")
    schema.validate(record)
    rows = {row["provider"]: row for row in record["rows"]}
    assert list(rows) == ["fattn", "standard"]
    assert rows["fattn"]["status"] == "ok"
    if rows["standard"]["status"] == "ok":
        speedup = rows["standard"]["time_median_s"] / rows["fattn"]["time_median_s"]
        assert rows["fattn"]["speedup_over_standard"] == pytest.approx(speedup)
        assert rows["standard"]["max_difference_to_standard"] == 0
        # Two orders of sums over headdim and keys: n roundings have a standard deviation of 0.4 sqrt(n) epsilons, five of which are allowed.
        assert 0 <= rows["fattn"]["max_difference_to_standard"] < 2 * (8 + 32) ** 0.5 * 2**-23
        assert record["summary"][0]["leanest"]["name"] is not None
    else:
        assert rows["standard"]["reason"]
        assert rows["fattn"]["speedup_over_standard"] is None


def test_compare_names_a_missing_provider(fattn):
    assert "there is no provider triton; there are fattn, standard" in fattn.refuses("compare", *TINY, "--provider", "triton")


def test_algorithms_side_by_side(schema, fattn):
    """A list of algorithms is a list of contestants, before those of --provider; what a device has not has a row with the reason."""
    flags = ["--seqlen", "32", "--nheads", "2", "--headdim", "8", "--repeats", "6", "--min-time", "0", "--warmup", "1", "--no-grad"]
    record = fattn.json("compare", *flags, "--algorithm", "standard,v2,v1", "--provider", "fattn")
    schema.validate(record)
    assert [row["provider"] for row in record["rows"]] == ["standard", "v2", "v1", "fattn"]
    standard, v2, v1, _ = record["rows"]
    assert (standard["algorithm"], v2["algorithm"], v1["algorithm"]) == ("standard", "v2", "v1")
    assert v1["kernel"].startswith("cpu v1 forward fp32") and v1["speedup_over_standard"] > 0
    assert v2["speedup_over_standard"] > 0 and v2["moved_bytes_model"] >= v2["bytes"] and standard["moved_bytes_model"] is None
    assert v1["moved_bytes_model"] > v2["moved_bytes_model"], "v1 reads and writes o for each block of keys"
    v3 = fattn.json("compare", *flags, "--algorithm", "v2,v3")["rows"][1]
    assert v3["status"] == "unsupported" and "algorithm v3 is for Hopper GPUs; backend cpu has standard, v1 and v2" in v3["reason"]
    again = fattn.json("compare", *record["flags"])
    assert [row["provider"] for row in again["rows"]] == [row["provider"] for row in record["rows"]]
    assert "'v9' is no algorithm to compare" in fattn.refuses("compare", "--algorithm", "standard,v9")
    assert "'auto' is no algorithm to compare" in fattn.refuses("compare", "--algorithm", "auto,v2")
