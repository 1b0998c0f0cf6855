"""Checks of state that outlives a step, in the instance and in the process."""

from __future__ import annotations

from .evaluation import Evaluation, in_eager

EVALUATIONS = (
    Evaluation(
        "steps-independent",
        applies=in_eager,
    ),
)
