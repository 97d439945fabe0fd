"""Paged caches: the same results as from keys side by side, in every front; what is refused."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
import fattn.numpy  # noqa: E402
from fattn import _operators  # noqa: E402
from torch_cases import agree  # noqa: E402

LENGTHS = [200, 37, 0]


class Paged:
    """Caches of three sequences side by side, and in pages, in no order, with NaN where nobody may look."""

    def __init__(self, page_size: int, dtype: torch.dtype = torch.float32, seqlen_q: int = 5) -> None:
        torch.manual_seed(page_size)
        batch, longest, nheads, nheads_k, headdim = len(LENGTHS), max(LENGTHS), 6, 2, 64
        self.q = torch.randn(batch, seqlen_q, nheads, headdim, dtype=dtype)
        self.k, self.v = torch.randn(2, batch, longest, nheads_k, headdim, dtype=dtype)
        self.lengths = torch.tensor(LENGTHS)
        columns = -(-longest // page_size)
        numbers = torch.randperm(batch * columns + 3)[: batch * columns].reshape(batch, columns)
        self.k_pages, self.v_pages = torch.full((2, batch * columns + 3, page_size, nheads_k, headdim), float("nan"), dtype=dtype)
        self.table = torch.full((batch, columns), -1)
        for b, n in enumerate(LENGTHS):
            self.table[b, : -(-n // page_size)] = numbers[b, : -(-n // page_size)]
            for j in range(n):
                page = numbers[b, j // page_size]
                self.k_pages[page, j % page_size], self.v_pages[page, j % page_size] = self.k[b, j], self.v[b, j]

    def expected(self, **options) -> torch.Tensor:
        return fattn.attention(self.q, self.k, self.v, seqused_k=self.lengths, **options)

    @property
    def options(self) -> dict:
        return {"seqused_k": self.lengths, "block_table": self.table}


@pytest.mark.parametrize("seqlen_q", [1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16, 33, 256])
def test_attention(page_size, dtype, seqlen_q):
    x = Paged(page_size, dtype, seqlen_q)
    for options in ({}, {"causal": True}, {"causal": True, "window": (20, 0), "softcap": 3.0, "sinks": torch.ones(6)}):
        expected = x.expected(**options)
        assert torch.equal(fattn.attention(x.q, x.k_pages, x.v_pages, **x.options, **options), expected)
        swapped = [t.transpose(1, 2) for t in (x.q, x.k_pages, x.v_pages)]
        assert torch.equal(fattn.attention(*swapped, **x.options, layout="bhsd", **options).transpose(1, 2), expected)
        contiguous = [t.contiguous() for t in swapped[1:]]  # (pages, heads, page_size, headdim)
        assert torch.equal(fattn.attention(swapped[0], *contiguous, **x.options, layout="bhsd", **options).transpose(1, 2), expected)


def test_pages_have_the_lengths_of_biases_and_masks():
    x = Paged(16)
    room = x.table.shape[1] * 16
    mask, bias = torch.rand(1, 1, 5, room) < 0.5, torch.randn(3, 1, 1, room)
    expected = x.expected(mask=mask[..., :200], bias=bias[..., :200])
    assert torch.equal(fattn.attention(x.q, x.k_pages, x.v_pages, **x.options, mask=mask, bias=bias), expected)
    with pytest.raises(ValueError, match="mask has the shape .* seqlen_k 208"):
        fattn.attention(x.q, x.k_pages, x.v_pages, **x.options, mask=mask[..., :200])


def test_packed_queries():
    x = Paged(16)
    cu_seqlens_q = torch.arange(0, 16, 5)
    q = x.q.reshape(15, 6, 64)
    for call in (lambda **o: fattn.attention_varlen(q, x.k_pages, x.v_pages, **o), lambda **o: fattn.attention(q, x.k_pages, x.v_pages, **o)):
        got, lse = call(cu_seqlens_q=cu_seqlens_q, **x.options, causal=True, return_lse=True)
        assert torch.equal(got.reshape(x.q.shape), x.expected(causal=True)) and lse.shape == (6, 15)
    with pytest.raises(ValueError, match="block_table and cu_seqlens_k are both given"):
        call(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_q, **x.options)
    with pytest.raises(ValueError, match="seqused_k is absent; say how many keys"):
        call(cu_seqlens_q=cu_seqlens_q, block_table=x.table)
    with pytest.raises(ValueError, match=r"k has 3 dimensions; allowed with block_table: 4 \(pages, page_size, heads, headdim\)"):
        fattn.attention_varlen(q, q, q, cu_seqlens_q=cu_seqlens_q, **x.options)


def test_caches_that_are_only_read():
    x = Paged(16)
    got = fattn.with_kvcache(x.q, x.k_pages, x.v_pages, cache_seqlens=x.lengths, block_table=x.table, causal=True)
    assert torch.equal(got, x.expected(causal=True))
    table = x.table[:1]
    got = fattn.with_kvcache(x.q[:1], x.k_pages, x.v_pages, cache_seqlens=200, block_table=table)
    assert torch.equal(got, fattn.attention(x.q[:1], x.k[:1], x.v[:1]))


def test_new_keys_are_written_into_pages():
    page_size = 16
    for layout in ("bshd", "bhsd"):
        for dtype in (torch.int32, torch.int64):
            x = Paged(page_size)
            lengths = torch.tensor([190, 33, 0], dtype=dtype)
            table = torch.arange(39, dtype=dtype).reshape(3, 13).flip(0)
            new_k, new_v = torch.randn(2, 3, 5, 2, 64)
            k, v = x.k.nan_to_num(), x.v.nan_to_num()
            caches = []
            for cache in (k, v):
                pages = torch.full((42, page_size, 2, 64), torch.nan)
                for b, n in enumerate(lengths.tolist()):
                    for j in range(n):
                        pages[table[b, j // page_size], j % page_size] = cache[b, j]
                caches.append(pages)
            for cache, new in ((k, new_k), (v, new_v)):
                for b, n in enumerate(lengths.tolist()):
                    cache[b, n : n + 5] = new[b]
            turned = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
            got = turned(fattn.with_kvcache(*(turned(t) for t in (x.q, *caches, new_k, new_v)), cache_seqlens=lengths, block_table=table, causal=True, layout=layout))
            assert torch.equal(got, fattn.attention(x.q, k, v, seqused_k=lengths + 5, causal=True))
            assert all(int(c.isnan().all(-1).all(-1).sum()) == 42 * page_size - 190 - 33 - 15 for c in caches), "nothing else was written"
            assert lengths.tolist() == [190, 33, 0]


def test_new_keys_that_have_no_place():
    x = Paged(16)
    pages = torch.zeros(2, 42, 16, 2, 64)
    new = torch.randn(3, 5, 2, 64)
    table = torch.arange(39).reshape(3, 13)

    def call(table=table, lengths=(0, 33, 190), new=new, pages=pages):
        return fattn.with_kvcache(x.q, *pages, new, new, cache_seqlens=torch.tensor(lengths), block_table=table)

    assert not call().isnan().any()
    shared = table.clone()
    shared[1, 2] = table[0, 0]
    with pytest.raises(ValueError, match="page 0 is in block_table twice where new keys are to be written: row 1 of it"):
        call(shared)
    shared = table.clone()
    shared[1, 1] = table[2, 1]  # pages that are read alone may be shared
    assert not call(shared).isnan().any()
    shared[1, 2] = 42
    with pytest.raises(ValueError, match=r"block_table\[1, 2\] is 42, and a new key is to be written there; allowed: 0 to 41, the last page of k_cache"):
        call(shared)
    with pytest.raises(ValueError, match=r"cache_seqlens\[2\] is 204, and 5 keys are new; allowed: 0 to 203, for block_table has room for 208, 13 pages of 16"):
        call(lengths=(0, 33, 204))
    with pytest.raises(ValueError, match="k has batch 2, heads 2 and headdim 64; expected 3, 2 and 64, from q and k_cache"):
        call(new=new[:2])
    with pytest.raises(ValueError, match="k is torch.float16 but k_cache is torch.float32"):
        call(new=new.half())
    with pytest.raises(ValueError, match="block_table is a list"):
        call(table.tolist())
    with pytest.raises(ValueError, match="block_table is a tensor of torch.int64 with the shape"):
        call(table[:2])
    with pytest.raises(ValueError, match="k_cache is an output whose strides reach one element by two indices"):
        call(pages=[p[:1].expand(42, 16, 2, 64) for p in pages])


def test_a_page_below_0_is_no_other_page_where_nobody_looks(monkeypatch):
    """On a GPU, and where a graph is made, the host does not look at the table."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = Paged(16)
    pages = torch.zeros(2, 42, 16, 2, 64)
    table = torch.arange(39).reshape(3, 13)
    table[1, 2] = -1
    with pytest.raises(IndexError):
        fattn.with_kvcache(x.q, *pages, *torch.ones(2, 3, 5, 2, 64), cache_seqlens=torch.tensor([0, 33, 190]), block_table=table)
    assert not pages[:, 41].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seqlen_q", [1, 5, 150])
