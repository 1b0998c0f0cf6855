"""Windows of layers that are not causal: what a row sees by each meaning, and what is refused."""

from __future__ import annotations

import pytest
from in_process import check_backend

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.non_causal_window import NON_CAUSAL_WINDOW
from attn_testkit.catalogue.minimal import minimal_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import NON_CAUSAL_WINDOWS, Capabilities, ForwardMode
from attn_testkit.families.softmax.attention import seen_in
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import e_non_causal_windows as faults

EXTEND, VERIFY = ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
BLOCK = "target-verify-gqa2x2-d64-bf16-p16-k9.70.0-chain4-shuffled-gauss-w2-b4prod-noncausal-{}"
PROMPT = "extend-gqa2x2-d64-bf16-p16-k9.70.0-n10a20.1.7-shuffled-gauss-w4-b3prod-noncausal-{}"
WORDS = {"left": "leftofrow", "block": "leftofblock", "both": "bothsides"}
CAPABILITIES = faults.WindowedBlockBackend.capabilities


@pytest.mark.parametrize("case", [BLOCK, PROMPT])
@pytest.mark.parametrize("meaning", WORDS)
def test_a_row_sees_what_the_meaning_of_the_window_leaves(case: str, meaning: str) -> None:
    schedule = make_schedule(parse_case(case.format(WORDS[meaning])))
    windows = set()
    for step in (*schedule.steps, schedule.second):
        data = make_step_data(schedule, step)
        for layer in make_layers(schedule.case):
            seen, window = seen_in(data.visible, data, layer), layer.sliding_window_size
            windows.add(window)
            for index, request in enumerate(step.requests):
                first, count = request.prefix, request.prefix + request.new
                for row in range(first, count):
                    low = {"left": row - window, "block": first - window, "both": row - window}[meaning]
                    high = row + window if meaning == "both" else count
                    want = [key for key in range(count) if window < 0 or low <= key <= high]
                    assert seen[index, row - first].nonzero().flatten().tolist() == want
    assert len(windows) == 2, "the other layer has no window, or a wider one"


@pytest.mark.parametrize("backend", [TorchNativeBackend, faults.WindowedBlockBackend])
@pytest.mark.parametrize("case", [BLOCK, PROMPT])
@pytest.mark.parametrize("word", WORDS.values())
def test_who_reads_the_meaning_of_the_window_is_right(backend: type, case: str, word: str) -> None:
    found = check_backend(backend, cases=[case.format(word)], device="cpu", modes=[case.split("-gqa")[0]])
    assert found, found


@pytest.mark.parametrize(
    ("backend", "case", "hint"),
    [
        (faults.WindowOnlyIfCausal, PROMPT.format("bothsides"), "window"),
        (faults.WindowOfLaterKeysOnly, PROMPT.format("bothsides"), "attended to those from the row to W keys after it"),
        (faults.WindowEndsAtTheRow, BLOCK.format("leftofrow"), "row, as in a causal layer"),
        (faults.WindowOfTheBlock, BLOCK.format("leftofrow"), "row of the step to the last key (block)"),
    ],
)
def test_a_window_of_another_meaning_is_found_and_named(backend: type, case: str, hint: str) -> None:
    modes = [case.split("-gqa")[0]]
    (result, *_) = check_backend(backend, cases=[case], device="cpu", modes=modes, executions=["eager"], diagnose="all")
    assert result.findings[0].check == "matches-oracle"
    assert hint in result.findings[0].hint


@pytest.mark.parametrize("mode", [EXTEND, VERIFY])
@pytest.mark.parametrize("declared", [(), ("left",), NON_CAUSAL_WINDOWS])
def test_each_declared_meaning_is_tried_and_no_other(mode: ForwardMode, declared: tuple[str, ...]) -> None:
    own = CAPABILITIES.with_changes(windows={"non_causal": declared})
    found = {case.non_causal_window for case in generate(own, mode, "core")}
    assert found == {"none", *declared}


@pytest.mark.parametrize(
    "without",
    [
        CAPABILITIES.with_changes(options={"non_causal": ()}),
        CAPABILITIES.with_changes(windows={"modes": {"decode"}, "in_trees": False}),
    ],
)
def test_a_meaning_needs_a_window_and_layers_that_are_not_causal_in_a_mode(without: Capabilities) -> None:
    assert all(case.non_causal_window == "none" for case in generate(without, EXTEND, "core"))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (PROMPT.format("bothsides").replace("-w4", ""), "bothsides needs a window such as w11, and noncausal"),
        (PROMPT.format("leftofrow").replace("-noncausal", ""), "leftofrow needs a window such as w11, and noncausal"),
        (PROMPT.removesuffix("-{}"), "a window of layers that are not causal needs a declared meaning"),
    ],
)
def test_a_meaning_without_a_window_or_a_window_without_a_meaning_is_refused(case: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_case(case)


def test_a_smaller_case_has_causal_layers_and_keeps_the_window() -> None:
    case, minimal = parse_case(PROMPT.format("bothsides")), minimal_case(CAPABILITIES, EXTEND)
    changed = case.with_changes(**NON_CAUSAL_WINDOW.simpler.reset(case, minimal))
    assert (changed.non_causal_window, changed.window) == ("none", case.window)
    assert not changed.variants
