"""Checks are registered once, with all that is said of them; and what a case-run judged is never more than it did."""

from __future__ import annotations

import pytest
from by_hand import CAPABILITIES

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import (
    CHECKS,
    NUMERIC,
    REPORTED_INSTEAD,
    Evaluation,
    Stage,
    _joined,
    evaluated,
    evaluations,
)
from attn_testkit.contract import Execution, Indexer, LogSumExp, Sparse

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
ALONE = parse_case("decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-b1prod")
FILLED = parse_case("decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4small")
EXACT = CAPABILITIES.with_changes(
    promises={"deterministic": True, "batch_invariant": True, "mode_invariant": True},
    needs={"cpu_seq_lens": False},
    lse=LogSumExp("e", whole={"decode"}),
    server={"finite_padding": True},
)
SELECTS = CAPABILITIES.with_changes(sparse=Sparse(topk={16}, indexer=Indexer(heads={4})))
SELECTING = parse_case("decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-sel16-idx4-b1prod")


def test_every_check_says_all_that_is_asked_of_it() -> None:
    for id_, check in CHECKS.items():
        assert check.id == id_
        for text in (check.text, check.cause, check.source, check.how_to_read):
            assert text.strip(), f"{id_} leaves a text out"
        for text in (check.text, check.cause, check.how_to_read):
            assert text.endswith("."), f"{id_}: {text}"
    assert set(NUMERIC) | set(REPORTED_INSTEAD) <= CHECKS.keys()


def test_an_evaluation_joins_the_check_of_its_id_and_each_check_of_a_step_has_one() -> None:
    joined = evaluations()
    assert list(joined) == list(CHECKS)
    found = [each for each in joined.values() if each.run]
    assert _joined(found) == {id_: each if each.run else Evaluation(id_) for id_, each in joined.items()}
    with pytest.raises(ValueError, match="'of-nobody', which results"):
        _joined([*found, Evaluation("of-nobody")])
    with pytest.raises(ValueError, match=f"two evaluations of '{found[0].check}'"):
        _joined([*found, found[0]])
    with pytest.raises(ValueError, match=f"{found[-1].check} has a place in the evaluation of a step"):
        _joined(found[:-1])
    with pytest.raises(ValueError, match="completes has no place in the evaluation of a step"):
        _joined([*found, Evaluation("completes", run=found[0].run)])


@pytest.mark.parametrize("execution", Execution)
def test_a_case_run_that_came_to_its_end_has_evaluated_all_that_applies(execution: Execution) -> None:
    applies = [id_ for id_, how in evaluations().items() if how.applies(EXACT, execution)]
    assert evaluated(EXACT, execution, Stage.COMPLETED, ()) == (tuple(applies), ())


EAGER_ALONE = {
    "compiles-once",
    "steps-independent",
    "refuses-undeclared",
    "repeatable",
    "batch-invariant",
    "mode-invariant",
}
GRAPH_ALONE = {
    "graph-matches-eager", "captures-cleanly", "replay-follows-batch", "addresses-stable", "padding-inert",
    "padding-finite", "buckets-independent", "capabilities-honest",
}  # fmt: skip


def test_a_check_applies_eagerly_or_in_graphs_or_in_both() -> None:
    def not_applied(execution: Execution) -> set[str]:
        return {
            id_
            for id_, how in evaluations().items()
            if not any(how.applies(each, execution) for each in (EXACT, SELECTS))
        }

    assert not_applied(GRAPH) == EAGER_ALONE
    assert not_applied(EAGER) == GRAPH_ALONE


def test_checks_of_an_indexer_apply_where_one_is_declared_and_the_case_has_it() -> None:
    indexer = {"index-stored", "selection-well-formed", "selects-best"}
    assert {id_ for id_ in indexer if evaluations()[id_].applies(SELECTS, EAGER)} == indexer
    assert not any(evaluations()[id_].applies(EXACT, EAGER) for id_ in indexer)
    assert indexer <= set(evaluated(SELECTS, EAGER, Stage.COMPLETED, (), SELECTING)[0])
    assert not indexer & set(evaluated(SELECTS, EAGER, Stage.COMPLETED, (), ALONE)[0])
    fused = parse_case(SELECTING.id.replace("idx4", "idx4fused"))
    assert indexer & set(evaluated(SELECTS, EAGER, Stage.COMPLETED, (), fused)[0]) == {"index-stored"}


