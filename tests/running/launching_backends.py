"""Backends of which all, some or no case-runs launch a kernel of their own."""

from __future__ import annotations

import torch
import triton

from attn_testkit.contract import KernelPlan
from attn_testkit.examples import MinimalBackend


@triton.jit
def own_kernel(pointer):
    pass


@torch.library.custom_op("launching_backends::own_operator", mutates_args=())
def own_operator(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class LaunchesAlways(MinimalBackend):
    def launch(self, q: torch.Tensor, plan: KernelPlan) -> None:
        own_kernel[(1,)](q)

    def run(self, q, kv, plan):
        self.launch(q, plan)
        return super().run(q, kv, plan)


class LaunchesOnSmallPages(LaunchesAlways):
    """The fallback that nobody notices: for pages of 16, torch."""

    def launch(self, q: torch.Tensor, plan: KernelPlan) -> None:
        if plan.page_size == 1:
            own_kernel[(1,)](q)


class LaunchesNever(LaunchesAlways):
    def launch(self, q: torch.Tensor, plan: KernelPlan) -> None:
        pass


class CallsAnOperator(LaunchesAlways):
    def launch(self, q: torch.Tensor, plan: KernelPlan) -> None:
        if plan.page_size == 1:
            torch.ops.launching_backends.own_operator(q)
