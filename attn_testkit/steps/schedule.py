"""Schedule of a case: the lengths of ``plans.py`` become steps with requests, slots, pages and trees.

Eager runs the first step, the same again, and another one, on one instance. A graph run captures the buckets, largest
first, and then replays every step: larger batches, then smaller; exact and padded; the other bucket; the first batch
again with other slots, pool rows and data. A capture uses none of these lengths (servers capture with the fill value).
A plan that is reused because its cache key looks the same fails on adjacent steps that agree only in the key: a step
with the lengths of the step before but other requests, slots, trees and data, and a step with these lengths in another
order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cases.case import Case
from ..cases.derived_parameters import DERIVED_PARAMETERS, shallow_depth
from ..cases.draft import Draft
from ..cases.features.spans import spans_in
from ..cases.plan import Plan
from ..cases.plans import context_len_of, lens_of, make_plans, other_encoders
from ..cases.spans import Span
from ..cases.trees import Tree, chain, random_tree
from ..contract import Capabilities, ForwardMode
from .cached_prompts import cached_lengths, continued_length
from .numerics import MODEL, Numerics
from .rounds import accepted_before, accepted_nodes, rounds_before
from .variety import data_at, layout_at, padding_at

Ints = npt.NDArray[np.int64]
_SECOND = next(parameter for parameter in DERIVED_PARAMETERS if parameter.name == "second-step")
_SAME_LENGTHS = "same lengths, other requests"
PADDED_TOKENS = 3
"""Numbers of rows that belong to no request after those of the plan, in cases with ``padded_tokens``; in some batches
as many as requests, so that a division gives wrong rows per request."""


@dataclass(frozen=True, eq=False)
class Request:
    """One live request of a step. Counts are in tokens."""

    prefix: int
    """Keys in the pool before this step."""
    new: int
    """Rows of this step."""
    pool_row: int
    """Row of ``req_to_token``; never 0."""
    slots: Ints
    """[prefix + new] int64: KV slots, in token order; in draft-decode branch by branch."""
    tree: Tree | None = None
    """Target-verify: the draft tree of these rows."""
    accepted: int = 1
    """Draft-extend: accepted tokens; the last of them is the row from which the draft model continues. Target-verify of
    layers with states: accepted nodes, which determine the state after the step; 0: the state does not change."""
    shared: int = 0
    """Number of leading tokens of the prefix in pages that other requests share, as with a prefix cache."""
    draft: Draft | None = None
    """Draft-decode: the branches of these rows."""
    columns: Ints | None = None
    """Draft-decode: [columns] int64, KV slot of each column of the request table. None in other modes, where columns
    follow the tokens."""
    spans: tuple[Span, ...] = ()
    """Bidirectional spans: first and last position of each, both included."""
    copies: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Draft-decode: [K - 1, n] int64, slots that hold copies of the prefix's last n tokens, one row per branch."""
    encoder_len: int = 0
    """Number of leading keys of the prefix that come from an encoder, which only cross-attention layers see."""
    stores_encoder: bool = False
    """True if this step stores the encoder keys, so they are not in the pool before it."""

    @property
    def decoder_prefix(self) -> int:
        """Tokens of the decoder before this step."""
        return self.prefix - self.encoder_len

    @property
    def table_slots(self) -> Ints:
        """[columns] int64: slots in its row of the request table."""
        return self.slots if self.columns is None else self.columns