@pytest.mark.parametrize(
    ("failed", "hidden"),
    [
        ("index-stored", {"selection-well-formed", "selects-best"}),
        ("selection-well-formed", {"selects-best"}),
        ("selects-best", set()),
    ],
)
def test_a_wrong_selection_hides_what_follows_from_it(failed: str, hidden: set[str]) -> None:
    done, missing = evaluated(SELECTS, EAGER, Stage.COMPLETED, {failed}, SELECTING)
    assert failed in done
    assert hidden | set(NUMERIC) - {"keys-counted-once"} <= set(missing)
    assert not {"index-stored", "selection-well-formed"} - hidden - {failed} & set(missing)


def test_what_is_not_declared_is_not_listed_at_all() -> None:
    done, missing = evaluated(CAPABILITIES.with_changes(needs={"cpu_seq_lens": True}), EAGER, Stage.STARTED, ())
    assert not {"repeatable", "batch-invariant", "no-host-lengths"} & {*done, *missing}


def test_a_constructor_that_raises_leaves_nothing_evaluated_but_that() -> None:
    done, missing = evaluated(EXACT, GRAPH, Stage.STARTED, {"completes"})
    assert done == ("completes",)
    assert set(done) | set(missing) == set(evaluated(EXACT, GRAPH, Stage.COMPLETED, ())[0])


def test_nothing_is_called_kept_in_a_case_run_that_has_not_begun() -> None:
    assert evaluated(EXACT, EAGER, Stage.STARTED, ())[0] == ()


FROM = [
    (EAGER, Stage.CONSTRUCTED, set()),
    (EAGER, Stage.COMPLETED, {"compiles-once"}),
    (EAGER, Stage.OBSERVED, {"output-contract", "matches-oracle", "finite", "writes-own-kv", "reads-own-kv"}),
    (GRAPH, Stage.CAPTURED, {"captures-cleanly"}),
    (GRAPH, Stage.REPLAYED, {"replay-follows-batch", "addresses-stable", "no-host-lengths", "padding-finite"}),
    (GRAPH, Stage.COMPLETED, {"completes", "padding-inert", "buckets-independent", "leaves-process-alone"}),
]


@pytest.mark.parametrize(("execution", "stage", "new"), FROM, ids=[f"{e}-{s.name}" for e, s, _ in FROM])
def test_a_check_is_evaluated_from_its_stage_on_and_not_before(
    execution: Execution, stage: Stage, new: set[str]
) -> None:
    now, before = evaluated(EXACT, execution, stage, ())[0], evaluated(EXACT, execution, Stage(stage - 1), ())[0]
    assert new <= set(now)
    assert not new & set(before)


def test_a_failed_check_counts_as_evaluated_however_early_it_ended() -> None:
    done, missing = evaluated(EXACT, GRAPH, Stage.CONSTRUCTED, {"captures-cleanly"})
    assert done == ("captures-cleanly",)
    assert "captures-cleanly" not in missing
    assert evaluated(EXACT, EAGER, Stage.COMPLETED, {"captures-cleanly"})[0].count("captures-cleanly") == 1
    assert evaluated(EXACT, EAGER, Stage.STARTED, {"of-another-version"})[0] == ("of-another-version",)


@pytest.mark.parametrize("check", [*NUMERIC, *REPORTED_INSTEAD])
def test_wrong_attention_outputs_hide_what_is_evaluated_behind_them(check: str) -> None:
    done, missing = evaluated(EXACT, GRAPH, Stage.COMPLETED, {check})
    assert check in done
    assert {"mode-outputs", "graph-matches-eager"} <= set(missing)
    assert {"writes-own-kv", "inputs-unchanged", "matches-oracle"} <= set(done)
    for other in {"replay-follows-batch", "padding-inert", "padding-finite", "buckets-independent", "reads-own-kv"} - {
        check
    }:
        assert other in missing, "one cause is named, of the others nothing is known"


