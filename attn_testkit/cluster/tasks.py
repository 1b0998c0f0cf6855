"""Tasks of the nodes: the judge of a shard, and the actor that keeps finished results. A Ray worker process is used for
several tasks, also with a GPU (seen with Ray 2.60), so its judge is kept.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..registry import UsageError
from ..results.case_result import CaseResult, RunKey
from ..running.planning.request import Item, Options, Plan, Request
from ..running.processes.judge_process import JudgeProcess
from .ray_module import ray_module

ACCELERATOR_TYPE = "ray.io/accelerator-type"
"""Label that Ray gives to a node with GPUs."""

_kept: dict[tuple[Options, str, str], JudgeProcess] = {}
"""The judge of this worker process: for the same options, device and GPU."""


class Collector:
    """A Ray actor that keeps results where the driver runs, so that none is lost with a node."""

    def __init__(self) -> None:
        self._finished: set[RunKey] = set()
        self._new: list[CaseResult] = []

    def add(self, result: CaseResult) -> None:
        """Store one result; a second result of the same case-run, from a shard that ran twice, is dropped."""
        key = result.backend, result.execution, result.case
        if key not in self._finished:
            self._finished.add(key)
            self._new.append(result)

    def finished(self) -> set[RunKey]:
        """Return the case-runs that need not run again."""
        return set(self._finished)

    def take(self) -> list[CaseResult]:
        """Return the results that came since the last call."""
        new, self._new = self._new, []
        return new


def architecture_of(name: str) -> str:
    """``sm90`` of ``NVIDIA H200 sm90``; the whole name of another device."""
    found = re.search(r"\bsm\d+\w?\b", name)
    return found[0] if found else name


def device_name(options: Options, device: str) -> str:
    """Return the name of this node's device, such as ``NVIDIA H100 80GB HBM3 sm90``."""
    return _judge(options, device).device_name(device)


def plan_on_node(request: Request, options: Options) -> tuple[Plan | None, str]:
    """Plan on the node with the backend and the device. Returns the plan, or the error of the request."""
    try:
        return _judge(options, request.device).plan(request), ""
    except UsageError as error:
        return None, str(error)


def run_shard(plan: Plan, items: Sequence[Item], options: Options, collector: Any) -> None:
    """Run the unfinished case-runs of a shard; each result is sent to the collector at once."""
    ray = ray_module()
    finished = ray.get(collector.finished.remote())
    due = [item for item in items if item.key not in finished]
    if not due:
        return
    judge = _judge(options, plan.device)
    node, gpu = _place(ray, judge, plan)
    try:
        _send(ray, collector, (replace(result, node=node, gpu=gpu) for result in judge.run(plan, due)))
    except BaseException:
        # It has ended, or is in the middle of a case-run.
        _drop()
        raise


def _send(ray: Any, collector: Any, results: Iterable[CaseResult]) -> None:
    # The shard ends when its results are where they cannot be lost.
    ray.get([collector.add.remote(result) for result in results])


def _place(ray: Any, judge: JudgeProcess, plan: Plan) -> tuple[str, str]:
    """``node`` and ``gpu`` of a result. Raises ``RuntimeError`` on a node of another architecture than the plan's."""
    node = f"{socket.gethostname()} {ray.get_runtime_context().get_node_id()[:8]}"
    found = judge.device_name(plan.device)
    if architecture_of(found) != architecture_of(plan.header.device_name):
        raise RuntimeError(
            f"{node} has {found}, and the plan is for {plan.header.device_name}: start its Ray with the label "
            f"{ACCELERATOR_TYPE}, so that Ray can tell the nodes apart"
        )
    if plan.header.device != "cuda":
        return node, ""
    numbers = ", ".join(map(str, ray.get_gpu_ids()))
    return node, f"{found} (GPU {numbers})"


def _judge(options: Options, device: str) -> JudgeProcess:
    key = options, device, os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if key not in _kept:
        _drop()
        _kept[key] = JudgeProcess(options, device)
    return _kept[key]


def _drop() -> None:
    while _kept:
        _kept.popitem()[1].close()
