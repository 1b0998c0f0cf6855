"""What servers say in different ways, and what a backend must declare to be told it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.contract import (
    Capabilities,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    Unsupported,
    VerifyInput,
)
from attn_testkit.examples import MinimalBackend
from attn_testkit.steps.schedule import make_schedule
from cuda_on_cpu import emulated_cuda

DECODE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
VERIFY = "target-verify-gqa2x2-d64-bf16-p16-k3.15.40-chain3-shuffled-gauss-b4prod"
V1 = "draft-extend-gqa2x2-d64-bf16-p16-k3.15.40-n4a1.3.2-shuffled-gauss-b4prod"
V2 = "draft-extend-v2-gqa2x2-d64-bf16-p16-k3.15.40-n4a1.3.2-shuffled-gauss-b4prod"
WIDTHS = {VERIFY: 3, V1: 4, V2: 4}


class Spy(MinimalBackend):
    """Healthy backend that keeps the arguments of its calls."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.eager: list[ForwardBatch] = []
        self.captured: list[ForwardBatch] = []
        self.new: list[tuple[Any, Any, bool]] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.eager.append(batch)
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            self.captured.append(batch)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        self.new.append((k, v, save_kv_cache))
        return super().forward(q, k, v, layer, batch, save_kv_cache)


class TakesUnsetWidth(Spy):
    capabilities = Spy.capabilities.with_changes(server={"takes_unset_width": True})


class TakesNone(Spy):
    capabilities = Spy.capabilities.with_changes(server={"takes_none_kv": True})


class Needy(Spy):
    capabilities = Spy.capabilities.with_changes(needs={"cpu_seq_lens": True})


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def graph(case: Case, backend: type[Spy]) -> Spy:
    schedule = make_schedule(case)
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    assert isinstance(harness.backend, Spy)
    return harness.backend


def eager(case: Case, backend: type[Spy], *, second: bool = False) -> Spy:
    schedule = make_schedule(case)
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    run_eager(harness, schedule, schedule.second if second else schedule.steps[0], Clock())
    assert isinstance(harness.backend, Spy)
    return harness.backend


@pytest.mark.parametrize("case_id", WIDTHS)
def test_the_captured_batch_says_the_width_unless_a_backend_takes_it_unset(case_id: str) -> None:
    case = parse_case(case_id)
    for backend, widths in (
        (Spy, {WIDTHS[case_id]}),
        (TakesUnsetWidth, {-1 if case.derived("num-tokens-per-req") else 0}),
    ):
        specs = [batch.spec_info for batch in graph(case, backend).captured]
        assert all(isinstance(spec, (VerifyInput, DraftExtendInput)) for spec in specs)
        assert {spec.num_tokens_per_req for spec in specs if spec} == widths


@pytest.mark.parametrize(
    ("case_id", "backend", "lens", "prefixes"),
    [
        (V2, Spy, [4, 4, 4], None),
        (V2, Needy, [4, 4, 4], [3, 15, 40]),
        (V1, Spy, None, None),
        (V1, Needy, [1, 3, 2], [3, 15, 40]),
    ],
)
def test_the_rows_of_an_eager_v2_are_known_on_the_host_whatever_a_backend_needs(
    case_id: str, backend: type[Spy], lens: list[int] | None, prefixes: list[int] | None
) -> None:
    (batch,) = eager(parse_case(case_id), backend).eager
    assert (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu) == (lens, prefixes)


