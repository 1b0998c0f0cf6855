"""Known-good backends of recurrent states: the parent of their faults, and every convention of servers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, State, StateLayer

from .catalogue import control
from .hybrids import HybridBySlotsParent, HybridParent
from .longer_windows import LongerWindowsParent
from .r_changing_modes import CommittedStatesKept
from .r_convolutions import ConvParent
from .r_gates import ChunksParent, RoundedProductsParent
from .r_levels import LevelsParent
from .r_moved_slots import MovedSlotsParent
from .r_rounding import RoundingParent
from .r_rwkv import RWKVChunksParent, RWKVParent
from .r_states import StatesOfViews
from .states import StateParent
from .states_in_trees import TreesParent
from .states_of_servers import SlotsInDecodeParent, SlotsParent, SnapshotsParent, SourcesParent


@control("states")
class StatesAsTheyAre(StateParent):
    """The parent of faults of recurrent states: SGLang's conventions, one token after another."""


@control()
class StatesByChunks(ChunksParent):
    """A backend that keeps the state of a chunk and the outputs of the rows of that chunk apart."""


@control()
class StatesOfRoundedProducts(RoundedProductsParent):
    """Products whose factors may be rounded to the model's dtype, as chunked kernels declare them."""


@control()
class StatesRoundedStochastically(RoundingParent):
    """fp16 states that decodes round stochastically, as FlashInfer's and SGLang's kernels of Mamba2."""


@control()
class StatesOfRWKV(RWKVParent):
    """RWKV-7 token by token, as flash-linear-attention's recurrent kernel."""


@control()
class StatesOfRWKVByChunks(RWKVChunksParent):
    """RWKV-7 with the transition of a chunk of 16 rows as one matrix for each head, as chunked kernels."""


@control()
class ConvolutionsAsTheyAre(ConvParent):
    """Short convolutions without a recurrence, row by row, as in LFM2 and in the draft model of Inkling."""


@control()
class StatesOfLevels(LevelsParent):
    """Log-linear Mamba2, in which a token carries from level to level as in a binary counter."""


@control()
class StatesOfLevelsReadWithoutAMask(LevelsParent):
    """Log-linear Mamba2 that reads all levels, since those without a state hold zeros, as ``hattention`` does."""

    def reads(self, level: int) -> torch.Tensor:
        return torch.ones_like(self.live)


@control()
class StatesKeptBehindCommits(CommittedStatesKept):
    """A copy of committed states that the next verify reads, unless another step of the request came between."""


@control()
class StatesOfColumns(StatesOfViews):
    """Slots that are the first column of a wider table, as block tables of vLLM."""


@control()
class StatesOfNarrowHeads(StateParent):
    """Heads of 16 by 16: memory then has room for more requests and heads than one axis of a grid."""

    capabilities = StateParent.capabilities.with_changes(
        heads={"families": {"gdn"}, "head_dims": {16}},
        state=replace(StateParent.declared_state(), k_dims=frozenset({16}), dtypes=frozenset({"bf16"})),
    )


@control()
class StatesOfLongerWindows(LongerWindowsParent):
    """Windows with room for a draft after the last inputs (vLLM), or with older inputs before them (Dao-AILab, FLA)."""


@control()
class StatesBySlots(SlotsParent):
    """vLLM's rollback: a slot for each node of a draft, read by the accepted count of the step before."""


@control()
class StatesBySlotsInDecodeToo(SlotsInDecodeParent):
    """vLLM's rollback of Mamba2: a decode without a draft gets the slots and the accepted count of the last draft."""


@control()
class StatesMovedBetweenSlots(MovedSlotsParent):
    """vLLM's aligned blocks: after a verify the accepted state is moved to the first slot, and the window within it."""


@control()
class StatesWithSnapshots(SnapshotsParent):
    """States copied at the ends of chunks for SGLang's prefix cache, in extend, decode and after a commit."""


@control()
class StatesOfAPrefixCache(SourcesParent):
    """States read from a slot of the prefix cache and written to another one (FlashInfer, Mamba2 of vLLM)."""


