"""fattn sweep: the ci preset from tables to figures, resuming, interrupts, rows that say why they are empty, wrong input."""
import json
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import schema_of, screen

QUICK = ["--nheads", "1", "--headdim", "16", "--min-time", "0", "--repeats", "2", "--max-time", "0.1", "--warmup", "1"]


@pytest.fixture(scope="module")
def ci(fattn, tmp_path_factory):
    """The record, the folder with what was written, and what was printed."""
    folder = tmp_path_factory.mktemp("ci")
    done = fattn("sweep", "--preset", "ci", "--json", folder / "sweep.json", "--figure", folder / "figures", "--status", folder / "status.json")
    record = json.loads((folder / "sweep.json").read_text())
    schema_of(record).validate(record)
    return record, folder, done.stdout


def test_every_value_contestant_and_pass_has_a_row(ci):
    record, _, printed = ci
    assert [(r["value"], r["pass"], r["contestant"]) for r in record["rows"]] == [
        (n, p, c) for n in (64, 128, 256) for p in ("fwd", "bwd") for c in ("standard", "fattn")]
    assert record["complete"] and record["status"] == "ok"
    for row in record["rows"]:
        assert row["seqlen_q"] == row["value"] and row["samples"] >= 2
        assert row["tokens_per_s"] == pytest.approx(row["value"] / row["time_median_s"])
        base = next(r for r in record["rows"] if (r["value"], r["pass"], r["contestant"]) == (row["value"], row["pass"], "standard"))
        assert row["speedup_over_baseline"] == pytest.approx(base["time_median_s"] / row["time_median_s"])
        assert row["memory_share_of_baseline"] == pytest.approx(row["extra_bytes"] / base["extra_bytes"])
    assert {(f["contestant"], f["pass"], f["points"]) for f in record["fits"]} == {(c, p, 3) for c in ("standard", "fattn") for p in ("fwd", "bwd")}
    for fit in record["fits"]:
        assert fit["exponent_low"] <= fit["exponent"] <= fit["exponent_high"]
    text = " ".join(printed.split())
    for finding in record["findings"]:
        assert " ".join(finding.split()) in text
    assert "forward (fwd)" in printed and "backward (bwd)" in printed and "⠠" not in printed


def test_figures_are_whole_documents(ci):
    _, folder, printed = ci
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["sweep-seqlen-bwd.svg", "sweep-seqlen-fwd.svg"]
    for path in (folder / "figures").iterdir():
        assert f"figure: {path}" in "".join(printed.replace("\n", " ").split("  ")) or path.name in printed
        svg = ElementTree.parse(path).getroot()
        texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert {"standard", "fattn", "64", "128", "256"} <= set(texts)
        for part in ("time", "peak extra memory", "speed-up over standard", "how time grows with seqlen", "FLOP/s"):
            assert any(text.endswith(part) for text in texts), part
        assert any(re.match(r"fattn: seqlen\^-?\d", text) for text in texts) and any("slope 2" in text for text in texts)
        assert any(text.startswith("ceiling measured here") for text in texts)


def test_the_status_file_says_that_it_is_done(ci):
    status = json.loads((ci[1] / "status.json").read_text())
    schema_of(status).validate(status)
    assert (status["command"], status["state"], status["step"], status["of"]) == ("sweep", "done", 3, 3)


def test_what_is_there_is_not_measured_again(fattn, ci, tmp_path):
    record, folder, _ = ci
    target = tmp_path / "sweep.json"
    fattn("sweep", "--preset", "ci", "--values", "32,64,128,256", "--resume", folder / "sweep.json", "--json", target)
    longer = json.loads(target.read_text())
    assert [r["value"] for r in longer["rows"][:4]] == [32] * 4
    assert longer["rows"][4:] == record["rows"]
    assert {fit["points"] for fit in longer["fits"]} == {4}
    before = target.read_text()
    said = fattn("sweep", "--preset", "ci", "--values", "32,64,128,256", "--json", target, "--resume").stdout
    assert json.loads(target.read_text())["rows"] == longer["rows"] and "measured in this run" not in said
    assert json.loads(before)["findings"] == json.loads(target.read_text())["findings"]


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda r: r["environment"]["cpu"].update(model="Z80"), "it was measured on the processor Z80"),
        (lambda r: r["environment"].update(library_version="0.0.1"), "it was measured with fattn 0.0.1"),
        (lambda r: r["flags"].remove("--no-causal"), "it was measured without --no-causal"),
        (lambda r: r.update(fattn_sweep=7), "version 7; this program reads version 1"),
        (lambda r: r.pop("peaks"), "is no whole record of a sweep"),
        (lambda r: r["rows"][0].pop("contestant"), "not possible"),
    ],
)
def test_another_record_is_not_resumed(fattn, ci, tmp_path, spoil, words):
    record = json.loads(json.dumps(ci[0]))
    spoil(record)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    before = other.read_bytes()
    said = fattn("sweep", "--preset", "ci", "--json", other, "--resume", status=2)
    assert words in said.stderr and said.stdout == ""
    assert other.read_bytes() == before


def test_half_a_record_is_not_resumed(fattn, ci, tmp_path):
    half = tmp_path / "half.json"
    half.write_text((ci[1] / "sweep.json").read_text()[:5000])
    assert "is no JSON, or a part of it is missing" in fattn("sweep", "--preset", "ci", "--json", half, "--resume", status=2).stderr
    assert len(half.read_text()) == 5000
    assert "cannot be read" in fattn("sweep", "--preset", "ci", "--resume", tmp_path / "none.json", status=2).stderr


