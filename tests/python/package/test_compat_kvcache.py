"""flash_attn_with_kvcache of flash_attn 2 and 3 by fattn.compat: new keys in place, rotary embeddings, caches by index, padding on the left."""

import pytest

torch = pytest.importorskip("torch")
from compat_reference import close, reference, seen_by, tensors  # noqa: E402

from fattn import compat  # noqa: E402

LENGTHS = torch.tensor([3, 6], dtype=torch.int32)
ROWS = 12  # of a cache


@pytest.fixture(scope="module", params=["flash_attn", "flash_attn_interface"])
def peer(request):
    compat.install()
    import importlib

    yield importlib.import_module(request.param)
    compat.uninstall()


def turned(x, cos, sin, positions, interleaved):
    """Each pair of dimensions as a complex number, turned by its angle; x (seqlen, heads, headdim), positions (seqlen)."""
    ro = 2 * cos.shape[1]
    head = x[..., :ro].double()
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else torch.stack(head.chunk(2, -1), -1)
    out = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())[positions][:, None]
    out = torch.view_as_real(out)
    out = out.flatten(-2) if interleaved else torch.cat(out.unbind(-1), -1)
    return torch.cat((out, x[..., ro:].double()), -1)


def expected(q, caches, new, lengths, *, entries=None, leftpad=(0, 0), rotary=None, causal=False, window=(None, None)):
    """Of each sequence by itself: o, lse and the caches as they are afterwards."""
    caches = [x.clone().double() for x in caches]
    os, lses = [], []
    for b in range(q.shape[0]):
        entry, n = (b if entries is None else entries[b]), int(lengths[b])
        query, more = q[b].double(), [x[b].double() for x in new]
        if rotary is not None:
            cos, sin, interleaved, first = rotary
            at = int(first[b])
            places = at + torch.arange(len(query)) if causal or window != (None, None) else torch.full((len(query),), at)
            query, more[0] = turned(query, cos, sin, places, interleaved), turned(more[0], cos, sin, at + torch.arange(len(more[0])), interleaved)
        for cache, x in zip(caches, more):
            cache[entry, n : n + len(x)] = x
        end = n + (len(more[0]) if more else 0)
        k, v = (x[entry, leftpad[b] : end][None] for x in caches)
        o, lse = reference(query[None], k, v, seen_by(len(query), k.shape[1], causal, *window))
        os.append(o)
        lses.append(lse)
    return torch.cat(os), torch.cat(lses), caches


def problem(seqlen_q=2, seqlen_new=2, batch_cache=2):
    q, k_cache, v_cache, k, v = tensors((2, seqlen_q, 4, 16), (batch_cache, ROWS, 2, 16), (batch_cache, ROWS, 2, 16), (2, seqlen_new, 2, 16), (2, seqlen_new, 2, 16))
    return q, [k_cache, v_cache], [k, v]


def check(got, caches, wanted):
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    for x, y in zip(caches, wanted[2]):
        close(x, y, 3)  # what is rotated has two products and their sum


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
@pytest.mark.parametrize("appended", [False, True])
def test_lengths_and_new_keys(peer, causal, window, appended):
    q, caches, new = problem()
    new = new if appended else []
    wanted = expected(q, caches, new, LENGTHS, causal=causal, window=(None, None) if window == (-1, -1) else window)
    got = peer.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=LENGTHS, causal=causal, window_size=window, return_softmax_lse=True)
    check(got, caches, wanted)


