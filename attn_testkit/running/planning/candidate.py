"""The backend that a worker is to run: by name, or as the class object that the caller holds.

A class given to ``check_backend`` may be one that cannot be imported: one in a notebook, local to a function, or a
second one of the same name. Such a class is sent by value. A class that can be imported is sent by name, with a
fingerprint of its contents in the caller's process, so that the worker never runs a different one.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...registry import UsageError
from ..hygiene.other_sources import OtherSources


@dataclass(frozen=True)
class Candidate:
    """A backend that is to be run, as a front end names it: plain data, made without importing the backend."""

    spec: str
    """A registered name or ``module:Class``, under which results are listed."""
    pickled: bytes = b""
    """The pickled class; empty if ``spec`` is enough."""
    fingerprint: str = ""
    """Fingerprint of the class that the caller holds. The class that the worker imports must have the same."""
    here: type[Any] | None = field(default=None, repr=False, compare=False)
    """The class itself, if it is run in the caller's own process."""
    sources: OtherSources = field(default_factory=OtherSources)
    """Modules that its worker imports from other files than their own."""
    edition: int = 0
    """Number of times that its files were saved since the judge began. A worker of one edition never runs another."""


def candidate_for(backend: str | type[Any], *, in_process: bool = False) -> Candidate:
    """The candidate for a spec or a class. Raises ``UsageError`` for a class that cannot be sent to a worker."""
    if isinstance(backend, str):
        return Candidate(backend)
    if not isinstance(backend, type):
        kind = type(backend).__name__
        raise UsageError(f"expected a backend class or its spec, got an instance of {kind}: the kit constructs it")
    spec = f"{backend.__module__}:{backend.__qualname__}"
    if in_process:
        return Candidate(spec, here=backend)
    if _importable(backend):
        return Candidate(spec, fingerprint=fingerprint_of(backend))
    import cloudpickle

    try:
        return Candidate(spec, cloudpickle.dumps(backend))
    except Exception as error:
        raise UsageError(
            f"class {backend.__qualname__} of {backend.__module__} cannot be sent to the process that runs it: "
            f"{type(error).__name__}: {error}; put it in a module and name it module:Class, or remove from it what "
            "cannot be pickled"
        ) from error


def _importable(backend: type[Any]) -> bool:
    """True if importing its module in another process gives this class, as far as this process can tell."""
    module = sys.modules.get(backend.__module__)
    if module is None or backend.__module__ == "__main__" or not getattr(module, "__file__", None):
        return False
    found: Any = module
    for name in backend.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is backend


def fingerprint_of(backend: type[Any]) -> str:
    """A digest of a class: code, constants and plain attributes of it and of its parents outside the kit's contract."""
    digest = hashlib.blake2b(digest_size=16)
    for owner in backend.__mro__:
        if owner is object or owner.__module__.startswith("abc"):
            continue
        for name in sorted(vars(owner)):
            if not _made_by_python(name):
                for part in _parts(vars(owner)[name]):
                    digest.update(f"{owner.__qualname__}.{name}:{part}\n".encode(errors="backslashreplace"))
    return digest.hexdigest()


def _made_by_python(name: str) -> bool:
    return name in ("__dict__", "__weakref__", "__module__", "__doc__", "__abstractmethods__", "_abc_impl") or (
        name in ("__firstlineno__", "__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__")
    )


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield from _parts(accessor)
    elif isinstance(value, functools.cached_property):
        yield from _parts(value.func)
    elif inspect.isfunction(value):
        yield from _code(value.__code__)
        yield from _parts(value.__defaults__)
    elif isinstance(value, (str, int, float, bool, bytes, type(None))):
        yield repr(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(part for item in value for part in _parts(item))
    elif isinstance(value, dict):
        yield from sorted(f"{key!r}={'|'.join(_parts(item))}" for key, item in value.items())
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield name
            yield from _parts(getattr(value, name))
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}"


def _code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def resolve_candidate(candidate: Candidate) -> type[Any]:
    """The class, in the process that is to run it. Raises ``BackendNotFound`` (a ``UsageError``) in one clear line."""
    from ...registry import checked_class, load_backend

    if candidate.here is not None:
        return checked_class(candidate.spec, candidate.here)
    if candidate.pickled:
        import pickle

        try:
            found = pickle.loads(candidate.pickled)
        except Exception as error:
            raise UsageError(
                f"class {candidate.spec!r} could not be received: {type(error).__name__}: {error}; put it in a "
                "module and name it module:Class"
            ) from error
        return checked_class(candidate.spec, found)
    found = load_backend(candidate.spec)
    if candidate.fingerprint and fingerprint_of(found) != candidate.fingerprint:
        raise UsageError(
            f"class {candidate.spec!r} differs in this process from the one that an import gives (it was changed "
            "after its import, or its file was): reload it, or give the changed class another name"
        )
    return found
