"""flash_attn 3 (flash_attn_interface) by fattn.compat: each function and argument against attention by its definition."""

import inspect

import pytest

torch = pytest.importorskip("torch")
from compat_reference import close, gradients_agree, reference, seen_by, tensors  # noqa: E402

from fattn import compat  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def flash():
    compat.install()
    import flash_attn_interface

    yield flash_attn_interface
    compat.uninstall()


SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin "
                       "return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk softcap deterministic num_heads_q sm_margin "
                                 "return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv q_descale k_descale v_descale "
                              "window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new "
                               "max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size attention_chunk softcap "
                               "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new "
                              "cache_leftpad page_size max_seqlen_k_new causal window_size attention_chunk has_softcap num_splits pack_gqa sm_margin",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(flash, name):
    assert list(inspect.signature(getattr(flash, name)).parameters) == SIGNATURES[name].split()


def chunked(seqlen_q, seqlen_k, chunk):
    at = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    return torch.div(at, chunk, rounding_mode="floor") == torch.arange(seqlen_k) // chunk


OPTIONS = [({}, {}), ({"causal": True}, {"causal": True}), ({"window_size": (3, 2)}, {"left": 3, "right": 2}), ({"window_size": (3, -1)}, {"left": 3}),
           ({"window_size": (-7, 2)}, {"right": 2}), ({"attention_chunk": 4, "causal": True}, {"causal": True}), ({"attention_chunk": 4, "window_size": (3, -1)}, {"left": 3}),
           ({"attention_chunk": 4}, {})]


def seen(n, m, options, meaning):
    visible = seen_by(n, m, **meaning)
    return visible & chunked(n, m, options["attention_chunk"]) if "attention_chunk" in options else visible


@pytest.mark.parametrize(("options", "meaning"), OPTIONS)
def test_options_and_gradients(flash, options, meaning):
    inputs = tensors((2, 7, 4, 16), (2, 11, 2, 16), (2, 11, 2, 24), requires_grad=True)
    o, lse = reference(*inputs, seen(7, 11, options, meaning), softmax_scale=0.3, softcap=2.0)
    planned = {"num_splits": 4, "pack_gqa": True, "sm_margin": 8}
    got, softmax_lse = flash.flash_attn_func(*inputs, 0.3, softcap=2.0, return_attn_probs=True, **planned, **options)
    close(got, o)
    close(softmax_lse, lse)
    gradients_agree(got, o, inputs)
    assert torch.equal(flash.flash_attn_func(*inputs, 0.3, softcap=2.0, **options), got)


def test_packed(flash):
    (x,) = tensors((2, 9, 8, 16), requires_grad=True)  # 4 heads of q, 2 of k and 2 of v
    o, lse = reference(*x.split((4, 2, 2), 2), seen_by(9, 9, causal=True))
    got, softmax_lse = flash.flash_attn_qkvpacked_func(x, causal=True, num_heads_q=4, return_attn_probs=True)
    close(got, o)
    close(softmax_lse, lse)
    gradients_agree(got, o, [x])
    (x,) = tensors((2, 9, 3, 4, 16))
    close(flash.flash_attn_qkvpacked_func(x), reference(*x.unbind(2))[0])
    with pytest.raises(RuntimeError, match="num_heads_q is None"):
        flash.flash_attn_qkvpacked_func(x[:, :, 0])
    with pytest.raises(RuntimeError, match="qkv has 4 heads and num_heads_q is 3"):
        flash.flash_attn_qkvpacked_func(x[:, :, 0], num_heads_q=3)


