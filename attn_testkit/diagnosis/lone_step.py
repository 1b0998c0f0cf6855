"""Schedules of a single step: the wrong one, in a given bucket."""

from __future__ import annotations

from dataclasses import replace

from ..steps.schedule import Schedule, Step


def lone_step(schedule: Schedule, step: Step, bucket: int) -> Schedule:
    """Make a schedule of only this step, in a bucket of this size."""
    return replace(schedule, buckets=(bucket,), steps=(replace(step, bucket=bucket),))


def least_bucket(schedule: Schedule, step: Step) -> int:
    """Return the smallest bucket for the requests and their rows: in extend, few requests may have many rows."""
    return max(step.bs, -(-step.tokens // schedule.case.width))
