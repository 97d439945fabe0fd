"""fattn.weights and fattn.largest_logits beside attention by its definition."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attention_reference as reference  # noqa: E402
import fattn  # noqa: E402
from attention_cases import SCORE_CASES, SHAPES, Case, prepare  # noqa: E402
from attention_reference import EPSILON, rounded  # noqa: E402
from torch_cases import agree, scores_of, tensor  # noqa: E402

CASES = [Case(dtype=x.dtype, **{n: getattr(x, n) for n in ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim")}, headdim_v=x.headdim,
              causal=causal) for x in SHAPES for causal in (False, True)] + [x for x in SCORE_CASES if not x.dropout_p]


def scores_and_hidden(case: Case) -> tuple[np.ndarray, np.ndarray]:
    x = prepare(case)
    hidden, added, _ = reference._pairs((case.batch, case.nheads, case.seqlen_q, case.seqlen_k), case.causal, case.window, x.scores)
    group = case.nheads // case.nheads_k
    scores = reference._heads_first(x.q).astype(np.float64) @ reference._heads_first(x.k, group).astype(np.float64).swapaxes(2, 3) * case.scale
    scores = case.softcap * np.tanh(scores / case.softcap) if case.softcap else scores
    return scores + added, hidden


def arguments(case: Case, device: str) -> tuple[list[torch.Tensor], dict]:
    x = prepare(case)
    options = {name: value for name, value in (scores_of(case, device) | case.options).items() if name not in ("dropout_p", "dropout_state")}
    return [tensor(t, case.dtype, device) for t in (x.q, x.k)], options


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_defined(device, case):
    scores, hidden = scores_and_hidden(case)
    wanted, _ = reference._weights(scores, hidden)
    (q, k), options = arguments(case, device)
    rows = [0, -1, 3] if case.seqlen_q > 3 else []
    got = fattn.weights(q, k, rows=rows, **options)
    assert got.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    # The last places of scores, which are of size 8, are relative in a weight; those of far lower ones, times the weight, below an epsilon. What 16 bits
    # hold is exact in fp32.
    dtype = str(got.dtype).removeprefix("torch.")
    score = rounded(dtype, case.headdim, 4, largest=8)["atol"]
    close = {"rtol": score + rounded(dtype, case.seqlen_k)["rtol"], "atol": EPSILON[dtype]}
    np.testing.assert_allclose(got.detach().cpu().numpy(), wanted[:, :, rows], **close)
    everything = fattn.weights(q.transpose(1, 2), k.transpose(1, 2), rows=slice(None), layout="bhsd", **options)
    np.testing.assert_allclose(everything.detach().cpu().numpy(), wanted, **close)
    largest = fattn.largest_logits(q, k, **options).cpu().numpy()
    np.testing.assert_allclose(largest, np.where(hidden, -np.inf, scores).max(axis=(0, 2, 3), initial=-np.inf), rtol=0, atol=score)


def test_as_attention_has_them(device):
    """Times v they are o; with sinks the rest is theirs."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(2, n, h, 32, dtype=dtype, device=device) for n, h in ((40, 4), (60, 2), (60, 2)))
    sinks = torch.linspace(-2, 2, 4, device=device)
    o, lse = fattn.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    w = fattn.weights(q, k, rows=torch.arange(40), causal=True, sinks=sinks)
    agree(w @ v.float().repeat_interleave(2, 2).transpose(1, 2), o.float().transpose(1, 2), 32, 60, dtype=dtype)  # q k, over the keys
    agree(1 - w.sum(-1), (sinks[:, None] - lse).exp(), 32, 60, dtype=dtype, roundings=0.25)


def test_memory_of_largest_logits(monkeypatch):
    """A few rows at a time give what all do at once."""
    from fattn import _weights

    q, k = torch.randn(2, 2, 50, 2, 16)
    wanted = fattn.largest_logits(q, k, causal=True)
    monkeypatch.setattr(_weights, "_ELEMENTS", 2 * 2 * 50 * 7)
    agree(fattn.largest_logits(q, k, causal=True), wanted, 16)  # q k
    q[0, 3, 1, 0] = torch.nan
    assert fattn.largest_logits(q, k, causal=True).isnan().tolist() == [False, True]


