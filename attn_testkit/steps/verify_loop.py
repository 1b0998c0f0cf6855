"""The greedy-equivalence loop of target-verify: prompts, then rounds of plain decode and of drafts that are verified.

Each request is served twice, with separate KV and states: as text ``b`` its drafts are verified, and as text ``bs + b``
it is decoded token by token. In every second round text ``b`` is decoded once without a draft, too, before its draft is
verified: servers do that if a request has no draft, or if a batch is too large for drafts.

Its drafts propose the decoded tokens, except for one that is altered. So no draft model is needed, not even for layers
that keep a state, for which servers draft with a softmax layer or from earlier text; only the target has states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ..cases.case import Case
from ..cases.rows import Decode, Extend, room_for
from ..cases.state import StateShape
from ..contract import ForwardMode
from .data import VOCAB
from .greedy_loop import Loop, kept_of, pages_of, stage_name
from .schedule import Schedule, make_schedule

PROMPTS = f"prompts, {ForwardMode.EXTEND}"
"""Stage in which the prompts are computed, without their last token."""


@dataclass(frozen=True, eq=False)
class VerifyLoop(Loop):
    """A loop whose schedules are those of target-verify, decode and extend. Each text has a row of the request
    table."""

    @property
    @override
    def texts(self) -> tuple[tuple[int, ...], ...]:
        return self.prompts * 2

    @override
    def lens(self, accepted: Sequence[Sequence[int]]) -> list[int]:
        decoded = [len(prompt) + sum(self.decodes(accepted)) for prompt in self.prompts]
        alone = sum(map(self.decodes_verified, range(len(accepted))))
        return [length + alone for length in super().lens(accepted)] + decoded

    @override
    def name(self, text: int) -> str:
        bs = len(self.prompts)
        return f"request {text}" if text < bs else f"request {text - bs}, decoded without drafts,"

    @property
    def in_graphs(self) -> tuple[Schedule, ...]:
        """Schedules that have graphs. A server computes prompts without one, and with a slot for each node (vLLM)
        graphs have exactly the rows of a draft.
        """
        return self.schedules[:1] if self.schedules[0].case.by_slots else self.schedules[:2]

    def decodes_verified(self, number: int) -> bool:
        """True for a round, from 0 on, in which the texts whose drafts are verified are decoded once before. With
        rollback ``slots`` a decode reads the first slot, which is not where a verify left the state.
        """
        verify, decode = (schedule.case for schedule in self.schedules[:2])
        moved = verify.state is not None and verify.state.commits
        return number % 2 == 1 and (moved or verify.by_slots == decode.by_slots)

    def decodes(self, accepted: Sequence[Sequence[int]]) -> list[int]:
        """Decode steps of each round: as many as are needed until each request has S decoded tokens that are not
        verified.
        """
        ahead, found = np.zeros(len(self.prompts), np.int64), []
        for number, counts in enumerate(accepted):
            ahead -= self.decodes_verified(number)
            found.append(max(0, self.steps - int(ahead.min())))
            ahead += found[-1] - (np.asarray(counts, np.int64) + 1)
        return found

    @override
    def due(self, accepted: Sequence[Sequence[int]]) -> Iterator[tuple[str, int, int]]:
        bs, ends = len(self.prompts), [len(prompt) - 1 for prompt in self.texts]
        for text, end in enumerate(ends):
            yield from ((PROMPTS, text, position) for position in range(end))
        for number, (counts, decodes) in enumerate(zip(accepted, self.decodes(accepted), strict=True)):
            alone = int(self.decodes_verified(number))
            news = [(text, ForwardMode.DECODE, alone) for text in range(bs)]
            news += [(text, ForwardMode.TARGET_VERIFY, count + 1) for text, count in enumerate(counts)]
            news += [(text, ForwardMode.DECODE, decodes) for text in range(bs, 2 * bs)]
            for text, mode, rows in news:
                yield from ((stage_name(number, mode), text, ends[text] + row) for row in range(rows))
                ends[text] += rows

    def states(self) -> npt.NDArray[np.int64]:
        """[texts, n] int64: slots of the states of each text, where the first slot differs from the text's row of the
        request table. There is one slot, or with rollback ``slots`` one for each node of a draft. Slot 0 belongs to no
        text.
        """
        case = self.schedules[0].case
        count, nodes = len(self.texts), case.width if case.by_slots else 1
        rng = np.random.default_rng(case.digest ^ 0x57A7)
        found = rng.permutation(count * nodes).reshape(count, nodes) + 1
        while any(found[text, 0] in (text, text + 1) for text in range(count)):
            found = rng.permutation(count * nodes).reshape(count, nodes) + 1
        return found


def verify_loop_runs(case: Case, modes: Set[ForwardMode], eager: Set[ForwardMode]) -> bool:
    """True if the case has a loop of target-verify that can run: ``modes`` are those of the execution, and ``eager``
    those of eager steps (``VerifyLoop.in_graphs``).
    """
    decodes = eager if case.by_slots else modes
    there = ForwardMode.TARGET_VERIFY in modes and ForwardMode.DECODE in decodes and ForwardMode.EXTEND in eager
    return bool(case.rounds and case.tree) and there


def make_verify_loop(case: Case) -> VerifyLoop:
    """Lay out the loop of a target-verify. The same case gives the same loop."""
    assert case.tree is not None
    rng = np.random.default_rng(case.digest ^ 0x100F)
    steps, page, bs = case.tree.depth, case.page_size, case.bs
    # A text that is decoded is ahead by S tokens of the other, which has room for a draft after it.
    longest = max(case.prefixes) + 1 + (case.rounds + 1) * (steps + 1) + case.rounds // 2
    columns = -(-longest // page) * page
    pages, table = pages_of(2 * bs, columns, page, rng)
    kept = kept_of(case, steps, rng)
    prompts = tuple(tuple(map(int, rng.integers(0, VOCAB, prefix + 1))) for prefix in case.prefixes)
    schedules = (
        replace(make_schedule(each), num_pages=pages, max_context_len=columns, pool_rows=2 * bs, spec_steps=steps)
        for each in _stages(case)
    )
    return VerifyLoop(tuple(schedules), prompts, kept, table)


def _stages(case: Case) -> tuple[Case, Case, Case]:
    """The cases of target-verify, decode and extend, on one instance."""

    def with_state(mode: ForwardMode) -> StateShape | None:
        return None if case.state is None else case.state.in_mode(mode)

    decode = case.with_changes(rows=Decode(), state=with_state(ForwardMode.DECODE), instance_of=case)
    rows, fresh = Extend(case.prefixes, room_for(case.prefixes)), (0,) * case.bs
    extend = case.with_changes(rows=rows, prefixes=fresh, state=with_state(ForwardMode.EXTEND), instance_of=case)
    return case, decode, extend
