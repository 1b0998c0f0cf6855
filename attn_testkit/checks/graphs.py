"""Checks of CUDA graphs: clean captures, and replays that follow the batch and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cases.case import Case
from ..contract import Execution
from ..results.finding import Finding
from .comparison import BITS, Comparison, place_of_max
from .describe import number, row_name, spread_text
from .evaluation import Evaluation, in_graphs
from .observation import Observation


def graph_matches_eager(comparison: Comparison, *, same_bits: bool = False) -> list[Finding]:
    """Check that a replay is within two limits of the eager run of the same step: each may be off by one.

    ``same_bits``: batch invariance is declared, so the bits must be equal. Only that shows a split count that a graph
    keeps from its capture (sglang #26019): every split count gives a result within the limit.
    """
    observed, expected = comparison.observed, comparison.expected
    if comparison.right and comparison.as_in_eager:
        return []
    out, eager, ratio = comparison.out, comparison.eager, comparison.ratio_to_eager
    if eager is None or ratio is None:
        return []
    wrong = ratio > 1
    if not wrong.any():
        bits = BITS[out.itemsize]
        return _other_bits(comparison, out.view(bits) != eager.view(bits)) if same_bits else []
    at = layer, row, head, dim = place_of_max(ratio)
    return [
        Finding(
            "graph-matches-eager",
            f"request {int(expected.data.row_request[row])} gives a different result under the graph than in eager "
            "mode",
            where=f"out[{comparison.name(layer)}, {row_name(expected.data, row)}, head {head}, dim {dim}]: replay "
            f"{number(float(out[at]))}, eager {number(float(eager[at]))}, want {number(float(expected.attention[at]))}",
            spread=spread_text(wrong.any(0), expected.data.row_request, observed.step),
            step=observed.label,
        )
    ]


def _other_bits(comparison: Comparison, differs: torch.Tensor) -> list[Finding]:
    """Report bits that differ, ``differs`` [L, T, Hq, Dv] bool."""
    if not differs.any():
        return []
    observed, row_request = comparison.observed, comparison.expected.data.row_request
    request = int(row_request[int(differs.any(0).flatten(1).any(-1).nonzero()[0])])
    return [
        Finding(
            "graph-matches-eager",
            f"request {request} gives different bits under the graph than in eager mode, although batch invariance is "
            "declared",
            where=f"{int(differs.sum())} of {differs.numel()} values differ, all within the limit",
            spread=spread_text(differs.any(0), row_request, observed.step),
            hint="probably a split count, tile size or kernel choice that depends on the capture or on padded rows",
            step=observed.label,
        )
    ]


def addresses_stable(observed: Observation) -> list[Finding]:
    """Check that a replay wrote nothing into memory that was freed after capture."""
    if not observed.damaged:
        return []
    return [
        Finding(
            "addresses-stable",
            "the graph writes into memory that was freed after capture",
            where="; ".join(observed.damaged),
            hint="a workspace or a metadata tensor of the capture was freed or re-allocated; on a server the block "
            "may have another owner by now. Allocate it once, in the constructor or in init_cuda_graph_state",
            step=observed.label,
        )
    ]


def at_capture(uneven: Sequence[str], written: Sequence[int], case: Case) -> list[Finding]:
    """Check that warm-ups of one plan agree, and that a dummy batch writes only page 0, or state slot 0.

    ``uneven``: places where they do not agree. ``written``: other slots, ascending. A server captures while requests
    are live (after a wake-up, or for a bucket that comes late), and any slot may belong to them.
    """
    what, due = {
        frozenset({"recurrent"}): ("state slots other than slot 0", "the batch's slots, which are 0"),
        frozenset({"recurrent", "softmax"}): (
            "slots outside page 0 and state slot 0",
            "the batch's slots, which are 0",
        ),
    }.get(frozenset(case.families), ("KV slots outside page 0", "out_cache_loc, which is 0"))
    found = [
        Finding(
            "captures-cleanly",
            "the warm-ups before a capture do not agree, although determinism is declared",
            where=where,
            hint="probably a counter, semaphore or workspace that a run leaves dirty and only a plan resets",
        )
        for where in uneven[:1]
    ]
    if written:
        slots = ", ".join(map(str, written[:8])) + (", ..." if len(written) > 8 else "")
        found.append(
            Finding(
                "captures-cleanly",
                f"warm-ups or captures of a dummy batch write {len(written)} {what}",
                where=f"slots {slots}",
                hint=f"a server captures while live requests may own these slots: store only at {due}",
            )
        )
    return found


def padding_finite(observed: Observation) -> list[Finding]:
    """Check that output rows of no request are finite, where their inputs are. At most one finding."""
    for layer, finite in observed.copies.group("padding").items():
        bad = (~finite).nonzero().flatten().tolist()
        if bad:
            rows = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            return [
                Finding(
                    "padding-finite",
                    f"{len(bad)} of {len(finite)} output rows that belong to no request hold NaN or Inf, although "
                    "finite_padding "
                    "is declared",
                    where=f"{observed.schedule.case.layers.name(int(layer))}, rows {rows} of them",
                    hint="probably a row without keys (0 / 0 is NaN), or rows after the last request that no program "
                    "writes; return zeros for both",
                    step=observed.label,
                )
            ]
    return []


def _has_rows_of_no_request(case: Case) -> bool:
    """True if replays have rows that belong to no request, whose inputs are finite and whose output the kit does not
    merge itself."""
    return (_has_padded_replays(case) or "padded_tokens" in case.variants) and not case.kv_splits


def _has_padded_replays(case: Case) -> bool:
    """True if replays have padded requests: with small padding every bucket is filled with live requests."""
    return case.padding != "small"


EVALUATIONS = (
    Evaluation(
        "graph-matches-eager",
        applies=in_graphs,
        run=lambda comparison, schedule, declared: graph_matches_eager(
            comparison, same_bits=declared.promises.deterministic and declared.promises.batch_invariant
        ),
    ),
    Evaluation(
        "captures-cleanly",
        applies=in_graphs,
    ),
    Evaluation(
        "replay-follows-batch",
        applies=in_graphs,
    ),
    Evaluation(
        "addresses-stable",
        applies=in_graphs,
        run=lambda comparison, *_: addresses_stable(comparison.observed),
    ),
    Evaluation(
        "padding-inert",
        applies=in_graphs,
        shown_by=_has_padded_replays,
    ),
    Evaluation(
        "padding-finite",
        applies=lambda declared, execution: declared.server.finite_padding and execution is Execution.GRAPH,
        shown_by=_has_rows_of_no_request,
        run=lambda comparison, *_: padding_finite(comparison.observed),
    ),
    Evaluation(
        "buckets-independent",
        applies=in_graphs,
    ),
)
