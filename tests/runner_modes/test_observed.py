"""What comes to the host after a step, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions
from attn_testkit.runner_modes.static_inputs import make_static_inputs
from attn_testkit.runner_modes.step_tensors import STEP_TENSORS

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import AttentionBackend, ForwardBatch
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import crossings, emulated_cuda

DECODE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
VERIFY = "target-verify-gqa2x2-d64-bf16-p16-k3.15.40-chain3-shuffled-gauss-b4prod"
V1 = "draft-extend-gqa2x2-d64-bf16-p16-k3.15.40-n4a1.3.2-shuffled-gauss-b4prod"
V2 = "draft-extend-v2-gqa2x2-d64-bf16-p16-k3.15.40-n4a1.3.2-shuffled-gauss-b4prod"
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def eager(backend: type[AttentionBackend], case_id: str = DECODE) -> tuple[Schedule, Observation]:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(backend, [schedule], CUDA)
    return schedule, run_eager(harness, schedule, schedule.steps[0], Clock())


def replays(backend: type[AttentionBackend], case_id: str) -> list[Observation]:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(backend, [schedule], CUDA)
    run = run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    return [observed for _, observed in run.observed]


def names(observed: Observation, group: Any) -> list[str]:
    return list(observed.copies.group(group))


@pytest.mark.parametrize("case_id", [DECODE, VERIFY, V1, V2])
def test_inputs_that_were_not_modified_do_not_travel(case_id: str) -> None:
    for observed in (eager(TorchNativeBackend, case_id)[1], *replays(TorchNativeBackend, case_id)):
        assert not any(names(observed, group) for group in ("before", "now", "activations")), observed.label


@pytest.mark.parametrize("case_id", [DECODE, VERIFY, V1, V2])
def test_of_a_padded_replay_the_live_rows_travel(case_id: str) -> None:
    found = replays(TorchNativeBackend, case_id)
    assert any(observed.padded for observed in found)
    for observed in found:
        step = observed.step
        assert [len(out) for out in observed.attention] == [step.tokens] * 2
        returned = step.bs if case_id == V1 else step.tokens
        assert {len(value) for value in observed.copies.group("outputs").values()} == {returned}
        slots = {int(slot) for request in step.requests for slot in request.slots[request.prefix :]}
        assert set(observed.written[0].tolist()) - {0} == slots


class Scales(TorchNativeBackend):
    """Multiplies one of q, k, v of one layer in place, after it was read."""

    part, layer_id = 0, 1

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: ForwardBatch, **named: Any) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, **named)
        if layer.layer_id == self.layer_id:
            (q, k, v)[self.part][-1, -1, -1].mul_(-1)
        return out


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_the_model_gave_travels_where_it_was_modified_in_its_last_element(part: int, layer: int) -> None:
    backend = type("Scaled", (Scales,), {"part": part, "layer_id": layer})
    cases = [parse_case(DECODE).with_seed(seed) for seed in range(1, 9)]
    for contiguous, expected in ((False, ["packed 0"]), (True, [f"{'qkv'[part]} {layer}"])):
        case = min((c for c in cases if (c.derived("qkv-memory") == 1) is contiguous), key=lambda c: c.id)
        assert names(eager(backend, case.id)[1], "activations") == expected
        for observed in replays(backend, case.id):
            # The last row of a padded replay is nobody's.
            assert names(observed, "activations") == ([] if observed.padded else expected)


class Advances(TorchNativeBackend):
    """Adds one to the last live length, on the device."""

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        out = super().forward(*arguments, **named)
        batch = arguments[4]
        batch.seq_lens[batch.batch_size - 1].add_(1)
        return out


class FollowsItsSources(TorchNativeStateBackend):
    """Writes the slot of a request over the one that it continues, as if the next step began there."""

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        out = super().forward(*arguments, **named)
        state = next(each for each in arguments if isinstance(each, ForwardBatch)).state
        assert state is not None
        assert state.sources is not None
        state.sources[:1].copy_(state.indices[:1])
        return out


def test_a_step_may_not_write_the_sources_of_states() -> None:
    case = "decode-gdn1x2-d128-fp16-p16-k5-shuffled-strong_decay-k128w1sb16.null.zeroed.source.kv.strided.snap16-b2prod"
    assert names(eager(FollowsItsSources, case)[1], "now") == ["batch.state.sources"]
    assert any(names(observed, "now") == ["batch.state.sources"] for observed in replays(FollowsItsSources, case))


def test_an_input_travels_as_it_was_and_as_it_is() -> None:
    schedule, observed = eager(Advances)
    lens = schedule.steps[0].lens
    assert observed.copies.group("before")["batch.seq_lens"].tolist() == lens
    assert observed.copies.group("now")["batch.seq_lens"].tolist() == [*lens[:-1], lens[-1] + 2]
    for replayed in replays(Advances, DECODE):
        assert names(replayed, "now") == ["batch.seq_lens"]
        bucket = replayed.step.bucket
        assert [len(replayed.copies.group(group)["batch.seq_lens"]) for group in ("before", "now")] == [bucket] * 2


@pytest.mark.parametrize("case_id", [DECODE, VERIFY, V1, V2])
def test_a_step_comes_to_the_host_in_one_transfer(case_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host: list[int] = []
    copy_across = crossings.copy_across

    def counted(session: Any, source: torch.Tensor, dtype: Any, to_device: bool, non_blocking: bool) -> torch.Tensor:
        to_host.extend([] if to_device else [source.numel()])
        return copy_across(session, source, dtype, to_device, non_blocking)

    monkeypatch.setattr(crossings, "copy_across", counted)
    eager(TorchNativeBackend, case_id)
    assert len(to_host) == 1
    to_host.clear()
    after_capture = 1  # which slots it wrote
    assert len(replays(TorchNativeBackend, case_id)) + after_capture == len(to_host)


@pytest.mark.parametrize(("bs", "rows", "tokens"), [(4, 4, 12), (2, 2, 6)])
def test_of_static_buffers_what_a_bucket_was_captured_with_is_watched(bs: int, rows: int, tokens: int) -> None:
    schedule = make_schedule(parse_case(VERIFY))
    harness = ServerHarness(TorchNativeBackend, [schedule], CUDA)
    static = make_static_inputs(harness, schedule, 1, STEP_TENSORS)
    sent, *others = static.sent(bs, spec=True, mask=False)
    lengths = {place.name.removeprefix("batch."): place.shape[0] for place in sent.places}
    by_token = {"input_ids", "out_cache_loc", "index_cache_loc", "positions", "spec_info.hidden_states"}
    assert lengths.pop("query_start_loc") == rows + 1
    assert {name for name, length in lengths.items() if length == tokens} == by_token
    assert {length for name, length in lengths.items() if name not in by_token} == {rows}
    assert [each.places[0].name for each in others] == ["batch.seq_lens_cpu"]
    assert others[0].places[0].shape == (rows,)
    assert static.sent(bs, spec=True, mask=True)[-1].places[0].name == "batch.spec_info.custom_mask"


def test_what_a_step_writes_on_the_host_reaches_every_buffer() -> None:
    schedule = make_schedule(parse_case(V1))
    harness = ServerHarness(TorchNativeBackend, [schedule], CUDA)
    static = make_static_inputs(harness, schedule, 1, STEP_TENSORS)
    assert static["seq_lens"].tolist() == static.seq_lens_cpu.tolist() == [1] * 4
    assert static["num_accept_tokens"].tolist() == static["extend_seq_lens"].tolist() == [4] * 4
    assert static["num_correct_drafts"].tolist() == [3] * 4
    assert static["select_index"].tolist() == [3, 7, 11, 15]
    assert static["input_ids"].tolist() == static["positions"].tolist() == static["out_cache_loc"].tolist() == [0] * 16
    for value, (name, array) in enumerate(static.host.items(), start=20):
        array[:] = value
        static.send()
        assert static[name].eq(value).all(), name
    assert static.seq_lens_cpu.tolist() == static["seq_lens"].tolist()
