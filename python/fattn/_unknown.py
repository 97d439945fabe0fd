"""Options by the names that other libraries have for them: the error says what is meant here."""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable

_PLANNED = "nothing needs to be said: the library plans it"
_ROTARY = "it is not computed: turn q and k before the call"
_DESCALE = "8-bit dtypes are not computed: convert q, k and v"
_BLOCKS = "it is not computed: a mask says which pairs are seen; causal, window and document_q skip the blocks that they hide"

# flash_attn (2, 3, 4), torch, xFormers, transformers. docs/MIGRATION.md has the same, with examples.
_MEANT = {
    "window_size": "window=(left, right) is meant",
    "sliding_window": "window=(sliding_window - 1, 0) is meant",
    "is_causal": "causal is meant; with unequal lengths fattn aligns to the bottom right",
    "attn_mask": "mask (bool, True: seen) or bias (numbers that are added to scores) is meant",
    "attention_mask": "mask (bool, True: seen) or bias (numbers that are added to scores) is meant, or seqused_k for padding at the end",
    "attn_bias": "bias is meant",
    "key_padding_mask": "mask[:, None, None] (True: seen) is meant, or seqused_k for padding at the end",
    "dropout": "dropout_p is meant",
    "p_dropout": "dropout_p is meant",
    "attention_dropout": "dropout_p is meant",
    "p": "dropout_p is meant",
    "rng_state": "dropout_state is meant",
    "scale": "softmax_scale is meant",
    "scaling": "softmax_scale is meant",
    "sm_scale": "softmax_scale is meant",
    "logits_soft_cap": "softcap is meant",
    "soft_cap": "softcap is meant",
    "enable_gqa": "nothing needs to be said: nheads may be any multiple of nheads_k",
    "return_attn_probs": "return_lse is meant; weights are not returned",
    "return_softmax_lse": "return_lse is meant",
    "return_softmax": "return_lse is meant; weights are not returned",
    "need_weights": "weights are not returned; return_lse gives what they follow from",
    "s_aux": "sinks is meant",
    "learnable_sink": "sinks is meant",
    "cache_seqlens": "fattn.with_kvcache has it; of what is in a cache already seqused_k says how many keys there are",
    "seqlens_k": "seqused_k is meant",
    "cu_seqlens": "cu_seqlens_q is meant, which cu_seqlens_k follows unless given",
    "cu_seq_lens_q": "cu_seqlens_q is meant",
    "cu_seq_lens_k": "cu_seqlens_k is meant",
    "cu_seqlens_kv": "cu_seqlens_k is meant",
    "max_seqlen": "max_seqlen_q and max_seqlen_k are meant",
    "max_length_q": "max_seqlen_q is meant",
    "max_length_k": "max_seqlen_k is meant",
    "max_seqlen_kv": "max_seqlen_k is meant",
    "alibi_slope": "alibi_slopes is meant",
    "num_splits": _PLANNED,
    "pack_gqa": _PLANNED,
    "sm_margin": _PLANNED,
    "scheduler_metadata": _PLANNED,
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
    "rotary_interleaved": _ROTARY,
    "rotary_seqlens": _ROTARY,
    "page_table": "block_table is meant",
    "cache_batch_idx": "it is not computed: index the caches by it",
    "cache_leftpad": "it is not computed: left padding is a mask of the keys",
    "cu_seqlens_k_new": "it is not computed: append the new keys and values yourself, and give fattn.attention their lengths as seqused_k",
    "q_descale": _DESCALE,
    "k_descale": _DESCALE,
    "v_descale": _DESCALE,
    "qv": "it is not computed",
    "attention_chunk": "document_q is meant, the number of each token's chunk",
    "num_heads_q": "fattn.attention(*qkv.split((nheads, nheads_k, nheads_k), dim=2)) is meant",
    "score_mod": "it is not computed: a bias that is added says most of them, softcap and alibi_slopes others",
    "mask_mod": _BLOCKS,
    "block_mask": _BLOCKS,
    "aux_tensors": _BLOCKS,
    "block_size": _BLOCKS,
    "full_block_cnt": _BLOCKS,
    "full_block_idx": _BLOCKS,
    "mask_block_cnt": _BLOCKS,
    "mask_block_idx": _BLOCKS,
}
_SEQUSED_Q = ("seqused_q is not computed: queries behind those that are used are rows like others, whose outputs nobody needs to read, and with a gradient of o "
              "of 0 there they add nothing to other gradients. With causal, a window or alibi_slopes the last query of the tensor is the last key's: give "
              "fattn.attention_varlen the queries that are used, by cu_seqlens_q")


def unknown_options(function: str, given: Iterable[str], known: Collection[str]) -> Exception:
    """The error for options that `function` does not have."""
    name = next(iter(given))
    if name == "seqused_q":
        return NotImplementedError(f"{function}: {_SEQUSED_Q}")
    if name in _MEANT:
        return TypeError(f"{function} has no option {name!r}: {_MEANT[name]}")
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(known)}"
    return TypeError(f"{function} has no option {name!r}; {meant}")


def options_of(function: Callable) -> list[str]:
    """Its keywords."""
    return [x.name for x in inspect.signature(function).parameters.values() if x.kind is x.KEYWORD_ONLY]
