"""Backends that keep states: what they declare, which cases they get, and what a run finds."""

from __future__ import annotations

import pytest
from in_process import check_backend

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.nearest_declared import nearest_declared
from attn_testkit.cases.state import UNIT_KEYS, StateShape
from attn_testkit.catalogue.minimal import minimal_case
from attn_testkit.catalogue.not_covered import not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, HeadShapes, State
from attn_testkit.contract.state_kind import STATE_KINDS
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import r_prefills as prefills
from attn_testkit_corpus.faults import r_published as published
from attn_testkit_corpus.faults import r_rollback as rollback
from attn_testkit_corpus.faults import r_states as faults
from attn_testkit_corpus.faults.controls_of_states import (
    StatesByConvention,
    StatesClearedByTheServer,
    StatesOfOneRequestAfterAnother,
    StatesOfPaddingUnwritten,
)

DECLARED = TorchNativeStateBackend.capabilities
DECODE = "decode-{}-d32-bf16-p16-k3.9.1-shuffled-{}-k32w{}s32{}-b5{}"
EXTEND = "extend-{}-d32-bf16-p16-k0.17.0.5-n4a1x2.9.2-shuffled-{}-k32w{}s32{}-b4prod"


@pytest.mark.parametrize(
    "word", ["k64w4s32", "k128w1sb16.null.zeroed", "k64w2s16.slot0.kv.strided", "k64w2s16.null.snap64"]
)
def test_the_word_of_a_state_is_read_and_written(word: str) -> None:
    name = f"decode-gdn2x2-d64-bf16-p16-k5-shuffled-mild_decay-{word}-b1prod"
    case = parse_case(name)
    assert case.id == name
    assert str(case.state) == word


def test_conventions_and_sizes_are_those_of_the_word() -> None:
    case = parse_case("decode-gdn2x4-d64-bf16-p16-k5-shuffled-mild_decay-k128w2sb16.slot0.zeroed.kv.strided-b1prod")
    assert case.state == StateShape(128, 2, "bf16", "write_zero", "zeroed", "kv", True)
    assert (case.heads.q_heads, case.heads.kv_heads) == (8, 4)
    assert [StateShape(1, 1, padding=each).padded_index for each in ("skip_minus_one", "skip_zero")] == [-1, 0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode-gdn2x2-d64-bf16-p16-k5-shuffled-gauss-b1prod", "keep a state"),
        ("decode-mha2-d64-bf16-p16-k5-shuffled-gauss-k64w4s32-b1prod", "keep none"),
        ("decode-gdn2x2-d64-bf16-p16-k5-shuffled-gauss-k64w4s32.zero-b1prod", "'zero' is not a convention of states"),
        ("decode-gdn2x2-d64-bf16-p16-k5-shuffled-gauss-w9-k64w4s32-b1prod", "windows, soft caps, sinks"),
        ("draft-decode-gdn2x2-d64-bf16-p16-k5-topk1steps3-shuffled-gauss-k64w4s32-b1prod", "draft model"),
        ("decode-gdn2x2-d64-bf16-p16-k5-shuffled-gauss-k64w4s32.slots-b1prod", "only rejected nodes are rolled back"),
        ("target-verify-gdn2x2-d64-bf16-p16-k5-chain2-shuffled-gauss-k64w4s32.slots.snap16-b1prod", "a slot for each"),
        ("draft-extend-gdn2x2-d64-bf16-p16-k5-n2a1-shuffled-gauss-k64w4s32-b1prod", "draft model"),
    ],
)
def test_a_case_that_cannot_be_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_case(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": {"families": {"mha"}}}, "layers that keep a state are"),
        ({"heads": {"families": {"gdn", "mha"}}}, "others have none"),
        ({"eager": {"draft-decode"}, "graph": ()}, "draft-decode: layers that keep a state run in decode"),
        ({"graph": {"draft-extend"}}, "a draft model has attention layers"),
    ],
)
def test_capabilities_that_no_case_has_together_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DECLARED.with_changes(**changes)


