"""Activations reach a backend as a server's projection leaves them."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.model import Model, row_width
from attn_testkit.steps.data import HIDDEN, make_layers


@pytest.mark.parametrize("rows", [1, 3])
def test_query_rows_keep_the_stride_of_the_packed_projection(rows: int) -> None:
    case = parse_case("decode-gqa3x2-d32-fp16-p4-k3.9.6-shuffled-gauss-b4prod")
    layers = make_layers(case)
    table = torch.randn(5, 2, row_width(layers, torch.float16)).half()
    model = Model(case, layers, table, torch.zeros(5, HIDDEN))
    packed = table[torch.arange(rows)]
    for layer in (0, 1):
        q, k, v = model._split(packed, layer, rows)
        assert {x.stride(0) for x in (q, k, v)} == {packed.stride(0)} == {2 * row_width(layers, torch.float16)}
        assert torch.equal(torch.cat([x.flatten(1) for x in (q, k, v)], 1), packed[:, layer])


def test_values_of_mla_are_the_first_columns_of_its_keys() -> None:
    case = parse_case("decode-mla16-d64r32-fp16-p4-k3.9.6-shuffled-gauss-b4prod")
    layers = make_layers(case)
    assert row_width(layers, torch.float16) == 17 * 96
    model = Model(case, layers, torch.randn(5, 2, row_width(layers, torch.float16)).half(), torch.zeros(5, HIDDEN))
    packed = model.table[:3]
    q, k, v = model._split(packed, 1, 3)
    assert torch.equal(torch.cat([q.flatten(1), k.flatten(1)], 1), packed[:, 1])
    assert (v.shape, v.stride()) == ((3, 1, 64), k.stride())
    assert torch.equal(v, k[..., :64])
