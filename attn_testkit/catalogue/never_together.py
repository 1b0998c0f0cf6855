"""Declared features that no case has, or no case has together, and the reason. Features are declared options and server
variants. ``excludes`` of their traits says why two have no case together. A pair without a reason and without a case is
a gap in the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ..cases.case import Case
from ..cases.features.server.table import SERVER_VARIANTS, all_fit
from ..cases.features.server.variant import ServerVariant
from ..cases.layers import PERIOD
from ..cases.traits import TRAITS, exclusions
from ..contract import Capabilities, ForwardMode
from .not_covered import DECLARED_VALUES

_OPTIONS = "only the kit makes selections without a key or with -1 before keys; an indexer makes neither"
_BY_AN_INDEXER = (
    "layers that use another layer's selection",
    "forwards of a draft that use the selection of the first",
)
_RULES = (
    *exclusions(),
    *(
        (name, other, _OPTIONS)
        for name in ("-1 before selected keys", "rows without a key")
        for other in _BY_AN_INDEXER
    ),
)
_ALONE = "it has only small cases of its own, because such a case costs as much as several others"
_FROM = "server."
_GROUPS = "KV groups"


@dataclass(frozen=True)
class NeverTogether:
    """Features that no case has together; a single one is in no case at all."""

    features: tuple[str, ...]
    why: str
    """The reason why no case has them; empty for a gap."""


def never_together(declared: Capabilities, mode: ForwardMode, cases: Sequence[Case]) -> list[NeverTogether]:
    """Every declared feature, and every pair of them, that none of ``cases`` has in ``mode``."""
    own = [case for case in cases if case.mode is mode]
    if not own:
        return []
    tests = features(declared, mode, next((case for case in own if not case.variants), own[0]))
    has = {name: frozenset(case.id for case in own if test(case)) for name, test in tests.items()}
    of_mode = _common(own)
    brings = {name: of_mode | {name} | _common([case for case in own if case.id in ids]) for name, ids in has.items()}
    found = [NeverTogether((name,), _why(brings[name], of_mode)) for name, ids in has.items() if not ids]
    tried = [name for name, ids in has.items() if ids]
    return found + [
        NeverTogether((one, other), _alone(one, other) or _why(brings[one], brings[other]))
        for one, other in combinations(tried, 2)
        if not has[one] & has[other]
    ]


def describe_never_together(
    declared: Capabilities, modes: Sequence[ForwardMode], cases: Sequence[Case]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Features that no case has, and features that no case has together: a phrase for each, with the modes if it does
    not hold in all, and with the reason if there is one."""
    found: dict[tuple[tuple[str, ...], str], list[ForwardMode]] = {}
    for mode in modes:
        for gap in never_together(declared, mode, cases):
            found.setdefault((gap.features, gap.why), []).append(mode)
    single, several = list[str](), list[str]()
    for (names, why), where in found.items():
        phrase = " with ".join(names) + (f" ({', '.join(where)})" if len(where) < len(modes) else "")
        (single if len(names) == 1 else several).append(f"{phrase}: {why}" if why else phrase)
    return tuple(single), tuple(several)


def meeting_cases(declared: Capabilities, mode: ForwardMode, cases: Sequence[Case]) -> Iterator[Case]:
    """Cases of server variants and KV groups that ``cases`` have not, or not with another feature, although nothing
    excludes them: the one with the fewest keys that has the feature, and the variant or the groups in addition."""
    if not cases:
        return
    tests = features(declared, mode, cases[0])
    for gap in never_together(declared, mode, cases):
        words = [name for name in gap.features if name in SERVER_VARIANTS or name == _GROUPS]
        if gap.why or not words:
            continue
        others = [tests[name] for name in gap.features if name != words[-1]]
        for case in sorted((each for each in cases if all(test(each) for test in others)), key=_size):
            made = _with(declared, case, words[-1])
            if made is not None:
                yield made
                break


def _size(case: Case) -> tuple[int, int]:
    return sum(case.prefixes), len(case.variants)


def _with(declared: Capabilities, case: Case, word: str) -> Case | None:
    grouped = replace(case.layers, count=PERIOD, groups=True, varied=False) if word == _GROUPS else case.layers
    try:
        made = case.with_changes(layers=grouped, variants=(case.variants | {word}) - {_GROUPS})
    except ValueError:
        return None
    return made if all_fit(declared, made) else None


def features(declared: Capabilities, mode: ForwardMode, plain: Case) -> Mapping[str, Callable[[Case], bool]]:
    """Name of each declared feature -> whether a case has it. ``plain``: a case of the mode without server variants."""
    options = {
        name: TRAITS[name].has
        if name in TRAITS
        else lambda case, covered=covered, name=name: covered.tried(declared, case) == name
        for name, covered in DECLARED_VALUES.items()
        if list(covered.declared(declared, mode)) == [name]
    }
    variants = {
        word: lambda case, word=word: word in case.variants
        for word, each in SERVER_VARIANTS.items()
        if each.capability.startswith(_FROM) and _is_declared(each, declared, plain)
    }
    return options | variants


def _is_declared(variant: ServerVariant, declared: Capabilities, plain: Case) -> bool:
    """True if the feature has cases derived from ``plain``, or would have one that is excluded."""
    try:
        return any(variant.cases(declared, plain))
    except ValueError:
        return True


def _common(cases: Sequence[Case]) -> frozenset[str]:
    """Features and server variants that all of ``cases`` have."""
    if not cases:
        return frozenset()
    return frozenset(name for name, trait in TRAITS.items() if all(map(trait.has, cases)))


def _alone(one: str, other: str) -> str:
    return _ALONE if any(name in SERVER_VARIANTS and SERVER_VARIANTS[name].alone for name in (one, other)) else ""


def _why(one: frozenset[str], other: frozenset[str]) -> str:
    return next((why for a, b, why in _RULES if (a in one and b in other) or (a in other and b in one)), "")
