"""flash_attn 4 (flash_attn.cute) by fattn.compat: each function and argument against attention by its definition."""

import inspect

import pytest

torch = pytest.importorskip("torch")
from compat_reference import close, gradients_agree, reference, seen_by, tensors  # noqa: E402

from fattn import compat  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cute():
    compat.install()
    import flash_attn.cute

    yield flash_attn.cute
    compat.uninstall()


SIGNATURES = {
    "flash_attn_func": "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd "
                       "mask_mod aux_tensors aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse gather_bwd_recompute_p gather_bwd_token_chunk",
    "flash_attn_varlen_func": "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k gather_kv_indices page_table "
                              "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod "
                              "block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split disable_scheduler_metadata "
                              "gather_bwd_recompute_p gather_bwd_token_chunk",
    "flash_attn_combine": "out_partial lse_partial out out_dtype cu_seqlens seqused virtual_batch_idx return_lse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(cute, name):
    assert list(inspect.signature(getattr(cute, name)).parameters) == SIGNATURES[name].split()


# window_size and causal, and which keys are seen: None and two negative numbers are no limit, one negative number is a limit on the other side.
WINDOWS = [((None, None), False, {}), ((None, None), True, {"causal": True}), ((3, 1), False, {"left": 3, "right": 1}), ((None, 2), False, {"right": 2}),
           ((4, None), False, {"left": 4}), ((4, None), True, {"left": 4, "causal": True}), ((4, 3), True, {"left": 4, "causal": True}), ((-1, -1), False, {}), ((-2, 5), False, {"left": -2, "right": 5}),
           ((5, -2), False, {"left": 5, "right": -2}), ((None, -3), False, {"right": -3}), ((-3, None), False, {"left": -3}), ((-1, None), True, {"left": -1, "causal": True})]


@pytest.mark.parametrize(("window_size", "causal", "meaning"), WINDOWS)
def test_windows_and_gradients(cute, window_size, causal, meaning):
    inputs = tensors((2, 7, 4, 16), (2, 11, 2, 16), (2, 11, 2, 24), requires_grad=True)
    o, lse = reference(*inputs, seen_by(7, 11, **meaning), softmax_scale=0.3)
    got, got_lse = cute.flash_attn_func(*inputs, softmax_scale=0.3, window_size=window_size, causal=causal)
    close(got, o)
    close(got_lse, lse)
    gradients_agree(got, o, inputs)


@pytest.mark.parametrize("window_size", [(None, None), (-2, 5)])
def test_sinks_and_softcap(cute, window_size):
    *inputs, sinks = tensors((2, 7, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (4,), requires_grad=True)
    meaning = {} if window_size == (None, None) else {"left": -2, "right": 5}
    o, lse = reference(*inputs, seen_by(7, 11, **meaning), softcap=3.0, sinks=sinks)
    got, got_lse = cute.flash_attn_func(*inputs, window_size=window_size, learnable_sink=sinks, softcap=3.0, num_splits=2, pack_gqa=False, deterministic=True, return_lse=True)
    close(got, o)
    close(got_lse, lse)
    gradients_agree(got, o, [*inputs, sinks])


LENGTHS_Q, LENGTHS_K, USED_Q, USED_K = (3, 6, 4), (5, 8, 9), (2, 6, 0), (5, 0, 7)


def padded(x, lengths, longest):
    out = x.new_full((len(lengths), longest, *x.shape[1:]), 7.0)
    for b, part in enumerate(x.split(lengths)):
        out[b, : len(part)] = part
    return out


@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize("packed_k", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("window_size", "causal", "meaning"), [WINDOWS[1], WINDOWS[2], WINDOWS[7]])
def test_varlen(cute, packed_q, packed_k, used, window_size, causal, meaning):
    """Either side packed or padded, with and without lengths that are used."""
    total_q, total_k, longest_q, longest_k = sum(LENGTHS_Q), sum(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)
    q, k, v = tensors((total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 16))
    q = q if packed_q else padded(q, LENGTHS_Q, longest_q)
    k, v = (k, v) if packed_k else (padded(x, LENGTHS_K, longest_k) for x in (k, v))
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (LENGTHS_Q, LENGTHS_K))
    call = {"cu_seqlens_q": cu_q, "max_seqlen_q": longest_q} if packed_q else {}
    call |= {"cu_seqlens_k": cu_k, "max_seqlen_k": longest_k} if packed_k else {}
    call |= {"seqused_q": torch.tensor(USED_Q, dtype=torch.int32), "seqused_k": torch.tensor(USED_K, dtype=torch.int32)} if used else {}
    o, lse = cute.flash_attn_varlen_func(q, k, v, window_size=window_size, causal=causal, **call)
    for b in range(3):
        rows_q, rows_k = (LENGTHS_Q[b] if packed_q else longest_q), (LENGTHS_K[b] if packed_k else longest_k)
        n, m = (USED_Q[b], USED_K[b]) if used else (rows_q, rows_k)
        query = (q[cu_q[b] : cu_q[b + 1]] if packed_q else q[b])[:n]
        key, value = ((x[cu_k[b] : cu_k[b + 1]] if packed_k else x[b])[:m] for x in (k, v))
        wanted, wanted_lse = reference(query[None], key[None], value[None], seen_by(n, m, **meaning))
        got, got_lse = (o[cu_q[b] : cu_q[b + 1]], lse[:, cu_q[b] : cu_q[b + 1]]) if packed_q else (o[b], lse[b])
        close(got[:n], wanted[0])
        close(got_lse[:, :n], wanted_lse[0])
        assert not got[n:].any()


def test_gradients_of_varlen(cute):
    inputs = tensors((9, 4, 16), (13, 2, 16), (13, 2, 16), requires_grad=True)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 9], [0, 5, 13]))
    o, _ = cute.flash_attn_varlen_func(*inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, window_size=(-1, None))
    parts = [reference(*(x[None, a:b] for x, (a, b) in zip(inputs, where)), seen_by(*size, left=-1, causal=True))[0]
             for where, size in ((((0, 3), (0, 5), (0, 5)), (3, 5)), (((3, 9), (5, 13), (5, 13)), (6, 8)))]
    wanted = torch.cat(parts, 1)[0]
    close(o, wanted)
    gradients_agree(o, wanted, inputs)