@dataclass(frozen=True, eq=False)
class Step:
    """One batch."""

    name: str
    """Unique inside a schedule; ``Schedule.step_named`` finds the step again by it, in another process too."""
    index: int
    """Index among the steps of the schedule, from 0 on; accepted counts and trees depend on it."""
    label: str
    """Purpose of the step, in words; for reports."""
    bucket: int
    """Batch size of the graph that replays it."""
    requests: tuple[Request, ...]
    req_to_token: npt.NDArray[np.int32]
    """[rows, max_context_len]: live rows, with foreign slots in every tail and every unused row; row 0 is zeros."""
    seed: int
    """Seed of its random numbers."""
    part_of: tuple[Step, tuple[int, ...]] | None = None
    """Another step, and the requests of it that this step holds, with the same numbers in the same slots."""
    chunk_of: Step | None = None
    """Extend: a step that is never run, whose requests have all their chunks at once; this step has rows of it, with
    the same numbers in the same slots."""
    follows: Step | None = None
    """The step that runs on the instance right before it, whose requests it continues: memory is not loaded before
    it. Layers with states only (``steps/rounds.py``)."""
    cached_for: Step | None = None
    """The step whose requests continue the states of this step's prompts, without its link to this step. Only for
    layers with states (``steps/cached_prompts.py``)."""
    eager_too: bool = False
    """True if an eager run of the step follows its replay; for a step without requests only if the backend supports
    that."""
    layout: str = ""
    """Order of its tokens in the KV pool: one of ``LAYOUTS``."""
    padding: str = ""
    """Contents of the rows after its live ones: one of ``PADDINGS``."""
    data: str = "gauss"
    """Data pattern of its numbers: one of ``DATA_PATTERN``'s."""
    stored: bool = False
    """True: the pool holds the new keys and values already, and ``save_kv_cache`` is False: k and v are NaN or None."""
    other_strides: bool = False
    """True: q, k and v are contiguous if the case's are views of one packed tensor, and views if they are not."""

    @property
    def own_variations(self) -> tuple[str, ...]:
        """Differences of its forward from those of other steps, in words."""
        stored = ("save_kv_cache=False",) * self.stored
        return (*stored, *("q, k and v in another memory layout",) * self.other_strides)

    @property
    def bs(self) -> int:
        """Live requests."""
        return len(self.requests)

    @property
    def lens(self) -> list[int]:
        """Keys of each request, those of this step included."""
        return [r.prefix + r.new for r in self.requests]

    @property
    def tokens(self) -> int:
        """Live rows."""
        return sum(r.new for r in self.requests)

    @cached_property
    def parts(self) -> dict[tuple[int, ...], Step]:
        """Steps that ``part`` has made of it."""
        return {}


def part(step: Step, indices: Sequence[int]) -> Step:
    """Some requests of a step, in the order of ``indices``, with their data and slots. The same object is returned
    every time. Raises ``IndexError`` if there is no such request.
    """
    chosen = tuple(indices)
    if chosen not in step.parts:
        which = f"only request {chosen[0]}" if len(chosen) == 1 else f"requests {' '.join(map(str, chosen))}"
        requests = tuple(step.requests[index] for index in chosen)
        alone = step.follows is None or step.follows.cached_for is not None
        follows = step.follows if alone or step.follows is None else _same_requests(step.follows, requests)
        made = replace(step, name=f"{step.name}, {which}", label=which, requests=requests, part_of=(step, chosen),
                       follows=follows)  # fmt: skip
        step.parts[chosen] = made
    return step.parts[chosen]


def _same_requests(step: Step, requests: Sequence[Request]) -> Step:
    """The part of an earlier step that has these requests, by their rows of the request table."""
    rows = [request.pool_row for request in step.requests]
    return part(step, [rows.index(request.pool_row) for request in requests])


def only(step: Step, index: int) -> Step:
    """One request of a step by itself; the same object every time. Raises ``IndexError`` if there is no such
    request."""
    return part(step, (index,))


