"""Keys of each request before the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ...contract import Capabilities
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import Bound, Columns, Feature, Row, Simpler, Trait, Without, Word, no_capability
from .numbers import MOST_REQUESTS, listed, nearer_numbers, numbers_word, read_numbers

_MOST_REQUESTS = 5
_MOST_PREFIX = 400
"""The most prefix tokens of a random case, which should be quick; catalogues try long requests."""

PATTERNS: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "edges": lambda page, width: (page - 1, page, page + 1),
    "zero": lambda page, width: (0, 1, page),
    "ragged": lambda page, width: (3, 2 * page + 5, page // 2 + 1, 17),
    "one": lambda page, width: (page + 5,),
    "same": lambda page, width: (7, 7),
    "wide": lambda page, width: (1, 2, 5, 9, 14, 2, 30),
    # Beyond two pages of 256, and beyond 512.
    "long": lambda page, width: (600, 70, 12),
    "fresh": lambda page, width: (0, 0, 0),
    "many": lambda page, width: (2 * page + 5, 3, 0, page, 9, 33, 1, 17, 5),
    # The rows of a request are on both sides of a multiple of the usual key tiles, and one begins at the end of a chunk
    # of 64 or of a page.
    "tiles": lambda page, width: (
        *(tile - width // 2 for tile in (32, 128, 64, 16)),
        max(page, 64) - 1,
    ),
}
"""Name -> prefixes for a page size (8 at least) and a number of rows of a request."""


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    width = row["draft"].steps if "draft" in row else len(row.get("tree", ())) or row.get("width", 1)
    return {"prefixes": PATTERNS[row["prefixes"]](max(so_far["page_size"], 8), width)}


def _fewer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    """Shorter lengths to try: all requests like the shortest; some minimal; the longest one shorter; each one
    shorter."""
    lens, of_plain = case.prefixes, minimal.prefixes[0]

    def with_lens(length_of: Callable[[int], int]) -> Changes:
        return {"prefixes": tuple(map(length_of, lens))}

    yield with_lens(lambda _: min(lens))
    kinds = list(dict.fromkeys(length for length in lens if length != of_plain))
    for kind in kinds:
        yield with_lens(lambda each, kind=kind: of_plain if each == kind else each)  # type: ignore[misc]
    for cap in nearer_numbers(max(lens), of_plain):
        yield with_lens(lambda each, cap=cap: min(each, cap))  # type: ignore[misc]
    for kind in kinds if len(kinds) > 1 else ():
        for near in nearer_numbers(kind, of_plain):
            yield with_lens(lambda each, kind=kind, near=near: near if each == kind else each)  # type: ignore[misc]


KEYS = Feature(
    name="keys",
    order=70,
    fields=("prefixes",),
    traits=(Trait("fresh requests", lambda case: case.tree is not None and 0 in case.prefixes),),
    words=(
        Word(
            r"k([\d.x]+)",
            lambda match, so_far: {"prefixes": read_numbers(match[1])},
            lambda case: "k" + numbers_word(case.prefixes),
            always=True,
            bounds=(Bound("keys before the step", 0, 1 << 24, most_listed=MOST_REQUESTS, most_together=1 << 26),),
        ),
    ),
    explained=(
        Entry(
            "k33",
            "Keys of each request before the step; lists are joined by dots, and `15x2` is 15 twice.",
            also=("prefixes", "prefix lengths"),
            numbers=True,
        ),
        Entry(
            "second",
            "In an explained case: the step that follows the first one on the same instance, in eager.",
            also=("second step",),
        ),
        Entry(
            "oversized",
            "In an explained case: an eager step with more requests than any graph, between replays.",
            also=("above-graph batch",),
        ),
    ),
    describe=lambda case: {"prefixes": f"{listed(case.prefixes)} keys before this step"},
    values=Columns(
        lambda declared, mode, tier: {
            "prefixes": [name for name in PATTERNS if tier == "core" or name not in ("fresh", "many")]
        },
        _of_row,
        {"prefixes": ("page_size", "slack", "layout")},
    ),
    simpler=Simpler(
        value=lambda case: ".".join(map(str, case.prefixes)),
        of=lambda case: frozenset(case.prefixes),
        reset=lambda case, minimal: {"prefixes": minimal.prefixes * case.bs},
        size=lambda case, minimal: (len(set(case.prefixes)), sum(abs(n - minimal.prefixes[0]) for n in case.prefixes)),
        steps=_fewer,
    ),
    random=lambda draws, declared, so_far: {"prefixes": draws.numbers((1, _MOST_REQUESTS), (0, 20), (0, _MOST_PREFIX))},
    varies="step",
    apply=Without("cases/plans.py makes the lengths of all steps from the case's own."),
    **no_capability("The declared context covers it, because all steps have to fit into it."),
)
