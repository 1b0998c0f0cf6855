"""Encoder-only layers: what a row sees, what is stored, who is tried, and what a backend is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions
from in_process import check_backend, texts_of_failure

from attn_testkit.backends.torch_native_encoder import TorchNativeEncoderBackend
from attn_testkit.backends.triton_encoder import TritonEncoderBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.encoder_windows import windows_in
from attn_testkit.catalogue.minimal import minimal_cases
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardBatch, ForwardMode
from attn_testkit.families.softmax.attention import seen_in
from attn_testkit.families.table import family_of
from attn_testkit.minimize.search import FEATURES, changed
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import controls_of_encoders as controls
from attn_testkit_corpus.faults import e_encoder_only as faults
from cuda_on_cpu import emulated_cuda

EXTEND = ForwardMode.EXTEND
ONLY = TorchNativeEncoderBackend.capabilities
CASE = "extend-gqa2x2-d72-bf16-p16-k0x3-n13a45.1.9-shuffled-gauss-b5nan-noncausal-encoder"
WINDOWS = f"{CASE}windows"


def test_windows_are_consecutive_parts_of_a_sequence() -> None:
    assert [windows_in(rows) for rows in (0, 1, 5, 6, 40, 45, 46)] == [
        [], [1], [5], [5, 1], [5, 24, 11], [5, 24, 11, 5], [5, 24, 11, 5, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("case", [CASE, WINDOWS])
def test_a_row_sees_its_sequence_or_its_window(case: str) -> None:
    schedule = make_schedule(parse_case(case))
    layers = make_layers(schedule.case)
    assert [layer.encoder_window for layer in layers] == ([24, 0] if case is WINDOWS else [0, 0])
    assert all(layer.encoder_only and not layer.causal for layer in layers)
    for step in schedule.every_step:
        data = make_step_data(schedule, step)
        assert not any(request.prefix for request in step.requests)
        for layer in layers:
            seen = seen_in(data.visible, data, layer)
            for index, request in enumerate(step.requests):
                parts = windows_in(request.new) if layer.encoder_window else [request.new]
                want = torch.block_diag(*(torch.ones(rows, rows, dtype=torch.bool) for rows in parts))
                assert torch.equal(seen[index, : request.new, : request.new], want)
                assert not seen[index, :, request.new :].any()


def test_no_step_stores_a_key_and_no_key_is_in_the_pool() -> None:
    schedule = make_schedule(parse_case(CASE))
    memory = family_of(schedule.case).memory
    for step in schedule.every_step:
        data = make_step_data(schedule, step)
        assert not step.stored
        assert not len(memory.due(data))
        assert not len(memory.stored(data).slots)
        assert memory.image(schedule, step, data, False, after=True).isnan().all()


class Spy(TorchNativeEncoderBackend):
    """Healthy; remembers the offsets that it was given."""

    given: list[tuple[str, ForwardBatch, torch.Tensor, torch.Tensor | None]]

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.note("eager", batch)
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.note("capture" if in_capture else "replay", batch)

    def note(self, stage: str, batch: ForwardBatch) -> None:
        assert batch.query_start_loc is not None
        windows = getattr(batch, "cu_window_seqlens", None)
        self.given = getattr(self, "given", [])
        self.given.append((stage, batch, batch.query_start_loc.clone(), None if windows is None else windows.clone()))


@pytest.fixture
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", [CASE, WINDOWS])
def test_offsets_after_those_of_a_batch_repeat_the_last_one(case: str) -> None:
    schedule = make_schedule(parse_case(case))
    harness = ServerHarness(Spy, [schedule], torch.device("cuda"))
    spy, step = harness.backend, schedule.steps[0]
    assert isinstance(spy, Spy)
    run_eager(harness, schedule, step, Clock())
    if case is WINDOWS:
        run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    captured = [each for each in spy.given if each[0] == "capture"]
    replayed = [each for each in spy.given if each[0] == "replay"]
    for stage, batch, starts, windows in captured:
        assert starts[-1] == len(batch.input_ids), stage
        assert windows is None or windows.tolist() == list(range(len(batch.input_ids) + 1))
    steps = [spy.given[0], *replayed]
    assert len(steps) == (1 + len(schedule.steps) if case is WINDOWS else 1)
    for (stage, batch, starts, windows), ran in zip(steps, (step, *schedule.steps), strict=False):
        rows = [request.new for request in ran.requests]
        own = [sum(rows[:count]) for count in range(len(rows) + 1)]
        assert starts.tolist() == own + own[-1:] * (batch.batch_size - ran.bs)
        assert (windows is None) is (case is CASE)
        if windows is not None:
            parts = [part for each in rows for part in windows_in(each)]
            own = [sum(parts[:count]) for count in range(len(parts) + 1)]
            room = len(batch.input_ids) + 1 if stage == "replay" else len(own)
            assert windows.tolist() == own + own[-1:] * (room - len(own))


def made_minimal(case: Case, minimal: Case) -> Case:
    """The case after each of its features has been made minimal, in an order in which every step is a case."""
    for name in ("encoder-only layers", "window of non-causal layers", "variants", "layers", "requests", *FEATURES):
        case = changed(case, FEATURES[name].reset(case, minimal))
    return case


def test_a_backend_of_encoders_gets_no_other_case_and_others_get_them_if_they_declare_them() -> None:
    without = ONLY.with_changes(encoder_only={"layers": (), "in_graphs": False, "only": False})
    both = controls.EncodersNextToADecoder.capabilities
    for declared, kinds in ((ONLY, {"whole", "windows"}), (without, {"none"}), (both, {"none", "whole"})):
        assert {case.encoder for case in generate(declared, EXTEND, "smoke")} == kinds
    (minimal,) = minimal_cases(ONLY, EXTEND)
    assert (minimal.encoder, minimal.prefixes) == ("whole", (0,))
    core = generate(ONLY, EXTEND, "core")
    assert {case.encoder for case in core} == {"whole", "windows"}
    assert all(made_minimal(case, minimal) == minimal for case in core)
    assert {case.head_dim for case in core} == ONLY.heads.head_dims
    assert {case.non_causal_window for case in core} == {"none", "left", "block", "both"}
    long = [case for case in core if case.encoder == "windows" and len(windows_in(max(case.new))) > 3]
    assert len({case.bs for case in long}) > 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"options": {"non_causal": ()}}, "add 'extend' to the modes and to options.non_causal"),
        ({"eager": {"extend", "decode"}}, "such a backend runs in extend and in no other mode, got decode, extend"),
        ({"encoder_only": {"layers": ()}}, "EncoderOnly declares no layers"),
        ({"encoder_only": {"layers": {"hole"}}}, "did you mean 'whole'"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ONLY.with_changes(**changes)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (CASE.replace("-k0x3", "-k0x2.7"), "encoder needs noncausal and requests without keys before the step"),
        (CASE.replace("-noncausal", ""), "encoder needs noncausal and requests without keys before the step"),
        (WINDOWS.replace("-b5nan-noncausal", "-w4-b5nan-noncausal-bothsides"), "no model has both"),
        (CASE.replace("-shuffled", "-chunks2-shuffled"), "a sequence is encoded at once"),
    ],
)
def test_a_case_that_no_encoder_has_is_refused(case: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_case(case)


def eager_only() -> Capabilities:
    return ONLY.with_changes(encoder_only={"in_graphs": False})


class EagerOnly(TorchNativeEncoderBackend):
    """Healthy; its encoders are not captured."""

    capabilities = eager_only()


def test_encoders_are_captured_only_if_that_is_declared() -> None:
    results = {row.execution: row for row in check_backend(EagerOnly, cases=[CASE], device="cpu", modes=["extend"])}
    assert results["eager"].status == "passed"
    assert "not declared: encoder-only layers in graphs" in str(results["graph"])


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        (TorchNativeEncoderBackend, WINDOWS),
        (TritonEncoderBackend, WINDOWS),
        (controls.EncoderAsAKernelCall, CASE),
        (controls.EncodersNextToADecoder, CASE),
    ],
)
def test_who_reads_the_offsets_is_right_eagerly_and_in_graphs(backend: type, case: str) -> None:
    dims = backend.capabilities.heads.head_dims  # type: ignore[attr-defined]
    case = case if 72 in dims else case.replace("d72", f"d{min(dims)}")
    found = check_backend(backend, cases=[case], device="cpu", modes=["extend"])
    assert found, found


@pytest.mark.parametrize(
    ("backend", "case", "text"),
    [
        (faults.EncoderStoresItsKeys, CASE, "writes-own-kv | "),
        (faults.WindowsNeverUsed, WINDOWS, "windows of encoders are not applied"),
        (faults.OffsetsOfTheFirstLayer, WINDOWS, "windows of encoders are applied in all layers"),
        (faults.WindowsAsADistance, WINDOWS, "windows of encoders are taken for sliding ones"),
        (faults.WindowsOfOneSize, WINDOWS, "windows of encoders are taken for windows of one size"),
    ],
)
def test_a_mistake_is_found_and_named(backend: type, case: str, text: str) -> None:
    texts = texts_of_failure(backend, text, cases=[case], device="cpu", executions=["eager"])
    assert any(text in each for each in texts), texts
