"""Records as frames: a row of a record is a row, nested values are columns of their own, and the environment stands beside each."""

import os
from collections.abc import Iterable
from typing import Any

import pandas as pd

from ._records import Record, check_measured, is_number, objects_in, records_of

_UNITS = ("_s", "_bytes", "_per_s", "_fraction", "_mhz", "_w")  # endings of columns that are numbers even where none is known
_FIRST = ("file", "command", "preset", "over", "value", "contestant", "pass", "status", "reason")


def read(source: str | os.PathLike | dict | list | Iterable) -> pd.DataFrame:
    """Reads records into one frame, a row of a record a row.

    Measurements (`fattn bench`, `compare`, `sweep`, suites) may be mixed. Their columns are the keys of the rows (docs/RECORD.md), and
      - `file`, `command`, `complete`, `disturbance` (what kept the machine from being this program's alone): of the record;
      - `contestant`: "fattn", "v2", "torch-sdpa:flash"; of a sweep as it was named;
      - `over`, `value`, `preset`: what a sweep changed, and to what; missing elsewhere;
      - `worst_tensor`, `worst_error`, `worst_allowed`, `error_fraction`: the check nearest to its bound (above 1: beyond it; inf: an error that is no
        number), and `checks`, all of them as in the record;
      - `warnings`, `held_back_by`: text; empty if there is none;
      - `env_...`: the environment, as `env_date` (UTC), `env_library_version`, `env_cpu_model`, and `env_gpu_...` of the GPU that the row ran on.
    Whole numbers stay whole (`Int64` where some are missing); what is not known is missing.

    Others have frames of their own: `fattn calibrate` a row for each rate (`name`, `value`, `low`, `high`, `spread_fraction`, `samples`, the unit in the
    name) and fact; `fattn memory` for each algorithm and pass (`part` "moved": bytes and limits) and for each algorithm (`part` "step": peak memory);
    `fattn predict` for each problem and pass; `fattn regress` for each verdict; lists of `fattn check --accuracy` and `--values` a row for each element.

    `frame.attrs["findings"]` has the sentences of a single sweep, `frame.attrs["sweep"]` what was swept.

    Args:
        source: a file, a pattern such as "results/*.json", a record that is parsed already, or a list of these.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        RecordError: a file is broken, no record, of another version, or its rows have nothing in common with those before.
        TypeError: `source` is none of these.
    """
    records = records_of(source)
    rows: list[dict[str, Any]] = []
    for record in records:
        rows += _ROWS[record.kind](record)
    frame = _frame_of(rows)
    if len(records) == 1 and records[0].kind == "fattn_sweep":
        frame.attrs["sweep"] = dict(records[0].content["sweep"])
        frame.attrs["findings"] = [str(sentence) for sentence in records[0].content.get("findings") or []]
    return frame


def label_of(row: dict) -> str:
    """A contestant's name as `compare` prints it."""
    provider, algorithm = row["provider"], row.get("algorithm")
    ours = provider == "fattn" or provider == algorithm
    return provider if ours or not isinstance(algorithm, str) or not algorithm else f"{provider}:{algorithm}"


def _measured(record: Record) -> list[dict]:
    content = record.content
    rows = objects_in(record, "rows")
    if not rows:
        record.refuse("has no rows: nothing was measured")
    is_sweep = record.kind == "fattn_sweep"
    swept = content.get("sweep") if is_sweep else {}
    if not isinstance(swept, dict) or is_sweep and not isinstance(swept.get("over"), str):
        record.refuse("is broken: 'sweep' does not say what was swept")
    environment = content.get("environment") if isinstance(content.get("environment"), dict) else {}
    disturbance = content.get("disturbance")
    around = {"file": record.file, "command": content.get("command"), "complete": content.get("complete"),
              "disturbance": disturbance.get("warning") if isinstance(disturbance, dict) else None}
    frame_rows = []
    for index, row in enumerate(rows):
        check_measured(record, index, row)
        if is_sweep and not (is_number(row.get("value")) and isinstance(row.get("contestant"), str)):
            record.refuse(f"is broken: rows[{index}] does not say its 'value' and 'contestant'")
        flat = {**around, "over": swept.get("over"), "preset": swept.get("preset"), "value": None, "contestant": label_of(row)}
        flat |= _flat({key: value for key, value in row.items() if key not in ("checks", "warnings", "held_back_by")})
        flat |= _worst(row.get("checks"))
        flat["checks"] = row.get("checks") or []
        flat["warnings"] = "; ".join(map(str, row.get("warnings") or []))
        flat["held_back_by"] = ", ".join(map(str, row.get("held_back_by") or []))
        flat |= _environment(environment, row.get("device"))
        frame_rows.append(flat)
    return frame_rows


