"""Dropout of a part of a matrix: a dropout_state of four numbers drops what the whole matrix' does in these rows and keys."""

import pytest
import torch

import fattn
from attention_reference import reordered, rounded
from torch_cases import agree


def _tensors(dtype: torch.dtype, rows: int, keys: int, batch: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(batch, n, heads, 32).to(dtype) for n, heads in ((rows, 4), (keys, 2), (keys, 2), (rows, 4))]


def _gradients(q, k, v, dout, **options) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o, lse = fattn.attention(*leaves, return_lse=True, **options)
    o.backward(dout)
    return [o.detach(), lse.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("row", "key", "rows", "keys"), [(16, 0, 50, 70), (0, 64, 33, 70), (48, 128, 40, 100), (32, 64, 1, 90), (2**20, 2**24, 3, 65)])
def test_a_part_drops_what_the_whole_does(device, dtype, row, key, rows, keys):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is the host's")
    far = row >= 2**20  # the whole would have no memory: the numbers of a part of it are looked at
    parts = _tensors(dtype, rows, keys)
    wide = [x.double() for x in parts]
    state = torch.tensor([7, -3])
    got = [x.cpu() for x in _gradients(*(x.to(device) for x in parts), dropout_p=0.3, dropout_state=torch.tensor([7, -3, row, key], device=device), causal=True,
                                       backend="reference" if dtype == torch.float64 else device)]
    if far:
        wanted = _gradients(*wide, dropout_p=0.3, dropout_state=torch.tensor([7, -3, row, key]), causal=True, backend="reference")
    else:
        q, dout = (torch.cat([torch.zeros(2, row, 4, 32).double(), x], 1) for x in (wide[0], wide[3]))
        k, v = (torch.cat([torch.zeros(2, key, 2, 32).double(), x], 1) for x in wide[1:3])
        mask = torch.arange(row + rows)[:, None].ge(row) & torch.arange(key + keys).ge(key)
        o, lse, dq, dk, dv = _gradients(q, k, v, dout, dropout_p=0.3, dropout_state=state, causal=True, mask=mask, backend="reference")
        wanted = [o[:, row:], lse[:, :, row:], dq[:, row:], dk[:, key:], dv[:, key:]]
    # q k, dout v, dout o; over the keys, over the queries of two heads. In 16 bits P, dS, rowsum(o dout) and a gradient are rounded.
    terms = (4,) if dtype.itemsize == 2 else (32, 32, 32, keys, 2 * rows)
    tolerance = (reordered if dtype == torch.float64 else rounded)(str(dtype).removeprefix("torch."), *terms)["rtol"]
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), got, wanted):
        y = torch.where(y == -torch.inf, 0, y)
        assert (torch.where(x == -torch.inf, 0, x).double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1), name
    plain = fattn.attention(*wide[:3], causal=True, dropout_p=0.3, dropout_state=state, backend="reference")
    assert (plain - wanted[0]).abs().max() > 0.1, "the place counts"


def test_packed_sequences_begin_at_the_place(device):
    q, k, v, _ = (x.to(device) for x in _tensors(torch.float32, 60, 80, 1))
    state = torch.tensor([1, 2, 16, 64], device=device)
    bounds = {f"cu_seqlens_{name}": torch.tensor(x, dtype=torch.int32, device=device) for name, x in (("q", [0, 20, 60]), ("k", [0, 30, 80]))}
    o = fattn.attention_varlen(q[0], k[0], v[0], **bounds, max_seqlen_q=40, max_seqlen_k=50, dropout_p=0.5, dropout_state=state)
    first = fattn.attention(q[:, :20], k[:, :30], v[:, :30], dropout_p=0.5, dropout_state=state)
    second = fattn.attention(q[:, 20:], k[:, 30:], v[:, 30:], dropout_p=0.5, dropout_state=state + torch.tensor([0, 4, 0, 0], device=device))
    agree(o, torch.cat([first, second], 1)[0], 32, 50)  # q k, over the keys


@pytest.mark.parametrize(("state", "words"), [
    ([1, 2, 8, 0], r"^dropout_state\[2\] is 8, the place of the first row; allowed: 0 to 2\^31 - 5, a multiple of 16"),
    ([1, 2, -16, 0], r"^dropout_state\[2\] is -16"),
    ([1, 2, 0, 32], r"^dropout_state\[3\] is 32, the place of the first key; allowed: 0 to 2\^31 - 6, a multiple of 64"),
    ([1, 2, 0, 2**31], r"^dropout_state\[3\] is 2147483648"),
    ([1, 2, 0], r"^dropout_state has the shape \(3\); expected \(2\), seed and offset; with 4 numbers"),
])
def test_places_that_are_refused(state, words):
    q, k, v, _ = _tensors(torch.float32, 5, 6)
    with pytest.raises(ValueError, match=words):
        fattn.attention(q, k, v, dropout_p=0.5, dropout_state=torch.tensor(state))


def test_standard_attention_refuses_a_part():
    q, k, v, _ = _tensors(torch.float32, 5, 6)
    with pytest.raises(NotImplementedError, match="does not compute dropout"):
        fattn.attention(q, k, v, dropout_p=0.5, dropout_state=torch.tensor([1, 2, 16, 0]), backend="cpu", algorithm="standard")
