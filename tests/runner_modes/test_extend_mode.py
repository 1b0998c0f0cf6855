"""Extend: what a backend is given in eager, at capture and at a replay, and which rows give the mode's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import ForwardBatch, ForwardMode
from attn_testkit.examples import MinimalBackend
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

EXTEND = "extend-gqa2x2-d64-bf16-p16-k3.15.40-n10a17.1.2-chunks3-shuffled-gauss-b4prod"
TENSORS = ("seq_lens", "req_pool_indices", "out_cache_loc", "positions", "extend_seq_lens", "extend_prefix_lens",
           "extend_start_loc")  # fmt: skip
LISTS = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_num_tokens", "seq_lens_sum", "num_padding")


@dataclass
class Given:
    """What a batch held when the backend was given it."""

    bs: int
    rows: int
    kept: dict[str, Any]
    """Tensors are on the device: an eager step may not wait for it."""
    dtypes: dict[str, torch.dtype]

    @classmethod
    def of(cls, batch: ForwardBatch) -> Given:
        tensors = {name: getattr(batch, name) for name in TENSORS}
        kept: dict[str, Any] = {name: tensor.clone() for name, tensor in tensors.items()}
        kept |= {name: getattr(batch, name, None) for name in LISTS}
        cpu = batch.seq_lens_cpu
        kept["seq_lens_cpu"] = None if cpu is None else cpu.tolist()
        return cls(batch.batch_size, len(batch.input_ids), kept, {n: t.dtype for n, t in tensors.items()})

    @property
    def held(self) -> dict[str, Any]:
        return {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in self.kept.items()}


class Spy(MinimalBackend):
    """Healthy; remembers what it was given."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.eager: list[Given] = []
        self.captured: list[Given] = []
        self.views: list[Given] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.eager.append(Given.of(batch))
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        (self.captured if in_capture else self.views).append(Given.of(batch))


class NeedySpy(Spy):
    capabilities = Spy.capabilities.with_changes(needs={"cpu_seq_lens": True})


class FillZero(NeedySpy):
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def eager(backend: type[Spy] = Spy) -> tuple[Spy, Schedule, Observation]:
    schedule = make_schedule(parse_case(EXTEND))
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    observed = run_eager(harness, schedule, schedule.steps[0], Clock())
    assert isinstance(harness.backend, Spy)
    return harness.backend, schedule, observed


def graph(backend: type[Spy] = NeedySpy, case_id: str = EXTEND) -> tuple[Spy, Schedule, list[Observation]]:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    run = run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    assert isinstance(harness.backend, Spy)
    return harness.backend, schedule, [observed for _, observed in run.observed]


@pytest.mark.parametrize("needy", [False, True])
def test_an_eager_batch_has_every_field_of_a_prefill(needy: bool) -> None:
    spy, schedule, _ = eager(NeedySpy if needy else Spy)
    (given,) = spy.eager
    assert (given.bs, given.rows) == (3, 20)
    held = given.held
    assert held["seq_lens"] == [20, 16, 42]
    assert held["extend_seq_lens"] == held["extend_seq_lens_cpu"] == [17, 1, 2]
    assert held["extend_prefix_lens"] == held["extend_prefix_lens_cpu"] == [3, 15, 40]
    assert held["extend_start_loc"] == [0, 17, 18]
    assert held["extend_num_tokens"] == 20
    assert held["positions"] == [*range(3, 20), 15, 40, 41]
    assert held["seq_lens_cpu"] == ([20, 16, 42] if needy else None)
    assert held["seq_lens_sum"] == (78 if needy else None)
    slots = [slot for r in schedule.steps[0].requests for slot in r.slots[r.prefix :].tolist()]
    assert held["out_cache_loc"] == slots
    int32 = {"extend_seq_lens", "extend_prefix_lens", "extend_start_loc"}
    assert given.dtypes == {name: torch.int32 if name in int32 else torch.int64 for name in TENSORS}


def test_the_context_says_how_many_new_tokens_a_request_may_have() -> None:
    schedule = make_schedule(parse_case(EXTEND))
    alone = ServerHarness(Spy, [schedule], torch.device("cuda")).context
    assert (alone.max_extend_tokens, alone.num_draft_tokens, alone.speculative_num_steps) == (17, 1, 0)
    assert (alone.max_bs, alone.max_num_tokens) == (6, 60)
    decode = parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod-multi_mode")
    both = [
        make_schedule(c) for c in [decode, *co_residents(decode, {ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND}, 8)]
    ]
    context = ServerHarness(Spy, both, torch.device("cuda")).context
    assert (context.max_extend_tokens, context.speculative_num_steps) == (4, 3)
    assert ServerHarness(Spy, both[:1], torch.device("cuda")).context.max_extend_tokens == 0


