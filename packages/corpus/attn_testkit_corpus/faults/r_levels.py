"""Class R, log-linear attention: which levels of a request have a state, how they merge, and their weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import ForwardBatch, StateInput, StateLayer

from .catalogue import fault
from .states import StateParent

_CHUNK = 16


class LevelsParent(StateParent):
    """A right backend of log-linear Mamba2: a token carries from level to level, as in a binary counter."""

    capabilities = StateParent.capabilities.with_changes(
        heads={"families": {"loglinear"}, "gqa_ratios": {2}, "head_dims": {32}},
        state=replace(StateParent.declared_state(), k_dims=frozenset({32}), snapshots=frozenset()),
    )

    tokens: torch.Tensor
    """[bs] int64: tokens of each request before the step."""
    rows_before = 0
    """Rows of each request in this step before the one that is computed."""
    weights: torch.Tensor
    """[bs, Hv, n + 1] float32: weights of the row that is computed."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        lens = batch.seq_lens[: batch.batch_size].long()
        self.tokens = self.tokens_before(lens if self.verifies else lens - self.counts, lens)

    def tokens_before(self, prefixes: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """[bs] int64: tokens of each request before the step. ``lens``: ``seq_lens``."""
        return prefixes

    def counted(self) -> torch.Tensor:
        """[bs] int64: tokens of each request before the row that is computed."""
        return self.tokens + self.rows_before

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows_before = token
        return window, state

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert b is not None
        assert layer.level_weights is not None
        self.weights = torch.nn.functional.softplus(layer.level_weights * b.view(-1, *layer.level_weights.shape))
        return super().gates(a, None, layer)

    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer.D is not None
        wide = layer.v_heads * layer.v_dim
        v = rows[:, :wide].view(-1, layer.v_heads, layer.v_dim)
        k, q = (
            self.for_value_heads(part.reshape(-1, layer.k_heads, layer.k_dim), layer)
            for part in rows[:, wide:].chunk(2, -1)
        )
        decay, step = gates
        levels = [each * decay[..., None] for each in self.by_level(state, layer).unbind(1)]
        own = torch.einsum("bhv,bhk->bhvk", step * v, k)
        read = self.weight(0) * torch.einsum("bhvk,bhk->bhv", own, q) + layer.D[:, None] * v
        for level in range(self.visited(layer)):
            of_level = self.weight(level + 1) * torch.einsum("bhvk,bhk->bhv", levels[level], q)
            read = read + torch.where(self.reads(level)[:, None, None], of_level, 0.0)
        carry, busy = own, torch.ones_like(self.live)
        for level in range(self.visited(layer)):
            here, full = levels[level], busy & self.merges(level)
            ends, merges = (flag[:, None, None, None] for flag in (busy & ~full, full))
            levels[level] = torch.where(merges, self.emptied(here), torch.where(ends, here + carry, here))
            carry, busy = torch.where(merges, carry + here, carry), full
        return torch.stack(levels, 1).flatten(1, 2), read

    def by_level(self, state: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        """[bs, n, Hv, V, K] of states [bs, n * Hv, V, K]."""
        return state.view(len(state), layer.levels, layer.v_heads, *state.shape[2:])

    def visited(self, layer: StateLayer) -> int:
        """Number of levels that are read and written."""
        return layer.levels

    def weight(self, place: int) -> torch.Tensor:
        """[bs, Hv, 1]: weight of the token itself, number 0, or of level ``place - 1``."""
        return self.weights[..., place : place + 1]

    def reads(self, level: int) -> torch.Tensor:
        """[bs] bool: requests whose level is read."""
        return self.is_full(level)

    def is_full(self, level: int) -> torch.Tensor:
        """[bs] bool: requests that have a state in a level."""
        return (self.counted() >> level & 1).bool()

    def merges(self, level: int) -> torch.Tensor:
        """[bs] bool: requests whose level merges into the next one, if the carry comes to it."""
        return self.is_full(level)

    def emptied(self, here: torch.Tensor) -> torch.Tensor:
        """[bs, Hv, V, K]: state of a level that has merged."""
        return torch.zeros_like(here)


@fault("general", "state-matches-oracle matches-oracle", "levels that merge into a higher one are not cleared")
class MergedLevelsNotCleared(LevelsParent):
    """A level that merges into a higher one keeps its state, which the next carry adds again."""

    def emptied(self, here: torch.Tensor) -> torch.Tensor:
        return here


@fault("general", "state-matches-oracle matches-oracle", "a carry ends one level too early")
class CarryEndsOneLevelTooEarly(LevelsParent):
    """The carry runs over the number of ones at the end of a length minus one, so the highest of them never merges."""

    def merges(self, level: int) -> torch.Tensor:
        return self.is_full(level) & self.is_full(level + 1)


@fault("general", "matches-oracle", "weight of the level below it")
class WeightOfTheLevelBelow(LevelsParent):
    """Level l is read with weight l, as if the token itself had none."""

    def weight(self, place: int) -> torch.Tensor:
        return super().weight(max(place - 1, 0))


@fault(
    "general",
    "state-matches-oracle matches-oracle state-counts-tokens",
    "all rows use the levels of the first row",
    modes="extend target-verify",
)
class LevelsOfThePrefixForAllRows(LevelsParent):
    """Levels are computed once per step, from the prefix, and not for each row."""

    def counted(self) -> torch.Tensor:
        return self.tokens


@fault("general", "matches-oracle state-matches-oracle", "one too large", modes="decode extend")
class LevelsOfTheLengthWithTheToken(LevelsParent):
    """A decode and a prompt count from ``seq_lens``, which includes the token itself; a verify has prefixes there."""

    def tokens_before(self, prefixes: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return prefixes if self.verifies else prefixes + 1


@fault("general", "state-matches-oracle matches-oracle", modes="extend")
class LevelsOfThePaddedLength(LevelsParent):
    """Prompts are padded on the left, to the longest request of the batch, and the padding is counted."""

    def tokens_before(self, prefixes: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return prefixes + (lens.max() - lens) if len(lens) else prefixes


@fault(
    "general (the offsets of flash-linear-attention's LogLinearAttentionState)",
    "state-matches-oracle matches-oracle",
    "carry of the tokens before the step is forgotten",
    modes="extend",
)
class CarryForgottenAtChunks(LevelsParent):
    """A prompt that continues earlier chunks counts its own tokens only, so it merges as if it were fresh."""

    def tokens_before(self, prefixes: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(prefixes)


@fault(
    "flash-linear-attention #1176 (g_prev holds sums of g, which are summed again)",
    "state-matches-oracle",
    modes="extend",
    modelled="upstream the inputs of the last chunk are kept and summed again at the next step; here the states after "
    "that chunk have its decays twice",
)
class DecaysOfTheLastChunkTwice(LevelsParent):
    """The decays of the rows of a last chunk that is not whole are applied twice."""

    decays: torch.Tensor
    """[bs, Hv, 1]: decay of the rows of the present chunk."""

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if token % _CHUNK == 0:
            self.decays = torch.ones(len(state), 1, 1, device=state.device)
        return super().continued(token, window, state)

    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        after, read = super().token(rows, state, gates, layer)
        self.decays = self.decays * gates[0]
        last = (self.counts == self.rows_before + 1) & (self.counts % _CHUNK > 1)
        twice = torch.where(last[:, None, None], self.decays, 1.0).repeat(1, layer.levels, 1)
        return after * twice[..., None], read


@fault("general", "state-matches-oracle", "a carry of rejected nodes stays", modes="target-verify")
class CarryOfRejectedDraftsStays(LevelsParent):
    """A commit keeps the levels that the whole draft would fill, so a carry of a rejected node clears levels that the
    accepted nodes need."""

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        super().commit(steps, state)
        drafted = self.tokens + self.most
        for layer in self.states.layers:
            _, temporal = self.pools(layer)
            filled = (drafted[:, None] >> torch.arange(layer.levels, device=drafted.device) & 1).bool()
            rows = self.by_level(temporal[self.index], layer)
            rows = torch.where(filled[..., None, None, None], rows, 0.0).flatten(1, 2)
            keeps = (self.live & (steps >= 0))[:, None, None, None]
            temporal[self.index] = torch.where(keeps, rows, temporal[self.index])


@fault("general", "replay-follows-batch matches-oracle", "capture", modes="decode", executions="graph")
class LevelsOfTheCapture(LevelsParent):
    """The host computes how many levels the longest request has, and a graph keeps the number of its capture."""

    capabilities = LevelsParent.capabilities.with_changes(needs={"cpu_seq_lens": True})
    longest = 1

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert batch.seq_lens_cpu is not None
        self.longest = max(batch.seq_lens_cpu[: batch.batch_size].tolist(), default=0)

    def visited(self, layer: StateLayer) -> int:
        return min(self.longest.bit_length(), layer.levels)