class Strides(Spy):
    """Remembers whether q was contiguous."""

    def forward(self, q: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        self.contiguous = q.is_contiguous()
        return super().forward(q, *arguments, **named)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("other_strides", [False, True])
def test_in_the_second_step_q_lies_as_in_the_first_or_the_other_way(contiguous: bool, other_strides: bool) -> None:
    picks = {"qkv-memory": contiguous, "second-step-memory": other_strides}
    cases = (parse_case(DECODE).with_seed(seed) for seed in range(32))
    case = next(case for case in cases if all(case.derived(name) == value for name, value in picks.items()))
    found = [eager(case, Strides, second=second) for second in (False, True)]
    assert [each.contiguous for each in found if isinstance(each, Strides)] == [contiguous, contiguous != other_strides]


@pytest.mark.parametrize("backend", [Spy, TakesNone])
def test_k_and_v_that_the_pool_holds_are_none_in_one_layer_for_who_takes_it(backend: type[Spy]) -> None:
    cases = [parse_case(DECODE).with_seed(seed) for seed in range(8)]
    stored = next(case for case in cases if case.derived("second-step-stored"))
    for k, v, save in eager(stored, backend).new:
        assert save
        assert k.isfinite().all()
        assert v.isfinite().all()
    first, last = eager(stored, backend, second=True).new
    assert not first[2]
    assert not last[2]
    assert (first[0] is None) == (first[1] is None) == (backend is TakesNone)
    rest = (last[:2],) if backend is TakesNone else (first[:2], last[:2])
    assert all(each.isnan().all() for pair in rest for each in pair)


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ({"takes_none_kw": True}, "unknown capability 'takes_none_kw'; did you mean 'server.takes_none_kv'"),
        ({"server": {"takes_none_kv": "yes"}}, "takes_none_kv must be True or False, got 'yes'"),
        ({"server": {"takes_unset_width": 1}}, "takes_unset_width must be True or False, got 1"),
        (
            {"takes_empty_batch": True},
            "unknown capability 'takes_empty_batch'; did you mean 'server.takes_empty_batches'",
        ),
        ({"server": {"takes_empty_batches": 0}}, "takes_empty_batches must be True or False, got 0"),
        ({"server": {"padded_requests": {"none"}}}, "unknown padded_requests 'none'; did you mean 'nothing'"),
        ({"server": {"padded_requests": ()}}, "padded_requests must be some of rows, nothing, got none"),
        ({"server": {"verify_lens": "all"}}, "verify_lens must be a set or list of values, got 'all'; write {'all'}"),
        ({"takes_bare_chain": True}, "unknown capability 'takes_bare_chain'; did you mean 'server.takes_bare_chains'"),
        ({"server": {"takes_more_rows": None}}, "takes_more_rows must be True or False, got None"),
        ({"precision": {"fp32_products": "tf23"}}, "unknown fp32_products 'tf23'; did you mean 'tf32'"),
        ({"server": {"takes_out": "yes"}}, "takes_out must be True or False, got 'yes'"),
        ({"server": {"output_lifetime": "layers"}}, "unknown output_lifetime 'layers'; did you mean 'layer'"),
        ({"server": {"padding_slots": {1}}}, "padding_slots must be {0}, {-1} or {0, -1}, got [1]"),
        ({"server": {"padding_slots": set()}}, "padding_slots must be {0}, {-1} or {0, -1}, got []"),
        ({"padding_slot": -1}, "unknown capability 'padding_slot'; did you mean 'server.padding_slots'"),
        ({"new_rows": "as_given"}, "unknown capability 'new_rows'; did you mean 'precision.new_rows_as_given'"),
        (
            {"precision": {"new_rows_as_given": "extend"}},
            "Precision.new_rows_as_given must be a set or list of values, got 'extend'",
        ),
    ],
)
def test_a_misspelt_capability_is_answered_with_the_right_one(capability: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Capabilities(eager={ForwardMode.DECODE}, **capability)


class BuiltTwice(Spy):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.calls: list[tuple[str, int]] = []

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.calls.append(("capture" if in_capture else "replay", batch.batch_size))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.calls.append(("capturing" if torch.cuda.is_current_stream_capturing() else "warm-up", batch.batch_size))

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        assert batch is self.captured[-1]
        self.calls.append(("before", batch.batch_size))


def test_the_hook_before_a_capture_comes_behind_its_warm_ups_and_never_before_a_replay() -> None:
    backend = graph(parse_case(DECODE), BuiltTwice)
    assert isinstance(backend, BuiltTwice)
    assert backend.calls[:10] == [
        ("capture", 4), ("warm-up", 4), ("warm-up", 4), ("warm-up", 4), ("before", 4), ("capturing", 4),
        ("capture", 2), ("warm-up", 2), ("before", 2), ("capturing", 2),
    ]  # fmt: skip
    assert {name for name, _ in backend.calls[10:]} == {"replay"}


EXTEND = "extend-gqa2x2-d64-bf16-p16-k25.51-n4a4x2-shuffled-gauss-b2prod"


@pytest.mark.parametrize(("case", "rows"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 4)])
def test_a_backend_knows_the_captured_sizes_in_requests_and_in_tokens(case: str, rows: int) -> None:
    context = graph(parse_case(case), Spy).context
    assert len(context.capture_sizes) == 2
    assert context.capture_tokens == tuple(size * rows for size in context.capture_sizes)


class PaddingSlots(Spy):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.seen: list[torch.Tensor] = []

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        # The view of a replay has live rows alone: the captured batch shows all.
        if batch.batch_size == 4:
            self.seen.append(self.captured[0].out_cache_loc.clone())

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        stored = replace(batch, out_cache_loc=batch.out_cache_loc.clamp(min=0))
        return super().forward(q, k, v, layer, stored, save_kv_cache)


class BothSlots(PaddingSlots):
    capabilities = Spy.capabilities.with_changes(server={"padding_slots": {0, -1}})


class NoSlot(PaddingSlots):
    capabilities = Spy.capabilities.with_changes(server={"padding_slots": {-1}})


