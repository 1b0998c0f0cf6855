"""Multi-mode instances: graph drives of all declared modes share one backend instance."""

from __future__ import annotations

from .dimension import Asked, Dimension, Without, flag_word, of_flag

__all__ = ["MULTI_MODE"]

MULTI_MODE = Dimension(
    name="mixed",
    fields=("mixed",),
    words=(flag_word("mixed", "mixed"),),
    describe=lambda case: {"mixed": "graphs of all declared modes on one instance, interleaved" if case.mixed else ""},
    declared=(
        Asked(
            lambda case: "several modes on one instance",
            lambda declared, case: not case.mixed or {case.mode} < declared.graph | declared.eager,
        ),
    ),
    fit=Without("Cases are made so if several modes are declared."),
    values=Without("cases/named.py makes its cases: one costs as much as all modes together."),
    covered=Without("It follows from the modes, and is no capability of its own."),
    simpler=of_flag("mixed"),
    undeclared=Without("It follows from the modes, and is no capability of its own."),
    random=Without("One costs as much as all modes together."),
    varies="instance",
    apply=Without("cases/co_residents.py makes the cases of the other modes, and runner_modes/ interleave them."),
)
