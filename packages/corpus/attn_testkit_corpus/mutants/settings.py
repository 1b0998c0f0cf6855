"""Settings and result of a hunt: plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .journal import Verdict
from .operators import Mutant


@dataclass(frozen=True)
class Settings:
    """Settings of a hunt."""

    backend: str
    """A registered name or ``module:Class``."""
    modules: tuple[str, ...] = ()
    """Modules that are mutated in addition to that of the class."""
    modes: tuple[str, ...] = ()
    tier: str = "core"
    """Tier: ``smoke``, or ``core``, which the survivors of smoke go through."""
    most: int | None = None
    """Case-runs of core that are used, the most valuable first; None: all."""
    device: str = "auto"
    sample: int | None = None
    """Number of mutants, drawn at random; None: all."""
    seed: int = 0
    """Seed of the draw."""
    jobs: int = 1
    minutes: float | None = None
    """Minutes after which no mutant is begun."""
    journal: Path | None = None
    equivalents: Path | None = None
    """File that names mutants without a visible effect."""


@dataclass(frozen=True)
class Hunt:
    """Result of a hunt."""

    settings: Settings
    sources: dict[str, bytes]
    """Module -> its text."""
    all_mutants: int
    """Number of all mutants; ``mutants`` may be a sample."""
    mutants: tuple[Mutant, ...]
    verdicts: dict[str, Verdict]
    """Id of a mutant -> its verdict, for mutants that were evaluated in time."""
    reasons: dict[str, str]
    """Id of a mutant -> written reason why it is equivalent."""
    runs: int
    """Case-runs that a survivor may have seen."""
    device: str
    seconds: float


See = Callable[[str, int, int], None]
"""Called with the name of the last one done, the number done, and the number of all."""
