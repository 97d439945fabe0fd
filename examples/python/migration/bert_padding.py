"""BERT on a padded batch: `before` takes the padding out around flash_attn, `after` tells fattn the lengths.

    python -m fattn.compat bert_padding.py
"""

import torch
from flash_attn import flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import pad_input, unpad_input

import fattn

NHEADS, HEADDIM = 4, 32


def before(qkv, mask):
    batch, seqlen = mask.shape
    rows, indices, cu_seqlens, longest, _ = unpad_input(qkv.flatten(2), mask)
    o = flash_attn_varlen_qkvpacked_func(rows.unflatten(-1, (3, NHEADS, HEADDIM)), cu_seqlens, longest)
    return pad_input(o.flatten(1), indices, batch, seqlen).unflatten(-1, (NHEADS, HEADDIM))


def after(qkv, mask):
    # Padding is at the end of each sequence. Elsewhere: mask=mask[:, None, None].
    return fattn.attention_qkvpacked(qkv, seqused_k=mask.sum(1))


torch.manual_seed(0)
lengths = torch.tensor([20, 7, 33])
mask = (torch.arange(40) < lengths[:, None]).int()
qkv = torch.randn(3, 40, 3, NHEADS, HEADDIM, requires_grad=True)
# Rows of padding are not looked at: `before` has zeros there, `after` what queries of padding see.
results = [attention(qkv, mask)[mask.bool()] for attention in (before, after)]
torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
gradients = [torch.autograd.grad(x.square().sum(), qkv)[0] for x in results]
torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
print(f"BERT's attention on lengths {lengths.tolist()} of 40: the same before and after, and so is the gradient")
