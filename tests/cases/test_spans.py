"""Bidirectional spans of cases: where they lie, which layers have them, and which backends are asked for them."""

from __future__ import annotations

import itertools

import pytest
import torch
from attn_testkit.runner_modes.harness import context_for

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.features.spans import SPANS
from attn_testkit.cases.spans import SpanShape, spans_of_request
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, Spans, Unsupported, Windows
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import Schedule, Step, make_schedule

DECLARED = TorchNativeBackend.capabilities
CASE = "extend-gqa2x2-d32-fp32-p4-k19.6.8-n9a9.4.7-shuffled-gauss-w7-{}-b3prod"
NARROW = DECLARED.with_changes(spans=Spans({"extend"}))


def max_spans(schedule: Schedule) -> int:
    """Most spans of a request that the context of an instance says."""
    assert SPANS.context is not None
    return int(SPANS.context([schedule])["max_spans"])


@pytest.mark.parametrize(("of_prefix", "wide"), [*itertools.product((False, True), repeat=2)])
def test_spans_are_ascending_inside_their_request_and_no_wider_or_earlier_than_is_declared(
    of_prefix: bool, wide: bool
) -> None:
    earlier = wider = 0
    for turn, prefix, new, window, seed in itertools.product(
        range(5), (0, 1, 2, 9, 130), (1, 2, 4, 5, 40, 300), (-1, 0, 4, 20), range(2)
    ):
        behind = -1
        for first, last in spans_of_request(SpanShape(of_prefix, wide), turn, prefix, new, window, seed):
            assert behind < first <= last < prefix + new
            behind = last
            earlier += first < prefix
            wider += window >= 0 and last - first > window
    assert (earlier > 0, wider > 0) == (of_prefix, wide)


def test_requests_of_successive_turns_have_adjacent_spans_none_several_one_in_the_middle_and_all_rows() -> None:
    blocks, none, several, middle, whole = (spans_of_request(SpanShape(), turn, 9, 70, -1, 1) for turn in range(5))
    assert blocks == ((9, 40), (41, 72), (73, 78)), "blocks of 32 rows, the last one cut"
    assert none == ()
    assert several == ((9, 25), (26, 26), (62, 78)), "the first row, a span of one row, and the last row"
    assert len(middle) == 1
    assert middle[0][1] < 78
    assert whole == ((9, 78),)
    begun = spans_of_request(SpanShape(of_prefix=True), 4, 9, 70, -1, 1)
    assert begun[-1][0] < 9 < begun[-1][1] < 78


def test_a_case_says_its_spans_and_layers_differ_only_where_it_says_so() -> None:
    for word, of_prefix, wide, by_layer in (("spans", 0, 0, 0), ("spansprefixwidebylayer", 1, 1, 1)):
        case = parse_case(CASE.format(word))
        assert case.spans == SpanShape(bool(of_prefix), bool(wide), bool(by_layer))
        having = [layer.bidirectional_spans for layer in make_layers(case)]
        assert having.count(True) == (1 if by_layer else 2)
    alone = parse_case(CASE.format("spansbylayer").replace("w7", "w7same"))
    assert [layer.bidirectional_spans for layer in make_layers(alone)] == [True, False], "where all have a window"
    one = parse_case(CASE.format("spansbylayer").replace("w7", "w7one"))
    layers = make_layers(one)
    assert [each.bidirectional_spans for each in layers] == [each.sliding_window_size >= 0 for each in layers]
    assert not any(layer.bidirectional_spans for layer in make_layers(parse_case(CASE.replace("-{}", ""))))


def test_steps_have_other_spans_and_a_chunk_has_its_own() -> None:
    case = parse_case(CASE.format("spans").replace("-shuffled", "-chunks2-shuffled"))
    schedule = make_schedule(case)
    assert max_spans(schedule) == max(len(r.spans) for step in schedule.steps for r in step.requests) > 1
    every = [tuple(request.spans for request in step.requests) for step in schedule.steps]
    assert len(set(every)) == len(every)
    (chunk,) = schedule.chunks
    assert chunk.chunk_of is not None
    assert any(request.spans for request in chunk.requests)
    for step in (schedule.steps[0], chunk):
        assert all(r.prefix <= first and last < r.prefix + r.new for r in step.requests for first, last in r.spans)
    assert max_spans(make_schedule(parse_case(CASE.replace("-{}", "")))) == 0


def _lies_in_prefix(step: Step) -> bool:
    return all(last < request.prefix for request in step.requests for _, last in request.spans)


