"""The list of faults and healthy controls: registration and lookup."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from ..checks import CHECKS
from ..contract import AttentionBackend, Execution, ForwardMode

__all__ = ["CLASSES", "Control", "Fault", "all_controls", "all_faults", "control", "fault"]

CLASSES = {
    "A": "graph capture and replay metadata",
    "B": "padding rows, inactive rows",
    "C": "KV writes and ownership",
    "D": "KV extent, page tables, slots",
    "E": "masks",
    "F": "windows",
    "G": "numerics, scales, heads",
    "H": "empty KV, split-KV combine, NaN",
    "I": "addressing, strides, dtypes",
    "J": "workspaces, lifetime, aliasing",
    "K": "host lengths and synchronisation",
    "L": "wrappers, capabilities, contracts",
    "M": "speculative bookkeeping",
    "N": "determinism and batch invariance",
    "O": "drafts: their forwards and branches",
    "P": "prefill: cached prefixes, chunks, mixed batches",
    "Q": "KV splits: log-sum-exps and merging",
    "R": "recurrent states: slots, windows, gates",
    "S": "sparse attention: selected keys",
}
"""Letter -> kind of bug. A module of this package whose name begins with a letter and ``_`` holds that class."""

B = TypeVar("B", bound=type[AttentionBackend])
_FAULTS_IN, _CONTROLS_IN = re.compile(r"[a-z]_\w+"), re.compile(r"controls\w*")


@dataclass(frozen=True)
class Fault:
    """One real bug, re-created as a small broken backend."""

    slug: str
    source: str
    """Project and number; ``general`` if the mechanism is common knowledge."""
    modes: tuple[ForwardMode, ...]
    executions: tuple[Execution, ...]
    checks: tuple[str, ...]
    """Ids of checks that must catch it; the first is the one expected."""
    backend: type[AttentionBackend]
    hint: str = ""
    """Regular expression that the failure text must match, because it names the cause; empty: no requirement."""
    modelled: str = ""
    """Simplification of the real bug, if any."""

    @property
    def bug_class(self) -> str:
        """Key of ``CLASSES`` that the file's name begins with; empty if there is none."""
        letter, separator, _ = self.backend.__module__.rpartition(".")[2].partition("_")
        return letter.upper() if separator and letter.upper() in CLASSES else ""

    @property
    def mechanism(self) -> str:
        """The mistake of the code, in a sentence: the class's own docstring."""
        return _docstring(self.backend)

    @property
    def spec(self) -> str:
        """``module:Class``, as ``attn-testkit run --backend`` takes it."""
        return f"{self.backend.__module__}:{self.backend.__qualname__}"


@dataclass(frozen=True)
class Control:
    """A healthy backend that differs from the others in a way in which good backends may: it must pass."""

    name: str
    backend: type[AttentionBackend]

    @property
    def why(self) -> str:
        """The unusual behavior, and its users in production: the class's own docstring."""
        return _docstring(self.backend)

    @property
    def spec(self) -> str:
        """``module:Class``."""
        return f"{self.backend.__module__}:{self.backend.__qualname__}"


def _docstring(backend: type[AttentionBackend]) -> str:
    """The class's own docstring in one line; empty if it has none."""
    return " ".join((backend.__doc__ or "").split())


_FAULTS: dict[str, Fault] = {}
_CONTROLS: dict[str, Control] = {}


def fault(
    *,
    slug: str,
    source: str,
    modes: Iterable[ForwardMode | str],
    checks: Iterable[str],
    executions: Iterable[Execution | str] = tuple(Execution),
    hint: str = "",
    modelled: str = "",
) -> Callable[[B], B]:
    """Register the decorated backend class as a fault.

    Its docstring is the mechanism, and the first letter of its file is the class of bug. Raises ``ValueError`` for an
    entry that cannot be audited.
    """

    def register(backend: B) -> B:
        entry = Fault(
            slug=slug,
            source=source,
            modes=tuple(ForwardMode(m) for m in modes),
            executions=tuple(Execution(e) for e in executions),
            checks=tuple(checks),
            backend=backend,
            hint=hint,
            modelled=modelled,
        )
        wrong = _wrong(entry)
        if wrong:
            raise ValueError(f"fault {slug!r}: {wrong}")
        _FAULTS[slug] = entry
        return backend

    return register


def _wrong(entry: Fault) -> str:
    known = _FAULTS.get(entry.slug)
    unknown = [check for check in entry.checks if check not in CHECKS]
    offered = {(m, e) for m in entry.modes for e in entry.executions if entry.backend.capabilities.offers(m, e)}
    re.compile(entry.hint)
    problems = {
        "the slug is taken": known is not None and known.spec != entry.spec,
        "slugs are lower-case words joined by hyphens": not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.slug),
        f"its file begins with no letter of {', '.join(CLASSES)} and an underscore": not entry.bug_class,
        "its source is missing": not entry.source,
        "the docstring of its class says what is wrong, and is missing": not entry.mechanism,
        f"unknown checks {unknown}": bool(unknown),
        "at least one check must catch it": not entry.checks,
        "its backend offers none of its modes and executions": not offered,
        "its backend must be reachable as module:Class": "." in entry.backend.__qualname__,
    }
    return next((text for text, bad in problems.items() if bad), "")


def control(name: str) -> Callable[[B], B]:
    """Register the decorated backend class as a healthy control.

    Its docstring says why it is one. Raises ``ValueError`` without it, and for a name that is taken.
    """

    def register(backend: B) -> B:
        if name in _CONTROLS and _CONTROLS[name].spec != f"{backend.__module__}:{backend.__qualname__}":
            raise ValueError(f"control {name!r}: the name is taken")
        entry = Control(name, backend)
        if not entry.why:
            raise ValueError(f"control {name!r}: the docstring of its class is missing")
        _CONTROLS[name] = entry
        return backend

    return register


def _import_all(modules: re.Pattern[str]) -> None:
    package = importlib.import_module(__package__)
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        if modules.fullmatch(module.name):
            importlib.import_module(f"{__package__}.{module.name}")


@lru_cache(maxsize=1)
def all_faults() -> tuple[Fault, ...]:
    """Every fault, by class and then in the order in which they are written down."""
    _import_all(_FAULTS_IN)
    # By file too: a test, or a worker, may have imported one of them before the others.
    return tuple(sorted(_FAULTS.values(), key=lambda entry: (entry.bug_class, entry.backend.__module__)))


@lru_cache(maxsize=1)
def all_controls() -> tuple[Control, ...]:
    """Every healthy control."""
    _import_all(_CONTROLS_IN)
    # By file: somebody may have imported one of them before.
    return tuple(sorted(_CONTROLS.values(), key=lambda entry: entry.backend.__module__))
