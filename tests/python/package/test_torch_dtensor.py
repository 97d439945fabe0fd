"""fattn.attention on DTensors: two processes (gloo) compute shards by batch and heads, with the results and gradients that one process has of the whole."""

import itertools
import os

import forked
import pytest
import torch

import fattn
from attention_reference import reordered

distributed = pytest.importorskip("torch.distributed")
tensor = pytest.importorskip("torch.distributed.tensor")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

Replicate, Shard = tensor.Replicate, tensor.Shard
CU = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


def dense(batch: int = 4, nheads: int = 4, nheads_k: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, n, h, d) for n, h, d in ((7, nheads, 16), (9, nheads_k, 16), (9, nheads_k, 24))]


def options_of(name: str, batch: int, nheads: int) -> dict:
    torch.manual_seed(1)
    return {
        "plain": {},
        "causal": {"causal": True, "window": (4, 0), "softcap": 5.0, "softmax_scale": 0.4},
        "bias of heads": {"bias": torch.randn(nheads, 7, 9)},
        "bias of all": {"bias": torch.randn(batch, nheads, 7, 9), "sinks": torch.randn(nheads)},
        "bias of keys": {"bias": torch.randn(9), "mask": torch.rand(batch, 1, 7, 9) > 0.3},
        "lengths": {"seqused_k": torch.arange(batch) % 5 + 3, "alibi_slopes": torch.rand(nheads), "causal": True},
        "slopes of entries": {"alibi_slopes": torch.rand(batch, nheads)},
        "documents": {"document_q": torch.arange(7, dtype=torch.int32).div(3, rounding_mode="floor").int().expand(batch, 7),
                      "document_k": torch.arange(9, dtype=torch.int32).div(3, rounding_mode="floor").int().expand(batch, 9)},
    }[name]


NAMES = ("plain", "causal", "bias of heads", "bias of all", "bias of keys", "lengths", "slopes of entries", "documents")
# batch, nheads, nheads_k; 3 entries, 3 heads and 6 heads with 3 are parts of unequal size; 1 and 3 key heads cannot be split by two.
SHAPES = ((4, 4, 2), (3, 4, 4), (4, 3, 3), (2, 4, 1), (2, 6, 3), (2, 2, 1))


def outcome(x: list, options: dict, layout: str, call) -> list:
    """o, lse and the gradients of q, k, v, bias and sinks; `call` makes DTensors of them, or leaves them."""
    if layout == "bhsd":
        x = [y.transpose(1, 2).contiguous() for y in x]
    leaves = [y.requires_grad_() for y in call(x, q=True)]
    options = {name: call([y], q=False)[0] if isinstance(y, torch.Tensor) else y for name, y in options.items()}
    learned = [options[name].requires_grad_() for name in ("bias", "sinks") if name in options]
    o, lse = fattn.attention(*leaves, return_lse=True, layout=layout, **options)
    assert torch.equal(whole(fattn.attention(*leaves, layout=layout, **options)), whole(o))
    loss = (whole(o) * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() + (whole(lse) * 0.3).sum()
    return [whole(y).detach() for y in (o, lse, *torch.autograd.grad(loss, [*leaves, *learned]))]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, tensor.DTensor) else x