def test_on_a_gpu(seqlen_q, dtype):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    x = Paged(16, dtype, seqlen_q)
    expected = x.expected(causal=True)
    on_gpu = {name: value.cuda() for name, value in x.options.items()}
    q, k, v = (t.cuda() for t in (x.q, x.k_pages, x.v_pages))
    terms = 64, max(LENGTHS)  # q k, over the keys
    agree(fattn.attention(q, k, v, **on_gpu, causal=True).cpu(), expected, *terms, one_way=True)
    cu_seqlens_q = torch.arange(0, 3 * seqlen_q + 1, seqlen_q, device="cuda")
    got = fattn.attention_varlen(q.flatten(0, 1), k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=seqlen_q, **on_gpu, causal=True)
    agree(got.reshape(q.shape).cpu(), expected, *terms, one_way=True)
    # A page that is none is not read: its sequence is NaN, the others are as they were.
    spoilt = on_gpu["block_table"].clone()
    spoilt[1, 2] = len(k)
    got = fattn.attention(q, k, v, seqused_k=on_gpu["seqused_k"], block_table=spoilt, causal=True).cpu()
    assert got[1].isnan().all()
    agree(got[::2], expected[::2], *terms, one_way=True)
    # New keys are written by the table there, too.
    table, lengths = torch.arange(39).reshape(3, 13).flip(0), torch.tensor([190, 33, 0])
    pages = torch.randn(2, 39, 16, 2, 64, dtype=dtype)
    new = torch.randn(2, 3, seqlen_q, 2, 64, dtype=dtype)[:, :, :5]
    on_cpu = fattn.with_kvcache(x.q, *(caches := pages.clone()), *new, cache_seqlens=lengths, block_table=table, causal=True)
    there = pages.cuda()
    got = fattn.with_kvcache(q, *there, *new.cuda(), cache_seqlens=lengths.cuda(), block_table=table.cuda(), causal=True)
    assert torch.equal(there.cpu(), caches)
    agree(got.cpu(), on_cpu, *terms, one_way=True)


