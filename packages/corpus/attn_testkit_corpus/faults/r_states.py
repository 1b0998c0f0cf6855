"""Class R: recurrent states: slots of others, fresh requests, windows, gates, lost tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, StateInput, StateLayer

from .catalogue import fault
from .s_wider_buffers import as_contiguous
from .states import StateParent


@fault(
    "tokenspeed #700",
    "writes-own-state",
    "slot 0",
    modes="decode",
    executions="graph",
    slug="padded-index-clamped-to-slot-0",
)
class PaddedIndexClampedToSlot0(StateParent):
    """An index of -1 is clamped to 0, so the padded row stores its state in slot 0."""

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones_like(super().stores(batch))


@fault(
    "weicj/vLLM-2080Ti-Definitive #93",
    "state-matches-oracle conv-window-exact",
    "not stored|not applied",
    modes="decode extend",
    modelled="upstream slot 0 is valid and skipped; here slot 0 is reserved, and the two slots after it are skipped",
)
class FirstSlotTakenForPadding(StateParent):
    """A comparison with the sentinel of padding is wrong, and requests in the first slots are skipped."""

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return super().stores(batch) & (self.slots(batch) > 2)


@fault("vllm-ascend #12040", "writes-own-state state-matches-oracle", modes="decode", executions="graph")
class StaleRowsOfPadding(StateParent):
    """The slots of padded rows come from stale rows of the request table, and are written."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.req_pool_indices[: batch.batch_size].long()
        return self.states.req_to_state[rows].long()

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return self.slots(batch) > 0


@fault("vLLM #51562, #51483", "reads-own-state finite", "fresh", modes="extend")
class FirstChunkOfOneTokenIsADecode(StateParent):
    """A prompt of one token is treated as a decode, which reads the state of the slot's former owner."""

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        begun = super().begins(batch)
        return begun if batch.extend_seq_lens is None else begun | (batch.extend_seq_lens == 1)


@fault("tpu-inference #2431 (#2408)", "reads-own-state finite", "fresh", modes="extend")
class InitialStateFlagIgnored(StateParent):
    """has_initial_state is not read, so a fresh request begins from old contents of its slot."""

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones_like(super().begins(batch))


