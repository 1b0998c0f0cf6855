"""A backend declares to do without the width at capture, and cannot: the failure says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import check_backend

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Capabilities, ForwardBatch
from attn_testkit.examples import MinimalBackend

CASES = {
    "target-verify": ("target-verify-gqa2x2-d32-fp32-p4-k3.9-chain3-shuffled-gauss-b2prod", 3, "num_draft_tokens"),
    "draft-extend": (
        "draft-extend-gqa2x2-d32-fp32-p4-k3.9-n4a1.3-shuffled-gauss-b2prod", 4, "speculative_num_steps + 1",
    ),
    "draft-extend-v2": (
        "draft-extend-v2-gqa2x2-d32-fp32-p4-k3.9-n4a1.3-shuffled-gauss-b2prod", 4, "speculative_num_steps + 1",
    ),
}  # fmt: skip
DECODE = "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-b2prod"
CAPABILITIES = MinimalBackend.capabilities.with_changes(
    server={"takes_unset_width": True},
    precision={"dtypes": {"fp32"}},
    heads={"head_dims": {32}},
    kv_pool={"page_sizes": {4}},
)


class Healthy(MinimalBackend):
    """Looks at the width, and takes it from the context where it is unset."""

    capabilities: Capabilities = CAPABILITIES

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.width = getattr(batch.spec_info, "num_tokens_per_req", 1)


class Dies(Healthy):
    """Makes a buffer of as many rows."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        width = getattr(batch.spec_info, "num_tokens_per_req", None)
        if in_capture and width is not None:
            if width < 1:
                raise ValueError(f"{batch.batch_size} x {width} rows")
            self.rows = torch.zeros(batch.batch_size * width, device=self.context.device)


class WrongNumbers(Healthy):
    """Scales by it."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        return out if self.width > 0 else out * 2


class WrongWhatever(Healthy):
    """Its graphs are wrong with the width too."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        return out * 2 if torch.cuda.is_current_stream_capturing() else out


class WrongAsWell(WrongNumbers):
    """Without the capability, the width is always there."""

    capabilities = CAPABILITIES.with_changes(server={"takes_unset_width": False})

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        return super().forward(q, k, v, layer, batch, save_kv_cache) * 2


def hint_of(backend: type[MinimalBackend], case: str) -> str | None:
    """What the first finding of the graph of a case hints at; None where it passes."""
    (result,) = [r for r in check_backend(backend, device="cpu", executions=["graph"], cases=[case]) if r.case]
    return result.findings[0].hint if result.findings else None


@pytest.mark.parametrize("backend", [Dies, WrongNumbers])
@pytest.mark.parametrize("mode", CASES)
def test_who_cannot_deal_with_an_unset_width_is_reported_what_it_was_and_where_it_stands_besides(
    backend: type[MinimalBackend], mode: str
) -> None:
    case, width, place = CASES[mode]
    unset = -1 if parse_case(case).derived("num-tokens-per-req") else 0
    hint = hint_of(backend, case)
    assert hint is not None
    assert hint.splitlines()[0] == (
        f"num_tokens_per_req is {unset} while this graph is captured (takes_unset_width is declared); the "
        f"step passes with {width}. Take the width from the context ({place}), or do not declare it"
    )


def test_both_ways_of_an_unset_width_are_tried() -> None:
    cases = [parse_case(CASES["target-verify"][0]).with_seed(seed) for seed in range(8)]
    said = {(hint_of(Dies, case.id) or "")[:25] for case in cases[:8]}
    assert said == {"num_tokens_per_req is -1 ", "num_tokens_per_req is 0 w"}


@pytest.mark.parametrize("mode", CASES)
def test_the_healthy_one_passes_and_another_cause_is_not_put_down_to_the_width(mode: str) -> None:
    case, *_ = CASES[mode]
    assert hint_of(Healthy, case) is None
    for backend in (WrongWhatever, WrongAsWell):
        hint = hint_of(backend, case)
        assert hint is not None
        assert "num_tokens_per_req" not in hint


def test_a_mode_without_a_width_is_not_asked() -> None:
    hint = hint_of(WrongWhatever, DECODE)
    assert hint is not None
    assert "num_tokens_per_req" not in hint
