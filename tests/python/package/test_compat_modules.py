"""flash_attn's bert_padding, layers.rotary and modules.mha by fattn.compat."""

import pytest

torch = pytest.importorskip("torch")
from compat_reference import BACKWARD, close, gradient_agrees, gradients_agree, reference, seen_by, tensors  # noqa: E402

from fattn import compat  # noqa: E402

compat.install("flash_attn")
try:
    from flash_attn import bert_padding
    from flash_attn.layers import rotary
    from flash_attn.modules import mha
    from flash_attn.utils.generation import InferenceParams
finally:
    compat.uninstall()


def test_unpad_and_pad():
    (x,) = tensors((3, 5, 2, 4), requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and indices.tolist() == [0, 1, 2, 6, 8, 9, 10, 11, 12, 13, 14]
    assert cu_seqlens.tolist() == [0, 3, 6, 11] and cu_seqlens.dtype == torch.int32 and longest == 5 and used.tolist() == [3, 3, 5]
    back = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand(x.shape).float())
    unused = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert indices[:4].tolist() == [0, 1, 2, 3] and cu_seqlens.tolist() == [0, 4, 7, 12] and longest == 5 and used.tolist() == [3, 3, 5]


def test_first_axis():
    (x,) = tensors((6, 3))
    indices = torch.tensor([4, 1])
    assert torch.equal(bert_padding.index_first_axis(x, indices), x[indices])
    assert torch.equal(bert_padding.index_first_axis_residual(x, indices)[0], x[indices])
    put = bert_padding.index_put_first_axis(x[:2], indices, 6)
    assert torch.equal(put[indices], x[:2]) and put.count_nonzero() == 6


def test_sequences_behind_each_other_in_a_row():
    (x,) = tensors((2, 6, 4))
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :4]))) and cu_seqlens.tolist() == [0, 2, 5, 9] and longest == 4
    assert torch.equal(bert_padding.pad_input(rows, indices, 2, 6)[0, :5], x[0, :5])


def turned(x, cos, sin, interleaved):
    """Pairs as complex numbers; cos and sin broadcast."""
    ro = 2 * cos.shape[-1]
    pairs = x[..., :ro].double().unflatten(-1, (-1, 2)) if interleaved else torch.stack(x[..., :ro].double().chunk(2, -1), -1)
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double()))
    return torch.cat((out.flatten(-2) if interleaved else torch.cat(out.unbind(-1), -1), x[..., ro:].double()), -1)


ANGLES = torch.outer(torch.arange(20.0), 100.0 ** -(torch.arange(3) / 3))
COS, SIN = ANGLES.cos(), ANGLES.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 4, torch.tensor([3, 9])])
def test_apply_rotary_emb(interleaved, offsets):
    (x,) = tensors((2, 5, 3, 8), requires_grad=True)
    first = offsets if isinstance(offsets, torch.Tensor) else torch.tensor([offsets, offsets])
    at = first[:, None] + torch.arange(5)
    wanted = turned(x, COS[at][:, :, None], SIN[at][:, :, None], interleaved)
    got = rotary.apply_rotary_emb(x, COS, SIN, interleaved=interleaved, seqlen_offsets=offsets)
    close(got, wanted)
    gradients_agree(got, wanted, [x])
    place = x.detach().clone()
    assert rotary.apply_rotary_emb(place, COS, SIN, interleaved, True, offsets) is place
    close(place, wanted)
    packed, cu = x.detach().flatten(0, 1)[:7], torch.tensor([0, 2, 7], dtype=torch.int32)
    got = rotary.apply_rotary_emb(packed, COS, SIN, interleaved, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=5)
    at = torch.cat((first[0] + torch.arange(2), first[1] + torch.arange(5)))
    close(got, turned(packed, COS[at][:, None], SIN[at][:, None], interleaved))
    close(rotary.apply_rotary_emb_torch(x, COS[:5], SIN[:5], interleaved), turned(x, COS[:5][:, None], SIN[:5][:, None], interleaved))


