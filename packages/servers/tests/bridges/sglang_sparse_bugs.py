"""Bugs of sparse attention put into SGLang's DSA class of 0.5.23, by the same lines for this kit and for SGLang's.

    PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend sglang_sparse_bugs:RowBefore --mode decode

Each changes what the class gives its Triton kernels of decode and prefill. Importing this imports SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_testkit.contract import BackendContext
from attn_testkit_servers.bridges.sglang import backend_class

DSA: Any = backend_class("dsa")
Given = dict[str, Any]
_CALLS = ("_forward_triton_decode", "_forward_triton_sparse_mla")
_KEPT: dict[Any, torch.Tensor] = {}


def row_before(given: Given) -> None:
    """A row gets the selection of the row before it (sglang #33059)."""
    given["page_table_1"] = given["page_table_1"].roll(1, 0)


def first_row(given: Given) -> None:
    """All rows get the selection of the first one."""
    given["page_table_1"] = given["page_table_1"][:1].expand_as(given["page_table_1"]).contiguous()


def slot_zero(given: Given) -> None:
    """-1 is clamped to slot 0 (vLLM #51538)."""
    given["page_table_1"] = given["page_table_1"].clamp(min=0)


def last_columns(given: Given) -> None:
    """The last eighth of the columns is lost (flashinfer #5095)."""
    table = given["page_table_1"].clone()
    table[:, table.shape[1] * 7 // 8 :] = -1
    given["page_table_1"] = table


def last_key(given: Given) -> None:
    """The last key of each row is lost: a count that is one short."""
    table = given["page_table_1"]
    column = torch.arange(table.shape[1], device=table.device)
    last = column.masked_fill(table < 0, -1).amax(1, keepdim=True)
    given["page_table_1"] = table.masked_fill(column == last, -1)


def stale(given: Given) -> None:
    """The first selection of this shape is kept (TensorRT-LLM #16290)."""
    table = given["page_table_1"]
    given["page_table_1"] = _KEPT.setdefault((table.shape, id(given["owner"])), table.clone())


def scale_off(given: Given) -> None:
    """The softmax scale is 3% too large, as with a forgotten factor of YaRN."""
    given["sm_scale"] = given["sm_scale"] * 1.03


def no_rope(given: Given) -> None:
    """The rope part of queries is left out."""
    q = given.get("q_rope", given.get("q_all"))
    rope = torch.zeros_like(q[..., -64:])
    if "q_rope" in given:
        given["q_rope"] = rope
    else:
        given["q_all"] = torch.cat([q[..., :-64], rope], -1)


BUGS: dict[str, Callable[[Given], None]] = {
    "RowBefore": row_before, "FirstRow": first_row, "SlotZero": slot_zero, "LastColumns": last_columns,
    "LastKey": last_key, "Stale": stale, "ScaleOff": scale_off, "NoRope": no_rope,
}  # fmt: skip


def put_in(owner: Any, change: Callable[[Given], None], bound: bool) -> None:
    """Change the calls of ``owner``: an object of SGLang's class, or the class if not ``bound``."""
    for name in _CALLS:
        right = getattr(owner, name)

        def wrong(*positional: Any, right: Any = right, **given: Any) -> Any:
            given["owner"] = owner if bound else positional[0]
            change(given)
            del given["owner"]
            return right(*positional, **given)

        setattr(owner, name, wrong)


def _with(change: Callable[[Given], None]) -> type:
    class Wrong(DSA):  # type: ignore[misc]
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            put_in(self.real, change, bound=True)

    return Wrong


globals().update({name: _with(change) for name, change in BUGS.items()})
