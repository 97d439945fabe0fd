"""fattn advise: settings for a memory, presets that are flags spelled out, refusals with what would fit; when to use which, by measuring."""
import json

import pytest

from conftest import screen

SIXTEEN = ["advise", "--gpu-memory", "16GiB", "--seqlen", "2048", "--model", "medium"]


def without_settings(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "settings"}


def test_settings(fattn):
    record = fattn.json(*SIXTEEN)
    assert record["fits"] and record["memory"]["bytes"] <= record["memory_bytes"] == 16 * 2**30
    assert record["memory"]["bytes"] == pytest.approx(sum(line["bytes"] for line in record["memory"]["lines"]))
    assert record["batch"] * record["accumulation"] == record["effective_batch"] >= 32
    assert record["standard_memory"]["bytes"] > record["memory"]["bytes"]
    assert record["time"] is None and "--peak" in record["time_unknown"]
    assert fattn.json("advise", "--gpu-memory", "80GiB", "--model", "small")["model"]["parameters"] == 124439808
    for setting in record["settings"]:
        if setting["where"] == "PyTorch":
            compile(setting["text"], "settings", "exec")


@pytest.mark.parametrize("name, memory, seqlen, model", [("8gb", "8GiB", 1024, "small"), ("16gb", "16GiB", 2048, "medium"), ("24gb", "24GiB", 4096, "large")])
def test_presets_are_flags_spelled_out(fattn, name, memory, seqlen, model):
    preset = fattn.json("advise", "--preset", name)
    assert preset == fattn.json("advise", "--gpu-memory", memory, "--seqlen", seqlen, "--model", model)
    assert preset["fits"] and preset["batch"] >= 1
    assert fattn.json("advise", "--preset", name, "--seqlen", "512") == fattn.json("advise", "--gpu-memory", memory, "--seqlen", "512", "--model", model)


def test_what_does_not_fit(fattn):
    record = fattn.json("advise", "--gpu-memory", "1GiB", "--model", "xl")
    assert not record["fits"] and record["batch"] is None and record["why"] and record["would_fit"]
    text = " ".join(fattn("advise", "--gpu-memory", "1GiB", "--model", "xl").stdout.split())
    assert "Does not fit, because" in text and "What would fit:" in text
    smaller = fattn.json("advise", "--gpu-memory", "1GiB", "--model", "small", "--task", "infer")
    assert smaller["fits"] and smaller["batch"] >= 1 and smaller["accumulation"] == 1


def test_stated_rates(fattn):
    record = fattn.json(*SIXTEEN, "--peak", "312e12", "--bandwidth", "2e12")
    time = record["time"]
    assert time["bound"] and time["micro_batch_s"] == pytest.approx(sum(line["seconds"] for line in time["lines"]))
    assert time["step_s"] == pytest.approx(record["accumulation"] * time["micro_batch_s"] + time["optimizer_s"])
    assert time["standard_step_s"] > time["step_s"]
    assert "no less than" in fattn(*SIXTEEN, "--peak", "312e12", "--bandwidth", "2e12").stdout


@pytest.mark.parametrize("flags", [[*SIXTEEN[1:]], ["--gpu-memory", "1GiB", "--model", "params=70B"], ["--preset", "8gb", "--peak", "1e14", "--bandwidth", "1e12"]])
def test_it_fits_the_terminal(fattn, flags):
    lines = screen(fattn.in_terminal("advise", *flags, width=80))
    assert all(len(line) <= 80 for line in lines), [line for line in lines if len(line) > 80]


def test_when(fattn, tmp_path):
    record = fattn.json("advise", "--when", "--longest", "24", "--precision", "fp32")
    assert [rule["what"].split(",")[0] for rule in record["rules"]] == ["inference", "training", "decode"]
    for rule in record["rules"]:
        lengths = [duel["seqlen"] for duel in rule["duels"]]
        assert lengths == sorted(lengths) and lengths[0] == 8 and lengths[-1] == 24
        for duel in rule["duels"]:
            if duel["a"] and duel["b"]:
                apart = duel["a"]["ci_low_s"] > duel["b"]["ci_high_s"] or duel["b"]["ci_low_s"] > duel["a"]["ci_high_s"]
                assert (duel["faster"] is not None) == apart
        assert rule["conclusion"].startswith(rule["what"])


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "--gpu-memory"),
        (["--gpu-memory", "0"], "--gpu-memory"),
        (["--gpu-memory", "16"], "--gpu-memory: 16 bytes is not in range; allowed: 1MiB or more, with a unit, as 512MiB or 16GiB"),
        (["--gpu-memory", "16GiB", "--model", "midium"], "did you mean 'medium'"),
        (["--gpu-memory", "16GiB", "--model", "params=-3"], "params"),
        (["--gpu-memory", "16GiB", "--peak", "1e12"], "--bandwidth"),
        (["--gpu-memory", "16GiB", "--seqlen", "0"], "--seqlen"),
        (["--preset", "8bg"], "8gb"),
        (["--gpu-memory", "16GiB", "--longest", "64"], "--when"),
        (["--gpu-memory", "16GiB", "--device", "gpu"], "no device"),
    ],
)
def test_what_is_refused(fattn, flags, words):
    assert words in fattn.refuses("advise", *flags)


def test_a_record_is_not_overwritten_by_an_error(fattn, tmp_path):
    file = tmp_path / "advice.json"
    file.write_text("kept")
    fattn.refuses("advise", "--model", "small", "--json", file)
    assert file.read_text() == "kept"
    fattn(*SIXTEEN, "--json", file)
    assert json.loads(file.read_text())["batch"] >= 1