@dataclass(frozen=True, eq=False)
class Schedule:
    """All steps of a case, and the sizes that apply to all of them."""

    case: Case
    buckets: tuple[int, ...]
    """Descending."""
    steps: tuple[Step, ...]
    second: Step
    """The second step of an eager run."""
    oversized: Step
    """A step with more requests than the largest graph; it runs only eagerly."""
    max_context_len: int
    """Columns of ``req_to_token``, in tokens."""
    num_pages: int
    """Pages of the KV pool after page 0."""
    pool_rows: int
    """Rows of ``req_to_token`` after row 0."""
    spec_steps: int
    """S of the draft trees (S + 1 = width in v1)."""
    numerics: Numerics = MODEL
    """Numbers that the backend declares."""

    @property
    def matmul_dtype(self) -> str:
        """``Numerics.matmul_dtype``."""
        return self.numerics.matmul_dtype

    @property
    def new_rows_as_given(self) -> bool:
        """``Numerics.new_rows_as_given``."""
        return self.numerics.new_rows_as_given

    @property
    def lse_dtype(self) -> str:
        """``Numerics.lse_dtype``."""
        return self.numerics.lse_dtype

    @property
    def q_scale(self) -> str:
        """``Numerics.q_scale``."""
        return self.numerics.q_scale

    def with_numerics(self, **changes: Any) -> Schedule:
        """Return the steps under other numerics."""
        return replace(self, numerics=replace(self.numerics, **changes))

    @property
    def chunks(self) -> tuple[Step, ...]:
        """Extend: the chunks that come after the first step, in order."""
        return tuple(step for step in self.steps[1:] if step.chunk_of is not None)

    @property
    def every_step(self) -> tuple[Step, ...]:
        """All steps, of graphs and eager ones."""
        return (*self.steps, self.second, self.oversized)

    @property
    def idle(self) -> tuple[Step, ...]:
        """Steps without a live request."""
        return tuple(step for step in self.steps if not step.requests)

    @property
    def max_bs(self) -> int:
        """Largest bucket."""
        return self.buckets[0]

    @property
    def max_tokens(self) -> int:
        """Rows of the largest graph; in draft-decode of each of its forwards."""
        return self.max_bs * self.case.rows_at_once

    @property
    def most_requests(self) -> int:
        """Most requests of any batch, eager ones included."""
        return max(self.max_bs, self.oversized.bs)

    @property
    def most_tokens(self) -> int:
        """Rows of the largest forward, those of no request included."""
        behind = PADDED_TOKENS if "padded_tokens" in self.case.variants else 0
        return self.most_requests * self.case.rows_at_once + behind

    @property
    def most_rows(self) -> int:
        """Rows of the largest step, all forwards together."""
        # Encoder keys that a step stores are in the same tables as its rows.
        return self.most_requests * (self.case.width + self.max_encoder_len)

    @property
    def max_encoder_len(self) -> int:
        """Most encoder keys of a request; 0 without cross-attention layers."""
        if not self.case.encoder_len:
            return 0
        return max(request.encoder_len for step in self.every_step for request in step.requests)

    def runs_eagerly(self, step: Step, declared: Capabilities) -> bool:
        """True if an eager run follows the replay of a step, on a backend with these capabilities."""
        supported = self.case.mode in declared.eager
        return supported and step.eager_too and (declared.server.takes_empty_batches or bool(step.requests))

    def step_named(self, name: str) -> Step:
        """The step of this name: of ``steps``, ``second``, ``oversized``, or what ``part`` makes of one of them.

        The same object is returned every time. Raises ``KeyError`` with the existing names.
        """
        named = {step.name: step for step in self.every_step}
        if name in named:
            return named[name]
        found = re.fullmatch(r"(.+), (?:only )?requests? (\d+(?: \d+)*)", name)
        if found is None:
            raise KeyError(f"{self.case.id} has no step {name!r}; it has {', '.join(map(repr, named))}")
        whole, indices = self.step_named(found[1]), [int(index) for index in found[2].split()]
        if max(indices) >= whole.bs:
            raise KeyError(f"{self.case.id}: {whole.name!r} has {whole.bs} requests, and none of number {max(indices)}")
        return part(whole, indices)


