"""The providers of libraries that need not be here: each against a stand-in that has the library's documented signature and computes with torch, on the CPU. What is wrong
in a layout, a scale, a mask or a group of heads shows; whether the library itself works does not."""
import json
import os
import subprocess
import sys
import textwrap

import pytest

from test_provider import TORCH, needs_torch

# (batch, seqlen, heads, headdim), as all of these libraries have it; causal masks are aligned to the bottom right.
STAND_IN = """
import torch
def attention(q, k, v, scale, causal):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(s.shape[3] - s.shape[2] + 1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(3), v)
"""
LIBRARIES = {
    "flash_attn/__init__.py": """
        from stand_in import attention
        __version__ = "2.8"
        def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                            return_attn_probs=False):
            return attention(q, k, v, softmax_scale, causal)
    """,
    "flash_attn/cute/__init__.py": """
        from stand_in import attention
        __version__ = "0.0.0"
        def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0):
            return attention(q, k, v, softmax_scale, causal), None
    """,
    "flash_attn_4-4.0.0b36.dist-info/METADATA": "Metadata-Version: 2.4\nName: flash-attn-4\nVersion: 4.0.0b36\n",
    "flash_attn_interface.py": """
        from stand_in import attention
        def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1)):
            return attention(q, k, v, softmax_scale, causal), None
    """,
    "xformers/__init__.py": "__version__ = '0.0.30'",
    "xformers/ops/__init__.py": """
        from stand_in import attention
        class LowerTriangularFromBottomRightMask: pass
        class fmha:
            class attn_bias:
                LowerTriangularFromBottomRightMask = LowerTriangularFromBottomRightMask
        def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
            assert query.shape[2:-1] == key.shape[2:-1], "heads and groups are the same in all"
            flat = [x.flatten(2, 3) if x.dim() == 5 else x for x in (query, key, value)]
            return attention(*flat, scale, isinstance(attn_bias, LowerTriangularFromBottomRightMask)).unflatten(2, query.shape[2:-1])
    """,
    "flashinfer.py": """
        import torch
        from stand_in import attention
        __version__ = "0.6"
        class BatchPrefillWithRaggedKVCacheWrapper:
            def __init__(self, float_workspace_buffer, kv_layout="NHD"):
                assert kv_layout == "NHD"
            def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False, sm_scale=None, q_data_type="float16"):
                self.begins, self.causal, self.scale = (qo_indptr.tolist(), kv_indptr.tolist()), causal, sm_scale
            def run(self, q, k, v):
                pairs = zip(*(zip(x, x[1:]) for x in self.begins))
                return torch.cat([attention(q[None, i:j], k[None, m:n], v[None, m:n], self.scale, self.causal)[0] for (i, j), (m, n) in pairs])
    """,
}
# A host of one provider, with the CPU instead of the GPU that it asks for. Its file has its library's name, so it is loaded by another.
HOST = """
import importlib.util, json, sys, torch
sys.path.insert(0, sys.argv[1])
specification = importlib.util.spec_from_file_location("the_provider", sys.argv[1] + "/" + sys.argv[2] + ".py")
module = importlib.util.module_from_spec(specification)
specification.loader.exec_module(module)
Kind = next(x for x in vars(module).values() if isinstance(x, type) and issubclass(x, module.Provider) and x is not module.Provider)
variants = Kind.variants
Kind.variants = lambda self: {"cpu": variants(self)["cuda"]}
provider, folder, grad = Kind(), sys.argv[3], sys.argv[5] == "grad"
hello = provider.answer({"op": "hello", "protocol": 1})
problem = {"op": "problem", "batch": 2, "seqlen_q": 5, "seqlen_k": 7, "nheads": 4, "nheads_k": 2, "headdim": 8, "headdim_v": 8, "causal": True, "dtype": "bf16",
           "softmax_scale": 0.3, "grad": grad, "seed": 1, "threads": 1, "device": "cpu", "variant": sys.argv[4], "min_sample_s": 0, "memory_limit_bytes": 0}
provider.answer(problem)
torch.manual_seed(0)
shapes = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8), "dout": (2, 5, 4, 8)}
x = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items() if grad or name != "dout"}
paths = {name: f"{folder}/{name}" for name in x}
for name, path in paths.items():
    open(path, "wb").write(bytes(x[name].contiguous().view(torch.uint8).flatten().tolist()))
provider.answer({"op": "prepare", "inputs": paths})
outputs = {name: f"{folder}/out_{name}" for name in (("o", "dq", "dk", "dv") if grad else ("o",))}
sizes = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}
for name, path in outputs.items():
    open(path, "wb").write(bytes(2 * x[sizes[name]].numel()))
provider.answer({"op": "check", "outputs": outputs})
q, k, v = (x[name].double().requires_grad_() for name in "qkv")
mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
wanted = torch.nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
wanted = [wanted, *(torch.autograd.grad(wanted, (q, k, v), x["dout"].double()) if grad else ())]
errors = [float((torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.bfloat16).view(y.shape).double() - y).abs().max()) for path, y in zip(outputs.values(), wanted)]
print(json.dumps({"hello": hello, "errors": errors}))
"""