@fault("vllm-metal #488", "reads-own-state finite", "fresh", modes="extend")
class ResumedRequestKeepsItsState(StateParent):
    """The window of a fresh request is cleared, but its recurrent state is not."""

    def loaded(self, pool: torch.Tensor, index: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        if pool.dim() == 4:
            return pool[index]
        return super().loaded(pool, index, begun)


@fault("sglang #29368 (#29330, #24955)", "matches-oracle", "begins from zeros", modes="extend")
class PrefixHitsBeginFromZeros(StateParent):
    """has_initial_state is combined with the mask of requests that track snapshots, and none does."""

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        begun = super().begins(batch)
        return torch.zeros_like(begun) if batch.forward_mode is ForwardMode.EXTEND else begun


@fault(
    "vLLM #56196",
    "conv-window-exact",
    "not stored|fewer tokens",
    modes="decode extend",
    modelled="upstream it is stored in the block that was read; here it is not stored",
)
class WindowOfAShortPromptNotMoved(StateParent):
    """The window is not updated if there are fewer new tokens than the window has columns."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        if pool.dim() == 3:
            short = self.counts < pool.shape[-1]
            rows = torch.where(short[:, None, None], pool[index], rows)
        super().store(pool, rows, index)


@fault("general", "conv-window-exact", "reverse|not that of its last inputs", modes="decode extend")
class WindowNewestFirst(StateParent):
    """The window is stored with the newest input first."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows.flip(-1) if pool.dim() == 3 else rows, index)


@fault("general", "matches-oracle state-counts-tokens finite", modes="decode extend")
class WindowOfTheNeighbour(StateParent):
    """Windows are read by batch position, not by slot."""

    def loaded(self, pool: torch.Tensor, index: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        if pool.dim() == 3:
            index = index.sort().values
        return super().loaded(pool, index, begun)


@fault(
    "sglang #26829 (scratch indexed by place or by slot)",
    "writes-own-state reads-own-state finite",
    "place in the batch",
    modes="decode extend",
    modelled="upstream the scratch of a verify; here the pool itself",
)
class PlaceTakenForSlot(StateParent):
    """A kernel indexes the pool by the position of a request in the batch."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.arange(batch.batch_size, device=batch.seq_lens.device)

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones(batch.batch_size, dtype=torch.bool, device=batch.seq_lens.device)


@fault(
    "general",
    "writes-own-state reads-own-state finite",
    "row of the request table",
    modes="decode extend",
    slug="row-of-the-request-table-taken-for-slot",
)
class RowTakenForSlot(StateParent):
    """The row of the request table is used as the slot of the state."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.req_pool_indices[: batch.batch_size].long()


@fault(
    "general; vllm-ascend #10901 (vLLM #37728)",
    "state-matches-oracle conv-window-exact writes-own-state finite replay-follows-batch",
    modes="decode",
    executions="graph",
)
class SlotsOfTheCapture(StateParent):
    """The graph reads a copy of the indices that was made at its capture."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[int, torch.Tensor] = {}

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        assert batch.state is not None
        if in_capture:
            self.kept[batch.batch_size] = batch.state.indices.clone()

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert batch.state is not None
        if torch.cuda.is_current_stream_capturing():
            kept = self.kept[batch.batch_size]
            batch = replace(batch, state=replace(batch.state, indices=kept))
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)


@fault(
    "sglang #33665; vLLM #20938",
    "writes-own-state finite matches-oracle",
    modes="decode extend",
    modelled="upstream offsets overflow 32 bits; here there are gaps between slots, and the stride of a dense pool is "
    "used",
)
class StateStrideIsAProductOfTheShape(StateParent):
    """A slot is addressed by the size of a state, not by the stride of the pool."""

    capabilities = StateParent.capabilities.with_changes(state=replace(StateParent.declared_state(), strided=True))

    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        conv, temporal = super().pools(layer)
        size = temporal[0].numel()
        dense = temporal.as_strided(temporal.shape, (size, *temporal.stride()[1:]), temporal.storage_offset())
        return conv, dense


@fault(
    "general; vLLM #49918 (a state that is never written)",
    "state-counts-tokens state-matches-oracle conv-window-exact",
    "not applied",
    modes="extend",
    modelled="the last token of a prompt of more than a chunk is not in the state; its output is right",
)
class LastTokenOfAPromptLost(StateParent):
    """The stored state is the one before the last token if the last chunk has only this token."""

    def kept_state(self, before: torch.Tensor, after: torch.Tensor, token: int) -> torch.Tensor:
        last = (self.counts % 64 == 1) & (self.counts > 1) & (token == self.counts - 1)
        return torch.where(last[:, None, None, None], before, after)


@fault("general", "matches-oracle state-matches-oracle", modes="decode extend")
class DecayOfAnotherHead(StateParent):
    """Value heads use the decay of the head before them."""

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, beta = super().gates(a, b, layer)
        return decay.roll(1, 1), beta


@fault(
    "general (repeat and repeat_interleave)",
    "matches-oracle state-counts-tokens state-matches-oracle",
    modes="decode extend",
)
class ValueHeadsDealtOut(StateParent):
    """Value head h uses key head h % Hk, not h // (Hv / Hk)."""

    def for_value_heads(self, rows: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        return rows.repeat(1, layer.v_heads // layer.k_heads, 1)


@fault("general (a temporary in bf16)", "state-matches-oracle", modes="decode extend")
class StateRoundedToTheModel(StateParent):
    """A float32 state is converted to the model's dtype before it is stored."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows.to(self.context.dtype).to(rows.dtype), index)


@fault("general", "matches-oracle", modes="decode extend")
class OutputReadBeforeTheUpdate(StateParent):
    """A row reads the state before its own token."""

    def read(self, before: torch.Tensor, after: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return super().read(before, before, q)


@fault(
    "general; sglang (disable_state_update)",
    "verify-keeps-state",
    "before anything was accepted",
    modes="target-verify",
)
class VerifyWritesTheState(StateParent):
    """The write-back of the recurrent kernel is not switched off in a verify."""

    def note(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        super().note(layer, token, window, state)
        self.store(self.pools(layer)[1], state, self.index)


@fault("sglang #26351", "state-matches-oracle state-counts-tokens", "not stored|not applied", modes="target-verify")
class AcceptedStatesNeverCommitted(StateParent):
    """Drafts of one kind are verified, and nothing is committed."""

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Nothing."""


@fault("mlx-swift-lm #218; vLLM #40738 (#39273)", "conv-window-exact", modes="target-verify")
class RollsBackStatesAndNotWindows(StateParent):
    """The window after the whole draft is kept, whatever was accepted."""

    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        last = torch.where(steps >= 0, scratch.shape[1] - 1, steps)
        super().accept(pool, scratch, last if pool.dim() == 3 else steps, index)


@fault("general", "state-matches-oracle state-counts-tokens conv-window-exact", modes="target-verify")
class CommitsTheWholeDraft(StateParent):
    """The state after the last node is committed, rejected nodes included."""

    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(steps >= 0, self.context.num_draft_tokens - 1, steps.long())


@fault(
    "Avarok atlas #604 (a step that the verify never wrote)",
    "state-matches-oracle state-counts-tokens conv-window-exact",
    modes="target-verify",
    modelled="upstream the step is one that was never written; here it is the one before",
)
class CommitsANodeTooFew(StateParent):
    """The number of accepted drafts is used as the index of the node, without the root."""

    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.long() - 1


@fault("sglang #26829", "state-matches-oracle state-counts-tokens conv-window-exact", modes="target-verify")
class ScratchIndexedBySlot(StateParent):
    """The verify writes the scratch by batch position, but the commit reads it by slot."""

    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        super().accept(pool, scratch[index.clamp(min=0) % len(scratch)], steps, index)


@fault(
    "tokenspeed #700", "writes-own-state", modes="target-verify", executions="graph", slug="padded-commits-reach-slot-0"
)
class PaddedCommitsReachSlot0(StateParent):
    """A commit reads -1 of a padded request as node 0, and its index of -1 as slot 0."""

    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        place = torch.arange(len(steps), device=steps.device)
        pool[index.clamp(min=0)] = scratch[place, steps.clamp(min=0)]


@fault(
    "sglang #26351; vLLM #49918",
    "state-matches-oracle state-counts-tokens",
    "not stored|not applied",
    modes="decode extend",
)
class StateNeverStored(StateParent):
    """Outputs are right and windows are stored, but states are never stored."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        if pool.dim() == 3:
            super().store(pool, rows, index)


class StatesOfViews(StateParent):
    """The parent on slots that are the first column of a wider table."""

    capabilities = StateParent.capabilities.with_changes(server={"takes_column_views": True})


@fault(
    "general (the first column of a block table, read without its stride)",
    "writes-own-state reads-own-state finite",
    modes="decode extend",
)
class SlotsReadWithoutTheirStride(StatesOfViews):
    """Slot i is element i of the memory in which the indices begin, although they are a column of a table."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        assert batch.state is not None
        indices = as_contiguous(batch.state.indices)
        return torch.where(indices < 0, 0, indices).long()
