"""Mistakes that explain a wrong row of a greedy-equivalence loop: the row is right for a backend that makes one.

A layer of keys may ignore an option or a scale of its pool. A layer with a state may continue after the wrong node of
the last draft, with its state, its convolution's window or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..contract import AttentionLayer
from ..families.by_layer import schedule_of
from ..families.recurrent.data import End
from ..families.recurrent.recurrence import recur
from ..families.recurrent.texts import data_of_state_tokens
from ..families.softmax.answer import attend_with_limit
from ..steps.data import StepData, make_layers
from ..steps.greedy_loop import Loop
from ..steps.schedule import Schedule
from ..steps.verify_loop import VerifyLoop
from .lossless import GeneratedTokens, TokenAttention

_Row = tuple[str, torch.Tensor, torch.Tensor]
"""A mistake in words, the row's outputs with that mistake, and their limit, [Hq * Dv] float64 each."""
_OPTIONS: tuple[tuple[str, str, Callable[[AttentionLayer], bool], object], ...] = (
    ("the sliding window is ignored: keys before it are attended to", "sliding_window_size",
     lambda layer: layer.sliding_window_size >= 0, -1),
    ("the attention sinks are ignored", "sinks", lambda layer: layer.sinks is not None, None),
    ("the soft cap is ignored", "logit_cap", lambda layer: layer.logit_cap > 0, 0.0),
)  # fmt: skip


def mistake_in(
    schedule: Schedule, loop: Loop, generated: GeneratedTokens, data: StepData, said: TokenAttention, layer: int
) -> str:
    """The mistake with which layer number ``layer`` gives the row ``said``; empty if no usual one does.

    ``data``: input of the oracle for ``generated``.
    """
    given = torch.tensor(said.attention[layer], dtype=torch.float64)
    family = schedule.case.families[layer]
    alone, layer = schedule_of(schedule, family), schedule.case.places(family).index(layer)
    if alone.case.state is not None:
        rows = _of_states(alone, loop, generated, said, layer)
    else:
        rows = _of_keys(alone, generated, data.parts.get(family, data), said, layer)
    return next((text for text, out, limit in rows if bool(((given - out).abs() <= limit).all())), "")


def _of_keys(
    schedule: Schedule, generated: GeneratedTokens, data: StepData, said: TokenAttention, layer: int
) -> Iterator[_Row]:
    row = sum(len(tokens) for tokens in generated.tokens[: said.request]) + said.position
    layers = make_layers(schedule.case)

    def answer(text: str, data: StepData, layers: tuple[AttentionLayer, ...]) -> _Row:
        attention, limit = attend_with_limit(schedule, data, layers=layers)
        return text, attention.out[layer, row].flatten(), limit[layer, row].flatten()

    for text, name, has, without in _OPTIONS:
        if has(layers[layer]):
            yield answer(text, data, tuple(replace(each, **{name: without}) for each in layers))  # type: ignore[arg-type]
    for text, place in (("k_scale", 0), ("v_scale", 1)):
        scales = data.kv_scales.clone()
        scales[place] = 1.0
        if not torch.equal(scales, data.kv_scales):
            yield answer(f"{text} of the FP8 pool is not applied", replace(data, kv_scales=scales), layers)


def _of_states(
    schedule: Schedule, loop: Loop, generated: GeneratedTokens, said: TokenAttention, layer: int
) -> Iterator[_Row]:
    """Rows of a verify that continues after the wrong node of the draft before it, or from another request."""
    bs, number = len(loop.prompts), _round_of(said)
    if said.request >= bs or number < 1 or not isinstance(loop, VerifyLoop):
        return
    own = _Draft.of(loop, generated, said.request, number - 1)
    nodes, last = own.behind_nodes(schedule), own.accepted
    rows = data_of_state_tokens(schedule, [generated.tokens[said.request][own.end : said.position + 1]])

    def row(text: str, state: _Behind, window: _Behind) -> _Row:
        found = recur(replace(rows, fresh=~rows.fresh, states=state[0], windows=window[1]))
        return text, found.out[layer, -1].flatten(), found.out_limit[layer, -1].flatten()

    right = nodes[last + 1]
    for node in sorted(set(range(-1, len(nodes) - 1)) - {last}, key=lambda node: abs(node - last)):
        where = f"after node {node}" if node >= 0 else "before the root"
        text = (
            f"from {where} of the draft of round {number}, and node {last} was the last accepted one: "
            + ("a rejected token was applied" if node > last else "accepted tokens were not applied")
        )  # fmt: skip
        wrong = nodes[node + 1]
        yield row(f"state and window continue {text}", wrong, wrong)
        yield row(f"the state continues {text}", wrong, right)
        yield row(f"the convolution's window continues {text}", right, wrong)
    for other in set(range(bs)) - {said.request}:
        its = _Draft.of(loop, generated, other, number - 1)
        behind = its.behind_nodes(schedule)
        # With a slot for each node, the count of one request and the slots of the other.
        for node in sorted({its.accepted, last}):
            where = f"of request {other}, after node {node} of its draft of round {number}"
            yield row(f"state and window are those {where}", behind[node + 1], behind[node + 1])
            yield row(f"the state is that {where}", behind[node + 1], right)


_Behind = tuple[torch.Tensor, torch.Tensor]
"""States [L, 1, Hv, V, K] float64 and windows [L, 1, C, W - 1] of a request."""


@dataclass(frozen=True)
class _Draft:
    """A draft of a round."""

    before: tuple[int, ...]
    """Tokens before its root."""
    nodes: tuple[int, ...]
    """The root and the proposed tokens."""
    accepted: int

    @property
    def end(self) -> int:
        """Number of tokens that are committed after the round."""
        return len(self.before) + 1 + self.accepted

    @classmethod
    def of(cls, loop: VerifyLoop, generated: GeneratedTokens, request: int, number: int) -> _Draft:
        """The draft of a request in round ``number``, from 0 on."""
        counts = [accepted[request] for accepted in generated.accepted]
        alone = sum(map(loop.decodes_verified, range(number + 1)))
        begin = len(loop.prompts[request]) - 1 + sum(counts[:number]) + number + alone
        tokens = generated.tokens[request]
        return cls(tokens[:begin], (tokens[begin], *generated.drafts[number][request]), counts[number])

    def behind_nodes(self, schedule: Schedule) -> list[_Behind]:
        """States and windows before the draft, then after each of its nodes."""
        text = data_of_state_tokens(schedule, [(*self.before, *self.nodes)])
        ends = tuple(End(0, 0, len(self.before) + node) for node in range(len(self.nodes) + 1))
        found = recur(replace(text, ends=ends))
        return [(found.states[:, at : at + 1], found.windows[:, at : at + 1]) for at in range(len(ends))]


def _round_of(said: TokenAttention) -> int:
    """Number of a row's round, from 0 on; -1 for a prompt."""
    name, number, *_ = said.stage.replace(",", "").split()
    return int(number) - 1 if name == "round" else -1
