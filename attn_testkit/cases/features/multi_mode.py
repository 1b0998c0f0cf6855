"""Multi-mode instances: graphs of all declared modes share one backend instance."""

from __future__ import annotations

from ...contract import Capabilities, ForwardMode
from ...glossary import Entry
from .feature import Asked, Feature, Trait, Without, flag_word, of_flag


def _by_slots_only(declared: Capabilities) -> bool:
    """True if drafts need a slot for each node: only a case of target-verify defines the number of nodes."""
    verifies = ForwardMode.TARGET_VERIFY in declared.graph | declared.eager
    return declared.state is not None and verifies and "commit" not in declared.state.rollback


MULTI_MODE = Feature(
    name="multi_mode",
    order=320,
    fields=("multi_mode",),
    traits=(
        Trait(
            "multi-mode instance",
            lambda case: case.multi_mode,
            excludes={
                "draft-decode": "a case of another mode names the instance",
            },
        ),
    ),
    words=(flag_word("multi_mode", "multi_mode"),),
    explained=(
        Entry(
            "multi_mode",
            "All declared modes run on one instance of the backend in alternation, eager and in graphs.",
            also=("mixed", "multi-mode instance"),
            page="reference/modes.md",
        ),
    ),
    describe=lambda case: {
        "multi_mode": "graphs of all declared modes on one instance, interleaved" if case.multi_mode else ""
    },
    declared=(
        Asked(
            lambda case: "several modes on one instance",
            lambda declared, case: not case.multi_mode or {case.mode} < declared.graph | declared.eager,
        ),
        Asked(
            lambda case: "states that are committed, on an instance whose case is of a mode without drafts",
            lambda declared, case: not case.multi_mode or case.tree is not None or not _by_slots_only(declared),
        ),
    ),
    fit=Without("Such cases are made if several modes are declared."),
    values=Without("catalogue/named.py makes its cases: one costs as much as all modes together."),
    covered=Without("It follows from the modes, and is not a separate capability."),
    simpler=of_flag("multi_mode"),
    undeclared=Without("It follows from the modes, and is not a separate capability."),
    random=Without("Such a case costs as much as all modes together."),
    varies="instance",
    apply=Without("cases/co_residents.py makes the cases of the other modes, and runner_modes/ interleave them."),
)
