"""``Feature``: everything that is known of one thing in which cases differ.

A member without a default is required. One that has no meaning for a feature is ``Without`` and a sentence why, so that
a new feature either answers everything or fails at its import with the name of what it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Never, Protocol, TypeVar, final

from ...contract import BackendContext, Capabilities, ForwardMode
from ...glossary import Entry as Entry
from ..fields import DEFAULTS, Changes, Fields
from ..plan import Plan
from ..rows import changed_rows
from ..traits import Trait as Trait

Value = int | str | tuple[str, str]
"""A value that a backend declares, as the list of covered values names it."""
Size = tuple[float, ...]
Row = Mapping[str, Any]
"""A row of a covering array: name of a column -> value."""
T = TypeVar("T")


@final
@dataclass(frozen=True)
class Without:
    """A member that a feature does not have."""

    why: str

    def __post_init__(self) -> None:
        if not self.why:
            raise ValueError("Without needs a sentence that says why the feature has no such member")

    def __iter__(self) -> Iterator[Never]:
        return iter(())


@dataclass(frozen=True)
class Bound:
    """Bounds of a number in a word, or of each number in a list such as ``5x2.9``."""

    what: str
    least: int
    most: int
    group: int | str = 1
    """The group of the word's pattern."""
    most_listed: int = 1
    """Most numbers in a list."""
    most_together: int | None = None
    """Largest sum of a list."""
    between: str = r"\."
    """A regular expression of the text between two numbers."""

    def wrong(self, match: re.Match[str]) -> str:
        """The reason why the number is refused; empty if it is accepted, or if the word has no number."""
        text = match[self.group]
        if text is None:
            return ""
        parts = [re.fullmatch(r"(\d+)(?:x(\d+))?", part) for part in re.split(self.between, text)]
        runs = [(part[1], part[2] or "1") for part in parts if part]
        if len(runs) < len(parts):
            return f"{self.what} {text!r} is not a list of numbers; expected one such as 5x2.9, which is 5, 5, 9"
        for value, times in runs:
            # Longer texts are not made numbers of: Python refuses those of thousands of digits.
            if len(value) > _MOST_DIGITS or not self.least <= int(value) <= self.most:
                return f"{self.what} is {value[: _MOST_DIGITS + 1]}; expected {self.least} to {self.most}"
            if len(times) > _MOST_DIGITS or int(times) < 1:
                return (
                    f"{self.what}: {value}x{times[: _MOST_DIGITS + 1]} repeats {value} that often; expected 1 or more"
                )
        count = sum(int(times) for _, times in runs)
        if count > self.most_listed:
            return f"{self.what} has {count} numbers; expected at most {self.most_listed}"
        together = sum(int(value) * int(times) for value, times in runs)
        if self.most_together is not None and together > self.most_together:
            return f"{self.what} is {together} in all; expected at most {self.most_together}"
        return ""


_MOST_DIGITS = 18


@dataclass(frozen=True)
class Word:
    """One word of a case id. Raises ``ValueError`` for a word with a number but without bounds."""

    pattern: str
    """A regular expression that matches the whole word."""
    read: Callable[[re.Match[str], Changes], Changes]
    """(match, fields from the words before it, rows of the mode) -> fields."""
    write: Callable[[Fields], str]
    """Text of the word; empty for a default, which is not written."""
    spelled: tuple[str, ...] = ()
    """Spellings that an error may suggest for an unknown word."""
    always: bool = False
    """True: every id has it."""
    current: Callable[[], str] | None = None
    """The present pattern, if it follows from a table that may grow."""
    bounds: tuple[Bound, ...] = ()
    """Bounds of every number in the word."""

    def __post_init__(self) -> None:
        if "\\d" in self.pattern and not self.bounds:
            raise ValueError(f"the word {self.pattern!r} has a number; say which values it may have")

    def wrong(self, match: re.Match[str]) -> str:
        """The reason why a number of the word is refused; empty if all are accepted."""
        return next(filter(None, (bound.wrong(match) for bound in self.bounds)), "")


def listed_word(values: Sequence[str], field: str, *, always: bool = True) -> Word:
    """The word of a field whose values are their own words."""
    return Word(
        "|".join(values),
        lambda match, so_far: {field: match[0]},
        lambda case: str(getattr(case, field)),
        spelled=tuple(values),
        always=always,
    )


def flag_word(word: str, field: str) -> Word:
    """The word of a field that is True or False."""
    return Word(word, lambda match, so_far: {field: True}, lambda case: word * getattr(case, field), spelled=(word,))


