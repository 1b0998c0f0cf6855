"""Class R: recurrent states. Slots of others, fresh requests, windows, gates, tokens that are lost."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, StateInput, StateLayer

from .catalogue import fault
from .states import StateParent

_BOTH = (ForwardMode.DECODE, ForwardMode.EXTEND)


@fault(
    slug="padded-index-clamped-to-slot-0",
    source="tokenspeed #700",
    modes=[ForwardMode.DECODE],
    executions=["graph"],
    checks=("writes-own-state",),
    hint="slot 0",
)
class PaddedIndexClampedToSlot0(StateParent):
    """An index of -1 is clamped to 0, and the padded row stores its state in slot 0."""

    @override
    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones_like(super().stores(batch))


@fault(
    slug="first-slot-taken-for-padding",
    source="weicj/vLLM-2080Ti-Definitive #93",
    modes=_BOTH,
    checks=("state-matches-oracle", "conv-window-exact"),
    hint="not stored|not applied",
    modelled="upstream slot 0 is valid and skipped; here slot 0 is reserved, and the two slots after it are skipped",
)
class FirstSlotTakenForPadding(StateParent):
    """A comparison with the sentinel of padding is wrong, and requests in the first slots are skipped."""

    @override
    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return super().stores(batch) & (self.slots(batch) > 2)


@fault(
    slug="stale-rows-of-padding",
    source="vllm-ascend #12040",
    modes=[ForwardMode.DECODE],
    executions=["graph"],
    checks=("writes-own-state", "state-matches-oracle"),
)
class StaleRowsOfPadding(StateParent):
    """The slots of padded rows come from stale rows of the request table, and are written."""

    @override
    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.req_pool_indices[: batch.batch_size].long()
        return self.states.req_to_state[rows].long()

    @override
    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return self.slots(batch) > 0


@fault(
    slug="first-chunk-of-one-token-is-a-decode",
    source="vLLM #51562, #51483",
    modes=[ForwardMode.EXTEND],
    checks=("reads-own-state", "finite"),
    hint="fresh",
)
class FirstChunkOfOneTokenIsADecode(StateParent):
    """A prompt of one token is taken for a decode, which reads the state of the slot's former owner."""

    @override
    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        begun = super().begins(batch)
        return begun if batch.extend_seq_lens is None else begun | (batch.extend_seq_lens == 1)


@fault(
    slug="initial-state-flag-ignored",
    source="tpu-inference #2431 (#2408)",
    modes=[ForwardMode.EXTEND],
    checks=("reads-own-state", "finite"),
    hint="fresh",
)
class InitialStateFlagIgnored(StateParent):
    """has_initial_state is not looked at: a fresh request begins from what its slot holds."""

    @override
    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones_like(super().begins(batch))


@fault(
    slug="resumed-request-keeps-its-state",
    source="vllm-metal #488",
    modes=[ForwardMode.EXTEND],
    checks=("reads-own-state", "finite"),
    hint="fresh",
)
class ResumedRequestKeepsItsState(StateParent):
    """The window of a fresh request is cleared, and its recurrent state is not."""

    @override
    def loaded(self, pool: torch.Tensor, index: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        if pool.dim() == 4:
            return pool[index]
        return super().loaded(pool, index, begun)


@fault(
    slug="prefix-hits-begin-from-zeros",
    source="sglang #29368 (#29330, #24955)",
    modes=[ForwardMode.EXTEND],
    checks=("matches-oracle",),
    hint="begins from zeros",
)
class PrefixHitsBeginFromZeros(StateParent):
    """has_initial_state is combined with the mask of requests that track snapshots, and none does."""

    @override
    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        begun = super().begins(batch)
        return torch.zeros_like(begun) if batch.forward_mode is ForwardMode.EXTEND else begun


@fault(
    slug="window-of-a-short-prompt-not-moved",
    source="vLLM #56196",
    modes=_BOTH,
    checks=("conv-window-exact",),
    hint="not stored|fewer tokens",
    modelled="upstream it is stored in the block that was read; here it is not stored",
)
class WindowOfAShortPromptNotMoved(StateParent):
    """Fewer new tokens than the window has columns leave the window of before the step."""

    @override
    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        if pool.dim() == 3:
            short = self.counts < pool.shape[-1]
            rows = torch.where(short[:, None, None], pool[index], rows)
        super().store(pool, rows, index)


@fault(
    slug="window-newest-first",
    source="general",
    modes=_BOTH,
    checks=("conv-window-exact",),
    hint="reverse|not that of its last inputs",
)
class WindowNewestFirst(StateParent):
    """The window is stored with the newest input first."""

    @override
    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows.flip(-1) if pool.dim() == 3 else rows, index)


