"""After a wrong result the kit says which keys were used, where other weight went, and what that looks like."""

from __future__ import annotations

import pytest

from attn_testkit.engine import check_backend
from attn_testkit.results import Status

DECODE = "decode-gqa3x2-d32-fp16-p4-k3.9.6-shuffled-gauss-b4prod"
SOFT_CAP = "decode-gqa3x2-d32-fp16-p4-k3.9.6-shuffled-gauss-cap1.5-b4prod"
REVERSED = "draft-extend-v2-gqa3x2-d32-fp16-p4-k3.9-n4a1.3-reversed-gauss-b2prod"
HERE = "attn_testkit.faults."

TOLD = [
    (
        "d_kv_extent:LengthRoundedUpToPage",
        DECODE,
        "reads-own-kv",
        "17% of its weight went to slots behind its last key",
    ),
    ("d_kv_extent:PageIdUsedAsSlot", DECODE, "reads-own-kv", "none of its own keys is used"),
    ("d_kv_extent:DecodeMissesItsOwnKey", DECODE, "matches-oracle", "the last key is missing"),
    ("d_kv_extent:NonMonotonicSlots", REVERSED, "matches-oracle", "mixed up with each other"),
    ("g_numerics:SoftCapAfterMask", SOFT_CAP, "matches-oracle", "a soft cap comes before the mask"),
    ("i_addressing:LocationsReadAsInt32", DECODE, "writes-own-kv", "was not written"),
]


@pytest.mark.parametrize(("name", "case", "promise", "text"), TOLD, ids=[told[0] for told in TOLD])
def test_the_failure_says_where_the_weight_went(name: str, case: str, promise: str, text: str) -> None:
    (result,) = check_backend(HERE + name, device="cpu", executions=["eager"], cases=[case])
    assert result.status is Status.FAILED
    assert text in " ".join(f"{f.attended} {f.hint}" for f in result.findings if f.check == promise)
