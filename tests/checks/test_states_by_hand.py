"""Checks of states on pools that are right but for one thing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks import states
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.checks.states import (
    conv_window_exact,
    state_counts_tokens,
    state_matches_oracle,
    verify_keeps_state,
    writes_own_state,
)
from attn_testkit.families.recurrent.data import StateStepData
from attn_testkit.families.recurrent.memory import as_rows
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.running.case_runs.evaluate import step_inputs
from attn_testkit.steps.schedule import make_schedule

CASE = "extend-gdn2x2-d32-bf16-p16-k0.17.5-n6a1.2.9-shuffled-{}-k16w4s32{}-b3prod"


class Step:
    """A step whose slots hold what they should; a test changes windows, states, or what else was written."""

    def __init__(self, data: str = "mild_decay", words: str = "", kind: str = "gdn2x2", name: str = CASE) -> None:
        self.schedule = make_schedule(parse_case(name.format(data, words).replace("gdn2x2", kind)))
        self.case, step = self.schedule.case, self.schedule.steps[0]
        self.inputs = step_inputs(self.schedule, step, TorchNativeStateBackend.capabilities)
        self.data = self.inputs.data
        want = recur(self.data)
        self.want, self.windows = want, want.windows.clone()
        self.states = want.states.to(self.data.states.dtype).clone()
        self.written = list(range(3))
        """Requests whose slots changed."""
        self.others: dict[int, float] = {}
        """Other slots that changed, and what they hold."""
        self.outside: list[int] = []
        self.moved: list[int] | None = None
        """Slots that a verify changed before its commit."""

    def seen(self, **more: object) -> Observation:
        rows = as_rows(self.windows, self.states, self.data.shape.order)
        held = {int(self.data.slots[i]): rows[:, i] for i in self.written}
        held |= {slot: torch.full_like(rows[:, 0], int(value)) for slot, value in self.others.items()}
        slots = sorted(held)
        every = torch.stack([held[slot] for slot in slots], 1)[:, None, :, None]
        pieces = [("pool", "slots", torch.tensor(slots)), ("pool", "rows", every)]
        if self.outside:
            pieces.append(("pool", "outside", torch.tensor(self.outside)))
        if self.moved is not None:
            pieces.append(("pool", "moved", torch.tensor(self.moved, dtype=torch.int64)))
        step = self.schedule.steps[0]
        return Observation(self.schedule, step, "a step", copies_of(pieces), inputs=self.inputs, **more)  # type: ignore[arg-type]

    def foreign(self) -> int:
        return next(slot for slot in range(6, 1, -1) if slot not in self.data.slots.tolist())


CHECKS = (writes_own_state, conv_window_exact, state_matches_oracle, state_counts_tokens)


@pytest.mark.parametrize("data", ["mild_decay", "unit_keys"])
@pytest.mark.parametrize("kind", ["gdn2x2", "kda2x2", "mamba2x2"])
def test_a_right_step_passes_every_check(data: str, kind: str) -> None:
    step = Step(data, kind=kind)
    assert [each(step.seen(), step.case) for each in CHECKS] == [[], [], [], []]


def test_a_slot_of_nobody_that_was_written_is_named() -> None:
    step = Step()
    step.others = {step.foreign(): 0}
    (found,) = writes_own_state(step.seen(), step.case)
    assert found.headline == f"the state of slot {step.foreign()} was written, although no request of the batch owns it"


@pytest.mark.parametrize(("words", "right"), [("", False), (".null", False), (".slot0", True)])
def test_slot_0_may_be_written_only_where_padding_goes_there(words: str, right: bool) -> None:
    step = Step(words=words)
    step.others = {0: 0}
    found = writes_own_state(step.seen(replay=True), step.case)
    assert (not found) is right
    assert right or found[0].headline.startswith("slot 0, which nobody owns")


def test_memory_between_slots_that_was_written_is_named() -> None:
    step = Step()
    step.outside = [77]
    (found,) = writes_own_state(step.seen(), step.case)
    assert "between slots" in found.headline
    assert "byte 77" in found.where
    assert found.step == "a step"


def test_one_wrong_bit_of_a_window_fails_and_the_column_is_named() -> None:
    step = Step()
    bits = step.windows.view(torch.int16)
    bits[1, 2, 7, 0] ^= 1
    (found,) = conv_window_exact(step.seen(), step.case)
    assert found.headline == "the convolution window of request 2 does not hold its last inputs"
    assert "channel 7, column 0 of 3" in found.where
    assert found.spread == "requests 2 of 3 wrong"
    assert found.step == "a step"
    assert not found.hint


def change_windows(step: Step, how: str) -> None:
    if how == "before":
        step.windows[:, 2] = step.data.windows[:, 2]
    elif how == "reverse":
        step.windows = step.windows.flip(-1)
    elif how == "neighbour":
        step.windows = step.windows.roll(1, 1)
    elif how == "short":
        step.windows[:, 1, :, 0] = 1.0


@pytest.mark.parametrize(
    ("how", "hint"),
    [
        ("before", "the new one was not stored"),
        ("reverse", "in reverse"),
        ("neighbour", "of another request"),
        ("short", "fewer tokens than the window"),
    ],
)
def test_the_hint_names_the_window_that_is_there_instead(how: str, hint: str) -> None:
    step = Step()
    change_windows(step, how)
    (found,) = conv_window_exact(step.seen(), step.case)
    assert hint in found.hint


@pytest.mark.parametrize("at_once", [1, 1 << 40])
def test_a_state_at_its_limit_passes_and_one_behind_it_fails(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_AT_ONCE", at_once)
    step = Step()
    at = (1, 2, 3, 5)
    for factor, wrong in ((0.99, False), (1.01, True)):
        step.states[at][0] = step.want.states[at][0] + factor * step.want.state_limit[at]
        found = state_matches_oracle(step.seen(), step.case)
        assert bool(found) is wrong
    assert "request 2 (one with a state, 9 tokens" in found[0].where
    assert "head 3, state[5, 0]" in found[0].where
    assert found[0].step == "a step"


def test_the_norm_of_a_row_has_the_limit_too() -> None:
    step = Step()
    at = (0, 1, 0, 2)
    spread = 0.5 * step.want.state_limit[at]
    step.states[at] = (step.want.states[at] + spread).to(step.states.dtype)
    (found,) = state_matches_oracle(step.seen(), step.case)
    assert "1x over" in found.headline or "2x over" in found.headline


def test_a_state_of_nan_is_named_and_a_slot_that_did_not_change_is_too() -> None:
    step = Step()
    step.states[0, 0] = torch.nan
    (found,) = state_matches_oracle(step.seen(), step.case)
    assert found.headline == "the state of request 0 is NaN or Inf"
    step = Step()
    step.written = [0, 2]
    (found,) = state_matches_oracle(step.seen(), step.case)
    assert found.headline.startswith("the state of request 1 differs")
    assert "no bit of the slot changed" in found.hint


@pytest.mark.parametrize(
    ("how", "hint"),
    [
        (lambda step: step.data.states.float(), "state before the step"),
        (lambda step: step.states.roll(1, 1), "of the request before it"),
        (lambda step: step.states.roll(-1, 1), "of the request after it"),
        (lambda step: step.states.roll(1, 0), "of the layer before it"),
        (lambda step: step.states.roll(1, 2), "of the head before it"),
    ],
)
def test_the_hint_names_the_state_that_is_there_instead(how, hint: str) -> None:
    step = Step()
    step.states = how(step).to(step.states.dtype)
    (found,) = state_matches_oracle(step.seen(), step.case)
    assert hint in found.hint


def last_of(step: Step, request: int, back: int = 0) -> tuple[int, int, int]:
    """Row, position and key of a token of a request, counted from its last one."""
    row = int((step.data.row_request == request).nonzero().flatten()[-1 - back])
    return row, int(step.data.positions[row]), int(step.data.unit_keys[0, row, 0])


@pytest.mark.parametrize("kind", ["gdn2x2", "kda2x2", "mamba2x2", "lightning2"])
def test_a_token_that_was_not_applied_is_named(kind: str) -> None:
    step = Step("unit_keys", kind=kind) if kind[0] != "l" else lightning()
    _, position, key = last_of(step, 2)
    step.states[0, 2, 0, :, key] = without_last(step, 2)
    (found,) = state_counts_tokens(step.seen(), step.case)
    assert found.headline == f"token {position} of request 2 was not applied to its state"


def lightning() -> Step:
    step = Step.__new__(Step)
    Step.__init__(step, "unit_keys", kind="gdn2x2")
    name = CASE.format("unit_keys", "").replace("gdn2x2", "lightning2").replace("w4", "w1")
    step.schedule = make_schedule(parse_case(name))
    step.case = step.schedule.case
    step.inputs = step_inputs(step.schedule, step.schedule.steps[0], TorchNativeStateBackend.capabilities)
    step.data = step.inputs.data
    step.want = recur(step.data)
    step.windows, step.states = step.want.windows.clone(), step.want.states.to(step.data.states.dtype).clone()
    return step


def without_last(step: Step, request: int) -> torch.Tensor:
    """The column of the last token of a request, had it not come."""
    row, _, key = last_of(step, request)
    mine = (step.data.row_request == request).nonzero().flatten()[:-1]
    news = tuple(new - (i == request) for i, new in enumerate(step.data.news))
    tensors = {name: getattr(step.data, name) for name in "qkv"}
    cut = {name: torch.cat([each[:, :row], each[:, row + 1 :]], 1) for name, each in tensors.items()}
    shorter = replace(step.data, news=news, **cut)
    assert len(mine) == shorter.news[request]
    return recur(shorter).states[0, request, 0, :, key].to(step.states.dtype)


def test_a_token_that_is_summed_twice_is_named() -> None:
    step = Step("unit_keys", kind="mamba2x2")
    _, position, key = last_of(step, 2)
    step.states[0, 2, 0, :, key] += step.states[0, 2, 0, :, key] - without_last(step, 2)
    (found,) = state_counts_tokens(step.seen(), step.case)
    assert found.headline == f"token {position} of request 2 was applied twice to its state"


def test_a_column_that_holds_no_token_is_said_to_and_half_a_unit_passes() -> None:
    step = Step("unit_keys")
    step.states[0, 2, 0, 0, 3] += 0.49
    assert not state_counts_tokens(step.seen(), step.case)
    step.states[0, 2, 0, 0, 3] += 17.5
    (found,) = state_counts_tokens(step.seen(), step.case)
    assert found.step == "a step"
    assert "holds the value of no token" in found.headline


def test_a_column_that_kept_what_a_gate_forgets_names_the_gate() -> None:
    step = Step("exact_gates")
    step.states[0, 2, 0, 0, 3] += 17.5
    (found,) = state_counts_tokens(step.seen(), step.case)
    assert re.search(r"the decay of token \d+ \(row \d+ of the request\) is (0|0\.5),", found.headline)


def test_a_step_without_a_request_may_write_nothing() -> None:
    step = Step()
    empty = replace(step.schedule.steps[0], requests=(), name="idle")
    inputs = step_inputs(step.schedule, empty, TorchNativeStateBackend.capabilities)
    rows = torch.zeros(2, 1, 1, 1, inputs.image(False).shape[-1], dtype=torch.uint8)
    pieces = [("pool", "slots", torch.tensor([3])), ("pool", "rows", rows)]
    seen = Observation(step.schedule, empty, "idle", copies_of(pieces), inputs=inputs)
    (found,) = writes_own_state(seen, step.case)
    assert "slot 3" in found.headline
    assert not conv_window_exact(seen, step.case)
    assert not state_matches_oracle(seen, step.case)


VERIFY = "target-verify-gdn2x2-d32-bf16-p16-k7.17.5-chain4-shuffled-{}-k16w4s32{}-b3prod"


def behind(step: Step, rows: Sequence[int]) -> StateStepData:
    """The step's data with states behind so many rows of each request."""
    ends = tuple(replace(end, rows=count) for end, count in zip(step.data.ends, rows, strict=True))
    return replace(step.data, ends=ends)