@control()
class StatesInTrees(TreesParent):
    """Drafts that branch, as in SGLang's kernels of GDN and KDA: a node continues its parent."""


@control()
class StatesByConvention(StateParent):
    """Padding with index 0 that is skipped (vLLM) or written (SGLang in eager mode), strided slots, [K, V]."""

    capabilities = StateParent.capabilities.with_changes(
        state=State(
            k_dims={32, 64}, conv_widths={2, 4}, dtypes={"bf16", "fp16"}, orders={"vk", "kv"},
            padding={"skip_zero", "write_zero"}, strided=True,
        )
    )  # fmt: skip

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        live = super().stores(batch)
        return torch.ones_like(live) if self.states.padding == "write_zero" else live

    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        conv, temporal = super().pools(layer)
        return conv, temporal.mT if self.states.pool.order == "kv" else temporal

    def scratch(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        windows, states = super().scratch(layer)
        return windows, states.mT if self.states.pool.order == "kv" else states


@control()
class StatesOfOneRequestAfterAnother(StateParent):
    """A request reads its slot when its program runs, and a device runs programs in any order, as kernels on an H200 do
    with a hundred dummy requests of slot 0: here forwards and backwards in turn."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"decode"},
        graph={"decode"},
        bounds={"max_topk": 0, "max_q_rows": 1},
        state=State(k_dims={64}, padding={"write_zero"}),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.turns: Counter[int] = Counter()
        """Number of forwards of each layer."""

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones_like(super().stores(batch))

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        whole = self.index, self.live, self.begun, self.counts
        out = mixed.new_zeros(len(mixed), layer.v_heads, layer.v_dim)
        self.turns[layer.layer_id] += 1
        order = range(batch.batch_size)
        for request in order if self.turns[layer.layer_id] % 2 else reversed(order):
            own = slice(request, request + 1)
            self.index, self.live, self.begun, self.counts = (each[own] for each in whole)
            one, two = (None if gate is None else gate[own] for gate in (a, b))
            out[own] = super().forward(mixed[own], one, two, layer, batch)
        self.index, self.live, self.begun, self.counts = whole
        return out


@control()
class StatesClearedByTheServer(StateParent):
    """has_initial_state is not read: SGLang clears the slot of a fresh request when it is assigned."""

    capabilities = StateParent.capabilities.with_changes(state=State(k_dims={64}, fresh={"zeroed"}))

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.ones(batch.batch_size, dtype=torch.bool, device=batch.seq_lens.device)


@control()
class StatesOfPaddingUnwritten(StateParent):
    """Rows of padded requests are never written, as SGLang's kernels return at an index of -1: here they hold NaN."""

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        out = super().forward(mixed, a, b, layer, batch)
        if batch.forward_mode is ForwardMode.EXTEND:
            return out
        skipped = (~self.live).repeat_interleave(len(out) // max(batch.batch_size, 1))
        return out.masked_fill(skipped[:, None, None], torch.nan)


@control("hybrid")
class HybridAsItIs(HybridParent):
    """The parent of faults of hybrid models: a wrapper around a backend of states and a planned one of attention."""


@control()
class HybridBySlots(HybridBySlotsParent):
    """A hybrid model with vLLM's rollback: prompts and decodes use the first of a request's slots."""


@control()
class StatesOfRequestsThatHaveRows(StateParent):
    """Requests without rows are left out of an extend, with their slots and flags, so their states stay."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"extend"},
        graph=(),
        bounds={"max_topk": 0, "max_q_rows": 1},
        server={"takes_requests_without_rows": True, "eager_without_waits": False},
    )

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        counts = batch.extend_seq_lens_cpu or ()
        kept = torch.tensor([i for i, rows in enumerate(counts) if rows], dtype=torch.int64).to(self.index.device)
        self.index, self.live, self.begun = self.index[kept], self.live[kept], self.begun[kept]
        self.counts = self.counts[kept]
