"""The list of adversarial backends: registration, and the cases that each of them is run on."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from attn_testkit.contract import Execution

from .parent import AdversarialBackend

B = TypeVar("B", bound=type[AdversarialBackend])
CASE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
"""Three requests of a few KV tokens: the quickest case with steps that can be confused."""
_NOT_ADVERSARIAL = ("catalogue", "parent", "variants_in")


@dataclass(frozen=True)
class Adversarial:
    """One way to a false green."""

    slug: str
    backend: type[AdversarialBackend]
    honest: type[AdversarialBackend]
    """The healthy control: the same code with ``cheats`` False."""
    executions: tuple[str, ...]
    """Executions for which the cheat is made, in which it is run."""
    cases: tuple[str, ...]

    @property
    def mechanism(self) -> str:
        """The cheat, in a line: the class's own docstring."""
        return " ".join((self.backend.__doc__ or "").split())

    def spec(self, *, honest: bool = False) -> str:
        """``module:Class``, as ``attn-testkit run --backend`` takes it."""
        chosen = self.honest if honest else self.backend
        return f"{chosen.__module__}:{chosen.__qualname__}"


_ADVERSARIAL: dict[str, Adversarial] = {}


def adversarial(
    slug: str,
    *,
    executions: tuple[Execution, ...] = (Execution.EAGER,),
    cases: tuple[str, ...] = (CASE,),
    honest: Mapping[str, Any] | None = None,
) -> Callable[[B], B]:
    """Register the decorated class, and ``<name>Honest``, which does the same and does not cheat.

    ``honest``: attributes of the control, if the cheat is an attribute. The docstring is the mechanism. Raises
    ``ValueError`` without one, and for a slug that is taken or misspelt.
    """

    def register(backend: B) -> B:
        name = f"{backend.__qualname__}Honest"
        members = {"cheats": False, "__module__": backend.__module__, "__doc__": f"``{backend.__qualname__}`` honest."}
        control = type(name, (backend,), {**members, **(honest or {})})
        setattr(sys.modules[backend.__module__], name, control)
        entry = Adversarial(slug, backend, control, tuple(e.value for e in executions), cases)
        known = _ADVERSARIAL.get(slug)
        if known is not None and known.spec() != entry.spec():
            raise ValueError(f"adversarial backend {slug!r}: the slug is taken")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) or not entry.mechanism:
            raise ValueError(f"adversarial backend {slug!r}: words joined by hyphens, and a docstring that says how")
        _ADVERSARIAL[slug] = entry
        return backend

    return register


@lru_cache(maxsize=1)
def all_adversarial() -> tuple[Adversarial, ...]:
    """Every adversarial backend, in the order of definition."""
    package = importlib.import_module(__package__)
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        if module.name not in _NOT_ADVERSARIAL:
            importlib.import_module(f"{__package__}.{module.name}")
    return tuple(sorted(_ADVERSARIAL.values(), key=lambda entry: entry.backend.__module__))