@fault(
    slug="window-of-the-neighbour",
    source="general",
    modes=_BOTH,
    checks=("matches-oracle", "state-counts-tokens", "finite"),
)
class WindowOfTheNeighbour(StateParent):
    """Windows are read in the order of places, and slots are not."""

    @override
    def loaded(self, pool: torch.Tensor, index: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        if pool.dim() == 3:
            index = index.sort().values
        return super().loaded(pool, index, begun)


@fault(
    slug="place-taken-for-slot",
    source="sglang #26829 (scratch indexed by place or by slot)",
    modes=_BOTH,
    checks=("writes-own-state", "reads-own-state", "finite"),
    hint="place in the batch",
    modelled="upstream the scratch of a verify; here the pool itself",
)
class PlaceTakenForSlot(StateParent):
    """A kernel indexes the pool by the place of a request in the batch."""

    @override
    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.arange(batch.batch_size, device=batch.seq_lens.device)

    @override
    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones(batch.batch_size, dtype=torch.bool, device=batch.seq_lens.device)


@fault(
    slug="row-of-the-request-table-taken-for-slot",
    source="general",
    modes=_BOTH,
    checks=("writes-own-state", "reads-own-state", "finite"),
    hint="row of the request table",
)
class RowTakenForSlot(StateParent):
    """The row of the request table is used as the slot of the state."""

    @override
    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.req_pool_indices[: batch.batch_size].long()


@fault(
    slug="slots-of-the-capture",
    source="general; vllm-ascend #10901 (vLLM #37728)",
    modes=[ForwardMode.DECODE],
    executions=["graph"],
    checks=("state-matches-oracle", "conv-window-exact", "writes-own-state", "finite", "replay-follows-batch"),
)
class SlotsOfTheCapture(StateParent):
    """The graph reads a copy of the indices that was made at its capture."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[int, torch.Tensor] = {}

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        assert batch.state is not None
        if in_capture:
            self.kept[batch.batch_size] = batch.state.indices.clone()

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert batch.state is not None
        if torch.cuda.is_current_stream_capturing():
            kept = self.kept[batch.batch_size]
            batch = replace(batch, state=replace(batch.state, indices=kept))
        super().init_forward_metadata_in_graph(batch)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)


@fault(
    slug="state-stride-is-a-product-of-the-shape",
    source="sglang #33665; vLLM #20938",
    modes=_BOTH,
    checks=("writes-own-state", "finite", "matches-oracle"),
    modelled="upstream offsets overflow 32 bits; here slots lie apart, and the stride of a dense pool is used",
)
class StateStrideIsAProductOfTheShape(StateParent):
    """A slot is addressed by the size of a state, and not by the stride of the pool."""

    capabilities = StateParent.capabilities.with_changes(state=replace(StateParent.declared_state(), strided=True))

    @override
    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        conv, temporal = super().pools(layer)
        size = temporal[0].numel()
        dense = temporal.as_strided(temporal.shape, (size, *temporal.stride()[1:]), temporal.storage_offset())
        return conv, dense


@fault(
    slug="last-token-of-a-prompt-lost",
    source="general; vLLM #49918 (a state that is never written)",
    modes=[ForwardMode.EXTEND],
    checks=("state-counts-tokens", "state-matches-oracle", "conv-window-exact"),
    hint="not applied",
    modelled="the last token of a prompt of more than a chunk is not in the state; its output is right",
)
class LastTokenOfAPromptLost(StateParent):
    """The state that is stored is that of before the last token, where the last chunk has a single one."""

    @override
    def kept_state(self, before: torch.Tensor, after: torch.Tensor, token: int) -> torch.Tensor:
        last = (self.counts % 64 == 1) & (self.counts > 1) & (token == self.counts - 1)
        return torch.where(last[:, None, None, None], before, after)


@fault(
    slug="decay-of-another-head",
    source="general",
    modes=_BOTH,
    checks=("matches-oracle", "state-matches-oracle"),
)
class DecayOfAnotherHead(StateParent):
    """Value heads use the decay of the head before them."""

    @override
    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, beta = super().gates(a, b, layer)
        return decay.roll(1, 1), beta


@fault(
    slug="value-heads-dealt-out",
    source="general (repeat and repeat_interleave)",
    modes=_BOTH,
    checks=("matches-oracle", "state-counts-tokens", "state-matches-oracle"),
)
class ValueHeadsDealtOut(StateParent):
    """Value head h uses key head h % Hk, and not h // (Hv / Hk)."""

    @override
    def for_value_heads(self, rows: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        return rows.repeat(1, layer.v_heads // layer.k_heads, 1)


@fault(
    slug="state-rounded-to-the-model",
    source="general (a temporary in bf16)",
    modes=_BOTH,
    checks=("state-matches-oracle",),
)
class StateRoundedToTheModel(StateParent):
    """A float32 state goes through a tensor of the model's dtype before it is stored."""

    @override
    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows.to(self.context.dtype).to(rows.dtype), index)


@fault(
    slug="output-read-before-the-update",
    source="general",
    modes=_BOTH,
    checks=("matches-oracle",),
)
class OutputReadBeforeTheUpdate(StateParent):
    """A row reads the state of before its own token."""

    @override
    def read(self, before: torch.Tensor, after: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return super().read(before, before, q)


_VERIFY = (ForwardMode.TARGET_VERIFY,)


@fault(
    slug="verify-writes-the-state",
    source="general; sglang (disable_state_update)",
    modes=_VERIFY,
    checks=("verify-keeps-state",),
    hint="before anything was accepted",
)
class VerifyWritesTheState(StateParent):
    """The write-back of the recurrent kernel is not off in a verify."""

    @override
    def note(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        super().note(layer, token, window, state)
        self.store(self.pools(layer)[1], state, self.index)


@fault(
    slug="accepted-states-never-committed",
    source="sglang #26351",
    modes=_VERIFY,
    checks=("state-matches-oracle", "state-counts-tokens"),
    hint="not stored|not applied",
)
class AcceptedStatesNeverCommitted(StateParent):
    """Drafts of one kind are verified, and nothing is committed."""

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Nothing."""


@fault(
    slug="rolls-back-states-and-not-windows",
    source="mlx-swift-lm #218; vLLM #40738 (#39273)",
    modes=_VERIFY,
    checks=("conv-window-exact",),
)
class RollsBackStatesAndNotWindows(StateParent):
    """The window behind the whole draft stays, whatever was accepted."""

    @override
    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        last = torch.where(steps >= 0, scratch.shape[1] - 1, steps)
        super().accept(pool, scratch, last if pool.dim() == 3 else steps, index)


@fault(
    slug="commits-the-whole-draft",
    source="general",
    modes=_VERIFY,
    checks=("state-matches-oracle", "state-counts-tokens", "conv-window-exact"),
)
class CommitsTheWholeDraft(StateParent):
    """The state behind the last node is committed, rejected nodes included."""

    @override
    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(steps >= 0, self.context.num_draft_tokens - 1, steps.long())


@fault(
    slug="commits-a-node-too-few",
    source="Avarok atlas #604 (a step that the verify never wrote)",
    modes=_VERIFY,
    checks=("state-matches-oracle", "state-counts-tokens", "conv-window-exact"),
    modelled="upstream the step is one that was never written; here it is the one before",
)
class CommitsANodeTooFew(StateParent):
    """The number of accepted drafts is taken for the number of the node, and the root is not counted."""

    @override
    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.long() - 1


@fault(
    slug="scratch-indexed-by-slot",
    source="sglang #26829",
    modes=_VERIFY,
    checks=("state-matches-oracle", "state-counts-tokens", "conv-window-exact"),
)
class ScratchIndexedBySlot(StateParent):
    """The verify writes the scratch by place, and the commit reads it by slot."""

    @override
    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        super().accept(pool, scratch[index.clamp(min=0) % len(scratch)], steps, index)


@fault(
    slug="padded-commits-reach-slot-0",
    source="tokenspeed #700",
    modes=_VERIFY,
    executions=["graph"],
    checks=("writes-own-state",),
)
class PaddedCommitsReachSlot0(StateParent):
    """A commit takes -1 of a padded request for node 0, and its index of -1 for slot 0."""

    @override
    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        place = torch.arange(len(steps), device=steps.device)
        pool[index.clamp(min=0)] = scratch[place, steps.clamp(min=0)]


@fault(
    slug="state-never-stored",
    source="sglang #26351; vLLM #49918",
    modes=_BOTH,
    checks=("state-matches-oracle", "state-counts-tokens"),
    hint="not stored|not applied",
)
class StateNeverStored(StateParent):
    """Outputs are right and windows are stored, but states are never stored."""

    @override
    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        if pool.dim() == 3:
            super().store(pool, rows, index)
