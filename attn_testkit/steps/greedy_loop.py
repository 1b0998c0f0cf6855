"""The greedy-equivalence loop of a case: its tokens, their slots, and the unchanged part of each draft. Requests
continue from a prompt, round after round, over a vocabulary with known values: a token's q, k and v follow from its id.
A request has two rows of the request table, one for the target's KV and one for the draft's, as a draft model has its
own KV. Each round reads the KV of the round before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ..cases.case import Case
from ..cases.normals import normals
from ..cases.rows import Accepted, Verify
from ..cases.trees import Tree
from ..contract import ForwardMode
from .data import DTYPES, HIDDEN, VOCAB, StepData, as_stored, make_layers, of_fp8_range
from .schedule import Schedule, make_schedule

_EXTENDS = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Host tensors in the model's dtype, except ``hidden``, which is float32. One entry per token id."""

    q: torch.Tensor
    """[L, VOCAB, Hq, Dqk]."""
    k: torch.Tensor
    """[L, VOCAB, Hk, Dqk]."""
    v: torch.Tensor
    """[L, VOCAB, Hk, Dv]. MLA: the first columns of ``k``."""
    hidden: torch.Tensor
    """[VOCAB, hidden]."""


@dataclass(frozen=True, eq=False)
class Loop:
    """Everything that is known of a loop before it runs."""

    schedules: tuple[Schedule, ...]
    """Schedules of draft-decode, target-verify, and each draft-extend that is declared, with the loop's sizes."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each request; the last of them has no KV yet."""
    kept: npt.NDArray[np.int64]
    """[rounds, bs]: number of tokens of each draft that are left as proposed; the next token is altered."""
    table: npt.NDArray[np.int32]
    """[1 + 2 * bs, columns]: request b has row ``1 + b`` for the target's KV and ``1 + bs + b`` for the draft's."""

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """Prompts of all texts that the loop generates."""
        return self.prompts

    def lens(self, accepted: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each text after all rounds, the prompt included. ``accepted`` [rounds][bs]."""
        return [
            len(p) + sum(each) + len(each) for p, each in zip(self.prompts, zip(*accepted, strict=True), strict=True)
        ]

    def name(self, text: int) -> str:
        """Name of a text in messages."""
        return f"request {text}"

    @property
    def steps(self) -> int:
        """S: tokens of a draft."""
        return self.schedules[0].spec_steps

    def extend_of(self, number: int) -> ForwardMode:
        """The draft-extend of a round, from 0 on: the declared ones alternate."""
        extends = [schedule.case.mode for schedule in self.schedules[2:]]
        return extends[number % len(extends)]

    def due(self, accepted: Sequence[Sequence[int]]) -> Iterator[tuple[str, int, int]]:
        """(stage, request, position) of every row of an accepted token, for the given numbers of accepted tokens.

        ``accepted`` [rounds][bs].
        """
        ends = [len(prompt) - 1 for prompt in self.prompts]
        fresh = [1] * len(ends)
        for number, counts in enumerate(accepted):
            for request, count in enumerate(counts):
                end = ends[request]
                for mode, first, rows in (
                    (self.extend_of(number), end - fresh[request] + 1, fresh[request]),
                    (ForwardMode.DRAFT_DECODE, end + 1, min(count, self.steps - 1)),
                    (ForwardMode.TARGET_VERIFY, end, count + 1),
                ):
                    yield from ((stage_name(number, mode), request, first + row) for row in range(rows))
                ends[request], fresh[request] = end + count + 1, count + 1


def stage_name(number: int, mode: ForwardMode) -> str:
    """Name of a round, from 0 on: ``round 2, target-verify``."""
    return f"round {number + 1}, {mode}"


def loop_modes(case: Case, modes: Set[ForwardMode]) -> tuple[ForwardMode, ...]:
    """The modes of a draft-decode's loop, of those that are declared. Empty if the case has no loop, or if a mode is
    missing."""
    extends = [mode for mode in _EXTENDS if mode in modes]
    if (
        not case.rounds
        or not case.draft
        or not extends
        or not {ForwardMode.DRAFT_DECODE, ForwardMode.TARGET_VERIFY} <= modes
    ):
        return ()
    return (ForwardMode.DRAFT_DECODE, ForwardMode.TARGET_VERIFY, *extends)


def make_loop(case: Case, modes: Sequence[ForwardMode]) -> Loop:
    """Lay out a case's loop in ``modes``, as ``loop_modes`` gives them. The same case gives the same loop."""
    assert case.draft is not None
    rng = np.random.default_rng(case.digest ^ 0x100F)
    draft, page, bs = case.draft, case.page_size, case.bs
    tree = _tree(case)
    most = max(case.prefixes) + 1 + case.rounds * (draft.steps + 1)
    columns = -(-(max(draft.room(n, page) for n in range(most - page, most + 1) if n >= 0) + len(tree)) // page) * page
    pages, table = pages_of(2 * bs, columns, page, rng)
    kept = kept_of(case, draft.steps, rng)
    cases = [_stage(case, tree, mode) for mode in modes]
    schedules = (
        replace(
            make_schedule(each),
            num_pages=pages,
            max_context_len=columns,
            pool_rows=2 * bs,
            spec_steps=draft.steps,
        )
        for each in cases
    )
    prompts = tuple(tuple(map(int, rng.integers(0, VOCAB, prefix + 1))) for prefix in case.prefixes)
    return Loop(tuple(schedules), prompts, kept, table)


def pages_of(rows: int, columns: int, page: int, rng: np.random.Generator) -> tuple[int, npt.NDArray[np.int32]]:
    """Number of pages after page 0, and the request table [1 + rows, columns]: each row has its own pages."""
    pages = rng.permutation(rows * columns // page).reshape(rows, -1) + 1
    table = np.zeros((1 + rows, columns), np.int32)
    table[1:] = (pages[..., None] * page + np.arange(page)).reshape(rows, columns)
    return int(pages.size), table


def kept_of(case: Case, steps: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """[rounds, bs]: tokens of each draft that stay as proposed. First the whole draft of every request, then nothing of
    any draft."""
    kept = rng.integers(0, steps + 1, (case.rounds, case.bs))
    kept[:2] = np.array([[steps], [0]])[: case.rounds]
    return kept


def _tree(case: Case) -> Tree:
    """K chains of S tokens from the root, level by level."""
    assert case.draft is not None
    branches, steps = case.draft.branches, case.draft.steps
    return Tree(tuple(max(0, node - branches) for node in range(1, 1 + branches * steps)))


def _stage(case: Case, tree: Tree, mode: ForwardMode) -> Case:
    assert case.draft is not None
    if mode is ForwardMode.DRAFT_DECODE:
        return case
    if mode is ForwardMode.TARGET_VERIFY:
        return case.with_changes(rows=Verify(tree), instance_of=case)
    v2 = mode is ForwardMode.DRAFT_EXTEND_V2
    width = len(tree) if v2 else case.draft.steps + 1
    return case.with_changes(rows=Accepted((1,) * case.bs, width, v2), instance_of=case)


def make_vocabulary(case: Case) -> Vocabulary:
    """The numbers of every token id."""
    rng = np.random.default_rng(case.digest ^ 0x0CAB)
    hq, hk, dqk, dv = case.heads.q_heads, case.heads.kv_heads, case.head_dim + case.rope_dim, case.head_dim
    dtype = DTYPES[case.dtype]
    layers = case.layers.count
    q, k = (normals((layers, VOCAB, heads, dqk), rng) for heads in (hq, hk))
    if case.kv_dtype != "same":
        # FP8 holds these queries, for kernels that round them.
        q, k = of_fp8_range(q, k, held=True)
    q, k = q.to(dtype), k.to(dtype)
    v = k[..., :dv] if case.heads.layout.values_in_keys else normals((layers, VOCAB, hk, dv), rng).to(dtype)
    return Vocabulary(q, k, v, normals((VOCAB, HIDDEN), rng))


def stored_words(case: Case, words: Vocabulary) -> tuple[torch.Tensor, ...]:
    """Keys and values of every token id as the KV pool holds them, [L, VOCAB, Hk, D] each. MLA: only keys."""
    if case.kv_dtype == "same":
        return (words.k,) if case.heads.layout.values_in_keys else (words.k, words.v)
    layers, dtype = make_layers(case), DTYPES[case.kv_dtype]
    of_k, of_v = (
        torch.tensor(scales).view(-1, 1, 1, 1)
        for scales in ([layer.k_scale for layer in layers], [layer.v_scale for layer in layers])
    )
    k = as_stored(words.k, of_k, dtype)
    return (k,) if case.heads.layout.values_in_keys else (k, as_stored(words.v, of_v, dtype))


def data_of_tokens(schedule: Schedule, tokens: Sequence[Sequence[int]]) -> StepData:
    """Input of the oracle for plain decode of these tokens: one row per token, which sees the tokens before it."""
    case = schedule.case
    words, lens = make_vocabulary(case), [len(each) for each in tokens]
    longest = max(lens)
    ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in tokens])
    place = torch.arange(longest)
    live = place < torch.tensor(lens)[:, None]
    request, offset = live.nonzero().unbind(1)
    flat = ids[live]
    layers, stored = make_layers(case), [_taken(each, ids) for each in stored_words(case, words)]
    scales = [[layer.k_scale for layer in layers], [layer.v_scale for layer in layers]]
    return StepData(
        q=words.q[:, flat],
        k=words.k[:, flat],
        v=words.v[:, flat],
        hidden=words.hidden[flat],
        stored_keys=stored[0],
        stored_values=stored[1] if len(stored) > 1 else None,
        kv_scales=torch.tensor(scales, dtype=torch.float64).view(2, -1, 1, 1, 1, 1),
        visible=(place <= place[:, None]) & live[:, None] & live[..., None],
        key_positions=place.expand(len(lens), -1),
        query_positions=place.expand(len(lens), -1),
        row_request=request,
        row_offset=offset,
        row_key=offset,
        positions=offset,
        out_cache_loc=torch.zeros_like(offset),
    )


def _taken(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows [L, ...] of token ids. FP8 tensors are indexed by their bytes."""
    if words.dtype.itemsize > 1:
        return words[:, ids]
    return words.view(torch.uint8)[:, ids].view(words.dtype)
