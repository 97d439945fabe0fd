"""Runs named stages, each a bash script, one after the other or beside another, and counts what passed and failed in each."""

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
    beside: str = ""  # the stage before it during which it runs, where one leaves processors idle


def count_status(reports: Path, log: str, status: int) -> Count:
    """One result: the script's exit status."""
    return Count(passed=1) if status == 0 else Count(failed=1)


def count_line(reports: Path, log: str, status: int) -> Count:
    """The sum of the script's lines `N passed, N failed`; what failed and why is behind `FAILED` at the beginning of a line."""
    count = Count()
    count.names = [" ".join(name.split())[:300] for name in re.findall(r"^FAILED +(.+)$", log, re.MULTILINE)]
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


class Running:
    """A stage that has been started. One that fails has at least one failure, and so has one that ran nothing."""

    def __init__(self, stage: Stage, root: Path, reports: Path, verbose: bool):
        self.stage, self.folder = stage, reports / stage.name
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)
        self.folder.mkdir(parents=True)
        self.log_path = self.folder / "log.txt"
        self.seconds = self.cpu_seconds = 0.0  # of the processors: of the script and of what it waited for
        self.status, self.problem = 0, ""
        print(f"-- {stage.name} ...", flush=True)
        self.start = time.monotonic()
        script = "set -euo pipefail\n" + stage.script
        if verbose:
            script = f"( {script}\n) 2>&1 | tee '{self.log_path}'"
        with open(self.log_path, "wb") as log_file:
            self.process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", script],
                cwd=root,
                env={**os.environ, "REPORTS": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=None if verbose else log_file,
                stderr=None if verbose else subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self):
        """Leaves no process of the stage behind."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self.process.returncode is None:
            self.process.wait()

    def is_done(self) -> bool:
        self.seconds = time.monotonic() - self.start
        done, status, used = os.wait4(self.process.pid, os.WNOHANG)
        if done:
            self.process.returncode = self.status = os.waitstatus_to_exitcode(status)
            self.cpu_seconds = used.ru_utime + used.ru_stime
            self.problem = "" if self.status == 0 else f"exit status {self.status}"
        elif self.seconds >= self.stage.timeout_s:
            self.status, self.problem = 124, f"still running after {self.stage.timeout_s} s: ended"
        else:
            return False
        self.end()
        return True

    def count(self) -> Count:
        """What a stage that is done found; prints the end of its log if that is a failure."""
        problem, log = self.problem, self.log_path.read_text(errors="replace")
        try:
            count = self.stage.count(self.folder, log, self.status)
        except (OSError, ElementTree.ParseError) as error:
            count, problem = Count(), f"its results cannot be read: {error}"
        if problem and count.failed == 0:
            count.failed = 1
        if not problem and count.passed + count.failed == 0:
            count.failed, problem = 1, "it ran nothing"
        if count.failed:
            tail = "\n".join("   | " + line for line in log.splitlines()[-60:])
            print(f"{tail}\n   {self.stage.name} failed ({problem or 'see above'}); whole log: {self.log_path}", flush=True)
        return count


def groups(stages: list[Stage]) -> list[list[Stage]]:
    """The stages in their order, those together that run side by side."""
    all_groups = []
    for stage in stages:
        if all_groups and any(other.name == stage.beside for other in all_groups[-1]):
            all_groups[-1].append(stage)
        else:
            all_groups.append([stage])
    return all_groups


def run_group(stages: list[Stage], root: Path, reports: Path, verbose: bool) -> list[tuple[Running, Count]]:
    """Runs these side by side, and says of each what it found as soon as it is done."""
    running, results = [], []
    try:
        for stage in stages:
            running.append(Running(stage, root, reports, verbose))
        while len(results) < len(stages):
            time.sleep(0.05)
            for run in [run for run in running if run.is_done()]:
                running.remove(run)
                count = run.count()
                results.append((run, count))
                print(f"   {run.stage.name}: {count.passed} passed, {count.failed} failed, {run.seconds:.1f} s", flush=True)
    finally:  # of an interrupt, too
        for run in running:
            run.end()
    return results


def run_stages(stages: list[Stage], root: Path, reports: Path, verbose: bool) -> int:
    """Runs all, whatever fails, prints a table, the names of what failed (so that the end of the output says it) and the line
    `N passed, N failed`; the exit status."""
    total, rows, start = Count(), [], time.monotonic()
    for group in groups(stages):
        for run, count in run_group(group, root, reports, verbose):
            total = add(total, count)
            rows.append((run.stage.name, run.seconds, run.cpu_seconds, count))
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'stage':<{width}}  {'seconds':>8}  {'cpu':>8}  {'passed':>7}  {'failed':>7}  {'skipped':>7}")
    for name, seconds, cpu_seconds, count in [*rows, ("total", time.monotonic() - start, sum(row[2] for row in rows), total)]:
        print(f"{name:<{width}}  {seconds:8.1f}  {cpu_seconds:8.1f}  {count.passed:7}  {count.failed:7}  {count.skipped:7}")
    print()
    for name, _, _, count in rows:
        if count.failed:
            print(f"failed in {name}: {', '.join(count.names[:12]) or 'see its log'}")
    print(f"{total.passed} passed, {total.failed} failed", flush=True)
    sys.stdout.flush()
    return 1 if total.failed else 0
