"""Starts the ranks of a test: processes that talk by gloo, forked from one that has torch imported, which takes seconds."""

import os
import queue
import socket
import time
import traceback

import forked
import torch.distributed as distributed


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(rank: int, nranks: int, port: int, function, arguments: tuple, results) -> None:
    import torch

    torch.set_num_threads(1)
    # As torchrun says it to a program.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(nranks), RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        if not getattr(function, "makes_group", False):
            distributed.init_process_group("gloo")
        results.put((rank, function(rank, *arguments)))
    except BaseException:  # the test prints it
        results.put((rank, f"FAILED: {traceback.format_exc()}"))
    # Threads of gloo outlive the group and release its last tensors when they come to it; while Python finalizes, that aborts the process. So it does not.
    results.close()
    results.join_thread()
    if rank == 0:  # who holds the store goes last
        time.sleep(0.5)
    os._exit(0)


def start(nranks: int, function, *arguments) -> tuple[list, object]:
    context = forked.context()
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=_rank, args=(rank, nranks, port, function, arguments, results)) for rank in range(nranks)]
    for process in processes:
        process.start()
    return processes, results


def gather(processes: list, results, ranks: set[int], timeout: float) -> dict[int, object]:
    """What these ranks return; a failure is a text that begins with FAILED."""
    found: dict[int, object] = {}
    end = time.monotonic() + timeout
    try:
        while not ranks <= found.keys() and time.monotonic() < end:
            try:
                rank, result = results.get(timeout=0.2)
            except queue.Empty:
                continue
            found[rank] = result
    finally:
        for process in processes:
            process.join(2 if ranks <= found.keys() else 0)
            process.kill()
    assert ranks <= found.keys(), f"ranks {sorted(ranks - found.keys())} gave nothing within {timeout} s; the others: {found}"
    return found


def run_ranks(nranks: int, function, *arguments, timeout: float = 120) -> list:
    """function(rank, *arguments) in every rank; what each returns."""
    found = gather(*start(nranks, function, *arguments), set(range(nranks)), timeout)
    for rank in range(nranks):
        assert not str(found[rank]).startswith("FAILED"), f"rank {rank}: {found[rank]}"
    return [found[rank] for rank in range(nranks)]