def test_what_does_not_fit_has_a_row_and_is_not_allocated(fattn):
    record = fattn.json("sweep", "--over", "seqlen", "--values", "32,4000000000,1000000000000", "--pass", "fwd", *QUICK, "--provider", "standard", "--provider",
                        "v1", "--provider", "fattn")
    status = {(r["value"], r["contestant"]): r["status"] for r in record["rows"]}
    assert status[32, "standard"] == status[32, "fattn"] == "ok"
    assert {status[n, "fattn"] for n in (4000000000, 1000000000000)} == {"out_of_memory"}
    assert all(r["reason"] for r in record["rows"] if r["status"] != "ok")
    assert any("standard does not fit into memory from seqlen 4000000000 on." in finding for finding in record["findings"])
    assert all(fit["exponent"] is None for fit in record["fits"])


def test_what_takes_too_long_has_a_row(fattn):
    began = time.monotonic()
    record = fattn.json("sweep", "--over", "seqlen", "--values", "32,262144", "--pass", "fwd", "--nheads", "8", *QUICK[2:], "--patience", "5", "--provider",
                        "fattn")
    small, large = record["rows"]
    assert small["status"] == "ok" and large["status"] == "timeout"
    assert re.search(r"would take about .+, and the sweep has .+ left of .+\. Allow it with --patience ", large["reason"])
    assert time.monotonic() - began < 60


def test_ctrl_c_keeps_what_was_measured(fattn, tmp_path):
    target, status = tmp_path / "sweep.json", tmp_path / "status.json"
    arguments = ["sweep", "--over", "seqlen", "--values", "32,8192", "--pass", "fwd", *QUICK[:4], "--repeats", "30", "--max-time", "600", "--min-time",
                 "600", "--json", str(target), "--status", str(status)]
    # The small one ends with 500 samples; of the large one they would take a minute.
    process = subprocess.Popen([fattn.path, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    end = time.monotonic() + 60
    while not target.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert json.loads(status.read_text())["state"] == "running"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    record = json.loads(target.read_text())
    schema_of(record).validate(record)
    assert not record["complete"] and {r["value"] for r in record["rows"]} == {32}
    assert record["findings"][0].startswith("The sweep is not complete")
    assert json.loads(status.read_text())["state"] == "interrupted"


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_shows_a_plot(fattn, ci, colour):
    arguments = ["sweep", "--preset", "ci", "--resume", ci[1] / "sweep.json"]
    text = fattn.in_terminal(*arguments, width=60, env={} if colour else {"NO_COLOR": "1"})
    lines = screen(text)
    assert sum("time of a call by seqlen" in line for line in lines) == 2
    assert any(re.search(r"o standard +x fattn", line) for line in lines)
    assert all(len(line) <= 60 for line in lines), max(lines, key=len)
    assert ("\x1b[36mo" in text) == colour


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "what is swept"),
        (["--preset", "head"], "did you mean 'heads'"),
        (["--over", "seqln", "--values", "1"], "did you mean 'seqlen'"),
        (["--over", "seqlen"], "--from A --to B or --values"),
        (["--over", "seqlen", "--from", "100"], "give --to, too"),
        (["--over", "seqlen", "--from", "200", "--to", "100"], "--to 100 is less than --from 200"),
        (["--over", "seqlen", "--from", "1", "--to", "9", "--step", "0"], "allowed: 1 or more"),
        (["--over", "seqlen", "--from", "1", "--to", "9", "--factor", "1"], "allowed: from 1.001"),
        (["--over", "seqlen", "--from", "1", "--to", "9", "--factor", "nan"], "not in range"),
        (["--over", "seqlen", "--from", "1", "--to", "9999", "--step", "1"], "more than 64 values"),
        (["--over", "seqlen", "--values", "1,x"], "'x' in --values is no whole number"),
        (["--over", "seqlen", "--values", "0"], "seqlen 0 is no size"),
        (["--over", "seqlen", "--values", "1,2", "--to", "4"], "leave one of them out"),
        (["--over", "nheads", "--values", "3", "--embed", "512"], "3 does not divide 512"),
        (["--over", "embed", "--values", "100", "--nheads", "8"], "8 does not divide 100"),
        (["--over", "seqlen", "--values", "64", "--fix", "embed"], "batch or tokens can stay as it is"),
        (["--over", "seqlen", "--values", "64", "--seqlen", "9"], "the sweep over seqlen sets it"),
        (["--over", "seqlen", "--values", "64", "--pass", "fwd,up"], "'up' is no pass"),
        (["--over", "seqlen", "--values", "64", "--algorithm", "v2,v9"], "'v9' is no algorithm"),
        (["--over", "seqlen", "--values", "64", "--provider", "nobody"], "there is no provider nobody"),
        (["--over", "seqlen", "--values", "64", "--baseline", "v2"], "'v2' is no contestant of this sweep"),
        (["--preset", "ci", "--over", "batch"], "the preset ci sweeps over seqlen"),
        (["--preset", "ci", "--resume"], "name the record to go on from"),
        (["--preset", "ci", "--figure", "/nonexistent/x.svg"], "cannot be created"),
        (["--preset", "ci", "--figure", "/nonexistent/x.png"], "neither a folder nor the name of an .svg file"),
        (["--preset", "ci", "--figure", "/dev/null"], "neither a folder nor the name of an .svg file"),
        (["--preset", "ci", "--status", "/nonexistent/x"], "cannot be created"),
    ],
)
def test_wrong_input_is_one_clear_line(fattn, arguments, words):
    said = fattn("sweep", *arguments, status=2, timeout=10)
    assert words in said.stderr and said.stdout == ""
    assert len(said.stderr.strip().splitlines()) <= 2


def test_presets_are_listed(fattn):
    text = fattn("sweep", "--preset", "list").stdout
    for name in ("headline", "seqlen", "batch", "heads", "embed", "gpt2-medium", "ci"):
        assert re.search(rf"^{name} ", text, re.M)
