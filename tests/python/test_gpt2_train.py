"""fattn gpt2 train: runs that are killed at any moment go on bit for bit; what is written, what is refused, and what the disk's end does."""
import base64
import json
import os
import pathlib
import random
import resource
import signal
import struct
import subprocess
import time

import pytest

WHOLE = os.environ.get("FATTN_TEST_WHOLE") == "1"
DEVICE = os.environ.get("FATTN_TEST_DEVICE", "cpu")  # tools/test_gpu.py says cuda
STEPS, EVERY = 100, 10
SIZES = ["--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--seqlen", 16, "--batch", 2, "--accumulate", 2]
RUN = [*SIZES, "--dropout", 0.1, "--steps", STEPS, "--every", EVERY, "--eval-batches", 2, "--learning-rate", 3e-3, "--keep", 0, "--device", DEVICE]
if DEVICE != "cpu":
    RUN.append("--deterministic")


@pytest.fixture(scope="module")
def data(fattn, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "tok").mkdir()
    (folder / "tok" / "bytes.tiktoken").write_text("".join(f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256)))
    draw = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "one", "two", "three"]
    for i in range(12):
        (folder / f"{i}.txt").write_text(" ".join(draw.choice(words) for _ in range(60)))
    fattn("gpt2", "tokenize", folder / "tok", *(folder / f"{i}.txt" for i in range(12)), "--out", folder / "tokens", "--validation", 0.2, "--threads", 1)
    return folder / "tokens"


@pytest.fixture(scope="module")
def done(fattn, data, tmp_path_factory) -> pathlib.Path:
    """A run that nothing disturbs."""
    out = tmp_path_factory.mktemp("done") / "run"
    fattn("gpt2", "train", *RUN, "--data", data, "--out", out)
    return out


