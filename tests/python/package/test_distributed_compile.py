"""ring_attention inside torch.compile: one graph, with gradients; the same numbers as without it."""

import os

import pytest

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

import torch

import fattn.distributed as fd
from attention_reference import reordered
from distributed_ranks import run_ranks

WHOLE = os.environ.get("FATTN_TEST_WHOLE") == "1"
WITH_GRADIENT = ("q", "k", "v", "bias", "sinks")


def cases(mesh) -> dict[str, tuple[str, dict, dict]]:
    """(backend, shapes, options). Inductor takes seconds to import, and to compile C++."""
    packed = torch.tensor([0, 5, 9, 14], dtype=torch.int32)
    return {
        "all options": ("aot_eager", {}, {"causal": True, "window": (6, 2), "softcap": 4.0, "sinks": torch.randn(4), "alibi_slopes": torch.rand(4),
                                          "bias": torch.randn(4, 1, 14), "dropout_p": 0.25, "dropout_state": torch.tensor([5, 6]), "group": distributed.group.WORLD}),
        "heads": ("aot_eager", {}, {"method": "mixed", "ulysses_degree": 2, "sinks": torch.randn(4), "bias": torch.randn(1, 7, 14), "document_q": torch.arange(7, dtype=torch.int32).expand(2, 7) // 3,
                                    "document_k": torch.arange(7, dtype=torch.int32).expand(2, 7) // 3, "group": mesh}),
        "packed": ("aot_eager" if WHOLE else "eager", {"packed": True}, {"causal": True, "cu_seqlens_q": packed}),
        "packed, numbers": ("eager", {"packed": True}, {"causal": True, "cu_seqlens_q": packed.tolist(), "check": False, "seqlen_q": 14}),
    } | ({"inductor": ("inductor", {}, {"causal": True}),
          "around it": ("inductor", {"around": True}, {"causal": True, "softmax_scale": 0.2})} if WHOLE else {})


def differentiated(function, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() if name in WITH_GRADIENT else x for name, x in given.items()}
    o, lse = function(**leaves)
    (o.square().sum() + lse.sum()).backward()
    return [o.detach(), lse.detach(), *(leaves[name].grad for name in WITH_GRADIENT if name in leaves)]


def compiled(rank: int) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(rank)
    for name, (backend, shapes, options) in cases(mesh).items():
        batch = () if shapes.get("packed") else (2,)
        given = {x: torch.randn(*batch, 7, heads, 8) for x, heads in (("q", 4), ("k", 2), ("v", 2))}
        given |= {x: y for x, y in options.items() if isinstance(y, torch.Tensor)}
        others = {x: y for x, y in options.items() if x not in given}

        def function(q, k, v, **tensors):
            if shapes.get("around"):
                q, v = q * 2 + 1, v.sin()
            o, lse = fd.ring_attention(q, k, v, return_lse=True, **tensors, **others)
            return (o.cos(), lse) if shapes.get("around") else (o, lse)

        torch._dynamo.reset()
        wanted = differentiated(function, given)
        got = differentiated(torch.compile(function, backend=backend, fullgraph=True), given)
        for x, y in zip(got, wanted):
            assert x.shape == y.shape and x.dtype == y.dtype, name
            # q k, dout v, dout o; over the keys, over the queries of two heads, in the compiler's order.
            assert (x - y).abs().max() <= reordered("float32", 8, 8, 8, 14, 2 * 14)["atol"] * y.abs().max(), name
    with torch.no_grad():
        q, k, v = (torch.randn(1, 3, 2, 8, dtype=torch.bfloat16) for _ in range(3))
        assert torch.equal(torch.compile(fd.ring_attention, backend="eager", fullgraph=True)(q, k, v), fd.ring_attention(q, k, v))


def test_one_graph_with_gradients():
    run_ranks(2, compiled, timeout=300)


def opchecked(rank: int) -> None:
    """Fakes have the shapes, strides and dtypes of results; what differs on one rank is an error there, too."""
    given = {name: torch.randn(2, 5, heads, 8).transpose(0, 1).contiguous().transpose(0, 1) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    graphs = []

    def keep(graph, inputs):
        graphs.append((graph, inputs))
        return graph.forward

    torch.compile(lambda q, k, v: fd.ring_attention(q, k, v, causal=True), backend=keep, fullgraph=True)(**given)
    (graph, _), = graphs
    node, = [x for x in graph.graph.nodes if "ring_attention" in str(x.target)]
    for real, fake in zip(torch.ops.fattn.ring_attention(*given.values(), *node.args[3:]), node.meta["example_value"]):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    with pytest.raises(ValueError, match="causal is True on rank 1 and False on rank 0"):
        torch.compile(lambda q, k, v: fd.ring_attention(q, k, v, causal=rank == 1), backend="eager", fullgraph=True)(**given)


def test_fakes_and_errors():
    run_ranks(2, opchecked, timeout=300)