def test_other_failures_hide_nothing() -> None:
    assert evaluated(EXACT, GRAPH, Stage.COMPLETED, {"mode-outputs", "writes-own-kv"})[1] == ()


def test_what_a_case_cannot_show_is_not_listed_either_way() -> None:
    assert "batch-invariant" not in {*sum(evaluated(EXACT, EAGER, Stage.COMPLETED, (), ALONE), ())}
    assert "batch-invariant" in evaluated(EXACT, EAGER, Stage.COMPLETED, (), FILLED)[0]
    assert "padding-inert" not in {*sum(evaluated(EXACT, GRAPH, Stage.STARTED, (), FILLED), ())}
    assert "padding-inert" in evaluated(EXACT, GRAPH, Stage.COMPLETED, (), ALONE)[0]


def test_a_check_that_had_nothing_to_compare_with_was_not_evaluated() -> None:
    done, missing = evaluated(EXACT, EAGER, Stage.COMPLETED, (), None, ("mode-invariant",))
    assert (set(missing), "mode-invariant" in done) == ({"mode-invariant"}, False)
    assert "mode-invariant" in evaluated(EXACT, EAGER, Stage.COMPLETED, ())[0]
    assert (
        "mode-invariant" in evaluated(EXACT, EAGER, Stage.COMPLETED, {"mode-invariant"}, None, ("mode-invariant",))[0]
    )
    never = evaluated(CAPABILITIES, EAGER, Stage.COMPLETED, (), None, ("mode-invariant",))
    assert "mode-invariant" not in sum(never, ()), "it is not declared"


def test_ids_come_in_reading_order() -> None:
    order = list(CHECKS)
    for ids in evaluated(EXACT, GRAPH, Stage.CAPTURED, {"finite"}):
        assert list(ids) == sorted(ids, key=order.index)
    assert evaluated(EXACT, EAGER, Stage.STARTED, ["b", "finite", "completes", "a"])[0] == (
        "completes", "finite", "a", "b",
    )  # fmt: skip


def test_a_replay_of_a_mode_in_graphs_alone_is_held_against_no_eager_run() -> None:
    alone = CAPABILITIES.with_changes(eager=set(CAPABILITIES.eager) - {FILLED.mode}, graph={FILLED.mode})
    done, missing = evaluated(alone, GRAPH, Stage.COMPLETED, (), FILLED)
    assert missing == ("graph-matches-eager",)
    assert {"matches-oracle", "replay-follows-batch", "buckets-independent"} <= set(done)
    assert "graph-matches-eager" in evaluated(CAPABILITIES, GRAPH, Stage.COMPLETED, (), FILLED)[0]
    assert evaluated(alone, GRAPH, Stage.COMPLETED, ())[1] == ()


def test_what_is_not_declared_is_asked_for_in_graphs_where_nothing_runs_eagerly() -> None:
    nothing = CAPABILITIES.with_changes(eager=(), graph={FILLED.mode})
    assert "refuses-undeclared" in evaluated(nothing, GRAPH, Stage.COMPLETED, (), FILLED)[0]
    assert "refuses-undeclared" not in evaluated(CAPABILITIES, GRAPH, Stage.COMPLETED, (), FILLED)[0]
    assert "refuses-undeclared" in evaluated(CAPABILITIES, EAGER, Stage.COMPLETED, (), FILLED)[0]


def test_a_wrong_warm_up_hides_no_check_if_all_steps_are_right() -> None:
    """NaN in a warm-up is reported by the check of outputs, and the replays were evaluated all the same."""
    done, missing = evaluated(EXACT, GRAPH, Stage.COMPLETED, {"finite"}, steps_right=True)
    assert "replay-follows-batch" in done
    assert missing == ()
    assert "replay-follows-batch" in evaluated(EXACT, GRAPH, Stage.COMPLETED, {"finite"})[1]
