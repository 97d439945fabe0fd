"""What tools/make_migration.py says of each argument that fattn.compat takes: whether it is computed, and what is to be known."""

YES, NO, PLANNED = "computed", "refused", "taken"

_SHAPE = {
    "q": (YES, "any strides with a contiguous last dimension; other tensors are copied"),
    "k, v": (YES, "`nheads` is a multiple of `nheads_k`; another headdim of `v` is computed too"),
    "softmax_scale": (YES, ""),
    "causal": (YES, "aligned to the bottom right"),
    "deterministic": (YES, "`False` follows `torch.use_deterministic_algorithms`"),
    "cu_seqlens_q, cu_seqlens_k": (YES, ""),
    "max_seqlen_q, max_seqlen_k": (YES, ""),
}
_PACKED = (YES, "views, no copy")
_CACHES = {
    "k_cache, v_cache": (YES, "new keys and values are written in place; no gradient, as upstream"),
    "rotary_cos, rotary_sin": (YES, "in the launch that writes the new keys, at the positions that upstream's documentation says; `k` and `v` are needed, as there"),
    "rotary_interleaved": (YES, ""),
    "cache_seqlens": (YES, "a number or a tensor"),
    "cache_batch_idx": (YES, "without a copy where the cache's batch and rows are one dimension in memory"),
    "cache_leftpad": (YES, ""),
    "return_softmax_lse": (YES, "(out, lse)"),
}
_PLANNED = (PLANNED, "planned, whatever it says")
_PAGES = (YES, "read, and where a call has new keys, written in place; no gradient; where the device reads pages ([FEATURES.md](FEATURES.md))")
_EIGHT_BITS = (NO, "dtypes of 8 bits are not read: convert q, k and v to 16 bits")
_MLA = (NO, "a second product of queries and values (MLA) is not added to scores: concatenate it to q, and v to k")
_EXPRESSIONS = (NO, "functions of scores are not compiled into kernels: `bias`, `mask`, `document_q`, `softcap` and `alibi_slopes` of `fattn.attention` say most")
_BLOCKS = (NO, "lists of blocks are not read; what causal masks, windows and documents hide is skipped without one")

NOTES: dict[str, dict[str, tuple[str, str]]] = {
    "flash_attn": _SHAPE | {"kv, qkv": _PACKED} | _CACHES | {
        "dropout_p": (YES, "the numbers are fattn's own, from torch's generator"),
        "window_size": (YES, "a negative number is no limit"),
        "softcap": (YES, ""),
        "alibi_slopes": (YES, ""),
        "return_attn_probs": (YES, "(out, softmax_lse, S_dmask); S_dmask is computed again, for tests, and empty without dropout"),
        "cu_seqlens, max_seqlen": (YES, ""),
        "num_splits": _PLANNED,
        "block_table": _PAGES,
    },
    "flash_attn_interface": _SHAPE | {"qkv": _PACKED} | _CACHES | {
        "window_size": (YES, "a negative number is no limit"),
        "attention_chunk": (YES, "with a gradient, too; refused beside a cache, and beside `seqused_k` of packed sequences"),
        "softcap": (YES, ""),
        "return_attn_probs": (YES, "(out, softmax_lse)"),
        "num_heads_q": (YES, "heads of q, then those of k and of v"),
        "seqused_q": (YES, "rows that are not used are 0; waits for a GPU"),
        "seqused_k": (YES, ""),
        "cu_seqlens_k_new": (YES, ""),
        "rotary_seqlens": (YES, "the position of the first new key"),
        "out_partial, lse_partial": (YES, "by operations of torch, differentiable"),
        "out, out_dtype": (YES, ""),
        "num_splits, pack_gqa, sm_margin": _PLANNED,
        "scheduler_metadata": (PLANNED, "what `get_scheduler_metadata` returns, an empty tensor: nothing is to be scheduled ahead"),
        "qv": _MLA,
        "q_descale, k_descale, v_descale": _EIGHT_BITS,
        "page_table": _PAGES,
    },
    "flash_attn.cute": _SHAPE | {
        "window_size": (YES, "None is no limit, nor are two negative numbers; one that is negative is a limit on the other side, for which a mask is made"),
        "learnable_sink": (YES, "with a gradient"),
        "softcap": (YES, ""),
        "return_lse": (YES, "(out, lse) always; lse has a gradient"),
        "seqused_q": (YES, "rows that are not used are 0; waits for a GPU"),
        "seqused_k": (YES, ""),
        "out_partial, lse_partial": (YES, "by operations of torch, differentiable"),
        "out, out_dtype, cu_seqlens": (YES, ""),
        "num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata, gather_bwd_recompute_p, "
        "gather_bwd_token_chunk": _PLANNED,
        "qv": _MLA,
        "score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars": _EXPRESSIONS,
        "block_sparse_tensors, block_sparse_tensors_bwd": _BLOCKS,
        "gather_kv_indices": (NO, "keys that are chosen for each query are not gathered: a `mask` of `fattn.attention` says which are seen"),
        "page_table": _PAGES,
        "seqused, virtual_batch_idx": (NO, "every row is combined, in the order of the partial results"),
    },
    "xformers.ops": {
        "query, key, value": (YES, "3, 4 or 5 dimensions; expanded heads of a group are not copied"),
        "attn_bias": (YES, "a tensor, with a gradient, or one of the classes below; a bool tensor is refused, as it would be added"),
        "p": (YES, "dropout; functions for one pass, of parts and without a gradient of p have none, as upstream"),
        "scale": (YES, ""),
        "output_dtype": (YES, ""),
        "grad, output, lse": (YES, "3 or 4 dimensions; no gradient of the bias, as upstream"),
        "attn_split, lse_split, write_lse": (YES, "by operations of torch, differentiable"),
        "op": (PLANNED, "planned, whatever it says; the names of operators that programs give are there"),
    },
}
