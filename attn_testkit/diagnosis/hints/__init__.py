"""Named patterns of failure. A hint is given when the evidence fits it, and never invented.

Each hint is a function with ``@hint`` or ``@assumption`` in a file of this package. No list names them.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from pkgutil import iter_modules

from ...families.table import family_of
from ..rerun import TimeUp
from .evidence import Evidence
from .hint import HINTS, Hint, in_order

__all__ = ["ORDER", "Evidence", "hints"]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

ORDER: tuple[Hint, ...] = in_order(HINTS.values())
"""All hints, the strongest first."""


def hints(evidence: Evidence) -> list[str]:
    """Return the text of every hint that fits and is not silenced by an earlier one.

    A hint that needs another run after the time of the diagnosis is left out.
    """
    found: list[str] = []
    fitting: list[Hint] = []
    family = family_of(evidence.schedule.case).name
    for each in ORDER:
        if each.family != family or any(before.silences_other(each) for before in fitting):
            continue
        with contextlib.suppress(TimeUp):
            if text := each(evidence):
                found.append(text)
                fitting.append(each)
    return found
