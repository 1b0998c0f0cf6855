import torch

from attn_testkit.contract import KernelPlan
from attn_testkit.examples import MinimalBackend


class EagerOnly(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(eager={"decode"}, graph=(), bounds={"max_topk": 0})


class EagerOnlyAndRightly(EagerOnly):
    capabilities = EagerOnly.capabilities.with_changes(server={"eager_without_waits": False})

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.kv_lens.max().item() > 0
        return super().run(q, kv, plan)