@pytest.fixture
def libraries(tmp_path):
    for name, text in {"stand_in.py": STAND_IN, **LIBRARIES}.items():
        path = tmp_path / "libraries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return {**os.environ, "PYTHONPATH": str(tmp_path / "libraries")}


@needs_torch
@pytest.mark.parametrize(("name", "variant", "variants", "grad"), [("flash_attn", "4", ["4", "3", "2"], True), ("flash_attn", "2", ["4", "3", "2"], True), ("xformers", "auto", ["auto"], True),
                                                                  ("flashinfer", "prefill", ["prefill"], False)])
def test_as_documented(libraries, root, tmp_path, name, variant, variants, grad):
    done = subprocess.run([TORCH, "-c", HOST, root / "providers", name, tmp_path, variant, "grad" if grad else "no"], env=libraries, capture_output=True, text=True,
                          timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["hello"]["devices"] == {"cpu": variants} and result["hello"]["compiles"] == (name == "flash_attn")
    assert name != "flash_attn" or result["hello"]["version"].startswith("4: 4.0.0b36, 3: ")
    assert len(result["errors"]) == (4 if grad else 1) and all(error < 0.05 for error in result["errors"]), result["errors"]


@pytest.mark.parametrize(("name", "wanted"), [("flash_attn", "install flash-attn"), ("xformers", "Install xformers"), ("flashinfer", "Install flashinfer-python")])
def test_what_is_not_installed_says_so(root, tmp_path, name, wanted):
    for module in ("flash_attn", "flash_attn_interface", "xformers", "flashinfer"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('none here')")
    done = subprocess.run([sys.executable, root / "providers" / f"{name}.py"], input='{"op": "hello", "protocol": 1, "device": "cuda"}\n', capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    answer = json.loads(done.stdout)
    assert (answer["ok"], answer["status"]) == (False, "unavailable") and wanted in answer["reason"] and "none here" in answer["reason"]
    assert name in answer["absent"]


@pytest.mark.parametrize("name", ["flash_attn", "xformers", "flashinfer"])
def test_what_is_for_gpus_advises_nothing_on_the_cpu(root, name):
    done = subprocess.run([sys.executable, root / "providers" / f"{name}.py"], input='{"op": "hello", "protocol": 1, "device": "cpu"}\n', capture_output=True, text=True,
                          timeout=60)
    answer = json.loads(done.stdout)
    assert (answer["ok"], answer["status"], answer["absent"]) == (False, "unsupported", "for GPUs") and "nstall" not in answer["reason"]


@needs_torch
def test_flex_attention_computes_the_same(fattn, root):
    """torch.compile takes a minute for it, so one problem stands for all."""
    flags = ["--causal", "--seqlen-k", "48", "--nheads-k", "2"]
    tiny = ["--backend", "reference", "--seqlen", "32", "--nheads", "4", "--headdim", "16", "--repeats", "6", "--min-time", "0", "--warmup", "1"]
    peers = ["--providers", root / "providers", "--python", TORCH, "--provider", "fattn", "--provider", "flex-attention"]
    record = fattn.json("compare", *tiny, *flags, "--no-grad", *peers)
    (row,) = [row for row in record["rows"] if row["provider"] == "flex-attention"]
    assert row["status"] == "ok" and row["checks"][0]["pass"], row["reason"]
    rows = {row["pass"]: row for row in fattn.json("compare", *tiny, *flags, *peers)["rows"] if row["provider"] == "flex-attention"}
    assert rows["fwd"]["status"] == "ok", rows["fwd"]["reason"]
    assert {rows[name]["reason"] for name in ("bwd", "fwdbwd")} == {"FlexAttention has no backward pass on the CPU"}
