"""Batches of several widths on one instance: what a backend is given for each."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.co_residents import co_resident_of
from attn_testkit.cases.features.server.table import on_its_instance
from attn_testkit.contract import (
    DraftDecodeInput,
    ForwardBatch,
    ForwardMode,
    ServerConventions,
    TreeMaskMode,
    Unsupported,
    VerifyInput,
    VerifyMask,
)
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

VERIFY = "target-verify-mha2-d32-fp32-p4-k9.3-chain{}-shuffled-gauss-b3prod-narrower_widths"
DRAFT = "draft-decode-mha2-d32-fp32-p4-k9.3-topk2steps{}-shuffled-gauss-b3prod-narrower_widths"
DECLARED = TorchNativeBackend.capabilities
WAITS = DECLARED.with_changes(eager=(), needs={"cpu_seq_lens": True})


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def schedules(case_id: str) -> list[Schedule]:
    case = parse_case(case_id)
    return [make_schedule(each) for each in (case, *on_its_instance(case))]


class Widths(TorchNativeBackend):
    """Keeps the width of each plan, with the number of rows that its batch has."""

    def __init__(self, context: object) -> None:
        super().__init__(context)  # type: ignore[arg-type]
        self.seen: list[tuple[bool, int, int, int]] = []

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        spec = batch.spec_info
        if isinstance(spec, VerifyInput):
            self.seen.append((in_capture, spec.draft_token_num, spec.spec_steps + 1, len(batch.input_ids)))
        if isinstance(spec, DraftDecodeInput):
            self.seen.append((in_capture, spec.num_steps, len(spec.out_cache_loc), len(batch.input_ids)))
        super().init_forward_metadata_out_graph(batch, in_capture)


def plans(case_id: str) -> tuple[tuple[int, ...], list[tuple[bool, int, int, int]]]:
    found = schedules(case_id)
    harness = ServerHarness(Widths, found, torch.device("cuda"), declared=DECLARED)
    run_graphs(harness, found, Clock(), RunOptions(eager_steps=False))
    assert isinstance(harness.backend, Widths)
    return harness.context.draft_widths, harness.backend.seen


@pytest.mark.parametrize(("width", "others"), [(8, [4, 2]), (5, [2]), (4, [2]), (3, [2])])
def test_narrower_cases_have_half_the_width_and_the_least(width: int, others: list[int]) -> None:
    assert [each.width for each in on_its_instance(parse_case(VERIFY.format(width)))] == others
    assert not on_its_instance(parse_case(VERIFY.format(width).removesuffix("-narrower_widths")))


def test_graphs_of_every_width_are_captured_first_and_replayed_in_turn() -> None:
    widths, seen = plans(VERIFY.format(8))
    assert widths == (2, 4, 8)
    captures = [each[1:] for each in seen if each[0]]
    assert captures == [(n, n, bs * n) for n in (8, 4, 2) for bs in (3, 1)]
    replays = [width for capture, width, _, _ in seen if not capture]
    assert replays[:6] == [8, 4, 2, 8, 4, 2], "no two replays of one width come together"
    assert all(rows % width == 0 and depth == width for _, width, depth, rows in seen)


def test_a_shorter_draft_has_its_own_slots_and_as_many_rows() -> None:
    widths, seen = plans(DRAFT.format(6))
    assert widths == (2, 3, 6)
    assert [each[1:] for each in seen if each[0]] == [(s, bs * 2 * s, bs * 2) for s in (6, 3, 2) for bs in (3, 1)]


def test_an_instance_of_one_width_has_no_list_of_widths() -> None:
    harness = ServerHarness(Widths, schedules(VERIFY.format(8))[:1], torch.device("cuda"), declared=DECLARED)
    assert harness.context.draft_widths == ()


def test_a_backend_that_does_not_declare_the_mode_refuses_several_widths() -> None:
    class One(TorchNativeBackend):
        capabilities = DECLARED.with_changes(server={"narrower_widths": {"draft-decode"}})

    harness = ServerHarness(Widths, schedules(VERIFY.format(8)), torch.device("cuda"), declared=DECLARED)
    with pytest.raises(Unsupported, match="batches of several widths in target-verify"):
        One(harness.context)
    One(replace(harness.context, draft_widths=()))


def test_only_modes_that_have_a_width_are_accepted() -> None:
    with pytest.raises(ValueError, match=r"narrower_widths has decode; modes with a width are draft-decode"):
        ServerConventions(narrower_widths={ForwardMode.DECODE})


class PacksBits(TorchNativeBackend):
    """Owns a bit-packed mask of the widest batch's items, and keeps the rows of the first request."""

    packed: VerifyMask | None = None
    packed_rows: tuple[tuple[int, list[int]], ...] = ()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        items = torch.zeros(max_bs * self.context.num_draft_tokens, dtype=torch.uint16, device=self.context.device)
        self.packed = VerifyMask(items, TreeMaskMode.QLEN_ONLY_BITPACKING, max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self.packed

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        spec = batch.spec_info
        assert isinstance(spec, VerifyInput)
        assert spec.custom_mask is not None
        if not in_capture and len(batch.out_cache_loc):
            rows = spec.custom_mask.view(torch.int16)[: spec.draft_token_num].cpu().tolist()
            self.packed_rows += ((spec.draft_token_num, rows),)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Attend as a chain without a mask."""
        assert isinstance(batch.spec_info, VerifyInput)
        bare = replace(batch.spec_info, custom_mask=None)
        super().init_forward_metadata_in_graph(replace(batch, spec_info=bare))


def test_bits_of_a_narrow_mask_lie_in_items_of_the_widest() -> None:
    found = schedules(VERIFY.format(12))
    harness = ServerHarness(PacksBits, found, torch.device("cuda"), declared=WAITS)
    run_graphs(harness, found, Clock(), RunOptions(eager_steps=False))
    assert isinstance(harness.backend, PacksBits)
    rows = harness.backend.packed_rows
    assert {width for width, _ in rows} == {12, 6, 2}
    assert all(found == [(2 << node) - 1 for node in range(width)] for width, found in rows)


def test_a_co_resident_instance_has_half_the_width() -> None:
    case = parse_case(VERIFY.format(8).replace("narrower_widths", "").rstrip("-") + "-multi_mode")
    assert co_resident_of(DECLARED, case).width == 4
    tree = parse_case("target-verify-mha2-d32-fp32-p4-k9.3-t0.0.1.1-shuffled-gauss-b3prod-multi_mode")
    assert co_resident_of(DECLARED, tree).width == 5
