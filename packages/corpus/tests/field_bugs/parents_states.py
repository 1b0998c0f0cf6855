"""Healthy backends with recurrent states."""

from __future__ import annotations

from dataclasses import replace

from parents_mode import KnowsMode

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend

PLAIN = {"eager": {"decode", "extend"}, "graph": {"decode"}, "bounds": {"max_topk": 0}}

SPECULATES = {
    "eager": {"decode", "extend", "target-verify"},
    "graph": {"decode", "target-verify"},
    "bounds": {"max_topk": 1},
}


def of_states(family, modes, ratios=(1, 2, 4), **changes):
    """Capabilities of a family whose drafts are chains, without copies and without a second slot to read."""
    whole = TorchNativeStateBackend.capabilities
    few = {"trees": frozenset(), "snapshots": frozenset(), "continues": {"copy"}, "rollback": {"commit"}}
    return whole.with_changes(
        heads={"families": {family}, "gqa_ratios": set(ratios)}, state=replace(whole.state, **few | changes), **modes
    )


class TwoIndices(TorchNativeStateBackend):
    """Keeps the slots of states apart from those of windows; both are the same here."""

    in_graph = False

    def init_forward_metadata(self, batch):
        self.in_graph = False
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.in_graph = True
        super().init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode
        self.read, self.written = self.slots_of_states(batch)
        self.keeps = self.live if self.written is self.index else self.written > 0
        if not self.by_slots:
            # ``forward`` reads the states of these, and windows by ``windows``.
            self.taken = self.read

    def slots_of_states(self, batch):
        """[bs] int64 each: slots whose state is read and written."""
        return self.taken, self.index

    def pools(self, layer):
        self.current = super().pools(layer)
        return self.current

    def windows(self, held, state, columns):
        return super().windows(held if self.by_slots else self.current[0][self.index], state, columns)

    def store(self, pool, rows, index, live):
        if self.written is not self.index and rows.dim() == 4 and index is self.index and not self.by_slots:
            index, live = self.written, self.keeps
        super().store(pool, rows, index, live)


class Gdn(TwoIndices):
    """GDN, decode and extend."""

    capabilities = of_states("gdn", PLAIN)


class Gdn32(Gdn):
    """GDN with states in float32."""

    capabilities = of_states("gdn", PLAIN, dtypes={"fp32"})


class GdnPaddedByZero(Gdn):
    """GDN, padded requests have the index 0."""

    capabilities = of_states("gdn", PLAIN, padding={"skip_zero"})


class GdnCopies(TwoIndices):
    """GDN with copies for a prefix cache, and verified chains."""

    capabilities = of_states("gdn", SPECULATES, snapshots={64})


class GdnSlots(TwoIndices):
    """GDN with a slot for each node of a draft, as vLLM has it."""

    capabilities = of_states("gdn", SPECULATES, rollback={"slots"}, padding={"skip_zero"})


class Mamba(TwoIndices):
    """Mamba2, decode and extend."""

    capabilities = of_states("mamba", PLAIN)


class MambaCopies(TwoIndices):
    """Mamba2 with copies for a prefix cache."""

    capabilities = of_states("mamba", PLAIN, snapshots={16, 64})


class Kda(TwoIndices):
    """KDA, decode and extend."""

    capabilities = of_states("kda", PLAIN, (1,))


class KdaChains(TwoIndices):
    """KDA with verified chains."""

    capabilities = of_states("kda", SPECULATES, (1, 4))


class KdaSlots(TwoIndices):
    """KDA with a slot for each node of a draft."""

    capabilities = of_states("kda", SPECULATES, (1,), rollback={"slots"}, padding={"skip_zero"})


class Moded(KnowsMode, TorchNativeStateBackend):
    """Healthy: knows the mode of its step."""
