"""Whole-model gradients and training steps beside transformers' on torch, with the configurations of test_gpt2_model."""
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_gpt2_model import CONFIGS
from test_gpt2_weights import PYTHON

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STEPS = 20

# Models, batches, gradients of the first batch in float64 of the weights as they are in each dtype, the errors of torch's own in that dtype; losses
# of steps of AdamW in float64.
THEIRS = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel
folder, configs, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def loss_of(model, ids, targets):
    return torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

def gradients(model, ids, targets):
    model.zero_grad()
    loss_of(model, ids, targets).backward()
    return {name.removeprefix("transformer."): p.grad.double().contiguous() for name, p in model.named_parameters()}

found = {}
for name, changes in configs.items():
    torch.manual_seed(1)
    config = GPT2Config(**{"vocab_size": 300, "n_positions": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1,
                           "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **changes})
    model = GPT2LMHeadModel(config)
    model.save_pretrained(f"{folder}/{name}")
    ids = torch.randint(0, 300, (steps, 3, 37), dtype=torch.int64)
    targets = torch.cat([ids[..., 1:], torch.full((steps, 3, 1), -1)], dim=-1)
    targets[:, 1, 5:9] = -1
    save_file({"ids": ids.int().contiguous(), "targets": targets.int().contiguous()}, f"{folder}/{name}.batches")
    errors = {}
    for dtype in ("float32", "bfloat16", "float16"):
        copy = GPT2LMHeadModel.from_pretrained(f"{folder}/{name}", dtype=getattr(torch, dtype)).train()
        got = gradients(copy, ids[0], targets[0])
        exact = gradients(copy.double(), ids[0], targets[0])
        save_file(exact, f"{folder}/{name}.{dtype}")
        errors[dtype] = {key: (got[key] - exact[key]).abs().max().item() for key in exact}
    model = model.double().train()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0}]
    adam = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        adam.zero_grad()
        loss = loss_of(model, ids[step], targets[step])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())
    found[name] = {"errors": errors, "losses": losses}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    if PYTHON is None:
        pytest.skip("no Python with transformers; name one in FATTN_TORCH_PYTHON")
    folder = tmp_path_factory.mktemp("theirs")
    done = subprocess.run([PYTHON, "-c", THEIRS, folder, json.dumps(CONFIGS), str(STEPS)], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.fixture(scope="module")
def train(fattn, theirs, tmp_path_factory):
    """Gradients of the first batch, and the losses of all."""
    program = pathlib.Path(fattn.path).resolve().parent.parent / "tests" / "gpt2_gradients"
    if not program.exists():
        pytest.skip("the tests were not built")
    out = tmp_path_factory.mktemp("ours") / "gradients"

    def run(name, *flags):
        folder, _ = theirs
        done = subprocess.run([program, folder / name, folder / f"{name}.batches", out, *flags], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return load_file(out), json.loads(done.stdout)

    return run


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(theirs, train, name):
    """In fp32 within 1e-4 of each gradient's scale; in 16 bits at most twice as far from float64 as torch."""
    folder, found = theirs
    for dtype, ours in DTYPES.items():
        exact = load_file(folder / f"{name}.{dtype}")
        got, _ = train(name, "--dtype", ours)
        assert got.keys() == exact.keys()
        for key, expected in exact.items():
            error, scale = np.abs(got[key].astype(np.float64) - expected).max(), np.abs(expected).max()
            assert error <= (1e-4 * scale if ours == "fp32" else 2 * found[name]["errors"][dtype][key]), (key, dtype, error, scale, found[name]["errors"][dtype][key])


@pytest.mark.parametrize("name", CONFIGS)
def test_steps(theirs, train, name):
    """Clipping, weight decay of matrices alone, moments: the losses of torch's AdamW in float64."""
    _, found = theirs
    expected = np.array(found[name]["losses"])
    assert expected[-1] != expected[0]
    for flags in ([], ["--checkpoints", "--threads", "1"]):
        _, said = train(name, "--learning-rate", "3e-3", "--clip", "1", *flags)
        assert np.abs(np.array(said["losses"]) - expected).max() <= 2e-5 * expected.max()