def test_gradient():
    torch.manual_seed(0)
    q, k = (torch.randn(1, n, 2, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    torch.autograd.gradcheck(lambda q, k: fattn.weights(q, k, rows=[0, 2], causal=True), (q, k))


def test_bad_input():
    q, k = torch.zeros(2, 2, 5, 2, 8)
    for rows, error, message in (([5], ValueError, "rows has 5; allowed: -5 to 4"), ([-6], ValueError, "rows has -6"), ([0.5], ValueError, "rows is of torch.float"),
                                 (3, ValueError, "whole numbers"), ("a", TypeError, "rows is a str")):
        with pytest.raises(error, match=message):
            fattn.weights(q, k, rows=rows)
    with pytest.raises(TypeError, match="fattn.weights.*dropout_p"):
        fattn.weights(q, k, rows=[0], dropout_p=0.5)
    with pytest.raises(TypeError, match="fattn.largest_logits.*block_table"):
        fattn.largest_logits(q, k, block_table=q)
    with pytest.raises(ValueError, match="q has batch 2, 2 heads and headdim 8, and k batch 2, 2 heads and headdim 7"):
        fattn.weights(q, k[..., :7], rows=[0])
    with pytest.raises(ValueError, match="q has 3 dimensions"):
        fattn.weights(q[0], k, rows=[0])


def test_refuses_what_attention_refuses():
    """Shapes that would broadcast, or numbers that would be taken: the results would be of another problem."""
    q, k = torch.zeros(2, 2, 5, 2, 8)
    for options, message in (({"seqused_k": torch.zeros(3, dtype=torch.int32)}, "seqused_k has the shape"), ({"seqused_k": torch.tensor([2, 6])}, "seqused_k has 6; allowed: 0 to 5"),
                             ({"seqused_k": torch.tensor([-1, 2])}, "seqused_k has -1"), ({"alibi_slopes": torch.ones(1)}, "alibi_slopes"), ({"bias": torch.zeros(3, 1, 1, 5)}, "bias has the shape"),
                             ({"mask": torch.ones(4, 5, dtype=torch.bool)}, "mask has the shape"), ({"mask": torch.ones(5, 5)}, "mask is a tensor of torch.float32; allowed: torch.bool, torch.uint8"),
                             ({"seqused_k": torch.ones(2)}, "seqused_k is a tensor of torch.float32"), ({"alibi_slopes": torch.ones(2).long()}, "alibi_slopes is a tensor of torch.int64"),
                             ({"sinks": torch.ones(1)}, "sinks has the shape"), ({"document_q": torch.zeros(2, 4, dtype=torch.int32)}, "document_q has the shape"),
                             ({"document_k": torch.zeros(2, 5, dtype=torch.int32)}, "document_k"), ({"softmax_scale": float("nan")}, "softmax_scale is nan; it must be finite"),
                             ({"softmax_scale": torch.ones(2)}, r"softmax_scale is a tensor with the shape \(2,\); allowed: a number"), ({"softcap": -1.0}, "softcap is -1"),
                             ({"window": (-2, 0)}, "window_left is -2"), ({"sinks": torch.ones(2, device="meta")}, "sinks is on meta and q on cpu")):
        for function in (lambda **more: fattn.weights(q, k, rows=[0], **more), lambda **more: fattn.largest_logits(q, k, **more)):
            with pytest.raises(ValueError, match=message):
                function(**options)
    for x in (q.to(torch.complex64), q.long(), q.bool()):
        for pair, name in (((x, k), "q"), ((q, x), "k")):
            with pytest.raises(ValueError, match=f"the dtype of {name} is '.*'; allowed: 'fp32'"):
                fattn.weights(*pair, rows=[0])


def test_in_fp32_inside_autocast():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 20, 2, 16)
    wanted, largest = fattn.weights(q, k, rows=[3]), fattn.largest_logits(q, k)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fattn.weights(q, k, rows=[3]), wanted) and torch.equal(fattn.largest_logits(q, k), largest)
