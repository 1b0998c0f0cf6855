"""What a backend is given in each mode, eager and at a replay, and what the mode returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions
from in_process import plan_run, run

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import DraftExtendInput, ForwardBatch, ForwardMode, LegacyGraphHooks, VerifyInput
from attn_testkit.examples import MinimalBackend
from attn_testkit.families.expected import expect
from attn_testkit.results.case_result import Status
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

DECODE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
VERIFY = "target-verify-gqa2x2-d64-bf16-p16-k3.15.40-chain3-shuffled-gauss-b4prod"
V1 = "draft-extend-gqa2x2-d64-bf16-p16-k3.15.40-n4a1.3.2-shuffled-gauss-b4prod"
V2 = "draft-extend-v2-gqa2x2-d64-bf16-p16-k3.15.40-n4a1.3.2-shuffled-gauss-b4prod"
REPLAYS_ONLY = RunOptions(eager_steps=False)


class Spy(MinimalBackend):
    """Healthy; remembers what it was given."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.eager: list[ForwardBatch] = []
        self.captured: list[tuple[int, ForwardBatch]] = []
        self.views: list[Any] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.eager.append(batch)
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            self.captured.append((batch.batch_size, batch))
        else:
            self.views.append(batch)


class NeedySpy(Spy):
    capabilities = Spy.capabilities.with_changes(needs={"cpu_seq_lens": True})


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def eager(case_id: str, backend: type[Spy] = Spy) -> tuple[Spy, Schedule, Observation]:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    observed = run_eager(harness, schedule, schedule.steps[0], Clock())
    assert isinstance(harness.backend, Spy)
    return harness.backend, schedule, observed


def graph(case_id: str, backend: type[Spy] = Spy) -> tuple[Spy, Schedule, list[Observation]]:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    run = run_graphs(harness, [schedule], Clock(), REPLAYS_ONLY)
    assert isinstance(harness.backend, Spy)
    return harness.backend, schedule, [observed for _, observed in run.observed]


@pytest.mark.parametrize(
    ("case_id", "lens", "tokens", "positions"),
    [
        (DECODE, [4, 16, 41], 3, [3, 15, 40]),
        (VERIFY, [3, 15, 40], 9, [3, 4, 5, 15, 16, 17, 40, 41, 42]),
        (V1, [4, 18, 42], 6, [3, 15, 16, 17, 40, 41]),
        (V2, [7, 19, 44], 12, [3, 4, 5, 6, 15, 16, 17, 18, 40, 41, 42, 43]),
    ],
)
def test_lengths_follow_each_modes_convention(case_id: str, lens: list[int], tokens: int, positions: list[int]) -> None:
    spy, schedule, _ = eager(case_id)
    (batch,) = spy.eager
    assert batch.seq_lens.tolist() == lens
    assert batch.seq_lens.dtype == batch.req_pool_indices.dtype == batch.out_cache_loc.dtype == torch.int64
    assert batch.input_ids.shape[0] == tokens
    assert batch.positions.tolist() == positions
    assert 0 not in batch.req_pool_indices.tolist()
    assert (batch.out_cache_loc >= schedule.case.page_size).all(), "page 0 is reserved"


def test_a_verify_batch_has_no_extend_fields_and_a_draft_extend_has() -> None:
    verify, v1, v2 = (eager(c)[0].eager[0] for c in (VERIFY, V1, V2))
    assert verify.extend_seq_lens is None
    assert v1.extend_seq_lens is not None
    assert v1.extend_seq_lens.tolist() == [1, 3, 2]
    assert v2.extend_seq_lens is not None
    assert v2.extend_seq_lens.tolist() == [4, 4, 4]
    assert isinstance(v2.spec_info, DraftExtendInput)
    assert v2.spec_info.select_index is not None
    assert v2.spec_info.select_index.tolist() == [0, 6, 9]


@pytest.mark.parametrize("case_id", [DECODE, VERIFY, V1, V2])
def test_host_lengths_are_there_only_for_those_who_need_them(case_id: str) -> None:
    for backend, there in ((Spy, False), (NeedySpy, True)):
        spy, _, _ = graph(case_id, backend)
        for view in spy.views:
            assert (view.seq_lens_cpu is not None) == there
            assert (view.seq_lens_sum is not None) == there
            if isinstance(view.spec_info, DraftExtendInput) and case_id == V1:
                assert (view.spec_info.num_accept_tokens_cpu is not None) == there


