"""The cases of a tier with those of its arrays as they are made: what is tested of the others holds of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from unittest import mock

from attn_testkit.cases.case import Case
from attn_testkit.catalogue import tiers
from attn_testkit.contract import Capabilities, ForwardMode


def _as_they_are(declared: Capabilities, cases: Sequence[Case], **_: bool) -> Sequence[Case]:
    return cases


def without_arrays(declared: Capabilities, mode: ForwardMode, tier: str, seed: int = 0) -> tuple[Case, ...]:
    """As ``as_made``, and none of the cases that ``catalogue/pair_array.py`` makes."""
    with (
        mock.patch.object(tiers, "randomly_combined", return_value=()),
        mock.patch.object(tiers, "randomly_varied", _as_they_are),
    ):
        cases: tuple[Case, ...] = tiers.generate.__wrapped__(declared, mode, tier, seed)
    return cases


@lru_cache(maxsize=64)
def as_made(declared: Capabilities, mode: ForwardMode, tier: str, seed: int = 0) -> tuple[Case, ...]:
    """As ``tiers.generate``, before ``catalogue/randomly_combined.py`` gives cases more."""
    with (
        mock.patch.object(tiers, "randomly_combined", _as_they_are),
        mock.patch.object(tiers, "randomly_varied", _as_they_are),
    ):
        cases: tuple[Case, ...] = tiers.generate.__wrapped__(declared, mode, tier, seed)
    return cases