def test_a_verify_that_changes_a_state_before_its_commit_is_named() -> None:
    step = Step(name=VERIFY)
    step.moved = []
    assert not verify_keeps_state(step.seen(), step.case)
    step.moved = [int(step.data.slots[1])]
    (found,) = verify_keeps_state(step.seen(), step.case)
    assert found.headline.startswith("the state of request 1 was changed by the verify")
    assert found.step == "a step"
    step.moved = [step.foreign()]
    (found,) = verify_keeps_state(step.seen(), step.case)
    assert found.headline.startswith(f"slot {step.foreign()}, which no request of the batch owns")


def test_outside_of_a_verify_nothing_is_kept() -> None:
    assert not verify_keeps_state(Step().seen(), Step().case)


@pytest.mark.parametrize(("off", "hint"), [(-1, "1 node before"), (1, "1 node after"), (9, "after the whole draft")])
def test_the_node_whose_state_was_committed_is_named(off: int, hint: str) -> None:
    step = Step(name=VERIFY)
    assert sorted(set(step.data.kept)) != [4], "some node is rejected"
    step.states = recur(behind(step, [min(max(count + off, 0), 4) for count in step.data.kept])).states.to(
        step.states.dtype
    )
    (found,) = state_matches_oracle(step.seen(), step.case)
    assert hint in found.hint


def test_the_window_behind_the_whole_draft_fails_where_nodes_were_rejected() -> None:
    step = Step(name=VERIFY)
    step.windows = recur(behind(step, step.data.news)).windows
    (found,) = conv_window_exact(step.seen(), step.case)
    assert "does not hold its last inputs" in found.headline
