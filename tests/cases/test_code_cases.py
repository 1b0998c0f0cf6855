"""Codes: walks that nearly cancel, that any host makes alike, and the cases that have them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from typing_extensions import override

from attn_testkit import check_backend
from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import CODES, DATA, Case, parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardBatch, ForwardMode
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.patterns import CODE_BOUND, balanced_codes
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.dense import DenseBackend, Visibility

CAPABILITIES = TorchNativeBackend.capabilities


OF_ROW_EDGES = ((255, 256, 511, 512, 1023, 1024), (254, 510, 1022))


def every_code_case(declared: Capabilities, mode: ForwardMode, tier: str) -> list[Case]:
    return [case for case in generate(declared, mode, tier) if case.data == CODES and case.prefixes not in OF_ROW_EDGES]


def of_other_pages(case: Case) -> bool:
    return case.prefixes[1:] == (300, 33) and case.prefixes[0] not in (4097, 4096, 1025)


def codes(declared: Capabilities, mode: ForwardMode, tier: str) -> list[Case]:
    return [case for case in every_code_case(declared, mode, tier) if not of_other_pages(case)]


@pytest.mark.parametrize(("family", "far"), [("mla", 1025), ("gqa", 4097)])
def test_long_decodes_are_counted_in_up_to_five_other_page_sizes(family: str, far: int) -> None:
    declared = CAPABILITIES.with_changes(
        heads={"families": {family}}, kv_pool={"page_sizes": {1, 2, 4, 8, 16, 32, 64, 256}}
    )
    found = [case for case in every_code_case(declared, ForwardMode.DECODE, "core") if of_other_pages(case)]
    assert [case.page_size for case in found] == [1, 4, 8, 32, 256]
    assert [case.prefixes[0] for case in found] == [far + 2 * page + page // 2 for page in (1, 4, 8, 32, 256)]
    verify = every_code_case(declared, ForwardMode.TARGET_VERIFY, "core")
    assert not any(of_other_pages(case) for case in verify)
    alone = every_code_case(declared.with_changes(kv_pool={"page_sizes": {16}}), ForwardMode.DECODE, "core")
    assert not any(of_other_pages(case) for case in alone)


def test_a_walk_is_a_mirrored_one_step_by_step() -> None:
    found = balanced_codes((2, 3, 4000, 1, 5), np.random.default_rng(7))
    rng = np.random.default_rng(7)
    steps = np.unpackbits(np.frombuffer(rng.bytes(4000 * 30 // 8), np.uint8)).reshape(4000, 30).astype(int) * 2 - 1
    walk, heading = np.zeros(30, int), np.ones(30, int)
    for key, step in enumerate(steps):
        moved = heading * step
        outside = np.abs(walk + moved) > CODE_BOUND
        heading = np.where(outside, -heading, heading)
        walk = walk + np.where(outside, -moved, moved)
        want = torch.from_numpy(np.where(outside, -moved, moved)).view(2, 3, 1, 5).float()
        assert torch.equal(found[:, :, key], want)


def test_any_run_of_keys_sums_to_little_and_no_two_keys_look_alike() -> None:
    found = balanced_codes((1, 1, 66_001, 1, 128), np.random.default_rng(0))[0, 0, :, 0]
    assert found.unique().tolist() == [-1.0, 1.0]
    walk = found.cumsum(0)
    assert (float(walk.amin()), float(walk.amax())) == (-CODE_BOUND, CODE_BOUND)
    some = found[torch.randperm(66_001, generator=torch.Generator().manual_seed(0))[:300]]
    products = (some @ found.mT) / 128
    assert int((products == 1).sum()) == 300, "each with itself alone"
    assert float(products[products < 1].max()) < 0.7


def test_all_places_of_the_walk_are_as_likely() -> None:
    walk = balanced_codes((1, 1, 20_000, 1, 64), np.random.default_rng(0))[0, 0, 1000:, 0].cumsum(0)
    assert abs(float(walk.mean(0).mean())) < 2


@pytest.mark.parametrize("kv_dtype", ["same", "fp8_e4m3"])
def test_a_pool_holds_codes_exactly(kv_dtype: str) -> None:
    word = "" if kv_dtype == "same" else "-kvfp8e4m3"
    case = parse_case(f"decode-gqa2x2-d32-bf16-p4-k40.9-shuffled-plus_minus_one{word}-b2prod")
    schedule = make_schedule(case)
    data = make_step_data(schedule, schedule.steps[0])
    assert not data.q.any()
    assert data.k.any()
    assert len(make_layers(case)) == 2
    assert data.values.abs().unique().tolist() == [1.0]


@pytest.mark.parametrize("mode", ForwardMode)
def test_each_mode_has_one_long_batch_and_one_with_all_options(mode: ForwardMode) -> None:
    minimal, options, _ = codes(CAPABILITIES, mode, "core")
    assert (minimal.prefixes, minimal.dtype, minimal.page_size, minimal.head_dim) == ((4097, 300, 33), "bf16", 16, 128)
    assert (minimal.window, minimal.sinks, minimal.logit_cap, minimal.kv_dtype) == (-1, False, 0.0, "same")
    assert (options.prefixes, options.dtype, options.kv_dtype) == ((1500, 70, 9), "fp16", "fp8_e4m3")
    assert (options.window, options.sinks, options.logit_cap) == (700, True, 1.5)
    assert CODES not in DATA, "no covering array has them"


def test_smoke_has_a_short_one_of_decode_and_full_has_the_longest() -> None:
    assert [case.prefixes for case in codes(CAPABILITIES, ForwardMode.DECODE, "smoke")] == [(1025, 33)]
    assert codes(CAPABILITIES, ForwardMode.TARGET_VERIFY, "smoke") == []
    full = [case.prefixes for case in codes(CAPABILITIES, ForwardMode.DECODE, "full")]
    assert full == [(4097, 300, 33), (1500, 70, 9), (66_000,), (66_001, 1500, 33)]


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_key_of_the_longest_request_of_a_mode_is_counted_in_core(mode: ForwardMode) -> None:
    """With one-hot values a case watches as many keys as there are channels: of 66,000 one in thousand."""
    for family in ("gqa", "mla"):
        found = generate(CAPABILITIES.with_changes(heads={"families": {family}, "heads_by_layer": False}), mode, "core")
        counted = max(max(case.prefixes) for case in found if case.data == CODES)
        assert counted == max(max(case.prefixes) for case in found), family
        assert family == "mla" or counted == 66_000
    short = generate(CAPABILITIES.with_changes(bounds={"max_context_len": 9000}), mode, "core")
    assert max(max(case.prefixes) for case in short if case.data == CODES) > 8900


def skipping(key: int, longest: int) -> type[DenseBackend]:
    class Skipping(DenseBackend):
        """Requests of more than ``longest`` keys lack one of them."""

        capabilities = DenseBackend.capabilities

        @override
        def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
            position, at, visible = super().visibility(batch, counts, offset)
            return position, at, visible & ~((at == key) & (self.kv_lens[:, None, None] > longest))

    return Skipping


@pytest.mark.parametrize(("longest", "status"), [(65_536, "failed"), (66_001, "passed")])
def test_a_decode_that_leaves_one_key_out_of_66_000_fails_a_case_of_core(longest: int, status: str) -> None:
    backend = skipping(31_234, longest)
    case = next(case for case in codes(backend.capabilities, ForwardMode.DECODE, "core") if case.prefixes == (66_000,))
    found = check_backend(backend, device="cpu", executions=["eager"], cases=[case.id], in_process=True)
    (result,) = (row for row in found if row.case)
    assert result.status.value == status
    assert [finding.check for finding in result.findings] == ["keys-counted-once"] * (status == "failed")
    assert status == "passed" or "31,234" in str(result.findings) or "31234" in str(result.findings)


def test_mla_has_shorter_ones_in_core() -> None:
    declared = CAPABILITIES.with_changes(heads={"families": {"mla"}, "head_dims": {512}})
    lens = {tier: [case.prefixes for case in codes(declared, ForwardMode.DECODE, tier)] for tier in ("core", "full")}
    assert lens["core"] == [(4096, 300, 33), (1500, 70, 9), (16_384,)]
    assert lens["full"] == [*lens["core"], (4097, 300, 33), (66_001, 1500, 33)]
    assert {case.head_dim for case in codes(declared, ForwardMode.DECODE, "core")} == {512}


def test_options_are_those_that_are_declared() -> None:
    few = CAPABILITIES.with_changes(
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {1, 64}},
        windows=(),
        options={"sinks": False, "logit_cap": False},
        precision={"dtypes": {"fp16"}},
        heads={"head_dims": {64, 256}},
    )
    for case in codes(few, ForwardMode.DECODE, "core"):
        assert (case.dtype, case.page_size, case.head_dim, case.kv_dtype) == ("fp16", 1, 64, "same")
        assert (case.window, case.sinks, case.logit_cap) == (-1, False, 0.0)
    wide = codes(CAPABILITIES.with_changes(heads={"head_dims": {256}}), ForwardMode.DECODE, "core")
    assert {case.head_dim for case in wide} == {256}
    trees = codes(CAPABILITIES.with_changes(windows={"in_trees": False}), ForwardMode.TARGET_VERIFY, "core")
    assert all(case.window < 0 or case.topk < 2 for case in trees)


def test_a_window_sees_as_little_of_the_walk() -> None:
    case = codes(CAPABILITIES, ForwardMode.DECODE, "core")[1]
    schedule = make_schedule(case)
    values = make_step_data(schedule, schedule.steps[0]).values[:, 0]
    sums = [values[:, start:end].sum(1).abs().max() for start, end in pairwise((3, 703, 1403))]
    assert max(map(float, sums)) <= 2 * CODE_BOUND
