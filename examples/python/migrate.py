"""One attention layer, before and after: torch's scaled_dot_product_attention, the same by fattn without a change of the code, and fattn.attention called by
name. docs/MIGRATION.md has the other libraries.

    python examples/python/migrate.py
"""

import torch
import torch.nn.functional as F

import fattn
import fattn.sdpa


class Layer(torch.nn.Module):
    """(batch, seqlen, width), as many write it: heads before seqlen."""

    def __init__(self, width: int, nheads: int):
        super().__init__()
        self.nheads = nheads
        self.qkv = torch.nn.Linear(width, 3 * width)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, width = x.shape
        q, k, v = self.qkv(x).view(batch, seqlen, 3, self.nheads, -1).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).reshape(batch, seqlen, width)


class MigratedLayer(Layer):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fattn.attention(q, k, v, causal=True, layout="bhsd")


def main() -> None:
    torch.manual_seed(0)
    before, after = Layer(64, 4), MigratedLayer(64, 4)
    after.load_state_dict(before.state_dict())
    x = torch.randn(2, 50, 64)
    wanted = before(x)

    fattn.sdpa.activate()  # no change of the code: torch's function is computed by fattn
    taken_over = before(x)
    fattn.sdpa.deactivate()

    for name, got in (("fattn.sdpa.activate()", taken_over), ("fattn.attention", after(x))):
        difference = (got - wanted).abs().max().item()
        print(f"{name}: the largest difference from torch is {difference:.2g}")
        if not difference <= 1e-5:
            raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
