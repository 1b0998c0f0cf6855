"""A case: data with a readable name, which is enough to rebuild the data."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ..contract import ForwardMode
from ..contract.head_layout import HEAD_LAYOUTS
from . import derived_parameters
from .features.data_pattern import CODES as CODES
from .features.data_pattern import DATA as DATA
from .features.data_pattern import EXTREME_DATA as EXTREME_DATA
from .features.feature import Word
from .features.padding import PADDINGS as PADDINGS
from .features.slot_order import LAYOUTS as LAYOUTS
from .features.table import FEATURES
from .fields import Fields
from .fields import Heads as Heads
from .plans import context_len
from .rows import Decode, minimal_rows
from .traits import excluded

WORDS = tuple(word for feature in FEATURES for word in feature.words)
"""Every word of an id, in order."""
_WRONG = tuple(feature.wrong for feature in FEATURES if feature.wrong)
_NEEDED = (
    "rows",
    *(d.fields[0] for d in FEATURES for word in d.words if word.always and isinstance(d.fields, tuple)),
)


@dataclass(frozen=True)
class Case(Fields):
    """One test case: its fields and their name.

    Raises ``ValueError`` for values that contradict each other (``Feature.wrong``) or exclude each other
    (``Trait.excludes``).
    """

    def __post_init__(self) -> None:
        if why := excluded(self) or next(filter(None, (wrong(self) for wrong in _WRONG)), ""):
            raise ValueError(why)

    @cached_property
    def id(self) -> str:
        """The name of the case. ``parse_case`` turns it back into an equal case."""
        return "-".join([self.mode.value, *filter(None, (word.write(self) for word in WORDS))])

    @cached_property
    def context_len(self) -> int:
        """``max_context_len`` of the case's schedule, in tokens, without laying it out."""
        return context_len(self)

    @property
    def inference_mode(self) -> bool:
        """True if the case runs under ``torch.inference_mode``. The other half of the cases run under
        ``torch.no_grad``."""
        return self.derived("grad-mode") == 1

    @property
    def strided_heads(self) -> bool:
        """True if the heads of new k and v are strided, for a backend that declares ``takes_strided_heads``."""
        return (
            self.mode is ForwardMode.EXTEND and not self.heads.layout.values_in_keys and self.derived("kv-memory") == 1
        )

    @property
    def has_rows_behind(self) -> bool:
        """True if rows of NaN follow the last row in the memory of a layer's inputs. The value is the same for a whole
        instance."""
        own = self.instance_of or self
        return own.state is not None and own.derived("rows-behind") == 1

    def derived(self, name: str, n: int | None = None) -> int:
        """The value 0 .. n - 1 of a choice of ``cases/derived_parameters.py``: a hash of the case's id and the choice's
        name.

        ``n`` comes from the table. It is passed only for choices whose values the caller counts. Raises ``ValueError``
        for a name that the table lacks, a choice that does not apply to this case, and an ``n`` that is not the
        table's.
        """
        return derived_parameters.derived(self, name, n)

    def with_seed(self, seed: int) -> Case:
        """Return the case with other random data, slots and schedule."""
        return self.with_changes(seed=seed)


@lru_cache(maxsize=4)
def _readers(layouts: frozenset[str]) -> tuple[tuple[re.Pattern[str], Word], ...]:
    """Every word with its pattern. ``layouts``: the existing head layouts, from which a pattern follows."""
    return tuple((re.compile(word.current() if word.current else word.pattern), word) for word in WORDS)


@lru_cache(maxsize=1 << 14)
def parse_case(case_id: str) -> Case:
    """Rebuild a case from its id. Raises ``ValueError`` with one sentence that names what is wrong with it."""
    try:
        return _parsed(case_id)
    except ValueError as error:
        raise ValueError(f"case id {_short(case_id)!r}: {_short(str(error))}") from None


_MOST_SHOWN = 400
"""Characters of an id that an error repeats; the longest of a catalogue has about 200."""


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _parsed(case_id: str) -> Case:
    modes = sorted((mode.value for mode in ForwardMode), key=len, reverse=True)
    mode = next((m for m in modes if case_id.startswith(m + "-")), None)
    if mode is None:
        close = difflib.get_close_matches(case_id.split("-")[0], modes, n=1, cutoff=0.3)
        hint = f" (did you mean {close[0]}-...?)" if close else ""
        raise ValueError(f"it does not begin with a mode: {', '.join(sorted(modes))}{hint}")
    rows = minimal_rows(ForwardMode(mode))
    values: dict[str, Any] = {"rows": rows} if rows == Decode() else {}
    readers = _readers(frozenset(HEAD_LAYOUTS))
    for word in case_id[len(mode) + 1 :].split("-"):
        found = next(((match, kind) for pattern, kind in readers if (match := pattern.fullmatch(word))), None)
        if found is None:
            close = difflib.get_close_matches(word, [each for kind in WORDS for each in kind.spelled], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"cannot read {_short(word)!r}{hint}")
        if wrong := found[1].wrong(found[0]):
            raise ValueError(f"{_short(word)!r}: {wrong}")
        values.update(found[1].read(found[0], {"rows": rows, **values}))
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise ValueError(
            f"it lacks {', '.join(missing)}; to select by a part of ids, write a glob such as {case_id + '*'!r}"
        )
    case = Case(**values)
    if case.id != case_id:
        raise ValueError(f"it is not in its usual form; write {case.id}")
    return case