def log_of(out: pathlib.Path) -> list[dict]:
    """Without what differs from machine to machine; a line that is cut off is none."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().split("\n")[:-1]]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def steps_of(out: pathlib.Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in out.glob("step-*"))


def same(out: pathlib.Path, done: pathlib.Path):
    assert log_of(out) == log_of(done)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (out / f"step-{STEPS:08}" / name).read_bytes() == (done / f"step-{STEPS:08}" / name).read_bytes(), name


def test_a_run_learns_and_says_so(fattn, data, done):
    lines = log_of(done)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert [line["step"] for line in lines if "validation_loss" in line] == list(range(EVERY, STEPS + 1, EVERY))
    assert steps_of(done) == list(range(EVERY, STEPS + 1, EVERY))
    assert (done / "loss.svg").read_text().startswith("<svg")
    assert json.loads((done / "status.json").read_text())["state"] == "done"
    last = done / f"step-{STEPS:08}"
    assert fattn.json("gpt2", "info", last)["config"]["vocab_size"] == 257
    assert len(fattn.json("gpt2", "generate", last, "al", "-n", 4, "--device", "cpu")["texts"][0]["ids"]) >= 1


def test_runs_that_are_killed_go_on_bit_for_bit(fattn, data, done, tmp_path):
    """Every other one at a moment of the whole run, the others when their log reaches a step behind the last checkpoint."""
    out, draw, kills, resumed = tmp_path / "run", random.Random(7), 0, 0
    command = [fattn.path, "gpt2", "train", *map(str, RUN), "--data", str(data), "--out", str(out), "--resume"]
    wanted, whole = 10 if DEVICE != "cpu" else 100 if WHOLE else 8, 1.0
    while kills < wanted:
        before = max(steps_of(out), default=0)
        target = before + draw.randint(1, 2 * EVERY + 3) if kills % 2 else STEPS + 1
        began = time.monotonic()
        end = began + (60 if kills % 2 else draw.uniform(0, whole))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and time.monotonic() < end and (not (out / "log.jsonl").exists() or (out / "log.jsonl").read_text().count("\n") < target):
            time.sleep(0.001)
        process.kill()
        error = process.communicate()[1]
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, error
            whole = time.monotonic() - began
            same(out, done)
            subprocess.run(["rm", "-rf", str(out)], check=True)
            continue
        kills += 1
        resumed += before > 0
        if (out / "log.jsonl").exists():
            lines, checkpoints = log_of(out), steps_of(out)
            assert not lines or lines[-1]["step"] - max(checkpoints, default=0) <= EVERY
    assert resumed >= wanted // 4
    fattn(*command[1:])
    same(out, done)
    assert not list(out.glob(".step-*"))


def test_ctrl_c_ends_with_a_checkpoint(fattn, data, tmp_path):
    command = [fattn.path, "gpt2", "train", *map(str, [*SIZES, "--steps", 1_000_000, "--every", 1_000_000, "--data", data, "--out", tmp_path / "run"])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    end = time.monotonic() + 60
    while not ((tmp_path / "run" / "log.jsonl").exists() and (tmp_path / "run" / "log.jsonl").stat().st_size > 0) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "with a checkpoint" in error and "--resume" in said
    assert steps_of(tmp_path / "run") == [log_of(tmp_path / "run")[-1]["step"]]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "interrupted"


def test_a_full_disk_leaves_the_last_checkpoint(fattn, data, done, tmp_path):
    """A limit on the size of files lies between those of model.safetensors and optimizer.safetensors."""
    shorter = [EVERY if part == STEPS else part for part in RUN]
    fattn("gpt2", "train", *shorter, "--data", data, "--out", tmp_path / "run")
    arguments = ["gpt2", "train", "--out", tmp_path / "run", "--resume", "--steps", STEPS, "--every", EVERY]
    limit = (done / f"step-{STEPS:08}" / "model.safetensors").stat().st_size + 2000

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    error = fattn.refuses(*arguments, preexec_fn=limited)
    assert f"after step {2 * EVERY}" in error and "File too large" in error and f"step-{EVERY:08}" in error
    assert steps_of(tmp_path / "run") == [EVERY] and not list((tmp_path / "run").glob(".step*"))


def test_options_of_a_run_stay_those_of_the_run(fattn, data, done, tmp_path):
    error = fattn.refuses("gpt2", "train", "--out", done, "--resume", "--seqlen", 8, "--learning-rate", 1, "--n-layer", 2)
    for part in ("--seqlen was 16, is 8", "--learning-rate was 0.003, is 1.0", "--n-layer was 1, is 2"):
        assert part in error
    assert "--seqlen" not in fattn("gpt2", "train", "--out", done, "--resume", "--seqlen", 16).stderr
    assert "Changed" not in fattn("gpt2", "train", "--out", done, "--resume", "--device", "cpu").stdout
    assert "holds a training run already" in fattn.refuses("gpt2", "train", *RUN, "--data", data, "--out", done)
    assert "100 steps already" in fattn.refuses("gpt2", "train", "--out", done, "--resume", "--steps", 4)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    assert "'letter.txt'" in fattn.refuses("gpt2", "train", *RUN, "--data", data, "--out", tmp_path / "other")
    assert "to begin, give --data" in fattn.refuses("gpt2", "train", "--out", tmp_path / "none", "--resume")


def test_a_reader_that_leaves_ends_no_run(fattn, data, done, tmp_path):
    ended = fattn.unread("gpt2", "train", *RUN, "--data", data, "--out", tmp_path / "run")
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")
    same(tmp_path / "run", done)


def test_what_does_not_fit_is_refused(fattn, data, done, tmp_path):
    out = ["--out", tmp_path / "run"]
    assert "say what is trained" in fattn.refuses("gpt2", "train", "--data", data, *out)
    assert "--data" in fattn.refuses("gpt2", "train", *SIZES, *out)
    assert "less than one sequence" in fattn.refuses("gpt2", "train", *(100_000 if part == 16 else part for part in SIZES), "--data", data, *out)
    config = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 200, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "a tokenizer of 257 tokens, the model has a vocabulary of 200" in fattn.refuses("gpt2", "train", tmp_path / "config.json", "--seqlen", 16, "--data", data, *out)
    assert "more than the model's 16 positions" in fattn.refuses("gpt2", "train", done / f"step-{STEPS:08}", "--seqlen", 32, "--data", data, *out)
    assert "--n-layer" in fattn.refuses("gpt2", "train", done / f"step-{STEPS:08}", "--n-layer", 2, "--data", data, *out)
    limited = fattn("gpt2", "train", *SIZES, "--data", data, *out, "--memory-limit", "10KiB", status=2)
    assert "allowed by --memory-limit" in limited.stderr and "in all" in limited.stdout
    assert "--warmup 9" in fattn.refuses("gpt2", "train", *SIZES, "--steps", 8, "--warmup", 9, "--data", data, *out)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    bytes_ = bytearray((data / "train" / "00000.tokens").read_bytes())
    bytes_[len(bytes_) // 4] ^= 1
    (damaged / "00000.tokens").write_bytes(bytes_)
    assert "damaged" in fattn.refuses("gpt2", "train", *SIZES, "--data", damaged, "--tokenizer", data / "tokenizer", "--out", tmp_path / "damaged-run")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_with_its_place(fattn, data, tmp_path):
    error = fattn("gpt2", "train", *SIZES, "--steps", 20, "--every", 1, "--learning-rate", 1e38, "--warmup", 0, "--clip", 0, "--data", data, "--out", tmp_path / "run", status=1).stderr
    assert "the first tensor that is not finite is" in error and "step-00000001" in error
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_damage_of_a_checkpoint_is_named(fattn, data, tmp_path):
    fattn("gpt2", "train", *SIZES, "--steps", 4, "--every", 2, "--data", data, "--out", tmp_path / "run")
    path = tmp_path / "run" / "step-00000004" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    assert "optimizer.safetensors' is damaged" in fattn.refuses("gpt2", "train", "--out", tmp_path / "run", "--resume")


def test_records_memory_and_half_precision(fattn, data, tmp_path):
    memory = fattn.json("gpt2", "train", "--preset", "gpt2", "--seqlen", 64, "--dtype", "bf16", "--memory")
    assert memory["run"] is None and memory["memory_bytes"] == sum(use["bytes"] for use in memory["memory"]) > 124_439_808 * 14
    for dtype in ("fp16", "bf16"):
        out = tmp_path / dtype
        half = [*SIZES, "--dtype", dtype, "--every", 5, "--data", data]
        record = fattn.json("gpt2", "train", *half, "--steps", 10, "--out", out)
        assert record["run"]["loss_last"] < 6 and record["run"]["interrupted"] is False
        fattn("gpt2", "train", *half, "--steps", 10, "--out", tmp_path / f"{dtype}-all")
        subprocess.run(["rm", "-r", str(out / "step-00000010")], check=True)
        assert fattn.json("gpt2", "train", "--out", out, "--resume")["run"]["resumed_from"] == 5
        assert log_of(out) == log_of(tmp_path / f"{dtype}-all")


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(message: bytes) -> dict[int, object]:
    """Of a protocol buffer; the last one of a number."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if message[at - 1] < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            found[key >> 3] = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            found[key >> 3] = message[at:at + size]
            at += size
    return found


def test_event_files_are_what_tensorboard_reads(fattn, data, tmp_path):
    fattn("gpt2", "train", *SIZES, "--steps", 3, "--data", data, "--out", tmp_path / "run", "--tensorboard", tmp_path / "events")
    (path,) = (tmp_path / "events").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    bytes_, at, losses = path.read_bytes(), 0, {}
    while at < len(bytes_):
        (size, crc), event = struct.unpack_from("<QI", bytes_, at), bytes_[at + 12:at + 12 + struct.unpack_from("<Q", bytes_, at)[0]]
        assert crc == masked(bytes_[at:at + 8]) and struct.unpack_from("<I", bytes_, at + 12 + size)[0] == masked(event)
        at += 16 + size
        told = fields(event)
        if 5 in told and (value := fields(fields(told[5])[1]))[1] == b"loss/training":
            losses[told[2]] = struct.unpack("<f", value[2])[0]
    assert losses == {line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in log_of(tmp_path / "run")}
