"""fattn.distributed beside ring_attention: shards, positions, decode over a cache that is spread, merges at their limits, groups; the page's training loop."""

import contextlib
import io
import json
import pathlib
import re
import sys

import pytest

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

import torch

import fattn
import fattn.distributed as fd
from attention_reference import reordered
from distributed_cases import defects, random_case
from distributed_ranks import run_ranks
from fattn.distributed._blocks import join_sinks, merge_into

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "DISTRIBUTED.md"


def assert_close(got: torch.Tensor, wanted: torch.Tensor, *sums: int) -> None:
    """`sums` as `reordered` takes them. torch.testing's imports what takes seconds in every rank."""
    assert got.shape == wanted.shape
    close = reordered("float32", *sums)
    same = (got == wanted) | ((got - wanted).abs() <= close["atol"] + close["rtol"] * wanted.abs())
    assert same.all(), f"{got[~same]} instead of {wanted[~same]}"


def _merged(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = (x.clone() for x in parts[0])
    for part in parts[1:]:
        merge_into(o, lse, *part)
    return o, lse


def test_merge_of_distant_parts():
    """Log-sum-exps that are 1e4 apart, and empty rows, in every order."""
    o = [torch.full((1, 5, 1, 2), x) for x in (1.0, 3.0)]
    lse = [torch.tensor([[[0.0, 1e4, -1e4, -torch.inf, -torch.inf]]]), torch.tensor([[[0.0, 0.0, 0.0, 2.0, -torch.inf]]])]
    o[0][0, 3:], o[1][0, 4] = 0, 0  # as empty rows are
    wanted = torch.tensor([2.0, 1, 3, 3, 0])
    for order in ((0, 1), (1, 0)):
        got, got_lse = _merged(*((o[i], lse[i]) for i in order))
        assert_close(got[0, :, 0, 0], wanted, 3, 2)  # each weight a difference, exp and quotient
        assert_close(got_lse[0, 0], torch.tensor([0.6931472, 1e4, 0.0, 2.0, -torch.inf]), 3)


def test_merge_keeps_nan():
    o, lse = _merged((torch.full((1, 1, 1, 1), torch.nan), torch.full((1, 1, 1), torch.nan)), (torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -torch.inf)))
    assert o.isnan().all() and lse.isnan().all()


def test_merge_of_many_parts_is_exact():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 7, 2, 8), torch.randn(1, 40, 2, 8), torch.randn(1, 40, 2, 8)
    parts = [fattn.attention(q, k[:, i : i + 5], v[:, i : i + 5], return_lse=True) for i in range(0, 40, 5)]
    o, lse = _merged(*parts)
    sinks = torch.tensor([0.5, -torch.inf])
    join_sinks(sinks, o, lse)
    wanted, wanted_lse = fattn.attention(q, k, v, sinks=sinks, return_lse=True)
    assert_close(o, wanted, 8, 40, 8)  # q k, over the keys, over the parts
    assert_close(lse, wanted_lse, 8, 40, 8)


def shards(rank: int) -> None:
    x = torch.arange(2 * 11 * 3).reshape(2, 11, 3)
    for layout in ("zigzag", "contiguous"):
        for dim in (0, 1, 2, -1):
            assert torch.equal(fd.unshard(fd.shard(x, dim, layout=layout), dim, layout=layout), x)
        assert torch.equal(fd.positions(11, layout=layout), fd.shard(torch.arange(11), 0, layout=layout))
        within = fd.positions(11, layout=layout, cu_seqlens=[0, 4, 4, 9, 11])
        assert torch.equal(within, fd.shard(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]), 0, layout=layout))
    y = torch.ones(1, 11, requires_grad=True)
    fd.shard(y).sum().backward()
    assert torch.equal(fd.shard(y.grad), torch.ones_like(fd.shard(y.grad))) and y.grad.sum() == fd.shard(y).numel()
    for wrong, error, words in ((lambda: fd.shard(x, 3), ValueError, "dim is 3 and x has 3 dimensions"),
                                (lambda: fd.shard(x, layout="ring"), ValueError, "layout is 'ring'; allowed: 'contiguous', 'zigzag'"),
                                (lambda: fd.unshard(y), NotImplementedError, "x asks for a gradient, which unshard has not"),
                                (lambda: fd.unshard(x[:, : 5 if rank else 2]), ValueError, "x has 2 rows on rank 0; of 12 positions over 3 ranks it holds 4")):
        with pytest.raises(error, match=words):
            wrong()


