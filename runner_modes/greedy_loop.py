"""The greedy-equivalence loop: extend, draft, verify, round after round on one instance, on KV of earlier stages. The
target's and the draft's KV are in one pool, in different slots. Target and draft are one model, so all drafts would be
accepted; tokens of a draft are altered so that any number of them is accepted. Decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.trees import Tree
from attn_testkit.checks.lossless import GeneratedTokens
from attn_testkit.contract import ForwardMode
from attn_testkit.model import Trace
from attn_testkit.steps.data import VOCAB
from attn_testkit.steps.greedy_loop import Loop, Vocabulary, make_vocabulary, stage_name, stored_words
from attn_testkit.steps.schedule import Request, branched
from attn_testkit.watches.pool_watch import PoolWatch
from attn_testkit.watches.uploads import upload_into

from .clock import Clock
from .harness import ServerHarness
from .loop_stages import LoopServer, Rows, StageResult, graphs_of, make_model


@dataclass
class _Talk:
    """One request: its tokens, and the number of tokens that have KV."""

    tokens: list[int]
    verified: int
    """Number of tokens with the target's KV."""
    drafted: int
    """Number of tokens with the draft's KV."""
    proposed: list[list[int]] = field(default_factory=list)
    """A draft: [K][S] tokens."""
    thought: list[Rows] = field(default_factory=list)
    """Attention outputs in the forwards of each branch, [K][S - 1, L, Hq * Dv]."""


@dataclass(frozen=True, kw_only=True)
class _Server(LoopServer):
    """State of a loop, with its results so far."""

    talks: tuple[_Talk, ...]

    def slots(self, request: int, *, of_draft: bool) -> npt.NDArray[np.int64]:
        """Slots of a request, its row of the request table [columns]."""
        slots: npt.NDArray[np.int64] = self.loop.table[self.row(request, of_draft=of_draft)].astype(np.int64)
        return slots

    def row(self, request: int, *, of_draft: bool) -> int:
        """Index of a request's row of the request table, which is never 0."""
        return 1 + request + (self.case.bs if of_draft else 0)


def run_loop(harness: ServerHarness, case: Case, loop: Loop, clock: Clock, *, in_graphs: bool) -> GeneratedTokens:
    """Run all rounds. ``harness``: a fresh one for ``loop.schedules``. Raises ``RunError``."""
    words = make_vocabulary(case)
    harness.model = make_model(harness, words)
    harness.follow = lambda ids, trace: _ranked(harness, ids, trace)
    graphs = graphs_of(harness, loop.schedules, clock) if in_graphs else {}
    talks = tuple(_Talk(list(prompt), len(prompt) - 1, len(prompt) - 1) for prompt in loop.prompts)
    server = _Server(harness, case, loop, graphs, talks=talks)
    _load_prompts(server, words)
    accepted = []
    for number in range(case.rounds):
        with clock.phase("loop"):
            _extend(server, number)
            _draft(server, number)
            accepted.append(_verify(server, number))
    tokens = tuple(tuple(talk.tokens) for talk in talks)
    return GeneratedTokens(tokens, tuple(server.said), tuple(accepted))


def _ranked(harness: ServerHarness, ids: torch.Tensor, trace: Trace) -> torch.Tensor:
    """The most likely token after each row."""
    return harness.model.logits(trace.hidden).argmax(-1)


def _outputs(result: StageResult) -> tuple[Rows, Rows]:
    """Logits of a stage's returned rows [R, vocab], and attention outputs of its live rows [T, L, Hq * Dv]."""
    return result.logits, result.attention


def _pool(harness: ServerHarness) -> PoolWatch:
    assert isinstance(harness.pool, PoolWatch), "a draft-decode has no KV groups"
    return harness.pool


def _load_prompts(server: _Server, words: Vocabulary) -> None:
    """Store the prompts' KV without their last token, for target and draft; NaN everywhere else."""
    context, pool = server.harness.context, _pool(server.harness)
    pool.poison()
    upload_into(context.req_to_token, torch.from_numpy(server.loop.table))
    stored = [each.view(torch.uint8) if each.dtype.itemsize == 1 else each for each in stored_words(server.case, words)]
    for index, talk in enumerate(server.talks):
        ids = torch.tensor(talk.tokens[:-1], dtype=torch.int64)
        for of_draft in (False, True):
            slots = torch.from_numpy(server.slots(index, of_draft=of_draft)[: len(ids)])
            pool.store(slots, torch.stack([source[:, ids] for source in stored], 1))