@pytest.mark.parametrize(("state", "words"), [(None, "need state=State"), ("gdn", "write State")])
def test_layers_that_keep_a_state_need_a_record_of_it(state: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Capabilities(eager={"decode"}, heads=HeadShapes(families={"gdn"}), state=state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtypes": {"fp8"}}, "unknown dtypes"),
        ({"padding": ()}, "padding is empty"),
        ({"k_dims": {0}}, "whole numbers from 1"),
        ({"conv_widths": ()}, "whole numbers from 1"),
        ({"products": "bf16"}, "unknown products"),
        ({"conv_products": "tf32"}, "unknown conv_products"),
        ({"strided": 1}, "True or False"),
        ({"order": {"vk"}}, "orders"),
    ],
)
def test_a_record_of_states_is_spelled_right(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        State(**given)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY])
def test_core_tries_every_declared_value_and_all_kinds_on_exact_data(mode: ForwardMode) -> None:
    cases = generate(DECLARED, mode, "core")
    state = DECLARED.state
    assert state is not None
    shapes = [case.state for case in cases if case.state]
    assert len(shapes) == len(cases)
    assert {each.dtype for each in shapes} == state.dtypes
    assert {each.padding for each in shapes} == state.padding
    assert {each.fresh for each in shapes} == state.fresh
    assert {each.order for each in shapes} == state.orders
    assert {each.conv_width for each in shapes} == state.conv_widths
    assert {each.strided for each in shapes} == {True, False}
    exact = {case.heads.family for case in cases if case.data == UNIT_KEYS}
    assert exact == {kind for kind in DECLARED.heads.families if STATE_KINDS[kind].recurs}
    assert all(parse_case(case.id) == case for case in cases)
    assert not [case.id for case in cases if not_declared(DECLARED, case)]
    if mode is ForwardMode.EXTEND:
        assert any(0 in case.prefixes and 1 in case.new for case in cases), "a fresh prompt of one token"
        assert max(case.most_new for case in cases) > 128, "over two borders of a chunk"
    if mode is ForwardMode.TARGET_VERIFY:
        widths = {
            (case.width > case.state.conv_width, case.width < case.state.conv_width) for case in cases if case.state
        }
        assert {(True, False), (False, True)} <= widths, "drafts longer and shorter than the window"


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY])
def test_core_tries_values_that_its_array_has_no_room_for(mode: ForwardMode) -> None:
    state = State(k_dims={16, 64, 96, 128, 256}, strided=True)
    many = DECLARED.with_changes(
        heads={"gqa_ratios": {1, 2, 3, 4, 8}, "head_dims": {32, 48, 64, 128, 256}}, bounds={"max_topk": 1}, state=state
    )
    assert {name for name, _ in not_covered(many, mode, generate(many, mode, "core"))} <= {"context", "extend"}
    assert {name for name, _ in not_covered(many, mode, generate(many, mode, "smoke"))} >= {"state k_dim", "head_dim"}


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY])
def test_no_case_asks_for_a_convention_that_is_not_declared(mode: ForwardMode) -> None:
    """A backend of bf16 states was given float32 ones, in the small cases of values that no other case has."""
    state = State(
        k_dims={32, 64}, dtypes={"bf16"}, orders={"kv"}, padding={"write_zero"}, fresh={"zeroed"},
        rollback={"slots"}, conv_widths={2, 4},
    )  # fmt: skip
    few = DECLARED.with_changes(heads={"gqa_ratios": {1, 2, 3, 4, 8}}, bounds={"max_topk": 1}, state=state)
    assert not [case.id for tier in ("smoke", "core") for case in generate(few, mode, tier) if not_declared(few, case)]


def test_the_minimal_case_keeps_a_state() -> None:
    case = minimal_case(DECLARED, ForwardMode.DECODE)
    assert case.state == StateShape(32, 1)
    assert case.data == "mild_decay"
    other = parse_case("decode-mha2-d64-bf16-p16-k5-shuffled-gauss-b1prod")
    assert nearest_declared(DECLARED, other).state is None