def test_rotate_half():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rotary.rotate_half(x).tolist() == [-3, -4, 1, 2] and rotary.rotate_half(x, interleaved=True).tolist() == [-2, 1, -4, 3]


def test_rotary_in_place():
    qkv, kv = tensors((2, 5, 3, 2, 8), (2, 5, 2, 2, 8))
    got = rotary.apply_rotary_emb_qkv_(qkv.clone(), COS, SIN, COS.flip(0), SIN.flip(0))
    close(got[:, :, 0], turned(qkv[:, :, 0], COS[:5, None], SIN[:5, None], False))
    close(got[:, :, 1], turned(qkv[:, :, 1], COS.flip(0)[:5, None], SIN.flip(0)[:5, None], False))
    assert torch.equal(got[:, :, 2], qkv[:, :, 2])
    (gqa,) = tensors((2, 5, 8, 8))
    got = rotary.apply_rotary_emb_qkv_(gqa.clone(), COS, SIN, num_heads_q=4)
    close(got[:, :, :6], turned(gqa[:, :, :6], COS[:5, None], SIN[:5, None], False))
    assert torch.equal(got[:, :, 6:], gqa[:, :, 6:])
    got = rotary.apply_rotary_emb_kv_(kv.clone(), COS, SIN, True, 2)
    close(got[:, :, 0], turned(kv[:, :, 0], COS[2:7, None], SIN[2:7, None], True))
    assert torch.equal(got[:, :, 1], kv[:, :, 1])
    with pytest.raises(RuntimeError, match="num_heads_q is None"):
        rotary.apply_rotary_emb_qkv_(gqa, COS, SIN)
    with pytest.raises(RuntimeError, match="positions 18 to 22 are rotated and cos has 20 rows"):
        rotary.apply_rotary_emb(kv[:, :, 0], COS, SIN, seqlen_offsets=18)
    with pytest.raises(RuntimeError, match="rotary_dim of 6; headdim is 4"):
        rotary.apply_rotary_emb(kv[:, :, 0, :, :4], COS, SIN)


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_embedding(scale_base):
    """Scores depend on the distance alone, with and without scales; q and kv apart give the same."""
    embedding = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    assert not embedding.state_dict()
    (one,) = tensors((1, 1, 3, 2, 8))
    qkv = one.expand(1, 12, 3, 2, 8).clone()
    q, k, v = embedding(qkv.clone()).unbind(2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    for distance in range(6):
        diagonal = scores.diagonal(-distance, 2, 3)
        close(diagonal, diagonal[..., :1].expand_as(diagonal), 8, 5, 5, largest=4)  # over headdim, and both rotations with their tables
    assert torch.equal(v, qkv[:, :, 2])
    q2, kv2 = embedding(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone())
    close(q2, q)
    close(kv2[:, :, 0], k)
    late = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)(qkv[:, :5].clone(), seqlen_offset=7, max_seqlen=12)
    close(late[:, :, 0], q[:, 7:])
    angles = torch.outer(torch.arange(12.0), 100.0 ** -(torch.arange(4) / 4))
    if scale_base is None:
        close(q, turned(qkv[:, :, 0], angles.cos()[:, None], angles.sin()[:, None], False))


