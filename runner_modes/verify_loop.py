"""The greedy-equivalence loop of target-verify: prompts, plain decode ahead of drafts, verify, commit, many rounds.

A request's drafts are the tokens that the same instance decoded one by one, with separate KV and states, except for one
token that is altered. So any number of tokens may be accepted. Decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attn_testkit.cases.case import Case
from attn_testkit.checks.lossless import GeneratedTokens
from attn_testkit.contract import ForwardMode
from attn_testkit.families.by_layer import make_vocabulary
from attn_testkit.families.recurrent.data import states_in
from attn_testkit.steps.data import VOCAB
from attn_testkit.steps.greedy_loop import stage_name
from attn_testkit.steps.schedule import Request
from attn_testkit.steps.verify_loop import PROMPTS, VerifyLoop
from attn_testkit.watches.uploads import upload, upload_into

from .clock import Clock
from .harness import ServerHarness
from .loop_stages import LoopServer, StageResult, StatesOfStage, graphs_of, make_model
from .tensors.states import commit_states


@dataclass
class _Text:
    """Tokens of a text; all but the last have KV and are in the state."""

    row: int
    """Index of its row of the request table."""
    tokens: list[int]
    taken: int = 1
    """Number of accepted nodes of its last draft, for rollback ``slots``."""


@dataclass(frozen=True, kw_only=True)
class _Server(LoopServer):
    """State of a loop, with its results so far."""

    texts: tuple[_Text, ...]
    """Texts whose drafts are verified, then the same number of texts that are decoded."""
    state_slots: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """[texts, n]; empty without layers that keep a state."""

    def request(self, text: int, new: int, *, whole: bool = False) -> Request:
        """A text's request, with ``new`` rows after its last token but one; ``whole``: with all but the last."""
        each, tree = self.texts[text], self.case.tree
        prefix = 0 if whole else len(each.tokens) - 1
        slots = self.loop.table[each.row, : prefix + new].astype(np.int64)
        return Request(prefix, new, each.row, slots, tree if tree is not None and new == len(tree) else None)

    def states(self, texts: Sequence[int]) -> StatesOfStage | None:
        """Slots of the states of some texts."""
        if not self.state_slots.size:
            return None
        return StatesOfStage(self.state_slots[list(texts)], tuple(self.texts[text].taken for text in texts))


def run_verify_loop(
    harness: ServerHarness, case: Case, loop: VerifyLoop, clock: Clock, *, in_graphs: bool
) -> GeneratedTokens:
    """Run all rounds. ``harness``: a fresh one for ``loop.schedules``. Raises ``RunError``."""
    harness.model = make_model(harness, make_vocabulary(case))
    graphs = graphs_of(harness, loop.in_graphs, clock) if in_graphs else {}
    every = tuple(_Text(1 + index, list(prompt)) for index, prompt in enumerate(loop.texts))
    slots = loop.states() if harness.context.state else np.zeros((0, 0), np.int64)
    server = _Server(harness, case, loop, graphs, texts=every, state_slots=slots)
    _clear(server)
    accepted, drafts = list[tuple[int, ...]](), list[tuple[tuple[int, ...], ...]]()
    with clock.phase("loop"):
        bs = case.bs
        for first in (0, bs):
            _prompts(server, range(first, first + bs))
        for number in range(case.rounds):
            if loop.decodes_verified(number):
                _decode(server, number, range(bs))
            while min(len(server.texts[bs + b].tokens) - len(server.texts[b].tokens) for b in range(bs)) < loop.steps:
                _decode(server, number, range(bs, 2 * bs))
            drafts.append(_drafts(server, number))
            accepted.append(_verify(server, number, drafts[-1]))
    return GeneratedTokens(
        tuple(tuple(text.tokens) for text in server.texts), tuple(server.said), tuple(accepted), tuple(drafts)
    )