def _worst(checks: object) -> dict:
    """The check nearest to its bound, or farthest beyond it."""
    worst = {"worst_tensor": None, "worst_error": None, "worst_allowed": None, "error_fraction": None}
    for check in checks if isinstance(checks, list) else []:
        error, allowed = check.get("error"), check.get("allowed")
        known = is_number(error) and is_number(allowed)
        share = float("inf") if not known or allowed <= 0 < error else error / allowed if error > 0 else 0.0
        if worst["error_fraction"] is None or share > worst["error_fraction"]:
            worst = {"worst_tensor": check.get("tensor"), "worst_error": error, "worst_allowed": allowed, "error_fraction": share}
    return worst


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}_")
        else:
            flat[prefix + key] = value
    return flat


def _environment(environment: dict, device: object) -> dict:
    flat = _flat({key: value for key, value in environment.items() if key != "gpus"}, "env_")
    for gpu in environment.get("gpus") or []:
        if isinstance(gpu, dict) and gpu.get("device") == device:
            flat |= _flat(gpu, "env_gpu_")
    return {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in flat.items()}


def _calibration(record: Record) -> list[dict]:
    content = record.content
    rows = []
    for part in ("measured", "facts"):
        values = content.get(part)
        if not isinstance(values, dict):
            record.refuse(f"is broken: '{part}' is no object")
        for name, value in values.items():
            value = value if isinstance(value, dict) else {"value": value}
            rows.append({"file": record.file, "device": content.get("device"), "kind": part, "name": name, **_flat(value)}
                        | _environment(content.get("environment") or {}, content.get("device")))
    return rows


def _memory(record: Record) -> list[dict]:
    content = record.content
    parts = [({"part": "moved", "pass": one.get("pass"), "compulsory_bytes": one.get("compulsory_bytes")}, algorithm)
             for one in objects_in(record, "passes") for algorithm in objects_in(Record(record.kind, record.file, one), "algorithms")]
    parts += [({"part": "step"}, step) for step in objects_in(record, "steps")]
    around = _flat({"problem": content.get("problem") or {}})
    around = {key.removeprefix("problem_"): value for key, value in around.items()}
    machine = _flat({"machine": content.get("machine") or {}})
    return [{"file": record.file, **head, **_flat(part), **around, **machine} | _environment(content.get("environment") or {}, machine.get("machine_device"))
            for head, part in parts]


def _predict(record: Record) -> list[dict]:
    around = {"file": record.file, "what": record.content.get("what"), "complete": record.content.get("complete")}
    environment = record.content.get("environment") or {}
    return [{**around, **_flat(row)} | _environment(environment, row.get("device")) for row in objects_in(record, "rows")]


def _regress(record: Record) -> list[dict]:
    around = {"file": record.file, "margin_fraction": record.content.get("margin_fraction"), "level": record.content.get("level")}
    return [{**_flat(row), **around} for row in objects_in(record, "rows")]


def _list(record: Record) -> list[dict]:
    return [{"file": record.file, **_flat(row)} for row in record.content]


_ROWS = {"fattn_record": _measured, "fattn_sweep": _measured, "fattn_calibration": _calibration, "fattn_memory": _memory,
         "fattn_predict": _predict, "fattn_regress": _regress, "accuracy": _list, "values": _list}


def _frame_of(rows: list[dict]) -> pd.DataFrame:
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in _FIRST if name in names] + [name for name in names if name not in _FIRST and not name.startswith("env_")] + [
        name for name in names if name.startswith("env_")]
    return pd.DataFrame({name: _column(name, [row.get(name) for row in rows]) for name in names}, columns=names)


def _column(name: str, values: list) -> pd.Series:
    known = [value for value in values if value is not None]
    missing = len(known) < len(values)
    if name == "env_date":
        return pd.to_datetime(pd.Series(values, dtype="object"), utc=True, errors="coerce")
    if not known:
        return pd.Series(values, dtype="float64" if name.endswith(_UNITS) else "object")
    if all(isinstance(value, bool) for value in known):
        return pd.Series(values, dtype="boolean" if missing else "bool")
    if all(isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 for value in known):
        return pd.Series(values, dtype="Int64" if missing else "int64")
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known):
        return pd.Series(values, dtype="float64")
    if all(isinstance(value, str) for value in known):
        return pd.Series(values, dtype="str") if int(pd.__version__.split(".")[0]) >= 3 else pd.Series(values, dtype="object")
    return pd.Series(values, dtype="object")