@pytest.mark.parametrize(("backend", "fill"), [(NeedySpy, 1), (FillZero, 0)])
def test_a_graph_is_captured_with_all_its_rows_in_the_first_requests(backend: type[Spy], fill: int) -> None:
    spy, schedule, _ = graph(backend)
    assert [given.bs for given in spy.captured] == list(schedule.buckets) == [4, 2]
    for given, lens in zip(spy.captured, ([17, 17, 6, 0], [17, 3]), strict=True):
        held, keys = given.held, [n or fill for n in lens]
        assert given.rows == sum(lens) == given.bs * schedule.case.width == held["extend_num_tokens"]
        assert held["extend_seq_lens"] == held["extend_seq_lens_cpu"] == lens
        assert held["seq_lens"] == held["seq_lens_cpu"] == keys
        assert held["seq_lens_sum"] == sum(keys)
        prefixes = [key - n for key, n in zip(keys, lens, strict=True)]
        assert held["extend_prefix_lens"] == held["extend_prefix_lens_cpu"] == prefixes
        assert held["extend_start_loc"] == [sum(lens[:i]) for i in range(given.bs)]
        assert set(held["out_cache_loc"]) | set(held["req_pool_indices"]) == {0}


@pytest.mark.parametrize(("backend", "fill"), [(NeedySpy, 1), (FillZero, 0)])
def test_at_a_replay_padded_requests_have_no_row_and_rows_behind_the_live_ones_go_to_slot_0(
    backend: type[Spy], fill: int
) -> None:
    spy, schedule, _ = graph(backend)
    assert len(spy.views) == len(schedule.steps)
    padded_requests = padded_rows = 0
    for given, step in zip(spy.views, schedule.steps, strict=True):
        held, padding = given.held, step.bucket - step.bs
        new, prefixes = [r.new for r in step.requests], [r.prefix for r in step.requests]
        assert (given.bs, given.rows) == (step.bucket, step.bucket * schedule.case.width)
        assert held["extend_num_tokens"] == step.tokens
        assert held["num_padding"] == padding
        assert held["extend_seq_lens"] == held["extend_seq_lens_cpu"] == new + [0] * padding
        assert held["extend_prefix_lens"] == held["extend_prefix_lens_cpu"] == prefixes + [fill] * padding
        assert held["seq_lens"] == held["seq_lens_cpu"] == step.lens + [fill] * padding
        assert held["seq_lens_sum"] == sum(step.lens) + fill * padding
        starts = [sum(new[:i]) for i in range(step.bs)]
        assert held["extend_start_loc"] == starts + [step.tokens] * padding
        slots = [slot for r in step.requests for slot in r.slots[r.prefix :].tolist()]
        assert held["out_cache_loc"] == slots + [0] * (given.rows - step.tokens)
        padded_requests += padding
        padded_rows += given.rows - step.tokens
    assert padded_requests > 0
    assert padded_rows > 0


def test_the_outputs_are_those_of_each_requests_last_row() -> None:
    _, schedule, observed = eager()
    step, (logits, hidden) = schedule.steps[0], (observed.outputs.next_token_logits, observed.outputs.hidden_states)
    expected = expect(schedule, step)
    assert logits is not None
    assert hidden is not None
    assert logits.shape[0] == hidden.shape[0] == expected.logits.shape[0] == 3
    assert ((logits - expected.logits).abs() <= expected.logits_limit).all()
    assert observed.outputs.topk_p is None


@pytest.mark.parametrize("padding", ["prod", "nan", "stale", "small"])
def test_replays_give_the_attention_of_every_live_row_whatever_fills_the_others(padding: str) -> None:
    _, schedule, seen = graph(case_id=EXTEND.replace("b4prod", f"b4{padding}"))
    assert len(seen) == len(schedule.steps)
    for observed in seen:
        expected = expect(schedule, observed.step)
        out = torch.stack([o.reshape(expected.attention.shape[1:]) for o in observed.attention]).double()
        assert ((out - expected.attention).abs() <= expected.attention_limit).all()
        logits = observed.outputs.next_token_logits
        assert logits is not None
        assert ((logits - expected.logits).abs() <= expected.logits_limit).all()


class AdvancesPrefixes(Spy):
    """Broken: it moves the prefixes on for the next chunk, in the caller's tensor."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        assert batch.extend_prefix_lens is not None
        batch.extend_prefix_lens += 1


def test_the_extend_fields_of_the_batch_are_inputs_that_stay_as_they_were() -> None:
    _, _, observed = eager(AdvancesPrefixes)
    assert observed.modified == ("batch.extend_prefix_lens",)
