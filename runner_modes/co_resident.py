"""A co-resident instance, like a draft model next to its target: it runs while the tested instance is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import torch

from attn_testkit.steps.schedule import Schedule, Step

from .capture import ScheduleGraphs
from .eager import batch_of
from .errors import blame
from .forward import forward
from .harness import ServerHarness
from .mode_runners import MODE_RUNNERS
from .replay import fill_static, label_of, view_of


class CoResidentGraphs:
    """Graphs of a co-resident instance. Their results are not checked, only their effect on the tested instance."""

    def __init__(self, graphs: ScheduleGraphs) -> None:
        self._graphs = graphs
        # From the last step on, so that the two instances begin with different steps.
        steps = graphs.schedule.steps
        self._steps: Iterator[Step] = cycle((*steps[-1:], *steps[:-1]))

    def another_run(self) -> None:
        """Plan the next step and replay its graph. Raises ``RunError``."""
        self._planned()()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Replay a graph on another stream, at once with what the block launches. Raises ``RunError``."""
        run, side = self._planned(), torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        side.wait_stream(torch.cuda.current_stream())
        yield
        with torch.cuda.stream(side):
            run()
        with blame("replay", "another instance, at once"):
            torch.cuda.current_stream().wait_stream(side)

    def _planned(self) -> Callable[[], None]:
        """Plan the next step. The result replays its graph."""
        graphs, step = self._graphs, next(self._steps)
        harness, label = graphs.harness, f"another instance, {label_of(graphs, step)}"
        staged = harness.load(graphs.schedule, step)
        fill_static(graphs, staged)
        view = view_of(graphs, staged)
        with blame("plan for replay", label):
            harness.backend.init_forward_metadata_out_graph(view)

        def run() -> None:
            with blame("replay", label):
                harness.replay_graph(graphs.buckets[step.bucket].captured.graph)

        return run


class EagerCoResident:
    """An eager step of a co-resident instance, run again and again."""

    def __init__(self, harness: ServerHarness, schedule: Schedule) -> None:
        """Load the numbers of a step. Raises ``RunError``."""
        self._harness, self._case, self._step = harness, schedule.case, schedule.second
        self._batch, _ = batch_of(harness, harness.load(schedule, self._step))

    def another_run(self) -> None:
        """Plan the step and run it. Raises ``RunError``."""
        harness, stored = self._harness, self._step.stored
        with blame("plan", "another instance"):
            harness.backend.init_forward_metadata(self._batch)
        with blame("forward", "another instance"):
            forward(harness, MODE_RUNNERS[self._case.mode], self._batch, self._case, save_kv_cache=not stored)
