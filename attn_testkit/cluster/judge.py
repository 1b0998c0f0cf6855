"""The driver's side of a run on a Ray cluster: a ``Judge`` whose shards are tasks of Ray."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..registry import UsageError
from ..results.case_result import CaseResult
from ..running.planning.request import Item, Options, Plan, Request, kit_error
from ..running.planning.shards import Durations, shards_of
from ..running.processes.judge_process import search_path
from . import tasks
from .ray_module import ray_module

SHARDS_PER_SLOT = 4
"""Shards per slot: enough so that a fast node gets more, but few, because each starts a process that imports torch and
the backend."""
_POLL = 0.5
"""Seconds between two polls of the results."""


@dataclass(frozen=True)
class Architecture:
    """Nodes whose results are one verdict."""

    name: str
    """``sm90``; of nodes without a GPU ``emulated``."""
    types: tuple[str, ...] = ()
    """Accelerator types, as Ray names them; empty if any node will do."""
    gpus: int = 0
    """Number of GPUs of a shard: 1, or 0 if the device is emulated."""
    slots: int = 1
    """Number of shards that can run at the same time."""

    @property
    def where(self) -> dict[str, Any]:
        """The options of a task that has to run there."""
        return {"num_gpus": self.gpus, **({"label_selector": _any_of(self.types)} if self.types else {})}


def _any_of(types: Sequence[str]) -> dict[str, str]:
    return {tasks.ACCELERATOR_TYPE: f"in({','.join(types)})"}


def _ask_for_name(ray: Any, where: Mapping[str, Any], options: Options, device: str) -> str:
    """Ask a node on which a task with the options ``where`` runs for the name of its device."""
    name: str = ray.get(ray.remote(tasks.device_name).options(num_cpus=options.jobs, **where).remote(options, device))
    return name


@dataclass(frozen=True)
class Cluster:
    """A cluster to which this process is connected."""

    ray: Any
    options: Options

    def architectures(self, device: str) -> list[Architecture]:
        """Return the architectures that a run on ``device`` uses. Raises ``UsageError`` if there is no GPU for it."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        with_gpus = [node for node in nodes if node["Resources"].get("GPU", 0) >= 1]
        if device == "cpu" or (device == "auto" and not with_gpus):
            return [Architecture("emulated", slots=self._slots(nodes, 0))]
        if not with_gpus:
            raise UsageError(
                f"--device {device}: no node of the cluster has a GPU; start Ray with --num-gpus, or use cpu"
            )
        by_type: dict[str, list[Mapping[str, Any]]] = {}
        for node in with_gpus:
            by_type.setdefault((node.get("Labels") or {}).get(tasks.ACCELERATOR_TYPE, ""), []).append(node)
        if len(by_type) == 1 or "" in by_type:
            # All alike, or nodes that Ray cannot tell apart, which are refused if they differ (`ClusterJudge.run`).
            name = tasks.architecture_of(_ask_for_name(self.ray, {"num_gpus": 1}, self.options, device))
            return [Architecture(name, gpus=1, slots=self._slots(with_gpus, 1))]
        found: dict[str, list[str]] = {}
        for kind in by_type:
            where = {"num_gpus": 1, "label_selector": _any_of([kind])}
            found.setdefault(tasks.architecture_of(_ask_for_name(self.ray, where, self.options, device)), []).append(
                kind
            )
        return [
            Architecture(name, tuple(kinds), 1, self._slots([node for kind in kinds for node in by_type[kind]], 1))
            for name, kinds in sorted(found.items(), key=_by_number)
        ]

    def judge(self, architecture: Architecture) -> ClusterJudge:
        """Return the judge that plans and runs on an architecture."""
        return ClusterJudge(self.ray, self.options, architecture)

    def _slots(self, nodes: Sequence[Mapping[str, Any]], gpus: int) -> int:
        """Shards that can run at the same time."""
        rooms = [
            min(
                int(node["Resources"].get("CPU", 0) / self.options.jobs),
                int(node["Resources"].get("GPU", 0)) if gpus else sys.maxsize,
            )
            for node in nodes
        ]
        return max(1, sum(rooms))