def _accepted(case: Case, index: int, count: int, most: int, rng: np.random.Generator) -> tuple[int, ...]:
    if case.state is not None and case.tree is not None:
        return accepted_nodes(case, index, count)
    if not case.new:
        return (1,) * count
    if index == 0:
        return (*case.new, *(1 for _ in range(count - case.bs)))
    if index == 1:
        return (most,) * count  # every request accepts all: the only batch a uniform layout gets right
    return tuple(int(n) for n in rng.integers(1, most + 1, count))


def _depth(case: Case) -> int:
    """S: the longest path of the draft tree, tokens of a branch in draft-decode; 0 without either."""
    if case.draft:
        return case.draft.steps
    if not case.mode.is_speculative():
        return 0
    if case.tree:
        return case.tree.depth
    chained = case.width - 1
    if case.mode is not ForwardMode.DRAFT_EXTEND_V2 or shallow_depth(case) == chained:
        return chained
    return shallow_depth(case) if case.derived("draft-depth") else chained


def _trees(case: Case, index: int, count: int, depth: int, rng: np.random.Generator) -> tuple[Tree | None, ...]:
    if case.tree is None:
        return (None,) * count
    if case.tree == chain(len(case.tree)):
        return (case.tree,) * count
    if index == 0:
        # From a separate random stream, so that all else is drawn as it would be if one tree served all.
        rng = np.random.default_rng(case.digest ^ 0x7E)
        others = (random_tree(len(case.tree), case.topk, depth, rng) for _ in range(count - 1))
        return (case.tree, *others)
    return tuple(random_tree(len(case.tree), case.topk, depth, rng) for _ in range(count))


