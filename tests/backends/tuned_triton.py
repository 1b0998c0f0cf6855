"""Backends whose Triton kernel is tuned at its first call, where the tuner waits for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn_testkit.contract import KernelPlan
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
