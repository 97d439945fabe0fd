"""fattn.compat itself: what is found after install(), that uninstall() takes it back, programs that run as they are, and what transformers sees."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import forked
import pytest

pytest.importorskip("torch")
import fattn  # noqa: E402
from fattn import compat  # noqa: E402

MODULES = ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn.layers.rotary", "flash_attn.modules.mha", "flash_attn.utils.generation", "flash_attn.cute",
           "flash_attn.cute.interface", "flash_attn_interface", "xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
DISTRIBUTIONS = ("flash-attn", "flash_attn", "flash-attn-3", "flash-attn-4", "xformers")


@pytest.fixture
def installed():
    yield compat.install()
    compat.uninstall()


def found() -> dict[str, bool]:
    def is_found(name):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return {name: is_found(name) for name in MODULES}


def run(code: str, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_there_after_install_and_gone_after_uninstall():
    assert not any(found().values()) and compat.installed() == ()
    assert compat.install() == ("flash_attn", "flash_attn_interface", "xformers") == compat.installed()
    assert all(found().values())
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__name__ == name and importlib.util.find_spec(name).origin == module.__file__
        assert all(hasattr(module, x) for x in getattr(module, "__all__", ()))
    for name in DISTRIBUTIONS:
        assert importlib.metadata.version(name)
    assert sorted(importlib.metadata.packages_distributions()["flash_attn"]) == ["flash-attn", "flash-attn-4"]
    assert importlib.import_module("flash_attn").__version__ == importlib.metadata.version("flash_attn")
    compat.uninstall()
    assert not any(found().values()) and not any(name in sys.modules for name in MODULES)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    compat.uninstall()  # nothing is left to do


def test_some_of_them():
    try:
        assert compat.install("flash_attn_interface") == ("flash_attn_interface",)
        assert found()["flash_attn_interface"] and not found()["flash_attn"] and not found()["xformers"]
        assert compat.install("xformers") == ("xformers",)
        assert found()["xformers"] and not found()["flash_attn_interface"]
    finally:
        compat.uninstall()
    with pytest.raises(ValueError, match="'flash' is no library that fattn.compat has; allowed: 'flash_attn', 'flash_attn_interface', 'xformers'"):
        compat.install("flash")


def test_a_real_one_stays_and_is_named(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = 'real'\n")
    monkeypatch.syspath_prepend(tmp_path)
    real = importlib.import_module("flash_attn")
    try:
        with pytest.warns(UserWarning, match=r"flash_attn is installed and left as it is; install\(replace=True\)"):
            assert compat.install() == ("flash_attn_interface", "xformers")
        assert importlib.import_module("flash_attn") is real
        assert compat.install(replace=True) == ("flash_attn", "flash_attn_interface", "xformers")
        assert importlib.import_module("flash_attn").__version__ != "real"
        compat.uninstall()
        assert importlib.import_module("flash_attn") is real
    finally:
        compat.uninstall()
        sys.modules.pop("flash_attn", None)


def test_install_imports_no_torch():
    done = run("import sys, fattn.compat; fattn.compat.install(); import importlib.metadata as m; m.version('flash-attn'); assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


PROGRAM = """import sys, torch
from flash_attn import flash_attn_func
import helper
q = torch.ones(1, 2, 1, 8)
print(__name__, sys.argv[1:], flash_attn_func(q, q, q).shape == q.shape)
"""


def test_a_program_runs_as_it_is(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("")
    for arguments, folder in (([str(tmp_path / "program.py")], None), (["-m", "program"], tmp_path)):
        done = subprocess.run([sys.executable, "-m", "fattn.compat", *arguments, "--steps", "3"], capture_output=True, text=True, timeout=120, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "__main__ ['--steps', '3'] True\n"


@pytest.mark.parametrize(("arguments", "message"), [([], "no program is given"), (["-m"], "-m has no module behind it"), (["--fast", "x.py"], "'--fast' is no option"),
                                                    (["no\tfile.py"], r"there is no file 'no\tfile.py'")])
def test_bad_arguments(arguments, message):
    done = subprocess.run([sys.executable, "-m", "fattn.compat", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr and "usage: python -m fattn.compat" in done.stderr


def test_help():
    done = subprocess.run([sys.executable, "-m", "fattn.compat", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--replace" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_compat_is_a_name_of_the_package():
    assert "compat" in dir(fattn) and fattn.compat is compat


BOUND = """
import torch
# Two layers in fp32 and the logits, of width 64: norm, q k v, q k, over the keys, o, norm, and the MLP's two products; of n roundings a pair of results
# has 2 sqrt(n) epsilons at most, as signs are chance.
TERMS = 2 * (64 + 64 + 16 + 12 + 64 + 64 + 64 + 256) + 64 + 64
BOUND = 2 * TERMS**0.5 * torch.finfo(torch.float32).eps
"""


TRANSFORMERS = """
import sys, torch, fattn.compat as compat
ORDER = sys.argv[1]
if ORDER == "before":
    compat.install()
