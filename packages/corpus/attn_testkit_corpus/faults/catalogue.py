"""The corpus: backends with seeded bugs, of this package or of a folder of field bugs, and known-good ones."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Literal, TypeVar

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import AttentionBackend, Execution, ForwardMode
from attn_testkit.results.checks import CHECKS

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
M = TypeVar("M", bound=Callable[..., object])
Kind = Literal["fault", "field bug", "control"]


@dataclass(frozen=True)
class CorpusEntry:
    """A backend whose verdict is known: a bug must be caught, and a known-good backend must pass."""

    kind: Kind
    slug: str
    backend: type[AttentionBackend]
    source: str = ""
    """Project and number of a bug; ``general`` if the mechanism is common knowledge."""
    modes: tuple[ForwardMode, ...] = ()
    executions: tuple[Execution, ...] = ()
    checks: tuple[str, ...] = ()
    """Ids of checks that must catch a bug; the first is the one expected."""
    hint: str = ""
    """Regular expression that the failure text must match, because it names the cause; empty: no requirement."""
    modelled: str = ""
    """Simplification of the real bug, if any."""
    case: str = ""
    """The case that catches a field bug; for a fault, cases of a tier are tried until one does."""
    case_of_tier: str = ""
    """The case of smoke or core that catches a field bug: ``case``, or a longer one."""
    in_set: int = 0
    """The set of docs/evidence/validation.md in which a field bug was found; 0: none."""
    healthy: type[AttentionBackend] | None = None
    """The backend of a control, or the parent of a field bug with the bug's capabilities: it must pass."""

    @property
    def bug_class(self) -> str:
        """Key of ``CLASSES`` that the file's name begins with; empty for a field bug."""
        letter, separator, _ = self.backend.__module__.rpartition(".")[2].partition("_")
        return letter.upper() if separator and letter.upper() in CLASSES else ""

    @property
    def about(self) -> str:
        """The class's own docstring in one line: the mistake of the code, or the unusual behavior of a known-good
        backend and its users in production. Empty if it has none.
        """
        return " ".join((self.backend.__doc__ or "").split())

    @property
    def runs(self) -> list[tuple[ForwardMode, Execution]]:
        """The modes and executions in which the backend runs."""
        return [(m, e) for m in self.modes for e in self.executions if self.backend.capabilities.offers(m, e)]

    @property
    def spec(self) -> str:
        """``module:Class``, as ``attn-testkit run --backend`` takes it."""
        return f"{self.backend.__module__}:{self.backend.__qualname__}"


_CORPUS: dict[str, CorpusEntry] = {}
_HELPERS: set[Callable[..., object]] = set()


def helper(method: M) -> M:
    """Mark a new method of a registered class. Every other method must override one of a parent: if a hook was renamed,
    the bug would never run, and the backend would be healthy.
    """
    _HELPERS.add(method)
    return method


def _overrides_nothing(backend: type[AttentionBackend]) -> list[str]:
    """Names of methods and properties of the class itself that no parent has and nobody marked as a helper."""
    bodies = {
        name: next((getattr(found, part) for part in ("fget", "__func__", "func") if hasattr(found, part)), found)
        for name, found in vars(backend).items()
        if not any(hasattr(parent, name) for parent in backend.__bases__)
    }
    return [name for name, body in bodies.items() if isinstance(body, FunctionType) and body not in _HELPERS]


