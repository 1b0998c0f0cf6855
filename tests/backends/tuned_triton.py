"""Backends whose Triton kernel is tuned at its first call, where the tuner waits for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn_testkit.contract import ForwardBatch, KernelPlan
from attn_testkit.examples.minimal import MinimalBackend


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256})], key=["dim"])
@triton.jit
def _copy(source, target, count, dim, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < count), at < count)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256})], key=["longest"])
@triton.jit
def _copy_by_length(source, target, count, longest, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < count), at < count)


class Tuned(MinimalBackend):
    """The output goes through a kernel that is tuned once for a head dim."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        made = super().run(q, kv, plan).contiguous()
        out = torch.empty_like(made)
        _copy[lambda meta: (triton.cdiv(made.numel(), meta["BLOCK"]),)](made, out, made.numel(), made.shape[-1])
        return out


class TunedAndWaiting(Tuned):
    """It waits for the device itself as well."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        out = super().run(q, kv, plan)
        int(plan.kv_lens.max())
        return out


class TunedByLength(Tuned):
    """A kernel is tuned anew for every longest request."""

    capabilities = Tuned.capabilities.with_changes(needs={"cpu_seq_lens": True}, graph=frozenset())

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        assert batch.seq_lens_cpu is not None
        self.longest = int(batch.seq_lens_cpu.max()) if batch.batch_size else 0
        super().init_forward_metadata(batch)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        made = super().run(q, kv, plan)
        out = torch.empty_like(made)
        grid = lambda meta: (triton.cdiv(made.numel(), meta["BLOCK"]),)  # noqa: E731
        _copy_by_length[grid](made, out, made.numel(), self.longest)
        return out
