"""Activations reach a backend as a server's projection leaves them."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.data import make_layers
from attn_testkit.model import Model


@pytest.mark.parametrize("rows", [1, 3])
def test_query_rows_keep_the_stride_of_the_packed_projection(rows: int) -> None:
    case = parse_case("decode-gqa3x2-d32-fp16-p4-k3.9.6-shuffled-gauss-b4prod")
    layers = make_layers(case)
    model = Model(case, layers, 4, torch.float16, torch.device("cpu"))
    packed = model.table[:rows, 1]
    q, k, v = model._split(packed, layers[1])
    assert {x.stride(0) for x in (q, k, v)} == {packed.stride(0)}
    assert torch.equal(torch.cat([x.flatten(1) for x in (q, k, v)], 1).view(torch.int16), packed.view(torch.int16))
