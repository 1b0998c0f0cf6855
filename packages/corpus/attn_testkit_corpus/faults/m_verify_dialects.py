"""Class M: server variants of target-verify: lengths with the new tokens, and chains without a tree."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch, ForwardMode, VerifyInput

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import PlannedBackend

_VERIFY = (ForwardMode.TARGET_VERIFY,)


@fault(
    "general; seq_lens of verify are prefixes in sglang, and all keys in vLLM",
    "reads-own-kv matches-oracle finite",
    "verify_lens|longer|beyond|should",
    modes="target-verify",
)
class VerifyLengthsCountedTwice(PlannedBackend):
    """seq_lens count the new tokens already, as declared, and they are added once more."""

    capabilities = LEAN.with_changes(
        server={"verify_lens": {"all"}}, eager=_VERIFY, graph=_VERIFY, bounds={"max_topk": 1}
    )


@fault("general", "reads-own-kv matches-oracle finite", "verify_lens", modes="target-verify")
class VerifyLengthsNeverAskedFor(PlannedBackend):
    """Both conventions are declared, but the code supports only one."""

    capabilities = LEAN.with_changes(server={"verify_lens": {"prefix", "all"}}, eager=_VERIFY, graph=_VERIFY)


@fault("general; draft methods without trees", "completes", "takes_bare_chains", modes="target-verify")
class ChainWithoutLinks(PlannedBackend):
    """The links of the tree are read even for a chain, although chains without links are declared."""

    capabilities = LEAN.with_changes(server={"takes_bare_chains": True}, eager=_VERIFY, graph=_VERIFY)

    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch.spec_info, VerifyInput)
        self.nodes = batch.spec_info.retrieve_index.shape[1]  # type: ignore[union-attr]
        return super().plan_mask(batch)


@fault("general; causal=False where a mask is optional", "matches-oracle", "takes_bare_chains", modes="target-verify")
class NoMaskHidesNothing(PlannedBackend):
    """Rows of a chain without a mask see the rows after them."""

    capabilities = LEAN.with_changes(server={"takes_bare_chains": True}, eager=_VERIFY, graph=_VERIFY)

    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch.spec_info, VerifyInput)
        if batch.spec_info.custom_mask is not None:
            return super().plan_mask(batch)
        n = self.context.num_draft_tokens
        return self.index.new_ones(batch.batch_size, n, n, dtype=torch.bool)
