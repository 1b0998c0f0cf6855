"""Class M: server variants of target-verify: lengths with the new tokens, and chains without a tree."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import ForwardBatch, ForwardMode, VerifyInput

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import PlannedBackend

_VERIFY = (ForwardMode.TARGET_VERIFY,)


@fault(
    slug="verify-lengths-counted-twice",
    source="general; seq_lens of verify are prefixes in sglang, and all keys in vLLM",
    modes=_VERIFY,
    checks=("reads-own-kv", "matches-oracle", "finite"),
    hint="verify_lens|longer|beyond|should",
)
class VerifyLengthsCountedTwice(PlannedBackend):
    """seq_lens count the new tokens already, as declared, and they are added once more."""

    capabilities = LEAN.with_changes(server={"verify_lens": {"all"}}, eager=_VERIFY, graph=_VERIFY, max_topk=1)


@fault(
    slug="verify-lengths-never-asked-for",
    source="general",
    modes=_VERIFY,
    checks=("reads-own-kv", "matches-oracle", "finite"),
    hint="verify_lens",
)
class VerifyLengthsNeverAskedFor(PlannedBackend):
    """Both conventions are declared, and the code knows one."""

    capabilities = LEAN.with_changes(server={"verify_lens": {"prefix", "all"}}, eager=_VERIFY, graph=_VERIFY)


@fault(
    slug="chain-without-links",
    source="general; draft methods without trees",
    modes=_VERIFY,
    checks=("completes",),
    hint="takes_bare_chains",
)
class ChainWithoutLinks(PlannedBackend):
    """The links of the tree are read even for a chain, which is declared to come without any."""

    capabilities = LEAN.with_changes(server={"takes_bare_chains": True}, eager=_VERIFY, graph=_VERIFY)

    @override
    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch.spec_info, VerifyInput)
        self.nodes = batch.spec_info.retrieve_index.shape[1]  # type: ignore[union-attr]
        return super().plan_mask(batch)


@fault(
    slug="no-mask-hides-nothing",
    source="general; causal=False where a mask is optional",
    modes=_VERIFY,
    checks=("matches-oracle",),
    hint="takes_bare_chains",
)
class NoMaskHidesNothing(PlannedBackend):
    """Rows of a chain without a mask see the rows after them."""

    capabilities = LEAN.with_changes(server={"takes_bare_chains": True}, eager=_VERIFY, graph=_VERIFY)

    @override
    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch.spec_info, VerifyInput)
        if batch.spec_info.custom_mask is not None:
            return super().plan_mask(batch)
        n = self.context.num_draft_tokens
        return self.index.new_ones(batch.batch_size, n, n, dtype=torch.bool)
