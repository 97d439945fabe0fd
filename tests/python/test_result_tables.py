"""tools/make_result_tables.py and its parts: the column of accuracy beside speed, the tables of accuracy, of values and of prices, the index of records."""

import importlib.util
import json
import sys

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("make_result_tables", ROOT / "tools" / "make_result_tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)
result_index, result_options = sys.modules["result_index"], sys.modules["result_options"]


def suite(with_errors):
    """fattn takes half the time of both peers; its RMS error is 1.2 times FlashAttention-2's."""
    rows = []
    for which in tables.PASSES:
        for n in tables.GPU_LENGTHS:
            for headdim, causal in tables.COLUMNS:
                for provider, algorithm, seconds, error in (("fattn", "v3", 1e-3, 1.2), ("torch-sdpa", "flash", 2e-3, 1.0), ("torch-sdpa", "cudnn", 2e-3, 1.0)):
                    checks = [{"tensor": tensor, "where": where, "error": 1.0, "allowed": 2.0, "pass": True} for tensor in tables.TENSORS[which] for where in ("a", "b")]
                    if with_errors:
                        for check in checks:
                            check |= {"rms_error": 1e-3 * error if check["tensor"] in ("o", "dk") else 1e-3, "rms_peer": 1e-3}
                    rows.append({"dtype": "bf16", "pass": which, "seqlen_q": n, "seqlen_k": n, "headdim": headdim, "causal": causal, "status": "ok", "provider": provider,
                                 "algorithm": algorithm, "time_median_s": seconds, "flops_per_s": 5e14, "checks": checks})
    return {"rows": rows, "environment": {"gpus": [{"name": "NVIDIA H200"}]}}


@pytest.mark.parametrize("with_errors", [True, False])
def test_accuracy_beside_speed(tmp_path, monkeypatch, with_errors):
    monkeypatch.setattr(tables, "GPU_RECORD", tmp_path / "suite.json")
    (tmp_path / "suite.json").write_text(json.dumps(suite(with_errors)))
    block = tables.gpu_block(tables.TEXT["README.md"])
    lines = [line for line in block.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 2 * len(tables.GPU_LENGTHS)
    assert lines[0].endswith("| RMS error |") == with_errors
    for line in lines[1:]:
        assert "500 (2.00 / 2.00)" in line and line.endswith("| 1.20 |") == with_errors
    assert ("over FlashAttention-2's" in block) == with_errors


def test_accuracy_and_values(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ACCURACY_RECORD", tmp_path / "accuracy.json")
    monkeypatch.setattr(tables, "VALUES_RECORD", tmp_path / "values.json")
    assert tables.accuracy_block() == tables.values_block(tables.VALUES_RECORD, "option") == ""
    where = {"device": "a GPU", "fattn": "1", "torch": "2"}
    row = {"dtype": "bf16", "headdim": 64, "causal": False, "sigma": 1.0, "option": "none", "tensor": "o", "rms_ratio": 1.05, "max_ratio": 1.5, "peer": "flash", "goal": "met", **where}
    rows = [row, {**row, "causal": True, "rms_ratio": 1.2, "goal": "missed"}, {**row, "sigma": 3.0, "tensor": "dq", "rms_ratio": None, "goal": "missed"},
            {**row, "peer": "cudnn", "rms_ratio": 9.0, "goal": "none"}]
    (tmp_path / "accuracy.json").write_text(json.dumps(rows))
    block = tables.accuracy_block()
    assert "| bf16, 64 | 1.20 / 1.50 | - |" in block and "| none | 1.20 / 1.50 | inf / 1.50 | - | - |" in block
    words = " ".join(block.split())
    assert "3 ratios, 2 of them miss a goal (o 1, dq 1)" in words and "cudnn 9.00" in words
    row = {"algorithm": "v2", "dtype": "bf16", "headdim": 64, "pass": "fwd", "option": "causal", "values": "nan", "where": "hidden, all", "ratio": 1.25, "same_bits": True, **where}
    (tmp_path / "values.json").write_text(json.dumps([row, {**row, "pass": "bwd", "ratio": 3.5, "same_bits": False}, {**row, "algorithm": "decode", "ratio": 1.0}]))
    block = tables.values_block(tables.VALUES_RECORD, "option")
    assert "| causal | 1.25 / 3.50 | 1.00 |" in block and "in 1 of them" in " ".join(block.split())
    assert "| nan, hidden | 1.25 / 3.50 | 1.00 |" in tables.values_block(tables.VALUES_RECORD, "values")


def test_prices_have_a_column_a_shape(monkeypatch):
    rows = [{"option": option, "problem": f"B2 S64 H4 D64 bf16{mask}", "pass": which, "price": price}
            for option, mask, which, price in (("ALiBi", "", "fwd", 0.02), ("ALiBi", "", "bwd", 0.031), ("window 7,-1", " causal", "fwd", 0.5), ("window 7,-1", " causal", "bwd", 1.0),
                                               ("window 7,-1", " causal", "fwd", 0.7), ("window 7,-1", " causal", "bwd", 1.2))]
    monkeypatch.setattr(result_options, "load", lambda name: {"summary": rows})
    lines = result_options.prices(["a"]).splitlines()
    assert lines == ["| option | 64 |", "|--|--|", "| ALiBi | 2, 3 |", "| window, over causal rows | 60, 110 |"], "windows over causal rows need no column, and what was measured twice is the mean"
    rows.append({"option": "nothing known", "problem": "B2 S64 H4 D64 bf16", "pass": "fwd", "price": 1.0})
    with pytest.raises(SystemExit, match="nothing known"):
        result_options.prices(["a"])


def test_a_record_without_words_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(result_index, "RESULTS", tmp_path)
    (tmp_path / "new.json").write_text("{}")
    monkeypatch.setattr(result_index, "load", lambda name: {"rows": []})
    with pytest.raises(SystemExit, match="new.json"):
        result_index.index()


def test_every_record_has_a_row():
    index = (ROOT / "docs" / "results" / "records.md").read_text()
    assert [path.name for path in (ROOT / "docs" / "results").glob("*.json") if f"]({path.name})" not in index] == []


def test_pages_are_what_the_records_say(monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_result_tables.py", "--check"])
    assert tables.main() == 0
