"""Class R: rejected nodes that are not rolled back, with slots or by a commit, and copies for prefix caches."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, StateLayer

from .catalogue import fault
from .states import StateParent
from .states_of_servers import SlotsInDecodeParent, SlotsParent, SnapshotsParent


@fault("general (vLLM num_accepted_tokens)", "reads-own-state matches-oracle finite", modes="target-verify")
class SlotOfTheCountBefore(SlotsParent):
    """Accepted counts are copied after the metadata are made, so a step uses the counts of the step before it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept = torch.ones(context.max_bs, dtype=torch.int64, device=context.device)

    def last_accepted(self, counts: torch.Tensor) -> torch.Tensor:
        before = self.kept[: len(counts)].clone()
        self.kept[: len(counts)] = counts
        return super().last_accepted(before)


@fault("general (vLLM num_accepted_tokens)", "reads-own-state matches-oracle finite", modes="target-verify")
class AcceptedCountIsAnIndex(SlotsParent):
    """The number of accepted nodes is used as the index of the slot that is read, which is one too far."""

    def last_accepted(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.long().clamp(max=self.lists.shape[1] - 1)


@fault("vLLM #40738 (#39273)", "reads-own-state matches-oracle finite conv-window-exact", modes="target-verify")
class WindowNotRolledBackWithItsSlot(SlotsParent):
    """The state is read from the slot of the last accepted node, and the window from column 0."""

    def first_column(self, taken: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(taken)


@fault("general", "state-matches-oracle state-counts-tokens", "rejected|behind", modes="target-verify")
class StateStoredInTheSlotOfTheNodeBefore(SlotsParent):
    """Slots are counted from the first draft token on, so that the next step continues a rejected one."""

    def slot_of(self, token: int) -> torch.Tensor:
        return super().slot_of(max(token - 1, 0))


@fault(
    "tokenspeed #700",
    "writes-own-state",
    "slot 0",
    modes="target-verify",
    executions="graph",
    slug="padded-drafts-write-slot-0",
)
class PaddedDraftsWriteSlot0(SlotsParent):
    """The null slot of a padded draft is written."""

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones_like(super().stores(batch))


@fault("vLLM #56196 (a window stored in another block)", "conv-window-exact", "first slot", modes="target-verify")
class WindowStoredWithEachNode(SlotsParent):
    """The window after a node is stored in the node's slot, too."""

    def note(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        super().note(layer, token, window, state)
        if token:
            self.store(self.pools(layer)[0][..., : window.shape[-1]], window, self.slot_of(token))


@fault("vLLM #53051", "state-matches-oracle conv-window-exact", "not stored", modes="target-verify")
class PromptsAsLongAsADraftTakenForIt(SlotsParent):
    """A prefill in which each request has as many rows as a draft is treated as a verify, so no first slot is
    written."""

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        found, speculates = super().stores(batch), ForwardMode.TARGET_VERIFY in self.context.modes
        if batch.forward_mode is not ForwardMode.EXTEND or not speculates:
            return found
        uniform = set(batch.extend_seq_lens_cpu or ()) == {self.context.num_draft_tokens}
        return torch.zeros_like(found) if uniform else found


@fault("vLLM #52792", "writes-own-state reads-own-state matches-oracle", modes="target-verify")
class FirstColumnOfSlotsReadAsContiguous(SlotsParent):
    """A decode uses slot i of the flat table of slots for request i, although the table has several slots per
    request."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        table = self.states.req_to_state
        if not batch.forward_mode.is_decode() or table.dim() < 2:
            return super().slots(batch)
        bs = batch.batch_size
        return table[batch.req_pool_indices[:bs].long()].reshape(-1)[:bs].long()


@fault(
    "vLLM #52942 (the accepted state stays in a later slot when a decode without a draft follows)",
    "lossless reads-own-state output-written matches-oracle finite",
    "accepted tokens were not applied",
    modes="target-verify",
)
class DecodeAfterADraftReadsTheFirstSlot(SlotsInDecodeParent):
    """A decode without a draft reads the first slot of a request, although the last draft ended in another."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.after_draft = self.verifies


@fault(
    "general (vLLM causal_conv1d_update, conv_state_token_offset)",
    "lossless reads-own-state output-written matches-oracle finite conv-window-exact",
    "window continues from after node",
    modes="target-verify",
)
class WindowOfADecodeBeginsAtColumnZero(SlotsInDecodeParent):
    """A decode after a draft reads the state of the last accepted node, but the window from column 0 on."""

    def first_column(self, taken: torch.Tensor) -> torch.Tensor:
        return taken if self.verifies else torch.zeros_like(taken)


@fault(
    "general (vLLM selective_state_update, one index for reading and writing)",
    "lossless writes-own-state state-matches-oracle state-counts-tokens",
    modes="target-verify",
)
class DecodeStoresWhereItRead(SlotsInDecodeParent):
    """A decode after a draft stores its state in the slot of the last accepted node, which it read."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        if self.after_draft and not self.verifies and rows.dim() == 4:
            index = self.lists.gather(1, self.taken[:, None])[:, 0]
        super().store(pool, rows, index)


@fault(
    "general (accepted counts that include the bonus token)",
    "state-matches-oracle state-counts-tokens conv-window-exact",
    "rejected|behind",
    modes="target-verify",
)
class CommitsARejectedToken(StateParent):
    """The node after the last accepted one is committed."""

    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(steps >= 0, steps + 1, steps).clamp(max=self.context.num_draft_tokens - 1).long()


@fault("sglang #30862", "state-matches-oracle conv-window-exact", "prefix cache", modes="extend target-verify decode")
class SnapshotNeverWritten(SnapshotsParent):
    """A kind of layer never fills the slots that a prefix cache keeps."""

    def copy_rows(self, pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, now: torch.Tensor) -> None:
        """Nothing."""

    def copied_nodes(self, nodes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return torch.full_like(nodes, -1)


@fault("sglang #34043", "state-matches-oracle conv-window-exact", "prefix cache", modes="target-verify")
class NoSnapshotsOnAnInstanceThatVerifies(SnapshotsParent):
    """Prompts of an instance that also verifies drafts leave no copies for the prefix cache."""

    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if ForwardMode.TARGET_VERIFY in self.context.modes and not self.verifies and self.most > 1:
            return torch.zeros_like(rows)
        return rows


@fault("sglang #29973", "state-matches-oracle state-counts-tokens conv-window-exact", "prefix cache", modes="extend")
class SnapshotOfTheWholePrompt(SnapshotsParent):
    """The copy holds the state at the end of the prompt, not at the last chunk boundary."""

    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows > 0, self.counts, rows)


@fault(
    "sglang #33450 (#31833)",
    "state-matches-oracle state-counts-tokens conv-window-exact",
    "prefix cache",
    modes="extend",
)
class SnapshotByTheGridOfTheBatch(SnapshotsParent):
    """Chunks are counted from the first row of the batch, not from that of the request."""

    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        first = self.counts.cumsum(0) - self.counts
        last = (first + self.counts) // 16 * 16 - first
        return torch.where(rows > 0, last.clamp(min=1), rows)


@fault("general; sglang #29973", "conv-window-exact", "prefix cache", modes="extend")
class SnapshotWithTheWindowOfTheEnd(SnapshotsParent):
    """The copied state is that of the boundary, but the copied window holds the last inputs."""

    def copy(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        assert self.rows is not None
        conv, temporal = self.pools(layer)
        self.copy_rows(temporal, state, self.copies, self.rows == token + 1)
        self.copy_rows(conv, window, self.copies, (self.rows > 0) & (self.counts == token + 1))


@fault(
    "general (sglang mamba_steps_to_track)",
    "state-matches-oracle state-counts-tokens conv-window-exact",
    "prefix cache",
    modes="target-verify",
)
class SnapshotOfTheLastAcceptedNode(SnapshotsParent):
    """The copy holds the state after the last accepted node, not that of the boundary before it."""

    def copied_nodes(self, nodes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(nodes >= 0, steps, nodes)
