"""The simulator: it counts what the schedule computes, its limits are those of arithmetic, and a calibration finds constants that are known."""

import json

import pytest

pytest.importorskip("torch.distributed")

import torch

from fattn.distributed._schedule import Problem
from fattn.distributed.simulate.calibrate import calibrate, errors, read_records
from fattn.distributed.simulate.command import main
from fattn.distributed.simulate.model import Constants, Shape, limit, simulated
from fattn.distributed.simulate.work import work_of

FREE = {"call": 0.0, "backward_call": 0.0, "merged_bytes": float("inf"), "inside_bytes": float("inf"), "inside_latency": 0.0, "between_bytes": float("inf"), "between_latency": 0.0}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("layout", "seqlen_q", "seqlen_k", "causal", "window"), [
    ("zigzag", 61, 61, True, (-1, -1)), ("contiguous", 61, 45, True, (-1, -1)), ("zigzag", 40, 61, False, (7, 3)), ("contiguous", 61, 61, True, (5, -1)),
    ("zigzag", 19, 45, False, (-1, -1)), ("contiguous", 45, 19, True, (9, 2))])
def test_pairs_are_those_of_the_mask(layout, seqlen_q, seqlen_k, causal, window, gathered):
    away = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    seen &= away <= 0 if causal else seen
    seen &= away >= -window[0] if window[0] >= 0 else seen
    seen &= away <= window[1] if window[1] >= 0 else seen
    for nranks in (1, 3, 4):
        work = work_of(Problem(nranks, layout, seqlen_q, seqlen_k, causal, window, gathered=gathered))
        assert work.pairs.sum() == seen.sum()
        if nranks > 1 and not any(x >= 0 for x in window) and not causal:
            assert work.received.sum() == (nranks - 1) * seqlen_k


def test_nothing_but_computing_is_one_gpus_rate():
    constants = Constants(1e14, 0.5e14, **FREE)
    for method, degree in (("ring", 1), ("all_gather", 1), ("ulysses", 8), ("mixed", 4)):
        times = simulated(Shape(8, 1024, 8, 8, 64, method=method, degree=degree), constants)
        assert times.share(False) == pytest.approx(1, rel=1e-3) and times.share(True) == pytest.approx(1, rel=1e-3)
    pairs = 4 * 64 * 8 * (8192 * 8193 / 2) / 8
    assert times.forward == pytest.approx(pairs / 1e14) and times.forward_backward == pytest.approx(pairs / 1e14 + 2.5 * pairs / 0.5e14)


def test_unequal_work_waits_for_the_last_rank():
    shape = Shape(8, 1024, 8, 8, 64, layout="contiguous")
    times = simulated(shape, Constants(1e14, 1e14, **FREE))
    assert times.share(False) == pytest.approx(4 / 7.5, rel=1e-2)  # half of the squares in the mean, of 7.5 of the last rank
    name, part = limit(shape, Constants(1e14, 1e14, **FREE))
    assert name == "unequal work" and part == pytest.approx(1 - 4 / 7.5, rel=1e-2)


def test_slow_links_are_the_time():
    constants = Constants(1e18, 1e18, **FREE | {"inside_bytes": 1e9, "between_bytes": 1e8})
    keys = 1000 * 2 * 2 * 64 * 2
    one_host = Shape(4, 1000, 4, 2, 64, causal=False)
    assert simulated(one_host, constants).forward == pytest.approx(3 * keys / 1e9, rel=1e-2)
    assert simulated(one_host, constants).forward_backward == pytest.approx((6 + 3 * 2) * keys / 1e9, rel=0.2)  # gradients are of fp32
    assert limit(one_host, constants)[0] == "links inside"
    hosts = one_host._replace(gpus_per_host=2)
    assert simulated(hosts, constants).forward == pytest.approx(3 * keys / 1e8, rel=1e-2) and limit(hosts, constants)[0] == "links between"
    assert simulated(hosts._replace(method="all_gather"), constants).forward == pytest.approx((2 * keys / 1e8 + keys / 1e9), rel=0.06)
    ulysses = simulated(one_host._replace(nheads_k=4, method="ulysses", degree=4), constants)
    assert ulysses.forward == pytest.approx(3 / 4 * 1000 * 64 * 2 * (3 * 4 + 4) / 1e9, rel=2e-2)