def test_spans_of_a_decode_lie_in_the_prompt() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k19.6.8-shuffled-gauss-w7-spans-b3prod"))
    assert max_spans(schedule)
    assert all(map(_lies_in_prefix, schedule.steps))


@pytest.mark.parametrize(
    ("word", "other"),
    [("spans-alibi", "ALiBi"), ("spans-multi_mode", "multi-mode"), ("spans-noncausal", "sees all keys already")],
)
def test_what_no_server_has_together_with_spans_is_refused(word: str, other: str) -> None:
    of_spans, more = word.split("-")
    base = CASE.replace("w7-", "") if more == "noncausal" else CASE
    before = f"{more}-{of_spans}" if more == "alibi" else of_spans
    case_id = base.format(before) + ("" if more == "alibi" else f"-{more}")
    with pytest.raises(ValueError, match=other):
        parse_case(case_id)


@pytest.mark.parametrize(
    ("field", "word"), [("of_prefix", "spansprefix"), ("wider_than_window", "spanswide"), ("by_layer", "spansbylayer")]
)
def test_a_backend_is_asked_only_for_the_spans_that_it_declares(field: str, word: str) -> None:
    case = parse_case(CASE.format(word))
    assert not_declared(NARROW, parse_case(CASE.format("spans"))) == ""
    assert not_declared(NARROW, case).startswith("bidirectional spans")
    assert not_declared(NARROW.with_changes(spans={field: True}), case) == ""
    none = DECLARED.with_changes(spans=())
    assert not_declared(none, parse_case(CASE.format("spans"))) == "bidirectional spans in the new rows"


def test_core_has_cases_with_and_without_a_window_only_in_declared_modes() -> None:
    def of(declared: object, mode: ForwardMode) -> list[SpanShape]:
        return [case.spans for case in generate(declared, mode, "core") if case.spans]  # type: ignore[arg-type]

    assert set(of(NARROW, ForwardMode.EXTEND)) == {SpanShape()}
    assert set(of(DECLARED, ForwardMode.EXTEND)) == {SpanShape(), SpanShape(True, True, True)}
    assert set(of(DECLARED, ForwardMode.DECODE)) == {SpanShape(False, True, True)}
    assert of(NARROW, ForwardMode.DECODE) == []
    found = [case for case in generate(DECLARED, ForwardMode.EXTEND, "core") if case.spans]
    assert {case.window >= 0 for case in found} == {False, True}


def test_declared_spans_are_of_extend_or_decode_and_a_set_is_short_for_their_modes() -> None:
    assert DECLARED.with_changes(spans={"extend"}).spans == DECLARED.spans.with_changes(modes={"extend"})
    with pytest.raises(ValueError, match=r"Spans.modes may hold only extend and decode, got target-verify"):
        Spans({"target-verify"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="declare of_prefix=True too"):
        Spans({"decode"})  # type: ignore[arg-type]


def test_a_constructor_refuses_spans_of_other_modes_and_of_some_layers() -> None:
    class Without(TorchNativeBackend):
        capabilities = DECLARED.with_changes(spans=())

    class Alike(TorchNativeBackend):
        capabilities = NARROW

    spans, one_layer = (make_schedule(parse_case(CASE.format(word))) for word in ("spans", "spansbylayer"))
    device = torch.device("cpu")
    context = context_for([spans], device, make_layers(spans.case))
    assert context.max_spans == max_spans(spans)
    with pytest.raises(Unsupported, match="bidirectional spans in extend"):
        Without(context)
    Alike(context)
    with pytest.raises(Unsupported, match="layers with and layers without bidirectional spans"):
        Alike(context_for([one_layer], device, make_layers(one_layer.case)))


def test_undeclared_contexts_have_spans_that_are_not_declared() -> None:
    device = torch.device("cpu")

    def found(declared: object, case_id: str) -> list[str]:
        schedule = make_schedule(parse_case(case_id))
        context = context_for([schedule], device, make_layers(schedule.case))
        answers = (each(declared, context) for each in SPANS.undeclared)  # type: ignore[union-attr, arg-type]
        return [answer[0] for answer in answers if answer]

    extend, decode = CASE.replace("-{}", ""), "decode-gqa2x2-d32-fp32-p4-k19.6-shuffled-gauss-b2prod"
    assert found(NARROW, extend) == ["bidirectional spans in one layer"]
    assert found(NARROW, decode) == ["bidirectional spans"]
    assert found(DECLARED, extend) == []
    assert found(DECLARED.with_changes(spans=()), extend) == ["bidirectional spans"]
    no_windows = NARROW.with_changes(windows=Windows())
    assert found(no_windows, extend.replace("-w7", "")) == ["bidirectional spans in one layer"]
