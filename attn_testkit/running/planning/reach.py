"""Functions of a tested package that case-runs call, and the case-runs that a change of its files may reach."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from ...results.case_result import RunKey
from .code_units import Unit

Place = tuple[str, str]
"""A file, relative to the root of its checkout, and the name of a unit in it."""
Units = Mapping[str, Mapping[str, Unit]]
"""File -> its units, by name."""


@dataclass(frozen=True)
class MappedRun:
    """A case-run that passed when its functions were noted."""

    functions: frozenset[Place]
    """Functions that it called."""
    checks: tuple[str, ...]
    """Checks that were evaluated."""


@dataclass(frozen=True)
class ReachMap:
    """Functions that the case-runs of one backend called."""

    root: str
    """Folder of the checkout."""
    digests: Mapping[str, Mapping[str, str]]
    """File that was imported -> digests of its units."""
    imported: frozenset[Place] = frozenset()
    """Functions that ran while the backend was imported."""
    runs: Mapping[tuple[str, str], MappedRun] = field(default_factory=dict)
    """Execution and case -> what it called."""


@dataclass(frozen=True)
class Since:
    """A selection of case-runs by the functions that they reach."""

    reached: frozenset[RunKey]
    """Case-runs that reach a changed function. Those that the map lacks may reach one, too."""
    checks: Mapping[RunKey, tuple[str, ...]]
    """Case-runs of the map, with the checks that they evaluate."""
    most: int
    """Largest number of case-runs that are selected for what they reach."""

    def reaches(self, key: RunKey) -> bool:
        """True if the case-run may reach a changed function."""
        return key in self.reached or key not in self.checks


@dataclass(frozen=True)
class Touched:
    """Units that a change may reach."""

    functions: frozenset[Place]
    everything: str = ""
    """The reason why every case-run may depend on the change; empty if there is none."""

    def runs(self, reach: ReachMap) -> frozenset[tuple[str, str]]:
        """The case-runs of a map that may depend on the change."""
        if self.everything or self.functions & reach.imported:
            return frozenset(reach.runs)
        return frozenset(name for name, run in reach.runs.items() if run.functions & self.functions)


def changed_units(before: Units, now: Units) -> frozenset[Place]:
    """Units that differ between two states of the same files, or are in only one of them."""
    return frozenset(
        (file, name)
        for file in before.keys() | now.keys()
        for name in before.get(file, {}).keys() | now.get(file, {}).keys()
        if _digest(before, file, name) != _digest(now, file, name)
    )


def _digest(units: Units, file: str, name: str) -> str:
    unit = units.get(file, {}).get(name)
    return unit.digest if unit else ""


def touched(reach: ReachMap, before: Units, now: Units) -> Touched:
    """Find the units that the difference between two states may reach.

    A case-run called the functions that the map lists. Names are followed where the map cannot know: from a binding,
    such as a constant; from a function that is compiled, as a Triton kernel on a GPU is, or whose result is kept; and
    from a function that has changed since the map was made.

    Args:
        reach: the map.
        before: units of changed files, as they were.
        now: units of the changed files and of all files that the map lists, as they are.

    """
    changed = changed_units(before, {file: now.get(file, {}) for file in before})
    for file, name in sorted(changed):
        if reason := _reason(file, name, before, now):
            return Touched(changed, reason)
    seen = {place for run in reach.runs.values() for place in run.functions} | reach.imported
    by_word: dict[str, list[Place]] = {}
    for file, units in now.items():
        for unit in units.values():
            for word in unit.mentions:
                by_word.setdefault(word, []).append((file, unit.name))
    stale = {
        (file, name)
        for file, units in now.items()
        for name, unit in units.items()
        if reach.digests.get(file, {}).get(name) != unit.digest
    }
    near, far = _followed(changed, before, now, by_word)
    for place in sorted(changed):
        unit = _unit(place, before, now)
        if unit.opaque or unit.kind == "binding":
            alone = all(other == place for other in by_word.get(unit.called, ()))
            if alone and place not in seen and not unit.called.startswith("__"):
                return Touched(near, f"nothing that was read mentions {unit.name} of {place[0]}")
    functions = near | (far & stale)
    for place in sorted(functions):
        if _unit(place, before, now).kind == "body":
            return Touched(functions, f"{_words(*place)} uses what has changed, and runs at the import")
    if ran := functions & reach.imported:
        return Touched(functions, f"{_words(*min(ran))} runs at the import")
    return Touched(functions)


def _unit(place: Place, before: Units, now: Units) -> Unit:
    file, name = place
    return now.get(file, {}).get(name) or before[file][name]


def module_of(file: str) -> str:
    """The last part of the name under which a file is imported."""
    folder, name = PurePath(file).parent.name, PurePath(file).stem
    return folder if name == "__init__" else name


def _words(file: str, name: str) -> str:
    return file if name.startswith("<") else f"{name} of {file}"


def _reason(file: str, name: str, before: Units, now: Units) -> str:
    """The reason why a changed unit may concern every case-run; empty if there is none."""
    was, is_now = before.get(file, {}).get(name), now.get(file, {}).get(name)
    kinds = {unit.kind for unit in (was, is_now) if unit}
    if "body" in kinds:
        return f"{_words(file, name)} has changed outside of functions"
    owner, _, last = name.rpartition(".")
    if owner and "function" in kinds and not (was and is_now):
        # It may override a method of another class, or no longer do so, and the kit calls hooks by their names.
        others = {other.rpartition(".")[2] for units in now.values() for other in units if other != name}
        if not last.startswith("_") or last.startswith("__") or last in others:
            return f"{_words(file, name)} was {'removed' if was else 'added'}"
    return ""


def _followed(
    changed: Collection[Place], before: Units, now: Units, by_word: Mapping[str, Iterable[Place]]
) -> tuple[frozenset[Place], frozenset[Place]]:
    """Units that mention a changed one, and so on: only where the map cannot know of a call, and everywhere."""
    near, far = set(changed), set(changed)
    words = {file: {word for unit in units.values() for word in unit.mentions} for file, units in now.items()}
    waiting = [(place, True) for place in changed]
    while waiting:
        place, is_near = waiting.pop()
        unit = _unit(place, before, now)
        for other in by_word.get(unit.called, ()):
            # A name at the top of a module is that of another file only if this one imports the module.
            if unit.kind == "binding" and other[0] != place[0] and module_of(place[0]) not in words[other[0]]:
                continue
            user = now[other[0]][other[1]]
            unseen = is_near and (unit.kind != "function" or unit.opaque or user.opaque)
            found = near if unseen else far
            if other not in found:
                found.add(other)
                far.add(other)
                waiting.append((other, unseen))
    return frozenset(near), frozenset(far)
