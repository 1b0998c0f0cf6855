"""Healthy controls for capabilities about graphs, and for work before them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode, KVPool

from .a_alternating_modes import SharedPlans
from .a_graphs_alone import GraphsAlone
from .a_warm_ups import EagerPlanWaits
from .b_finite_padding import FinitePaddingBackend
from .builds import CountedRunsBackend
from .catalogue import control
from .j_between_instances import WorkspaceOfEachInstance, WorkspaceOfInstancesThatRunAtOnce
from .j_branches import PlansByTwoGraphs, StoresOnASideStream, TwoGraphsOfOnePoolAtOnce
from .j_streams import PlansOnASideStream, ReadsLengthsBack, StagesLengths, TablesOfPlans
from .j_two_batches import TwoBatchBackend
from .parent import PlannedBackend

_WORKSPACES: WeakKeyDictionary[KVPool, torch.Tensor] = WeakKeyDictionary()
_FEW = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}}, precision={"dtypes": {"bf16"}}
)
"""Capabilities with few values; other values do not matter for these controls."""


@control("graphs-alone")
class NothingRunsEagerly(GraphsAlone):
    """Every step is a replay: a server that never runs attention eagerly (decode in full CUDA graphs)."""


@control()
class VerifyInGraphsAlone(GraphsAlone):
    """A single mode runs only in graphs, and the others run eagerly too."""

    capabilities = GraphsAlone.capabilities.with_changes(
        eager=GraphsAlone.capabilities.graph - {ForwardMode.TARGET_VERIFY}
    )


@control("forwards-counted-until-the-next-plan")
class ForwardsCounted(CountedRunsBackend):
    """The number of forwards is counted, and nothing depends on it."""

    capabilities = _FEW.with_changes(eager={"decode"}, graph={"decode"})


@control()
class WarmUpsUseOtherMemory(CountedRunsBackend):
    """Each forward takes the next of two sets of memory and clears it itself; warm-ups write page 0, which is
    allowed."""

    capabilities = _FEW.with_changes(eager={"decode"}, graph={"decode", "draft-extend"})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.sets = [self.workspace, self.new_workspace(self.workspace.numel())]

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        self.sets.reverse()
        self.workspace = self.sets[0].zero_()
        return super().partial_views(bs, width, layer)


@control()
class WaitsAndSaysSo(EagerPlanWaits):
    """Lengths are fetched from the device at every eager step (``eager_without_waits=False``); replays never wait."""

    capabilities = _FEW.with_changes(eager={"decode"}, graph={"decode"}, server={"eager_without_waits": False})


@control("plans-on-a-side-stream")
class PlansOnTheSide(PlansOnASideStream):
    """A plan runs on its own stream, and it and the caller's stream wait for each other (overlapped schedulers)."""

    capabilities = _FEW.with_changes(eager={"decode"}, graph={"decode", "target-verify"})


@control()
class StagesLengthsByTurns(StagesLengths):
    """Two pinned buffers alternate, with an event after the copy from each: the next step may be planned at any
    time."""

    capabilities = StagesLengths.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        eager={"decode", "extend"},
        graph={"decode", "target-verify"},
    )


@control("reads-lengths-back")
class LengthsReadBehindTheirCopy(ReadsLengthsBack):
    """Lengths come back through pinned memory: an asynchronous copy, which the host waits for."""

    capabilities = ReadsLengthsBack.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        eager={"decode", "extend"},
        graph={"decode", "target-verify"},
    )


@control()
class LengthsOfAnEarlierStep(PlannedBackend):
    """The longest request of an earlier step, as statistics: it is read once an event reports that its copy is done."""

    capabilities = _FEW.with_changes(eager={"decode", "extend"}, graph={"decode", "target-verify"})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.on_host = torch.zeros(context.max_bs, dtype=torch.int64, pin_memory=True)
        self.copied: torch.cuda.Event | None = None
        self.longest = 0

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        if self.copied is not None and self.copied.query():  # type: ignore[no-untyped-call, unused-ignore]
            self.longest = max(self.longest, *self.on_host.tolist())
            self.copied = None
        if self.copied is None and batch.batch_size:
            self.on_host[: batch.batch_size].copy_(batch.seq_lens[: batch.batch_size], non_blocking=True)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            self.copied.record()
        return super().plan_lengths(batch, counts)


@control()
class PlansSharedByModes(SharedPlans):
    """An eager plan is skipped if the shared metadata are those of the same mode and lengths already."""

    capabilities = SharedPlans.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64}}, precision={"dtypes": {"bf16"}}
    )


@control()
class FinitePadding(FinitePaddingBackend):
    """Rows of no request hold finite numbers, for servers that quantize all rows with one scale."""


@control("stores-on-a-side-stream")
class StoresOnTheSide(StoresOnASideStream):
    """New keys are stored on another stream, a branch in captures, and the forward waits for it before it gathers."""

    capabilities = StoresOnASideStream.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode", "target-verify"}
    )


@control("plans-by-two-graphs")
class PlansByTwoGraphsAtOnce(PlansByTwoGraphs):
    """A plan ends in two graphs of two memory pools, which run on two streams at once."""

    capabilities = PlansByTwoGraphs.capabilities.with_changes(eager={"decode"}, graph={"decode"})


@control()
class PlansByTwoGraphsInTurn(TwoGraphsOfOnePoolAtOnce):
    """A plan ends in two graphs of one memory pool: the second, on another stream, waits for the first."""

    capabilities = TwoGraphsOfOnePoolAtOnce.capabilities.with_changes(eager={"decode"}, graph={"decode"})

    def fork(self, side: torch.cuda.Stream) -> None:
        super().fork(side)
        if side is self.sides[1]:
            side.wait_stream(self.sides[0])


@control("tables-of-plans")
class OnlyPlansReadTheTable(TablesOfPlans):
    """Only plans read the request table, and the server rewrites it under forwards and replays."""

    capabilities = TablesOfPlans.capabilities.with_changes(eager={"decode"}, graph={"decode"})


@control()
class InstancesRunAtOnce(WorkspaceOfEachInstance):
    """Graphs of two instances, each with a workspace of its own, run at once on two streams."""


@control()
class AnInstanceForEachBatchOfAStep(TwoBatchBackend):
    """Nothing is shared by the two batches of a step: each has its plan, workspace and buffers."""


@control()
class BatchesOfAStepRunInTurn(TwoBatchBackend):
    """Both batches of a step use one workspace for partial results, as those of FlashInfer do in SGLang."""

    def new_workspace(self, numbers: int) -> torch.Tensor:
        kept = _WORKSPACES.get(self.context.kv_pool)
        if kept is None or len(kept) < numbers:
            kept = _WORKSPACES[self.context.kv_pool] = super().new_workspace(numbers)
        return kept[:numbers]


@control()
class WorkspaceOfInstancesInTurn(WorkspaceOfInstancesThatRunAtOnce):
    """All instances share a workspace for partial results, and declare that they do not run at once."""

    capabilities = WorkspaceOfInstancesThatRunAtOnce.capabilities.with_changes(server={"instances_run_at_once": False})