def _clear(server: _Server) -> None:
    """Fill all memory with NaN, page 0 and slot 0 with zeros, and the tables with the texts' slots."""
    harness, loop = server.harness, server.loop
    for each in harness.memories:
        each.watch.clear()
    by_group = harness.in_groups(loop.schedules[0], loop.table)
    for group, table in zip(harness.context.groups, by_group, strict=True):
        upload_into(group.req_to_token, torch.from_numpy(np.ascontiguousarray(table)))
    state = harness.context.state
    if state is None:
        return
    rows = np.pad(server.state_slots, ((1, 0), (0, 0))).astype(np.int32)
    upload_into(state.req_to_state, torch.from_numpy(rows).view(state.req_to_state.shape))
    if state.fresh == "zeroed":
        slots = upload(torch.from_numpy(server.state_slots.reshape(-1)), harness.device)
        for part in state.pool.parts:
            part[slots] = 0


def _prompts(server: _Server, texts: Sequence[int]) -> None:
    """Compute the prompts of some texts, without their last tokens."""
    news = [len(server.texts[text].tokens) - 1 for text in texts]
    requests = [server.request(text, new, whole=True) for text, new in zip(texts, news, strict=True)]
    ids = [token for text in texts for token in server.texts[text].tokens[:-1]]
    found, row = server.run(ForwardMode.EXTEND, requests, ids, PROMPTS, server.states(texts)).attention, 0
    for text, new in zip(texts, news, strict=True):
        for position in range(new):
            server.note(PROMPTS, text, position, found[row])
            row += 1


def _decode(server: _Server, number: int, texts: Sequence[int]) -> None:
    """Decode a token of some texts."""
    label = stage_name(number, ForwardMode.DECODE)
    ids = [server.texts[text].tokens[-1] for text in texts]
    requests = [server.request(text, 1) for text in texts]
    found = server.run(ForwardMode.DECODE, requests, ids, label, server.states(texts))
    for place, text in enumerate(texts):
        tokens = server.texts[text].tokens
        server.note(label, text, len(tokens) - 1, found.attention[place])
        tokens.append(int(found.logits[place].argmax()))
        server.texts[text].taken = 1


def _drafts(server: _Server, number: int) -> tuple[tuple[int, ...], ...]:
    """Drafts of a round [bs][S]: the decoded tokens, with one token altered if fewer are to be accepted."""
    bs, steps, found = server.case.bs, server.loop.steps, list[tuple[int, ...]]()
    for b in range(bs):
        end, kept = len(server.texts[b].tokens), int(server.loop.kept[number, b])
        draft = server.texts[bs + b].tokens[end : end + steps]
        if kept < steps:
            draft[kept] = (draft[kept] + 1) % VOCAB
        found.append(tuple(draft))
    return tuple(found)


def _verify(server: _Server, number: int, drafts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Accept tokens that the model would generate, and one more, and commit; return the accepted ones per draft."""
    label, width, texts = stage_name(number, ForwardMode.TARGET_VERIFY), server.case.width, range(server.case.bs)
    # Requests change places from round to round.
    texts = texts[::-1] if number % 2 else texts
    requests = [server.request(text, width) for text in texts]
    ids = [[server.texts[text].tokens[-1], *drafts[text]] for text in texts]
    found = server.run(
        ForwardMode.TARGET_VERIFY, requests, [token for each in ids for token in each], label, server.states(texts)
    )
    likely = found.logits.argmax(-1).view(len(texts), width).tolist()
    accepted = dict.fromkeys(texts, 0)
    for place, text in enumerate(texts):
        tokens = server.texts[text].tokens
        while accepted[text] < width - 1 and ids[place][accepted[text] + 1] == likely[place][accepted[text]]:
            accepted[text] += 1
        for node in range(accepted[text] + 1):
            server.note(label, text, len(tokens) - 1, found.attention[place * width + node])
            tokens.append(likely[place][node])
        server.texts[text].taken = 1 if server.case.state and server.case.state.commits else accepted[text] + 1
    _commit(server, found, [accepted[text] + 1 for text in texts])
    return tuple(accepted[text] for text in sorted(accepted))


def _commit(server: _Server, found: StageResult, kept: Sequence[int]) -> None:
    """Commit the states after this number of nodes of each draft, if layers keep states."""
    data, states = found.staged.data, states_in(found.staged.data)
    if states is None:
        return
    data = replace(data, parts={**data.parts, "recurrent": replace(states, kept=tuple(kept))})
    commit_states(server.harness, replace(found.staged, data=data), found.state, found.bs)
