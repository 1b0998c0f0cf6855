"""Class A: one instance that alternates between modes, whose eager plans share their metadata."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from attn_testkit.contract import BackendContext, DraftExtendInput, ForwardBatch, ForwardMode

from .catalogue import fault
from .parent import PlannedBackend

Key = tuple[ForwardMode, tuple[int, ...], tuple[int, ...]]
"""Key of a plan: its mode, ``seq_lens``, and new rows in modes that have them."""


class SharedPlans(PlannedBackend):
    """Offsets, lengths and splits are kept while a plan has the same lengths as the one before; all modes share
    them."""

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.mine: dict[ForwardMode, Key] = {}
        self.shared: Key | None = None

    def is_fresh(self, key: Key) -> bool:
        """True if the shared metadata are those of ``key``."""
        return self.shared == key

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        mode, spec = batch.forward_mode, batch.spec_info
        rows = spec.num_accept_tokens_cpu if isinstance(spec, DraftExtendInput) else batch.extend_seq_lens_cpu
        assert batch.seq_lens_cpu is not None
        key = mode, tuple(batch.seq_lens_cpu.tolist()), tuple(rows or ())
        if not self.is_fresh(key) or self.metadata is None:
            super().init_forward_metadata(batch)
        else:
            self.in_graph = False
            mask = self.plan_mask(batch) if mode.is_target_verify() else None
            pages, slots = self.plan_pages(batch), self.plan_slots(batch)
            self.metadata = replace(self.metadata, page_table=pages, slots=slots, mask=mask)
        self.mine[mode] = self.shared = key

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.shared = None


@fault("TensorRT-LLM #13696", "steps-independent completes", "instance that")
class PlanSkippedByOwnLengths(SharedPlans):
    """A mode skips its plan while its own lengths are the same as at its last plan, although another mode has planned
    since."""

    def is_fresh(self, key: Key) -> bool:
        return self.mine.get(key[0]) == key


@fault("TensorRT-LLM #13696", "steps-independent buckets-independent completes", "instance that", executions="graph")
class EagerPlanSkippedBehindReplays(SharedPlans):
    """Plans of replays leave their metadata to the next eager step, which uses them as if its own last plan had made
    them."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        kept = self.shared
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.shared = kept