def test_inner_modules():
    qkv, q, kv = tensors((2, 6, 3, 4, 8), (2, 5, 4, 8), (2, 6, 2, 2, 8))
    inner = mha.FlashSelfAttention(causal=True, softmax_scale=0.4, window_size=(3, -1), alibi_slopes=torch.tensor(mha.get_alibi_slopes(4)), attention_dropout=0.5)
    wanted = reference(*qkv.unbind(2), seen_by(6, 6, causal=True, left=3), softmax_scale=0.4, alibi_slopes=torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]))[0]
    close(inner.eval()(qkv), wanted)
    assert not torch.equal(inner.train()(qkv), inner.eval()(qkv))
    close(mha.FlashSelfAttention()(qkv, causal=True), reference(*qkv.unbind(2), seen_by(6, 6, causal=True))[0])
    close(mha.FlashCrossAttention()(q, kv), reference(q, *kv.unbind(2))[0])
    cu_q, cu_k = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
    close(mha.FlashCrossAttention(causal=True)(q.flatten(0, 1), kv.flatten(0, 1), cu_seqlens=cu_q, max_seqlen=5, cu_seqlens_k=cu_k, max_seqlen_k=6).unflatten(0, (2, 5)),
          reference(q, *kv.unbind(2), seen_by(5, 6, causal=True))[0])
    close(mha.FlashSelfAttention(causal=True)(qkv.flatten(0, 1), cu_seqlens=cu_k, max_seqlen=6).unflatten(0, (2, 6)), reference(*qkv.unbind(2), seen_by(6, 6, causal=True))[0])
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    close(mha.SelfAttention()(qkv, key_padding_mask=mask), reference(*qkv.unbind(2), mask[:, None, None])[0])
    close(mha.CrossAttention(causal=True)(q, kv), reference(q, *kv.unbind(2), seen_by(5, 6, causal=True))[0])


def test_slopes():
    assert mha.get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert mha.get_alibi_slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


def composed(module, x, seen, alibi=None):
    """By the module's own weights."""
    q, k, v = module.Wqkv(x).split((32, 16, 16), -1)
    q, k, v = q.unflatten(-1, (4, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (2, 8))
    if module.rotary_emb_dim:
        angles = torch.outer(torch.arange(float(x.shape[1])), 10000.0 ** -(torch.arange(4) / 4))
        q, k = (turned(y, angles.cos()[:, None], angles.sin()[:, None], False) for y in (q, k))
    return module.out_proj(reference(q, k, v, seen, alibi_slopes=alibi)[0].float().flatten(2))


def test_mha():
    torch.manual_seed(0)
    (x,) = tensors((2, 6, 32))
    module = mha.MHA(32, 4, num_heads_kv=2, causal=True, rotary_emb_dim=8, use_flash_attn=True)
    assert set(module.state_dict()) == {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}
    wanted = composed(module, x, seen_by(6, 6, causal=True))
    close(module(x), wanted)
    for a, b in zip(torch.autograd.grad(module(x).square().sum(), module.Wqkv.weight), torch.autograd.grad(wanted.square().sum(), module.Wqkv.weight)):
        gradient_agrees(a, b, 3 * 32, *BACKWARD, 2 * 6)  # three products of width 32, and the sum over tokens
    checkpointed = mha.MHA(32, 4, num_heads_kv=2, causal=True, rotary_emb_dim=8, checkpointing=True, return_residual=True)
    checkpointed.load_state_dict(module.state_dict())
    o, residual = checkpointed(x)
    close(o, wanted)
    assert residual is x
    o.sum().backward()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 3:] = False
    plain = mha.MHA(32, 4, num_heads_kv=2, use_alibi=True)
    slopes = torch.tensor(mha.get_alibi_slopes(4))
    close(plain(x, key_padding_mask=mask), composed(plain, x, mask[:, None, None], slopes))
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    close(plain(x.flatten(0, 1), cu_seqlens=cu, max_seqlen=6).unflatten(0, (2, 6)), composed(plain, x, None, slopes))
    cross = mha.MHA(32, 4, cross_attn=True, qkv_proj_bias=False)
    assert set(cross.state_dict()) == {"Wq.weight", "Wkv.weight", "out_proj.weight", "out_proj.bias"}
    (other,) = tensors((2, 9, 32), seed=1)
    k, v = cross.Wkv(other).unflatten(-1, (2, 4, 8)).unbind(2)
    close(cross(x, x_kv=other), cross.out_proj(reference(cross.Wq(x).unflatten(-1, (4, 8)), k, v)[0].float().flatten(2)))


def convolved(x, convolution):
    """Token by token: two before and its own, each channel by itself."""
    padded = torch.nn.functional.pad(x, (0, 0, 2, 0))
    weight = convolution.weight[:, 0]
    return sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(3)) + convolution.bias