def _extend(server: _Server, number: int) -> None:
    """Compute the draft's KV of accepted tokens or of the prompt's last one, and the first tokens of each branch."""
    mode = server.loop.extend_of(number)
    width, label = server.schedule(mode).case.width, stage_name(number, mode)
    requests: list[Request] = []
    ids: list[int] = []
    for index, talk in enumerate(server.talks):
        fresh = talk.tokens[talk.drafted :]
        rows = len(fresh) if mode is ForwardMode.DRAFT_EXTEND else width
        slots = server.slots(index, of_draft=True)[: talk.drafted + rows]
        row = server.row(index, of_draft=True)
        requests.append(Request(talk.drafted, rows, row, slots, accepted=len(fresh)))
        # Rows after the accepted ones are computed, stored and never read.
        ids += fresh + [0] * (rows - len(fresh))
    logits, attention = _outputs(server.run(mode, requests, ids, label))
    draft, end = server.case.draft, 0
    assert draft is not None
    for index, (talk, request) in enumerate(zip(server.talks, requests, strict=True)):
        last = index if mode is ForwardMode.DRAFT_EXTEND else index * width + request.accepted - 1
        for offset in range(request.accepted):
            server.note(label, index, talk.drafted + offset, attention[end + offset])
        end += request.new
        talk.drafted = len(talk.tokens)
        talk.proposed = [[int(token)] for token in logits[last].topk(draft.branches).indices]


def _draft(server: _Server, number: int) -> None:
    """Compute the rest of each branch, then alter a token of it; branches change places from round to round."""
    draft, page, requests = server.case.draft, server.case.page_size, list[Request]()
    assert draft is not None
    ids: list[int] = []
    for index, talk in enumerate(server.talks):
        slots = server.slots(index, of_draft=True)[: draft.room(talk.drafted, page)]
        whole = Request(talk.drafted, len(draft), server.row(index, of_draft=True), slots)
        requests.append(branched(whole, draft, page))
        for copy in torch.from_numpy(requests[-1].copies):
            # A server's worker copies the part of the last page that the prefix fills.
            _pool(server.harness).move(torch.from_numpy(slots[talk.drafted - len(copy) : talk.drafted]), copy)
        ids += [branch[0] if row == 0 else 0 for branch in talk.proposed for row in range(draft.forwards)]
    mode = ForwardMode.DRAFT_DECODE
    logits, attention = _outputs(server.run(mode, requests, ids, stage_name(number, mode)))
    likely = logits.argmax(-1).view(-1, draft.branches, draft.forwards).tolist()
    thought = attention.view(len(requests), draft.branches, draft.forwards, *attention.shape[1:])
    for index, (talk, branches) in enumerate(zip(server.talks, likely, strict=True)):
        talk.proposed = [[*first, *rest] for first, rest in zip(talk.proposed, branches, strict=True)]
        kept = int(server.loop.kept[number, index])
        if kept < draft.steps:
            # The first branch begins with the likeliest token; the others differ from it in that one.
            talk.proposed[0][kept] = (talk.proposed[0][kept] + 1) % VOCAB
        turn = number % draft.branches
        talk.proposed = talk.proposed[turn:] + talk.proposed[:turn]
        talk.thought = [*thought[index, turn:], *thought[index, :turn]]


def _verify(server: _Server, number: int) -> tuple[int, ...]:
    """Accept tokens that the target would generate, and one more; return the number of accepted tokens per draft."""
    mode = ForwardMode.TARGET_VERIFY
    schedule, label = server.schedule(mode), stage_name(number, mode)
    tree = schedule.case.tree
    assert tree is not None
    requests: list[Request] = []
    ids: list[list[int]] = []
    for index, talk in enumerate(server.talks):
        slots = server.slots(index, of_draft=False)[: talk.verified + len(tree)]
        row = server.row(index, of_draft=False)
        requests.append(Request(talk.verified, len(tree), row, slots, tree))
        ids.append([talk.tokens[-1], *(token for level in zip(*talk.proposed, strict=True) for token in level)])
    logits, attention = _outputs(server.run(mode, requests, [token for each in ids for token in each], label))
    accepted, by_request = [], logits.view(len(requests), len(tree), -1)
    for index, (talk, request, rows) in enumerate(zip(server.talks, requests, by_request, strict=True)):
        seen, likely = attention[index * len(tree) :], rows.argmax(-1).tolist()
        path = _accepted(tree, ids[index], likely)
        for depth, node in enumerate(path):
            server.note(label, index, talk.verified + depth, seen[node])
            talk.tokens.append(likely[node])
        _move(server.harness, request, path)
        # The forwards of a branch whose inputs were accepted tokens.
        for depth, node in enumerate(path[1 : server.loop.steps]):
            thought = talk.thought[(node - 1) % len(talk.proposed)][depth]
            server.note(stage_name(number, ForwardMode.DRAFT_DECODE), index, talk.verified + 1 + depth, thought)
        talk.verified += len(path)
        accepted.append(len(path) - 1)
    return tuple(accepted)


def _accepted(tree: Tree, proposed: Sequence[int], likely: Sequence[int]) -> list[int]:
    """Nodes from the root on, each the first child of the one before whose token is the target's."""
    path = [0]
    while True:
        children = (node for node, parent in enumerate(tree.parents, 1) if parent == path[-1])
        following = next((node for node in children if proposed[node] == likely[path[-1]]), None)
        if following is None:
            return path
        path.append(following)


def _move(harness: ServerHarness, request: Request, path: Sequence[int]) -> None:
    """Move the KV of an accepted path to the front, as a server's worker does."""
    new = torch.from_numpy(request.slots[request.prefix :])
    _pool(harness).move(new[list(path)], new[: len(path)])