def test_combine(cute):
    q, k, v = tensors((1, 5, 4, 16), (1, 12, 4, 16), (1, 12, 4, 16))
    parts = [reference(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 4), (4, 12))]
    outs, lses = torch.stack([o[0] for o, _ in parts]).float(), torch.stack([x[0].T for _, x in parts]).float()  # (parts, total, nheads, headdim)
    o, lse = cute.flash_attn_combine(outs, lses, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    whole = reference(q, k, v)
    close(o, whole[0][0])
    close(lse, whole[1][0].T)
    assert cute.flash_attn_combine(outs, lses, return_lse=False)[1] is None
    with pytest.raises(RuntimeError, match="virtual_batch_idx is not computed"):
        cute.flash_attn_combine(outs, lses, virtual_batch_idx=torch.zeros(1))


@pytest.mark.parametrize("name", ["qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors",
                                  "block_sparse_tensors_bwd"])
def test_refused_with_the_reason(cute, name):
    q, cu = torch.ones(1, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    for call in (lambda **x: cute.flash_attn_func(q, q, q, **x), lambda **x: cute.flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **x)):
        if name == "block_sparse_tensors_bwd" and "flash_attn_varlen_func" in call.__code__.co_names:
            continue
        with pytest.raises(NotImplementedError, match=f"^{name} is not computed by fattn: "):
            call(**{name: torch.ones(1)})


def test_errors(cute):
    q = torch.ones(1, 3, 2, 8)
    with pytest.raises(RuntimeError, match="learnable_sink"):
        cute.flash_attn_func(q, q, q, learnable_sink=torch.ones(3))
    with pytest.raises(RuntimeError, match="window_size is 3"):
        cute.flash_attn_func(q, q, q, window_size=3)
    with pytest.raises(RuntimeError, match="q has 1 sequences and k has 2"):
        cute.flash_attn_varlen_func(q, q[0], q[0], cu_seqlens_k=torch.tensor([0, 2, 3], dtype=torch.int32), max_seqlen_k=2)


def test_compiles_without_a_break(cute):
    def model(q, k, v, sinks):
        a, lse = cute.flash_attn_func(q, k, v, causal=True, window_size=(4, None), learnable_sink=sinks)
        b, _ = cute.flash_attn_func(q, k, v, window_size=(-1, 3))
        return a + b, lse

    inputs = tensors((2, 7, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (4,))
    for got, wanted in zip(torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs), model(*inputs)):
        close(got, wanted)
