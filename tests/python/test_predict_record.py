"""Records of `fattn predict --held-out` in docs/results: their scores are computed again from their rows, and what docs/results/predictions.md says of them."""
import json
import math
import re

import pytest
from conftest import ROOT, schema_of

RECORDS = sorted((ROOT / "docs" / "results").glob("*-predict.json"))
FEWEST = 200  # shapes of a record, in each pass
SAME = dict(rel_tol=1e-9, abs_tol=1e-12)
SHAPE = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim", "headdim_v", "causal", "dtype")


def name_of(row: dict) -> str:
    def pair(letter, first, second):
        return f"{letter}{row[first]}" + (f"/{row[second]}" if row[second] != row[first] else "")

    return " ".join([f"B{row['batch']}", pair("S", "seqlen_q", "seqlen_k"), pair("H", "nheads", "nheads_k"), pair("D", "headdim", "headdim_v"), row["dtype"]]
                    + (["causal"] if row["causal"] else []))


def scores_of(rows: list[dict]) -> dict:
    """Of the rows of one pass, from predicted and measured times alone."""
    errors = [(row["predicted_s"] / row["measured_s"] - 1, row) for row in rows if row["predicted_s"] is not None and row["measured_s"] is not None]
    size = sorted(abs(error) for error, _ in errors)
    worst, worst_row = max(errors, key=lambda pair: abs(pair[0]))
    memory = [row for row in rows if row["measured_extra_bytes"] is not None]
    return {
        "count": len(size),
        "mean_absolute_error_fraction": math.fsum(size) / len(size),
        "error_95_fraction": size[math.ceil(0.95 * len(size)) - 1],
        "bias_fraction": math.fsum(error for error, _ in errors) / len(errors),
        "covered_fraction": sum(row["predicted_low_s"] <= row["measured_s"] <= row["predicted_high_s"] for _, row in errors) / len(errors),
        "worst": name_of(worst_row),
        "worst_error_fraction": worst,
        "memory_count": len(memory),
        "memory_exact": sum(row["measured_extra_bytes"] == row["extra_bytes"] for row in memory),
    }


def mistakes_of(record: dict) -> list[str]:
    """What a record says that its rows do not."""
    found = []
    if record["what"] != "held_out" or not record["complete"]:
        found.append("it is no complete record of held-out shapes")
    of_pass = {which: [row for row in record["rows"] if row["pass"] == which] for which in ("fwd", "bwd")}
    if [len(rows) for rows in of_pass.values()] != [record["held_out"]["count"]] * 2 or record["held_out"]["count"] < FEWEST:
        found.append(f"it has not the shapes that it names, or fewer than {FEWEST}")
    if [[row[k] for k in SHAPE] for row in of_pass["fwd"]] != [[row[k] for k in SHAPE] for row in of_pass["bwd"]]:
        found.append("its passes are of different shapes")
    for index, row in enumerate(record["rows"]):
        timed = row["predicted_s"] is not None and row["measured_s"] is not None
        if timed != (row["error_fraction"] is not None) or (timed and not math.isclose(row["error_fraction"], row["predicted_s"] / row["measured_s"] - 1, **SAME)):
            found.append(f"row {index} has another error than its times")
        if not timed and not (row["reason"] or row["unknown"]):
            found.append(f"row {index} lacks a time and does not say why")
        if row["measured_s"] is not None and not 0 < row["measured_low_s"] <= row["measured_s"] <= row["measured_high_s"]:
            found.append(f"row {index} has a median outside its interval")
    for which, rows in of_pass.items():
        for key, value in scores_of(rows).items():
            said = record["scores"][which][key]
            if not (math.isclose(said, value, **SAME) if isinstance(value, float) else said == value):
                found.append(f"{which} {key}: {said}, its rows say {value}")
    return found


def unsaid(record: dict, file: str, text: str) -> list[str]:
    """Figures of a record that the text beside a link to it lacks, or has otherwise."""
    sections = [re.sub(r"\s+", " ", section) for section in text.split("\n## ") if f"\n[{file}]" in section]
    assert len(sections) == 1, f"a section that begins with a link to {file} is wanted in docs/results/predictions.md"
    forward, backward = (scores_of([row for row in record["rows"] if row["pass"] == which]) for which in ("fwd", "bwd"))
    wanted = [f"{record['held_out']['count']} shapes",
              f"Mean absolute error {100 * forward['mean_absolute_error_fraction']:.1f} % forward and {100 * backward['mean_absolute_error_fraction']:.1f} % backward",
              f"95 of 100 within {100 * forward['error_95_fraction']:.0f} and {100 * backward['error_95_fraction']:.0f} %",
              f"{forward['worst']} forward ({100 * abs(forward['worst_error_fraction']):.0f} %",
              f"{backward['worst']} backward ({100 * abs(backward['worst_error_fraction']):.0f} %"]
    return [words for words in wanted if words not in sections[0]]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_scores_are_those_of_the_rows(path):
    record = json.loads(path.read_text())
    schema_of(record).validate(record)
    assert mistakes_of(record) == []
    assert unsaid(record, path.name, (ROOT / "docs" / "results" / "predictions.md").read_text()) == []


def test_there_is_a_record():
    assert RECORDS


SPOILED = {
    "a faster prediction": lambda record: record["rows"][0].update(predicted_s=record["rows"][0]["predicted_s"] / 2),
    "another time": lambda record: record["rows"][3].update(measured_s=record["rows"][3]["measured_s"] * 1.01, measured_high_s=1.0),
    "a row left out": lambda record: record["rows"].pop(),
    "the worst left out": lambda record: record["scores"]["bwd"].update(worst="B1 S1 H1 D64 fp32"),
    "a better mean": lambda record: record["scores"]["fwd"].update(mean_absolute_error_fraction=0.01),
    "a better 95th percentile": lambda record: record["scores"]["bwd"].update(error_95_fraction=0.01),
    "no number at all": lambda record: record["scores"]["bwd"].update(bias_fraction=math.nan),
    "memory that was not measured": lambda record: record["rows"][1].update(measured_extra_bytes=1),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_record_is_found(what):
    record = json.loads(RECORDS[0].read_text())
    SPOILED[what](record)
    assert mistakes_of(record)


def test_other_figures_beside_it_are_found():
    record = json.loads(RECORDS[0].read_text())
    text = (ROOT / "docs" / "results" / "predictions.md").read_text()
    mean = f"{100 * record['scores']['fwd']['mean_absolute_error_fraction']:.1f} %"
    assert unsaid(record, RECORDS[0].name, text.replace(mean, "1.0 %"))
