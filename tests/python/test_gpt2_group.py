"""fattn gpt2 train in several processes, with a stand-in for NCCL that sums in memory of the host, in the order of ranks (tests/stub/nccl_stub.cpp)."""
import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import time

import pytest

STEPS = 14
SIZES = ["--n-layer", 2, "--n-head", 2, "--n-embd", 16, "--seqlen", 16, "--batch", 2]
RUN = [*SIZES, "--accumulate", 6, "--steps", STEPS, "--every", 7, "--eval-batches", 5, "--learning-rate", 3e-3, "--keep", 0, "--threads", 1]
LAST_PLACES = 4 * 2**-23  # of a loss in fp32: what another order of the gradients' sums may make of it, where no run says how much
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Processes:
    """Ranks of one run, with the variables that a starter would set."""

    def __init__(self, fattn, ranks: int, arguments, env=None, of_rank=None, plain=True):
        stub = pathlib.Path(fattn.path).parent.parent / "tests" / "libfattn_stub_nccl.so"
        clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        self.all = []
        for rank in range(ranks):
            mine = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)} if plain else {}
            mine |= {"FATTN_NCCL": str(stub), **(env or {}), **((of_rank or {}).get(rank, {}))}
            own = [str(a) for a in (arguments(rank) if callable(arguments) else arguments)]
            self.all.append(subprocess.Popen([fattn.path, "gpt2", "train", *own], env=clean | mine, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                             stderr=subprocess.PIPE, text=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.communicate()

    def ends(self, timeout=60) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) by ranks."""
        end = time.monotonic() + timeout
        done = []
        for process in self.all:
            said, error = process.communicate(timeout=max(0.1, end - time.monotonic()))
            done.append((process.returncode, said, error))
        return done


def run(fattn, ranks: int, arguments, **options):
    with Processes(fattn, ranks, arguments, **options) as processes:
        done = processes.ends()
    for rank, (code, said, error) in enumerate(done):
        assert code == 0, f"rank {rank}: {error}"
        assert rank == 0 or said + error == "", "rank 0 alone speaks"
    return done


def log_of(out: pathlib.Path) -> list[dict]:
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in (out / "log.jsonl").read_text().splitlines()]


def weights_of(out: pathlib.Path, step: int = STEPS) -> bytes:
    return (out / f"step-{step:08}" / "model.safetensors").read_bytes()


def difference(a: list[dict], b: list[dict], key: str) -> float:
    assert len(a) == len(b)
    return max(abs(x[key] - y[key]) / abs(y[key]) for x, y in zip(a, b))


def same_loss(a: dict, b: dict) -> bool:
    """But for the order in which the losses of six batches are summed in float64."""
    return abs(a["loss"] - b["loss"]) <= 6 * 2**-53 * b["loss"]


@pytest.fixture(scope="module")
def alone(fattn, data, tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    fattn("gpt2", "train", *RUN, "--data", data, "--out", out)
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_train_as_one(fattn, data, alone, tmp_path, ranks):
    """The first loss is the same: the same batches at the same weights. What differs from then on is the order in which gradients are summed; a
    run of one process that sums in another order, too (larger batches, fewer of them: the same rows in every step), says how much that may be."""
    meet = tmp_path / "meet"
    run(fattn, ranks, [*RUN, "--data", data, "--out", tmp_path / "run", "--rendezvous", meet])
    assert not meet.exists()
    other = [{"--batch": 6, "--accumulate": 2}.get(RUN[i - 1], part) if i else part for i, part in enumerate(RUN)]
    fattn("gpt2", "train", *other, "--data", data, "--out", tmp_path / "other")
    log, one, reordered = log_of(tmp_path / "run"), log_of(alone), log_of(tmp_path / "other")
    assert same_loss(log[0], one[0]) and log[0]["logit_scale"] == one[0]["logit_scale"]
    for name in ("step", "targets", "learning_rate", "skipped"):
        assert [line[name] for line in log] == [line[name] for line in one]
    assert [line["tokens"] for line in log] == [line["tokens"] for line in one] and min(line["tokens"] for line in one) < max(line["tokens"] for line in one)
    allowed = {key: max(4 * difference(reordered, one, key), LAST_PLACES) for key in ("loss", "gradient_norm")}
    for key, limit in allowed.items():
        steps = difference(one[1:], one[:-1], key)  # what one step changes
        assert difference(log, one, key) <= limit < steps / 100, key
    validated = [[line for line in lines if "validation_loss" in line] for lines in (log, one)]
    assert len(validated[0]) == 2 and difference(*validated, "validation_loss") <= allowed["loss"]


def test_the_same_ranks_give_the_same_bits(fattn, data, tmp_path):
    """Dropout too: its masks are those of one process. How many sums there are makes no difference: all at the end, or many along the way."""
    for name, bucket in (("a", "1GiB"), ("b", 4096), ("c", 4)):
        run(fattn, 2, [*RUN, "--dropout", 0.1, "--data", data, "--out", tmp_path / name, "--rendezvous", tmp_path / f"meet-{name}", "--bucket", bucket])
    fattn("gpt2", "train", *RUN, "--dropout", 0.1, "--data", data, "--out", tmp_path / "one")
    for name in ("b", "c"):
        assert log_of(tmp_path / "a") == log_of(tmp_path / name) and weights_of(tmp_path / "a") == weights_of(tmp_path / name)
    assert same_loss(log_of(tmp_path / "a")[0], log_of(tmp_path / "one")[0])


def test_a_run_goes_on_with_another_number(fattn, data, tmp_path):
    """Until step 7 two processes, then three, or one: what a step has stays the same. Five do not divide it."""
    begin = [*RUN[:RUN.index("--steps")], "--steps", STEPS, *RUN[RUN.index("--steps") + 2:], "--data", data]
    run(fattn, 2, [*begin, "--out", tmp_path / "whole", "--rendezvous", tmp_path / "m1"])
    for ranks, name in ((2, "same"), (3, "more"), (1, "one")):
        subprocess.run(["cp", "-r", tmp_path / "whole", tmp_path / name], check=True)
        subprocess.run(["rm", "-r", tmp_path / name / f"step-{STEPS:08}"], check=True)
        run(fattn, ranks, ["--out", tmp_path / name, "--resume", "--every", 7, "--eval-batches", 5, "--keep", 0, "--threads", 1, "--rendezvous", tmp_path / "m2"])
        log, whole = log_of(tmp_path / name), log_of(tmp_path / "whole")
        if ranks == 2:
            assert log == whole and weights_of(tmp_path / name) == weights_of(tmp_path / "whole")
        assert log[:7] == whole[:7] and same_loss(log[7], whole[7]) and difference(log, whole, "loss") <= LAST_PLACES
    with Processes(fattn, 5, ["--out", tmp_path / "same", "--resume", "--rendezvous", tmp_path / "m3"]) as processes:
        for code, _, error in processes.ends():
            assert code == 2 and "a step of 6 batches (--accumulate) cannot be shared by 5 processes" in error


LONG = [*SIZES, "--accumulate", 6, "--steps", 1_000_000, "--every", 1_000_000, "--threads", 1, "--timeout", 4]


def wait_for_steps(out: pathlib.Path, steps: int):
    end = time.monotonic() + 60
    while not ((out / "log.jsonl").exists() and (out / "log.jsonl").read_text().count("\n") >= steps):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named(fattn, data, tmp_path, victim, how):
    with Processes(fattn, 3, [*LONG, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet"]) as processes:
        wait_for_steps(tmp_path / "run", 3)
        processes.all[victim].send_signal(how)
        began = time.monotonic()
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            _, error = processes.all[rank].communicate(timeout=30)
            assert processes.all[rank].returncode == 2
            assert f"rank {rank}: training stopped after step" in error
            assert (f"rank {victim} has ended without a word" if how == signal.SIGKILL else f"rank {victim} has said nothing for 4 s") in error
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("what, said", [("KILL", "rank 1 has ended without a word"), ("STALL", "rank 1 has stood still for 4 s"),
                                        ("LOSE", "all ranks have waited for an exchange for 4 s")])
def test_what_happens_inside_a_sum_is_named(fattn, data, tmp_path, what, said):
    with Processes(fattn, 3, [*LONG, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet"],
                   of_rank={1: {f"STUB_NCCL_{what}": "1:20"}}) as processes:
        for rank in (0, 2):
            _, error = processes.all[rank].communicate(timeout=60)
            assert processes.all[rank].returncode == 2 and said in error
        code = processes.all[1].wait(timeout=30)  # one that hangs is ended by its own watch
        assert code == (-signal.SIGKILL if what == "KILL" else 2)


def test_sums_that_differ_are_in_no_checkpoint(fattn, data, tmp_path):
    with Processes(fattn, 2, [*RUN, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet"],
                   of_rank={1: {"STUB_NCCL_SPOIL": "1:9"}}) as processes:
        for code, _, error in processes.ends():
            assert code == 2 and ("rank 1 has weights at step" in error or "what was summed over processes is not the same on all" in error)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) in ([], ["step-00000007"])


def test_ranks_that_differ_are_refused(fattn, data, tmp_path):
    def ends(arguments, ranks=2, **options):
        with Processes(fattn, ranks, arguments, **options) as processes:
            return processes.ends()

    meet = ["--rendezvous", tmp_path / "meet", "--data", data, "--out", tmp_path / "run"]
    for code, _, error in ends(lambda rank: [16 * (1 + rank) if i and RUN[i - 1] == "--n-embd" else part for i, part in enumerate(RUN)] + meet):
        assert code == 2 and "rank 1 has the model" in error
    for code, _, error in ends(lambda rank: [*RUN, *meet, "--clip", 1 + rank]):
        assert code == 2 and "rank 1 has --clip 2.0, rank 0 has --clip 1.0" in error
    for code, _, error in ends(lambda rank: [*RUN, *meet, "--bucket", f"{1 + rank}MiB"]):
        assert code == 2 and "rank 1 has --bucket 2097152, rank 0 has --bucket 1048576" in error
    for code, _, error in ends([*RUN, *meet], of_rank={1: {"WORLD_SIZE": "3"}}):
        assert code == 2 and "rank 1 was started as one of 3 processes, rank 0 as one of 2" in error
    for code, _, error in ends([*RUN, *meet], ranks=3, of_rank={2: {"RANK": "1"}}):
        assert code == 2 and "two processes say that they are rank 1" in error
    for rank, (code, _, error) in enumerate(ends(lambda rank: [*RUN, *meet, *(["--model", tmp_path / "none"] if rank == 0 else [])])):
        assert code == 2 and (rank == 0 or "rank 0 has ended: " in error)


def test_each_process_has_the_gpu_of_its_number(fattn, data, tmp_path):
    """Two GPUs, and three processes."""
    tests = pathlib.Path(fattn.path).parent.parent / "tests"
    stubs = {"FATTN_CUDA_DRIVER": str(tests / "libfattn_stub_cuda.so"), "FATTN_NVRTC": str(tests / "libfattn_stub_nvrtc.so"), "STUB_CUDA": "devices=2",
             "FATTN_CACHE_DIR": str(tmp_path / "cache")}
    arguments = [*RUN, "--data", data, "--out", tmp_path / "run", "--device", "cuda", "--rendezvous", tmp_path / "meet"]
    with Processes(fattn, 3, arguments, env=stubs) as processes:
        ended = processes.ends()  # the others by what a stand-in of a GPU cannot do, or because rank 2 has ended
        for code, _, error in ended[2:]:
            assert code == 2 and "rank 2 is number 2 on its machine, which has 2 GPUs" in error, error


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_where_processes_meet(fattn, data, tmp_path):
    def arguments(name, *more):
        return [*RUN[:RUN.index("--steps")], "--steps", 1, "--threads", 1, "--data", data, "--out", tmp_path / name, *more]

    run(fattn, 2, arguments("a"), env={"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port() - 1)})
    run(fattn, 2, arguments("b", "--rendezvous", f"127.0.0.1:{free_port()}"))
    if socket.has_ipv6 and pathlib.Path("/proc/net/if_inet6").exists() and "00000000000000000000000000000001" in pathlib.Path("/proc/net/if_inet6").read_text():
        run(fattn, 2, arguments("c", "--rendezvous", f"[::1]:{free_port()}"))
    names = {"OMPI_COMM_WORLD_": ("RANK", "SIZE"), "PMI_": ("RANK", "SIZE"), "SLURM_": ("PROCID", "STEP_NUM_TASKS")}
    for i, (name, (rank, size)) in enumerate(names.items()):
        run(fattn, 2, arguments(f"d{i}", "--rendezvous", tmp_path / "meet"), plain=False, of_rank={r: {name + rank: str(r), name + size: "2"} for r in (0, 1)})


def test_what_is_no_meeting_is_refused(fattn, data, tmp_path):
    run_ = [*RUN, "--data", data, "--out", tmp_path / "run"]

    def refused(*more, **env) -> str:
        clean = {name: env.get(name, "") for name in VARIABLES}
        return fattn.refuses("gpt2", "train", *run_, *more, env=clean)

    assert "where they meet is not known" in refused(RANK="0", WORLD_SIZE="2")
    assert "RANK is set, WORLD_SIZE is not" in refused(RANK="0")
    assert "WORLD_SIZE is set, RANK is not" in refused(WORLD_SIZE="2")
    assert "RANK is '2'; allowed: 0 to 1" in refused(RANK="2", WORLD_SIZE="2")
    assert "WORLD_SIZE is 'two'" in refused(RANK="0", WORLD_SIZE="two")
    assert "MASTER_PORT is '99999'" in refused(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="99999")
    assert "is no place to meet" in refused("--rendezvous", "127.0.0.1:0", RANK="0", WORLD_SIZE="2")
    assert "no address of this machine" in refused("--rendezvous", "192.0.2.1:4000", RANK="0", WORLD_SIZE="2")
    assert "cannot be found: 'no.such.host.invalid'" in refused("--rendezvous", "no.such.host.invalid:4000", RANK="1", WORLD_SIZE="2")
    assert "rank 1 has not come within 1 s" in refused("--rendezvous", tmp_path / "meet", "--start-timeout", 1, RANK="0", WORLD_SIZE="2")
    assert "rank 0 has not come within 1 s" in refused("--rendezvous", tmp_path / "meet", "--start-timeout", 1, RANK="1", WORLD_SIZE="2")
    (tmp_path / "letter").write_text("dear")
    for rank in "10":
        assert "is no file of a rendezvous" in refused("--rendezvous", tmp_path / "letter", RANK=rank, WORLD_SIZE="2")
    assert (tmp_path / "letter").read_text() == "dear"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "the port is taken" in refused("--rendezvous", f"127.0.0.1:{taken.getsockname()[1]}", RANK="0", WORLD_SIZE="2")


def test_strangers_at_the_door_are_sent_away(fattn, data, tmp_path):
    """Bytes of other programs, lengths that cannot be, ranks of another run: the run comes about all the same."""
    port = free_port()
    small = [*RUN[:RUN.index("--steps")], "--steps", 1, "--threads", 1, "--data", data, "--out", tmp_path / "run", "--rendezvous", f"127.0.0.1:{port}"]
    head = struct.Struct("<IHHI")
    noise = [b"GET / HTTP/1.1\r\n\r\n" * 20, head.pack(0x47544146, 1, 1, 0xFFFFFFFF), head.pack(0x47544146, 1, 1, 5000) + bytes(5000),
             head.pack(0x47544146, 1, 9, 4) + b"1 2 ", head.pack(0x47544146, 1, 1, 5) + b"1 2 x", head.pack(0x47544146, 4, 1, 8) + bytes(8),
             head.pack(0x47544146, 1, 1, 13) + b"1 2 word 1.0\n", b"", bytes(random.Random(3).randrange(256) for _ in range(3000))]
    with Processes(fattn, 1, small, of_rank={0: {"WORLD_SIZE": "2"}}) as first:
        for bytes_ in noise:
            for _ in range(200):
                try:
                    guest = socket.create_connection(("127.0.0.1", port), timeout=5)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            guest.sendall(bytes_)
            if bytes_:
                guest.settimeout(20)
                try:
                    assert guest.recv(100) == b"", "what is no rank is told nothing"
                except ConnectionResetError:
                    pass
            guest.close()
        with Processes(fattn, 1, small, of_rank={0: {"RANK": "1", "WORLD_SIZE": "2"}}) as second:
            assert second.ends()[0][0] == 0
        assert first.ends()[0][0] == 0


def test_ctrl_c_of_one_ends_all_with_a_checkpoint(fattn, data, tmp_path):
    with Processes(fattn, 2, [*LONG, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet"]) as processes:
        wait_for_steps(tmp_path / "run", 2)
        processes.all[1].send_signal(signal.SIGTERM)
        done = processes.ends()
    assert [code for code, _, _ in done] == [128 + signal.SIGTERM] * 2
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == [f"step-{len(log_of(tmp_path / 'run')):08}"]


def test_without_a_gpu_the_real_library_is_refused(fattn, data, tmp_path):
    with Processes(fattn, 2, [*RUN, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet"],
                   env={"FATTN_NCCL": "/nonexistent/libnccl.so.2"}) as processes:
        for code, _, error in processes.ends():
            assert code == 2 and "no usable NCCL" in error and "/nonexistent/libnccl.so.2" in error and "FATTN_NCCL" in error