def test_a_number_and_no_length(peer):
    q, caches, new = problem()
    wanted = expected(q, caches, new, [5, 5], causal=True)
    check(peer.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=5, causal=True, num_splits=3, return_softmax_lse=True), caches, wanted)
    close(peer.flash_attn_with_kvcache(q, *caches), expected(q, caches, [], [ROWS, ROWS])[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(peer, interleaved, causal):
    q, caches, new = problem(seqlen_q=3, seqlen_new=3)
    angles = torch.outer(torch.arange(ROWS + 4.0), 100.0 ** -(torch.arange(4) / 4))
    cos, sin = angles.cos(), angles.sin()  # of 8 of 16 dimensions
    wanted = expected(q, caches, new, LENGTHS, rotary=(cos, sin, interleaved, LENGTHS), causal=causal)
    got = peer.flash_attn_with_kvcache(q, *caches, *new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS, rotary_interleaved=interleaved, causal=causal,
                                       return_softmax_lse=True)
    check(got, caches, wanted)
    with pytest.raises(RuntimeError, match="rotary_cos is given and k is None"):
        peer.flash_attn_with_kvcache(q, *caches, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS)
    with pytest.raises(RuntimeError, match="is 3, for a sequence of 3 rows; rotary_cos has 5 rows"):
        peer.flash_attn_with_kvcache(q, *caches, *new, rotary_cos=cos[:5], rotary_sin=sin[:5], cache_seqlens=LENGTHS)


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("in_a_row", [False, True])
def test_caches_by_index(peer, appended, in_a_row):
    q, caches, new = problem(batch_cache=5)
    caches = caches if in_a_row else [x.transpose(0, 1).contiguous().transpose(0, 1) for x in caches]
    new = new if appended else []
    index = torch.tensor([4, 1], dtype=torch.int32)
    wanted = expected(q, caches, new, LENGTHS, entries=[4, 1], causal=True)
    got = peer.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=LENGTHS, cache_batch_idx=index, causal=True, return_softmax_lse=True)
    check(got, caches, wanted)
    with pytest.raises(RuntimeError, match=r"cache_batch_idx has \[5, 1\]; allowed: 0 to 4"):
        peer.flash_attn_with_kvcache(q, *caches, cache_seqlens=LENGTHS, cache_batch_idx=torch.tensor([5, 1]))


def test_padding_on_the_left(peer):
    q, caches, new = problem()
    wanted = expected(q, caches, new, LENGTHS, leftpad=(2, 5), causal=True)
    got = peer.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=LENGTHS, cache_leftpad=torch.tensor([2, 5], dtype=torch.int32), causal=True,
                                       return_softmax_lse=True)
    check(got, caches, wanted)


def test_no_gradient_and_no_room(peer):
    q, caches, new = problem()
    assert not peer.flash_attn_with_kvcache(q.requires_grad_(), *caches, *new, cache_seqlens=LENGTHS).requires_grad
    for more in ({}, {"cache_batch_idx": torch.tensor([0, 1])}):
        with pytest.raises(RuntimeError, match="cache_seqlens"):
            peer.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=torch.tensor([3, ROWS - 1], dtype=torch.int32), **more)


def test_packed_queries_and_new_keys():
    """flash_attn 3: sequences of unequal numbers of queries and new keys."""
    compat.install()
    try:
        from flash_attn_interface import flash_attn_with_kvcache

        q, caches, new = problem(seqlen_q=4, seqlen_new=4)
        angles = torch.outer(torch.arange(20.0), 100.0 ** -(torch.arange(8) / 8))
        at = torch.tensor([7, 1], dtype=torch.int32)
        rotary = angles.cos(), angles.sin(), True, at
        parts = []
        copies = [x.clone() for x in caches]
        for b, n in ((0, 1), (1, 4)):
            o, lse, copies = expected(q[b : b + 1, :n], [x[b : b + 1] for x in caches], [x[b : b + 1, :n] for x in new], LENGTHS[b : b + 1],
                                      rotary=(*rotary[:3], at[b : b + 1]), causal=True)
            parts.append((o[0], lse[0], copies))
        cu = torch.tensor([0, 1, 5], dtype=torch.int32)
        packed = [torch.cat((x[0, :1], x[1])) for x in (q, *new)]
        o, lse = flash_attn_with_kvcache(packed[0], *caches, *packed[1:], rotary_cos=rotary[0], rotary_sin=rotary[1], cache_seqlens=LENGTHS, cu_seqlens_q=cu,
                                         cu_seqlens_k_new=cu, max_seqlen_q=4, rotary_seqlens=at, causal=True, return_softmax_lse=True)
        close(o, torch.cat([x[0] for x in parts]))
        close(lse, torch.cat([x[1] for x in parts], 1))
        for i, cache in enumerate(caches):
            close(cache, torch.cat([x[2][i] for x in parts]), 3)  # what is rotated has two products and their sum
    finally:
        compat.uninstall()


