"""tools/gpu_results.py: the record of the GPU suite becomes a list of rates by turn; tools/compact_records.py: a row a line."""

import importlib.util
import json
import sys

import compact_records
import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("gpu_results", ROOT / "tools" / "gpu_results.py")
gpu_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_results)


def record(**changes):
    row = {"headdim": 64, "causal": True, "seqlen_q": 512, "seqlen_k": 512, "pass": "fwd", "batch": 2, "nheads": 3, "dtype": "bf16", "status": "ok", "kernel": "k",
           "version": "1", "flops_nominal": 1e9}
    rows = [
        {**row, "provider": "fattn", "algorithm": "v2", "time_turn_medians_s": [1e-3, 2e-3]},
        {**row, "provider": "torch-sdpa", "algorithm": "cudnn", "time_turn_medians_s": [4e-3, 5e-3]},
        {**row, "provider": "torch-sdpa", "algorithm": "flash", "time_turn_medians_s": [1.0, 1.0]},
        {**row, "provider": "fattn", "algorithm": "v2", "dtype": "fp16", "time_turn_medians_s": [1.0]},
        {**row, "provider": "torch-sdpa", "algorithm": "cudnn", "status": "unsupported"},
        {**row, "provider": "fattn", "algorithm": "v2", "seqlen_q": 1, "time_turn_medians_s": [1.0]},
    ]
    environment = {"date": "2026-01-01T00:00:00Z", "gpus": [{"name": "NVIDIA H200"}]}
    return {"command": "suite", "flags": ["--suite", "cuda", "--threads", "0"], "complete": True, "environment": environment, "rows": rows, **changes}


def run(tmp_path, monkeypatch, content):
    source = tmp_path / "record.json"
    source.write_text(json.dumps(content))
    monkeypatch.setattr(gpu_results, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_results.py", str(source)])
    return gpu_results.main()


def test_every_turn_of_both_is_an_entry(tmp_path, monkeypatch):
    assert run(tmp_path, monkeypatch, record()) == 0
    assert json.loads((tmp_path / "h200-suite.json").read_text()) == record()
    rates = json.loads((tmp_path / "h200_attention.json").read_text())
    assert [(r["provider"], r["run"], r["flops_per_s"]) for r in rates] == [
        ("fattn", 0, 1e12), ("fattn", 1, 0.5e12), ("cudnn", 0, 0.25e12), ("cudnn", 1, 0.2e12)]
    assert rates[0]["seqlen"] == 512 and rates[0]["causal"] is True and rates[0]["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize("changes", [{"complete": False}, {"flags": ["--suite", "prices"]}, {"flags": ["--suite", "cuda", "--only", "Decode"]},
                                     {"command": "bench", "flags": ["--batch", "2"]}, {"environment": {}}])
def test_anything_else_is_refused(tmp_path, monkeypatch, changes):
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, record(**changes))
    assert not list(tmp_path.glob("*attention*"))


def test_records_have_a_row_a_line(tmp_path):
    deep = {"a": 1, "flags": ["x", 1.5, None], "rows": [{"b": [1, {"c": "é"}]}, {}], "empty": [], "wide": [{"rows": [{"x": i, "y": 0.1} for i in range(400)]}]}
    text = compact_records.text(deep)
    assert json.loads(text) == deep
    lines = text.splitlines()
    assert '  "flags": ["x", 1.5, null],' in lines and '    {"b": [1, {"c": "é"}]},' in lines and '        {"x": 7, "y": 0.1},' in lines and len(lines) == 415
    path = tmp_path / "record.json"
    compact_records.write(path, deep)
    assert path.read_text() == text + "\n" and list(tmp_path.iterdir()) == [path]


def test_records_of_this_project_have_a_row_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compact_records.py", "--check"])
    assert compact_records.main() == 0
    monkeypatch.setattr(compact_records, "RESULTS", tmp_path)
    (tmp_path / "long.json").write_text(json.dumps({"rows": [{"a": 1, "b": 2}]}, indent=1))
    assert compact_records.main() == 1 and "long.json" in capsys.readouterr().err
