"""The covering array of a mode: columns of all features, or of states, and pairs of values that exclude each other.

A pair of values is excluded if no case has both (``cases/fields.py`` and the server variants say what excludes what),
if the backend does not declare both together, or if the nearest declared case has another value. So each row is a case
without further changes, and every other pair of values occurs in ``core``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any

from cachetools import LRUCache, cached

from ..cases.case import Case
from ..cases.declared import within_declared
from ..cases.features.feature import Columns, Row, Without
from ..cases.features.handed import HANDED_FROM
from ..cases.features.head_dim import WIDER_KEYS
from ..cases.features.offload import OFFLOADED_TO
from ..cases.features.row_ranks import DEALT
from ..cases.features.server_variant import VARIANTS
from ..cases.features.table import FEATURES
from ..cases.fields import DEFAULTS
from ..cases.layers import varies
from ..cases.nearest_declared import nearest_declared
from ..cases.rows import minimal_rows
from ..cases.traits import TRAITS
from ..contract import ROW_FORMATS, Capabilities, ForwardMode
from .covering import Value, covering_array, few_rows
from .not_covered import DECLARED_VALUES
from .sizes import PAIRED, SIZES
from .state_columns import STATES

TIERS: Mapping[str, int] = {"smoke": 1, "core": 2, "full": 3}
"""Tier -> strength of the covering array."""
_COLUMNS: Sequence[Columns] = [
    *(each.values for each in FEATURES if not isinstance(each.values, Without)),
    WIDER_KEYS,
    SIZES,
]
_OF_STATES: Sequence[Columns] = [STATES, DEALT, HANDED_FROM, OFFLOADED_TO, VARIANTS, SIZES]
"""Columns for layers that keep a state: their lengths and data are others."""
_ALL = [*_COLUMNS, STATES]
_MEETS: Mapping[str, Sequence[str]] = {name: others for each in _ALL for name, others in each.meets.items()}
_FURTHER = frozenset(name for each in _ALL for name in each.further)
_INSIDE: Mapping[str, Sequence[str]] = {
    **{name: others for each in _ALL for name, others in each.inside.items()},
    "size": (*_FURTHER, *PAIRED),
}
_WITH_FURTHER = ("smoke", "core")
"""Tiers whose rows have further columns; full has the rows of core, too."""
_ASKED = [each for of in FEATURES for each in of.declared if of.name not in ("mode", "context")]
_SHAPES = ("heads", "head_dim", "dtype", "kv_dtype", "conv_width")
"""Columns with a value that may need a value of another column: head dims of MLA, blocks of a format,
convolutions of a kind of states."""
_SETTINGS = ("heads", "head_dim", "dtype", "kv_dtype", "page_size", "state_dtype", "conv_width", "padded_states",
             "fresh", "order")  # fmt: skip
"""Columns that smoke tells apart first: where two of them always occur together, one wrong setting looks like two."""
_KINDS = ("heads", "kv_dtype", "conv_width", "handed_from")
"""Columns with a value that may exclude what another value allows."""
_PLAIN_ROWS = 16
_EXCHANGED = ("heads", "head_dim", "page_size", "prefixes", "new_tokens", "tree", "width", "draft")
"""Columns whose values rows of smoke exchange, so that no case has many or wide heads, long requests and many rows."""
_WORTH_IT = 0.9
"""Part of the cost of two rows that may be left after an exchange."""
_COST_OF_A_STORED_NUMBER = 40
"""Cost of comparing a number of the pool, in products, as measured on a CPU."""
_OFF: Mapping[str, Any] = {"sinks": False, "logit_cap": 0.0, "window": -1}
"""Options that layers have in turn. They are left out if another value excludes them."""


@dataclass(frozen=True)
class Array:
    """Columns of a mode and a tier, and the rows that were made from them."""

    declared: Capabilities
    mode: ForwardMode
    tier: str

    @property
    def _made_of(self) -> Sequence[Columns]:
        return _OF_STATES if self.declared.state else _COLUMNS

    @cached_property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """Name of a column -> its values, the simplest first. Of ``further`` columns, only values that are declared by
        themselves."""
        found = {
            name: values
            for each in self._made_of
            for name, values in each.values(self.declared, self.mode, self.tier).items()
            if name not in _FURTHER or self.tier in _WITH_FURTHER
        }
        if any(not values for values in found.values()):
            return found
        base = {name: values[0] for name, values in found.items()}
        plain = [base, *({**base, name: value} for name in _KINDS for value in found.get(name, [])[1:])]
        alone = {
            name: [
                value
                for value in values
                if value == values[0] or any(self._case({**row, name: value}) for row in plain)
            ]
            if name in _FURTHER
            else values
            for name, values in found.items()
        }
        return {name: values for name, values in alone.items() if len(values) > 1 or name not in _FURTHER}

    @property
    def is_empty(self) -> bool:
        """True if no declared value can be tried."""
        return any(not values for values in self.columns.values())

    @cached_property
    def unpaired(self) -> frozenset[tuple[int, int]]:
        """Numbers of pairs of columns whose values need not occur together, because an instance has several values of
        one of them. Every pair of states occurs."""
        if self.declared.state:
            return frozenset()
        return frozenset(
            (at, later)
            for (at, one), (later, other) in combinations(enumerate(self.columns), 2)
            if (one in _INSIDE or other in _INSIDE)
            and other not in (*_INSIDE.get(one, ()), *_MEETS.get(one, ()))
            and one not in (*_INSIDE.get(other, ()), *_MEETS.get(other, ()))
        )

    @cached_property
    def excluded(self) -> frozenset[tuple[Value, Value]]:
        """Pairs of values that no row has together, as numbers of columns and of values."""
        base = {name: values[0] for name, values in self.columns.items()}
        singles = {
            (name, number): self._single(base, name, value)
            for name, values in self.columns.items()
            for number, value in enumerate(values)
        }
        answers: dict[object, bool] = {}
        names, found = list(self.columns), list[tuple[Value, Value]]()
        for (at, one), (later, other) in combinations(enumerate(names), 2):
            for i, j in product(range(len(self.columns[one])), range(len(self.columns[other]))):
                (row, kind), (second, its) = singles[one, i], singles[other, j]
                sized = "size" in (one, other) and kind | its >= {"size"}
                if not sized and (not kind or not its):
                    continue
                # A size is refused by numbers, of which values of one kind differ.
                key = (one, i, other, j) if sized else (one, kind, other, its)
                if key not in answers:
                    wanted = {one: self.columns[one][i], other: self.columns[other][j]}
                    rows = (row, second) if {**row, **wanted} != {**second, **wanted} else (row,)
                    answers[key] = any(self._has({**each, **wanted}, wanted) for each in rows)
                if not answers[key]:
                    found.append(((at, i), (later, j)))
        return frozenset(found)

    def _single(self, base: Row, name: str, value: Any) -> tuple[Row, frozenset[Any]]:
        """A row with one value and defaults otherwise, and the fields that follow from the value."""
        row: Row = {**base, name: value}
        case = self._case(row)
        if case is None and name in _SHAPES:
            row = next((each for each in self._near(row, name) if self._case(each)), row)
            case = self._case(row)
        plain = self._case(base)
        things = frozenset[Any](each for each, trait in TRAITS.items() if case and trait.has(case))
        things -= {each for each, trait in TRAITS.items() if plain and trait.has(plain)}
        if name in _KINDS or (name in _SHAPES and self.declared.kv_pool.kv_dtypes & ROW_FORMATS.keys()):
            return row, things | {(name, value.family if name == "heads" else value)}
        brings = value != self.columns[name][0] and (things or name in _FURTHER or name == "varied")
        return row, things | {name} if brings else things

    def _near(self, row: Row, name: str) -> Iterator[Row]:
        others = [each for each in _SHAPES if each != name and each in self.columns]
        for count in (1, 2):
            for some in combinations(others, count):
                for values in product(*(self.columns[each] for each in some)):
                    yield {**row, **dict(zip(some, values, strict=True))}

    def _has(self, row: Row, wanted: Row) -> bool:
        """True if the row gives a case, and the case has the ``wanted`` values."""
        case = self._case(row)
        return case is not None and all(
            getattr(case, name) == value
            for name, value in wanted.items()
            if name in DEFAULTS and name != "rope_dim" and (name not in _INSIDE or (name in _OFF and not varies(row)))
        )

    def _case(self, row: Row) -> Case | None:
        """The case of a row, if it needs no change to be declared; lengths are not checked."""
        case = self.build(row)
        if case is None:
            return None
        return case if all(each.declared(self.declared, case) for each in _ASKED) else None

    def build(self, row: Row) -> Case | None:
        """The nearest declared case of a row; None if there is none."""
        named = {name: value for name, value in row.items() if name in DEFAULTS}
        values: dict[str, Any] = {**named, "rows": minimal_rows(self.mode)}
        try:
            for each in self._made_of:
                values |= each.fields(self.declared, row, values)
        except ValueError:
            return None
        off = [name for name in _OFF if varies(row) and values.get(name, _OFF[name]) != _OFF[name]]
        for count in range(len(off) + 1):
            for some in combinations(off, count):
                try:
                    case = Case(**values | {name: _OFF[name] for name in some})
                except ValueError:
                    continue
                return nearest_declared(self.declared, case)
        return None

    def _cheaper(self, rows: list[list[int]]) -> list[list[int]]:
        """Rows of smoke in which rows exchange their heads, lengths and new rows as long as that makes their cases
        cheaper: a case with many heads, a wide head dim, large pages, long requests and many rows costs as much as ten
        others, and core has such cases. Each value stays in as many rows, and no fewer pairs of settings occur. The
        first row keeps its heads."""
        found, known = [[*row] for row in rows], dict[tuple[int, ...], float]()

        def cost(row: list[int]) -> float:
            if (*row,) not in known:
                case = self.build(self._named(row))
                known[*row,] = math.inf if case is None else _cost(case)
            return known[*row,]

        settings = [at for at, name in enumerate(self.columns) if name in _SETTINGS]

        def met() -> int:
            return len({(a, row[a], b, row[b]) for row in found for a, b in combinations(settings, 2)})

        exchanged, better = [at for at, name in enumerate(self.columns) if name in _EXCHANGED], True
        heads = [*self.columns].index("heads")
        while better:
            better = False
            for at, (one, other) in product(exchanged, combinations(found, 2)):
                if one[at] == other[at] or (at == heads and one is found[0]):
                    continue
                before, pairs = cost(one) + cost(other), met()
                one[at], other[at] = other[at], one[at]
                fits = met() >= pairs and not self._clashes(one) and not self._clashes(other)
                if fits and cost(one) + cost(other) < _WORTH_IT * before:
                    better = True
                else:
                    one[at], other[at] = other[at], one[at]
        return found

    def _named(self, row: Sequence[int]) -> dict[str, Any]:
        return {name: values[i] for (name, values), i in zip(self.columns.items(), row, strict=True)}

    def _clashes(self, row: list[int]) -> bool:
        return any(pair in self.excluded for pair in combinations(enumerate(row), 2))

    def further_cases(self) -> Iterator[Case]:
        """A case for each value of the further columns, plain otherwise."""
        base = {name: values[0] for name, values in self.columns.items()}
        for name in (each for each in self.columns if each in _FURTHER):
            for value in self.columns[name][1:]:
                row, _ = self._single(base, name, value)
                if (case := self._case(row)) is not None:
                    yield case

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the tier, by the names of the columns."""
        sizes = tuple(map(len, self.columns.values()))
        strength = min(TIERS[self.tier], len(sizes))
        unpaired = self.unpaired if self.tier == "core" else frozenset[tuple[int, int]]()
        further = frozenset(at for at, name in enumerate(self.columns) if name in _FURTHER)
        if strength > 1:
            rows = _covering(sizes, strength, self.mode.value, unpaired, self.excluded, further, _PLAIN_ROWS)
        else:
            settings = frozenset(at for at, name in enumerate(self.columns) if name in _SETTINGS)
            count = max(size for at, size in enumerate(sizes) if at not in further)
            heads = frozenset({[*self.columns].index("heads")})
            rows = self._cheaper(_few(sizes, count, self.excluded, further, settings, heads))
        return [self._named(row) for row in rows]


