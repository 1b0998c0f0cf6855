"""Checks of claims: what is not declared is refused, what is declared works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import Any

import torch

from ..cases.schedule import Schedule
from ..contract import (
    KV_LAYOUTS,
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardMode,
    KVGroup,
    KVPool,
    Unsupported,
)
from ..contract.kv_layouts import OWN
from ..results import Finding
from .check import Check, Stage, in_eager, in_graphs
from .failures import is_ctrl_c, reason_of, site_of

__all__ = ["CHECKS", "outside_claims", "refuses_undeclared"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _first_unclaimed(candidates: tuple[int, ...], claimed: Set[int]) -> int | None:
    return next((value for value in candidates if value not in claimed), None)


def _pool(
    context: BackendContext,
    size: int | None = None,
    page_size: int | None = None,
    layers: tuple[AttentionLayer, ...] | None = None,
    dtype: torch.dtype | None = None,
    layout: str | None = None,
) -> KVPool | None:
    """A pool like that of ``context``, or one that differs in what is given; None where the backend makes no such."""
    pool, page_size = context.kv_pool, page_size or context.page_size
    layout, layers, dtype = layout or pool.layout, layers or context.layers, dtype or pool.dtype
    try:
        return KVPool(size or page_size, page_size, layers, dtype, context.device, layout, pool.own)
    except Exception:
        return None


def _page(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    page = _first_unclaimed((48, 3, 5, 256), claims.page_sizes)
    if page is None:
        return None
    pool = _pool(context, page * 2, page)
    return (f"page size {page}", replace(context, page_size=page, kv_pool=pool)) if pool else None


def _dtype(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    name = next((n for n in ("fp32", "bf16", "fp16") if n not in claims.dtypes), None)
    if name is None or context.kv_pool.dtype != context.dtype:
        return None
    pool = _pool(context, dtype=_DTYPES[name])
    return (f"dtype {name}", replace(context, dtype=_DTYPES[name], kv_pool=pool)) if pool else None


def _head_dim(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    dim = _first_unclaimed((48, 80, 24), claims.head_dims)
    if dim is None or context.layers[0].is_mla:
        return None
    layers = tuple(replace(layer, head_dim=dim, v_head_dim=dim) for layer in context.layers)
    pool = _pool(context, layers=layers)
    return (f"head dim {dim}", replace(context, layers=layers, kv_pool=pool)) if pool else None


def _window(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if context.modes <= claims.sliding_window:
        return None
    layers = tuple(replace(layer, sliding_window_size=4) for layer in context.layers)
    return "a sliding window", replace(context, layers=layers)


def _takes_windows(claims: Capabilities, context: BackendContext) -> bool:
    return context.modes <= claims.sliding_window and (context.topk <= 1 or claims.window_in_trees)


def _narrow_window(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if not claims.min_window or not _takes_windows(claims, context):
        return None
    window = claims.min_window - 1
    layers = tuple(replace(layer, sliding_window_size=window) for layer in context.layers)
    return f"a sliding window of size {window}", replace(context, layers=layers)


def _two_windows(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if claims.layer_windows == "any" or len(context.layers) < 2 or not _takes_windows(claims, context):
        return None
    first = max(claims.min_window, 4)
    other = first + 1 if claims.layer_windows == "one" else -1
    layers = tuple(
        replace(layer, sliding_window_size=other if place % 2 else first) for place, layer in enumerate(context.layers)
    )
    return f"layers with sliding windows {first} and {other}", replace(context, layers=layers)


def _scaling(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if claims.any_scaling or context.layers[0].is_mla:
        return None
    layers = tuple(replace(layer, scaling=layer.scaling / 2) for layer in context.layers)
    return "a scaling other than 1/sqrt(head_dim)", replace(context, layers=layers)


def _cap(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if claims.logit_cap:
        return None
    return "a soft cap", replace(context, layers=tuple(replace(layer, logit_cap=2.0) for layer in context.layers))


def _sinks(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if claims.sinks:
        return None
    layers = tuple(
        replace(layer, sinks=torch.zeros(layer.tp_q_head_num, device=context.device)) for layer in context.layers
    )
    return "attention sinks", replace(context, layers=layers)


def _rows(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    rows = claims.max_q_rows + 1
    if not context.modes & {ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2} or rows > 1024:
        return None
    return f"{rows} query rows per request", replace(
        context, num_draft_tokens=rows, max_num_tokens=context.max_bs * rows
    )


def _new_tokens(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    tokens = claims.max_extend_tokens + 1
    if ForwardMode.EXTEND not in context.modes or tokens > 1024:
        return None
    return f"{tokens} new tokens per request", replace(
        context, max_extend_tokens=tokens, max_num_tokens=max(context.max_num_tokens, tokens)
    )


def _topk(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if ForwardMode.TARGET_VERIFY not in context.modes or claims.max_topk >= 1024:
        return None
    return f"topk {claims.max_topk + 1}", replace(context, topk=claims.max_topk + 1)


def _branches(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    branches = claims.max_draft_branches + 1
    if ForwardMode.DRAFT_DECODE not in context.modes or branches > 1024:
        return None
    return f"draft branches {branches}", replace(
        context, draft_branches=branches, max_num_tokens=context.max_bs * branches
    )


def _mode(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    missing = frozenset(ForwardMode) - claims.eager - claims.graph
    if not missing:
        return None
    mode = min(missing)
    return f"mode {mode}", replace(context, modes=frozenset({mode}))


def _layout(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    name = next((name for name in KV_LAYOUTS if name not in claims.kv_layouts and name != OWN), None)
    pool = name and _pool(context, layout=name)
    return (f"KV layout {name}", replace(context, kv_pool=pool)) if pool else None


def _kv_groups(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    # Of three layers and more: what a case of two has to choose from stays what it was.
    if claims.kv_groups or len(context.layers) < 3:
        return None
    first, *rest = context.layers
    groups = tuple(
        KVGroup(index, tuple(layer.layer_id for layer in layers), context.kv_pool, context.req_to_token)
        for index, layers in enumerate(((first,), rest))
    )
    return "a second KV group", replace(context, kv_groups=groups)


def _non_causal(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    asked = context.modes & {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}
    # As with KV groups, where nothing is claimed.
    if asked <= claims.non_causal or (not claims.non_causal and len(context.layers) < 3):
        return None
    layers = tuple(replace(layer, causal=False, sliding_window_size=-1) for layer in context.layers)
    return "a layer that is not causal", replace(context, layers=layers)


def _heads_by_layer(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    # Of three layers and more, as above. Another layer has heads that are claimed by themselves.
    first = context.layers[0]
    if claims.heads_by_layer or len(context.layers) < 3 or first.is_mla or len(context.head_shapes) > 1:
        return None
    other = next((dim for dim in sorted(claims.head_dims) if dim != first.head_dim), None)
    changed: dict[str, Any] = {"head_dim": other, "v_head_dim": other} if other else {
        "tp_q_head_num": 2 * first.tp_q_head_num, "tp_k_head_num": 2 * first.tp_k_head_num,
    }  # fmt: skip
    if not other and first.q_per_kv > 1 and first.tp_k_head_num == 1:
        return None
    layers = (*context.layers[:-1], replace(context.layers[-1], sinks=None, **changed))
    pool = _pool(context, layers=layers)
    if pool is None:
        return None
    return "a layer of other heads than the first", replace(context, layers=layers, kv_pool=pool)


_Outside = Callable[[Capabilities, BackendContext], "tuple[str, BackendContext] | None"]
_WAYS: tuple[_Outside, ...] = (
    _page, _dtype, _head_dim, _window, _cap, _sinks, _rows, _topk, _mode, _new_tokens, _branches, _layout, _kv_groups,
    _narrow_window, _two_windows, _non_causal, _scaling, _heads_by_layer,
)  # fmt: skip


def outside_claims(claims: Capabilities, context: BackendContext) -> Iterator[tuple[str, BackendContext]]:
    """Contexts that differ from ``context`` in one thing that is not claimed, with its name."""
    for way in _WAYS:
        found = way(claims, context)
        if found is not None:
            yield found


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
    ways = list(outside_claims(backend_class.capabilities if claims is None else claims, context))
    if not ways:
        return []
    name, outside = ways[schedule.case.pick("unclaimed", len(ways))]
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
            f"{name} is not claimed, {what}",
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
        "Graph support that is claimed captures and replays; what works and is not claimed is reported as a hint.",
        "A claim copied from another class.",
        "sglang #29858",
        "A claim that no case can satisfy together with the others, or that does not hold.",
        judged_from=Stage.COMPLETED,
        applies=in_graphs,
    ),
    Check(
        "refuses-undeclared",
        "What is not claimed raises Unsupported in the constructor.",
        "A constructor that does not call super().__init__, or claims that are wider than the check.",
        "vllm-ascend #15503",
        "The constructor took what the claims exclude. Call `super().__init__`, or widen the claim and have it tested.",
        judged_from=Stage.COMPLETED,
        applies=lambda claims, execution: in_eager(claims, execution) or not claims.eager,
    ),
)
"""In the order in which they are worth reading. Found while planning and driving."""