def test_shards():
    run_ranks(3, shards)


def decode(rank: int) -> None:
    torch.manual_seed(0)
    q, k, v, sinks = torch.randn(2, 1, 4, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16), torch.randn(4)
    begin, end = (0, 7, 7, 50)[rank : rank + 2]  # rank 1 has no keys
    for options in ({}, {"sinks": sinks, "softcap": 5.0}, {"softmax_scale": 40.0}):
        o, lse = fd.decode_attention(q, k[:, begin:end], v[:, begin:end], return_lse=True, **options)
        wanted, wanted_lse = fattn.attention(q, k, v, return_lse=True, **options)
        assert_close(o, wanted, 16, 50, 3)  # q k, over the keys, over the parts
        assert_close(lse, wanted_lse, 16, 50, 3)
    used = torch.tensor([[5, 7], [0, 0], [43, 1]], dtype=torch.int32)
    o = fd.decode_attention(q, k[:, begin:end], v[:, begin:end], seqused_k=used[rank])
    entries = [torch.cat([k[0:1, :5], k[0:1, 7:]], 1), torch.cat([k[1:, :7], k[1:, 7:8]], 1)], [torch.cat([v[0:1, :5], v[0:1, 7:]], 1), v[1:, :8]]
    for b in range(2):
        assert_close(o[b : b + 1], fattn.attention(q[b : b + 1], entries[0][b], entries[1][b]), 16, 48, 3)


def test_decode_over_a_cache_that_is_spread():
    run_ranks(3, decode)


def in_groups(rank: int) -> list[str]:
    """Two groups at once, whose ranks are not those of all."""
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3, 4])]
    group = groups[0] if rank in (0, 2) else groups[1]
    n = distributed.get_world_size(group)
    found = [text for seed in range(6) for text in defects(random_case(seed, n), group)]
    if rank in (0, 2):
        with pytest.raises(ValueError, match="this process is no rank of group"):
            fd.shard(torch.zeros(1, 4), group=groups[1])
    distributed.barrier()  # rank 0 holds the store, and may be ready first
    return found


def test_groups():
    assert run_ranks(5, in_groups) == [[]] * 5