def test_opcheck():
    x = Paged(16)
    options = (None, True, False, False, -1, -1, 0.0, 0, 0, 0, False, False)
    scores = (x.lengths.to(torch.int32), *(None,) * 7, x.table.to(torch.int32), None, None)
    torch.library.opcheck(_operators.forward_with_scores, (x.q, x.k_pages, x.v_pages, *options, *scores))
    cu_seqlens_q = torch.arange(0, 16, 5, dtype=torch.int32)
    torch.library.opcheck(_operators.forward_varlen, (x.q.reshape(15, 6, 64), x.k_pages, x.v_pages, *options, *scores, cu_seqlens_q, None, 5, 0))


def test_compiled():
    x = Paged(16)
    compiled = torch.compile(lambda q, k, v: fattn.attention(q, k, v, **x.options, causal=True), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x.q, x.k_pages, x.v_pages), x.expected(causal=True))


def test_numpy():
    x = Paged(16)
    q, k, v, lengths, table = (t.numpy() for t in (x.q, x.k_pages, x.v_pages, x.lengths, x.table))
    expected = x.expected(causal=True).numpy()
    assert np.array_equal(fattn.numpy.forward(q, k, v, causal=True, seqused_k=lengths, block_table=table), expected)
    assert np.array_equal(fattn.numpy.forward(q.reshape(15, 6, 64), k, v, causal=True, seqused_k=lengths, block_table=table, cu_seqlens_q=np.arange(0, 16, 5)),
                          expected.reshape(15, 6, 64))
    mask = np.ones((1, 1, 1, 1), bool)  # broadcast to as many keys as the table has room for
    assert np.array_equal(fattn.numpy.forward(q, k, v, causal=True, seqused_k=lengths, block_table=table, mask=mask), expected)


