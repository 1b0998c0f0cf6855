"""The fake of FlashAttention 2: what it computes, and which row it takes for which request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_testkit_servers.fakes.flash_attn_2 import arguments, varlen_fwd

CPU = torch.device("cpu")
LENS, ROWS = (9, 33), ((0, 0), (1, 1), (1, 0))
"""Keys of each request; request of each row, and how many keys behind it are of the same request."""


def _by_hand(given: dict[str, Any]) -> torch.Tensor:
    found, left = torch.zeros(3, 4, 64, dtype=torch.float64), given["window_size_left"]
    for row, (request, ahead) in enumerate(ROWS):
        last = LENS[request] - 1 - ahead
        first = max(last - left, 0) if left >= 0 else 0
        pages = given["block_table"][request].long()
        for head in range(4):
            keys, values = (given[x][pages].flatten(0, 1)[first : last + 1, head // 2].double() for x in "kv")
            logits = keys @ given["q"][row, head].double() * 0.125
            if given["softcap"]:
                logits = given["softcap"] * torch.tanh(logits / given["softcap"])
            if given["alibi_slopes"] is not None:
                logits = logits - given["alibi_slopes"][head].double() * torch.arange(last - first, -1, -1)
            found[row, head] = logits.softmax(0) @ values
    return found


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"window_size_left": 3}, {"softcap": 0.5},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "softcap": 1.0},
    ],
    ids=["causal", "window", "soft cap", "alibi and soft cap"],
)  # fmt: skip
def test_rows_attend_to_the_keys_of_their_request(changed: dict[str, Any]) -> None:
    given = arguments(CPU) | changed
    varlen_fwd(**given)
    assert (given["out"].double() - _by_hand(given)).abs().max() < 0.02


def test_a_launch_for_one_row_per_request_takes_row_i_for_request_i() -> None:
    given = arguments(CPU)
    given |= {name: given[name][:2] for name in ("q", "out")} | {"max_seqlen_q": 1}
    given["cu_seqlens_q"] = torch.tensor([0, 0, 1], dtype=torch.int32)
    by_place = given | {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "out": given["out"].clone()}
    varlen_fwd(**given)
    varlen_fwd(**by_place)
    assert torch.equal(given["out"], by_place["out"])
    windowed = given | {"window_size_left": 40, "out": torch.full_like(given["out"], torch.nan)}
    varlen_fwd(**windowed)
    assert bool(windowed["out"][1].isnan().all()), "with a window offsets count, and nobody has the second row"


def test_rows_behind_the_last_request_stay_as_they_were() -> None:
    given = arguments(CPU)
    given["cu_seqlens_q"] = torch.tensor([0, 1, 2], dtype=torch.int32)
    varlen_fwd(**given)
    assert bool(given["out"][2].isnan().all())
    assert bool(given["out"][:2].isfinite().all())