VERIFY = "target-verify-{}-d32-bf16-p16-k3.9.1-chain4-shuffled-{}-k32w{}s32{}-b5{}"
CASES = [
    VERIFY.format("kda2x2", "unit_keys", 4, "", "stale"),
    VERIFY.format("mamba2x2", "mild_decay", 2, ".slot0.kv", "nan"),
    VERIFY.format("lightning2", "no_decay", 1, ".null.strided", "prod"),
    VERIFY.format("gdn2x2", "unit_keys", 4, ".slot0.kv.slots.strided", "stale"),
    VERIFY.format("mamba2x2", "unit_keys", 4, ".null.snap16", "prod"),
    # The commit comes before the next step is planned over the indices that it reads.
    VERIFY.format("mamba2x2", "unit_keys", 4, "", "prod") + "-overlap_scheduling",
    DECODE.format("kda2x2", "no_decay", 2, ".kv.snap64", "prod"),
    *(DECODE.format(kind, "mild_decay", 4, "", "stale") for kind in ("gdn2x2", "kda2x2", "mamba2x2")),
    DECODE.format("lightning2", "mild_decay", 1, ".slot0", "nan"),
    # Keys of another width than values.
    DECODE.format("gdn2x2", "no_decay", 2, ".null.kv.strided", "prod").replace("k32w2", "k64w2"),
    *(EXTEND.format(kind, "unit_keys", 4, "") for kind in ("gdn2x2", "kda2x2", "mamba2x2")),
    *(EXTEND.format(kind, "exact_gates", 4, "") for kind in ("gdn2x2", "kda2x2", "mamba2x2")),
    *(EXTEND.format(kind, "near_epsilon", 4, "") for kind in ("gdn2x2", "kda2x2")),
    EXTEND.format("lightning2", "weak_decay", 1, ".zeroed"),
    EXTEND.format("kda2x2", "strong_decay", 2, ".kv.strided"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_reference_passes_each_kind_eagerly_and_in_graphs(case: str) -> None:
    found = [each for each in check_backend(TorchNativeStateBackend, cases=[case], device="cpu") if each.case]
    assert [each for each in found if each.status != "passed"] == []
    assert len(found) == (1 if case.startswith("extend") else 2)
    checks = {check for each in found for check in each.checks}
    assert {"writes-own-state", "state-matches-oracle"} <= checks
    assert ("verify-keeps-state" in checks) == (case.startswith("target-verify") and ".slots" not in case)
    assert ("conv-window-exact" in checks) == ("w1s" not in case)
    assert ("state-counts-tokens" in checks) == ("unit_keys" in case or "exact_gates" in case)
    assert "writes-own-kv" not in checks


@pytest.mark.parametrize("mode", ["decode", "extend"])
@pytest.mark.parametrize("backend", [StatesByConvention, StatesClearedByTheServer, StatesOfPaddingUnwritten])
def test_conventions_of_servers_pass(backend: type, mode: str) -> None:
    passes(backend, generate(backend.capabilities, ForwardMode(mode), "smoke")[0].id)


def test_dummy_requests_of_a_capture_may_continue_one_state_in_any_order() -> None:
    passes(
        StatesOfOneRequestAfterAnother, "decode-gdn4x2-d64-bf16-p16-k33.5.12-shuffled-mild_decay-k64w4s32.slot0-b4prod"
    )


def passes(backend: type, case: str) -> None:
    found = [each for each in check_backend(backend, cases=[case], device="cpu") if each.case]
    assert found
    assert [each for each in found if each.status != "passed"] == []


VERIFY_SLOTS, VERIFY_COPIES = (VERIFY.replace("{}-b5", word + "{}-b5") for word in (".slots", ".snap16"))
BEHIND = "extend-gdn4x2-d64-bf16-p16-k0.17.0-n4a1x2.9-shuffled-weak_decay-k64w4s32-layers1from0-b3nan"
SEVERAL = (
    "target-verify-gdn4x2-d64-bf16-p16-k33.5.12-chain4-shuffled-mild_decay-"
    "k64w4s32.snap16-layers1from0-b4prod-multi_mode"
)
MISTAKES = [
    (faults.PaddedIndexClampedToSlot0, DECODE, "graph", "writes-own-state", "slot 0"),
    (faults.StaleRowsOfPadding, DECODE, "graph", "writes-own-state", "padded request"),
    (faults.PlaceTakenForSlot, DECODE, "eager", "writes-own-state", "position in the batch"),
    (faults.RowTakenForSlot, DECODE, "eager", "writes-own-state", "row of the request table"),
    (faults.FirstChunkOfOneTokenIsADecode, EXTEND, "eager", "reads-own-state", "fresh"),
    (faults.InitialStateFlagIgnored, EXTEND, "eager", "reads-own-state", "fresh"),
    (faults.PrefixHitsBeginFromZeros, EXTEND, "eager", "matches-oracle", "each request begins from zeros"),
    (faults.WindowOfAShortPromptNotMoved, EXTEND, "eager", "conv-window-exact", ""),
    (faults.StateNeverStored, DECODE, "eager", "state-matches-oracle", "not stored"),
    (faults.VerifyWritesTheState, VERIFY, "eager", "verify-keeps-state", "before anything was accepted"),
    (faults.AcceptedStatesNeverCommitted, VERIFY, "eager", "state-matches-oracle", "not stored"),
    (faults.RollsBackStatesAndNotWindows, VERIFY, "eager", "conv-window-exact", ""),
    (faults.CommitsTheWholeDraft, VERIFY, "eager", "state-matches-oracle", "after the last accepted"),
    (faults.CommitsANodeTooFew, VERIFY, "eager", "conv-window-exact", ""),
    (faults.PaddedCommitsReachSlot0, VERIFY, "graph", "writes-own-state", "slot 0"),
    (rollback.AcceptedCountIsAnIndex, VERIFY_SLOTS, "eager", "conv-window-exact", ""),
    (rollback.WindowStoredWithEachNode, VERIFY_SLOTS, "eager", "conv-window-exact", "first slot"),
    (rollback.StateStoredInTheSlotOfTheNodeBefore, VERIFY_SLOTS, "eager", "state-matches-oracle", "after node"),
    (rollback.PaddedDraftsWriteSlot0, VERIFY_SLOTS, "graph", "writes-own-state", "slot 0"),
    (prefills.RowsBehindAPromptNotCleared, BEHIND, "eager", "finite", "after the last one"),
    (rollback.NoSnapshotsOnAnInstanceThatVerifies, SEVERAL, "eager", "state-matches-oracle", "not stored"),
    (rollback.SnapshotOfTheLastAcceptedNode, VERIFY_COPIES, "eager", "state-matches-oracle", "prefix cache"),
    (published.IdleReplayWritesStaleWindows, f"{DECODE}-empty_batches", "graph", "writes-own-state", "no request of"),
    (faults.SlotsOfTheCapture, DECODE, "graph", "conv-window-exact", "not stored"),
]


@pytest.mark.parametrize(("backend", "name", "execution", "check", "hint"), MISTAKES)
def test_the_usual_mistakes_are_named(backend: type, name: str, execution: str, check: str, hint: str) -> None:
    case = name.format("gdn4x2", "mild_decay", 4, "", "stale").replace("d32", "d64").replace("k32w", "k64w")
    results = check_backend(backend, cases=[case], executions=[execution], device="cpu")
    (found,) = [each for each in results if each.case]
    first = next(finding for finding in found.findings if finding.check == check)
    assert hint in f"{first.headline} {first.where} {first.hint}"


def test_capabilities_without_a_state_have_no_such_cases() -> None:
    plain = Capabilities(eager={"decode"})
    assert not [case for case in generate(plain, ForwardMode.DECODE, "core") if case.state]


def test_outputs_of_a_state_that_forgets_all_are_numbers_of_fp16() -> None:
    # Mamba2's step is a factor of its input, and 200 where nothing is left of a state.
    schedule = make_schedule(parse_case(
        "decode-mamba4x2-d128-fp16-p16-k1.70.9-shuffled-strong_decay-k128w2sb16.zeroed.kv.strided-b4stale"
    ))  # fmt: skip
    largest = max(float(expect(schedule, step).attention.abs().max()) for step in schedule.every_step if step.tokens)
    assert 100 < largest < 2**14
