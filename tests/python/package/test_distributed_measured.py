"""What `fattn.distributed bench --timeline` and `check --errors` write."""

import json

import pytest

from distributed_ranks import run_ranks
from test_distributed_functions import command


def spans_of(trace: dict, rank: int, part: str) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """(begin, end) by name and hop."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == rank and event["cat"] == part:
            found.setdefault((event["name"], event["args"]["hop"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_a_timeline_shows_transfers_beside_blocks(tmp_path):
    file = tmp_path / "timeline.json"
    (code, printed), _ = run_ranks(2, command, "bench", "--rows", "64", "--timeline", str(file))
    assert code == 0 and len(printed.splitlines()) == 1
    trace = json.loads(file.read_text())
    assert trace["fattn_ring_timeline"] == 1 and trace["otherData"]["ranks"] == 2 and trace["otherData"]["rows"] == 64
    events = trace["traceEvents"]
    assert {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"} == {(0, "rank 0"), (1, "rank 1")}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} == named
    for rank in range(2):
        for part in ("forward", "backward"):
            spans = spans_of(trace, rank, part)
            (keys,), (first,), (second,) = spans["keys", 1], spans["block", 0], spans["block", 1]
            assert keys[0] < first[1], "the keys of hop 1 go before the block of hop 0 is done"
            assert keys[1] <= second[0], "and are there when their own begins"
            for hop, block in ((0, first), (1, second)):
                ((begin, end),) = spans["hop", hop]
                assert begin <= block[0] and block[1] <= end
            assert spans["merge", 1] and spans["wait", 1]
        ((begin, _),) = spans_of(trace, rank, "backward")["gradients", 1]
        assert begin >= spans_of(trace, rank, "backward")["block", 1][0][1], "gradients go back when they are there"
    for part in ("forward", "backward"):
        x = trace["otherData"]["overlap"][part]
        assert 0 <= x["beside_ms"] <= x["transfers_ms"] and x["transfers_ms"] > 0 and x["waits_ms"] >= 0


def names_by_method(rank: int) -> dict[str, set[str]]:
    import torch
    from fattn.distributed._bench import timeline

    traces = {method: timeline(24, 4, 2, 16, torch.float32, torch.device("cpu"), True, method, "zigzag") for method in ("all_gather", "ulysses")}
    return {method: {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"} for method, trace in traces.items()}


def test_timelines_of_other_methods():
    for names in run_ranks(2, names_by_method):
        assert names == {"all_gather": {"hop", "wait", "block", "merge", "keys", "gradients"}, "ulysses": {"hop", "block", "merge", "heads"}}


def refused(rank: int, *arguments: str) -> str:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        command(rank, *arguments)
    return said.getvalue()


refused.makes_group = True


@pytest.mark.parametrize("arguments, words", [(("check", "--timeline", "t.json"), "--timeline is given with check; allowed: with bench"),
                                              (("bench", "--timeline", "/nowhere/t.json"), "fattn: cannot write '/nowhere/t.json': its folder is not there or not writable; name another file "
                                               "with --timeline"),
                                              (("check", "--errors", "/tmp"), "fattn: cannot write '/tmp': it is a folder; name another file with --errors")])
def test_what_is_refused(arguments, words):
    assert words in run_ranks(1, refused, *arguments)[0]


def errors_of_the_schedule_to_compare_with(rank: int) -> dict[str, float]:
    import pathlib
    import sys

    import torch
    from fattn.distributed._bench import largest_error

    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tools"))
    from ring_flash_schedule import ring_flash_attention

    with pytest.raises(ValueError, match="q has 3 rows and k 3; this schedule takes as many of both, an even number"):
        ring_flash_attention(*(torch.zeros(1, 3, 2, 8),) * 3)
    return largest_error(3 * 22, 4, 2, 16, torch.float32, torch.device("cpu"), ring_flash_attention, causal=True)


def test_the_schedule_to_compare_with_is_right():
    for errors in run_ranks(3, errors_of_the_schedule_to_compare_with):
        assert set(errors) == {"o", "dq", "dk", "dv"} and all(0 <= error <= 2e-6 for error in errors.values()), errors


def test_errors_over_those_of_one_process(tmp_path):
    file = tmp_path / "errors.json"
    (code, printed), _ = run_ranks(2, command, "check", "--rows", "24", "--errors", str(file))
    record = json.loads(file.read_text())
    assert code == 0 and len(printed.splitlines()) == 1 and record["fattn_ring_errors"] == 1 and record["seqlen"] == 49
    assert len(record["rows"]) == 3 * 4 * 8 and {row["dtype"] for row in record["rows"]} == {"float32", "bfloat16", "float16"}
    for row in record["rows"]:
        for name in ("o", "dq", "dk", "dv"):
            x = row[name]
            assert 0 < x["rms"] <= x["largest"] and x["rms_ratio"] == pytest.approx(x["rms"] / x["rms_one"], rel=1e-3) and x["rms_ratio"] <= 1.25
            assert x["largest"] < {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}[row["dtype"]]


def ratios_of_other_numbers(rank: int) -> float:
    """Ranks whose results are rounded once more are seen."""
    import fattn.distributed._errors as errors
    import torch

    exact = errors.ring_attention
    errors.ring_attention = lambda *tensors, **options: exact(*tensors, **options) * (1 + 2e-6)
    record = errors.record_of(24, 4, 2, 16, (torch.float32,), torch.device("cpu"), ("ring",))
    return errors.failed(record) / len(record["rows"])


def test_errors_that_are_greater_are_counted():
    assert run_ranks(2, ratios_of_other_numbers) == [1.0, 1.0]
