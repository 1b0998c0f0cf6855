"""What a backend is given where layers differ in their heads, and what is seen of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.harness import ServerHarness, StagedStep

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks.comparison import Comparison
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import KV_LAYOUTS, AttentionLayer, HeadShape, KVLayer, KVPoolSpec, Unsupported
from attn_testkit.examples import MinimalBackend
from attn_testkit.families.expected import expect
from attn_testkit.running.case_runs.evaluate import step_inputs
from attn_testkit.steps.data import make_step_data, pool_image
from attn_testkit.steps.kv_groups import slot_map
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.controls_of_layouts import KeysInPiecesOfEight
from cuda_on_cpu import emulated_cuda

WINDOWED = "decode-gqa2x4-d64-bf16-p4-k19.40.6-shuffled-gauss-w7-layers3from5by8x4d32.8x2d64-b4prod"
DRAFT = WINDOWED.replace("by8x4d32.8x2d64", "by4x2d32.8x4d64")
GROUPS = WINDOWED.replace("by", "groupsby")
CASES = [WINDOWED, DRAFT, GROUPS]
CUDA = torch.device("cuda")
BITS = torch.int16


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def staged(case: str, backend: Any = TorchNativeBackend) -> tuple[ServerHarness, StagedStep]:
    schedule = make_schedule(parse_case(case))
    harness = ServerHarness(backend, [schedule], CUDA)
    return harness, harness.load(schedule, schedule.steps[0])


def looked(harness: ServerHarness, held: StagedStep) -> tuple[np.ndarray, torch.Tensor]:
    """Slots of the schedule that changed, and what all layers hold there, in the shape of the case."""
    found = [
        raw[:size].cpu().numpy() for raw, size in harness.pool.look(held.slots, held.due_on_device[0], len(held.due[0]))
    ]
    slots, raw, shape = harness.pool.written(held.due[0], found)
    return slots, torch.from_numpy(raw).view(torch.bfloat16).view(shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", sorted(set(KV_LAYOUTS) - {"custom"}))
def test_the_pool_of_each_layer_holds_rows_of_its_own_shape_in_every_layout(case: str, layout: str) -> None:
    word = {"nhd": "", "kv-in-block": "-kvinblock"}.get(layout, "-kv" + layout.replace("-", ""))
    harness, held = staged(case.replace("-w7", word + "-w7"))
    context, schedule = harness.context, held.schedule
    image = pool_image(schedule, held.step, make_step_data(schedule, held.step), False, after=False)
    for place, (layer, each) in enumerate(zip(context.layers, harness.case.head_maps, strict=True)):
        group = context.group_of(layer)
        slots = torch.from_numpy(slot_map(schedule, group.index))
        for part, pages in enumerate(group.kv_pool.get_kv_pages(layer.layer_id)):
            own = pages.cpu().flatten(0, 1)[slots]
            assert own.shape[1:] == (each.layer.num_kv_heads, each.layer.head_dim)
            assert torch.equal(own.contiguous().view(BITS), each.kv_part(image[place, part]).view(BITS))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_that_is_written_is_seen_wherever_the_case_has_its_head(case: str, place: int) -> None:
    harness, held = staged(case)
    layer, each = harness.context.layers[place], harness.case.head_maps[place]
    pool = harness.context.group_of(layer).kv_pool
    slot = int(held.due[0][-1])
    at = int(slot_map(held.schedule, harness.context.group_of(layer).index)[slot])
    pool.get_value_buffer(layer.layer_id)[at, -1, -1] = 5.0
    slots, rows = looked(harness, held)
    assert slots.tolist() == [slot]
    found = (rows[place, 1, 0] == 5.0).nonzero().tolist()
    heads = [head for head, _ in found]
    times = harness.case.heads.kv_heads * each.layer.num_qo_heads // 8 // each.layer.num_kv_heads
    assert [dim for _, dim in found] == [each.layer.head_dim - 1] * times
    assert heads == list(range((each.layer.num_kv_heads - 1) * times, each.layer.num_kv_heads * times))


def test_nothing_that_changed_is_nothing_in_the_shape_of_the_case() -> None:
    for case in CASES:
        slots, rows = looked(*staged(case))
        assert len(slots) == 0
        assert rows.shape == (3, 2, 0, 4, 64)


def test_a_slot_that_is_nobodys_is_seen_too() -> None:
    harness, held = staged(WINDOWED)
    free = next(slot for slot in range(4, held.slots) if all(slot not in r.slots for r in held.step.requests))
    layer = harness.context.layers[1]
    harness.context.kv_pool.get_key_buffer(layer.layer_id)[free] = 2.0
    slots, rows = looked(harness, held)
    assert slots.tolist() == [free]
    assert (rows[1, 0, 0] == 2.0).all(), "both heads of it, each in two places, as wide as the case"


class Records(TorchNativeBackend):
    given: list[tuple[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor]]

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *rest: Any, **named: Any) -> torch.Tensor:
        self.given = [*getattr(self, "given", []), (layer, q, k, v)]
        return super().forward(q, k, v, layer, *rest, **named)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", ["", "-s1", "-s2", "-s3"])
def test_forward_is_given_rows_of_the_layers_own_heads(case: str, seed: str) -> None:
    schedule = make_schedule(parse_case(case + seed))
    harness = ServerHarness(Records, [schedule], CUDA)
    observed = run_eager(harness, schedule, schedule.steps[0], Clock())
    data = make_step_data(schedule, schedule.steps[0])
    given = harness.backend.given  # type: ignore[attr-defined]
    assert [layer.layer_id for layer, *_ in given] == [5, 6, 7]
    for place, (_, q, k, v) in enumerate(given):
        each = schedule.case.head_maps[place]
        assert torch.equal(q.cpu(), each.q_part(data.q[place]))
        assert torch.equal(k.cpu(), each.kv_part(data.k[place]))
        assert torch.equal(v.cpu(), each.kv_part(data.v[place]))
        assert q.stride()[1:] == (each.layer.head_dim, 1), "as a server's split leaves it: heads one behind the other"
    assert Comparison(observed, expect(schedule, schedule.steps[0])).right
    assert found_modified(observed) == ()


def found_modified(observed: Observation) -> tuple[str, ...]:
    inputs = step_inputs(observed.schedule, observed.step, TorchNativeBackend.capabilities)
    return replace(observed, inputs=inputs).modified


class Doubles(TorchNativeBackend):
    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *rest: Any, **named: Any) -> torch.Tensor:
        out = super().forward(q, k, v, layer, *rest, **named)
        if layer.layer_id == 6:
            v[0, -1, -1] *= 2
        return out


@pytest.mark.parametrize("case", CASES)
def test_a_number_of_a_layer_that_is_modified_is_found(case: str) -> None:
    seen = set()
    for seed in ("", "-s1", "-s2", "-s3"):
        schedule = make_schedule(parse_case(case + seed))
        harness = ServerHarness(Doubles, [schedule], CUDA)
        seen.update(found_modified(run_eager(harness, schedule, schedule.steps[0], Clock())))
    assert seen == {"the tensor that holds q, k and v", "v of layer 6"}, "as views of one tensor, and as copies"


def test_all_shapes_are_known_to_the_constructor() -> None:
    context = staged(DRAFT)[0].context
    assert context.head_shapes == (HeadShape(4, 2, 32), HeadShape(8, 4, 64))
    assert [layer.head_shape for layer in context.layers] == [context.head_shapes[i] for i in (0, 1, 0)]


def test_a_backend_without_the_capability_is_given_no_such_context_and_refuses_one() -> None:
    declared = TorchNativeBackend.capabilities.with_changes(heads={"heads_by_layer": False})

    class Undeclared(TorchNativeBackend):
        capabilities = declared

    with pytest.raises(Unsupported, match="number of head shapes 2 is not declared"):
        staged(WINDOWED, Undeclared)


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"heads": {"head_dims": {32}}}, "head dim 64"),
        ({"heads": {"head_dims": {64}}}, "head dim 32"),
        ({"heads": {"gqa_ratios": {2}}}, "GQA ratio 4"),
        ({"heads": {"gqa_ratios": {4}}}, "GQA ratio 2"),
        ({"heads": {"families": {"mha", "mqa"}}}, "family gqa"),
    ],
)
def test_heads_of_every_layer_have_to_be_declared(declared: dict[str, Any], text: str) -> None:
    class Narrow(TorchNativeBackend):
        capabilities = TorchNativeBackend.capabilities.with_changes(**declared)

    with pytest.raises(Unsupported, match=f"{text} is not declared"):
        staged(WINDOWED, Narrow)


def test_a_backend_that_lays_its_pool_out_itself_is_found_by_each_layers_shape() -> None:
    class InPieces(KeysInPiecesOfEight):
        capabilities = KeysInPiecesOfEight.capabilities.with_changes(
            heads={"heads_by_layer": True, "head_dims": {32, 64}, "gqa_ratios": {2, 4}}
        )

    schedule = make_schedule(parse_case(WINDOWED.replace("-w7", "-kvcustom-w7")))
    harness = ServerHarness(InPieces, [schedule], CUDA)
    observed = run_eager(harness, schedule, schedule.steps[0], Clock())
    assert Comparison(observed, expect(schedule, schedule.steps[0])).right


class OnePiece(MinimalBackend):
    """All layers in one allocation, the widest first."""

    capabilities = TorchNativeBackend.capabilities.with_changes(kv_pool={"kv_layouts": {"custom"}})

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> list[KVLayer]:
        sizes = [spec.num_slots * layer.tp_k_head_num * layer.head_dim for layer in spec.layers]
        memory = torch.zeros(2 * sum(sizes), dtype=spec.dtype, device=spec.device)
        pieces = iter(memory.split([size for size in sizes for _ in "kv"]))  # type: ignore[no-untyped-call]
        return [
            KVLayer(*(next(pieces).view(spec.num_slots, layer.tp_k_head_num, layer.head_dim) for _ in "kv"))
            for layer in spec.layers
        ]


def test_layers_of_several_shapes_may_lie_in_one_piece_of_memory() -> None:
    harness, held = staged(WINDOWED.replace("-w7", "-kvcustom-w7"), OnePiece)
    for place, layer in enumerate(harness.context.layers):
        key, _ = harness.context.kv_pool.get_kv_buffer(layer.layer_id)
        key[int(held.due[0][-1])] = place + 1.0
    slots, rows = looked(harness, held)
    assert slots.tolist() == [held.due[0][-1]]
    for place, each in enumerate(harness.case.head_maps):
        assert (each.kv_part(rows[place, 0, 0]) == place + 1.0).all()


def test_who_returns_the_width_of_another_layer_is_reported_which_it_should_be() -> None:
    class OfTheFirst(TorchNativeBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *rest: Any, **named: Any) -> torch.Tensor:
            out = super().forward(q, k, v, layer, *rest, **named)
            return out[..., : self.context.layers[0].v_head_dim].contiguous()

    schedule = make_schedule(parse_case(WINDOWED))
    harness = ServerHarness(OfTheFirst, [schedule], CUDA)
    with pytest.raises(RunError) as raised:
        run_eager(harness, schedule, schedule.steps[0], Clock())
    assert str(raised.value.__cause__) == "layer 6 returned shape (3, 8, 32), expected (3, 8, 64) or (3, 512)"


def test_layers_alike_are_as_they_were() -> None:
    harness, _ = staged(WINDOWED.replace("by8x4d32.8x2d64", ""))
    assert harness.case.head_maps == ()
    assert len(harness.context.kv_pool.pieces) == 1, "one piece of memory for all"
    assert replace(harness.context).head_shapes == (HeadShape(8, 4, 64),)
