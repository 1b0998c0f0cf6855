"""Which case-runs a mutant can be seen in."""

from __future__ import annotations

import textwrap

import pytest

from attn_testkit_corpus.mutants.operators import mutants_of
from attn_testkit_corpus.mutants.reach import Spot, reaches, spot_of

SOURCE = textwrap.dedent(
    """\
    _kept = {}
    LIMIT = 4

    def plan(a, most=3):
        if (a < 5 and
                a > 6):
            return a + 7
        else:
            x = f(
                8,
            )
        try:
            pass
        except E:
            x = 9
        return x

    @triton.jit
    def kernel(a):
        return a + 10

    @functools.cache
    def once(a):
        return a + 11

    def keeps(a):
        _kept[a] = 12

    class A:
        rows = 13

        @property
        def width(self):
            return 14
    """
).encode()


def spot(number: int) -> Spot:
    """Of the constant so written."""
    found = next(m for m in mutants_of(SOURCE, "a.py") if m.becomes.replace(str(number + 1), str(number)) == m.was)
    return spot_of(SOURCE, found.edit)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (4, Spot(2, 2)),
        (3, Spot(4, 4)),
        (5, Spot(5, 6)),
        (7, Spot(7, 7)),
        (8, Spot(9, 11)),
        (9, Spot(15, 15)),
        (10, Spot(19, 20, scattered=True)),
        (11, Spot(23, 24, scattered=True, kept=True)),
        (12, Spot(27, 27, kept=True)),
        (13, Spot(30, 30)),
        (14, Spot(34, 34)),
    ],
)
def test_a_spot_is_the_statement_without_the_statements_that_it_holds(number: int, expected: Spot) -> None:
    assert spot(number) == expected


RUNS = {"a": {"m": frozenset({7})}, "b": {"m": frozenset({5, 6})}, "c": {"other": frozenset({7})}}


def reached(of: Spot, imported: frozenset[int] = frozenset()) -> set[str]:
    return reaches(of, "m", {"m": imported}, RUNS)


def test_a_case_run_reaches_what_it_executes() -> None:
    assert reached(Spot(7, 7)) == {"a"}
    assert reached(Spot(4, 5)) == {"b"}
    assert reached(Spot(6, 7)) == {"a", "b"}
    assert reached(Spot(8, 9)) == set()


def test_what_runs_at_the_import_counts_for_all() -> None:
    assert reached(Spot(2, 2), frozenset({2})) == {"a", "b", "c"}
    assert reached(Spot(19, 20, scattered=True), frozenset({19})) == {"a", "b", "c"}, "nothing is known of its body"
    assert reached(Spot(6, 7, scattered=True), frozenset({6})) == {"a", "b"}, (
        "a kernel's own lines, where they are seen"
    )


def test_what_is_kept_for_the_process_counts_for_all_once_anyone_comes_there() -> None:
    assert reached(Spot(7, 7, kept=True)) == {"a", "b", "c"}
    assert reached(Spot(8, 8, kept=True)) == set()