def slug_of(name: str) -> str:
    """Name of a class, as words joined by hyphens: ``PlanOfCapture`` is ``plan-of-capture``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def fault(
    source: str,
    checks: str | Iterable[str],
    hint: str = "",
    *,
    modes: str | Iterable[ForwardMode | str] = tuple(ForwardMode),
    executions: str | Iterable[Execution | str] = tuple(Execution),
    slug: str = "",
    modelled: str = "",
) -> Callable[[B], B]:
    """Register the decorated backend class as a fault.

    Its docstring describes the mechanism, and the first letter of its file is the class of bug. Several checks, modes
    or executions may be given as one text with spaces. ``slug``: name, if it is not the class name in words. Raises
    ``ValueError`` for an entry that cannot be audited.
    """
    of_modes, of_executions = tuple(map(ForwardMode, _each(modes))), tuple(map(Execution, _each(executions)))
    of_checks = tuple(map(str, _each(checks)))

    def register(backend: B) -> B:
        name = slug or slug_of(backend.__name__)
        return _added(
            backend, CorpusEntry("fault", name, backend, source, of_modes, of_executions, of_checks, hint, modelled)
        )

    return register


def _each(words: str | Iterable[str]) -> Iterable[str]:
    return words.split() if isinstance(words, str) else words


def bug(
    in_set: int, source: str, case: str, check: str = "matches-oracle", execution: str = "eager", of_a_tier: str = ""
) -> Callable[[B], B]:
    """Register the decorated backend class as a field bug: ``case`` fails on it by ``check``.

    ``in_set``: number of the set of docs/evidence/validation.md to which it was counted, 0 for none. ``source``: public
    threads that report it. ``of_a_tier``: the case of core that fails too, if ``case`` is a shorter one of no tier. A
    class has one decorator for each set that found it. The parent with the same capabilities is kept next to the
    class, as ``<name>WithoutBug``.
    """

    def register(backend: B) -> B:
        (parent,) = backend.__bases__
        name = f"{backend.__qualname__}WithoutBug"
        healthy = type(name, (parent,), {"capabilities": backend.capabilities, "__module__": backend.__module__})
        setattr(sys.modules[backend.__module__], name, healthy)
        slug = slug_of(f"Field{backend.__qualname__}")
        again = slug in _CORPUS and _CORPUS[slug].backend is backend
        entry = CorpusEntry(
            "field bug", slug + f"-of-set-{in_set}" * again, backend, source,
            (parse_case(case).mode,), (Execution(execution),), (check,),
            case=case, case_of_tier=of_a_tier or case, in_set=in_set, healthy=healthy,
        )  # fmt: skip
        return _added(backend, entry)

    return register


def control(name: str = "") -> Callable[[B], B]:
    """Register the decorated backend class as a healthy control.

    Its docstring says why it is one. ``name``: if it is not the class name in words. Raises ``ValueError`` without a
    docstring, and for a name that is taken.
    """
    runs = tuple(ForwardMode), tuple(Execution)

    def register(backend: B) -> B:
        entry = CorpusEntry("control", name or slug_of(backend.__name__), backend, "", *runs, healthy=backend)
        return _added(backend, entry)

    return register


def _added(backend: B, entry: CorpusEntry) -> B:
    """The class, entered into the corpus. Raises ``ValueError`` for an entry that cannot be audited."""
    known = _CORPUS.get(entry.slug)
    unknown = [check for check in entry.checks if check not in CHECKS]
    re.compile(entry.hint)
    is_bug = entry.kind != "control"
    new = _overrides_nothing(backend)
    problems = {
        "the slug is taken": known is not None and known.spec != entry.spec,
        "slugs are lower-case words joined by hyphens": not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.slug),
        f"its file begins with no letter of {', '.join(CLASSES)} and an underscore": (
            entry.kind == "fault" and not entry.bug_class
        ),
        "its source is missing": is_bug and not entry.source,
        "the docstring of its class says what is wrong or unusual, and is missing": not entry.about,
        f"unknown checks {unknown}": bool(unknown),
        "at least one check must catch it": is_bug and not entry.checks,
        "its backend offers none of its modes and executions": not entry.runs,
        f"no parent has {', '.join(new)}: correct the name, or mark a new method with @helper": bool(new),
        "its backend must be reachable as module:Class": "." in entry.backend.__qualname__,
    }
    for text, bad in problems.items():
        if bad:
            raise ValueError(f"{entry.kind} {entry.slug!r}: {text}")
    _CORPUS[entry.slug] = entry
    return backend


def _entries(kind: Kind, path: Iterable[str], modules: str, package: str = "") -> tuple[CorpusEntry, ...]:
    """Entries of a kind in modules of ``path`` whose names match, by class and file, whatever the order in which the
    files were imported.
    """
    for module in sorted(pkgutil.iter_modules(path), key=lambda m: m.name):
        if re.fullmatch(modules, module.name):
            importlib.import_module(f"{package}{module.name}")
    found = (entry for entry in _CORPUS.values() if entry.kind == kind)
    return tuple(sorted(found, key=lambda entry: (entry.bug_class, entry.backend.__module__)))


@lru_cache(maxsize=1)
def all_faults() -> tuple[CorpusEntry, ...]:
    """Every fault, by class and then in the order in which they are written down."""
    return _entries("fault", importlib.import_module(__package__).__path__, r"[a-z]_\w+", f"{__package__}.")


@lru_cache(maxsize=1)
def all_controls() -> tuple[CorpusEntry, ...]:
    """Every healthy control."""
    return _entries("control", importlib.import_module(__package__).__path__, r"controls\w*", f"{__package__}.")


def entry_of(slug: str) -> CorpusEntry:
    """The entry of that name: a fault, a control, or a field bug whose module is imported."""
    all_faults()
    all_controls()
    return _CORPUS[slug]


def field_bugs_in(folder: str, modules: str = r"bugs_\w+") -> tuple[CorpusEntry, ...]:
    """Every field bug in the modules of a folder whose names match, by file. The folder joins ``sys.path``, so that
    workers find it, too.
    """
    place = str(Path(folder).resolve())
    sys.path[:] = [place, *(path for path in sys.path if path != place)]
    found = _entries("field bug", [place], modules)
    return tuple(bug for bug in found if Path(inspect.getfile(bug.backend)).parent == Path(place))
