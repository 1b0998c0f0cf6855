"""Where a hint begins and where it ends, on evidence that is written down by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis import hints as package
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.hints import ORDER, Evidence, hints
from attn_testkit.diagnosis.hints.batch import later_by_number
from attn_testkit.diagnosis.hints.evidence import Supposed
from attn_testkit.diagnosis.hints.heads import part_of_a_head
from attn_testkit.diagnosis.hints.hint import Hint, Level, hint, in_order
from attn_testkit.diagnosis.hints.keys import key_range, pool_layout, read_twice
from attn_testkit.diagnosis.hints.numbers import right_keys
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import Schedule, make_schedule

SCHEDULE = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p16-k299.40-shuffled-gauss-b2prod"))
FULL = re.MULTILINE | re.DOTALL
LENGTH = 300
"""KV tokens of request 0."""


def evidence(attended: AttendedKeys | None, errors: float = 2.0, schedule: Schedule = SCHEDULE) -> Evidence:
    """A step whose first value is ``errors`` limits from what is right."""
    step = schedule.steps[0]
    expected = expect(schedule, step)
    expected = replace(
        expected,
        attention=torch.zeros_like(expected.attention),
        attention_limit=torch.ones_like(expected.attention_limit),
        row_limit=torch.full_like(expected.row_limit, 1e9),
    )
    out = torch.zeros(expected.attention.shape)
    out[0, 0, 0, 0] = errors
    copies = copies_of([("attention", str(layer), each) for layer, each in enumerate(out.unbind(0))])
    seen = Observation(schedule, step, "", copies)
    return Evidence(schedule, Comparison(seen, expected), attended, [], in_graph=False)


def attended(used: range | set[int], **fields: object) -> AttendedKeys:
    """What row 0 of request 0 attended to, of all its KV tokens."""
    every = frozenset(range(LENGTH))
    right = AttendedKeys(0, 0, frozenset(used), every, frozenset(), every, LENGTH, {}, 1.0)
    return replace(right, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("errors", "small"), [(4.99, True), (5.0, False), (5.01, False)])
def test_an_error_of_less_than_five_limits_is_called_rounding(errors: float, small: bool) -> None:
    text = right_keys(evidence(attended(range(LENGTH)), errors))
    assert ("precision" in text) is small
    assert ("the KV tokens are right, but softmax weights or values are wrong: look at" in text) is not small


@pytest.mark.parametrize(
    ("total", "whole"), [(0.99, True), (0.981, True), (0.979, False), (1.019, True), (1.021, False)]
)
def test_weights_that_sum_to_one_within_rounding_are_not_called_wrong(total: float, whole: bool) -> None:
    found = attended(range(LENGTH), total=total)
    assert found.normalised is whole
    assert ("sum to" in found.text) is not whole
    assert ("instead of 1" in right_keys(evidence(found))) is not whole


def test_the_layout_of_the_pool_is_named_where_it_is_not_the_usual_one_and_keys_are_wrong() -> None:
    name = SCHEDULE.case.id.replace("-gauss", "-gauss-kvhnd")
    other = make_schedule(parse_case(name))
    wrong, right = attended(range(5)), attended(range(LENGTH))
    assert "this case has layout hnd, which is probably misread if cases of other layouts pass" in pool_layout(
        evidence(wrong, schedule=other)
    )
    for found in (evidence(wrong), evidence(right, schedule=other), evidence(None, schedule=other)):
        assert pool_layout(found) == ""
    assert pool_layout(replace(evidence(wrong, schedule=other), in_graph=True)) == ""
    # None is missing, so none was looked for in the wrong place; a foreign one besides is no proof of that.
    too_many = attended(range(LENGTH + 1))
    assert pool_layout(evidence(too_many, schedule=other)) == ""
    foreign = replace(too_many, elsewhere={"unowned": 0.5})
    assert "layout hnd" in pool_layout(evidence(foreign, schedule=other))


@pytest.mark.parametrize(
    ("used", "text"),
    [
        (range(LENGTH - 1), "the last KV token is missing"),
        (range(LENGTH - 2), "the last 2 KV tokens are missing"),
        (range(288), "the KV tokens of the last page are missing"),
        (range(256), "KV tokens from 256 on are missing: probably a fixed capacity of 256"),
        (range(255), "the last 45 KV tokens are missing"),
        (range(128), "the last 172 KV tokens are missing"),
        (range(1, LENGTH), "the first KV token is missing"),
        (range(2, LENGTH), "the first 2 KV tokens are missing"),
        (set(range(LENGTH)) - {7}, "KV tokens in the middle are missing"),
        ({LENGTH - 1}, "the whole prefix is missing, only new tokens are attended to: probably a path for requests"),
        (set(), "all KV tokens are missing, none is read"),
    ],
)
def test_what_is_missing_is_said(used: range | set[int], text: str) -> None:
    assert text in key_range(evidence(attended(used)))


def test_as_many_read_twice_as_missing_are_one_mistake() -> None:
    twice = attended(set(range(LENGTH)) - {5, 6}, doubled=frozenset({3, 4}))
    assert read_twice(evidence(twice)).startswith("some KV tokens are read twice, others never")
    assert read_twice(evidence(replace(twice, doubled=frozenset({3})))) == ""
    assert read_twice(evidence(attended(range(LENGTH)))) == ""


@pytest.mark.parametrize(("total", "heavier"), [(0.5, True), (0.98, True), (0.99, False), (1.0, False), (2.0, False)])
def test_kv_tokens_whose_weights_do_not_sum_to_one_are_heavier_and_not_counted_twice(
    total: float, heavier: bool
) -> None:
    found = attended(range(LENGTH), doubled=frozenset({299}), total=total)
    assert found.weighed_otherwise is heavier
    assert ("KV tokens 299 have more weight than others" in found.text) is heavier
    assert ("KV tokens 299 counted more than once" in found.text) is not heavier
    reported = key_range(evidence(found))
    assert reported.startswith("KV tokens 299 have more weight than others, and all of them sum to") is heavier
    assert reported.startswith("KV tokens are counted more than once") is not heavier
    assert not replace(found, elsewhere={"tail": 0.1}).weighed_otherwise
    assert not replace(found, doubled=frozenset()).weighed_otherwise
    assert not replace(found, used=frozenset({1})).weighed_otherwise
    assert not replace(found, faint={7: 0.1}).weighed_otherwise


@pytest.mark.parametrize(
    ("doubled", "part"),
    [
        (range(0, LENGTH, 2), "rank 0 of 2"),
        (range(1, LENGTH, 2), "rank 1 of 2"),
        (range(1, LENGTH - 2, 2), ""),
        ([*range(0, LENGTH, 2), 7], ""),
    ],
)
def test_a_part_that_weighs_more_than_the_others_is_a_matter_of_its_log_sum_exp(
    doubled: Sequence[int], part: str
) -> None:
    found = attended(range(LENGTH), doubled=frozenset(doubled))
    with_kv_splits = make_schedule(
        parse_case("decode-gqa2x2-d32-fp32-p1-k299.40-shuffled-gauss-lsepages2merged-b2prod")
    )
    reported = key_range(evidence(found, schedule=with_kv_splits))
    assert reported.startswith(f"all KV tokens of {part} have more weight than those of other KV splits") is bool(part)
    assert "counted more than once" in key_range(evidence(found)), "this case has no parts"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({298}, "of the prefix, the last KV token is missing, but new ones are read, as many as it has new rows"),
        ({297, 298}, "of the prefix, the last 2 KV tokens are missing, but new ones are read"),
        ({296, 297}, "KV tokens in the middle are missing"),
        (set(range(299)), "the whole prefix is missing"),
    ],
)
def test_the_end_of_a_prefix_is_no_split_that_is_skipped(missing: set[int], said: str) -> None:
    reported = key_range(evidence(attended(set(range(LENGTH)) - missing)))
    assert reported.startswith(said)
    assert ("as many as it has new rows" in reported) is (missing == {298})


def test_the_text_says_what_was_attended_to_and_what_was_expected() -> None:
    assert attended(set()).text == "request 0 attended to no KV token, expected 0..299"
    assert attended(range(9)).text == "request 0 attended to KV tokens 0..8, expected 0..299"
    assert attended(range(LENGTH)).text == "request 0 attended to the right KV tokens, 0..299"


@pytest.mark.parametrize(("first", "said"), [(7, False), (8, True)])
def test_requests_from_the_eighth_on_are_a_block_of_requests(first: int, said: bool) -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p16-k5x12-shuffled-gauss-b12prod"))
    found = evidence(None, 0.0, schedule)
    for out in found.observed.attention:
        out[first:] = 3.0
    assert found.wrong == list(range(first, 12))
    assert bool(later_by_number(found)) is said


def test_a_part_of_a_head_is_some_of_its_values_and_not_all() -> None:
    found = evidence(None, torch.nan)
    assert "only a part of a head's values" in part_of_a_head(found)
    whole = evidence(None, 0.0)
    whole.observed.attention[0][0, 0] = torch.nan
    assert part_of_a_head(whole) == ""


def named(name: str, level: Level, *silences: str | Level, when: bool = True) -> Hint:
    def find(e: Evidence) -> str:
        return name

    find.__name__ = name
    return Hint(find, level, lambda _: when, silences)


def test_every_hint_that_is_written_is_asked_once() -> None:
    texts = [path.read_text() for path in Path(package.__file__).parent.glob("*.py")]
    written = [name for text in texts for name in re.findall(r"^@(?:hint|assumption)\b.*?^def (\w+)", text, FULL)]
    assert len(written) > 50
    assert sorted(each.name for each in ORDER) == sorted(written)


def test_hints_are_asked_by_level_and_who_silences_another_before_it() -> None:
    late, early = named("late", Level.GUESS), named("early", Level.CAUSE)
    silenced, silencing = named("silenced", Level.SHOWN), named("silencing", Level.PLACE, "silenced")
    assert in_order([late, silenced, silencing, early]) == (early, silencing, silenced, late)
    for place, each in enumerate(ORDER):
        assert all(before.name not in each.silences for before in ORDER[:place])


def test_a_hint_that_silences_nobody_or_in_a_circle_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="silence nobody, but no hint has that name"):
        in_order([named("one", Level.GUESS, "nobody")])
    with pytest.raises(ValueError, match="silence each other: one, two"):
        in_order([named("one", Level.GUESS, "two"), named("two", Level.GUESS, "one")])
    with pytest.raises(AssertionError, match="two hints are named key_range"):
        hint(Level.GUESS)(key_range.find)


@pytest.mark.parametrize(
    ("level", "silent"),
    [
        (Level.CAUSE, set(Level)),
        (Level.SHOWN, {Level.GUESS}),
        (Level.ANSWER, {Level.ANSWER, Level.GUESS}),
        (Level.PATTERN, set()),
        (Level.PLACE, set()),
        (Level.GUESS, set()),
        (Level.REMARK, set()),
    ],
)
def test_what_is_shown_leaves_nothing_to_guess(level: Level, silent: set[Level]) -> None:
    mine = named("mine", level)
    assert {other for other in Level if mine.silences_other(named("other", other))} == silent
    assert not mine.silences_other(mine)
    by_name, by_level = named("mine", level, "other"), named("mine", level, Level.REMARK)
    assert all(by_name.silences_other(named("other", other)) for other in Level)
    assert by_level.silences_other(named("other", Level.REMARK))


def test_a_silenced_hint_is_not_asked_and_one_that_does_not_fit_silences_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = named("first", Level.PATTERN, "second"), named("second", Level.PLACE)
    for fits, reported in ((True, ["first"]), (False, ["second"])):
        monkeypatch.setattr(package, "ORDER", (replace(first, when=lambda _, fits=fits: fits), second))
        assert hints(evidence(None)) == reported


@pytest.mark.parametrize(
    ("row", "every_row", "text"),
    [(None, False, "no values"), (None, True, "no values"), (0, False, "no values"), (0, True, ""), (1, False, "")],
    ids=["all", "all of all", "the wrong row", "but not the right one", "neither"],
)
def test_an_assumption_gives_the_first_text_whose_answer_every_wrong_row_has(
    row: int | None, every_row: bool, text: str
) -> None:
    """``row``: the one that has no values, or something else where it is 1; None: all."""
    expected = expect(SCHEDULE, SCHEDULE.steps[0])
    out = expected.attention.float().clone()
    out[:, row if row is not None else slice(None)] = 0.5 if row else 0.0
    copies = copies_of([("attention", str(layer), each) for layer, each in enumerate(out.unbind(0))])
    seen = Observation(SCHEDULE, SCHEDULE.steps[0], "", copies)
    found = Evidence(SCHEDULE, Comparison(seen, expected), None, [], in_graph=False)

    def suppose(e: Evidence) -> Iterator[Supposed]:
        data = e.expected.data
        assert data.stored_values is not None
        none = replace(data, stored_values=data.stored_values * 0)
        yield Supposed("its own", every_row=every_row)
        yield Supposed("no values", none, every_row=every_row)
        yield Supposed("nor keys", none)

    assert Hint(suppose, Level.ANSWER, lambda _: True, ())(found) == (text or ("nor keys" if row == 0 else ""))
    assert Hint(suppose, Level.ANSWER, lambda _: False, ())(found) == ""


def test_every_pattern_that_fits_is_a_hint_and_the_most_telling_comes_first() -> None:
    twice = evidence(attended(set(range(LENGTH)) - {5, 6}, doubled=frozenset({3, 4})))
    assert hints(twice) == [read_twice(twice), key_range(twice)]
    assert all(hints(twice))
    nothing = evidence(None)
    assert hints(nothing) == []


@pytest.mark.parametrize(
    ("used", "tiled"), [(15, False), (16, True), (17, False), (32, True), (48, False), (64, False), (128, False)]
)
def test_tiles_that_all_read_the_first_one_of_their_page_look_like_a_length(used: int, tiled: bool) -> None:
    pages_of_64 = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p64-k299.40-shuffled-gauss-b2prod"))
    reported = key_range(evidence(attended(range(used)), schedule=pages_of_64))
    assert ("whose offset in the page is ignored" in reported) is tiled


def test_a_shift_of_a_later_row_may_be_the_masks() -> None:
    due = set(range(20, 30))
    for row, text in ((0, "that they count from is off"), (3, "that they count from, or the row of a mask is off")):
        found = attended({key + 1 for key in due}, row=row, wanted=frozenset(due))
        assert key_range(evidence(found)) == f"all KV tokens are shifted by 1: probably the length or position {text}"


def test_a_window_that_is_shifted_beyond_the_first_token_is_a_shift_as_well() -> None:
    due = frozenset(range(3, 15))
    cut = attended(set(range(11)), wanted=due, length=20)
    assert key_range(evidence(cut)).startswith("all KV tokens are shifted by -4: probably the length or position")
    assert "shifted" not in key_range(evidence(attended(set(range(11)) - {5}, wanted=due, length=20)))
    assert "shifted" not in key_range(evidence(attended({*range(1, 11)}, wanted=due, length=20)))


def test_a_shift_by_the_number_of_new_rows_is_a_length_without_them() -> None:
    four = make_schedule(parse_case("draft-extend-v2-mqa2-d32-fp32-p1-k30.14-n4a4x2-shuffled-gauss-w11-b2prod"))
    due = frozenset(range(3, 15))
    text = "the last 4 KV tokens are missing, as many as the request has new rows, and the window begins as many too"
    assert key_range(evidence(attended(set(range(11)), wanted=due, length=18), schedule=four)).startswith(text)
    of_three = attended(set(range(12)), wanted=due, length=18)
    assert key_range(evidence(of_three, schedule=four)).startswith("all KV tokens are shifted by -3")
