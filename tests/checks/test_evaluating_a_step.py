"""One step: the order of findings, what is not reported twice, and that nothing is computed twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from by_hand import CAPABILITIES, DECODE, LIMIT, expected_zeros, observation, right_outputs, schedule_of, zeros_like
from torch.utils._python_dispatch import TorchDispatchMode

from attn_testkit.checks import BEFORE_OUTPUTS, NUMERIC, Comparison
from attn_testkit.checks.observation import Outputs, copies_of
from attn_testkit.checks.step import evaluate_step
from attn_testkit.contract import Capabilities
from attn_testkit.results.checks import IN_A_STEP

SCHEDULE = schedule_of(DECODE)


def wrong_in_everything(value: float) -> Comparison:
    """Wrong attention, outputs, pool and inputs, and another result than in eager."""
    expected = expected_zeros(SCHEDULE)
    out = zeros_like(expected)
    out[0, 0, 0, 0] = value
    pool = torch.ones(2, 2, (SCHEDULE.num_pages + 1) * SCHEDULE.case.page_size, 1, 2)
    logits = right_outputs(SCHEDULE, expected).next_token_logits
    seen = observation(
        SCHEDULE,
        expected,
        out,
        outputs=Outputs(logits, None),
        pool=pool,
        inputs=(("q", torch.zeros(1), torch.ones(1)),),
        damaged=("a block",),
        eager_run=observation(SCHEDULE, expected, -out),
    )
    return Comparison(seen, expected)


def test_groups_that_are_compared_as_a_whole_are_alike_in_every_bit_or_not_alike() -> None:
    wide, narrow = torch.arange(3), torch.arange(5, dtype=torch.uint8)

    def alike(*now: tuple[str, torch.Tensor]) -> bool:
        before = [("before", "wide", wide), ("before", "narrow", narrow), ("pool", "rows", narrow)]
        mixed = [*before[:1], *(("now", name, tensor) for name, tensor in now), *before[1:]]
        return copies_of(mixed).same("before", "now")  # type: ignore[arg-type]

    assert alike(("wide", wide), ("narrow", narrow))
    assert not alike(("wide", wide), ("narrow", narrow.flip(0)))
    assert not alike(("wide", wide.flip(0)), ("narrow", narrow))
    assert not alike(("wide", wide))
    assert not alike(("wide", wide), ("slim", narrow)), "another name"


def test_a_step_without_rows_has_copies_of_every_type() -> None:
    # What ``--in-process`` looks at as it is; the way to another process would have made the array anew.
    none = copies_of([("pool", "slots", torch.zeros(0, dtype=torch.int64)), ("pool", "rows", torch.zeros(0, 2))])

    assert {name: found.shape for name, found in none.group("pool").items()} == {"slots": (0,), "rows": (0, 2)}


def ids(comparison: Comparison, declared: Capabilities = CAPABILITIES) -> list[str]:
    return [finding.check for finding in evaluate_step(comparison, SCHEDULE, declared)]


def test_what_follows_from_wrong_attention_outputs_is_not_reported_twice() -> None:
    beside = ["inputs-unchanged", "addresses-stable"]
    assert ids(wrong_in_everything(4 * LIMIT)) == ["writes-own-kv", "matches-oracle", *beside]
    assert ids(wrong_in_everything(torch.inf)) == ["writes-own-kv", "finite", *beside]


def test_with_right_attention_outputs_everything_is_evaluated() -> None:
    exact = CAPABILITIES.with_changes(promises={"deterministic": True, "batch_invariant": True})
    assert ids(wrong_in_everything(LIMIT / 4)) == [
        "writes-own-kv",
        "mode-outputs",
        "inputs-unchanged",
        "addresses-stable",
    ]
    assert "graph-matches-eager" in ids(wrong_in_everything(LIMIT / 4), exact), "other bits than in eager"
    for half in ({"promises": {"deterministic": True}}, {"promises": {"batch_invariant": True}}):
        assert "graph-matches-eager" not in ids(wrong_in_everything(LIMIT / 4), CAPABILITIES.with_changes(**half))


OF_STATES = {"writes-own-state", "state-counts-tokens", "conv-window-exact", "state-matches-oracle",
             "state-rounding", "verify-keeps-state"}  # fmt: skip


def test_every_finding_names_its_step() -> None:
    exact = CAPABILITIES.with_changes(promises={"deterministic": True, "batch_invariant": True})
    evaluated = [wrong_in_everything(value) for value in (4 * LIMIT, torch.inf, LIMIT / 4)]
    expected = expected_zeros(SCHEDULE)
    poisoned = zeros_like(expected)
    poisoned.view(torch.int32)[0, 0, 0, 0] = -1
    evaluated.append(Comparison(observation(SCHEDULE, expected, poisoned), expected))
    apart = observation(
        SCHEDULE, expected, zeros_like(expected) + LIMIT, eager_run=wrong_in_everything(-LIMIT).observed
    )
    evaluated.append(Comparison(apart, expected))
    found = [finding for each in evaluated for finding in evaluate_step(each, SCHEDULE, exact)]
    # Cases with parts, codes, states and indexers have tests of their own: test_log_sum_exp.py, test_key_counts.py,
    # test_states_by_hand.py, test_state_rounding.py; padded rows have one in test_memory_limits.py.
    elsewhere = {
        "log-sum-exp",
        "keys-counted-once",
        "padding-finite",
        "received-as-sent",
        "reloaded-as-left",
        *BEFORE_OUTPUTS,
    } | OF_STATES
    assert {finding.check for finding in found} == {check.id for check in IN_A_STEP} - elsewhere, (
        "each is asked for once at least"
    )
    assert {finding.step for finding in found} == {"a step"}


def test_every_check_that_judges_a_step_is_run_and_the_first_finding_is_the_cause() -> None:
    order = [check.id for check in IN_A_STEP]
    causes = ["writes-own-state", "writes-own-kv", *BEFORE_OUTPUTS, "log-sum-exp", *NUMERIC, "graph-matches-eager"]
    assert sorted(causes, key=order.index) == causes
    assert BEFORE_OUTPUTS == ("index-stored", "selection-well-formed", "selects-best")


class Operations(TorchDispatchMode):
    """Counts the operations on whole attention outputs."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.counts = shape, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape and result.dtype == torch.float64:
            self.counts[func.overloadpacket.__name__.rstrip("_")] += 1
        return result


def test_judging_a_step_twice_computes_errors_and_ratios_once() -> None:
    expected = expected_zeros(SCHEDULE)
    out = zeros_like(expected)
    run, other_bits = observation(SCHEDULE, expected, out), observation(SCHEDULE, expected, out + LIMIT / 4)
    for at, wrong, eager, differences in (
        ((0, 0, 0, 0), 0.0, run, 1),
        ((0, 0, 0, 0), 0.0, other_bits, 2),
        ((1, 1, 1, 1), 3 * LIMIT, other_bits, 1),
    ):
        out[at] = wrong
        found = Comparison(observation(SCHEDULE, expected, out, eager_run=eager), expected)
        with Operations(expected.attention.shape) as first:
            evaluate_step(found, SCHEDULE, CAPABILITIES)
            assert found.margin == wrong / LIMIT
        assert first.counts["sub"] == differences, "from the oracle, and where right from an eager run of other bits"
        with Operations(expected.attention.shape) as second:
            evaluate_step(found, SCHEDULE, CAPABILITIES)
            assert found.wrong_requests == ((1,) if wrong else ())
            assert found.worst_row == (1 if wrong else None)
        assert not second.counts, second.counts
