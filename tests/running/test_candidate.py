"""Which class a worker runs: never another one than the caller holds."""

from __future__ import annotations

import functools
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.registry import UsageError
from attn_testkit.running.planning.candidate import (
    Candidate,
    _made_by_python,
    candidate_for,
    fingerprint_of,
    resolve_candidate,
)

SPEC = "attn_testkit.backends.torch_native:TorchNativeBackend"


@dataclass(frozen=True)
class Capabilities:
    modes: frozenset[str] = frozenset({"decode", "verify"})
    rows: int = 1
    inner: dict[str, int] = field(default_factory=dict)


def one(x: int = 1) -> int:
    return x + 2


def like_one(x: int = 1) -> int:
    return x + 2


def other_default(x: int = 3) -> int:
    return x + 2


def other_constant(x: int = 1) -> int:
    return x + 3


def other_name(x: int = 1) -> int:
    return abs(x)


def another_name(x: int = 1) -> int:
    return hash(x)


def with_inner(n: int) -> Any:
    return lambda x: x in {1, 2, 5} and x + 1


def with_other_inner(n: int) -> Any:
    return lambda x: x in {1, 2, 5} and x + 2


def with_other_set(n: int) -> Any:
    return lambda x: x in {1, 2, 6} and x + 1


def of(value: Any) -> str:
    return fingerprint_of(type("Backend", (), {"value": value, "__module__": "somewhere"}))


ALIKE = [
    (one, like_one),
    (1, 1),
    ([1, 2], (1, 2)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (frozenset({"a", "b", "c"}), {"c", "b", "a"}),
    (Capabilities(), Capabilities()),
    (object(), object()),
    (staticmethod(one), classmethod(like_one)),  # type: ignore[arg-type]
    (property(one), property(like_one)),
]
DIFFER = [
    (one, other_default),
    (one, other_constant),
    (other_name, another_name),
    (with_inner, with_other_inner),
    (with_inner, with_other_set),
    (1, 2),
    (1, 1.0),
    (True, 1),
    ("a", b"a"),
    (None, 0),
    ([1, 2], [2, 1]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ({1, 2}, {1, 3}),
    (Capabilities(rows=1), Capabilities(rows=2)),
    (Capabilities(), Capabilities(modes=frozenset({"decode"}))),
    (Capabilities(inner={"a": 1}), Capabilities(inner={"a": 2})),
    (object(), types.SimpleNamespace()),
    (staticmethod(one), staticmethod(other_constant)),
    (classmethod(one), classmethod(other_constant)),  # type: ignore[arg-type]
    (property(one), property(other_constant)),
    (property(one, one), property(one, other_constant)),
    (property(one, one, one), property(one, one, other_constant)),
    (functools.cached_property(one), functools.cached_property(other_constant)),
]


@pytest.mark.parametrize(("a", "b"), ALIKE, ids=range(len(ALIKE)))
def test_a_class_that_is_the_same_has_the_same_fingerprint(a: Any, b: Any) -> None:
    assert of(a) == of(b)


@pytest.mark.parametrize(("a", "b"), DIFFER, ids=range(len(DIFFER)))
def test_each_kind_of_attribute_shows_in_the_fingerprint(a: Any, b: Any) -> None:
    assert of(a) != of(b)


def test_names_and_parents_show_and_what_python_makes_does_not() -> None:
    def made(name: str, bases: tuple[type, ...] = (), **values: Any) -> str:
        return fingerprint_of(type(name, bases, values))

    parent, other = type("Parent", (), {"x": 1}), type("Parent", (), {"x": 2})
    assert made("A", x=1) != made("A", y=1)
    assert made("A", x=1) != made("B", x=1)
    assert made("A", (parent,)) != made("A", (other,))
    assert made("A", __doc__="one", __module__="m") == made("A", __doc__="two", __module__="n")
    assert made("A", __slots__=("a",)) != made("A", __slots__=("b",))


@pytest.mark.parametrize(
    "name",
    ["__dict__", "__weakref__", "__module__", "__doc__", "__abstractmethods__", "_abc_impl", "__firstlineno__",
     "__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__"],
)  # fmt: skip
def test_what_python_makes_differs_between_versions_and_moved_lines(name: str) -> None:
    assert _made_by_python(name)
    assert not _made_by_python(f"{name}_")


def test_a_spec_is_enough_and_an_instance_is_none() -> None:
    assert candidate_for("torch_native") == Candidate("torch_native")
    with pytest.raises(UsageError, match="expected a backend class or its spec, got an instance of int: the kit"):
        candidate_for(3)  # type: ignore[arg-type]


def test_an_importable_class_travels_by_name_with_its_fingerprint() -> None:
    found = candidate_for(TorchNativeBackend)
    assert (found.spec, found.pickled, found.here) == (SPEC, b"", None)
    assert found.fingerprint == fingerprint_of(TorchNativeBackend)
    assert resolve_candidate(found) is TorchNativeBackend


def test_in_this_process_the_class_itself_is_taken() -> None:
    found = candidate_for(TorchNativeBackend, in_process=True)
    assert (found.spec, found.here, found.fingerprint) == (SPEC, TorchNativeBackend, "")
    assert resolve_candidate(found) is TorchNativeBackend


def test_a_class_that_was_changed_after_its_import_is_refused() -> None:
    changed = Candidate(SPEC, fingerprint="0" * 32)
    with pytest.raises(UsageError, match=f"class '{SPEC}' differs in this process from the one that an import gives"):
        resolve_candidate(changed)
    assert resolve_candidate(Candidate(SPEC)) is TorchNativeBackend


def local(**values: Any) -> type[Any]:
    class Local(TorchNativeBackend):
        pass

    for name, value in values.items():
        setattr(Local, name, value)
    return Local


def by_value(backend: type[Any]) -> bool:
    found = candidate_for(backend)
    assert bool(found.pickled) is not bool(found.fingerprint)
    return bool(found.pickled)


def test_a_class_that_no_import_gives_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = local(mark=7)
    found = candidate_for(backend)
    assert found.pickled
    assert (found.spec.split(":")[1], found.fingerprint, found.here) == (backend.__qualname__, "", None)
    assert resolve_candidate(found).mark == 7
    module = types.ModuleType("module_of_a_test")
    module.__file__ = "module_of_a_test.py"
    monkeypatch.setitem(sys.modules, "module_of_a_test", module)
    backend.__module__, backend.__qualname__ = "module_of_a_test", "Outer.Backend"
    assert by_value(backend), "the module has no such name"
    module.Outer = types.SimpleNamespace(Backend=backend)  # type: ignore[attr-defined]
    assert not by_value(backend)
    module.Outer.Backend = local()
    assert by_value(backend), "the module has another class of the name"
    module.Outer.Backend = backend
    module.__file__ = None
    assert by_value(backend), "a notebook's module has no file"
    module.__file__ = "module_of_a_test.py"
    monkeypatch.delitem(sys.modules, "module_of_a_test")
    assert by_value(backend), "there is no such module"
    backend.__module__, backend.__qualname__ = "__main__", "Backend"
    monkeypatch.setattr(sys.modules["__main__"], "Backend", backend, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "main.py", raising=False)
    assert by_value(backend), "a worker's main module is another one"


def test_a_class_that_cannot_be_taken_along_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"class .*Local of .*cannot be sent to the process that runs it: TypeError"):
        candidate_for(local(lock=threading.Lock()))
    with pytest.raises(UsageError, match="class 'a:B' could not be received: UnpicklingError"):
        resolve_candidate(Candidate("a:B", b"no pickle"))
