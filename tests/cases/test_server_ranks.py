"""The ranks of a server, which a case draws: attention may have fewer of them than other layers."""

from __future__ import annotations

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.heads import HEADS
from attn_testkit.steps.schedule import make_schedule

RANKS = {0: (1, 1), 1: (8, 1), 2: (8, 2)}


def test_a_context_has_the_ranks_that_its_case_draws() -> None:
    met = set[int]()
    for keys in range(3, 20):
        case = parse_case(f"decode-mha2-d32-bf16-p16-k{keys}-shuffled-gauss-b1prod")
        drawn = case.derived("server-ranks")
        assert HEADS.context is not None
        assert tuple(HEADS.context([make_schedule(case)]).values()) == RANKS[drawn]
        met.add(drawn)
    assert met == set(RANKS)
