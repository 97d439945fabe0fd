"""Ctrl-C in long commands: it ends them within a second or two, though a call in hand would take longer, and what was measured is kept."""
import json
import os
import pty
import select
import signal
import subprocess
import time

from conftest import schema_of

SLOW = ["--backend", "reference", "--seqlen", "6144", "--nheads", "2", "--no-grad", "--patience", "30d"]  # a call takes minutes
SUITE = ["bench", "--suite", "cpu", "--no-grad", "--only", "Speed, fp32", "--python", "/nonexistent/python"]
COMPARE = ["compare", "--seqlen", "4096", "--nheads", "8", "--provider", "fattn", "--min-time", "60", "--max-time", "60"]
ENDS_IN_S = 5  # a second, and a busy machine


def start(fattn, arguments, **options):
    """As a shell in the foreground does: its background jobs, such as this test may be, ignore the signal."""
    return subprocess.Popen([fattn.path, *map(str, arguments)], stdin=subprocess.DEVNULL, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


def interrupt(process, number=signal.SIGINT):
    """Returns stderr. The program must end soon, by this signal's status."""
    begin = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - begin < ENDS_IN_S
    assert process.returncode == 128 + number
    return said


def test_a_call_in_hand_is_not_waited_for(fattn, tmp_path):
    target = tmp_path / "record.json"
    process = start(fattn, ["bench", *SLOW, "--json", target], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("bench: about ")  # and now it computes
    time.sleep(2)
    assert interrupt(process) == "fattn: interrupted before anything was measured\n"
    assert os.listdir(tmp_path) == []


def test_a_suite_keeps_the_problems_that_are_done(schema, fattn, tmp_path):
    target = tmp_path / "record.json"
    process = start(fattn, [*SUITE, "--json", target], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(15)  # the first part is not done by then, of its problems some are
    assert not target.exists()
    said = interrupt(process, signal.SIGTERM)
    record = json.loads(target.read_text())
    schema.validate(record)
    assert not record["complete"] and record["rows"] and record["rows"][0]["status"] == "ok"
    assert f"fattn: interrupted; '{target}' has " in said and " problems\n" in said
    assert os.listdir(tmp_path) == ["record.json"]


def test_the_passes_that_are_done_are_kept(schema, fattn):
    # Calls of some milliseconds and more: of shorter ones a pass has all of its samples before its time is over.
    arguments = ["bench", "--seqlen", "4096", "--nheads", "2", "--min-time", "4", "--max-time", "4", "--json", "-"]
    too_early, too_late, wait_s = 0, None, 10
    for _ in range(8):  # how long the first pass and the whole take is known only from trying
        process = start(fattn, arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, said = process.communicate(timeout=wait_s)
            assert process.returncode == 0, said
            too_late = wait_s
        except subprocess.TimeoutExpired:
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, said = process.communicate(timeout=60)
            if process.returncode == 0:  # it was done already
                too_late = wait_s
            else:
                assert time.monotonic() - begin < ENDS_IN_S and process.returncode == 130
                if "has 3 of" in said:
                    too_late = wait_s
                elif out and "has 0 of" not in said:
                    break
                else:
                    too_early = wait_s
        wait_s = wait_s * 2 if too_late is None else (too_early + too_late) / 2
    assert said in ("fattn: interrupted; the record has 1 of 3 passes\n", "fattn: interrupted; the record has 2 of 3 passes\n")
    record = json.loads(out)
    schema.validate(record)
    assert not record["complete"] and [row["pass"] for row in record["rows"]] in (["fwd"], ["fwd", "bwd"])
    assert all(row["time_median_s"] > 0 for row in record["rows"])


def test_without_a_file_it_says_so(fattn):
    process = start(fattn, COMPARE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(3)
    assert interrupt(process).endswith("fattn: interrupted before anything was measured\n")


def test_a_search_keeps_the_lengths_that_are_done(fattn, tmp_path):
    target = tmp_path / "when.json"
    process = start(fattn, ["advise", "--when", "--longest", "16384", "--precision", "fp32", "--json", target], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(6)  # the shortest length takes half a second, the longest minutes
    said = interrupt(process)
    record = json.loads(target.read_text())
    schema_of(record).validate(record)
    rule = record["rules"][-1]
    assert not record["complete"] and rule["faster_from"] is None and "not searched to the end" in rule["conclusion"]
    assert rule["duels"][0]["seqlen"] == 8 and rule["duels"][0]["b"]["median_s"] > 0
    assert f"fattn: interrupted; '{target}' has 0 of 3 rules and 1 length of the next\n" in said
    assert os.listdir(tmp_path) == ["when.json"]


def test_on_a_terminal(fattn):
    """Ctrl-C is a byte there, which the terminal makes a signal of."""
    process_id, main = pty.fork()
    if process_id == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(fattn.path, [fattn.path, "bench", *SLOW])
    text, begin, sent = b"", time.monotonic(), None
    while time.monotonic() - begin < 60:
        if select.select([main], [], [], 0.1)[0]:
            try:
                text += os.read(main, 65536)
            except OSError:
                break
        if sent is None and b"about " in text and b"left" in text:
            os.write(main, b"\x03")
            sent = time.monotonic()
    assert sent is not None, text
    assert time.monotonic() - sent < ENDS_IN_S
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 130
    os.close(main)
    assert text.decode().split("\x1b[K")[-1].strip() in ("fattn: interrupted before anything was measured", ""), text


def test_ignored_signals_stay_ignored(fattn):
    process = subprocess.Popen([fattn.path, "bench", "--seqlen", "64", "--nheads", "1", "--no-grad"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_check_keeps_the_cases_that_are_done(fattn, tmp_path):
    target = tmp_path / "check.json"
    process = start(fattn, ["check", "--backend", "reference", "--json", target], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(3)
    said = interrupt(process)
    record = json.loads(target.read_text())
    schema_of(record).validate(record)
    done = record["passed"] + record["failed"] + record["skipped"]
    assert not record["complete"] and done == len(record["cases"]) > 0
    assert f"fattn: interrupted; '{target}' has {done} of " in said and said.endswith(" cases\n")
    assert os.listdir(tmp_path) == ["check.json"]
