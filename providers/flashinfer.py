#!/usr/bin/env python3
"""Provider flashinfer: FlashInfer's prefill of a batch of sequences, planned once for a problem. It has no backward pass."""

from _provider import Provider, Refusal, main, needed

WORKSPACE_BYTES = 128 << 20  # what its documentation asks for


class FlashInfer(Provider):
    name = "flashinfer"
    runs_on = ("cuda",)

    def load(self):
        self.library = needed("flashinfer", "flashinfer-python")
        return getattr(self.library, "__version__", "unknown")

    def variants(self):
        return {"cuda": ["prefill"]}

    def forward_only(self, _device):
        return "FlashInfer has no backward pass"

    def accept(self, p):
        if p["dtype"] not in ("bf16", "fp16"):
            raise Refusal("unsupported", f"FlashInfer computes bf16 and fp16, not {p['dtype']}")

    def prepare(self, request):
        torch, p = self.torch, self.problem
        answer = super().prepare(request)
        self.wrapper = self.library.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device), "NHD")
        begins = (torch.arange(p["batch"] + 1, dtype=torch.int32, device=self.device) * p[seqlen] for seqlen in ("seqlen_q", "seqlen_k"))
        self.wrapper.plan(*begins, p["nheads"], p["nheads_k"], p["headdim"], head_dim_vo=p["headdim_v"], causal=p["causal"], sm_scale=p["softmax_scale"],
                          q_data_type=self.dtype)
        return answer

    def forward(self):
        q, k, v = (self.tensors[name].flatten(0, 1) for name in ("q", "k", "v"))
        return self.wrapper.run(q, k, v).unflatten(0, (self.problem["batch"], self.problem["seqlen_q"]))


if __name__ == "__main__":
    main(FlashInfer())
