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


@pytest.mark.parametrize("command", ["info", "support", "support --with softcap,dropout", "check --list", "cache path", "cache list", "cache clear"])
def test_records_of_what_is_only_looked_up_are_kept_too(fattn, tmp_path, monkeypatch, command):
    monkeypatch.setenv("FATTN_CACHE_DIR", str(tmp_path / "cache"))
    name = "fattn_" + command.split()[0]
    full = shell(fattn, f'"$FATTN" {command} --json full.json >/dev/full', cwd=tmp_path)
    assert (full.returncode, full.stderr) == (2, STDOUT_FAILED)
    assert json.loads((tmp_path / "full.json").read_text())[name] == 1
    unread = fattn.unread(*command.split(), "--json", "unread.json", cwd=tmp_path)
    assert (unread.returncode, unread.stderr) == (-signal.SIGPIPE, "")
    assert json.loads((tmp_path / "unread.json").read_text())[name] == 1
    silent = shell(fattn, f'"$FATTN" {command} --json - 2>/dev/full', cwd=tmp_path)
    assert silent.returncode == 0 and json.loads(silent.stdout)[name] == 1
    assert "no-such-folder" in fattn.refuses(*command.split(), "--json", tmp_path / "no-such-folder" / "record.json")


def test_kernels_are_not_removed_for_a_record_that_cannot_be_written(fattn, tmp_path, monkeypatch):
    monkeypatch.setenv("FATTN_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels").mkdir(mode=0o700)
    (tmp_path / "kernels" / ("a" * 64 + "-13.0.cubin")).write_text("no kernel")
    fattn.refuses("cache", "clear", "--json", "/nonexistent/record.json")
    assert len(os.listdir(tmp_path / "kernels")) == 1


def test_ids_of_a_book_are_kept_though_nobody_reads_them(fattn, data, tmp_path):
    """More text than a pipe and stdio's buffer hold."""
    (tmp_path / "book.txt").write_text("alpha beta " * 10_000)
    encode = ["gpt2", "encode", data.parent / "tok", "--file", "book.txt", "--json"]
    full = shell(fattn, f'"$FATTN" {" ".join(map(str, encode))} full.json >/dev/full', cwd=tmp_path)
    assert (full.returncode, full.stderr) == (2, STDOUT_FAILED)
    assert len(json.loads((tmp_path / "full.json").read_text())["ids"]) == 110_000
    unread = fattn.unread(*encode, "unread.json", cwd=tmp_path)
    assert (unread.returncode, unread.stderr) == (-signal.SIGPIPE, "")
    assert (tmp_path / "unread.json").read_bytes() == (tmp_path / "full.json").read_bytes()
    silent = shell(fattn, f'"$FATTN" {" ".join(map(str, encode))} - 2>/dev/full', cwd=tmp_path)
    assert silent.returncode == 0 and len(json.loads(silent.stdout)["ids"]) == 110_000
    without = shell(fattn, f'"$FATTN" {" ".join(map(str, encode[:-1]))} >/dev/full', cwd=tmp_path)
    assert (without.returncode, without.stderr) == (2, STDOUT_FAILED)


def test_what_is_started_still_ends_when_nobody_reads(fattn, tmp_path):
    done = shell(fattn, f'"$FATTN" profile --json record.json --out {tmp_path / "profile"} -- bash -c "yes | head -1; echo \\${{PIPESTATUS[0]}} >status"', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "status").read_text() == f"{128 + signal.SIGPIPE}\n"
