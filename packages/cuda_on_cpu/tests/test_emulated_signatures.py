"""What the emulation puts into Triton's interpreter takes whatever the function takes that it replaces."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from cuda_on_cpu import (
    emulated_cuda,
    triton_language,
    triton_launch,
    triton_programs,
    triton_speed,
)
from cuda_on_cpu.triton_signatures import complaint, fitting, stock_of

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

interpreter = importlib.import_module("triton.runtime.interpreter")
kernels = importlib.import_module("emulation_kernels")

# Triton before 3.9, with a NumPy that warns of it
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def _name(owner: object, name: str) -> str:
    return f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"


def _for_launches() -> list[tuple[object, str, object]]:
    programs = triton_programs.Programs(interpreter)
    return triton_launch.all_replacements(interpreter, interpreter.GridExecutor, programs)


@pytest.mark.parametrize(
    "replacement",
    [pytest.param(one, id=f"{number} {_name(*one[:2])}") for number, one in enumerate(_for_launches())],
)
def test_a_replacement_takes_what_this_tritons_own_function_takes(replacement):
    owner, name, new = replacement
    found = complaint(stock_of(owner, name), new)
    assert not found, f"the replacement of {_name(owner, name)} cannot be called as Triton calls it: {found}"


def test_a_replacement_in_the_language_takes_what_the_interpreters_takes():
    scope = triton_speed.patch_language(interpreter)
    try:
        new = triton_language.language_replacements(interpreter)
        wrong = {_name(o, name): complaint(stock_of(o, name), value) for o, name, value in new}
    finally:
        scope.restore()
    assert {name: found for name, found in wrong.items() if found} == {}
    assert len(new) >= 8


def test_the_parts_that_make_it_fast_and_right_are_all_there():
    names = {_name(owner, name) for owner, name, _ in _for_launches()}
    for name in ("load", "masked_load", "masked_store", "addptr", "splat", "atomic_cas", "atomic_rmw", "dot"):
        assert f"InterpreterBuilder.create_{name}" in names
    assert len(names) > 25


def test_a_parameter_that_is_named_or_placed_otherwise_is_found():
    def stock(self, ptr, mask, policy=None, *, volatile=False):
        pass

    fits = [
        lambda self, ptr, mask, policy=None, *, volatile=False: None,
        lambda self, ptr, mask, policy=None, **_: None,
        lambda self, ptr, *rest, **named: None,
        lambda *rest, **named: None,
    ]
    assert [complaint(stock, one) for one in fits] == [""] * len(fits)
    broken = [
        (lambda self, ptr, mask, *rest: None, "does not take 'policy'"),
        (lambda self, ptr, mask, policy=None: None, "does not take 'volatile'"),
        (lambda self, ptr, mask, policy=None, *rest: None, "does not take 'volatile'"),
        (lambda self, pointer, *rest, **named: None, "'pointer' where 'ptr'"),
        (lambda self, mask, ptr, *rest, **named: None, "'ptr' is its parameter 3, and number 2"),
        (lambda self, ptr, mask, policy, *, volatile=False: None, "'policy' is None"),
        (lambda self, ptr, mask, policy=1, *, volatile=False: None, "'policy' is None"),
        (lambda self, ptr, mask, policy=None, *, volatile=False, other: None, "needs other"),
    ]
    for replacement, said in broken:
        assert said in complaint(stock, replacement)


def test_what_takes_any_argument_is_replaced_by_what_does():
    assert "further positional" in complaint(lambda *args, **named: None, lambda **named: None)
    assert "further named" in complaint(lambda *args, **named: None, lambda *args: None)
    assert not complaint(lambda *args, **named: None, lambda *rest, **other: None)


def test_properties_and_values_are_replaced_by_their_kind():
    assert complaint(property(lambda self: 1), lambda self: 1)
    assert not complaint(property(lambda self: 1), property(lambda self: 2))
    assert complaint(1, "one")
    assert not complaint(None, lambda self: 1), "a function that this Triton does not have"


def test_a_function_that_changed_is_left_as_it_is_and_kernels_run(monkeypatch):
    builder = interpreter.InterpreterBuilder
    stock = builder.create_atomic_cas

    def create_atomic_cas(self, ptr, val, cmp, sem, scope):
        return stock(self, ptr, cmp, val, sem, scope)

    atomic_cas = interpreter.tl.semantic.TritonSemantic.atomic_cas

    def exchanged(self, ptr, cmp, val, sem, scope):
        return atomic_cas(self, ptr, val, cmp, sem, scope)

    monkeypatch.setattr(builder, "create_atomic_cas", create_atomic_cas)
    monkeypatch.setattr(interpreter.tl.semantic.TritonSemantic, "atomic_cas", exchanged)
    triton_launch.replacements_in.cache_clear()
    try:
        names = [name for owner, name, _ in triton_launch.replacements_in(interpreter) if owner is builder]
        assert "create_atomic_cas" not in names
        assert "create_masked_load" in names
        with torch.no_grad(), emulated_cuda():
            x = torch.zeros(8, dtype=torch.int32).cuda()
            kernels.exchange[(1,)](x, 3)
            assert x.cpu().tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    finally:
        triton_launch.replacements_in.cache_clear()


def test_only_what_does_not_fit_is_left_out():
    class Owner:
        def kept(self, value): ...

        def changed(self, value): ...

    wanted = [(Owner, "kept", lambda self, value: 1), (Owner, "changed", lambda self, number: 1)]
    assert fitting(wanted) == wanted[:1]
