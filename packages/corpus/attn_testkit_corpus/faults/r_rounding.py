"""Class R, rounding: decodes that round states stochastically, with random numbers that are shared or unfair."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, StateLayer

from .catalogue import fault, helper
from .states import StateParent

_BITS = 11
"""Bits of a significand of fp16."""


class RoundingParent(StateParent):
    """A right backend of Mamba2 whose decode rounds fp16 states stochastically, as FlashInfer's and SGLang's kernels of
    ``selective_state_update``: random numbers by a seed on the device, which each call advances, and an offset."""

    capabilities = StateParent.capabilities.with_changes(
        eager={ForwardMode.DECODE},
        graph={ForwardMode.DECODE},
        bounds={"max_q_rows": 1},
        heads={"families": {"mamba"}},
        state=replace(
            StateParent.declared_state(), dtypes=frozenset({"fp16"}), rounding=frozenset({"nearest", "stochastic"})
        ),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.seed = torch.ones(1, dtype=torch.int64, device=context.device)

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        self.advance()
        return super().forward(mixed, a, b, layer, batch)

    @helper
    def advance(self) -> None:
        """Advance the seed, on the device."""
        self.seed += 1

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        if self.states.rounding == "stochastic" and rows.dim() > 3:
            exponent = torch.floor(torch.log2(rows.abs().clamp(min=2.0**-14)))
            unit = torch.exp2(exponent - (_BITS - 1))
            rows = self.rounded(rows / unit) * unit
        super().store(pool, rows, index)

    @helper
    def rounded(self, units: torch.Tensor) -> torch.Tensor:
        """[bs, Hv, V, K] whole numbers of ``units``."""
        return torch.floor(units + self.numbers(units))

    @helper
    def numbers(self, units: torch.Tensor) -> torch.Tensor:
        """[bs, Hv, V, K]: random numbers in [0, 1)."""
        return self.hashed(self.offsets(units))

    @helper
    def offsets(self, units: torch.Tensor) -> torch.Tensor:
        """[bs, Hv, V, K] int64: number of each element."""
        return torch.arange(units.numel(), device=units.device).view_as(units)

    @helper
    def hashed(self, offsets: torch.Tensor) -> torch.Tensor:
        """Random numbers in [0, 1) of a seed and offsets: two rounds of a multiplicative hash of 31 bits."""
        found = offsets * 0x9E3779B1 + self.seed * 0x85EBCA6B
        for factor in (0x7FEB352D, 0x846CA68B, 0x9E3779B1):
            found = ((found & 0xFFFFFFFF) ^ ((found & 0xFFFFFFFF) >> 16)) * factor
        return ((found >> 8) & 0xFFFFFF).float() * 2.0**-24


_CHECK = "state-rounding"


@fault("general", _CHECK, "always rounded in one direction", modes="decode")
class AlwaysRoundedUp(RoundingParent):
    """Every number is rounded up: the random number is compared with the wrong sign."""

    def numbers(self, units: torch.Tensor) -> torch.Tensor:
        return torch.full_like(units, 1 - 2.0**-20)


@fault("general (half a unit added before the random bits)", _CHECK, "on average", modes="decode")
class HalfAUnitAddedTwice(RoundingParent):
    """Random numbers are in [1/4, 1), so that more numbers are rounded up than down."""

    def numbers(self, units: torch.Tensor) -> torch.Tensor:
        return 0.25 + 0.75 * super().numbers(units)


@fault("general", _CHECK, "share random numbers", modes="decode")
class OneRandomNumberForEachRow(RoundingParent):
    """The offset of the generator leaves out the column, so all elements of a row have one random number."""

    def offsets(self, units: torch.Tensor) -> torch.Tensor:
        return (super().offsets(units) // units.shape[-1]) * units.shape[-1]


@fault("general (an offset that counts the elements of one request)", _CHECK, "share random numbers", modes="decode")
class OneRandomNumberForAllRequests(RoundingParent):
    """The offset of the generator leaves out the request: all requests of a batch round with the same numbers."""

    def offsets(self, units: torch.Tensor) -> torch.Tensor:
        return super().offsets(units)[:1].expand_as(units)


@fault("general", _CHECK, "not rounded stochastically", modes="decode")
class RoundedToTheNearestNumber(RoundingParent):
    """The option is read but not passed on to the kernel: states are rounded to the nearest number."""

    def rounded(self, units: torch.Tensor) -> torch.Tensor:
        return torch.round(units)


@fault(
    "general (a seed on the host)", _CHECK, "random numbers of the step before it", modes="decode", executions="graph"
)
class SeedOfTheCapture(RoundingParent):
    """The seed is a number on the host, which a graph freezes at its capture: all replays round alike."""

    calls = 0

    def advance(self) -> None:
        self.calls += 1

    def hashed(self, offsets: torch.Tensor) -> torch.Tensor:
        return super().hashed(offsets + self.calls * 0x10001)
