"""Draft-decode and target-verify: the greedy-equivalence loop. Its rounds run in addition to the steps."""

from __future__ import annotations

from ...contract import Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Fields
from ..rows import changed_rows
from .feature import Asked, Bound, Feature, Trait, Without, Word, of_rows_part
from .numbers import nearer_numbers

_EXTENDS = {ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2}


def _loop_declared(declared: Capabilities, case: Fields) -> bool:
    """True if the modes of the loop are declared with the options of the case."""
    modes, others = declared.eager | declared.graph, {ForwardMode.TARGET_VERIFY}
    if not case.rounds:
        return True
    if case.draft:
        others |= _EXTENDS & modes
        nodes = 1 + case.draft.branches * case.draft.steps
        in_trees = case.window < 0 or case.draft.branches == 1 or declared.windows.in_trees
        fits = case.draft.branches <= declared.bounds.max_topk and nodes <= declared.bounds.max_q_rows and in_trees
        there = ForwardMode.TARGET_VERIFY in modes and bool(_EXTENDS & modes)
    else:
        others |= {ForwardMode.DECODE, ForwardMode.EXTEND}
        there = ForwardMode.DECODE in modes and ForwardMode.EXTEND in declared.eager
        fits = max(case.prefixes) <= declared.bounds.max_extend_tokens
    if case.kv_dtype != "same":
        # The words of a loop are not scaled for queries in FP8, and all rows are attended as stored.
        fits = (
            fits
            and declared.precision.q_scale == "none"
            and not (others | {case.mode}) & declared.precision.new_rows_as_given
        )
    return there and fits and (case.window < 0 or others <= declared.windows.modes)


GREEDY_LOOP = Feature(
    name="loop",
    order=100,
    fields=Without("`rows` of a draft-decode and of a target-verify have it."),
    traits=(
        Trait(
            "loop",
            lambda case: case.rounds > 0,
            excludes={
                "packed rows": "the pool of a loop holds plain numbers, not rows of bytes",
                "heads by layer": "all layers of a loop have heads of one shape",
                "fresh requests": "a loop of target-verify first computes prompts, so each request needs a prefix",
                "branching trees": "a loop of target-verify verifies chains; only that of draft-decode has branches",
                "snapshots of states": "a loop has no prefix cache",
            },
        ),
    ),
    words=(
        Word(
            r"loop(\d+)",
            lambda match, so_far: changed_rows(so_far["rows"], rounds=int(match[1])),
            lambda case: f"loop{case.rounds}" if case.rounds else "",
            bounds=(Bound("rounds of the loop", 1, 1024),),
        ),
    ),
    explained=(
        Entry(
            "loop6",
            "6 rounds of speculative decoding on one instance: of draft-extend, draft-decode and "
            "target-verify, or in a target-verify of decode, verify and commit. Their tokens must equal those"
            " of plain greedy decoding.",
            also=("greedy-equivalence loop", "rounds", "lossless loop"),
            page="reference/checks/lossless.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {
        "rounds": f"{case.rounds} of a greedy-equivalence loop after the steps" if case.rounds else ""
    },
    declared=(Asked(lambda case: "a greedy-equivalence loop of this draft, with these options", _loop_declared),),
    fit=Without("The catalogue makes a loop only of modes that are declared."),
    values=Without("catalogue/named.py makes its cases: a loop costs as much as a mode."),
    covered=Without("A loop follows from the modes, and is not a separate capability."),
    simpler=of_rows_part(
        "rounds",
        steps=lambda declared, case, minimal: (
            changed_rows(case.rows, rounds=rounds) for rounds in (1, *nearer_numbers(case.rounds, 0)) if case.rounds
        ),
    ),
    undeclared=Without("A loop follows from the modes, and is not a separate capability."),
    random=Without("A loop costs as much as a mode."),
    varies="instance",
    apply=Without("steps/greedy_loop.py and steps/verify_loop.py lay the rounds out."),
)
