"""Checks of claims: what is not declared is refused, what is declared works."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.dimensions.table import DIMENSIONS
from ..cases.schedule import Schedule
from ..contract import AttentionBackend, BackendContext, Capabilities, Unsupported
from ..results import Finding
from .check import Check, Stage, in_eager, in_graphs
from .failures import is_ctrl_c, reason_of, site_of

__all__ = ["CHECKS", "outside_claims", "refuses_undeclared"]


def outside_claims(claims: Capabilities, context: BackendContext) -> Iterator[tuple[str, BackendContext]]:
    """Contexts that differ from ``context`` in one thing that is not declared, with its name."""
    found = (outside(claims, context) for dimension in DIMENSIONS for outside in dimension.undeclared)
    yield from (each for each in found if each is not None)


def refuses_undeclared(
    backend_class: type[AttentionBackend],
    schedule: Schedule,
    context: BackendContext,
    claims: Capabilities | None = None,
) -> list[Finding]:
    """One such context a case, another in each case: the constructor must raise ``Unsupported``.

    ``context`` is that of the case's own instance, which was accepted. ``claims``: as the judge knows them; None: as
    the class says.
    """
    contexts = list(outside_claims(backend_class.capabilities if claims is None else claims, context))
    if not contexts:
        return []
    name, outside = contexts[schedule.case.pick("unclaimed", len(contexts))]
    try:
        backend_class(outside)
    except Unsupported:
        return []
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        what = f"and the constructor raised {type(error).__name__} instead of Unsupported: {reason_of(error)}"
        where = site_of(error, "constructor")
    else:
        what, where = "yet the constructor accepted it", ""
    return [
        Finding(
            "refuses-undeclared",
            f"{name} is not declared, {what}",
            where=where,
            hint="call super().__init__(context) first: it compares the context with the claims",
        )
    ]


CHECKS = (
    Check(
        "no-host-lengths",
        "With needs_cpu_seq_lens false: CPU mirrors are None, and no plan waits for the device, nor an eager forward.",
        "seq_lens.max().item(), .cpu() in a plan, a host list turned into a device tensor at each step.",
        "sglang #27689, #28765, #26824",
        "`where` is the line that waits for the device, or reads a host length that is not given.",
        judged_from=Stage.REPLAYED,
        applies=lambda claims, execution: not claims.needs_cpu_seq_lens,
    ),
    Check(
        "compiles-once",
        "Kernels are compiled and tuned for a model and its batches, and not anew for every length of a request.",
        "torch.compile(dynamic=False) over a tensor as long as the longest request, a length among a tuner's keys.",
        "vLLM #27178; pytorch #141486; torchtitan #3898",
        "`where` is what was compiled in every one of several steps, and the hint why, as torch says it.",
        judged_from=Stage.COMPLETED,
        applies=in_eager,
    ),
    Check(
        "claims-honest",
        "Graph support that is claimed captures and replays; what works and is not declared is reported as a hint.",
        "A claim copied from another class.",
        "sglang #29858",
        "A claim that no case can satisfy together with the others, or that does not hold.",
        judged_from=Stage.COMPLETED,
        applies=in_graphs,
    ),
    Check(
        "refuses-undeclared",
        "What is not declared raises Unsupported in the constructor.",
        "A constructor that does not call super().__init__, or claims that are wider than the check.",
        "vllm-ascend #15503",
        "The constructor took what the claims exclude. Call `super().__init__`, or widen the claim and have it tested.",
        judged_from=Stage.COMPLETED,
        applies=lambda claims, execution: in_eager(claims, execution) or not claims.eager,
    ),
)
"""In the order in which they are worth reading. Found while planning and driving."""