from transformers import AutoModelForCausalLM, LlamaConfig
import transformers.modeling_flash_attention_utils as functions
from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal
if ORDER == "after":
    assert torch.cuda.is_available() or not is_flash_attn_2_available()
    compat.install()
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal
assert is_flash_attn_2_available() and is_flash_attn_greater_or_equal("2.4.1") and not is_flash_attn_greater_or_equal("9.0")
config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
ids = torch.randint(1, 100, (2, 12))
mask = torch.ones_like(ids)
mask[0, :5] = 0

def outcome(implementation):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    logits.square().mean().backward()
    text = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone(), text

eager = outcome("eager")
for version, module in ((2, "flash_attn"), (3, "flash_attn_interface"), (4, "flash_attn.cute"))[: 3 if ORDER == "before" else 1]:
    got = outcome(f"flash_attention_{version}")
    assert functions._flash_varlen_fn.__module__.startswith(module), functions._flash_varlen_fn
    torch.testing.assert_close(got[0], eager[0], rtol=BOUND, atol=BOUND)
    torch.testing.assert_close(got[1], eager[1], rtol=0, atol=2**0.5 * BOUND * eager[1].abs().max().item())  # twice the terms, in both passes
    assert (got[2] == eager[2]).all()
compat.uninstall()
assert functions._loaded_implementation is None
from transformers.utils import is_flash_attn_2_available
assert torch.cuda.is_available() or not is_flash_attn_2_available()
assert torch.cuda.is_available() or not functions.is_flash_attn_2_available()
for names in ((), ("xformers",)):
    if names:
        compat.install(*names)
    model.set_attn_implementation("eager")
    try:
        if names and hasattr(model, "_flash_attn_can_dispatch"):
            model._flash_attn_can_dispatch(2)
        else:
            model.set_attn_implementation("flash_attention_2")
    except (ImportError, ValueError):
        print("refused again" + str(names))
"""


MODELS = """
import torch, fattn.compat as compat
compat.install()
import transformers
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
grouped = sizes | {"num_key_value_heads": 2}
torch.manual_seed(0)
ids = torch.randint(5, 99, (2, 12))
left, right = torch.ones_like(ids), torch.ones_like(ids)
left[0, :4], right[0, 8:] = 0, 0

def differences(model, mask):
    outcomes = []
    for implementation in ("eager", "flash_attention_2"):
        model.eval().set_attn_implementation(implementation)
        outcomes.append(model(ids, attention_mask=mask)[0][mask.bool()])
    return ((outcomes[0] - outcomes[1]).abs().max() / outcomes[0].abs().max()).item()

t = transformers
for model, mask in ((t.BertModel(t.BertConfig(**sizes)), right), (t.GPT2LMHeadModel(t.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100)), left),
                    (t.MistralForCausalLM(t.MistralConfig(**grouped, sliding_window=4)), left),
                    (t.Gemma2ForCausalLM(t.Gemma2Config(**grouped, head_dim=16, sliding_window=4)), left)):
    assert differences(model, mask) <= BOUND, type(model).__name__
    print(type(model).__name__)
model = t.LlamaForCausalLM(t.LlamaConfig(**grouped)).eval()
model.set_attn_implementation("flash_attention_2")
packed = model(torch.cat([ids[:1, :5], ids[1:, :7]], 1), position_ids=torch.cat([torch.arange(5), torch.arange(7)])[None], use_cache=False).logits
torch.testing.assert_close(packed[:, 5:], model(ids[1:, :7]).logits, rtol=BOUND, atol=BOUND)
if hasattr(model, "generate_batch"):
    prompts, settings = [[7, 8, 9], list(range(20, 60)), [5]], t.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    alone = [model.generate(torch.tensor([p]), generation_config=settings)[0, len(p):].tolist() for p in prompts]
    together = model.generate_batch(inputs=prompts, generation_config=settings)
    assert [list(o.generated_tokens) for o in together.values()] == alone, (together, alone)
    print("batch")
original = transformers.integrations.flash_attention.get_target_dtype
compat.uninstall()
assert transformers.integrations.flash_attention.get_target_dtype is not original
print("packed")
"""


def test_models_of_transformers():
    """Padding on either side, windows, softcaps, a model without a linear layer, sequences packed by their positions, a paged cache that texts share."""
    pytest.importorskip("transformers", minversion="5")
    done = forked.python("-c", BOUND + MODELS)
    assert done.returncode == 0, done.stderr
    import transformers
    batch = ["batch"] if hasattr(transformers.GenerationMixin, "generate_batch") or transformers.__version__ >= "5.24" else []
    assert done.stdout.split() == ["BertModel", "GPT2LMHeadModel", "MistralForCausalLM", "Gemma2ForCausalLM", *batch, "packed"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_transformers(order):
    """attn_implementation="flash_attention_2" (3 and 4 too) on a CPU: logits, a gradient and generated tokens as eager attention has them."""
    pytest.importorskip("transformers", minversion="5")
    done = forked.python("-c", BOUND + TRANSFORMERS, order)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused again") == 2 or "CUDA" in done.stdout, "fattn's xformers alone is no flash attention"