def test_bad_tables():
    x = Paged(16)

    def call(table, **options):
        return fattn.attention(x.q, x.k_pages, x.v_pages, **{"seqused_k": x.lengths, "block_table": table} | options)

    for page in (-1, len(x.k_pages), 2**40):
        table = x.table.clone()
        table[1, 2] = page
        with pytest.raises(ValueError, match=r"block_table\[1, 2\] is .*, of 37 keys; allowed: 0 to 41, the last page of k"):
            call(table)
    with pytest.raises(ValueError, match=r"seqused_k\[0\] is 200; allowed: 0 to 64, the keys of 4 pages of 16, which block_table has columns for"):
        call(x.table[:, :4])
    with pytest.raises(ValueError, match=r"block_table has the shape \(2, 13\); expected \(3, 13\)"):
        call(x.table[:2])
    with pytest.raises(ValueError, match="block_table has 1 dimensions"):
        call(x.table[0])
    with pytest.raises(ValueError, match="block_table has the dtype float32; allowed: int32"):
        call(x.table.float())
    with pytest.raises(TypeError, match="block_table is a list; it must be a torch.Tensor or None"):
        call(x.table.tolist())
    with pytest.raises(ValueError, match="pages of 0 keys"):
        fattn.attention(x.q, x.k_pages[:, :0], x.v_pages[:, :0], **x.options)


def test_gradients_are_refused():
    x = Paged(16)
    with pytest.raises(NotImplementedError, match="a paged cache has neither"):
        fattn.attention(x.q.requires_grad_(), x.k_pages, x.v_pages, **x.options)
    with torch.inference_mode():
        fattn.attention(x.q, x.k_pages, x.v_pages, **x.options)
    with pytest.raises(NotImplementedError, match="the backward pass does not compute a paged cache"):
        q, k = x.q.detach().numpy(), x.k_pages.numpy()
        fattn.numpy.backward(q, q, k, k, q, np.zeros((3, 6, 5), np.float32), seqused_k=x.lengths.numpy(), block_table=x.table.numpy())


def test_support():
    q, k = (3, 5, 6, 64), (44, 16, 2, 64)
    assert fattn.support(q, k, block_table=(3, 13), seqused_k=True)
    assert "paged cache" in fattn.support(q, k, block_table=(3, 13), backward=True).reason
    assert "paged cache" in fattn.support(q, k, block_table=(3, 13), algorithm="v1").reason
    assert fattn.support((15, 6, 64), k, block_table=(3, 13), seqused_k=True, packed=(3, 5, 0), documents=True)
    assert fattn.plan(q, k, block_table=(3, 13)).flops == 4 * 3 * 5 * 208 * 6 * 64
