"""Requests that continue a state of a prefix cache: which, from which slot, and what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_testkit.runner_modes.compiling import _shorter
from in_process import check_backend

from attn_testkit.backends.torch_native_hybrid import TorchNativeHybridBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.families.recurrent.data import make_state_data
from attn_testkit.families.recurrent.memory import STATE_POOL
from attn_testkit.families.recurrent.recurrence import recur, start_of
from attn_testkit.steps.cached_prompts import cached_lengths, continued_length
from attn_testkit.steps.schedule import make_schedule, part
from attn_testkit_corpus.faults import r_prefix_cache as faults
from attn_testkit_corpus.faults.states import StateParent

EXTEND = "extend-{}-d{}-bf16-p16-k37.20x2.0.37-n33a9.3.17.6.2-shuffled-{}-k{}w4s32.{}-b5prod"
DECODE = "decode-gdn4x2-d64-bf16-p16-k9.3.1.30.7-shuffled-mild_decay-k64w4s32.source-b6stale"
SMALL = ("gdn2x2", 32, "mild_decay", 32)


def step_of(name: str):
    schedule = make_schedule(parse_case(name))
    return schedule, schedule.steps[0]


@pytest.mark.parametrize(
    ("prefixes", "chunk", "room", "lengths"),
    [
        ((37, 20, 20, 0, 37), 16, 33, (16, 32)),
        ((37, 20, 20, 0, 37), 16, 32, (16, 32)),
        ((37, 20, 20, 0, 37), 16, 31, (16,)),
        ((5, 9), 1, 33, (5,)),
        ((5, 9, 12, 30), 1, 33, (5, 30)),
        ((15, 0), 16, 33, ()),
        ((), 16, 33, ()),
        ((16, 32, 48, 64, 80, 96, 96), 16, 128, (16, 48, 96)),
    ],
)
def test_half_as_many_prompts_are_cached_as_requests_continue_them(
    prefixes: tuple[int, ...], chunk: int, room: int, lengths: tuple[int, ...]
) -> None:
    assert cached_lengths(prefixes, chunk, room) == lengths


def test_a_request_continues_the_longest_prompt_that_it_begins_with() -> None:
    assert [continued_length(each, (16, 32)) for each in (0, 15, 16, 31, 32, 99)] == [0, 0, 16, 16, 32, 32]


@pytest.mark.parametrize("words", ["copied.snap16", "source.snap16", "copied", "source"])
def test_requests_continue_states_that_prompts_before_them_left_in_other_slots(words: str) -> None:
    schedule, step = step_of(EXTEND.format(*SMALL, words))
    before, data = step.follows, make_state_data(schedule, step)
    assert before is not None
    prompts = make_state_data(schedule, before)
    kept = dict(zip(prompts.snapshot_rows, prompts.snapshot_slots, strict=True)) if "snap" in words else dict(
        zip(prompts.news, prompts.slots.tolist(), strict=True)
    )  # fmt: skip
    assert [request.prefix for request in step.requests][3] == 0
    assert len(set(kept)) == 2
    assert data.fresh.tolist() == [False, False, False, True, False]
    own = data.slots.tolist()
    for request, source, slot in zip(step.requests, data.sources, own, strict=True):
        assert source == (kept[request.prefix] if request.prefix else slot)
    written = {end.slot for end in (*data.ends, *prompts.ends)}
    assert len(written) == len(data.ends) + len(prompts.ends), "no slot is one of two owners"
    if "snap" in words:
        assert all(new > rows for new, rows in zip(prompts.news, prompts.snapshot_rows, strict=True))


def test_a_request_that_continues_a_prompt_has_the_state_of_both_in_one() -> None:
    schedule, step = step_of(EXTEND.format(*SMALL, "copied.snap16"))
    assert step.follows is not None
    data, prompts = make_state_data(schedule, step), make_state_data(schedule, step.follows)
    found = recur(data)
    for request in (0, 1, 3):
        place, rows = data.before_places[request], data.before_rows[request]
        first, start = sum(data.news[:request]), sum(prompts.news[:place]) if place >= 0 else 0
        count = rows + data.news[request]
        whole = {
            name: torch.cat([getattr(prompts, name)[:, start : start + rows],
                             getattr(data, name)[:, first : first + data.news[request]]], 1)
            for name in ("q", "k", "v")
        }  # fmt: skip
        end = replace(data.ends[request], request=0, rows=count)
        one = replace(
            data, **whole, news=(count,), kept=(count,), before=None, ends=(end,), lists=data.lists[[request]],
            states=torch.zeros_like(data.states[:, :1]), windows=torch.zeros_like(data.windows[:, :1]),
        )  # fmt: skip
        want = recur(one)
        assert torch.equal(found.windows[:, request], want.windows[:, 0])
        assert (found.states[:, request] - want.states[:, 0]).abs().max() < 1e-12
        assert (found.out[:, first : first + data.news[request]] - want.out[:, rows:]).abs().max() < 1e-12
    walks = start_of(data).walk
    assert not walks[:, 3].any()
    assert walks[:, 0].all()


def test_a_part_of_a_step_continues_what_it_continues_in_the_whole() -> None:
    for name in (EXTEND.format(*SMALL, "source.snap16"), DECODE):
        schedule, step = step_of(name)
        whole, some = make_state_data(schedule, step), make_state_data(schedule, part(step, (1, 4)))
        assert some.sources == (whole.sources[1], whole.sources[4])
        assert torch.equal(start_of(some).states, start_of(whole).states[:, [1, 4]])
        assert torch.equal(start_of(some).windows, start_of(whole).windows[:, [1, 4]])


def test_decodes_continue_their_own_state_or_one_that_another_continues_too() -> None:
    schedule, step = step_of(DECODE)
    data = make_state_data(schedule, step)
    others = [place for place, (own, of) in enumerate(zip(data.slots.tolist(), data.sources, strict=True)) if own != of]
    assert 0 < len(others) < step.bs
    first, second, *_ = others
    assert data.sources[first] == data.sources[second]
    assert torch.equal(data.states[:, first], data.states[:, second])
    assert torch.equal(data.windows[:, first], data.windows[:, second])
    assert not torch.equal(data.q[:, first], data.q[:, second])
    held, _ = STATE_POOL.held(schedule, step, data, after=False)
    assert held.tolist() == list(data.sources)
    assert not data.fresh.any()


def test_steps_that_only_compile_again_continue_no_prompt() -> None:
    schedule, step = step_of(EXTEND.format(*SMALL, "copied"))
    steps = list(_shorter(step))
    assert steps
    for each in steps:
        assert make_state_data(schedule, each).before is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (DECODE.replace("source", "copied"), "that it admits"),
        (
            "target-verify-gdn2x2-d64-bf16-p16-k5-chain2-shuffled-mild_decay-k64w4s32.source-b1prod",
            "its own state",
        ),
        (
            "extend-gdn2x2-d64-bf16-p16-k5-n3a3-chunks2-shuffled-mild_decay-k64w4s32.source-b1prod",
            "second chunk",
        ),
    ],
)
def test_a_case_in_which_nothing_is_continued_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_case(name)


def test_only_declared_ways_are_tried_and_copies_by_every_backend_with_prompts() -> None:
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        every = {
            case.state.continues for case in generate(TorchNativeStateBackend.capabilities, mode, "core") if case.state
        }
        few = [case for case in generate(StateParent.capabilities, mode, "core") if case.state]
        assert every == {ForwardMode.DECODE: {"", "source"}, ForwardMode.EXTEND: {"", "copy", "source"}}.get(mode, {""})
        assert {case.state.continues for case in few} == ({"", "copy"} if mode is ForwardMode.EXTEND else {""})
        assert not [case.id for case in few if not_declared(StateParent.capabilities, case)]


def results(backend: type, name: str, executions: tuple[str, ...] = ("eager", "graph")):
    return [each for each in check_backend(backend, cases=[name], executions=executions, device="cpu") if each.case]


FEW = "extend-{}-d{}-bf16-p16-k17.20.0-n17a2.3.1-shuffled-{}-k{}w4s32.{}-b3prod"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (TorchNativeStateBackend, FEW.format("kda2x2", 32, "mild_decay", 32, "null.source.kv.strided.snap16")),
        (TorchNativeStateBackend, DECODE),
        (TorchNativeHybridBackend, FEW.format("gdn2x2", 32, "unit_keys", 32, "copied-layers3from0hybrid")),
    ],
)
def test_right_backends_pass(backend: type, name: str) -> None:
    found = results(backend, name)
    assert [each.status for each in found] == ["passed"] * (2 if name == DECODE else 1)


IN_EXTEND = EXTEND.format("gdn4x2", 64, "unit_keys", 64, "source.snap16")


@pytest.mark.parametrize(
    ("backend", "name", "execution", "check", "text"),
    [
        (faults.ReadsTheSlotThatItWrites, DECODE, "eager", "reads-own-state", ""),
        (faults.WritesTheSlotThatItReads, IN_EXTEND, "eager", "writes-own-state", "that of a prefix cache"),
        (faults.ContinuesAStateWithoutItsWindow, IN_EXTEND, "eager", "conv-window-exact", "no state of the request"),
        (faults.SourceCopiedBehindTheUpdate, DECODE, "eager", "state-matches-oracle", "before the step"),
        (faults.OneResultOfASharedSource, IN_EXTEND, "eager", "state-counts-tokens", "was not applied"),
        (faults.SnapshotOfTheFirstBoundary, IN_EXTEND.replace("source", "copied"), "eager", "state-counts-tokens", ""),
        (faults.SourcesOfTheCapture, DECODE, "graph", "replay-follows-batch", ""),
    ],
)
def test_mistakes_are_found(backend: type, name: str, execution: str, check: str, text: str) -> None:
    (found,) = results(backend, name, (execution,))
    first = next(finding for finding in found.findings if finding.check == check)
    assert text in f"{first.headline} {first.hint}"
