"""Records as files that people hand over: each is one of the kinds that the lab reads, in the version that it reads, or refused in one line."""

import glob
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# Of each kind, the version that is read. Those of the first two are measurements, and may stand in one frame.
VERSIONS = {"fattn_record": 1, "fattn_sweep": 1, "fattn_calibration": 1, "fattn_memory": 1, "fattn_predict": 1, "fattn_regress": 1}
MEASURED = ("fattn_record", "fattn_sweep")
# Lists of objects have no key that names them; these have it in every one.
_LISTS = {"accuracy": {"rms_ratio", "sigma", "tensor"}, "values": {"ratio", "values", "where"}}
_READ = "records of fattn bench, compare, sweep, calibrate, memory, predict and regress, and the lists of fattn check --accuracy and --values"


class RecordError(ValueError):
    """A file is no record that the lab reads: broken, of another kind, or of another version."""


class Record(NamedTuple):
    """`kind`: a key of VERSIONS, "accuracy" or "values". `file`: as it was given; None of what was given as a dict or list."""

    kind: str
    file: str | None
    content: Any

    def refuse(self, what: str) -> NoReturn:
        raise RecordError(f"{_named(self.file)} {what}")


def _named(file: str | None) -> str:
    return f"'{file}'" if file is not None else "the record"


def _cut(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _load(file: str) -> Any:
    if os.path.isdir(file):
        raise IsADirectoryError(f"'{file}' is a folder; name its files, or a pattern of them: '{os.path.join(file, '*.json')}'")
    try:
        content = Path(file).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file '{file}'; name a record that --json FILE wrote, a list of them, or a pattern such as 'results/*.json'") from None
    if not content.strip():
        raise RecordError(f"'{file}' is empty")
    try:
        return json.loads(content, parse_constant=_no_number)
    except RecursionError:
        raise RecordError(f"'{file}' is no record: its JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError, too
        raise RecordError(f"'{file}' is no JSON, or a part of it is missing: {error}") from None


def _classify(content: Any, file: str | None) -> Iterator[Record]:
    if isinstance(content, dict):
        kind = next((key for key in content if isinstance(key, str) and key.startswith("fattn_")), None)
        if kind is None and isinstance(content.get("records"), list) and content["records"]:  # several in a file, with a line about them
            for part in content["records"]:
                yield from _classify(part, file)
            return
        if kind is None:
            raise RecordError(f"{_named(file)} is no record of fattn: no key names its kind. The lab reads {_READ}")
        if kind not in VERSIONS:
            raise RecordError(f"{_named(file)} is a record of kind '{kind[:40]}', which the lab does not read; it reads {_READ}")
        version = content[kind]
        if isinstance(version, bool) or version != VERSIONS[kind]:
            raise RecordError(f"{_named(file)} is a {kind} of version {_cut(version)}; this package reads version {VERSIONS[kind]}. Read it with the fattn that "
                              "wrote it, or measure again with this one")
        yield Record(kind, file, content)
        return
    if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
        for kind, keys in _LISTS.items():
            if all(keys <= row.keys() for row in content):
                yield Record(kind, file, content)
                return
    raise RecordError(f"{_named(file)} is no record of fattn but {_what_is(content)}. The lab reads {_READ}")


def _what_is(value: object) -> str:
    if isinstance(value, list):
        return "a list of something else" if value else "an empty list"
    return f"an object without '{'fattn_record'}'" if isinstance(value, dict) else _cut(value)


def _files(source: str | os.PathLike) -> list[str]:
    name = os.fspath(source)
    if os.path.exists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise FileNotFoundError(f"no file matches '{name}'")
    return found


def records_of(source: object) -> list[Record]:
    """All records of a path, a pattern, a parsed record, or a list of these.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        RecordError: a file is no record, or records of different kinds are mixed.
        TypeError: `source` is none of these.
    """
    records: list[Record] = []
    if isinstance(source, (str, os.PathLike)):
        for file in _files(source):
            records += _classify(_load(file), file)
    elif isinstance(source, dict) or isinstance(source, list) and source and all(isinstance(part, dict) for part in source) and not any(
            key.startswith("fattn_") for part in source for key in part if isinstance(key, str)):
        records += _classify(source, None)
    elif isinstance(source, Iterable) and not isinstance(source, bytes):
        for part in source:
            records += records_of(part)
    else:
        raise TypeError(f"source is a {type(source).__name__}; it must be a path, a pattern such as 'results/*.json', a parsed record, or a list of these")
    if not records:
        raise RecordError("no record was given: the list is empty")
    first = records[0]
    for other in records:
        if other.kind != first.kind and not (other.kind in MEASURED and first.kind in MEASURED):
            raise RecordError(f"{_named(first.file)} is of kind {first.kind}, {_named(other.file)} of kind {other.kind}: their rows have nothing in common; read them "
                              "one after the other")
    return records


def objects_in(record: Record, key: str) -> list[dict]:
    """The list of objects that a record has under `key`.

    Raises:
        RecordError: it is something else.
    """
    rows = record.content.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        record.refuse(f"is broken: '{key}' is {_cut(rows) if rows is not None else 'missing'}; a list of objects is wanted there")
    return rows


def check_measured(record: Record, index: int, row: dict) -> None:
    """What figures and statistics rely on: who, which pass, and a time exactly where the status is ok.

    Raises:
        RecordError: it is not so.
    """
    where = f"is broken: rows[{index}]"
    for key in ("provider", "pass", "status"):
        if not isinstance(row.get(key), str):
            record.refuse(f"{where}.{key} is {_cut(row.get(key))}; text is wanted there")
    for key in ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim"):
        if not isinstance(row.get(key), int) or isinstance(row[key], bool) or row[key] < 1:
            record.refuse(f"{where}.{key} is {_cut(row.get(key))}; a whole number from 1 on is wanted there")
    median = row.get("time_median_s")
    if row["status"] != "ok":
        if median is not None:
            record.refuse(f"{where} has the status '{row['status'][:40]}' and a time; what failed has none")
        return
    if not is_number(median) or not median > 0:
        record.refuse(f"{where}.time_median_s is {_cut(median)}; a time above 0 is wanted there")
    low, high = row.get("time_ci_low_s", median), row.get("time_ci_high_s", median)
    if not (is_number(low) and is_number(high) and 0 < low <= median <= high):
        record.refuse(f"{where}.time_ci_low_s and time_ci_high_s are {_cut(low)} and {_cut(high)}; an interval around the median is wanted there")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
