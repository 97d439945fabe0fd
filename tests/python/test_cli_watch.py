"""fattn watch: status files, true ones, damaged and hostile ones; processes; GPUs on a stub of NVML; how it ends."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import schemas, screen


def utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def content(**changes) -> dict:
    status = {"fattn_status": 1, "command": "sweep", "state": "running", "step": 3, "of": 12, "now": "seqlen 1024: fattn", "seconds_left": 40,
              "updated_at": utc(time.time()), "pid": os.getpid()}
    return status | changes


def write(path, text: str):
    """As commands do: whole, by rename."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)
    return path


def status_file(path, **changes):
    return write(path, json.dumps(content(**changes)))


@pytest.fixture(scope="session")
def stub(fattn) -> dict[str, str]:
    path = pathlib.Path(fattn.path).parent.parent / "tests/libfattn_stub_nvml.so"
    if not path.exists():
        pytest.skip(f"{path} is not built")
    return {"LD_PRELOAD": str(path)}


def readings(text: str) -> list[dict]:
    found = [json.loads(line) for line in text.splitlines()]
    for reading in found:
        schemas()["watch"].validate(reading)
    return found


def start(fattn, *arguments, **options):
    """As a shell in the foreground does: Ctrl-C is not ignored."""
    return subprocess.Popen([fattn.path, "watch", *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


def test_one_reading_of_the_machine(fattn):
    done = fattn("watch", "--once")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  CPU: \d+(\.\d)? % of \d+ CPUs?, load \d+\.\d\d, [\d.]+ of [\d.]+ GiB; GPU.*\n", done.stdout), done.stdout
    assert done.stderr == ""
    reading, = readings(fattn("watch", "--once", "--json", "-").stdout)
    assert reading["status"] is None and reading["process"] is None and reading["end"] is None
    assert reading["cpu"]["cpus"] == os.cpu_count() and 0 <= reading["cpu"]["busy"] <= 1
    assert (reading["gpus"] == []) == (reading["gpu_problem"] is not None)


def test_gpus(fattn, stub):
    line = fattn("watch", "--once", env=stub).stdout
    assert "; GPU 0: 97 % busy, 20.0 of 140.4 GiB, 1500 of 1980 MHz, 600 of 700 W, 61 C\n" in line
    reading, = readings(fattn("watch", "--once", "--json", "-", env=stub).stdout)
    assert reading["gpu_problem"] is None
    assert reading["gpus"] == [{
        "index": 0, "name": "Stub GPU", "busy": 0.97, "memory_busy": 0.4, "memory_used_bytes": 20480 << 20, "memory_bytes": 143771 << 20, "sm_clock_mhz": 1500,
        "highest_sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_w": 600, "power_limit_w": 700, "temperature_c": 61, "held_back_by": [],
        "processes": [{"pid": 4294967294, "name": None, "memory_bytes": 20480 << 20}]}]


def test_a_status_file(fattn, tmp_path):
    path = status_file(tmp_path / "status.json")
    line = fattn("watch", path, "--once").stdout
    assert "Z  sweep running: 3 of 12 steps done, 40 seconds left, now seqlen 1024: fattn; process " in line and "CPUs busy" in line
    reading, = readings(fattn("watch", path, "--once", "--json", "-").stdout)
    assert reading["status"] == {"command": "sweep", "state": "running", "step": 3, "of": 12, "now": "seqlen 1024: fattn", "seconds_left": 40, "problem": None}
    process = reading["process"]
    assert process["pid"] == os.getpid() and process["running"] and process["threads"] >= 1 and process["resident_bytes"] > 1 << 20


@pytest.mark.parametrize("width", [40, 80, 200])
def test_on_a_terminal_it_fits(fattn, stub, tmp_path, width):
    path = status_file(tmp_path / "status.json", now="seqlen 1024: " + ", ".join(["fattn"] * 12))
    lines = screen(fattn.in_terminal("watch", path, "--once", width=width, env=stub))
    assert max(map(len, lines)) <= width, lines
    text = " ".join(" ".join(lines).split())
    for words in ("fattn sweep", "running, 3 of 12 steps done", "40 seconds left", "[####", " 25 %", "now seqlen 1024: fattn, fattn", f"process {os.getpid()}", "GPU 0 Stub GPU",
                  "97 % busy", "process 4294967294, 20.0 GiB"):
        assert words in text, words


def test_the_same_lines_are_written_anew_until_it_is_done(fattn, tmp_path):
    path = status_file(tmp_path / "status.json", pid=1)
    ends = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1.5); open({str(path)!r}, 'w').write({json.dumps(content(state='done', step=12, now=None, pid=1))!r})"])
    text = fattn.in_terminal("watch", path, "--interval", "0.2", width=80)
    assert ends.wait() == 0
    first, *others = re.split(r"\r\x1b\[(\d+)A\x1b\[J", text)
    assert len(others) >= 4, text
    drawn = first
    for up, lines in zip(others[::2], others[1::2]):
        assert int(up) == drawn.count("\n")
        drawn = lines
    assert "running" in first and "sweep is done\n" in others[-1] and "12 of 12 steps done" in others[-1] and "100 %" in others[-1]


@pytest.mark.parametrize(("state", "said", "code"), [("done", "sweep is done", 0), ("failed", "sweep has failed", 1), ("interrupted", "sweep was interrupted", 1)])
def test_it_ends_as_what_it_watches(fattn, tmp_path, state, said, code):
    path = status_file(tmp_path / "status.json")
    process = start(fattn, path, "--interval", "0.1")
    assert "running" in process.stdout.readline()
    status_file(path, state=state, step=5, now=None, seconds_left=None)
    out, error = process.communicate(timeout=20)
    assert process.returncode == code and error == ""
    assert out.splitlines()[-1] == said and f"sweep {state}: 5 of 12 steps done" in out.splitlines()[-2]
    # And at once where it has ended before.
    assert fattn("watch", path, status=code).stdout.splitlines()[-1] == said
    assert readings(fattn("watch", path, "--json", "-", status=code).stdout)[-1]["end"] == state


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_killed_command_has_no_last_word(fattn, tmp_path):
    pid = ended_pid()
    path = status_file(tmp_path / "status.json", pid=pid, updated_at=utc(time.time() - 60))
    done = fattn("watch", path, status=1)
    assert done.stdout.endswith(f"sweep: process {pid} has gone without a last word: it was killed\n")
    assert "nothing was heard of it for " in done.stdout
    # Its number belongs to a later process.
    status_file(path, updated_at=utc(0))
    assert readings(fattn("watch", path, "--json", "-", status=1).stdout)[-1]["end"] == "vanished"
    # On another machine, perhaps: it writes still.
    status_file(path, pid=pid)
    reading, = readings(fattn("watch", path, "--once", "--json", "-").stdout)
    assert reading["end"] is None and not reading["process"]["running"]


def test_of_a_folder_the_file_that_was_written_last(fattn, tmp_path):
    assert "there is no status file in" in fattn.refuses("watch", tmp_path)
    status_file(tmp_path / "older.json", command="older", updated_at=utc(time.time() - 5))
    status_file(tmp_path / "newer.json", command="newer")
    (tmp_path / "record.json").write_text('{"fattn_record": 2}')
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    assert "newer running" in fattn("watch", tmp_path, "--once").stdout


def test_a_process(fattn, tmp_path):
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--status", "status.json"], cwd=tmp_path)
    try:
        assert re.search(rf"Z  process {watched.pid}: ", fattn("watch", watched.pid, "--once").stdout)  # it has no status file yet
        status_file(tmp_path / "status.json", pid=watched.pid)
        assert "sweep running" in fattn("watch", watched.pid, "--once").stdout
        status_file(tmp_path / "status.json", pid=os.getpid())  # another's
        process = start(fattn, watched.pid, "--interval", "0.1")
        assert "sweep" not in process.stdout.readline()
    finally:
        watched.kill()
        watched.wait()
    out, error = process.communicate(timeout=20)
    assert process.returncode == 0 and error == "" and out.endswith(f"\nprocess {watched.pid} has ended\n")
    assert f"there is no process {watched.pid}" in fattn.refuses("watch", watched.pid)


def test_a_suite(fattn, tmp_path):
    path = tmp_path / "status.json"
    suite = subprocess.Popen([fattn.path, "bench", "--suite", "cpu", "--quick", "--no-grad", "--only", "Speed, fp32", "--python", "/nonexistent/python", "--patience", "30d",
                              "--status", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.1)
        assert re.search(r"Z  bench running: \d+ of \d+ steps done, .* left, now Speed, fp32: B\d+ S\d+ .*; process \d+: ", fattn("watch", suite.pid, "--once").stdout)
    finally:
        suite.terminate()
        suite.wait()
    assert fattn("watch", path, status=1).stdout.endswith("bench was interrupted\n")
    assert "--status" in fattn.refuses("bench", "--status", path)


@pytest.mark.parametrize("target", [True, False])
def test_ctrl_c_is_how_it_ends(fattn, tmp_path, target):
    arguments = [status_file(tmp_path / "status.json")] if target else []
    process = start(fattn, *arguments, "--interval", "3600")
    assert "CPU" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=5)[1] == "" and process.returncode == 0
    process = start(fattn, *arguments, "--interval", "3600")
    process.stdout.readline()
    process.terminate()
    process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGTERM


def test_lines_of_json_in_a_file(fattn, tmp_path):
    path, target = status_file(tmp_path / "status.json"), tmp_path / "readings.jsonl"
    process = start(fattn, path, "--interval", "0.1", "--json", target)
    process.stdout.readline()
    process.stdout.readline()
    process.kill()
    process.communicate()
    assert len(readings(target.read_text())) >= 1  # whole lines, however it ends
    assert "readings.jsonl' is a folder" not in fattn.refuses("watch", "--once", "--json", tmp_path)
    fattn.refuses("watch", "--once", "--json", tmp_path / "nowhere" / "readings.jsonl")


def test_a_file_that_is_damaged_meanwhile(fattn, tmp_path):
    path = status_file(tmp_path / "status.json")
    process = start(fattn, path, "--interval", "0.1")
    assert "not read" not in process.stdout.readline()
    write(path, "{")
    while "not read" not in (line := process.stdout.readline()):
        assert "3 of 12" in line
    assert "3 of 12 steps done" in line and "is no status file" in line  # what was read last counts
    path.unlink()
    while "cannot open" not in (line := process.stdout.readline()):
        assert "3 of 12" in line
    status_file(path, state="done")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and out.endswith("sweep is done\n")


@pytest.mark.parametrize("change", [
    {"fattn_status": 2}, {"fattn_status": "1"}, {"command": None}, {"command": 7}, {"command": "x" * 5000}, {"state": "dancing"}, {"state": ["running"]}, {"step": -1},
    {"step": 1.5}, {"step": 1e300}, {"of": 0}, {"of": "12"}, {"now": 7}, {"now": ["x"]}, {"seconds_left": -1}, {"seconds_left": "soon"}, {"updated_at": "yesterday"},
    {"updated_at": "2026-11-28T03:57:25+00:00"}, {"updated_at": None}, {"pid": 0}, {"pid": -1}, {"pid": 1e30}, {"pid": "1"}], ids=str)
def test_wrong_values_are_refused(fattn, tmp_path, change):
    assert "is no status file" in fattn.refuses("watch", status_file(tmp_path / "status.json", **change), "--once")


def test_a_list_is_no_status_file(fattn, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    assert "the whole is of type array; an object is wanted there" in fattn.refuses("watch", tmp_path / "list.json", "--once")


@pytest.mark.parametrize("text", ["", "\0", "{", "[]", "null", "7", '"x"', '{"fattn_status": 1}', "[" * 5000, '{"a":' * 5000, "\xff\xfe", '{"pid": 1, "pid": 2}', "{" + " " * 70000 + "}"],
                         ids=lambda text: repr(text[:12]))
def test_no_status_files_are_refused(fattn, tmp_path, text):
    path = tmp_path / "status.json"
    path.write_text(text, encoding="latin-1")
    fattn.refuses("watch", path, "--once")


def test_what_is_no_file_is_refused(fattn, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in fattn.refuses("watch", tmp_path / "pipe", "--once")
    assert "no regular file" in fattn.refuses("watch", "/dev/zero", "--once")
    assert "there is no '" in fattn.refuses("watch", tmp_path / "nowhere")
    assert "there is no '\\x1b[2J'" in fattn.refuses("watch", "\x1b[2J")
    for number in ("0", "-1", "99999999999999999999", "4194305", "12x"):
        fattn.refuses("watch", "--once", "--", number)


def test_text_of_a_status_file_obeys_no_terminal(fattn, tmp_path):
    path = status_file(tmp_path / "status.json", command="\x1b[2Jsweep\r\n\u202e", now="\x1b]0;title\x07 seqlen \x9b1A")
    for text in (fattn("watch", path, "--once").stdout, fattn.in_terminal("watch", path, "--once", width=80, env={"NO_COLOR": "1"})):
        assert all(c == "\n" or c.isprintable() for c in text), repr(text)
        assert "\\x1b[2Jsweep" in text
    reading, = readings(fattn("watch", path, "--once", "--json", "-").stdout)
    assert all(c.isprintable() for c in reading["status"]["command"] + reading["status"]["now"])


@pytest.mark.parametrize("value", ["0", "-1", "0.01", "1e9", "nan", "soon"])
def test_wrong_intervals_are_refused(fattn, value):
    assert "--interval" in fattn.refuses("watch", "--once", "--interval", value)
