"""Class R: rejected nodes that are not taken back, with slots and by a commit, and copies for prefix caches."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, StateLayer

from .catalogue import fault
from .states import StateParent
from .states_of_servers import SlotsParent, SnapshotsParent

_VERIFY = (ForwardMode.TARGET_VERIFY,)
_EXTEND = (ForwardMode.EXTEND,)


@fault(
    slug="slot-of-the-count-before",
    source="general (vLLM num_accepted_tokens)",
    modes=_VERIFY,
    checks=("reads-own-state", "matches-oracle", "finite"),
)
class SlotOfTheCountBefore(SlotsParent):
    """Accepted counts are copied after the metadata are made, so a step reads by the counts of the step before it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept = torch.ones(context.max_bs, dtype=torch.int64, device=context.device)

    @override
    def last_accepted(self, counts: torch.Tensor) -> torch.Tensor:
        before = self.kept[: len(counts)].clone()
        self.kept[: len(counts)] = counts
        return super().last_accepted(before)


@fault(
    slug="accepted-count-is-an-index",
    source="general (vLLM num_accepted_tokens)",
    modes=_VERIFY,
    checks=("reads-own-state", "matches-oracle", "finite"),
)
class AcceptedCountIsAnIndex(SlotsParent):
    """The number of accepted nodes is the place of the slot that is read: one too far."""

    @override
    def last_accepted(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.long().clamp(max=self.lists.shape[1] - 1)


@fault(
    slug="window-not-rolled-back-with-its-slot",
    source="vLLM #40738 (#39273)",
    modes=_VERIFY,
    checks=("reads-own-state", "matches-oracle", "finite", "conv-window-exact"),
)
class WindowNotRolledBackWithItsSlot(SlotsParent):
    """The state is read from the slot of the last accepted node, and the window from column 0."""

    @override
    def first_column(self, taken: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(taken)


@fault(
    slug="state-stored-in-the-slot-of-the-node-before",
    source="general",
    modes=_VERIFY,
    checks=("state-matches-oracle", "state-counts-tokens"),
    hint="rejected|behind",
)
class StateStoredInTheSlotOfTheNodeBefore(SlotsParent):
    """Slots are counted from the first draft token on, so that the next step continues a rejected one."""

    @override
    def slot_of(self, token: int) -> torch.Tensor:
        return super().slot_of(max(token - 1, 0))


@fault(
    slug="padded-drafts-write-slot-0",
    source="tokenspeed #700",
    modes=_VERIFY,
    executions=["graph"],
    checks=("writes-own-state",),
    hint="slot 0",
)
class PaddedDraftsWriteSlot0(SlotsParent):
    """The null slot of a padded draft is taken for one to write."""

    @override
    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones_like(super().stores(batch))


@fault(
    slug="window-stored-with-each-node",
    source="vLLM #56196 (a window stored in another block)",
    modes=_VERIFY,
    checks=("conv-window-exact",),
    hint="first slot",
)
class WindowStoredWithEachNode(SlotsParent):
    """The window behind a node is stored in the node's slot, too."""

    @override
    def note(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        super().note(layer, token, window, state)
        if token:
            self.store(self.pools(layer)[0][..., : window.shape[-1]], window, self.slot_of(token))


@fault(
    slug="prompts-as-long-as-a-draft-taken-for-it",
    source="vLLM #53051",
    modes=_VERIFY,
    checks=("state-matches-oracle", "conv-window-exact"),
    hint="not stored",
)
class PromptsAsLongAsADraftTakenForIt(SlotsParent):
    """A prefill of which each request has as many rows as a draft is taken for a verify: no first slot is written."""

    @override
    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        found, speculates = super().stores(batch), ForwardMode.TARGET_VERIFY in self.context.modes
        if batch.forward_mode is not ForwardMode.EXTEND or not speculates:
            return found
        uniform = set(batch.extend_seq_lens_cpu or ()) == {self.context.num_draft_tokens}
        return torch.zeros_like(found) if uniform else found


@fault(
    slug="first-column-of-slots-read-as-contiguous",
    source="vLLM #52792",
    modes=_VERIFY,
    checks=("writes-own-state", "reads-own-state", "matches-oracle"),
)
class FirstColumnOfSlotsReadAsContiguous(SlotsParent):
    """A decode takes slot i of the flat table of slots, which has several for each request, for that of request i."""

    @override
    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        table = self.states.req_to_state
        if not batch.forward_mode.is_decode() or table.dim() < 2:
            return super().slots(batch)
        bs = batch.batch_size
        return table[batch.req_pool_indices[:bs].long()].reshape(-1)[:bs].long()


@fault(
    slug="commits-a-rejected-token",
    source="general (accepted counts that include the bonus token)",
    modes=_VERIFY,
    checks=("state-matches-oracle", "state-counts-tokens", "conv-window-exact"),
    hint="rejected|behind",
)
class CommitsARejectedToken(StateParent):
    """The node behind the last accepted one is committed."""

    @override
    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(steps >= 0, steps + 1, steps).clamp(max=self.context.num_draft_tokens - 1).long()


@fault(
    slug="snapshot-never-written",
    source="sglang #30862",
    modes=(*_EXTEND, *_VERIFY, ForwardMode.DECODE),
    checks=("state-matches-oracle", "conv-window-exact"),
    hint="prefix cache",
)
class SnapshotNeverWritten(SnapshotsParent):
    """A kind of layer never fills the slots that a prefix cache keeps."""

    @override
    def copy_rows(self, pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, now: torch.Tensor) -> None:
        """Nothing."""

    @override
    def copied_nodes(self, nodes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return torch.full_like(nodes, -1)


@fault(
    slug="no-snapshots-on-an-instance-that-verifies",
    source="sglang #34043",
    modes=_VERIFY,
    checks=("state-matches-oracle", "conv-window-exact"),
    hint="prefix cache",
)
class NoSnapshotsOnAnInstanceThatVerifies(SnapshotsParent):
    """Prompts of an instance that also verifies drafts leave no copies for the prefix cache."""

    @override
    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if ForwardMode.TARGET_VERIFY in self.context.modes and not self.verifies and self.most > 1:
            return torch.zeros_like(rows)
        return rows


@fault(
    slug="snapshot-of-the-whole-prompt",
    source="sglang #29973",
    modes=_EXTEND,
    checks=("state-matches-oracle", "state-counts-tokens", "conv-window-exact"),
    hint="prefix cache",
)
class SnapshotOfTheWholePrompt(SnapshotsParent):
    """The copy has the state at the end of the prompt, not that at the last boundary of a chunk."""

    @override
    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows > 0, self.counts, rows)


@fault(
    slug="snapshot-by-the-grid-of-the-batch",
    source="sglang #33450 (#31833)",
    modes=_EXTEND,
    checks=("state-matches-oracle", "state-counts-tokens", "conv-window-exact"),
    hint="prefix cache",
)
class SnapshotByTheGridOfTheBatch(SnapshotsParent):
    """Chunks are counted from the first row of the batch, and not from that of the request."""

    @override
    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        first = self.counts.cumsum(0) - self.counts
        last = (first + self.counts) // 16 * 16 - first
        return torch.where(rows > 0, last.clamp(min=1), rows)


@fault(
    slug="snapshot-with-the-window-of-the-end",
    source="general; sglang #29973",
    modes=_EXTEND,
    checks=("conv-window-exact",),
    hint="prefix cache",
)
class SnapshotWithTheWindowOfTheEnd(SnapshotsParent):
    """The copied state is that of the boundary, and the copied window that of the last inputs."""

    @override
    def copy(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        assert self.rows is not None
        conv, temporal = self.pools(layer)
        self.copy_rows(temporal, state, self.copies, self.rows == token + 1)
        self.copy_rows(conv, window, self.copies, (self.rows > 0) & (self.counts == token + 1))


@fault(
    slug="snapshot-of-the-last-accepted-node",
    source="general (sglang mamba_steps_to_track)",
    modes=_VERIFY,
    checks=("state-matches-oracle", "state-counts-tokens", "conv-window-exact"),
    hint="prefix cache",
)
class SnapshotOfTheLastAcceptedNode(SnapshotsParent):
    """The copy has the state behind the last accepted node, and not that of the boundary before it."""

    @override
    def copied_nodes(self, nodes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(nodes >= 0, steps, nodes)