@pytest.mark.parametrize(("backend", "slots"), [(PaddingSlots, {0}), (BothSlots, {0, -1}), (NoSlot, {-1})])
@pytest.mark.parametrize("case_id", [DECODE, "extend-gqa2x2-d64-bf16-p16-k3.15.40-n1a1x3-shuffled-gauss-b4prod"])
def test_rows_of_padding_have_the_slots_that_a_backend_takes(
    backend: type[PaddingSlots], slots: set[int], case_id: str
) -> None:
    spy = graph(parse_case(case_id), backend)
    assert isinstance(spy, PaddingSlots)
    tails = [int(each[3]) for each in spy.seen]
    assert tails[0] == max(slots), "at capture"
    assert {slot for slot in tails if slot <= 0} == slots


class NeitherRowsNorSlots(NoSlot):
    capabilities = NoSlot.capabilities.with_changes(server={"padded_requests": {"nothing"}})


@pytest.mark.parametrize("case_id", [DECODE, VERIFY])
def test_padded_requests_without_rows_may_have_no_slot_either(case_id: str) -> None:
    spy = graph(parse_case(case_id), NeitherRowsNorSlots)
    assert isinstance(spy, NeitherRowsNorSlots)
    width = WIDTHS.get(case_id, 1)
    assert {int(slot) for each in spy.seen for slot in each[3 * width :] if slot <= 0} == {-1}
    assert spy.context.dialect.padded_requests == "nothing"