PAGE = 4
TABLE = torch.tensor([[5, 0, 3], [2, 6, 1]], dtype=torch.int32)


def in_pages(cache):
    """(pages, page_size, heads, headdim) of a cache (batch, rows, heads, headdim), in the order of TABLE; the others hold NaN."""
    pages = torch.full((7, PAGE, *cache.shape[2:]), torch.nan, dtype=cache.dtype)
    pages[TABLE.long()] = cache.unflatten(1, (-1, PAGE))
    return pages


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (2, 0)}, {"window_size": (2, -1)}, {"causal": True, "window_size": (-7, 2)}])
@pytest.mark.parametrize("appended", [False, True])
def test_pages(peer, appended, options):
    name = "block_table" if peer.__name__ == "flash_attn" else "page_table"
    q, caches, new = problem()
    new = new if appended else []
    window = tuple(None if limit < 0 else limit for limit in options.get("window_size", (-1, -1)))
    wanted = expected(q, caches, new, LENGTHS, causal="causal" in options, window=window)
    pages = [in_pages(x) for x in caches]
    got = peer.flash_attn_with_kvcache(q, *pages, *new, cache_seqlens=LENGTHS, **{name: TABLE}, return_softmax_lse=True, **options)
    check(got, [x[TABLE.long()].flatten(1, 2) for x in pages], wanted)
    with pytest.raises(RuntimeError, match="beside cache_batch_idx or cache_leftpad"):
        peer.flash_attn_with_kvcache(q, *pages, cache_seqlens=LENGTHS, **{name: TABLE}, cache_leftpad=LENGTHS)
    if appended:
        with pytest.raises(RuntimeError, match="is 11, and 2 keys are new; allowed: 0 to 10, for block_table has room for 12"):
            peer.flash_attn_with_kvcache(q, *pages, *new, cache_seqlens=torch.tensor([3, 11], dtype=torch.int32), **{name: TABLE})


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_pages_of_packed_queries(version, causal):
    compat.install()
    try:
        import flash_attn
        import flash_attn.cute
        import flash_attn_interface

        q, caches, _ = problem(seqlen_q=4)
        pages = [in_pages(x) for x in caches]
        lengths, cu_q = torch.tensor([9, 6], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
        packed = torch.cat((q[0, :3], q[1]))
        if version == 2:
            cu_k = torch.tensor([0, 9, 15], dtype=torch.int32)
            o, lse, _ = flash_attn.flash_attn_varlen_func(packed, *pages, cu_q, cu_k, 4, 9, causal=causal, return_attn_probs=True, block_table=TABLE)
        elif version == 3:
            o, lse = flash_attn_interface.flash_attn_with_kvcache(packed, *pages, cache_seqlens=lengths, page_table=TABLE, cu_seqlens_q=cu_q, max_seqlen_q=4,
                                                                  causal=causal, return_softmax_lse=True)
        else:
            call = {"seqused_k": lengths, "page_table": TABLE, "causal": causal}
            o, lse = flash_attn.cute.flash_attn_varlen_func(packed, *pages, cu_seqlens_q=cu_q, max_seqlen_q=4, **call)
            padded, _ = flash_attn.cute.flash_attn_varlen_func(q, *pages, window_size=(-1, 3), **call)
            used, _ = flash_attn.cute.flash_attn_varlen_func(q, *pages, seqused_q=torch.tensor([3, 4]), **call)
            close(used.flatten(0, 1)[[0, 1, 2, 4, 5, 6, 7]], o)
            with pytest.raises(RuntimeError, match="seqused_k is None"):
                flash_attn.cute.flash_attn_varlen_func(q, *pages, page_table=TABLE)
        for b, (begin, end) in enumerate(((0, 3), (3, 7))):
            k, v = (x[b : b + 1, : lengths[b]] for x in caches)
            wanted, wanted_lse = reference(packed[None, begin:end], k, v, seen_by(end - begin, k.shape[1], causal))
            close(o[begin:end], wanted[0])
            close(lse[:, begin:end], wanted_lse[0])
            if version == 4:
                close(padded[b], reference(q[b : b + 1], k, v, seen_by(4, k.shape[1], causal, left=-1, right=3))[0][0])
    finally:
        compat.uninstall()
