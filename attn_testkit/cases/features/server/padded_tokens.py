"""More rows than were planned: a server pads the inputs of the layers around attention after it has planned the
step."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...rows import Extend, room_for
from .variant import ServerVariant

_LENS = (9, 70, 1)
_PROMPTS = (20, 20, 20)


def _fits(declared: Capabilities, case: Fields) -> bool:
    return declared.server.takes_more_rows and case.mode is not ForwardMode.DRAFT_DECODE


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if _fits(declared, small):
        padded = small.with_changes(data="gauss", variants=frozenset({"padded_tokens"}))
        yield padded.of_requests(_LENS, padded=1)
        if small.mode is ForwardMode.EXTEND:
            # Prompts without a prefix take another kernel (vllm-ascend #5397).
            rows = Extend(_PROMPTS, room_for(_PROMPTS))
            yield padded.of_requests((0,) * len(_PROMPTS), padded=1, rows=rows, layout="shuffled")


PADDED_TOKENS = ServerVariant(
    "padded_tokens",
    "each forward has rows of no request after the rows of its plan",
    "server.takes_more_rows",
    _cases,
    _fits,
    excludes={
        "KV splits": "rows of no request have no keys to merge: servers cut them off before they split keys",
        "empty_batches": "a rank without requests has no rows, and its step is not planned",
    },
    order=60,
    also=("morerows", "padded token count"),
)
