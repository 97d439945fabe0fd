"""fattn.attention in a model whose gradients (DDP) or whose parameters (FSDP) two processes share: the same gradients as in one process with the whole
batch. On the CPU, and where there are two GPUs, on one each."""

import copy
import os

import forked
import pytest
import torch

import fattn
from attention_reference import reordered

distributed = pytest.importorskip("torch.distributed")
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)


class Block(torch.nn.Module):
    """Two query heads share a key head; the bias is a parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = torch.nn.Linear(32, 64), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.bias = torch.nn.Parameter(torch.randn(4, 9, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(x).view(*x.shape[:2], 2, 2, 16).unbind(2)
        return x + self.out(fattn.attention(self.q(x).view(*x.shape[:2], 4, 16), k, v, causal=True, bias=self.bias).flatten(2))


def _model_and_batch(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block()).to(device), torch.randn(4, 9, 32).to(device)


def _backward(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    model(batch).square().mean().backward()
    return {name.removeprefix("module."): x.grad for name, x in model.named_parameters()}


def _shared(model: torch.nn.Module, way: str, device: str) -> torch.nn.Module:
    if way == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = distributed.device_mesh.init_device_mesh(device, (2,))
    for part in (*model, model):
        fsdp.fully_shard(part, mesh=mesh)
    return model


def _one_of_two(rank: int, device: str, meeting: str, results) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group("gloo" if device == "cpu" else "nccl", init_method=meeting, rank=rank, world_size=2)
    try:
        for way in ("DDP", "FSDP"):
            model, batch = _model_and_batch(device)
            gradients = _backward(_shared(model, way, device), batch[2 * rank : 2 * rank + 2])
            whole = {name: (x.full_tensor() if way == "FSDP" else x).tolist() for name, x in gradients.items()}
            if rank == 0:
                results.put(whole)
    finally:
        distributed.destroy_process_group()
    # Threads of gloo outlive the group and release its last tensors when they come to it; while Python finalizes, that aborts the process. So it does not.
    results.close()
    results.join_thread()
    os._exit(0)


def test_gradients_of_two_processes(tmp_path, device):
    if device == "cuda" and (torch.cuda.device_count() < 2 or not distributed.is_nccl_available()):
        pytest.skip("torch sees one CUDA device, or has no NCCL")
    model, batch = _model_and_batch(device)
    wanted = _backward(copy.deepcopy(model), batch)
    assert all(x.abs().max() > 0 for x in wanted.values())
    context = forked.context()
    results = context.Queue()
    processes = [context.Process(target=_one_of_two, args=(rank, device, f"file://{tmp_path}/meeting", results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for way in ("DDP", "FSDP"):
            got = results.get(timeout=120)
            assert got.keys() == wanted.keys(), way
            for name, x in wanted.items():
                # Over 36 tokens, behind two blocks' three products of width 32 to 64, and attention's sums in both passes.
                close = reordered("float32", 36, *(2 * (32, 32, 64, 3 * 16, 9, 2 * 9)), largest=float(x.abs().max()))
                torch.testing.assert_close(torch.tensor(got[name]), x.cpu(), **close, msg=lambda text: f"{way}, {name}: {text}")
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


def test_dtensor():
    """Refused by name where q is none; the way out that the message names is computed."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    local_map = pytest.importorskip("torch.distributed.tensor.experimental").local_map
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh, x, sharded = distributed.device_mesh.init_device_mesh("cpu", (1,)), torch.randn(2, 5, 2, 8), [tensor.Shard(2)]
        d, whole = tensor.distribute_tensor(x, mesh, sharded), [tensor.Replicate()]
        for name, f in (("a tensor", lambda: fattn.attention(x, d, x)), ("k", lambda: fattn.attention_varlen(x[0], d[0], x[0], cu_seqlens_q=torch.tensor([0, 5]))),
                        ("sinks", lambda: fattn.attention(x, x, x, sinks=tensor.distribute_tensor(torch.ones(2), mesh, whole))),
                        ("bias", lambda: fattn.attention(x, x, x, bias=tensor.distribute_tensor(torch.ones(5, 5), mesh, whole))),
                        ("dout", lambda: fattn.attention_backward(d, x, x, x, x, torch.ones(2, 2, 5))),
                        ("k_cache", lambda: fattn.with_kvcache(x, d, d, cache_seqlens=5))):
            with pytest.raises(NotImplementedError, match=rf"^{name} is a DTensor, which is computed only where q is one too, .*x.to_local\(\).*local_map"):
                f()
        mapped = local_map(fattn.attention, out_placements=sharded, in_placements=(sharded,) * 3, device_mesh=mesh)
        assert torch.equal(mapped(d, d, d).full_tensor(), fattn.attention(x, x, x))
    finally:
        distributed.destroy_process_group()