def _cost(case: Case) -> int:
    """Products of queries and keys of a step, and numbers of the pool, which is compared after each step."""
    new = case.new or (case.width,) * case.bs
    rows = case.draft.branches * case.draft.steps * case.bs if case.draft else sum(new)
    pages = 3 + sum(-(-(prefix + count) // case.page_size) for prefix, count in zip(case.prefixes, new, strict=True))
    stored = pages * case.page_size * case.heads.kv_heads
    products = rows * (sum(case.prefixes) + rows) * case.heads.q_heads
    return (products + _COST_OF_A_STORED_NUMBER * stored) * (case.head_dim + case.rope_dim)


@cached(LRUCache(64), condition=threading.Condition())
def array_of(declared: Capabilities, mode: ForwardMode, tier: str) -> Array:
    """The array of one mode of a backend with these capabilities."""
    return Array(declared, mode, tier)


def array_cases(declared: Capabilities, mode: ForwardMode, tier: str, seed: int) -> Iterator[Case]:
    """Cases of the array of a tier that the declared lengths allow."""
    array = array_of(declared, mode, tier)
    cases = [case for row in array.rows() if (case := array.build(row)) is not None]
    for case in _with_keys_left_out(declared, mode, cases) if tier == "smoke" else cases:
        # The seed decides lengths, too: seeded before it is asked whether it fits.
        if within_declared(declared, seeded := nearest_declared(declared, case.with_seed(seed))):
            yield seeded


def _with_keys_left_out(declared: Capabilities, mode: ForwardMode, cases: list[Case]) -> list[Case]:
    """The cases; of each declared number of selected keys one has a request of more, so that the selection shows."""
    covered = DECLARED_VALUES["selection"]
    assert not isinstance(covered.make, Without)
    for value in sorted(covered.declared(declared, mode), key=str):
        tried = [covered.tried(declared, case) for case in cases]
        spare = [at for at, own in enumerate(tried) if cases[at].selection and (own is None or tried.count(own) > 1)]
        for at in (
            sorted(spare, key=lambda at: cases[at].heads.q_heads * cases[at].head_dim) if value not in tried else ()
        ):
            changed = cases[at].with_changes(**covered.make(declared, cases[at], value))
            if within_declared(declared, changed):
                cases[at] = changed
                break
    return cases


@cached(LRUCache(256), condition=threading.Condition())
def _covering(*wanted: Any) -> list[list[int]]:
    """Rows of a covering array, which are cached: many backends do not differ in anything that changes the rows."""
    return covering_array(*wanted)


@cached(LRUCache(256), condition=threading.Condition())
def _few(*wanted: Any) -> list[list[int]]:
    return few_rows(*wanted)