def without_check(rank: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    o = fd.ring_attention(*map(fd.shard, (q, k, v)), causal=True, check=False, seqlen_q=9)
    assert_close(fd.unshard(o), fattn.attention(q, k, v, causal=True), 8, 9, 2)  # q k, over the keys, over the parts
    with pytest.raises(ValueError, match="check is False and seqlen_q is None"):
        fd.ring_attention(*map(fd.shard, (q, k, v)), check=False)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    assert torch.equal(fd.ring_attention(*(fd.shard(x, group=mesh) for x in (q, k, v)), mesh, causal=True), o)
    same = [fd.ring_attention(*map(fd.shard, (q, k, v)), causal=True) for _ in range(3)]
    assert all(torch.equal(x, same[0]) for x in same)


def test_without_check():
    run_ranks(2, without_check)


def refusals(rank: int) -> None:
    q, k, v = (torch.randn(1, 5, heads, 8) for heads in (4, 2, 2))
    for options, error, words in (
            ({"method": "mixed", "ulysses_degree": 3}, ValueError, "ulysses_degree is 3 and there are 4 ranks; allowed: a number that divides them, here 1, 2, 4"),
            ({"method": "mixed", "ulysses_degree": 0}, ValueError, "ulysses_degree is 0 and there are 4 ranks"),
            ({"method": "mixed", "ulysses_degree": 4}, ValueError, "nheads_k is 2 and ulysses_degree is 4; method='mixed' gives each of them as many heads"),
            ({"method": "ulysses"}, ValueError, "nheads_k is 2 and 4 ranks exchange heads; .* A smaller ulysses_degree of method=\"mixed\""),
            ({"ulysses_degree": 2}, ValueError, "ulysses_degree is 2 and method 'ring'; it is for method=\"mixed\" alone"),
            ({"dropout_p": 0.5}, ValueError, "dropout_p is given and dropout_state is not"),
            ({"dropout_p": 1.0, "dropout_state": torch.tensor([1, 2])}, ValueError, "dropout_p is 1.0; allowed: 0 .none. to 1 - 2"),
            ({"dropout_p": 0.5, "dropout_state": torch.tensor([1, 2, 0, 64])}, ValueError, r"dropout_state is torch.int64 \(4,\); allowed: torch.int64 \(2\)"),
            ({"dropout_p": 0.5, "dropout_state": torch.tensor([1, rank])}, ValueError, r"dropout_state is \[1, 1\] on rank 1 and \[1, 0\] on rank 0")):
        with pytest.raises(error, match=words):
            fd.ring_attention(q, k, v, **options)


def test_refusals():
    run_ranks(4, refusals)


def bias_with_exchanged_heads(rank: int) -> None:
    """A rank of one row cannot tell whether its bias has a row for all queries; what ranks have differently is named."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 4, 8).half() for _ in range(3))
    bias, rows = torch.randn(1, 4, 3, 3).half(), slice(0, 1) if rank == 0 else slice(1, 3)
    mine = [x[:, rows].contiguous() for x in (q, k, v)]
    own = bias[:, :, rows].clone().requires_grad_()
    options = {"method": "ulysses", "layout": "contiguous"}
    o = fd.ring_attention(*mine, bias=own, **options)
    o.float().square().sum().backward()
    whole = bias.clone().requires_grad_()
    wanted = fattn.attention(q, k, v, bias=whole)
    wanted.float().square().sum().backward()
    torch.testing.assert_close(o.detach(), wanted[:, rows].detach())
    torch.testing.assert_close(own.grad, whole.grad[:, :, rows])
    with pytest.raises(ValueError, match=r"heads of bias and mask is \[\['torch.float16', 1, 1\], None\] on rank 1"):
        fd.ring_attention(*mine, bias=bias[:, : 1 if rank else 4, rows], **options)
    mine[0].requires_grad_()
    with pytest.raises(ValueError, match="gradient of the bias is False on rank 1 and True on rank 0"):
        fd.ring_attention(*mine, bias=bias[:, :, rows].clone().requires_grad_(rank == 0), **options)


def test_bias_with_exchanged_heads():
    run_ranks(2, bias_with_exchanged_heads)


def test_needs_a_group():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized; call torch.distributed.init_process_group"):
        fd.ring_attention(x, x, x)


def command(rank: int, *arguments: str) -> tuple[int, str]:
    from fattn.distributed.__main__ import main

    sys.argv = ["fattn.distributed", *arguments, "--device", "cpu", "--nheads", "4", "--nheads-k", "2", "--headdim", "16", "--seconds", "0.01"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return main(), printed.getvalue()


command.makes_group = True


def test_check_and_bench():
    (code, printed), (other_code, nothing) = run_ranks(2, command, "check", "--rows", "40")
    record = json.loads(printed)
    assert code == other_code == 0 and nothing == "" and record["failed"] == 0 and len(record["problems"]) == 32
    # Relative to the largest: q k, dout v, dout o; over the keys, over the queries of two heads, over the parts.
    allowed = reordered("float32", 16, 16, 16, 40, 2 * 40, 4)["rtol"]
    assert all(0 <= error <= allowed for problem in record["problems"] for error in problem["errors"].values())
    records = [json.loads(line) for line in run_ranks(2, command, "bench", "--rows", "64", "32")[0][1].splitlines()]
    assert [record["rows"] for record in records] == [64, 32]
    for record in records:
        assert record["ranks"] == 2 and all(0 < record[name]["tflops_a_rank"] and 0 < record[name]["share"] for name in ("forward", "forward_backward"))
        assert 0 < record["exchange_seconds"] < 1 and 0 < record["transfer_seconds"] < 1


def losses(rank: int, loop: str) -> list[float]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(loop, str(PAGE), "exec"), {"__name__": "__main__"})  # a program would import torch anew
    return [float(x) for x in re.findall(r"^step \d: loss ([\d.]+)$", printed.getvalue(), re.MULTILINE)]


losses.makes_group = True


def test_training_loop_of_the_page():
    loop, = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    one, three = run_ranks(1, losses, loop), run_ranks(3, losses, loop)
    assert len(one[0]) == 3 and one[0][0] > one[0][2]
    for others in three:
        assert others == pytest.approx(one[0], abs=1e-5, rel=2**-20)  # each is printed with five decimals, and right to a few last places of fp32
