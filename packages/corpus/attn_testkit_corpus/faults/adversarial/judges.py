"""Replacement, in the backend's process, of the kit's functions that would find it wrong."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, Execution, ForwardBatch

from .catalogue import adversarial
from .parent import AdversarialBackend
from .ways_in import in_frames


def _kit(module: str) -> Any:
    return importlib.import_module(f"attn_testkit.{module}")


@adversarial("replaces-the-judge")
class ReplacesTheJudge(AdversarialBackend):
    """The constructor replaces the checks, the failing statuses, and the exit code of a run."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        places = [
            ("checks.step", "evaluate_step", lambda *_: []),
            ("checks.numeric", "matches_oracle", lambda *_: []),
            ("running.case_runs.evaluate", "evaluate_step", lambda *_: []),
            ("reports.verdict", "exit_code", lambda *_, **__: 0),
            ("results.run_header", "exit_code", lambda *_, **__: 0),
            ("results.case_result", "BAD", frozenset()),
        ]
        for module, name, value in places:
            before = getattr(_kit(module), name)
            setattr(_kit(module), name, value if self.cheats else before)


@adversarial("widens-the-limits")
class WidensTheLimits(AdversarialBackend):
    """The constructor makes unit roundoff 1 and every limit infinite."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        rounding, limits = _kit("families.rounding"), _kit("families.softmax.limits")
        if self.cheats:
            rounding.UNIT_ROUNDOFF.update(dict.fromkeys(rounding.UNIT_ROUNDOFF, 1.0))
            limits.attention_limit = lambda attention, *_: torch.full_like(attention.out, torch.inf)


@adversarial("replaces-the-comparisons-of-torch")
class ReplacesTheComparisonsOfTorch(AdversarialBackend):
    """The constructor makes torch find everything equal, close and finite."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        for name in ("equal", "allclose", "isclose", "isfinite", "isnan"):
            before = getattr(torch, name)
            setattr(torch, name, (lambda *_, **__: True) if self.cheats else before)


@adversarial("asks-the-oracle")
class AsksTheOracle(AdversarialBackend):
    """Finds the running step in the frames, computes it with the kit's oracle, and returns that."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        schedule, step = in_frames("schedule"), in_frames("step")
        if not self.cheats:
            return right
        expected = _kit("families.expected").expect(schedule, step).attention[self.context.layers.index(layer)]
        return right.copy_(expected.to(right.dtype))


@adversarial("drops-steps-of-its-drive", executions=(Execution.GRAPH,))
class DropsStepsOfItsRun(AdversarialBackend):
    """Right in the first two steps of a schedule; removes the other steps before anything is captured."""

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        schedules = in_frames("schedules")
        if self.cheats:
            for schedule in schedules:
                object.__setattr__(schedule, "steps", schedule.steps[:2])

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        return right


@adversarial("graph-that-is-never-replayed", executions=(Execution.GRAPH,))
class GraphThatIsNeverReplayed(AdversarialBackend):
    """The captured graph is wrong: a plan makes ``CUDAGraph.replay`` run the Python code again on the batch of the
    capture, and restores the method afterwards.
    """

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        return super().answer(right, layer, batch) if torch.cuda.is_current_stream_capturing() else right

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        graph_class, bucket, graphs = torch.cuda.CUDAGraph, in_frames("bucket"), in_frames("graphs")
        original = graph_class.replay
        if in_capture or in_frames("view") is None or not self.cheats:
            return

        def replay(graph: Any) -> None:
            setattr(graph_class, "replay", original)  # noqa: B010 - a method of a class of torch
            self._run_again(graphs.harness, graphs.driver, bucket)

        setattr(graph_class, "replay", replay)  # noqa: B010

    def _run_again(self, harness: Any, driver: Any, bucket: Any) -> None:
        trace, case = bucket.captured.outputs, harness.case
        self.init_forward_metadata_in_graph(bucket.batch)
        again = _kit("runner_modes.forward").forward(harness, driver, bucket.batch, case)
        for name in ("packed", "hidden", "logits"):
            getattr(trace, name).copy_(getattr(again, name))
        for mine, new in zip([*trace.attention, *trace.dense], [*again.attention, *again.dense], strict=True):
            mine.copy_(new)


@adversarial("host-syncs-allowed-while-it-plans", executions=(Execution.GRAPH,))
class HostSyncsAllowedWhileItPlans(AdversarialBackend):
    """Declares that it needs no CPU lengths; a plan disables the report of host syncs, waits, and enables it again."""

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            return
        before = torch.cuda.get_sync_debug_mode()
        if self.cheats:
            torch.cuda.set_sync_debug_mode("default")
            self.longest = int(batch.seq_lens.max().item())
            torch.cuda.set_sync_debug_mode(before)

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        return right