@pytest.mark.parametrize("case_id", [VERIFY, V1, V2])
def test_buckets_are_captured_largest_first_with_a_spec_of_the_mode(case_id: str) -> None:
    spy, schedule, _ = graph(case_id)
    assert [bs for bs, _ in spy.captured] == list(schedule.buckets), "largest first"
    for bs, batch in spy.captured:
        assert batch.seq_lens.shape[0] == bs
        assert isinstance(batch.spec_info, (VerifyInput, DraftExtendInput))


def test_a_replay_gets_a_view_with_fewer_attributes() -> None:
    decode, drafts = graph(DECODE)[0].views[0], graph(V2)[0].views[0]
    assert not hasattr(decode, "extend_seq_lens")
    assert not hasattr(drafts, "positions")
    assert not hasattr(drafts, "num_padding")
    assert decode.num_padding == 1
    assert decode.out_cache_loc.shape[0] == 3, "live tokens only"
    assert drafts.seq_lens.shape[0] == 4, "unsliced"


_ALWAYS = {"forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "spec_info"}
_ALWAYS |= {"seq_lens_cpu", "seq_lens_sum"}
_MORE = {"positions", "num_padding", "actual_forward_mode"}


@pytest.mark.parametrize(("case_id", "width"), [(DECODE, 1), (VERIFY, 3), (V1, 4), (V2, 4)])
def test_a_replay_view_is_what_the_contract_writes_down(case_id: str, width: int) -> None:
    """The tables of ``ForwardBatch``."""
    spy, schedule, _ = graph(case_id, NeedySpy)
    for view, step in zip(spy.views, schedule.steps, strict=True):
        bs, tokens, spec = view.batch_size, step.tokens, view.spec_info
        drafts = case_id in (V1, V2)
        assert set(vars(view)) == (_ALWAYS if drafts else _ALWAYS | _MORE)
        assert len(view.input_ids) == (tokens if drafts else bs * width)
        for rows in (view.req_pool_indices, view.seq_lens, view.seq_lens_cpu):
            assert len(rows) == (schedule.max_bs if drafts else bs)
        assert isinstance(view.seq_lens_sum, int)
        assert len(view.out_cache_loc) == tokens
        if not drafts:
            assert (len(view.positions), view.num_padding) == (bs * width, bs - step.bs)
        if case_id == VERIFY:
            assert (len(spec.positions), len(spec.draft_token), len(spec.retrieve_index)) == (tokens, tokens, step.bs)
            assert spec.num_tokens_per_req == width
        if drafts:
            counts = [r.accepted for r in step.requests] + [width] * (bs - step.bs)
            rows = counts if case_id == V1 else [width] * bs
            assert len(spec.positions) == bs * width
            assert len(spec.hidden_states) == tokens
            assert spec.num_tokens_per_req == (-1 if case_id == V1 else width)
            assert spec.num_accept_tokens_cpu == (counts if case_id == V1 else None)
            assert len(spec.num_accept_tokens) == len(spec.num_correct_drafts) == len(spec.extend_seq_lens_tensor) == bs
            assert spec.extend_seq_lens_cpu == rows
            assert (spec.select_index is None) == (case_id == V1)


def with_last(case_id: str, padding: str) -> str:
    """A case like this one whose last replay has padded rows, with such contents."""
    cases = (replace(parse_case(case_id), padding=kind, seed=seed) for seed in range(9) for kind in ("nan", "stale"))
    last = ((case.id, make_schedule(case).steps[-1]) for case in cases)
    return next(name for name, step in last if step.padding == padding and step.bs < step.bucket)


def test_padding_rows_follow_production() -> None:
    spy, schedule, _ = graph(with_last(V2, "prod"))
    view, step = spy.views[-1], schedule.steps[-1]
    assert step.bs < view.batch_size
    assert view.seq_lens[step.bs : view.batch_size].tolist() == [1] * (view.batch_size - step.bs)
    assert view.req_pool_indices[step.bs : view.batch_size].tolist() == [0] * (view.batch_size - step.bs)
    assert view.spec_info.num_accept_tokens[step.bs :].tolist() == [4] * (view.batch_size - step.bs)


@pytest.mark.parametrize(
    ("case_id", "fields", "rows"),
    [(DECODE, 2, 3), (VERIFY, 2, 9), (V1, 4, 3), (V2, 2, 12)],
)
def test_each_mode_returns_exactly_its_fields_for_exactly_its_rows(case_id: str, fields: int, rows: int) -> None:
    for observed in (eager(case_id)[2], graph(case_id)[2][0]):
        outputs = observed.outputs
        given = [outputs.next_token_logits, outputs.hidden_states, outputs.topk_p, outputs.topk_index]
        assert sum(x is not None for x in given) == fields
        assert all(x.shape[0] == rows for x in given if x is not None)


def test_top_1_is_the_argmax_with_probability_1() -> None:
    ones = [c for seed in range(1, 9) if (c := parse_case(V1).with_seed(seed)).digest % 2]
    _, _, observed = eager(ones[0].id)
    assert observed.outputs.topk_p is not None
    assert observed.outputs.topk_index is not None
    assert observed.outputs.next_token_logits is not None
    assert observed.outputs.topk_p.tolist() == [[1.0]] * 3
    assert torch.equal(observed.outputs.topk_index[:, 0], observed.outputs.next_token_logits.argmax(-1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("case_id", [DECODE, VERIFY, V1, V2])
def test_replays_are_right_under_both_ways_of_turning_gradients_off(case_id: str, mode: Any) -> None:
    with mode():
        _, schedule, seen = graph(case_id)
    assert len(seen) == len(schedule.steps) >= 6
    for observed in seen:
        expected = expect(schedule, observed.step)
        out = torch.stack([o.reshape(expected.attention.shape[1:]) for o in observed.attention]).double()
        assert ((out - expected.attention).abs() <= expected.attention_limit).all()


def test_all_modes_share_one_instance_and_replay_interleaved() -> None:
    case = parse_case(V2)
    schedules = [make_schedule(c) for c in [case, *co_residents(case, MinimalBackend.capabilities.graph, 8)]]
    harness = ServerHarness(Spy, schedules, torch.device("cuda"))
    seen = run_graphs(harness, schedules, Clock()).observed
    order = [schedule.case.mode for schedule, observed in seen if observed.replay][: 2 * len(schedules)]
    assert order == [s.case.mode for s in schedules] * 2
    assert {s.case.mode for s in schedules} == set(ForwardMode)


class Legacy(LegacyGraphHooks, MinimalBackend):
    """A backend with the older pair of hooks, which older servers called."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.calls: list[tuple[str, int, int]] = []

    def init_forward_metadata_capture_cuda_graph(
        self, bs: int, num_tokens: int, req_pool_indices: Any, seq_lens: Any, encoder_lens: Any, mode: Any, spec: Any
    ) -> None:
        self.calls.append(("capture", bs, len(seq_lens)))

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Any,
        seq_lens: Any,
        seq_lens_sum: Any,
        encoder_lens: Any,
        mode: Any,
        spec: Any,
        seq_lens_cpu: Any,
    ) -> None:
        self.calls.append(("replay", bs, len(seq_lens)))


def test_the_older_hooks_are_called_as_they_were() -> None:
    schedule = make_schedule(parse_case(V2))
    harness = ServerHarness(Legacy, [schedule], torch.device("cuda"))
    run_graphs(harness, [schedule], Clock(), REPLAYS_ONLY)
    assert isinstance(harness.backend, Legacy)
    kinds = [kind for kind, _, _ in harness.backend.calls]
    assert kinds == ["capture"] * 2 + ["replay"] * len(schedule.steps)
    assert all(rows == 4 for kind, _, rows in harness.backend.calls if kind == "replay"), "longer than bs: slice"


class KeepsItsQueries(Spy):
    """Healthy; holds on to the q of each bucket's graph, which every replay of it writes anew."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.queries: dict[int, torch.Tensor] = {}

    def forward(self, q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.queries[len(q)] = q
        return super().forward(q, *arguments, **named)


def test_nan_rows_reach_the_padding_and_it_alone() -> None:
    spy, schedule, _ = graph(with_last(DECODE, "nan"), KeepsItsQueries)
    assert isinstance(spy, KeepsItsQueries)
    last = schedule.steps[-1]
    q = spy.queries[last.bucket]
    assert last.bs < len(q)
    assert q[last.bs :].isnan().all()
    assert not q[: last.bs].isnan().any()


class KeepsAModulesWorkspace(MinimalBackend):
    """Healthy: one workspace for the process, made at the first forward and written in place by every later one."""

    workspace: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        kind = type(self)
        if kind.workspace is None:
            kind.workspace = torch.zeros(1 << 16, dtype=torch.float32, device=q.device)
        kind.workspace[:1].fill_(float(len(q)))
        return super().forward(q, *arguments, **named)


def test_what_a_process_keeps_is_not_spoiled_by_the_change_from_no_grad_to_inference_mode() -> None:
    spec = f"{__name__}:KeepsAModulesWorkspace"
    plan = plan_run(backends=[spec], modes=["decode"], executions=["eager"], device="cpu")
    variants = [parse_case(item.case).inference_mode for item in plan.items]
    assert variants == sorted(variants)
    assert set(variants) == {False, True}
    assert [result.status for result in run(plan)] == [Status.PASSED] * len(plan.items)
