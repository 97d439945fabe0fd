"""The Python examples, and the blocks of Python in the documents, each as a program of its own."""

import pathlib
import re
import subprocess
import sys

import forked
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))
MIGRATION = sorted((ROOT / "examples" / "python" / "migration").glob("*.py"))
BLOCKS = [(name, i, block) for name in ("README.md", "docs/MIGRATION.md", "docs/BEST_PRACTICE.md", "docs/TROUBLESHOOTING.md", "docs/SERVING.md")
          for i, block in enumerate(re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL))]


def run(*command: str | pathlib.Path, whole: bool = False) -> str:
    """`whole`: from the start of an interpreter to its end."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300) if whole else forked.python(*command, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example(path):
    assert run(path, whole=path == EXAMPLES[0])


@pytest.mark.parametrize("path", MIGRATION, ids=[path.name for path in MIGRATION])
def test_program_of_another_library(path):
    assert "the same before and after" in run("-m", "fattn.compat", path)


@pytest.mark.parametrize(("name", "index", "block"), BLOCKS, ids=[f"{name}-{i}" for name, i, _ in BLOCKS])
def test_block(name, index, block):
    if "transformers" in block:
        pytest.importorskip("transformers", minversion="5")
    run("-c", block, whole=index == 0)


# What the packages flash_attn 2, 3 and 4 export for callers.
FLASH_ATTN = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func",
              "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata", "unpad_input", "pad_input",
              "unpad_input_for_concatenated_sequences", "index_first_axis")


def first_column() -> str:
    return "\n".join(line.split("|")[1] for line in (ROOT / "docs/MIGRATION.md").read_text().splitlines() if line.startswith("|"))


@pytest.mark.parametrize("function", FLASH_ATTN)
def test_every_function_of_flash_attn_has_a_line(function):
    assert re.search(rf"\b{function}\b", first_column())


# What their functions take beside q, k, v, qkv and kv.
OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "block_table", "cu_seqlens_q",
           "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
           "k_cache", "v_cache", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_cos", "rotary_sin", "rotary_interleaved", "num_splits", "return_softmax_lse",
           # since 3
           "seqused_q", "seqused_k", "qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "pack_gqa", "sm_margin", "num_heads_q", "page_table",
           "cu_seqlens_k_new", "rotary_seqlens", "scheduler_metadata",
           # since 4
           "learnable_sink", "score_mod", "mask_mod", "aux_tensors", "full_block_cnt", "full_block_idx", "mask_block_cnt", "mask_block_idx", "block_size")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_flash_attn_has_a_line(option):
    assert re.search(rf"\b{option}\b", first_column())


def test_there_are_some():
    assert len(EXAMPLES) >= 3 and len(MIGRATION) >= 5 and len(BLOCKS) >= 5
