"""What the command line makes of a stdin, stdout or stderr that is closed, full or no longer read: no crash, and nothing that was measured is lost."""
import json
import os
import signal
import subprocess

import pytest

QUICK = ["bench", "--seqlen", "16", "--nheads", "1", "--no-grad", "--repeats", "1", "--min-time", "0", "--max-time", "0.1", "--warmup", "0"]
STDOUT_FAILED = "fattn: cannot write to stdout\n"


def shell(fattn, command: str, **options) -> subprocess.CompletedProcess:
    """Runs a command of a shell in which $FATTN is the program."""
    return subprocess.run(["bash", "-c", command], env={**os.environ, "FATTN": fattn.path}, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize("arguments", ["nope", "bench --headdim -1", "memory --seqlen 64"])
def test_errors_that_cannot_be_said_are_errors(fattn, redirected, arguments):
    done = shell(fattn, f'"$FATTN" {arguments} {redirected}')
    fails = arguments != "memory --seqlen 64" or ">&- 2" in redirected or ">/dev/full 2" in redirected
    assert done.returncode == (2 if fails else 0), done


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_file_does_not_get_the_number_of_a_closed_stream(fattn, tmp_path, closed):
    done = shell(fattn, f'"$FATTN" memory --seqlen 64 --json record.json --figure figure.svg {closed}', cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == ("" if "2>&-" in closed else STDOUT_FAILED)
    assert json.loads((tmp_path / "record.json").read_text())["fattn_memory"] == 1
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")


def test_a_closed_stdin_is_an_error_where_it_is_read(fattn):
    done = shell(fattn, '"$FATTN" gpt2 decode /nonexistent <&-')
    assert done.returncode == 2
    done = shell(fattn, '"$FATTN" lab --step 3 <&-')
    assert done.returncode == 0 and "Question" in done.stdout


def test_a_record_is_kept_though_stdout_is_full(fattn, tmp_path):
    done = shell(fattn, f'"$FATTN" {" ".join(QUICK)} --json record.json >/dev/full', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, STDOUT_FAILED)
    assert json.loads((tmp_path / "record.json").read_text())["rows"][0]["status"] == "ok"


def test_without_a_record_a_full_stdout_ends_it_at_once(fattn):
    done = shell(fattn, f'"$FATTN" {" ".join(QUICK)} >/dev/full')
    assert (done.returncode, done.stderr) == (2, STDOUT_FAILED)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_reader_that_leaves_takes_no_record_away(fattn, tmp_path, keeps):
    done = fattn.unread(*QUICK, *(["--json", "record.json"] if keeps else []), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, ""), "as a program ends that nobody reads"
    assert (tmp_path / "record.json").exists() == keeps
    if keeps:
        assert json.loads((tmp_path / "record.json").read_text())["rows"][0]["status"] == "ok"


def test_who_ignores_sigpipe_is_told_of_the_reader(fattn, tmp_path):
    """Services start programs so: a write that fails is to be an error, no death by a signal."""
    for record in ([], ["--json", "record.json"]):
        done = fattn.unread("memory", "--seqlen", 64, *record, cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN))
        assert (done.returncode, done.stderr) == (2, STDOUT_FAILED)
    assert json.loads((tmp_path / "record.json").read_text())["fattn_memory"] == 1


def test_what_is_started_still_ends_when_nobody_reads(fattn, tmp_path):
    done = shell(fattn, f'"$FATTN" profile --json record.json --out {tmp_path / "profile"} -- bash -c "yes | head -1; echo \\${{PIPESTATUS[0]}} >status"', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "status").read_text() == f"{128 + signal.SIGPIPE}\n"