def _shared_pages(case: Case, prefixes: tuple[int, ...]) -> list[int]:
    """Number of pages of each request that it shares with others: whole pages of a prefix, from the first on.

    The other requests belong to the same step or to other steps. In half of the cases prefixes differ before the
    shortest one ends.
    """
    if case.layout != "shared":
        return [0] * len(prefixes)
    whole = [prefix // case.page_size for prefix in prefixes]
    most = sorted(whole)[-2:][0]
    if case.derived("shared-prefixes"):
        most = min(most, -(-min(whole) // 2) or most)
    return [min(pages, most) for pages in whole]


def _pages_for(
    layout: str, needs: list[int], num_pages: int, rng: np.random.Generator, shared: Sequence[int], home: int
) -> list[Ints]:
    """Page ids (1-based: page 0 is reserved) of each request. ``home``: the same number, the same shared pages."""
    if any(shared):
        most = max(shared)
        # A cached prefix stays where it was in earlier steps; the rest of a request may be anywhere.
        cached = np.random.default_rng(home).permutation(num_pages)[:most] + 1
        # Not setdiff1d, which hashes every page of a long request.
        free = np.ones(num_pages + 1, np.bool_)
        free[0] = free[cached] = False
        order = np.concatenate([cached, rng.permutation(np.flatnonzero(free))])
        ends = np.cumsum([need - part for need, part in zip(needs, shared, strict=True)])
        rests = np.split(order[most : most + ends[-1]], ends[:-1])
        return [np.concatenate([order[:part], rest]) for part, rest in zip(shared, rests, strict=True)]
    total = sum(needs)
    ends = np.cumsum(needs)
    if layout in ("shuffled", "shared"):
        return [np.asarray(p) for p in np.split(rng.permutation(num_pages)[:total] + 1, ends[:-1])]
    first = int(rng.integers(1, num_pages - total + 2))
    if layout == "interleaved":
        turns = sorted((page, i) for i, need in enumerate(needs) for page in range(need))
        owner = np.array([i for _, i in turns], np.int64)
        return [np.flatnonzero(owner == i) + first for i in range(len(needs))]
    runs = [np.arange(first + end - need, first + end) for end, need in zip(ends, needs, strict=True)]
    return [run[::-1] for run in runs] if layout == "reversed" else runs


def _table(
    requests: tuple[Request, ...], rows: int, ctx: int, slots: int, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    # The same numbers as int64 would be drawn.
    table = rng.integers(1, slots, (rows + 1, ctx), dtype=np.int32)
    table[0] = 0
    for request in requests:
        table[request.pool_row, : len(request.table_slots)] = request.table_slots
    return table


def _build_step(
    case: Case, index: int, plan: Plan, sizes: tuple[int, int, int, int], before: Step | None = None
) -> Step:
    num_pages, rows, ctx, depth = sizes
    seed = (case.digest + 0x9E3779B97F4A7C15 * (index + 1)) % 2**63
    rng = np.random.default_rng(seed)
    count, page = len(plan.prefixes), case.page_size
    accepted = (1,) * count if plan.new else _accepted(case, index, count, depth + 1, rng)
    ragged = case.mode is ForwardMode.DRAFT_EXTEND
    if ragged and plan.rotated is not None and before is not None:
        # Here a request's keys are its prefix and what was accepted.
        counts = [request.accepted for request in before.requests]
        accepted = tuple(counts[plan.rotated :] + counts[: plan.rotated])
    news = plan.new or (accepted if ragged else (case.width,) * count)
    trees = _trees(case, index, count, depth, rng)
    lens = lens_of(case, replace(plan, new=news))
    shared = _shared_pages(case, plan.prefixes)
    layout = plan.layout or layout_at(case, index)
    encoders = plan.encoder_lens or (0,) * count
    pages = _pages_for(layout, _page_counts(case, lens, encoders), num_pages, rng, shared, case.digest)
    pool_rows = rng.permutation(rows)[:count] + 1
    requests = tuple(
        Request(
            prefix,
            new,
            int(pool_rows[i]),
            _slots_in(pages[i], page, lens[i], encoders[i]),
            trees[i],
            accepted[i],
            shared[i] * page,
            spans=spans_in(case, index + i, prefix, new, seed + i),
            encoder_len=encoders[i],
            stores_encoder=case.mode is ForwardMode.EXTEND and 0 < encoders[i] == prefix,
        )
        for i, (prefix, new) in enumerate(zip(plan.prefixes, news, strict=True))
    )
    if case.draft:
        requests = tuple(branched(request, case.draft, page) for request in requests)
    table = _table(requests, rows, ctx, (num_pages + 1) * page, rng)
    return Step(f"step {index}", index, plan.label, plan.bucket, requests, table, seed, eager_too=plan.eager_too,
                layout=layout, padding=plan.padding or padding_at(case, index),
                data=plan.data or data_at(case, index))  # fmt: skip


def _page_counts(case: Case, lens: Sequence[int], encoder_lens: Sequence[int]) -> list[int]:
    """Pages of each request. Encoder keys and decoder keys are in separate pages."""
    page = case.page_size
    return [-(-first // page) - (first - length) // page for length, first in zip(lens, encoder_lens, strict=True)]


def _slots_in(pages: Ints, page: int, length: int, encoder_len: int) -> Ints:
    """[length] int64: slots of a request's keys in its pages."""
    slots = (pages[:, None] * page + np.arange(page)).reshape(-1)
    first = -(-encoder_len // page) * page
    return np.concatenate([slots[:encoder_len], slots[first : first + length - encoder_len]])


def branched(request: Request, draft: Draft, page: int) -> Request:
    """A request with branches: its slots are columns of the request table, with a range of slots for each branch."""
    columns, prefix = request.slots, request.prefix
    own = draft.columns(prefix, page)[:, : draft.forwards].reshape(-1)
    slots = np.concatenate([columns[:prefix], columns[own]])
    return replace(request, slots=slots, draft=draft, columns=columns, copies=columns[draft.copies(prefix, page)])


def _chunks(case: Case, plans: Sequence[Plan], sizes: tuple[int, int, int, int]) -> list[Step]:
    """The chunks of a batch, cut from a step that has all of them: the same requests, slots and table rows."""
    totals = tuple(sum(new) for new in zip(*(plan.new for plan in plans), strict=True))
    whole = _build_step(case, 0, replace(plans[0], label="all chunks", new=totals), sizes)
    num_pages, rows, ctx, _ = sizes
    steps: list[Step] = []
    for index, plan in enumerate(plans):
        requests = tuple(
            replace(
                request,
                prefix=prefix,
                new=new,
                slots=request.slots[: prefix + new],
                spans=spans_in(case, index + i, prefix, new, whole.seed + i),
            )
            for i, (request, prefix, new) in enumerate(zip(whole.requests, plan.prefixes, plan.new, strict=True))
        )
        rng = np.random.default_rng((whole.seed + index) % 2**63)
        table = _table(requests, rows, ctx, (num_pages + 1) * case.page_size, rng)
        name = f"step {index}"
        # The states of requests are those that the chunk before it left.
        follows = steps[-1] if steps and case.state is not None else None
        steps.append(replace(whole, name=name, index=index, label=plan.label, requests=requests, req_to_token=table,
                             chunk_of=whole, follows=follows))  # fmt: skip
    return steps


def _after(case: Case, step: Step, rounds: int) -> Step:
    """The step after this number of rounds of the same requests (``steps/rounds.py``)."""
    leveled = case.heads.layout.is_leveled
    if not rounds or not step.requests or (leveled and not all(each.prefix for each in step.requests)):
        return step
    counts = accepted_before(case, step.index, rounds, step.bs)
    if leveled:
        # Levels follow from lengths, so no more nodes were accepted than there are tokens.
        counts = tuple(min(count, each.prefix) for count, each in zip(counts, step.requests[::-1], strict=True))
    earlier = [
        replace(each, prefix=max(0, each.prefix - count), accepted=count)
        for each, count in zip(step.requests[::-1], counts, strict=True)
    ]
    before = replace(
        step, name=f"{step.name}, a round before", label=f"{step.label}, a round before",
        requests=tuple(replace(each, slots=each.slots[: each.prefix + each.new]) for each in earlier),
        seed=(step.seed + 0x9E3779B97F4A7C15) % 2**63, eager_too=False,
    )  # fmt: skip
    return replace(step, follows=_after(case, before, rounds - 1))


def _after_prompts(case: Case, step: Step, sizes: tuple[int, int, int, int]) -> Step:
    """The step whose requests continue states of a prefix cache, after the step whose prompts left these states."""
    if case.state is None or step.follows is not None:
        return step
    chunk, room = case.state.snapshots or 1, case.width
    lengths = cached_lengths([each.prefix for each in step.requests], chunk, room)
    if not lengths:
        return step
    num_pages, rows, ctx, _ = sizes
    free = [row for row in range(1, rows + 1) if row not in {each.pool_row for each in step.requests}]
    requests, prompts = list[Request](), list[Request]()
    for each in step.requests:
        prefix = continued_length(each.prefix, lengths)
        # The tokens of its prompt, and in a case with snapshots a few more, which the kept state must not have.
        more = min(1 + step.seed % 7, chunk - 1, room - prefix, len(each.slots) - prefix)
        if prefix and prefix not in [p.new // chunk * chunk for p in prompts]:
            prompts.append(replace(each, prefix=0, new=prefix + more, pool_row=free[len(prompts)],
                                   slots=each.slots[: prefix + more]))  # fmt: skip
        requests.append(replace(each, prefix=prefix, slots=each.slots[: prefix + each.new]))
    seed = (step.seed + 0x9E3779B97F4A7C15) % 2**63
    tables = [
        _table(tuple(own), rows, ctx, (num_pages + 1) * case.page_size, np.random.default_rng(number))
        for own, number in ((requests, step.seed ^ 0x7AB), (prompts, seed ^ 0x7AB))
    ]
    step = replace(step, requests=tuple(requests), req_to_token=tables[0])
    before = replace(
        step, name=f"{step.name}, prompts before", label=f"{step.label}, prompts before", requests=tuple(prompts),
        req_to_token=tables[1], seed=seed, eager_too=False, cached_for=step,
    )  # fmt: skip
    return replace(step, follows=before)


def _second(case: Case, steps: Sequence[Step], sizes: tuple[int, int, int, int]) -> Step:
    """One of the steps after the first, or a step that shares only the lengths of the first."""
    label = _SECOND.values[0 if case.encoder_len else case.derived(_SECOND.name)].words
    if case.state is not None and case.mode is ForwardMode.EXTEND and case.new == (1,):
        # A kernel that a backend makes for a single row may be wrong for more (sglang #35197).
        label = "longer, exact"
    if label == _SECOND.values[0].words:
        own = steps[0].requests
        new = tuple(request.new for request in own) if case.mode is ForwardMode.EXTEND else ()
        prefixes = tuple(request.prefix for request in own)
        encoders: tuple[int, ...] = ()
        if case.encoder_len:
            encoders = other_encoders([request.encoder_len for request in own])
            prefixes = tuple(each.decoder_prefix + more for each, more in zip(own, encoders, strict=True))
        alike = Plan(label, steps[0].bucket, prefixes, rotated=0, new=new, encoder_lens=encoders)
        return _build_step(case, len(steps), alike, sizes, steps[0])
    # Equal lengths have no other order, and "same lengths, other requests" is then the same thing.
    by_label = {step.label: step for step in steps}
    return by_label.get(label, by_label[_SAME_LENGTHS])


def make_schedule(case: Case, numerics: Numerics = MODEL) -> Schedule:
    """Lay out all steps of a case. The same case and numerics always give the same object, which keeps the results that
    are computed from it.
    """
    return _made(case, numerics)


@lru_cache(maxsize=256)
def _made(case: Case, numerics: Numerics) -> Schedule:
    rng = np.random.default_rng(case.digest)
    buckets, plans = make_plans(case, rng)
    ctx = context_len_of(case, plans)
    most = max(
        sum(_page_counts(case, lens_of(case, plan), plan.encoder_lens or (0,) * len(plan.prefixes))) for plan in plans
    )
    num_pages = most + max(3, most // 4)
    rows = len(plans[-1].prefixes) + 3
    depth = _depth(case)
    steps: list[Step] = []
    sizes = (num_pages, rows, ctx, depth)
    for i, plan in enumerate(plans):
        steps.append(_build_step(case, i, plan, sizes, steps[-1] if steps else None))
    if case.chunks > 1:
        steps[: case.chunks] = _chunks(case, plans[: case.chunks], sizes)
    if case.state is not None and case.tree is not None:
        steps = [_after(case, step, rounds_before(step.index)) for step in steps]
    continues = case.mode is ForwardMode.EXTEND and case.state is not None and bool(case.state.continues)
    if continues:
        steps = [_after_prompts(case, step, sizes) for step in steps]
    *replays, last = steps
    may_be_stored = case.heads.layout.has_keys and not case.encoder_len and case.encoder == "none"
    stored = may_be_stored and case.derived("second-step-stored") == 1
    other_strides = case.derived("second-step-memory") == 1
    second = replace(_second(case, steps, sizes), name="second", stored=stored, other_strides=other_strides)
    if case.state is not None and case.tree is not None and second.follows is None:
        second = _after(case, second, 1)
    if continues:
        second = _after_prompts(case, second, sizes)
    oversized = replace(last, name="oversized")
    return Schedule(
        case, buckets, tuple(replays), second, oversized, ctx, num_pages, rows, depth, numerics
    )  # fmt: skip


forget_schedules = _made.cache_clear
"""Function that frees every cached schedule; the next schedule is a new object."""