@pytest.mark.parametrize("kind", ["equal heads", "grouped heads", "cross"])
def test_mha_with_convolutions(kind):
    torch.manual_seed(0)
    (x,) = tensors((2, 6, 32))
    kv_heads = 4 if kind == "equal heads" else 2
    module = mha.MHA(32, 4, num_heads_kv=kv_heads, cross_attn=kind == "cross", dwconv=True, causal=True)
    names = {"dwconv_qkv"} if kind == "equal heads" else {"dwconv_q", "dwconv_kv"}
    assert {name.split(".")[0] for name in module.state_dict() if "dwconv" in name} == names
    if kind == "cross":
        q, kv = convolved(module.Wq(x), module.dwconv_q), convolved(module.Wkv(x), module.dwconv_kv)
    elif kind == "grouped heads":
        q, kv = module.Wqkv(x).split((32, 32), -1)
        q, kv = convolved(q, module.dwconv_q), convolved(kv, module.dwconv_kv)
    else:
        q, kv = convolved(module.Wqkv(x), module.dwconv_qkv).split((32, 64), -1)
    k, v = kv.unflatten(-1, (2, kv_heads, 8)).unbind(2)
    wanted = module.out_proj(reference(q.unflatten(-1, (4, 8)), k, v, seen_by(6, 6, causal=True))[0].float().flatten(2))
    close(module(x), wanted)
    weight = next(y for name, y in module.named_parameters() if "dwconv" in name and name.endswith("weight"))
    gradient_agrees(torch.autograd.grad(module(x).square().sum(), weight)[0], torch.autograd.grad(wanted.square().sum(), weight)[0], 3 * 32, *BACKWARD, 2 * 6)


@pytest.mark.parametrize("subset", [torch.tensor([0, 4]), slice(0, 1)])
def test_mha_of_some_queries(subset):
    (x,) = tensors((2, 6, 32))
    module = mha.MHA(32, 4, cross_attn=True)
    got = module(x, mixer_subset=subset)
    close(got, module(x)[:, subset])
    close(got, module(x[:, subset], x_kv=x))


@pytest.mark.parametrize("per_sample", [False, True])
def test_mha_decodes(per_sample):
    """Step by step with a cache as at once."""
    (x,) = tensors((2, 6, 32))
    module = mha.MHA(32, 4, num_heads_kv=2, causal=True, rotary_emb_dim=8, layer_idx=3).eval()
    state = InferenceParams(max_seqlen=8, max_batch_size=2)
    with torch.no_grad():
        parts = []
        for begin, end in ((0, 3), (3, 4), (4, 6)):
            state.seqlen_offset = begin
            state.lengths_per_sample = torch.full((2,), begin, dtype=torch.int32) if per_sample else None
            parts.append(module(x[:, begin:end], inference_params=state))
        close(torch.cat(parts, 1), module(x))
    assert state.key_value_memory_dict[3].shape == (2, 8, 2, 2, 8)
    state.reset(max_seqlen=6, max_batch_size=1)
    assert (state.max_seqlen, state.max_batch_size, state.seqlen_offset) == (6, 1, 0) and 3 in state.key_value_memory_dict
    assert state.lengths_per_sample is None or not state.lengths_per_sample.any()


def test_what_is_refused():
    x, cu = torch.ones(1, 2, 32), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="dwconv beside cu_seqlens or inference_params is not computed by fattn: the convolution"):
        mha.MHA(32, 4, dwconv=True)(x[0], cu_seqlens=cu, max_seqlen=2)
    for given in ({"mixer_subset": torch.tensor([0])}, {"x_kv": x}):
        with pytest.raises(ValueError, match="mixer_subset and x_kv are of a module with cross_attn=True"):
            mha.MHA(32, 4)(x, **given)
    with pytest.raises(ValueError, match="embed_dim is 30, num_heads 4"):
        mha.MHA(30, 4)
