"""The check of memory for layers that compress keys: states of tokens, and rows of groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from ..cases.case import Case
from ..families.compressor.compress import compress
from ..families.compressor.data import CompressorData
from ..families.compressor.family import SLIPS
from ..results.finding import Finding
from .comparison import BITS, beyond
from .describe import index_ranges
from .misplaced import NEW, PADDING_GOES, owner_text, owners
from .observation import Observation


@dataclass(frozen=True)
class _Memory:
    """Rows of all slots of a pool after a step, [L, slots, numbers], and what differs from the right contents."""

    data: CompressorData
    got: torch.Tensor
    wrong: torch.Tensor
    """[L, slots, numbers] bool."""
    new: torch.Tensor
    """[slots] bool: slots of the step's tokens."""

    def of(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """``kv``, ``score`` and ``row`` of rows."""
        wide = self.data.q.shape[-1]
        return {"kv": rows[..., :wide], "score": rows[..., wide : 2 * wide], "row": rows[..., 2 * wide :]}

    def first(self, part: str, of_new: bool) -> tuple[int, int] | None:
        """Layer and slot of the first wrong ``part``, of the step's tokens or of other slots; None if all are right."""
        found = self.of(self.wrong)[part].any(-1) & (self.new if of_new else ~self.new)
        return (int(found.nonzero()[0, 0]), int(found.nonzero()[0, 1])) if found.any() else None


def writes_compressed(observed: Observation, case: Case) -> list[Finding]:
    """Name what is wrong in memory that is not right."""
    assert observed.inputs is not None
    assert observed.inputs.new_limit is not None
    got, want = (pool[:, 0, :, 0].view(torch.float32) for pool in (observed.pool, observed.pool_after))
    wrong = got.view(BITS[got.dtype.itemsize]) != want.view(BITS[want.dtype.itemsize])
    slots = observed.inputs.new_slots
    wrong[:, slots] = beyond(got[:, slots], want[:, slots], observed.inputs.new_limit[:, 0, :, 0])
    wrong[:, : case.page_size] = False
    memory = _Memory(cast(CompressorData, observed.inputs.data), got, wrong, owners(observed, got.shape[1]) == NEW)
    what, (layer, slot), place, hint = _what(observed, memory)
    every = wrong.any(-1).any(0).nonzero().flatten()
    return [
        Finding(
            "writes-own-kv",
            f"memory of a compressor is wrong after the step: {what}",
            where=f"{case.layers.name(layer)}, slot {slot} (page {slot // case.page_size}, offset "
            f"{slot % case.page_size}): {place}",
            spread=f"slots that are wrong: {index_ranges(every.tolist())}",
            hint=hint,
            step=observed.label,
        )
    ]


def _what(observed: Observation, memory: _Memory) -> tuple[str, tuple[int, int], str, str]:
    """Find what is wrong: in words, layer and slot, the owner, and a hint. Memory of others comes first."""
    for part in ("kv", "score"):
        if at := memory.first(part, of_new=False):
            return (
                "a state was written that is not of this step's tokens",
                at,
                owner_text(observed, at[1]),
                _padding(observed),
            )
    if at := memory.first("row", of_new=False):
        return (
            "a row was written whose group no token of this step completes", at, _group_text(observed, memory, at[1]),
            _padding(observed),
        )  # fmt: skip
    if at := memory.first("kv", of_new=True):
        return "the state of a new token does not hold its `kv`", at, owner_text(observed, at[1]), ""
    if at := memory.first("score", of_new=True):
        text = "the state of a new token does not hold its `score` with the bias"
        return text, at, owner_text(observed, at[1]), _of_bias(memory, at)
    at = memory.first("row", of_new=True)
    assert at is not None
    group = _group_text(observed, memory, at[1])
    if memory.of(memory.got)["row"][at].isnan().all():
        return "the row of a group that is complete was not written, or holds only NaN", at, group, ""
    return "the row of a group is not within its limit", at, group, _of_slips(memory)


def _padding(observed: Observation) -> str:
    padded = observed.step.bucket - observed.step.bs if observed.replay else 0
    return f"the batch has {padded} padded requests. {PADDING_GOES}" if padded else ""


def _group_text(observed: Observation, memory: _Memory, slot: int) -> str:
    """Name the tokens of the group whose row belongs to a slot."""
    ratio = memory.data.compression.ratio
    for number, request in enumerate(observed.step.requests):
        inside = (request.slots // ratio == slot // ratio).nonzero()[0]
        if len(inside):
            first = int(inside[0]) // ratio * ratio
            last = first + ratio - 1
            return f"row of tokens {first} to {last} of request {number}, which has {len(request.slots)} tokens"
    return "row of a group of no live request"


def _of_bias(memory: _Memory, at: tuple[int, int]) -> str:
    """Name the bias that was added instead."""
    data = memory.data
    token = int((data.out_cache_loc == at[1]).nonzero()[0])
    score, place = data.k[at[0], token].flatten().float(), int(data.positions[token]) % data.compression.ratio
    held = memory.of(memory.got)["score"][at]
    own = data.layers[at[0]].ape
    assert own is not None
    if torch.equal(held, score):
        return "it is the score without a bias"
    if torch.equal(held, (score + own[place]).to(data.q.dtype).float()):
        return f"it is rounded to {data.dtype}: states are float32"
    for number, layer in enumerate(data.layers):
        assert layer.ape is not None
        same = [other for other, bias in enumerate(layer.ape) if torch.equal(held, score + bias)]
        if same:
            whose = "" if number == at[0] else f" of layer {layer.layer_id}"
            return f"its bias is that of place {same[0]}{whose}, and the token is at place {place} of its group"
    return ""


def _of_slips(memory: _Memory) -> str:
    """Name the mistake that gives all rows."""
    data = memory.data
    rows = memory.of(memory.got)["row"][:, data.out_cache_loc].double()
    for slip, text in SLIPS.items():
        made = compress(data, slip)
        if bool(((rows - made.rows).abs() <= made.limit)[:, made.ends].all()):
            return text
    return ""
