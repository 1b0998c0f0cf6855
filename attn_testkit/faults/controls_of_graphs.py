"""Healthy controls of what backends say about graphs."""

from __future__ import annotations

from ..contract import ForwardMode
from .a_graphs_alone import GraphsAlone
from .catalogue import control


@control("graphs-alone")
class NothingRunsEagerly(GraphsAlone):
    """Every step is a replay: a server that never runs attention eagerly (decode in full CUDA graphs)."""


@control("verify-in-graphs-alone")
class VerifyInGraphsAlone(GraphsAlone):
    """One mode runs in graphs alone, beside others that run eagerly too."""

    capabilities = GraphsAlone.capabilities.with_changes(
        eager=GraphsAlone.capabilities.graph - {ForwardMode.TARGET_VERIFY}
    )
