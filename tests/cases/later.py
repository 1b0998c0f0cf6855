"""Cases that came after the lists whose digests are held: they stand behind those, and may become more."""

from __future__ import annotations

from attn_testkit.cases.case import CODES, EXTREME_DATA, Case, Heads
from attn_testkit.cases.layers import Layers


def came_later(case: Case) -> bool:
    numbers = case.data in (*EXTREME_DATA, CODES) or bool(case.kv_splits)
    model = case.layers != Layers() or case.heads == Heads("mha", 1, 1) or case.heads.kv_heads == 3
    of_packed_rows = case.prefixes in ((107, 20), (70, 33, 1), (66_000, 32_769), (530, 33, 1))
    of_eight_drafts = case.prefixes == tuple(range(21, 33))
    together = len(case.prefixes) == 9 and case.layout == "shared"
    seldom = len(case.prefixes) > 12 and case.prefixes[1] == case.prefixes[0] + 1
    local = case.local_chunk > 0
    biased = case.alibi or case.qq_bias != "none"
    spans = case.spans is not None
    cross = case.encoder_len > 0
    loop = case.tree is not None and case.rounds > 0
    without_rows = 0 in case.new
    alone = not any(case.prefixes) or case.prefixes == (3,)
    return (
        numbers
        or model
        or case.kv_layout != "nhd"
        or bool(case.variants)
        or of_packed_rows
        or of_eight_drafts
        or together
        or alone
        or seldom
        or local
        or biased
        or spans
        or cross
        or loop
        or without_rows
    )
