#!/usr/bin/env python3
"""Provider torch-standard: attention as the textbook has it, written in PyTorch: a product, a mask, a softmax, a product; gradients by autograd."""

from _provider import Provider, Refusal, main, needed, refuse_scores


class Standard(Provider):
    name = "torch-standard"
    heads_first = True

    def load(self):
        self.torch = needed("torch", "PyTorch")
        return self.torch.__version__

    def variants(self):
        return {"cpu": ["unfused"], "cuda": ["unfused"]}

    def accept(self, p):
        if p["causal"] and p["seqlen_q"] > p["seqlen_k"]:
            raise Refusal("unsupported", "softmax gives NaN for rows that see no key (causal, seqlen_q > seqlen_k)")
        self.hidden = None
        if p["device"] == "cpu":
            size = self.torch.empty((), dtype=self.dtype).element_size()
            refuse_scores(3 * p["batch"] * p["nheads"] * p["seqlen_q"] * p["seqlen_k"] * size, p)  # scores, masked scores and weights; or gradients of two

    def prepare(self, request):
        torch, p = self.torch, self.problem
        answer = super().prepare(request)
        if p["causal"]:
            seen = torch.ones(p["seqlen_q"], p["seqlen_k"], dtype=torch.bool, device=self.device).tril(p["seqlen_k"] - p["seqlen_q"])
            self.hidden = ~seen
        return answer

    def forward(self):
        p, t = self.problem, self.tensors
        k, v = t["k"], t["v"]
        if p["nheads"] != p["nheads_k"]:
            k, v = (x.repeat_interleave(p["nheads"] // p["nheads_k"], dim=1) for x in (k, v))
        scores = (t["q"] @ k.transpose(-2, -1)) * p["softmax_scale"]
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, float("-inf"))
        return scores.softmax(-1) @ v


if __name__ == "__main__":
    main(Standard())
