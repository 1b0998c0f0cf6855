"""Properties that the failing cases of a cause share and no passing case has, read from the words of case ids.

Only case-runs of the same backend, in the modes and executions of the failures, are compared: other case-runs prove
nothing. If failing cases share several properties, the cases do not show which of them is the cause, so all are named
in one phrase: a choice could omit the true one. This module imports neither torch nor the cases: a page is made without
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ..results.case_result import RAN, CaseResult, Status
from ..results.names import mode_of

_FEWEST = 2
"""Fewest failing cases, and fewest passing ones, for which a difference is reported."""

_WORDS = (
    (r"(mha|gqa|mqa|mla)\d+(?:x\d+)?", "heads {0}"),
    (r"d(\d+(?:r\d+)?)", "head dim {1}"),
    (r"fp16|bf16|fp32", "dtype {0}"),
    (r"p(\d+)", "page size {1}"),
    (r"contiguous|shuffled|interleaved|reversed|shared", "slot order {0}"),
    (r"gauss|shifted|peaked|negative|mean|one_hot|rising_logits", "data {0}"),
    (r"kv(fp8\w+)", "KV pool of {1}"),
    (r"kv([a-z]+)", "KV layout {1}"),
    (r"w(\d+)(?:one|same)?", "window {1}"),
    (r"cap([\d.]+)", "soft cap {1}"),
    (r"b\d+(prod|nan|stale|small)", "padding {1}"),
    (r"topk(\d+)steps\d+", "topk {1}"),
)
"""Pairs of a word of an id, and its property in words. A word that is not here is named as it is."""
_ANY = (
    (r"w\d+(?:one|same)?", "a sliding window", "window"),
    (r"cap[\d.]+", "a soft cap", "soft cap"),
    (r"sink", "sinks", ""),
    (r"kvfp8\w+", "an FP8 KV pool", "KV pool of"),
    (r"lse\w+", "KV splits", ""),
    (r"layers\w+", "layers that differ", ""),
    (r"t[\d.]+(?:x\d+)*[\d.x]*", "a draft tree", ""),
)
"""Word of an id, its property whatever the number, and the kind of property together with the number."""
_UNNAMED = re.compile(r"[knb][\d.x]+\w*|chain\d+|s\d+")
"""Words that are compared by their numbers, or not at all."""


def in_common(failed: Sequence[CaseResult], results: Iterable[CaseResult]) -> str:
    """Properties of all ``failed`` case-runs of one cause that no passing case-run of ``results`` has; may be empty."""
    places = {(each.mode, each.execution) for each in failed}
    backend = failed[0].backend
    bad = {each.case for each in failed}
    near = [each for each in results if each.backend == backend and (each.mode, each.execution) in places]
    good = {each.case for each in near if each.status is Status.PASSED} - bad
    # A case of another cause is neither like these nor known to be right.
    other = {each.case for each in near if each.status in RAN and each.status is not Status.PASSED}
    good -= other
    if len(bad) < _FEWEST or len(good) < _FEWEST:
        return ""
    ours, theirs = (
        [dict(properties_of(case)) for case in sorted(bad)],
        [dict(properties_of(case)) for case in sorted(good)],
    )
    shared = [
        (kind, value)
        for kind, value in ours[0].items()
        if all(each.get(kind) == value for each in ours) and all(each.get(kind) != value for each in theirs)
    ]
    general = {kind for kind, _ in shared}
    # ``a sliding window`` says more than ``window 4`` if no passing case has a window at all.
    needless = {kind for _, what, kind in _ANY if what in general}
    shared = [(kind, value) for kind, value in shared if kind not in needless]
    passing = [_passing(kind, [each[kind] for each in theirs if kind in each]) for kind, _ in shared]
    found = [kind if value == "yes" else value for kind, value in shared]
    for number, (words, more) in _NUMBERS.items():
        least = min(numbers_of(case)[number] for case in bad)
        most = max(numbers_of(case)[number] for case in good)
        if least > most:
            found.append(f"{words} {least}{more}")
            passing.append(f"all cases with up to {most} pass")
    if len(found) > 1:
        return f"{', '.join(found)} (always together here; minimize tells them apart); all cases without them pass"
    return "; ".join((*found, *passing))


_NUMBERS = {
    "keys": ("a request of at least", " KV tokens before the step"),
    "requests": ("at least", " requests"),
}
"""Quantity of a case -> the words before and after its value in a failing case."""


def _passing(kind: str, others: Sequence[str]) -> str:
    """The passing cases in words. ``others``: their values of the same kind of property, if they have any."""
    passing = sorted(set(others), key=lambda word: (len(word), word))
    prefix = kind.split(" of ")[0]
    values = ", ".join(word.removeprefix(prefix).strip() for word in passing)
    return f"all cases of {prefix} {values} pass" if values else "all cases without it pass"


@lru_cache(maxsize=4096)
def properties_of(case: str) -> tuple[tuple[str, str], ...]:
    """Pairs of a kind of property and the property in words, in the order of the id."""
    words = _words(case)
    found: list[tuple[str, str]] = []
    for word in words:
        for pattern, text in _WORDS:
            if match := re.fullmatch(pattern, word):
                phrase = text.format(match[0], *match.groups())
                found.append((text.partition(" {")[0], phrase))
                break
        else:
            if not _UNNAMED.fullmatch(word) and not any(re.fullmatch(pattern, word) for pattern, _, _ in _ANY):
                found.append((f"`{word}`", "yes"))
    general = [(what, "yes") for pattern, what, _ in _ANY if any(re.fullmatch(pattern, word) for word in words)]
    return (*general, *found)


@lru_cache(maxsize=4096)
def numbers_of(case: str) -> dict[str, int]:
    """The longest and the shortest request in KV tokens before the step, and the number of requests."""
    keys = next((word[1:] for word in _words(case) if re.fullmatch(r"k\d+(?:x\d+)?(?:\.\d+(?:x\d+)?)*", word)), "0")
    lengths = [int(each.partition("x")[0]) for each in keys.split(".")]
    count = sum(int(each.partition("x")[2] or 1) for each in keys.split("."))
    return {"keys": max(lengths), "fewest": min(lengths), "requests": count}


def _words(case: str) -> list[str]:
    return case.removeprefix(f"{mode_of(case)}-").split("-")
