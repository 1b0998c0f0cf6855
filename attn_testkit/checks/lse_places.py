"""A wrong log-sum-exp that is right for another head, or for fewer KV tokens of its KV split."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..cases.features.kv_splits import splits_of
from ..families.softmax.attention import seen_in
from .describe import row_name
from .lse_patterns import LseEvidence

_LONGEST = 8192
"""Largest number of KV tokens of a request for which fewer are tried: each try needs a run of the oracle."""


def of_other_heads(found: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> str:
    """Find a permutation of the wrong heads that makes all wrong rows right.

    ``found``, ``want``, ``limit`` [T, Hq] float64.
    """
    rows = (((found - want).abs() > limit) & (found != want)).any(1)
    found, want, limit = found[rows], want[rows], limit[rows]
    near = (found[:, :, None] - want[:, None]).abs() <= limit[:, None]
    like = ((found[:, :, None] == want[:, None]) | near).all(0)
    wrong = (~like.diagonal()).nonzero().flatten().tolist()
    places = {head: like[head].nonzero().flatten().tolist() for head in wrong}
    if len(wrong) < 2 or any(len(of) != 1 for of in places.values()):
        return ""
    whose = {head: of[0] for head, of in places.items()}
    if sorted(whose.values()) != wrong:
        return ""
    named = ", ".join(f"head {head} holds that of head {of}" for head, of in list(whose.items())[:2])
    more = " and so on" if len(wrong) > 2 else ""
    return f"right in another order of heads: {named}{more}; outputs and log-sum-exps must have the same order of heads"


def of_fewer_keys(e: LseEvidence, want: torch.Tensor, limit: torch.Tensor) -> str:
    """Find for every wrong row the number of first KV tokens of its KV split that makes it right, possibly none. A sum
    over the first n tokens grows with n, so n is found by bisection.
    """
    data, bs = e.data, len(e.data.visible)
    first, longest = data.row_offset == 0, data.visible.shape[-1]
    if e.merged or longest > _LONGEST or e.found.isnan().any():
        return ""
    rows = (((e.found - want).abs() > limit) & (e.found != want)).any(1).nonzero().flatten()
    prefix = torch.zeros(bs, 1, dtype=torch.int64)
    prefix[data.row_request[first], 0] = data.row_key[first]
    of_part = splits_of(e.case)[e.part].holds(torch.arange(longest)[None], prefix)[:, None]
    held = seen_in(data.visible, data, e.layers[e.layer]) & of_part
    places = held.cumsum(-1) * held
    most = places.amax(-1)

    def of_first(counts: torch.Tensor) -> torch.Tensor:
        """Values [T, Hq] if each row sees the first ``counts`` [B, Tmax] of its KV tokens."""
        return replace(e, data=replace(data, visible=held & (places <= counts[..., None]))).lse(sinks=e.has_sinks)

    low, high = torch.zeros_like(most), most.clone()
    at = (data.row_request, data.row_offset)
    while bool((low < high).any()):
        middle = (low + high) // 2
        enough = torch.zeros_like(middle, dtype=torch.bool)
        enough[at] = (of_first(middle) >= e.found - limit).all(1)
        low, high = torch.where(enough, low, middle + 1).minimum(most), torch.where(enough, middle, high)
    near = (of_first(low) - e.found).abs() <= limit.masked_fill(~limit.isfinite(), 0.0)
    right = (near | (of_first(low) == e.found))[rows].all()
    counts, due = low[at][rows].tolist(), most[at][rows].tolist()
    if not right or any(count >= whole for count, whole in zip(counts, due, strict=True)):
        return ""
    name = row_name(data, int(rows[0]))
    what = (
        f"{name} counts {f'the first {counts[0]}' if counts[0] else 'none'} of its {due[0]} KV tokens in this KV split"
    )
    if any(counts):
        return (
            f"right for fewer KV tokens: {what}. Probably a length of the split, or a causal mask by indices in the "
            "split instead of positions"
        )
    return f"right for no KV token: {what}{_behind_an_empty_one(e, want, rows)}"


def _behind_an_empty_one(e: LseEvidence, want: torch.Tensor, rows: torch.Tensor) -> str:
    """Text that depends on whether exactly those requests are wrong whose predecessor has no KV token in the split."""
    data, bs = e.data, len(e.data.visible)
    empty = [bool((want[data.row_request == request] == -torch.inf).all()) for request in range(bs)]
    wrong = sorted(set(data.row_request[rows].tolist()))
    behind = [request for request in range(1, bs) if empty[request - 1] and not empty[request]]
    if wrong != behind:
        return ". Probably a length or an offset of the split"
    return (
        f", and request {wrong[0] - 1} before it has none there: probably a list of requests or lengths that "
        "leaves it out"
    )
