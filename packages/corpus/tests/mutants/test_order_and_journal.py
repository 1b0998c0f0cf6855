"""What is tried first on a mutant, and what is known after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attn_testkit.cases.case import parse_case
from attn_testkit.registry import UsageError
from attn_testkit.running.planning.request import Item
from attn_testkit_corpus.mutants.journal import KILLED, SURVIVED, Journal, Run, Verdict
from attn_testkit_corpus.mutants.operators import Mutant, mutants_of
from attn_testkit_corpus.mutants.order import Order, name_of


def items(*cases: str, execution: str = "eager") -> list[Item]:
    return [Item("b", "decode", execution, case) for case in cases]


def mutants(source: str = "def f():\n    return a < 3\ndef g():\n    return a < 4\n") -> list[Mutant]:
    return mutants_of(source.encode(), "a.py")


CASES = [f"decode-mha2-d64-fp16-p16-k{n}x2-reversed-gauss-b2prod" for n in (7, 8, 9, 10, 11, 12)]
ALIKE = [case for case in CASES if not parse_case(case).inference_mode]


SAME_MODE = ALIKE[:3]


def test_what_killed_a_neighbour_comes_first_and_the_cheap_before_the_dear() -> None:
    tried = items(*SAME_MODE)
    order = Order(tried, {name_of(tried[0]): 3.0, name_of(tried[1]): 1.0, name_of(tried[2]): 2.0})
    names = {name_of(item) for item in tried}
    of_f, of_g = mutants()[0], mutants()[-1]
    assert order.of(of_f, names) == [tried[1], tried[2], tried[0]]
    order.learn(of_f, [name_of(tried[0])], name_of(tried[0]))
    assert order.of(of_f, names)[0] == tried[0]
    assert order.of(of_g, names) == [tried[1], tried[0], tried[2]], "a kill in another function counts for less"


def test_many_kills_do_not_keep_a_dear_case_run_before_a_cheap_one_that_kills_as_often() -> None:
    dear, cheap, _ = tried = items(*SAME_MODE)
    order = Order(tried, {name_of(dear): 4.0, name_of(cheap): 0.2})
    first = mutants()[0]
    for _ in range(20):
        order.learn(first, [name_of(dear)], name_of(dear))
    assert order.of(first, {name_of(dear), name_of(cheap)}) == [cheap, dear]


def test_what_neighbours_survive_comes_later_the_oftener_they_do() -> None:
    first, second, third = tried = items(*SAME_MODE)
    order = Order(tried, {name_of(first): 0.2, name_of(second): 0.25, name_of(third): 0.3})
    names, mutant = {name_of(item) for item in tried}, mutants()[0]
    assert order.of(mutant, names) == tried
    order.learn(mutant, [name_of(first), name_of(second)], name_of(second))
    assert order.of(mutant, names) == [second, third, first]
    for _ in range(20):
        order.learn(mutant, [name_of(second)])
    assert order.of(mutant, names) == [third, first, second]


def test_under_no_grad_comes_before_inference_mode_whatever_kills() -> None:
    tried = items(*CASES)
    modes = {name_of(item): parse_case(item.case).inference_mode for item in tried}
    assert set(modes.values()) == {True, False}, "choose other cases"
    order = Order(tried, {})
    first = mutants()[0]
    for name, inference in modes.items():
        if inference:
            order.learn(first, [name], name)
    chosen = [modes[name_of(item)] for item in order.of(first, modes)]
    assert chosen == sorted(chosen)


def test_only_what_reaches_it_is_tried() -> None:
    tried = items(*CASES)
    assert order_names(tried, {name_of(tried[2])}) == [name_of(tried[2])]


def order_names(tried: list[Item], names: set[str]) -> list[str]:
    return [name_of(item) for item in Order(tried, {}).of(mutants()[0], names)]


def test_a_journal_is_read_again_and_of_another_state_it_is_not(tmp_path: Path) -> None:
    file = tmp_path / "new" / "mutants.jsonl"
    journal = Journal(file, "one")
    journal.import_ran({"m": frozenset({1, 2})})
    journal.ran(Run("eager:x", 0.5, {"m": frozenset({3})}))
    journal.evaluated("abc", Verdict(KILLED, "matches-oracle", "eager:x", 1, "", 0.25), {"line": 3})
    journal.evaluated("def", Verdict(SURVIVED, runs=4, tried="d1"), {"line": 4})
    file.write_text(file.read_text() + '{"half a li')
    journal.close()
    again, other = Journal(file, "one"), Journal(file, "two")
    again.close()
    other.close()
    assert (again.imported, again.runs, again.verdicts) == (journal.imported, journal.runs, journal.verdicts)
    assert (other.imported, other.runs, other.verdicts) == ({}, {}, {})
    assert [json.loads(line).get("line") for line in file.read_text().splitlines()[2:4]] == [3, 4]


def test_a_journal_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        Journal(tmp_path / "file" / "mutants.jsonl", "one")