@dataclass(frozen=True)
class Asked:
    """One question about the declarations of a backend."""

    words: Callable[[Fields], str]
    """Phrase for what the case needs."""
    declared: Callable[[Capabilities, Fields], bool]


@dataclass(frozen=True)
class Columns:
    """Columns of a feature in the covering array of a mode, and the fields that follow from a row of the array."""

    values: Callable[[Capabilities, ForwardMode, str], Mapping[str, Sequence[Any]]]
    """(capabilities, mode, tier) -> name of a column -> its values, the simplest first. Empty: no column."""
    fields: Callable[[Capabilities, Row, Changes], Changes] = lambda declared, row, so_far: {}
    """(capabilities, row, fields of earlier features) -> fields of this feature. A column with the name of a field is
    that field, and is not needed here."""
    inside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a column of which an instance has several values, in its layers or its replays -> columns with which it
    is still paired: the case's own batch, which runs first, occurs with all of their values."""
    meets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a column -> columns of ``inside`` with which it is still paired."""
    further: Sequence[str] = ()
    """Names of columns that keep their first value until all pairs of the other columns have occurred: options,
    layouts, server variants."""


@dataclass(frozen=True)
class Covered:
    """One kind of declared value. Some case has to try each value."""

    name: str
    words: str
    """Words before its values; for a bound, words after its number."""
    declared: Callable[[Capabilities, ForwardMode], Iterable[Value]]
    """Every value that is declared in a mode; for a bound, only the largest."""
    tried: Callable[[Capabilities, Fields], Value | None]
    """The value whose mistakes the case would show; None: no value."""
    make: Callable[[Capabilities, Fields, Any], Changes] | Without
    """(capabilities, case, value) -> changes that make the case try the value."""
    largest_first: bool = False
    """True: small cases are made for large values first, so that one of them has the most rows."""
    bound: bool = False
    """True if a larger value that is tried covers the smaller ones."""
    most: int | None = None
    """Largest value of a bound that a case is made for."""
    sampled: bool = False
    """True if a range of numbers may be declared, of which a tier tries some."""

    def covers(self, found: Value | None, value: Value) -> bool:
        """Return True if a case that tries ``found`` also tries ``value``."""
        if self.bound and isinstance(found, int) and isinstance(value, int):
            return found >= value
        return found == value

    def capped(self, value: Value) -> Value:
        """Return the value, or for a bound at most the largest value for which cases are made."""
        return min(value, self.most) if self.most is not None and isinstance(value, int) else value


def option(
    name: str,
    declared: Callable[[Capabilities, ForwardMode], bool],
    has: Callable[[Fields], bool],
    made_by: str = "The covering array has it.",
) -> Covered:
    """A feature that a backend declares or not, and that a case has or not."""
    return Covered(
        name,
        "",
        lambda capabilities, mode: (name,) if declared(capabilities, mode) else (),
        lambda declared, case: name if has(case) else None,
        Without(made_by),
    )


def no_capability(why: str) -> dict[str, Any]:
    """Members of a feature about which a backend declares nothing, with the reason."""
    return dict.fromkeys(("declared", "fit", "covered", "undeclared"), Without(why))


def nothing_simpler(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    """``Simpler.steps`` of a feature without a value between the case's and the minimal case's."""
    yield from ()


@dataclass(frozen=True)
class Simpler:
    """Steps that bring a failing case nearer to the minimal case of its mode (``minimal``) in this feature."""

    value: Callable[[Fields], str]
    """The value for people, in a word or two."""
    of: Callable[[Fields], Any]
    """The value; it equals the minimal case's value if the case does not differ in it, whatever the number of
    requests."""
    reset: Callable[[Fields, Fields], Changes]
    """(case, plain) -> changes that give the case the minimal value."""
    size: Callable[[Fields, Fields], Size] = lambda case, minimal: (0,)
    """(case, plain) -> distance from the minimal value."""
    steps: Callable[[Capabilities, Fields, Fields], Iterator[Changes]] = nothing_simpler
    """(capabilities, case, plain) -> changes that bring the value nearer to the minimal one without resetting it; the
    most valuable change comes first."""


def of_fields(*names: str, **more: Any) -> Simpler:
    """``Simpler`` of a field, and of fields that mean nothing without it."""
    values: dict[str, Any] = {
        "value": lambda case: str(getattr(case, names[0]) or "none"),
        "of": lambda case: tuple(getattr(case, each) for each in names),
        "reset": lambda case, minimal: {each: getattr(minimal, each) for each in names},
    }
    return Simpler(**values | more)


def of_flag(name: str) -> Simpler:
    """``of_fields`` of a field that is True or False."""
    return of_fields(name, value=lambda case: "yes" if getattr(case, name) else "no")


def of_number(*names: str, **more: Any) -> Simpler:
    """``of_fields`` whose first field is a number."""
    values: dict[str, Any] = {
        "value": lambda case: str(getattr(case, names[0])),
        "size": lambda case, minimal: (abs(getattr(case, names[0]) - getattr(minimal, names[0])),),
    }
    return of_fields(*names, **values | more)


def of_rows_part(name: str, **more: Any) -> Simpler:
    """``Simpler`` of a part of the rows of one mode; ``Fields`` has a property of the same name for all modes."""

    def reset(case: Fields, minimal: Fields) -> Changes:
        value = getattr(minimal, name)
        return {} if getattr(case, name) == value else changed_rows(case.rows, **{name: value})

    return of_number(name, reset=reset, **more)


Outside = Callable[[Capabilities, BackendContext], "tuple[str, BackendContext] | None"]
"""(capabilities, a context that was accepted) -> name and value of a context that asks for more than declared; None:
there is none."""


class Draws(Protocol):
    """A source of random values; it gives the simplest ones first."""

    def one_of(self, values: Sequence[T], /) -> T:
        """Draw one of ``values``; the first one is the simplest."""

    def number(self, low: int, high: int, /) -> int:
        """Draw a number from ``low`` to ``high``, both included."""

    def numbers(self, count: tuple[int, int], *ranges: tuple[int, int]) -> tuple[int, ...]:
        """Draw ``fewest`` to ``most`` numbers, each from one of ``ranges``."""


@dataclass(frozen=True)
class OnLayers:
    """Changes of the attention layers."""

    of_layers: Callable[[Fields], Sequence[Changes]]
    """Fields of ``AttentionLayer``, layer by layer."""


@dataclass(frozen=True)
class OnSteps:
    """Changes of the steps of a schedule."""

    plans: Callable[[Fields, list[Plan]], list[Plan]]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One thing in which cases differ. Raises ``TypeError`` if a member is missing, and ``ValueError`` if a field or a
    reason is missing.
    """

    name: str
    order: int
    """Place among the features, for its words in an id and for its fields when a case is made."""
    fields: tuple[str, ...] | Without
    """Fields of a case that the feature's words define."""
    words: tuple[Word, ...] | Without
    """Words of a case id."""
    describe: Callable[[Fields], Mapping[str, str]] | Without
    """Label -> phrase for people; the phrase is empty if the case does not have the feature."""
    declared: tuple[Asked, ...] | Without
    """Questions whether a backend declares the value."""
    fit: Callable[[Capabilities, Fields], Changes] | Without = Without("Cases are made of declared values.")
    """Changes that give a case the nearest declared value; empty if its value is declared."""
    values: Columns | Without
    """Columns of the covering array of a tier."""
    covered: tuple[Covered, ...] | Without
    """Declared values that a case tries, and a small case for each value that no other case tries."""
    simpler: Simpler | Without
    """Steps of a failing case toward the minimal case."""
    undeclared: tuple[Outside, ...] | Without
    """Contexts that ask for more than is declared, which a constructor has to refuse."""
    random: Callable[[Draws, Capabilities, Changes], Changes] | Without = Without("Random cases have the default.")
    """(draws, capabilities, fields so far): random fields, for fuzzing."""
    varies: Literal["instance", "layer", "step"]
    """Scope of a value: the backend instance, each of its layers, or each step."""
    apply: tuple[OnLayers | OnSteps, ...] | Without
    """Effect of the value on layers or steps. ``Without`` names the file that applies it."""
    traits: tuple[Trait, ...] = ()
    """Traits that follow from its value; a trait says which others no case has together with it."""
    wrong: Callable[[Fields], str] | None = None
    """Function that returns the reason why a case's values contradict each other, or empty text."""
    context: Callable[[Sequence[Any]], Changes] | None = None
    """Function (schedules of an instance): fields of its ``BackendContext``."""
    eager_only: Callable[[Capabilities, Fields], str] | None = None
    """Function (capabilities, case): the reason why no graph runs the case, or empty."""
    explained: tuple[Entry, ...] = ()
    """Meaning of its words and of their endings, for ``attn-testkit explain`` and the glossary."""
    option: bool = False
    """True for an option of softmax layers. Layers that keep a state have none."""

    def __post_init__(self) -> None:
        for name in self.fields:
            if name not in DEFAULTS:
                raise ValueError(f"feature {self.name!r}: no case has a field {name!r}; add it to cases/fields.py")
