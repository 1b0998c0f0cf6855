"""The check that a backend does not need more device memory at every step: repeats on the instance of a run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from attn_testkit.results.finding import Finding

from .capture import blocks_held
from .clock import Clock
from .errors import RunError
from .harness import ServerHarness
from .memory_use import allocated

REPEATS = 16
"""Number of repeats of one step that must all leave more memory allocated. A ring of the last steps' tensors, and a
buffer that grows to its largest size, stop growing earlier."""


def memory_bounded(
    harness: ServerHarness, clock: Clock, again: Callable[[], object]
) -> tuple[Mapping[str, int], tuple[Finding, ...]]:
    """Repeat a step that the instance has run, until it allocates no more memory. ``again`` runs the step. Returns the
    facts of the instance, and a finding if each of ``REPEATS`` repeats allocated more.
    """
    facts = dict(harness.memory.facts)
    grown: list[int] = []
    deliver, copies_pool = harness.deliver, harness.copies_pool
    harness.deliver, harness.copies_pool = lambda observed: observed, False
    try:
        with clock.phase("repeats"):
            again()
            if harness.memory.grown <= 0:
                return facts, ()
            before, held, lines = _after_collection(), blocks_held(harness), _lines()
            for _ in range(REPEATS):
                again()
                now = _after_collection()
                grown.append(now - before)
                before = now
                if grown[-1] <= 0:
                    return facts, ()
    except RunError:
        # Exceptions are reported by the steps of the run itself.
        return facts, ()
    finally:
        harness.deliver, harness.copies_pool = deliver, copies_pool
    facts["growth"] = min(grown)
    paths = [path for path, (_, size) in blocks_held(harness).items() if size > held.get(path, (0, 0))[1]]
    new = Counter(line for address, line in _lines().items() if line and address not in lines)
    often = [line for line, count in new.most_common() if count >= REPEATS]
    where = [_amount(grown), *_named("in the backend's", paths), *_named("allocated at", often)]
    return facts, (
        Finding(
            "memory-bounded",
            f"each of {REPEATS} repeats of one step leaves more device memory allocated",
            where="\n".join(where),
            hint="a list, a dict or a closure keeps a tensor of every step, or scratch is allocated again and its "
            "predecessor stays: keep only what the next step needs, and reuse it in place",
        ),
    )


def _after_collection() -> int:
    """Bytes that are allocated when no cycle of dead objects keeps tensors."""
    gc.collect()
    return allocated()


def _lines() -> dict[int, str]:
    """Line that allocated the memory at each address in use. The emulation records lines; on a GPU the texts are
    empty."""
    found = {}
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call, unused-ignore]
    for block in (block for segment in segments for block in segment["blocks"]):
        frame = next(iter(block.get("frames", ())), None)
        found[block["address"]] = f"{frame['filename']}:{frame['line']} ({frame['name']})" if frame else ""
    return found


def _amount(grown: Sequence[int]) -> str:
    least, most = min(grown), max(grown)
    return f"{least if least == most else f'{least} to {most}'} bytes per step, {sum(grown)} bytes in all"


def _named(what: str, places: Sequence[str]) -> list[str]:
    return [f"{what} {', '.join(places[:2])}{', ...' if len(places) > 2 else ''}"] if places else []