def _check_table(mesh) -> int:
    """The number of problems that agree."""
    count = 0
    for (batch, nheads, nheads_k), name, layout, by in itertools.product(SHAPES, NAMES, ("bshd", "bhsd"), ("batch", "heads", "nothing")):
        if (layout == "bhsd" and name != "bias of all") or (name not in ("plain", "bias of all") and (batch, nheads) != (4, 4)) or (by == "nothing" and batch != 4):
            continue
        heads = 1 if layout == "bhsd" else 2
        placement = {"batch": Shard(0), "heads": Shard(heads), "nothing": Replicate()}[by]
        wanted = outcome(dense(batch, nheads, nheads_k), options_of(name, batch, nheads), layout, lambda x, q: [y.clone() for y in x])

        def distribute(x, q):
            # Keys are replicated and split by heads in turns with the queries' own placement, all else is replicated: the call moves them.
            return [tensor.distribute_tensor(y.clone(), mesh, [placement if q and (i == 0 or count % 2) else Replicate()]) for i, y in enumerate(x)]

        got = outcome(dense(batch, nheads, nheads_k), options_of(name, batch, nheads), layout, distribute)
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            close = reordered("float32", 16, 24, 24, 9, 7 * nheads // nheads_k, batch, largest=float(b[b.isfinite()].abs().max()))  # batch: of a shared bias
            torch.testing.assert_close(a, b, **close, msg=lambda text: f"{batch, nheads, nheads_k}, {name}, {layout}, {by}, result {i}: {text}")
        count += 1
    return count


def _check_others(mesh) -> int:
    """Placements, packed sequences, pages, packed tensors, torch.compile, and what is refused."""
    rank, (q, k, v) = distributed.get_rank(), dense()
    d = [tensor.distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, v)]
    o, lse = fattn.attention(*d, return_lse=True)
    assert o.placements == lse.placements == (Shard(0),) and o.shape == (4, 7, 4, 24) and lse.shape == (4, 4, 7) and o.to_local().shape[0] == 2
    assert torch.equal(o.to_local(), fattn.attention(q, k, v)[2 * rank : 2 * rank + 2]) and fattn.attention(*d, return_dropout_state=True)[1] is None
    h = [tensor.distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    o, lse = fattn.attention(*h, return_lse=True)
    assert o.placements == (Shard(2),) and lse.placements == (Shard(1),)
    uneven = fattn.attention(*(tensor.distribute_tensor(x[:3].transpose(1, 2).contiguous(), mesh, [Shard(0)]) for x in (q, k, v)), layout="bhsd")
    assert uneven.shape == (3, 4, 7, 24) and uneven.stride() == torch.empty(3, 7, 4, 24).transpose(1, 2).stride()

    rows = [tensor.distribute_tensor(x.flatten(0, 1)[:9].contiguous(), mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
    cu = tensor.distribute_tensor(CU, mesh, [Replicate()])
    plain = [x.full_tensor().detach().requires_grad_() for x in rows]
    for call, given in ((fattn.attention_varlen, {}), (fattn.attention, {"max_seqlen_q": 5, "max_seqlen_k": 5})):
        o, lse = call(*rows, cu_seqlens_q=cu, causal=True, return_lse=True, **given)
        wanted = call(*plain, cu_seqlens_q=CU, causal=True, return_lse=True, **given)
        assert o.placements == (Shard(1),) and lse.placements == (Shard(0),) and torch.equal(o.full_tensor(), wanted[0]) and torch.equal(lse.full_tensor(), wanted[1])
        for a, b in zip(torch.autograd.grad(o.full_tensor().square().sum(), rows), torch.autograd.grad(wanted[0].square().sum(), plain)):
            assert torch.equal(a.full_tensor(), b)

    table, used = torch.arange(8).reshape(4, 2), torch.tensor([5, 8, 3, 1])
    pages = [torch.randn(8, 4, 2, 16) for _ in range(2)]
    wanted = fattn.attention(q, *pages, block_table=table, seqused_k=used)
    for placement in (Shard(0), Shard(2)):
        of_q, replicated = tensor.distribute_tensor(q, mesh, [placement]), [tensor.distribute_tensor(x, mesh, [Replicate()]) for x in (*pages, table, used)]
        got = fattn.attention(of_q, *replicated[:2], block_table=replicated[2], seqused_k=replicated[3])
        assert torch.equal(got.full_tensor(), wanted)

    qkv = torch.randn(4, 7, 3, 4, 16)
    got = fattn.attention_qkvpacked(tensor.distribute_tensor(qkv, mesh, [Shard(3)]), causal=True)
    assert got.placements == (Shard(2),) and torch.equal(got.full_tensor(), fattn.attention_qkvpacked(qkv, causal=True))
    compiled = torch.compile(lambda *x: fattn.attention(*x, causal=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*d).full_tensor(), fattn.attention(q, k, v, causal=True))

    refused = [
        (NotImplementedError, r"^q is a DTensor with the placement (S\(1\)|Shard\(dim=1\)) in dimension 0 of its mesh; allowed: Shard\(0\), by batch, Shard\(2\), by heads",
         lambda: fattn.attention(tensor.distribute_tensor(q, mesh, [Shard(1)]), *d[1:])),
        (NotImplementedError, r"allowed: Shard\(1\), by heads, and Replicate", lambda: fattn.attention_varlen(d[0][0], d[1][0], d[2][0], cu_seqlens_q=cu)
         if d[0][0].placements[0].is_shard(0) else fattn.attention_varlen(*(tensor.distribute_tensor(x[0].contiguous(), mesh, [Shard(0)]) for x in (q, k, v)), cu_seqlens_q=cu)),
        (NotImplementedError, "^dropout_p is 0.1 and q is a DTensor", lambda: fattn.attention(*d, dropout_p=0.1)),
        (ValueError, "^bias is a Tensor and q a DTensor; .*distribute_tensor", lambda: fattn.attention(*d, bias=torch.randn(7, 9))),
        (ValueError, "^k is a Tensor and q a DTensor", lambda: fattn.attention(d[0], k, d[2])),
        (ValueError, r"^k has the shape \(3, 9, 2, 16\) and q \(4, 7, 4, 16\); its dimension 0 must be 4, as q's batch",
         lambda: fattn.attention(d[0], *(tensor.distribute_tensor(x[:3], mesh, [Replicate()]) for x in (k, v)))),
        (ValueError, "^q has 4 heads and k 3; nheads must be a multiple", lambda: fattn.attention(d[0], *(tensor.distribute_tensor(x[:, :, :1].repeat(1, 1, 3, 1), mesh,
                                                                                                                        [Shard(0)]) for x in (k, v)))),
        (ValueError, "^k has the shape .* and v", lambda: fattn.attention(d[0], d[1], tensor.distribute_tensor(v[:, :5], mesh, [Shard(0)]))),
        (ValueError, "^q has 3 dimensions; allowed: 4", lambda: fattn.attention(d[0][:, 0], *d[1:])),
        (TypeError, "has no option 'is_causal'", lambda: fattn.attention(*d, is_causal=True)),
        (ValueError, "^layout is 'sbhd'", lambda: fattn.attention(*d, layout="sbhd")),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
    return len(refused)


def _one_of_two(rank: int, meeting: str, results) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
        results.put((rank, _check_table(mesh), _check_others(mesh)))
    except BaseException as error:  # of which the other process would wait
        results.put((rank, "failed", f"{type(error).__name__}: {error}"))
        raise
    finally:
        distributed.destroy_process_group()
    results.close()
    results.join_thread()
    os._exit(0)  # threads of gloo release their last tensors while Python finalizes, which aborts the process


def test_two_processes(tmp_path):
    context = forked.context()
    results = context.Queue()
    processes = [context.Process(target=_one_of_two, args=(rank, f"file://{tmp_path}/meeting", results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        got = [results.get(timeout=300) for _ in range(2)]
        assert all(table != "failed" and table >= 40 and refused >= 10 for _, table, refused in got), got
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def test_two_dimensions_of_a_mesh():
    """Batch over one, heads over the other; in one process that stands for each of four in turns."""
    q, k, v = dense()
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
        d = [tensor.distribute_tensor(x, mesh, [Shard(0), Shard(2)]) for x in (q, k, v)]
        o, lse = fattn.attention(*d, return_lse=True)
        assert o.placements == (Shard(0), Shard(2)) and lse.placements == (Shard(0), Shard(1))
        assert torch.equal(o.full_tensor(), fattn.attention(q, k, v))
        other = distributed.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(ValueError, match="^k is a DTensor on the mesh .* all tensors of a call must be on one mesh"):
            fattn.attention(d[0], tensor.distribute_tensor(k, other, [Shard(0)]), d[2])
    finally:
        distributed.destroy_process_group()
