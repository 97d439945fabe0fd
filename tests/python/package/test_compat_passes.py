"""The private passes of flash_attn 2 by fattn.compat, which programs for several GPUs call: arguments, results, gradients in place, and a ring of parts."""

import inspect

import pytest

torch = pytest.importorskip("torch")
from compat_reference import close, tensors  # noqa: E402

import fattn  # noqa: E402
from fattn import compat  # noqa: E402

compat.install("flash_attn")
try:
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn import flash_attn_interface as passes
finally:
    compat.uninstall()

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CU_Q, CU_K = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 9, 14], dtype=torch.int32)


def dense(requires_grad=False):
    return tensors((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), requires_grad=requires_grad)


def packed(requires_grad=False):
    return tensors((12, 4, 8), (14, 2, 8), (14, 2, 8), requires_grad=requires_grad)


def test_names_of_arguments():
    """Programs look for them."""
    forward = list(inspect.signature(passes._flash_attn_forward).parameters)
    assert forward == ["q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes", "return_softmax"]
    backward = list(inspect.signature(passes._flash_attn_backward).parameters)
    assert backward == ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *forward[3:10], "deterministic", "rng_state"]
    varlen = list(inspect.signature(passes._flash_attn_varlen_forward).parameters)
    assert varlen == [*forward[:3], "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *forward[3:], "block_table", "leftpad_k", "seqused_k", "zero_tensors"]
    backward = backward[:9] + varlen[3:7] + backward[9:] + ["zero_tensors"]
    assert list(inspect.signature(passes._flash_attn_varlen_backward).parameters) == backward


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 1), "softcap": 5.0}, {"window": (3, -1)}, {"window": (-7, 1)}, {"causal": True, "alibi_slopes": SLOPES, "softmax_scale": 0.3}])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_both_passes(options, dropout_p):
    """As autograd has them, with the same random numbers."""
    leaves = dense(True)
    left, right = options.get("window", (-1, -1))
    of_pass = {"dropout_p": dropout_p, "softmax_scale": options.get("softmax_scale"), "causal": options.get("causal", False), "window_size_left": left,
               "window_size_right": right, "softcap": options.get("softcap", 0.0), "alibi_slopes": options.get("alibi_slopes")}
    torch.manual_seed(0)
    o, lse, weights, state = passes._flash_attn_forward(*leaves, **of_pass, return_softmax=False)
    torch.manual_seed(0)
    wanted = flash_attn_func(*leaves, dropout_p, of_pass["softmax_scale"], of_pass["causal"], (left, right), of_pass["softcap"], of_pass["alibi_slopes"])
    assert torch.equal(o, wanted) and not o.requires_grad and lse.shape == (2, 4, 6) and weights.numel() == 0 and state.shape == (2,)
    dout = torch.randn_like(o)
    gradients = [torch.full_like(x, torch.nan) for x in leaves]
    softmax_d = passes._flash_attn_backward(dout, *leaves, o, lse, *gradients, **of_pass, deterministic=False, rng_state=state)
    for got, of_autograd in zip(gradients, torch.autograd.grad(wanted, leaves, dout)):
        assert torch.equal(got, of_autograd)
    close(softmax_d, (dout * o).sum(-1).transpose(1, 2))


def test_weights_are_returned_with_dropout():
    q, k, v = dense()
    o, lse, weights, state = passes._flash_attn_forward(q, k, v, 0.5, None, True, -1, -1, 0.0, None, True)
    assert weights.shape == (2, 4, 6, 9) and (weights < 0).any()
    kept = weights.clamp(min=0) / 0.5
    close(torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(2, 2)), o)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("more", [{}, {"seqused_k": torch.tensor([4, 5], dtype=torch.int32)}])
def test_packed_sequences(dropout_p, more):
    leaves = packed(True)
    places = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 7, "max_seqlen_k": 9}
    torch.manual_seed(0)
    o, lse, _, state = passes._flash_attn_varlen_forward(*leaves, **places, dropout_p=dropout_p, softmax_scale=None, causal=True, **more)
    torch.manual_seed(0)
    wanted = fattn.attention_varlen(*leaves, **places, causal=True, dropout_p=dropout_p, **more)
    assert torch.equal(o, wanted) and lse.shape == (4, 12)
    if more:
        return
    torch.manual_seed(0)
    assert torch.equal(o, flash_attn_varlen_func(*leaves, *places.values(), dropout_p, causal=True))
    dout, gradients = torch.randn_like(o), [torch.empty_like(x) for x in leaves]
    passes._flash_attn_varlen_backward(dout, *leaves, o, lse, *gradients, **places, dropout_p=dropout_p, softmax_scale=None, causal=True, window_size_left=-1,
                                       window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=True, rng_state=state)
    for got, of_autograd in zip(gradients, torch.autograd.grad(wanted, leaves, dout)):
        assert torch.equal(got, of_autograd)


def test_a_ring_of_parts():
    """Keys in two parts, as two processes have them: o and lse are combined, and each part's gradients are the whole's."""
    leaves = [x.double() for x in dense(True)]
    wanted = flash_attn_func(*leaves)
    dout = torch.randn_like(wanted)
    q, k, v = (x.detach() for x in leaves)
    settings, parts = (0.0, None, False, -1, -1, 0.0, None), ((k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:]))
    outs, lses = zip(*(passes._flash_attn_forward(q, *part, *settings, False)[:2] for part in parts))
    lse = torch.logaddexp(*lses)
    o = sum(x * (y - lse).exp().transpose(1, 2)[..., None] for x, y in zip(outs, lses))
    close(o, wanted)
    dq, whole = torch.zeros_like(q), torch.autograd.grad(wanted, leaves, dout)
    for part, rows in zip(parts, (slice(0, 4), slice(4, 9))):
        gradients = [torch.empty_like(x) for x in (q, *part)]
        passes._flash_attn_backward(dout, q, *part, o, lse, *gradients, *settings, False)
        dq += gradients[0]
        close(gradients[1], whole[1][:, rows])
        close(gradients[2], whole[2][:, rows])
    close(dq, whole[0])


def test_refused():
    q, k, v = dense()
    rows = packed()
    with pytest.raises(RuntimeError, match="k has the shape"):
        passes._flash_attn_forward(q, k[..., :4], v, 0.0, None, False, -1, -1, 0.0, None, False)
    with pytest.raises(RuntimeError, match="lse"):
        passes._flash_attn_backward(q, q, k, v, q, torch.zeros(2, 4, 5), None, None, None, 0.0, None, False, -1, -1, 0.0, None, False)
    with pytest.raises(RuntimeError, match="dropout_p is 0.5 and dropout_state is None"):
        passes._flash_attn_backward(q, q, k, v, q, torch.zeros(2, 4, 6), None, None, None, 0.5, None, False, -1, -1, 0.0, None, False)
    for given in ({"block_table": CU_Q}, {"leftpad_k": CU_Q}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(given))} is not computed by fattn: call flash_attn_varlen_func"):
            passes._flash_attn_varlen_forward(*rows, CU_Q, CU_K, 7, 9, 0.0, None, True, **given)
