"""A case of its own is tried from the capability on that allows it, and with one less it is not."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode

CAPABILITIES = TorchNativeBackend.capabilities


def core(mode: ForwardMode, **changes: object) -> list[Case]:
    return list(generate(CAPABILITIES.with_changes(**changes), mode, "core"))


@pytest.mark.parametrize(("rows", "tried"), [(3, False), (4, True), (5, True)])
def test_four_accepted_rows_of_two_requests_divide_by_the_batch_size(rows: int, tried: bool) -> None:
    def is_it(case: Case) -> bool:
        return (case.prefixes, case.new, case.width) == ((5, 9), (1, 3), 4)

    assert any(map(is_it, core(ForwardMode.DRAFT_EXTEND, bounds={"max_q_rows": rows}))) is tried
    assert not any(map(is_it, core(ForwardMode.DRAFT_EXTEND_V2, bounds={"max_q_rows": rows})))