class Padded(Spy):
    """Remembers what a graph of 4 requests reads before each replay."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.read: list[dict[str, torch.Tensor]] = []

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.batch_size == 4:
            spec = self.captured[0].spec_info
            rows = spec.num_accept_tokens if isinstance(spec, DraftExtendInput) else torch.empty(0)
            starts = getattr(batch, "query_start_loc", None)
            starts = torch.empty(0) if starts is None else starts
            given = {"lens": self.captured[0].seq_lens, "rows": rows, "starts": starts}
            self.read.append({name: tensor.clone() for name, tensor in given.items()})


class Nothing(Padded):
    capabilities = Spy.capabilities.with_changes(server={"padded_requests": {"nothing"}})


class Either(Padded):
    capabilities = Spy.capabilities.with_changes(server={"padded_requests": {"rows", "nothing"}})


@pytest.mark.parametrize("case_id", [DECODE, VERIFY, V1, V2])
def test_padded_requests_have_neither_rows_nor_keys_for_who_has_it_so(case_id: str) -> None:
    width = WIDTHS.get(case_id, 1)
    for backend, variant, usual in ((Nothing, "", False), (Either, "", True), (Either, "zero_length_padding", False)):
        spy = graph(replace(parse_case(case_id), variants=frozenset({variant} - {""})), backend)
        assert isinstance(spy, Padded)
        # Capture, then a step of three requests, then one of four.
        captured, padded, full, *_ = ({name: t.tolist() for name, t in read.items()} for read in spy.read)
        assert captured["lens"] == [1 if usual else 0] * 4
        assert padded["lens"][3] == (1 if usual else 0)
        assert full["lens"][3] > 1
        rows = [1, 3, 2] if case_id == V1 else [width] * 3
        if case_id in (V1, V2):
            assert captured["rows"] == [width] * 4
            assert padded["rows"] == [1, 3, 2, width if usual else 0]
        starts = [0, rows[0], rows[0] + rows[1], sum(rows), sum(rows)]
        assert padded["starts"] == ([] if usual else starts)
        assert captured["starts"] == ([] if usual else [width * i for i in range(5)])


class CountsNew(Spy):
    capabilities = Spy.capabilities.with_changes(server={"verify_lens": {"all"}})


class CountsEither(Spy):
    capabilities = Spy.capabilities.with_changes(server={"verify_lens": {"prefix", "all"}})


@pytest.mark.parametrize(
    ("backend", "variant", "lens"),
    [
        (Spy, "", [3, 15, 40]),
        (CountsNew, "", [6, 18, 43]),
        (CountsEither, "", [3, 15, 40]),
        (CountsEither, "seq_lens_with_new", [6, 18, 43]),
    ],
)
def test_lengths_of_a_verify_count_its_own_tokens_for_who_has_it_so(
    backend: type[Spy], variant: str, lens: list[int]
) -> None:
    spy = eager(replace(parse_case(VERIFY), variants=frozenset({variant} - {""})), backend)
    assert spy.eager[0].seq_lens.tolist() == lens
    assert spy.context.dialect.verify_lens == ("all" if lens[0] == 6 else "prefix")


@pytest.mark.parametrize("variant", ["", "no_tree_tensors"])
def test_a_bare_chain_has_neither_mask_nor_links(variant: str) -> None:
    case = replace(parse_case(VERIFY), variants=frozenset({variant} - {""}))
    specs = [eager(case, Spy).eager[0].spec_info, *(batch.spec_info for batch in graph(case, Spy).captured)]
    for spec in specs:
        assert isinstance(spec, VerifyInput)
        given = (spec.custom_mask, spec.retrieve_index, spec.retrieve_next_token, spec.retrieve_next_sibling)
        assert [each is None for each in given] == [variant == "no_tree_tensors"] * 4
        assert (spec.topk, spec.draft_token_num) == (1, 3)


def test_a_backend_refuses_a_dialect_that_it_does_not_declare() -> None:
    with pytest.raises(Unsupported, match="padded_requests nothing is not declared"):
        graph(replace(parse_case(DECODE), variants=frozenset({"zero_length_padding"})), Spy)


class Lent(Spy):
    """Remembers the memory that it is given for its outputs, and what that held."""

    capabilities = Spy.capabilities.with_changes(server={"takes_out": True})

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.lent: list[tuple[int, tuple[int, ...], torch.Tensor]] = []

    def forward(  # type: ignore[override]
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        result = super().forward(q, k, v, layer, batch, save_kv_cache)
        if "out" not in given:
            return result
        out = given["out"]
        self.lent.append((out.data_ptr(), tuple(out.shape), out.view(torch.int16).eq(-1).all()))
        return self.store(out, result)

    def store(self, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return out.copy_(result)


class Other(Lent):
    def store(self, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return result


class Copies(Lent):
    def store(self, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return out.copy_(result).clone()


def test_an_output_is_lent_in_memory_of_its_own_that_holds_poison() -> None:
    lent = eager(replace(parse_case(DECODE), variants=frozenset({"given_out"})), Lent)
    assert isinstance(lent, Lent)
    (first, shape, poisoned), (second, *_) = lent.lent
    assert first != second
    assert (shape, poisoned) == ((3, 4, 64), True)
    never = eager(parse_case(DECODE), Lent)
    assert isinstance(never, Lent)
    assert not never.lent


@pytest.mark.parametrize("backend", [Other, Copies])
def test_who_is_lent_an_output_returns_that_one(backend: type[Spy]) -> None:
    with pytest.raises(RunError) as caught:
        eager(replace(parse_case(DECODE), variants=frozenset({"given_out"})), backend)
    assert "was given out=, but returned other memory" in str(caught.value.__cause__)


class Shares(Spy):
    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        result = super().forward(q, k, v, layer, batch, save_kv_cache)
        if layer.layer_id == 0:
            self.shared = torch.empty_like(result)
        return self.shared.copy_(result)


class SharesAndDeclares(Shares):
    capabilities = Spy.capabilities.with_changes(server={"output_lifetime": "model"})


def test_layers_may_share_a_buffer_unless_the_capabilities_say_that_outputs_last() -> None:
    schedule = make_schedule(parse_case(DECODE))
    step, cuda = schedule.steps[0], torch.device("cuda")
    with pytest.raises(RunError) as caught:
        run_eager(ServerHarness(SharesAndDeclares, [schedule], cuda), schedule, step, Clock())
    assert "layer 1 returned the memory of layer 0's output" in str(caught.value.__cause__)
    harnesses = [ServerHarness(backend, [schedule], cuda) for backend in (Spy, Shares)]
    right, shared = (run_eager(harness, schedule, step, Clock()).attention for harness in harnesses)
    assert all(torch.equal(a, b) for a, b in zip(right, shared, strict=True))
    assert not torch.equal(*right)


class MoreRows(Spy):
    """Remembers how many rows were planned and how many came."""

    capabilities = Spy.capabilities.with_changes(server={"takes_more_rows": True})

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.rows: list[tuple[int, ...]] = []

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.planned = batch

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        given = (self.planned.input_ids, q, k, v, batch.input_ids, batch.positions, batch.out_cache_loc)
        self.rows.append(tuple(len(each) for each in given))
        self.slots = batch.out_cache_loc.clone()
        short = replace(batch, input_ids=self.planned.input_ids)
        return super().forward(q, k, v, layer, short, save_kv_cache)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self.planned = batch


@pytest.mark.parametrize(("variant", "more"), [("", 0), ("padded_tokens", 3)])
@pytest.mark.parametrize(("case_id", "rows"), [(DECODE, 3), (VERIFY, 9), (V1, 6)])
def test_a_forward_has_more_rows_than_its_plan_for_who_takes_it(
    variant: str, more: int, case_id: str, rows: int
) -> None:
    case = replace(parse_case(case_id), variants=frozenset({variant} - {""}))
    spy = eager(case, MoreRows)
    assert isinstance(spy, MoreRows)
    assert spy.rows == [(rows, *[rows + more] * 6)] * 2
    assert spy.slots[rows:].tolist() == [0] * more
    replayed = graph(case, MoreRows)
    assert isinstance(replayed, MoreRows)
    bucket = 4 * WIDTHS.get(case_id, 1)
    assert replayed.rows[0] == (bucket, *[bucket + more] * 6)
