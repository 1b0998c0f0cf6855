"""The right KV tokens and a wrong result: what is suspected, in which order, and when nothing can be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.contract import AttentionLayer
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.hints import Evidence
from attn_testkit.diagnosis.hints.assumed_numbers import other_scaling
from attn_testkit.diagnosis.hints.numbers import right_keys
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule

DECODE = "decode-mha2-d32-fp32-p4-k40.9.3-shuffled-gauss-b4prod"
LENGTH = 41
"""KV tokens of request 0, which is the longest."""
SUSPECTS = "the KV tokens are right, but softmax weights or values are wrong: look at "
RESCALING = "rescaling of partial sums when a later tile of keys has a larger maximum"
LARGE = "overflow or saturation of large logits"
CLIFF = f"{RESCALING} (logits of this case climb and fall by hundreds along the keys)"
ROUNDED = "q rounded to FP8 (matmul_dtype must declare it)"
WITHOUT_MAXIMUM = (
    "exponentials without subtracting the maximum, of logits or when splits are merged (0 / 0, since all logits of "
    "this case are near -6e4)"
)
MINUS_INFINITY = "a finite value used as minus infinity (all logits of this case are near -6e4)"


def reported(
    case: str = DECODE,
    *wrong: int,
    errors: float = 99.0,
    replay: bool = False,
    seen: int | None = None,
    window: int = -1,
    not_asked: int = 0,
    total: float | None = 1.0,
    **more: Any,
) -> str:
    """The hint where ``wrong`` flat rows are off by so many of their limits, and request 0 attended to what it should.

    ``seen``: KV tokens that it should attend to, of all but ``not_asked`` that were asked about.
    """
    schedule = make_schedule(parse_case(case))
    step = schedule.steps[0]
    expected = expect(schedule, step)
    out = expected.attention.clone()
    for row in wrong or (0,):
        out[:, row, 0, 0] += errors * expected.attention_limit[:, row, 0, 0]
    copies = copies_of([("attention", str(layer), each) for layer, each in enumerate(out.unbind(0))])
    observed = Observation(schedule, step, "", copies, replay=replay)
    length = step.lens[0]
    asked = frozenset(range(length - not_asked))
    right = frozenset(range(len(asked) if seen is None else seen))
    attended = AttendedKeys(0, 0, right, right, frozenset(), asked, length, {}, total, window=window)
    return right_keys(Evidence(schedule, Comparison(observed, expected), attended, [], in_graph=False, **more))


@pytest.mark.parametrize(
    ("case", "suspects"),
    [
        (DECODE, ["scale"]),
        (DECODE.replace("mha2", "gqa2x2"), ["scale", "head mapping"]),
        (DECODE.replace("-b4", "-cap1.5-b4"), ["scale", "soft cap"]),
        (DECODE.replace("-b4", "-sink-b4"), ["scale", "sinks"]),
        (DECODE.replace("fp32", "bf16").replace("-b4", "-kvfp8e4m3-b4"), ["scale", "FP8 scales", ROUNDED]),
        (
            "decode-mla2-d32r16-bf16-p16-k40.9-shuffled-gauss-b2prod",
            ["scale", "head mapping", "the split of a row into latent and rope part"],
        ),
        ("draft-extend-mha2-d32-fp32-p4-k5.9-n3a2.3-shuffled-gauss-b2prod", ["scale", "row order"]),
        ("draft-extend-mha2-d32-fp32-p4-k5.9-n3a1x2-shuffled-gauss-b2prod", ["scale"]),
        (DECODE.replace("gauss", "peaked"), ["scale", LARGE]),
        (DECODE.replace("gauss", "negative"), ["scale", MINUS_INFINITY, "overflow of q k before it is scaled"]),
        (DECODE.replace("gauss", "rising_logits"), [CLIFF, LARGE, "scale"]),
    ],
)
def test_suspects_are_what_the_case_has_the_likeliest_first(case: str, suspects: list[str]) -> None:
    rows = range(make_schedule(parse_case(case)).steps[0].tokens)
    assert reported(case, *rows) == SUSPECTS + ", ".join(suspects)


@pytest.mark.parametrize(
    ("lens", "wrong", "said"),
    [
        ("k16.9.3", (0,), "rows of up to 10 KV tokens are right, but rows of 17 or more are wrong"),
        ("k15.9.3", (0,), None),
        ("k40.20.3", (0, 1), "rows of up to 4 KV tokens are right, but rows of 21 or more are wrong"),
        ("k40.20.3", (1,), None),
        ("k40x2.3", (0,), None),
        ("k40.39.3", (0,), "rows of up to 40 KV tokens are right, but rows of 41 or more are wrong"),
        ("k40.20.3", (0, 1, 2), None),
    ],
)
def test_rescaling_is_suspected_where_only_rows_of_more_than_a_tile_are_wrong(
    lens: str, wrong: tuple[int, ...], said: str | None
) -> None:
    found = reported(DECODE.replace("k40.9.3", lens), *wrong)
    assert found == SUSPECTS + (f"{RESCALING} or splits are merged ({said}), scale" if said else "scale")


STRIDES = "the strides of q (here a view of a packed tensor, not contiguous; row 0 is right under any stride)"


@pytest.mark.parametrize(
    ("view", "wrong", "said"),
    [
        (True, (1, 2), True),
        (False, (1, 2), False),
        (True, (0, 1, 2), False),
        (True, (2,), False),
        (True, (1,), False),
    ],
)
def test_the_strides_of_q_are_suspected_where_it_is_a_view_and_row_0_alone_is_right(
    view: bool, wrong: tuple[int, ...], said: bool
) -> None:
    case = DECODE.replace("k40.9.3", "k9.7.6" if view else "k12.6.5")
    assert (parse_case(case).derived("qkv-memory") == 0) is view
    assert reported(case, *wrong) == SUSPECTS + (f"{STRIDES}, scale" if said else "scale")


def test_a_lone_row_says_nothing_of_strides() -> None:
    lone = (DECODE.replace("k40.9.3", f"k{n}") for n in range(1, 9))
    view = next(each for each in lone if parse_case(each).derived("qkv-memory") == 0)
    assert reported(view, 0) == SUSPECTS + "scale"


def test_where_no_row_is_wrong_no_length_is_suspected() -> None:
    assert RESCALING not in reported(DECODE.replace("gauss", "negative"), errors=0.0)


def test_where_foreign_slots_are_read_nothing_is_suspected_of_the_numbers() -> None:
    assert reported(reads_foreign=True) == ""


def test_in_a_cliff_the_lengths_that_are_wrong_add_nothing() -> None:
    assert reported(DECODE.replace("gauss", "rising_logits")) == f"{SUSPECTS}{CLIFF}, {LARGE}, scale"


@pytest.mark.parametrize(("data", "small"), [("gauss", True), ("peaked", True), ("negative", False)])
def test_a_small_error_is_rounding_unless_every_logit_is_near_minus_infinity(data: str, small: bool) -> None:
    found = reported(DECODE.replace("gauss", data), errors=4.0)
    assert (
        found.startswith("the KV tokens are right, with an error of only 4 times the limit: probably precision")
        is small
    )
    assert found.startswith(SUSPECTS) is not small


@pytest.mark.parametrize(
    ("data", "look_at"),
    [
        ("gauss", ""),
        ("peaked", LARGE),
        ("negative", f"{WITHOUT_MAXIMUM}, a finite value used as minus infinity"),
    ],
)
def test_nan_with_tokens_hidden_behind_a_window_is_called_an_overflow_where_logits_are_large(
    data: str, look_at: str
) -> None:
    case = DECODE.replace("gauss", data)
    hidden = f"a NaN where logits are large: look at {look_at}" if look_at else ""
    assert reported(case, errors=torch.nan, window=4, seen=5) == hidden
    assert reported(case, errors=torch.nan, window=4, seen=5, replay=True) == "", "it may be of another replay"
    assert reported(case, errors=torch.nan, replay=True) == ""


@pytest.mark.parametrize(
    ("fields", "hidden"),
    [
        ({"window": 0, "seen": LENGTH - 1}, True),
        ({"window": 0, "seen": LENGTH}, False),
        ({"window": -1, "seen": LENGTH - 1}, False),
        ({"window": 9, "seen": LENGTH - 5, "not_asked": 4}, True),
        ({"window": 9, "seen": LENGTH - 4, "not_asked": 4}, False),
    ],
)
def test_a_window_hides_tokens_where_fewer_should_be_seen_than_were_asked_about(
    fields: dict[str, int], hidden: bool
) -> None:
    found = reported(DECODE, errors=torch.nan, **fields)
    assert (found == "") is hidden
    assert found.startswith(SUSPECTS) is not hidden
    assert reported(DECODE, **fields).startswith(SUSPECTS), "a number hides nothing"


def test_weights_that_do_not_sum_to_one_are_named_with_what_the_case_has() -> None:
    assert reported(total=0.5) == (
        "weights of the right KV tokens sum to 0.5 instead of 1: look at a denominator that counts masked KV tokens or "
        "misses some, saturation, or partial results that are combined wrongly"
    )
    fp8 = DECODE.replace("fp32", "bf16").replace("-b4", "-kvfp8e4m3-b4")
    assert "instead of 1: look at FP8 scales, a denominator that" in reported(fp8, total=0.6)
    assert reported(fp8, total=0.5).startswith(
        "v_scale is probably applied twice, or applied to values that the KV pool"
    )
    assert reported(fp8, total=2.0).startswith("v_scale is probably not applied, or divided by")
    cap = DECODE.replace("-b4", "-cap1.5-b4")
    assert "or misses some (a soft cap comes before the mask), saturation" in reported(cap, total=0.5)
    assert reported(total=None).startswith(SUSPECTS)


@pytest.mark.parametrize(
    ("count", "total", "more"),
    [
        (10, 10 / 13, 3),
        (10, 10 / 11, 1),
        (40, 40 / 42, 2),
        (41, 41 / 43, 0),
        (10, 10 / 12.5, 0),
        (10, 10 / 13.1, 3),
        (10, 10 / 13.2, 0),
        (10, 0.5, 0),
        (10, 0.26, 0),
        (10, 10 / 9, 0),
        (10, 0.0, 0),
    ],
)
def test_a_sum_of_weights_that_some_kv_tokens_of_value_0_give_says_how_many(
    count: int, total: float, more: int
) -> None:
    said = f"as if there were {more} more of logit 0 and value 0"
    found = reported(seen=count, total=total)
    assert (said in found) is bool(more)
    assert ("instead of 1" in found) is not more


USUAL = "right for a scaling of 1/sqrt(head_dim)"
KEPT = "right with the scaling of layer {} in all layers"


def said_of_scaling(
    case: str, scaling: Callable[[Sequence[AttentionLayer]], Sequence[float]], attended: AttendedKeys | None = None
) -> str:
    """The hint for a step that is right with these scalings of its layers."""
    schedule = make_schedule(parse_case(case))
    step, layers = schedule.steps[0], make_layers(schedule.case)
    others = [replace(layer, scaling=own) for layer, own in zip(layers, scaling(layers), strict=True)]
    out, _ = attend_with_limit(schedule, make_step_data(schedule, step), layers=others)
    copies = copies_of([("attention", str(layer), each.float()) for layer, each in enumerate(out.out.unbind(0))])
    comparison = Comparison(Observation(schedule, step, "", copies), expect(schedule, step))
    return other_scaling(Evidence(schedule, comparison, attended, [], in_graph=False))


@pytest.mark.parametrize("case", [DECODE, DECODE.replace("-b4", "-w4-cap1.5-sink-layers3from5-b4")])
def test_a_scaling_that_makes_it_right_is_named(case: str) -> None:
    first = parse_case(case).layers.first
    assert said_of_scaling(case, lambda layers: [layer.head_dim**-0.5 for layer in layers]).endswith(USUAL)
    for place in (0, 1):
        said = said_of_scaling(case, lambda layers, place=place: [layers[place].scaling] * len(layers))
        assert said.endswith(KEPT.format(first + place))


def test_no_scaling_is_named_where_other_tokens_are_attended_to() -> None:
    def usual(layers: Sequence[AttentionLayer]) -> list[float]:
        return [layer.head_dim**-0.5 for layer in layers]

    for missing, said in ((frozenset[int](), True), (frozenset({3}), False)):
        every = frozenset(range(4))
        attended = AttendedKeys(0, 0, every - missing, every, frozenset(), every, 4, {}, 1.0)
        assert said_of_scaling(DECODE, usual, attended).endswith(USUAL) is said


def test_no_scaling_is_named_where_none_makes_it_right() -> None:
    assert said_of_scaling(DECODE, lambda layers: [layer.scaling**2 for layer in layers]) == ""
    assert said_of_scaling(DECODE, lambda layers: [layer.scaling for layer in layers]) == ""
    usual = DECODE.replace("-b4", "-usualscale-b4")
    assert said_of_scaling(usual, lambda layers: [layer.scaling / 2 for layer in layers]) == ""
