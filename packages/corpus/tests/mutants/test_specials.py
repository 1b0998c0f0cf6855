"""The operators for what goes wrong in attention backends."""

from __future__ import annotations

import pytest

from attn_testkit_corpus.mutants.operators import mutants_of
from attn_testkit_corpus.mutants.specials import ALL, SPECIALS, UNSEEN, is_capability


def becomes(source: str) -> list[str]:
    return [mutant.becomes for mutant in mutants_of(source.encode(), "a.py", UNSEEN, SPECIALS, is_capability)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f(a, b, c)", ["f(b, a, c)", "f(a, c, b)"]),
        ("f(a, *b)", []),
        ("f(1, a)", []),
        ("torch.minimum(a, b)", []),
        ("x = a[i, j]", ["x = a[j, i]"]),
        ("x = a[:, j]", []),
        ("x = torch.int32", ["x = torch.int64"]),
        ("x = torch.bfloat16", ["x = torch.float16"]),
        ("x = tl.float32", ["x = tl.float16"]),
        ("x = a.float32", []),
        ("x = a.long()", ["x = a.int()"]),
        ("x = a.float()", ["x = a.half()"]),
        ("x = tl.load(p, mask=m, other=0.0)", ["x = tl.load(p)"]),
        ("x = tl.load(p + i, mask=m, eviction_policy=e)", ["x = tl.load(p + i, eviction_policy=e)"]),
        ("x = tl.load(p)", []),
        ("x.copy_(y)", ["x = y"]),
        ("self.x.copy_(y)", ["self.x = y"]),
        ("x[:n].copy_(y)", []),
        ("x.copy_(y, True)", ["x.copy_(True, y)"]),
        ("x = y.zero_()", ["x = y"]),
        ("x = y.clone()", ["x = y"]),
        ("x = y.clamp(min=0)", ["x = y"]),
        ("x = pool[layer.layer_id]", ["x = pool[0]"]),
        ("self.layer_id = x", []),
        ("x = c.group_of(layer).pool", ["x = c.groups[0].pool"]),
        ("x = a if b is None else c", ["x = a if True else c", "x = a if False else c"]),
        ("f(a)\ng(b)", ["g(b)\nf(a)"]),
        ("f(a)\nx = g(b)", []),
    ],
)
def test_an_operator_makes_one_mistake_of_backends(source: str, expected: list[str]) -> None:
    # Calls that follow each other at the top of a module have no statement that holds them.
    inside = "def run():\n" + "\n".join(f"    {line}" for line in source.splitlines())
    assert sorted(becomes(inside)) == sorted(expected)


def test_a_guard_is_taken_always_and_never() -> None:
    source = "def run():\n    if self.cached is None:\n        f(a)\n"
    assert [b for b in becomes(source) if b.startswith("if")] == ["if True:", "if False:"]


def test_capabilities_are_left_as_they_are_and_so_is_what_only_changes_the_speed() -> None:
    declared = (
        "class A:\n    capabilities: Capabilities = Capabilities(max_q_rows=8)\n    capabilities = f(3)\n    rows = 8\n"
    )
    assert {m.was for m in mutants_of(declared.encode(), "a.py", UNSEEN, ALL, is_capability)} == {"rows = 8"}
    launch = b"def run():\n    x = kernel[3](a=b, num_warps=4, num_stages=2)\n"
    assert not [m for m in mutants_of(launch, "a.py", UNSEEN, ALL) if "num_" not in m.becomes or "=5" in m.becomes]


@pytest.mark.parametrize("decorator", ["", "@classmethod\n    ", "@a.b(1)\n    # why\n    @property\n    "])
def test_two_arguments_that_are_alike_do_not_change_places_whatever_decorates_the_function(decorator: str) -> None:
    source = f"class A:\n    {decorator}def f(cls):\n        return g(h(x), h(x), h(y))\n"
    found = [m.becomes for m in mutants_of(source.encode(), "a.py", operators=SPECIALS)]
    assert found == ["return g(h(x), h(y), h(x))"]
