"""Which case-runs of core are used where there is no time for all."""

from __future__ import annotations

from attn_testkit.running.planning.request import Item
from attn_testkit_corpus.mutants.stages import most_valuable

SMOKE = "decode-mha2-d64-fp16-p16-k7x2-reversed-gauss-b3prod"
PAIR = "decode-mha2-d64-fp16-p16-k7x2-reversed-peaked-b4prod"
LATER = "decode-mha2-d64-fp16-p16-k7x2-reversed-peaked-b3prod"
VARIANT = "decode-mha2-d64-fp16-p16-k7x2-reversed-gauss-b3prod-empty_batches"


def item(case: str, execution: str = "eager") -> Item:
    return Item("b", "decode", execution, case)


def test_a_value_that_smoke_has_not_comes_before_pairs_and_eager_and_graph_stay_together() -> None:
    known = [item(SMOKE), item("decode-mha2-d64-fp16-p16-k9x3-shuffled-peaked-b4prod")]
    waiting = [item(LATER), item(LATER, "graph"), item(PAIR), item(VARIANT), item(VARIANT, "graph")]
    order = [(each.case, each.execution) for each in most_valuable(waiting, known)]
    assert order[:2] == [(VARIANT, "eager"), (VARIANT, "graph")]
    assert len(order) == len(waiting)
    assert abs(order.index((LATER, "eager")) - order.index((LATER, "graph"))) == 1
