"""A family that is no softmax: every head gives the mean of the values of its last W + 1 tokens. A right backend, and
two broken ones. Everything that the kit has to know of it stands in this file; it registers itself at its import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attn_testkit.cases.fields import Fields
from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardBatch,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    Needs,
    Precision,
)
from attn_testkit.contract.head_layout import HeadLayout, register_head_layout
from attn_testkit.families.family import Answer, Family, Supposition
from attn_testkit.families.rounding import FLOAT32, FLUSHED, SMALLEST, UNIT_ROUNDOFF
from attn_testkit.families.softmax.attention import windowed
from attn_testkit.families.softmax.memory import KV_POOL
from attn_testkit.families.table import register
from attn_testkit.steps.data import StepData, make_layers, make_step_data
from attn_testkit.steps.schedule import Schedule

NAME = "mean"


def layers(case: Fields) -> tuple[AttentionLayer, ...]:
    """Layers without a scaling, because there are no logits."""
    return tuple(replace(layer, scaling=0.0) for layer in make_layers(case))


def mean_of_values(schedule: Schedule, data: StepData, more: int = 0) -> Answer:
    """The mean of the values that a row sees, and what rounding may do to it. ``more``: of so many values more."""
    outs, limits = [], []
    unit = UNIT_ROUNDOFF[schedule.case.dtype]
    for layer, values in zip(layers(schedule.case), data.values, strict=True):
        window = layer.sliding_window_size
        wider = replace(layer, sliding_window_size=window + more) if window >= 0 else layer
        seen = windowed(data.visible, data, wider).double()
        count = seen.sum(-1, keepdim=True)
        out, mass = ((seen / count) @ each.flatten(2) for each in (values, values.abs()))
        # The weights and the output are rounded, and so is each sum, in float32.
        limit = 2 * (unit + FLOAT32 * (count + 16)) * (mass + out.abs()) + 4 * SMALLEST[schedule.case.dtype] + FLUSHED
        rows = data.row_request, data.row_offset
        outs.append(out[rows].unflatten(-1, values.shape[-2:]))
        limits.append(limit[rows].unflatten(-1, values.shape[-2:]))
    return Answer(torch.stack(outs), torch.stack(limits))


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """New rows are never given in another way than the pool holds them: its dtype is the model's."""
    return mean_of_values(schedule, data)


def supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    """Backends whose window is off by one."""
    for more, what in ((-1, "W values"), (1, "W + 2 values")):
        text = f"the window is off by one: the result is the mean of the last {what}, and not of the last W + 1"
        yield Supposition(text, mean_of_values(schedule, data, more))


MEAN = Family(
    name=NAME,
    features=frozenset(
        {"mode", "requests", "heads", "head dim", "dtype", "page size", "keys", "rows", "chunks", "layout", "data",
         "KV layout", "window", "layers", "padded requests", "padding", "multi_mode", "variants", "seed"}
    ),
    layers=layers,
    data=make_step_data,
    memory=KV_POOL,
    answer=answer,
    supposed=supposed,
)  # fmt: skip
register_head_layout(HeadLayout(NAME, "as many", family=NAME, usual_scaling=False, by_layer=False))
register(MEAN)


class RightBackend(KernelBackend):
    """The mean over the slots that a row sees, in float32."""

    capabilities = Capabilities(
        eager={"decode", "extend"},
        graph={"decode"},
        windows={"decode", "extend"},
        heads=HeadShapes(families={NAME}, head_dims={64}),
        precision=Precision(dtypes={"bf16", "fp32"}),
        kv_pool=KVPools(page_sizes={1, 16}),
        needs=Needs(cpu_seq_lens=False),
    )
    more = 0

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert {(layer.family, layer.scaling) for layer in context.layers} == {(NAME, 0.0)}

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1).clamp(max=len(plan.kv_lens) - 1)
        first = plan.kv_lens - plan.cu_seqlens_q.diff()
        position = (first[request] + row - plan.cu_seqlens_q[request])[:, None]
        slot = torch.arange(plan.page_table.shape[1] * plan.page_size, device=q.device)
        seen, window = slot <= position, plan.layer.sliding_window_size
        if window >= 0:
            seen &= slot >= position - window - self.more
        values = kv[1][plan.page_table.long()].flatten(1, 2)[request].float()
        values = values.masked_fill(~seen[:, :, None, None], 0.0)
        return (values.sum(1) / seen.sum(1)[:, None, None].clamp(min=1)).to(q.dtype)


class WindowOffByOneBackend(RightBackend):
    """W values instead of W + 1."""

    more = -1


class StaleRowBackend(RightBackend):
    """Replays read the row of the request table that the capture had."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[int, torch.Tensor] = {}

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            self.kept[batch.batch_size] = batch.req_pool_indices.clone()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        stale = torch.cuda.is_current_stream_capturing()
        super().init_forward_metadata_in_graph(
            replace(batch, req_pool_indices=self.kept[batch.batch_size]) if stale else batch
        )
