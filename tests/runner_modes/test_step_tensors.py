"""The table of tensors of a step: what is declared of each, and how its buffer is filled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.step_tensor import Filling, StepTensor
from attn_testkit.runner_modes.step_tensors import BATCH_FIELDS, STEP_TENSORS

from attn_testkit.contract import DraftDecodeInput, DraftExtendInput, ForwardBatch, Snapshot, StateInput

READ_BY_THE_SERVER = {"select_index"}
PARTS: dict[str, tuple[type[Any], ...]] = {
    "batch": (ForwardBatch,),
    "batch.spec_info": (DraftExtendInput, DraftDecodeInput),
    "batch.state": (StateInput,),
    "batch.state.snapshot": (Snapshot,),
}


def tensors_of(*parts: type[Any]) -> Iterator[str]:
    for part in parts:
        yield from (each.name for each in fields(part) if "Tensor" in str(each.type))


def test_a_name_is_declared_once() -> None:
    names = [each.name for each in BATCH_FIELDS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("part", PARTS)
def test_a_step_may_write_no_tensor_of_a_batch_but_those_that_only_the_server_reads(part: str) -> None:
    watched = {path for each in BATCH_FIELDS for path in each.watched if path.rpartition(".")[0] == part}
    own = {name for name in tensors_of(*PARTS[part]) if not name.endswith("_cpu")} - READ_BY_THE_SERVER
    assert watched == {f"{part}.{name}" for name in own}


def test_a_buffer_has_the_name_that_its_tensor_has_in_the_batch_of_the_mode() -> None:
    names = {each.name: (each.named(spec=True), each.named(spec=False)) for each in STEP_TENSORS}
    assert names["extend_seq_lens"] == ("batch.spec_info.extend_seq_lens_tensor", "batch.extend_seq_lens")
    assert names["positions"] == ("batch.positions", "batch.positions")
    assert names["select_index"] == ("", "")


@pytest.mark.parametrize(
    ("live", "rest", "expected"),
    [
        ([7, 8], 5, [7, 8, 5, 5]),
        ([7, 8], None, [7, 8, 3, 3]),
        ([], 5, [5, 5, 5, 5]),
        (None, None, [3, 3, 3, 3]),
    ],
)
def test_live_entries_come_first_and_what_is_after_them_may_stay(live: Any, rest: Any, expected: list[int]) -> None:
    filling, buffer = cast(Filling, None), np.full(4, 3)
    StepTensor("some", torch.int64, live=lambda _: live, rest=lambda _: rest).fill_into(buffer, filling)
    assert buffer.tolist() == expected
    StepTensor("some", torch.int64, rest=lambda _: 9).fill_into(buffer, filling)
    assert buffer.tolist() == expected, "the mode fills it"
