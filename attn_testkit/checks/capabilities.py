"""Checks of capabilities: the backend refuses what it does not declare, and what it declares works."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.dimensions.table import DIMENSIONS
from ..contract import AttentionBackend, BackendContext, Capabilities, Unsupported
from ..results.finding import Finding
from ..steps.schedule import Schedule
from .check import Check, Stage, in_eager, in_graphs
from .failures import is_ctrl_c, reason_of, site_of


def undeclared_contexts(declared: Capabilities, context: BackendContext) -> Iterator[tuple[str, BackendContext]]:
    """Contexts that differ from ``context`` in one undeclared value, with the name of that value."""
    found = (outside(declared, context) for dimension in DIMENSIONS for outside in dimension.undeclared)
    yield from (each for each in found if each is not None)


def refuses_undeclared(
    backend_class: type[AttentionBackend],
    schedule: Schedule,
    context: BackendContext,
    declared: Capabilities | None = None,
) -> list[Finding]:
    """Construct the backend for one undeclared context, another one in each case: it must raise ``Unsupported``.

    ``context`` is that of the case's own instance, which was accepted. ``declared``: the capabilities that the judge
    knows; None: those of the class.
    """
    contexts = list(undeclared_contexts(backend_class.capabilities if declared is None else declared, context))
    if not contexts:
        return []
    name, outside = contexts[schedule.case.derived("undeclared", len(contexts))]
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
            hint="call super().__init__(context) first: it compares the context with the capabilities",
        )
    ]


CHECKS = (
    Check(
        "no-host-lengths",
        "With needs_cpu_seq_lens=False, host copies of lengths are None, and neither a plan nor an eager forward "
        "waits for the device.",
        "seq_lens.max().item() or .cpu() in a plan, a host list that becomes a device tensor at each step.",
        "sglang #27689, #28765, #26824",
        "`where` is the line that waits for the device, or that reads a host length which is None.",
        evaluated_from=Stage.REPLAYED,
        applies=lambda declared, execution: not declared.needs_cpu_seq_lens,
    ),
    Check(
        "compiles-once",
        "Kernels are compiled and tuned once for a model and its batches, and not again for every length of a request.",
        "torch.compile(dynamic=False) on a tensor as long as the longest request, a length among a tuner's keys.",
        "vLLM #27178; pytorch #141486; torchtitan #3898",
        "`where` is what was compiled again in several steps, and the hint is torch's reason.",
        evaluated_from=Stage.COMPLETED,
        applies=in_eager,
    ),
    Check(
        "capabilities-honest",
        "Declared graph support captures and replays. Graph support that works and is not declared is reported as a "
        "hint.",
        "A capability copied from another class.",
        "sglang #29858",
        "A declared capability that does not hold, or that no case can satisfy together with the others.",
        evaluated_from=Stage.COMPLETED,
        applies=in_graphs,
    ),
    Check(
        "refuses-undeclared",
        "The constructor raises Unsupported for everything that the backend does not declare.",
        "A constructor that does not call super().__init__, or capabilities wider than its own check.",
        "vllm-ascend #15503",
        "The constructor accepted an undeclared context. Call `super().__init__`, or declare the capability to have "
        "it tested.",
        evaluated_from=Stage.COMPLETED,
        applies=lambda declared, execution: in_eager(declared, execution) or not declared.eager,
    ),
)
"""Checks in the order in which they are worth reading. Their failures are found while planning and running."""
