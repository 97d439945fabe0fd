"""Runs named stages one after the other, each a bash script, and counts what passed and failed in each."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Callable


@dataclasses.dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    names: list[str] = dataclasses.field(default_factory=list, compare=False)  # of what failed, where that is known


@dataclasses.dataclass
class Stage:
    name: str
    script: str  # bash, run with `set -euo pipefail`; $REPORTS is an empty folder of this stage
    count: Callable[[Path, str, int], Count]  # (reports, log, exit status) -> what the stage's own results say
    timeout_s: int = 900


def count_status(reports: Path, log: str, status: int) -> Count:
    """One result: the script's exit status."""
    return Count(passed=1) if status == 0 else Count(failed=1)


def count_line(reports: Path, log: str, status: int) -> Count:
    """The sum of the script's lines `N passed, N failed`."""
    count = Count()
    for passed, failed in re.findall(r"^(\d+) passed, (\d+) failed$", log, re.MULTILINE):
        count.passed += int(passed)
        count.failed += int(failed)
    return count


def count_junit_file(path: Path) -> Count:
    """The test cases of one JUnit file, of GoogleTest, pytest or ctest."""
    count = Count()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
            count.failed += 1
            failure = next((e for e in case if e.tag in ("failure", "error")), None)
            message = " ".join((failure.get("message") or "").split())[:200] if failure is not None else ""
            count.names.append(f'{case.get("classname", "")}.{case.get("name", "")}'.strip(".") + (f" ({message})" if message else ""))
        elif case.find("skipped") is not None or case.get("result") == "skipped" or case.get("status") in ("notrun", "disabled"):
            count.skipped += 1
        else:
            count.passed += 1
    return count


def add(a: Count, b: Count) -> Count:
    return Count(a.passed + b.passed, a.failed + b.failed, a.skipped + b.skipped, a.names + b.names)


def count_pytest(reports: Path, log: str, status: int) -> Count:
    """$REPORTS/pytest.xml; nothing if pytest did not come so far."""
    path = reports / "pytest.xml"
    return count_junit_file(path) if path.is_file() else Count()


def count_ctest(reports: Path, log: str, status: int) -> Count:
    """$REPORTS/ctestX.xml lists programs, $REPORTS/gtestX/PROGRAM.xml the cases of each that is a GoogleTest. A program that
    failed without a failed case of its own (it crashed, timed out, was not built) counts as one failure, one that is no
    GoogleTest as one result."""
    count = Count()
    for listing in sorted(reports.glob("ctest*.xml")):
        cases_folder = reports / listing.stem.replace("ctest", "gtest")
        for program in ElementTree.parse(listing).getroot().iter("testcase"):
            own, path = Count(), cases_folder / (program.get("name", "") + ".xml")
            is_gtest = path.is_file()
            try:
                own = count_junit_file(path) if is_gtest else own
            except ElementTree.ParseError:  # cut off by a crash
                pass
            if program.get("status") != "run":
                own.failed = max(own.failed, 1)
                own.names = own.names or [program.get("name", "")]
            elif not is_gtest:
                own.passed = 1
            count = add(count, own)
    return count


def run_stage(stage: Stage, root: Path, reports: Path, verbose: bool) -> tuple[Count, float]:
    """Runs one stage. A stage that fails has at least one failure, and so has one that ran nothing."""
    folder = reports / stage.name
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)
    log_path = folder / "log.txt"
    print(f"-- {stage.name} ...", flush=True)
    start = time.monotonic()
    script = "set -euo pipefail\n" + stage.script
    if verbose:
        script = f"( {script}\n) 2>&1 | tee '{log_path}'"
    with open(log_path, "wb") as log_file:
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", script],
            cwd=root,
            env={**os.environ, "REPORTS": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=None if verbose else log_file,
            stderr=None if verbose else subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=stage.timeout_s)
            problem = "" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, problem = 124, f"still running after {stage.timeout_s} s: ended"
        finally:  # of an interrupt, too: leave no process of the stage behind
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    seconds = time.monotonic() - start

    log = log_path.read_text(errors="replace")
    try:
        count = stage.count(folder, log, status)
    except (OSError, ElementTree.ParseError) as error:
        count, problem = Count(), f"its results cannot be read: {error}"
    if problem and count.failed == 0:
        count.failed = 1
    if not problem and count.passed + count.failed == 0:
        count.failed, problem = 1, "it ran nothing"
    if count.failed:
        tail = "\n".join("   | " + line for line in log.splitlines()[-60:])
        print(f"{tail}\n   {stage.name} failed ({problem or 'see above'}); whole log: {log_path}", flush=True)
    return count, seconds


def run_stages(stages: list[Stage], root: Path, reports: Path, verbose: bool) -> int:
    """Runs all, whatever fails, prints a table, the names of what failed (so that the end of the output says it) and the line
    `N passed, N failed`; the exit status."""
    total, rows, start = Count(), [], time.monotonic()
    for stage in stages:
        count, seconds = run_stage(stage, root, reports, verbose)
        total = add(total, count)
        rows.append((stage.name, count, seconds))
        print(f"   {stage.name}: {count.passed} passed, {count.failed} failed, {seconds:.1f} s", flush=True)
    width = max(len(name) for name, _, _ in rows)
    print(f"\n{'stage':<{width}}  {'seconds':>8}  {'passed':>7}  {'failed':>7}  {'skipped':>7}")
    for name, count, seconds in rows:
        print(f"{name:<{width}}  {seconds:8.1f}  {count.passed:7}  {count.failed:7}  {count.skipped:7}")
    print(f"{'total':<{width}}  {time.monotonic() - start:8.1f}  {total.passed:7}  {total.failed:7}  {total.skipped:7}\n")
    for name, count, _ in rows:
        if count.failed:
            print(f"failed in {name}: {', '.join(count.names[:12]) or 'see its log'}")
    print(f"{total.passed} passed, {total.failed} failed", flush=True)
    sys.stdout.flush()
    return 1 if total.failed else 0
