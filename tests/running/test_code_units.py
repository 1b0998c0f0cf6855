"""The parts of a file that can change by themselves."""

from __future__ import annotations

import pytest

from attn_testkit.running.planning.code_units import units_of

FILE = '''
"""About."""
import functools
import triton
from .kernels import copy_kernel as fast

BLOCK = 64
CACHE = {}
try:
    import cute
except ImportError:
    cute = None
if BLOCK > 3:
    print("loud")

@triton.jit
def kernel(x):
    return x + BLOCK

@functools.cache
def table(n):
    return n

def keeping(n):
    return CACHE.setdefault(n, n)

class Backend(Base):
    """About."""
    size = 3

    def __init__(self):
        self.size = 4

    @property
    def plan(self):
        def inner():
            return getattr(self, "secret")
        return inner

    if True:
        def sometimes(self):
            return fast

if __name__ == "__main__":
    kernel(1)
'''


def changed(before: str, after: str) -> set[str]:
    """Names of the units that differ if one text in ``FILE`` is replaced by another."""
    assert FILE.count(before) == 1, before
    was, now = units_of(FILE), units_of(FILE.replace(before, after))
    return {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}


def test_each_function_and_each_bound_name_is_a_unit() -> None:
    found = units_of(FILE)
    kinds = {
        kind: {name for name, unit in found.items() if unit.kind == kind} for kind in ("function", "binding", "body")
    }
    assert kinds["function"] == {
        "kernel", "table", "keeping", "Backend.__init__", "Backend.plan", "Backend.sometimes"
    }  # fmt: skip
    assert kinds["binding"] == {"functools", "triton", "fast", "BLOCK", "CACHE", "cute"}
    assert kinds["body"] == {"Backend", "<module>"}


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("return x + BLOCK", "return x - BLOCK", {"kernel"}),
        ("def table(n):", "def table(n):  # a comment\n", set()),
        ('    """About."""\n    size', '    """About it."""\n    size', set()),
        ('"""About."""\nimport', "\n\n\nimport", set()),
        ("BLOCK = 64", "BLOCK = 32", {"BLOCK"}),
        ('"secret"', '"other"', {"Backend.plan"}),
        ("size = 3", "size = 5", {"Backend"}),
        ("self.size = 4", "self.size = 5", {"Backend.__init__"}),
        ("(Base)", "(Other)", {"Backend"}),
        ("return fast", "return None", {"Backend.sometimes"}),
        ("    cute = None", "    cute = 1", {"cute"}),
        ('print("loud")', "pass", {"<module>"}),
        ("@triton.jit", "@triton.jit(debug=True)", {"kernel"}),
        ("    kernel(1)", "    kernel(2)", set()),
    ],
)
def test_a_change_belongs_to_the_unit_that_it_is_in(before: str, after: str, names: set[str]) -> None:
    assert changed(before, after) == names


def test_compiled_functions_and_those_whose_results_are_kept_are_opaque() -> None:
    assert {name for name, unit in units_of(FILE).items() if unit.opaque} == {"kernel", "table", "keeping"}


def test_a_unit_mentions_names_attributes_words_in_strings_and_what_it_imports() -> None:
    found = units_of(FILE)
    assert found["Backend.plan"].mentions >= {"secret", "inner", "property"}
    assert units_of("load('my_pkg.kernels', 'no word')")["<module>"].mentions == {"load", "my_pkg", "kernels"}
    assert found["fast"].mentions == {"kernels", "copy_kernel"}
    assert found["Backend.__init__"].called == "Backend"
    assert found["Backend.plan"].called == "plan"
