"""What is promised: one file per kind of promise, plain functions on host data, no pytest."""

from .promises import PROMISES, Promise

__all__ = ["PROMISES", "Promise"]

from enum import IntEnum


class Stage(IntEnum):
    STARTED = 0
    CONSTRUCTED = 1
    OBSERVED = 2
    CAPTURED = 3
    REPLAYED = 4
    COMPLETED = 5


def judged(claims, execution, stage, failed):
    return tuple(PROMISES), ()