LENGTHS_Q, LENGTHS_K, USED_Q, USED_K = (3, 6, 1), (5, 4, 9), (2, 6, 0), (5, 0, 7)


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("used_q", [False, True])
@pytest.mark.parametrize("used_k", [False, True])
@pytest.mark.parametrize(("options", "meaning"), OPTIONS)
def test_varlen(flash, options, meaning, used_q, used_k):
    inputs = tensors((10, 4, 16), (18, 2, 16), (18, 2, 16), requires_grad=True)
    call = dict(options, seqused_q=torch.tensor(USED_Q, dtype=torch.int32) if used_q else None, seqused_k=torch.tensor(USED_K, dtype=torch.int32) if used_k else None)
    where = cu_seqlens(LENGTHS_Q), cu_seqlens(LENGTHS_K), 6, 9
    if used_k and "attention_chunk" in options:
        with pytest.raises(RuntimeError, match="attention_chunk beside seqused_k"):
            flash.flash_attn_varlen_func(*inputs, *where, **call)
        return
    os, lses = [], []
    for i, (q, k, v) in enumerate(zip(*(x.split(lengths) for x, lengths in zip(inputs, (LENGTHS_Q, LENGTHS_K, LENGTHS_K))))):
        n, m = (USED_Q if used_q else LENGTHS_Q)[i], (USED_K if used_k else LENGTHS_K)[i]
        o, lse = reference(q[None, :n], k[None, :m], v[None, :m], seen(n, m, options, meaning))
        rest = LENGTHS_Q[i] - n
        os.append(torch.cat((o[0], o.new_zeros(rest, *o.shape[2:]))))
        lses.append(torch.cat((lse[0], lse.new_full((4, rest), -torch.inf)), 1))
    o, lse = torch.cat(os), torch.cat(lses, 1)
    got, softmax_lse = flash.flash_attn_varlen_func(*inputs, *where, return_attn_probs=True, **call)
    close(got, o)
    close(softmax_lse, lse)
    gradients_agree(got, o, inputs)


def test_combine(flash):
    q, k, v = tensors((2, 5, 4, 16), (2, 12, 4, 16), (2, 12, 4, 16))
    visible = seen_by(5, 12, causal=True)
    parts = [reference(q, k[:, a:b], v[:, a:b], visible[:, a:b]) for a, b in ((0, 4), (4, 7), (7, 12))]
    whole = reference(q, k, v, visible)
    out, lse = flash.flash_attn_combine(torch.stack([o for o, _ in parts]).float(), torch.stack([x.transpose(1, 2) for _, x in parts]).float())
    close(out, whole[0])
    close(lse, whole[1].transpose(1, 2))
    assert out.dtype == torch.float32
    given = torch.empty(2, 5, 4, 16, dtype=torch.bfloat16)
    result, _ = flash.flash_attn_combine(torch.stack([o for o, _ in parts]).float(), torch.stack([x.transpose(1, 2) for _, x in parts]).float(), out=given)
    assert result is given
    close(given, whole[0], 1, dtype="bfloat16")  # rounded once
    assert flash.flash_attn_combine(torch.ones(2, 1, 1, 1, 8), torch.full((2, 1, 1, 1), -torch.inf), out_dtype=torch.float16)[0].eq(0).all()
    with pytest.raises(RuntimeError, match="out_partial has the shape"):
        flash.flash_attn_combine(torch.ones(2, 1, 1, 1, 8), torch.ones(2, 1, 1))


def test_scheduler_metadata_is_taken(flash):
    q, cache = tensors((2, 1, 4, 16), (2, 8, 2, 16))
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    metadata = flash.get_scheduler_metadata(2, 1, 8, 4, 2, 16, lengths, torch.float32, causal=True)
    with_it = flash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True, scheduler_metadata=metadata)
    assert torch.equal(with_it, flash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True))


@pytest.mark.parametrize(("name", "reason"), [("qv", "MLA"), ("q_descale", "8 bits"), ("k_descale", "8 bits"), ("v_descale", "8 bits")])
def test_refused_with_the_reason(flash, name, reason):
    q, cu = torch.ones(1, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    calls = [lambda **x: flash.flash_attn_func(q, q, q, **x), lambda **x: flash.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 3, 3, **x),
             lambda **x: flash.flash_attn_with_kvcache(q, q, q, **x)]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"{name} is not computed by fattn: .*{reason}"):
            call(**{name: torch.ones(1)})
    with pytest.raises(RuntimeError, match="attention_chunk beside a cache"):
        calls[2](attention_chunk=2)
