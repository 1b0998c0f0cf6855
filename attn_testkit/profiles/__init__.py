"""Frozen profiles: lists of cases that mean the same in a year. They ship as ``profiles/RELEASE/NAME.toml``.

``python ci/make_profile.py`` writes the files. A profile is a ``draft`` until its release; then a test keeps its cases,
and the digests of their schedules and data, as they are. This package imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..registry import UsageError, unknown
from ..results.rules import VERSION

__all__ = ["DRAFT", "FOLDER", "RECIPE", "RELEASED", "Profile", "profile_names", "read_profile", "written"]

FOLDER = Path(__file__).parent
DRAFT, RELEASED = "draft", "released"
RECIPE = 1
"""Version of the recipe of expected results: float64 attention, and limits that are computed from the formats. It grows
if a right backend could newly fail, or a wrong one newly pass, with the same data."""


@dataclass(frozen=True)
class Profile:
    """A list of cases, with the digests of what they are made of."""

    name: str
    """``2026.12/decode``."""
    status: str
    """``draft`` or ``released``."""
    contract: str
    """Version of the contract that the cases test."""
    recipe: int
    """``RECIPE`` at the time."""
    cases: Mapping[str, tuple[str, str]]
    """Case id -> digests of its schedule and of its data (``steps/digest.py``)."""

    @property
    def digest(self) -> str:
        """Digest of everything but the status."""
        parts = [self.name, self.contract, self.recipe, sorted(self.cases.items())]
        return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def profile_names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of all profiles, in order."""
    found = (path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.toml"))
    return tuple(sorted(found))


@lru_cache
def read_profile(name: str, folder: Path = FOLDER) -> Profile:
    """Read a profile. Raises ``UsageError`` for a name that no profile has, and for a recipe of a newer kit."""
    if name not in profile_names(folder):
        raise UsageError(unknown("profile", name, profile_names(folder)))
    data = tomllib.loads((folder / f"{name}.toml").read_text("utf-8"))
    cases = {case: tuple(text.split(" ", 1)) for case, text in data["cases"].items()}
    if data["recipe"] != RECIPE:
        raise UsageError(
            f"profile {name} is for recipe {data['recipe']} of expected results, and this kit has recipe {RECIPE}; "
            "install the version of the kit that released the profile"
        )
    return Profile(name, data["status"], data["contract"], data["recipe"], cases)


def written(cases: Mapping[str, tuple[str, str]], status: str = DRAFT) -> str:
    """The text of a profile's file."""
    lines = [f'status = "{status}"', f'contract = "{VERSION}"', f"recipe = {RECIPE}", "", "[cases]"]
    return "\n".join([*lines, *(f'"{case}" = "{" ".join(pair)}"' for case, pair in sorted(cases.items()))]) + "\n"
