"""Class K: the host side. Code that is compiled or tuned at every step, because a number changes at every step."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode, Requires

from .catalogue import fault
from .dense import DenseBackend


@fault(
    "vLLM #27178; torchtitan #3898; general (a length among an autotuner's keys)",
    "compiles-once",
    "no length among a tuner's keys",
    modes="decode",
    executions="eager",
    modelled="a tuner of Triton takes the place of torch.compile, which compiles nothing where CUDA is emulated",
)
class TunedForEveryLength(DenseBackend):
    """The longest length is one of a tuner's keys, so that a kernel is tuned again at every step."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={ForwardMode.DECODE}, graph=(), needs={"cpu_seq_lens": True}, requires=Requires(packages=("triton>=3.6",))
    )
    longest = 0

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        assert batch.seq_lens_cpu is not None
        self.longest = int(batch.seq_lens_cpu.max())

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        from .tuned_copy import tuned_copy

        return tuned_copy(super().forward(q, k, v, layer, batch, save_kv_cache), self.longest)