def _by_number(found: tuple[str, list[str]]) -> list[str | int]:
    """Put sm90 before sm100, in whatever order Ray lists its nodes."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", found[0])]


@contextmanager
def connected(address: str, options: Options) -> Iterator[Cluster]:
    """Connect with a cluster: ``auto`` for the one of this node, ``local`` for only this machine, or an address.

    Raises ``UsageError`` if there is none.
    """
    ray = ray_module()
    # Ray hands it to its workers: a backend is found where this process finds it, if the node has the file.
    sys.path[:] = search_path()
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(
                address=address, log_to_driver=False, logging_level="error", include_dashboard=_no_dashboard(address)
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"--ray {address}: {first}; start one with `ray start --head`, or use --ray local for this machine"
            ) from error
    try:
        yield Cluster(ray, options)
    finally:
        if ours:
            ray.shutdown()


def _no_dashboard(address: str) -> bool | None:
    return False if address == "local" else None


class ClusterJudge:
    """A ``request.Judge``: plans on a node, once, and ships the plan to the shards. Used by one thread."""

    def __init__(self, ray: Any, options: Options, architecture: Architecture) -> None:
        self._ray, self._options, self._architecture = ray, options, architecture
        self._running: list[Any] = []
        self._items: list[Item] = []
        self._collector: Any = None
        self.durations: Durations | None = None
        """Seconds of case-runs, to cut shards that take equally long."""

    def plan(self, request: Request) -> Plan:
        """Decide what to run. Raises ``UsageError``."""
        plan, wrong = self._ray.get(self._task(tasks.plan_on_node).remote(request, self._options))
        if plan is None:
            raise UsageError(wrong)
        found: Plan = plan
        return found

    def begin(self, plan: Plan, items: Sequence[Item]) -> int:
        """Submit all shards to Ray, and return their number; ``run`` yields the results."""
        ray, slots = self._ray, self._architecture.slots
        cases = len({(item.backend, item.case) for item in items})
        cut = shards_of(items, max(1, min(cases, SHARDS_PER_SLOT * slots)), plan.header.seed, self.durations)
        shards = [shard for shard in cut if shard]
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._collector = ray.remote(tasks.Collector).options(num_cpus=0, scheduling_strategy=here).remote()
        shipped = ray.put(plan.to_run())
        run = self._task(tasks.run_shard)
        self._running = [run.remote(shipped, shard, self._options, self._collector) for shard in shards]
        self._items = list(items)
        return len(shards)

    def run(self, plan: Plan, items: Sequence[Item]) -> Generator[CaseResult, None, None]:
        """Results as they come. A case-run whose shard Ray has given up is the kit's own failure."""
        if not self._running:
            self.begin(plan, items)
        ray, left = self._ray, {item.key: item for item in self._items}
        pending, lost = list(self._running), ""
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=_POLL)
                # Of a shard that is through, all results have come.
                for result in ray.get(self._collector.take.remote()):
                    left.pop((result.backend, result.execution, result.case), None)
                    yield result
                for shard in done:
                    lost = _why_lost(ray, shard) or lost
            for item in left.values():
                yield kit_error(item, f"its shard was lost on the cluster: {lost}")
        finally:
            for shard in pending:
                ray.cancel(shard, force=True)
            self.close()

    def close(self) -> None:
        """Forget the collector; the workers end with the connection."""
        if self._collector is not None:
            self._ray.kill(self._collector)
        self._collector, self._running = None, []

    def _task(self, function: Callable[..., Any]) -> Any:
        return self._ray.remote(function).options(num_cpus=self._options.jobs, **self._architecture.where)


def _why_lost(ray: Any, shard: Any) -> str:
    """The reason why Ray gave up a shard; empty if the shard is done."""
    try:
        ray.get(shard)
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[-1].strip() if lines else type(error).__name__
    return ""
