"""flash_attn.bert_padding: padded batches to rows behind each other, and back."""

import torch
import torch.nn.functional as F

__all__ = ["index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def index_first_axis(input, indices):
    """The rows `indices` of the first dimension."""
    return input[indices]


def index_put_first_axis(values, indices, first_axis_dim):
    """Rows of zeros, `first_axis_dim` of them, with the values at `indices`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def index_first_axis_residual(input, indices):
    """The rows, and the input itself."""
    return input[indices], input.detach()


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """hidden_states (batch, seqlen, ...), attention_mask (batch, seqlen), not 0 where a token is; unused_mask: where a row is kept that nobody uses.

    Returns the rows that are kept (total, ...), their places in the flattened batch, cu_seqlens (batch + 1) int32, the longest sequence, and how many rows of
    each are used."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = kept.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """attention_mask_in_length (batch, seqlen): in each row the lengths of the sequences that lie behind each other there, then zeros.

    Returns the rows of all sequences, their places in the flattened batch, cu_seqlens, and the longest sequence."""
    seqlen = attention_mask_in_length.shape[-1]
    there = torch.arange(seqlen, device=attention_mask_in_length.device) < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)
    indices = there.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states, indices, batch, seqlen):
    """hidden_states (total, ...) at `indices` of a flattened batch -> (batch, seqlen, ...), 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
