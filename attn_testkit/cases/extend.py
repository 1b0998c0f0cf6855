"""Extend: how many new tokens the requests of each step have, and the chunks in which a prompt comes.

Requests are ragged: prompts of several pages next to rows that decode. A graph is captured for a number of tokens, not
for a number per request. A case's ``width`` times the bucket is this number, and the requests of a step share it.
Chunks are successive steps: the prefix of a chunk is what the chunk before it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .fields import Fields
from .plan import Plan

LONG_PROMPT, WITHOUT_ROWS, EVEN_WITHOUT_ROWS = (
    "long prompt",
    "some without rows",
    "some requests without rows, the others with equal numbers",
)
NEW_TOKENS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    # Nothing but the mode tells these from a decode.
    "ones": lambda page: (1,),
    "below a page": lambda page: (page - 1, page, 2),
    "a page": lambda page: (page, 1, page + 1),
    "above a page": lambda page: (page + 1, page - 1, 1),
    "pages": lambda page: (2 * min(page, 64) + 3, 1, 2),
    "prompt first": lambda page: (page + 3,),
    "decodes first": lambda page: (1, 1, 1, 1, 1, 1, page + 3),
    # These look like a verify or a draft-extend.
    "few": lambda page: (2, 3, 1, 4, 2, 3, 4),
    # Both sides of the usual tiles of rows.
    "tiles": lambda page: (17, 64, 33, 15),
    # More than a tile of 128, and a prompt that is as long as others together.
    LONG_PROMPT: lambda page: (3, 131, 1),
    # As on a rank of prefill context parallelism: equal offsets are adjacent. Kernels that number
    # chunks, tiles or work items without such requests look up the wrong request (vllm-ascend #11807).
    WITHOUT_ROWS: lambda page: (0, page + 1, 0, 0, 3, 0, 2),
    # As many rows for each request that has any: a batch that looks like one of drafts (vLLM #52500).
    EVEN_WITHOUT_ROWS: lambda page: (0, 4, 4, 0, 4, 0, 0, 4),
}
"""Name -> new tokens of the first requests, for a page size (8 at least). Requests after them have 1."""
_MOST_ROWS = 192
"""Rows of a batch above which further requests have 1 row: attention costs rows times keys."""


def new_tokens(name: str, count: int, page: int, most: int) -> tuple[int, ...]:
    """New tokens of ``count`` requests, at most ``most`` each. ``name``: of ``NEW_TOKENS``; ``page``: its size."""
    unit = max(page, 8)
    pattern = NEW_TOKENS[name](unit)
    if name == "decodes first":
        pattern = pattern[-count:]
    lens: list[int] = []
    for i in range(count):
        wanted = pattern[i] if i < len(pattern) else 1
        lens.append(min(wanted, most) if sum(lens) + wanted <= _MOST_ROWS else 1)
    return tuple(lens) if any(lens) else (*lens[:-1], 1)


def chunks_of(case: Fields, count: int) -> list[tuple[int, ...]]:
    """New tokens of each request in each chunk, the case's own batch first. ``count``: requests of the batch; requests
    that the case does not list have 1 token. A chunk is never longer than the one before it.
    """
    first = (*case.new, *(1 for _ in range(count - case.bs)))
    if case.chunks == 1:
        return [first]
    everyone = case.derived("chunked-requests") == 1
    going_on = [everyone or i == first.index(max(first)) for i in range(count)]
    middle = tuple(n if goes_on else min(n, 1) for n, goes_on in zip(first, going_on, strict=True))
    last = tuple((min(n, 1), (n + 1) // 2, n)[case.derived("last-chunk")] for n in middle)
    return [first, *[middle] * (case.chunks - 2), last]


def with_new_tokens(case: Fields, plans: Sequence[Plan]) -> list[Plan]:
    """The plans of an extend: each with its new tokens, and the further chunks of the case's own batch right after
    it."""
    rng = np.random.default_rng(case.digest ^ 0xE7)
    own = plans[0]
    chunks = chunks_of(case, len(own.prefixes))
    made = [replace(own, new=chunks[0])]
    for number, new in enumerate(chunks[1:], start=2):
        before = made[-1]
        prefixes = tuple(p + n for p, n in zip(before.prefixes, before.new, strict=True))
        label = f"chunk {number} of {case.chunks}"
        made.append(Plan(label, own.bucket, prefixes, new=new, follows=True))
    for plan in plans[1:]:
        made.append(replace(plan, new=_new_of(case, plan, made[-1], rng)))
    return made


def _new_of(case: Fields, plan: Plan, before: Plan, rng: np.random.Generator) -> tuple[int, ...]:
    count, bucket = len(plan.prefixes), max(plan.bucket, len(plan.prefixes))
    if plan.rotated is not None:
        return before.new[plan.rotated :] + before.new[: plan.rotated]
    if plan.exact:
        # As many rows as the graph has, and every request as many: what a uniform layout gets right.
        return (case.width,) * count
    left, lens, most = bucket * case.width - count, list[int](), case.most_new
    for _ in range(count):
        # A row that decodes, a prompt of any length, or the longest that there is.
        wanted = (1, int(rng.integers(1, most + 1)), most)[int(rng.integers(3))]
        lens.append(min(wanted, left + 1))
        left -= lens[-1] - 1
    if 0 in case.new:
        # Every second one from the middle on, so that most batches have one between others.
        lens = [0 if i % 2 == count // 2 % 2 and count > 1 and prefix else n
                for i, (n, prefix) in enumerate(zip(lens, plan.prefixes, strict=True))]  # fmt: skip
    return tuple(lens)