def test_latency_shows_in_short_hops():
    shape = Shape(8, 16, 4, 4, 64)
    constants = Constants(1e15, 1e15, **FREE | {"inside_latency": 1e-4})
    assert limit(shape, constants)[0] == "latency"
    assert simulated(shape, constants).forward == pytest.approx(7e-4, rel=1e-2)


TRUE = Constants(4e14, 3e14, 2e-5, 6e-5, 3e-4, 8e11, 2e11, 3e-5)


def made_up() -> list[dict]:
    """Records as `bench` writes them, of constants that are known."""
    records = []
    for rows, nheads, nheads_k, method in ((1024, 8, 8, "ring"), (4096, 8, 2, "ring"), (8192, 32, 8, "ring"), (2048, 32, 32, "ulysses"), (32768, 16, 16, "ring"),
                                           (16384, 16, 16, "all_gather"), (32768, 8, 8, "mixed")):
        degree = {"ulysses": 2, "mixed": 2}.get(method, 1)
        times = simulated(Shape(2, rows, nheads, nheads_k, 128, method=method, degree=degree, gpus_per_host=2), TRUE)
        records.append({"ranks": 2, "rows": rows, "nheads": nheads, "nheads_k": nheads_k, "headdim": 128, "dtype": "bfloat16", "causal": True, "method": method,
                        "layout": "zigzag", "forward": {"seconds": times.forward, "seconds_alone": times.alone_forward},
                        "forward_backward": {"seconds": times.forward_backward, "seconds_alone": times.alone_forward_backward}})
    return records


def test_calibration_finds_what_is_known(tmp_path):
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, made_up())))
    (tmp_path / "record.json").write_text(json.dumps({"fattn_ring": 1, "rows": made_up()}))
    records = read_records(str(tmp_path / "lines.json"))
    assert records == read_records(str(tmp_path / "record.json"))
    found = calibrate(records)
    assert len(found.left_out) == 2 and len(found.fitted) == 5
    assert found.constants.forward_flops == pytest.approx(TRUE.forward_flops, rel=1e-3) and found.constants.backward_call == pytest.approx(6e-5, rel=1e-2)
    assert all(abs(off) < 0.03 for *_, off in errors(found, found.left_out)), errors(found, found.left_out)


def test_command(tmp_path, capsys):
    (tmp_path / "bench.json").write_text(json.dumps(made_up()))
    assert main(["--calibrate", str(tmp_path / "bench.json"), "--ranks", "8", "64", "--rows", "4096"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "records that were left out:" in printed and "% " in printed
    assert main(["--tflops", "500", "--ranks", "8", "16", "--json", "--window", "4096", "--layout", "contiguous"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in record["rows"]] == [8, 16] and all(0.5 < row["forward_share"] < 1.1 for row in record["rows"])
    for arguments, words in (([], "the rate of one GPU is to be said once"), (["--tflops", "0"], "--tflops is 0.0; it must be above 0"),
                             (["--tflops", "5", "--ranks", "2000"], "--ranks is 2000; allowed: 1 to 1024"),
                             (["--tflops", "5", "--method", "ulysses", "--nheads", "12", "--ranks", "8"], "8 ranks exchange heads, of 8 ranks, 12 heads and 12 of keys"),
                             (["--calibrate", str(tmp_path / "none")], "No such file"), (["--record", str(tmp_path / "bench.json")], "has no row of fattn")):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "bench.json").write_text(json.dumps(made_up()[:2]))
    assert main(["--calibrate", str(tmp_path / "bench.json")]) == 2
    assert "has 2 different shapes; a calibration needs 3" in capsys.readouterr().err
