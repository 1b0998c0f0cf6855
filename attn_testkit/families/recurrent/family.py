"""Layers with a recurrent state as a family: the record in which its parts come together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from ...cases.trees import Tree
from ...steps.data import StepData
from ...steps.schedule import Schedule
from ..family import Answer, Family, Question, Supposition, Texts
from .data import StateStepData, layers, make_state_data
from .level_mistakes import mistaken_levels
from .memory import STATE_POOL
from .recurrence import recur
from .rwkv_mistakes import mistaken_removals
from .texts import data_of_state_tokens, make_state_vocabulary


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """Outputs of a step, and their limits."""
    found = recur(cast(StateStepData, data))
    return Answer(out=found.out, limit=found.out_limit)


def _mistaken(data: StateStepData) -> Iterator[tuple[str, StateStepData]]:
    """Usual mistakes, and the data that such a backend reads."""
    zeros = torch.zeros_like
    if data.trees:
        yield "a node continues the node before it, not its parent: the tree is used as a chain", replace(
            data, trees=()
        )  # fmt: skip
        yield (
            "a node continues its sibling, not its parent",
            replace(data, trees=tuple(map(_of_siblings, data.trees))),
        )
    if data.shape.recurs:
        yield (
            "each request begins from zeros: the state and the window before the step are ignored",
            replace(data, states=zeros(data.states), windows=zeros(data.windows)),
        )
        yield (
            "the recurrence begins from zeros: the state before the step is ignored",
            replace(data, states=zeros(data.states)),
        )
    yield (
        "the convolution begins from zeros: the window before the step is ignored",
        replace(data, windows=zeros(data.windows)),
    )
    if len(data.news) > 1 and data.shape.conv_width > 1 and not data.trees:
        yield "the taps of its first rows read the last rows of the request before it", _across_requests(data)
    if len(data.news) > 1:
        for text, order in (("the request before it", 1), ("the request after it", -1)):
            yield f"a request reads the state of {text}", replace(data, states=data.states.roll(order, 1))
            yield f"a request reads the window of {text}", replace(data, windows=data.windows.roll(order, 1))
        yield from _of_other_slots(data)
    own = torch.tensor([slot == source for slot, source in zip(data.slots.tolist(), data.sources, strict=True)])
    if not own.all():
        yield (
            "a request reads the slot that it writes, and not the one that it continues",
            replace(data, states=data.states.masked_fill(~own[:, None, None, None], torch.nan)),
        )
    yield from mistaken_removals(data)
    yield from mistaken_levels(data)
    yield "a layer reads the states of the layer before it", replace(data, states=data.states.roll(1, 0))
    older, taps = data.windows[..., : data.history], data.windows[..., data.history :]
    yield "the window is read newest first", replace(data, windows=torch.cat([older, taps.flip(-1)], -1))
    if data.states.shape[-1] == data.states.shape[-2]:
        yield (
            "rows and columns of the state before the step are exchanged",
            replace(data, states=data.states.mT.contiguous()),
        )
    if data.states.shape[2] > 1:
        yield "a head reads the state of the head before it", replace(data, states=data.states.roll(1, 2))


def _across_requests(data: StateStepData) -> StateStepData:
    """Data of a convolution that does not stop at the first row of a request: it reads the packed rows before it."""
    columns = torch.arange(1 - data.shape.conv_width, 0)
    at = torch.tensor([0, *data.news]).cumsum(0)[:-1, None] + columns
    packed = data.q[:, at.clamp(min=0)].transpose(-1, -2)
    own = data.windows[..., data.history :]
    read = torch.where((at >= 0)[:, None], packed.to(own.dtype), own)
    return replace(data, windows=torch.cat([data.windows[..., : data.history], read], -1))


def _of_other_slots(data: StateStepData) -> Iterator[tuple[str, StateStepData]]:
    """Requests that use the slots of others, with the states and windows of others."""
    count = len(data.news)
    places = torch.arange(count)
    for text, of in (
        ("the request before it", (places - 1) % count),
        ("the request before it, and the first one its own", (places - 1).clamp(min=0)),
        ("the request after it", (places + 1) % count),
        ("the request after it, and the last one its own", (places + 1).clamp(max=count - 1)),
        ("the first request", places * 0),
    ):
        if data.before is not None:
            taken = of.tolist()
            yield f"a request uses the slots of {text}: its state and window are those of that request", replace(
                data,
                before_places=tuple(data.before_places[other] for other in taken),
                before_rows=tuple(data.before_rows[other] for other in taken),
            )  # fmt: skip
            continue
        # The slot of a fresh request holds poison, and a fresh request reads none.
        unread, poison = data.fresh, data.fresh[of] & ~data.fresh
        yield f"a request uses the slots of {text}: its state and window are those of that request", replace(
            data,
            states=_at(data.states, of, unread, poison), windows=_at(data.windows, of, unread, poison),
        )  # fmt: skip


def _at(held: torch.Tensor, of: torch.Tensor, unread: torch.Tensor, poison: torch.Tensor) -> torch.Tensor:
    """``held`` [L, B, ...] of the requests ``of``; zeros if it is not read, NaN if the slot holds none."""
    shape = (-1, *[1] * (held.dim() - 2))
    return held[:, of].masked_fill(poison.view(shape), torch.nan).masked_fill(unread.view(shape), 0.0)


def _of_siblings(tree: Tree) -> Tree:
    """The tree in which the parent of a node is the sibling before it."""
    before = {int(sibling): node for node, sibling in enumerate(tree.links[1]) if sibling > 0}
    return Tree(tuple(before.get(node, parent) for node, parent in enumerate(tree.parents, 1)))


def _supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    for text, wrong in _mistaken(cast(StateStepData, data)):
        found = recur(wrong)
        yield Supposition(text, Answer(out=found.out, limit=found.out_limit))


RECURRENT = Family(
    name="recurrent",
    features=frozenset(
        {"mode", "requests", "heads", "head dim", "dtype", "page size", "keys", "rows", "chunks", "data", "state",
         "layers", "row ranks", "handed memory", "offloading", "padded requests", "padding", "multi_mode", "variants",
         "seed", "loop"}
    ),
    layers=layers,
    data=make_state_data,
    memory=STATE_POOL,
    texts=Texts(vocabulary=make_state_vocabulary, data=data_of_state_tokens),
    answer=answer,
    supposed=_supposed,
    questions=frozenset({Question.NAMED_PATTERNS}),
    poisoned="slots of other owners and of fresh requests",
    reads="reads-own-state",
)  # fmt: skip
