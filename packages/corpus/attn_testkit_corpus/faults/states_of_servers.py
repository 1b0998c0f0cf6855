"""Parents of faults of rollback by slots (vLLM) and of snapshots for prefix caches (SGLang)."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import ForwardBatch, ForwardMode, StateInput, StateLayer

from .states import StateParent


class SlotsParent(StateParent):
    """A right backend with a slot for each node of a draft, and no commit. Prompts and decodes have the first slot."""

    capabilities = StateParent.capabilities.with_changes(
        state=replace(StateParent.declared_state(), rollback={"slots"}, padding={"skip_zero", "skip_minus_one"}),
    )

    lists: torch.Tensor
    """[bs, N] int64: slots of each request."""
    taken: torch.Tensor
    """[bs] int64: place in its list of the slot that holds the state before the step, from 0 on."""
    after_draft = False
    """True if the step continues what the last draft left: a verify, or a decode that gets the accepted counts."""

    @override
    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        return self.listed(batch)[:, 0].clamp(min=0).long()

    @override
    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return self.listed(batch)[:, 0] > 0

    def listed(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs, N or 1]: slots of each request, of whatever mode."""
        assert batch.state is not None
        return batch.state.indices.view(batch.batch_size, -1 if batch.batch_size else 1)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        assert batch.state is not None
        self.lists = self.listed(batch).clamp(min=0).long()
        self.after_draft = batch.state.num_accepted is not None
        if batch.state.num_accepted is not None:
            self.taken = self.last_accepted(batch.state.num_accepted)

    @override
    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        conv, temporal = super().pools(layer)
        if self.verifies:
            return conv, temporal
        first, width = self.first_column_of_prompts(conv.shape[-1], layer), layer.conv_width - 1
        return conv[..., first : first + width], temporal

    def first_column_of_prompts(self, columns: int, layer: StateLayer) -> int:
        """Column at which the window of a prompt or a decode begins, of ``columns``."""
        return 0

    def last_accepted(self, counts: torch.Tensor) -> torch.Tensor:
        """[bs] int64: number of the last accepted node, of ``num_accepted`` [bs]."""
        return counts.long() - 1

    def first_column(self, taken: torch.Tensor) -> torch.Tensor:
        """[bs] int64: first column of the window before the step, in the window of each request's first slot."""
        return taken

    @override
    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.after_draft:
            return super().before(layer)
        conv, temporal = super().pools(layer)
        state = temporal[self.lists.gather(1, self.taken[:, None])[:, 0]]
        columns = self.first_column(self.taken)[:, None] + torch.arange(layer.conv_width - 1, device=conv.device)
        held = conv[self.index]
        return held.gather(2, columns[:, None].expand(-1, held.shape[1], -1)), state

    @override
    def note(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        """Write the state after node ``token`` to its slot, and the window after the node to its columns."""
        conv, temporal = self.pools(layer)
        self.store(temporal, state, self.slot_of(token))
        self.store(conv[..., token : token + window.shape[-1]], window, self.index)

    def slot_of(self, token: int) -> torch.Tensor:
        """[bs] int64: slot of node ``token`` of each draft."""
        return self.lists[:, token]


class SlotsInDecodeParent(SlotsParent):
    """A right backend whose decodes without a draft get the slots and the accepted counts of the last draft, too."""

    capabilities = SlotsParent.capabilities.with_changes(
        state=replace(StateParent.declared_state(), rollback={"slots_in_decode"}, padding={"skip_zero"}),
    )


class SnapshotsParent(StateParent):
    """A right backend that copies states at the ends of chunks, in every mode."""

    capabilities = StateParent.capabilities.with_changes(
        state=replace(StateParent.declared_state(), snapshots={16}),
    )

    rows: torch.Tensor | None = None
    """[bs] int64: rows of this step that each request's copy includes; 0: it has none."""
    copies: torch.Tensor
    """[bs] int64: slots of copies."""

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        assert batch.state is not None
        self.rows = None
        if batch.state.snapshot is not None:
            self.rows, self.copies = self.copied_rows(batch.state.snapshot.rows.long()), batch.state.snapshot.slots

    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[bs] int64: rows that copies include."""
        return rows

    @override
    def copy(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        if self.rows is not None:
            for pool, behind in zip(self.pools(layer), (window, state), strict=True):
                self.copy_rows(pool, behind, self.copies, self.rows == token + 1)

    def copy_rows(self, pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, now: torch.Tensor) -> None:
        """Write rows [bs, ...] to slots, where ``now`` [bs] bool."""
        slots = torch.where(now, slots, 0)
        pool[slots] = torch.where(now.view(-1, *[1] * (rows.dim() - 1)), rows.to(pool.dtype), pool[slots])

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        super().commit(steps, state)
        if state.snapshot is None:
            return
        for layer in self.states.layers:
            for pool, scratch in zip(self.pools(layer), self.scratch(layer), strict=True):
                nodes = self.copied_nodes(state.snapshot.rows.long() - 1, steps.long())
                self.accept(pool, scratch, nodes, state.snapshot.slots)

    def copied_nodes(self, nodes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """[bs] int64: number of the node whose state is copied, or -1. ``steps``: of the last accepted ones."""
        return nodes


class SourcesParent(SnapshotsParent):
    """A right backend that reads the state of a request from a different slot than it writes, as FlashInfer can."""

    capabilities = SnapshotsParent.capabilities.with_changes(
        eager={ForwardMode.DECODE, ForwardMode.EXTEND},
        graph={ForwardMode.DECODE},
        state=replace(StateParent.declared_state(), snapshots={16}, continues={"copy", "source"}),
    )

    sources: torch.Tensor
    """[bs] int64: slot whose state and window each request continues."""

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        assert batch.state is not None
        self.sources = self.index if batch.state.sources is None else self.continued_slots(batch.state.sources)

    def continued_slots(self, sources: torch.Tensor) -> torch.Tensor:
        """[bs] int64: slots that requests continue, of ``StateInput.sources``."""
        return torch.where(sources < 0, 0, sources).long()

    @override
    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        conv, temporal = self.pools(layer)
        return self.loaded(conv, self.sources, self.begun), self.loaded(temporal, self.sources, self.begun)
