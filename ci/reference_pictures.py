"""Pictures of query rows and KV slots, one for each forward mode, as SVG for light and dark pages.

A picture has two requests. Each has a line of cells, its KV tokens in order: those before the step and those that the
step stores. Above them are its query rows, and a bar from each row covers the tokens that the row sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

__all__ = ["PICTURES", "Picture", "Request", "picture"]

_CELL, _ROW, _LEFT, _WIDTH = 30, 22, 84, 440


@dataclass(frozen=True)
class Request:
    """The tokens and rows of one request."""

    name: str
    prefix: int
    new: tuple[str, ...]
    """Labels of the tokens that the step stores."""
    rows: tuple[tuple[str, tuple[int, ...]], ...]
    """Label of each query row, and the new tokens that it sees; each row sees the whole prefix."""
    counted: int
    """``seq_lens`` of the request: its first tokens, as many as this number, are counted."""


@dataclass(frozen=True)
class Picture:
    """One mode: what is said below the title, and the requests."""

    mode: str
    caption: str
    requests: tuple[Request, ...]


def _causal(names: tuple[str, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(range(at + 1))) for at, name in enumerate(names))


PICTURES: tuple[Picture, ...] = (
    Picture(
        "decode",
        "One row per request. seq_lens counts the new token.",
        (
            Request("request 0", 5, ("n",), _causal(("row 0",)), 6),
            Request("request 1", 2, ("n",), _causal(("row 1",)), 3),
        ),
    ),
    Picture(
        "target-verify",
        "N = 3 rows per request, the nodes of a draft tree. Here nodes 1 and 2 are children of node 0. "
        "seq_lens is the prefix.",
        (
            Request("request 0", 4, ("0", "1", "2"), (("row 0", (0,)), ("row 1", (0, 1)), ("row 2", (0, 2))), 4),
            Request("request 1", 2, ("0", "1", "2"), (("row 3", (0,)), ("row 4", (0, 1)), ("row 5", (0, 2))), 2),
        ),
    ),
    Picture(
        "draft-extend",
        "A row per accepted token, packed: request 0 accepted 1, request 1 accepted 3. seq_lens counts them.",
        (
            Request("request 0", 4, ("a",), _causal(("row 0",)), 5),
            Request("request 1", 2, ("a", "b", "c"), _causal(("row 1", "row 2", "row 3")), 5),
        ),
    ),
    Picture(
        "draft-extend-v2",
        "N = 3 rows per request, accepted or not: row i * N + j belongs to request i. seq_lens counts all N.",
        (
            Request("request 0", 4, ("a", "b", "c"), _causal(("row 0", "row 1", "row 2")), 7),
            Request("request 1", 2, ("a", "b", "c"), _causal(("row 3", "row 4", "row 5")), 5),
        ),
    ),
    Picture(
        "extend",
        "A row per new token, packed: a prompt chunk of 3 tokens, and a request that decodes. seq_lens counts them.",
        (
            Request("request 0", 3, ("a", "b", "c"), _causal(("row 0", "row 1", "row 2")), 6),
            Request("request 1", 4, ("a",), _causal(("row 3",)), 5),
        ),
    ),
    Picture(
        "draft-decode",
        "Forward 1 of a draft with K = 2 branches: K rows per request. Cell 1b is token b of branch 1. A row sees the "
        "prefix and the tokens of its own branch. seq_lens is the prefix.",
        (
            Request("request 0", 3, ("0a", "0b", "1a", "1b"), (("row 0", (0, 1)), ("row 1", (2, 3))), 3),
            Request("request 1", 2, ("0a", "0b", "1a", "1b"), (("row 2", (0, 1)), ("row 3", (2, 3))), 2),
        ),
    ),
)

_STYLE = """
svg.rows { --ink: #1f2430; --soft: #5b6475; --prefix: #dfe4ec; --new: #0f766e; --on-new: #ffffff; --sees: #99d5cd;
  font: 13px system-ui, sans-serif; max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { svg.rows { --ink: #e6e9ef; --soft: #a3adbd; --prefix: #39414f; --new: #2dd4bf;
  --on-new: #06241f; --sees: #1f6f67; } }
svg.rows text { fill: var(--ink); }
svg.rows .soft { fill: var(--soft); font-size: 12px; }
svg.rows .prefix { fill: var(--prefix); }
svg.rows .new { fill: var(--new); }
svg.rows .on-new { fill: var(--on-new); font-size: 12px; }
svg.rows .sees { fill: var(--sees); }
svg.rows .counted { stroke: var(--ink); stroke-width: 1.5; fill: none; }
""".strip()


def picture(of: Picture) -> str:
    """The SVG of a mode."""
    parts: list[str] = []
    top = 8
    for request in of.requests:
        drawn, top = _request(request, top)
        parts += drawn
    parts.append(_legend(top))
    return (
        f'<svg class="rows" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 30}" width="{_WIDTH}" '
        f'role="img" aria-label="{escape(f"{of.mode}: {of.caption}")}">\n<style>\n{_STYLE}\n</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _request(request: Request, top: int) -> tuple[list[str], int]:
    """The rows of a request, then its tokens; and where the next one begins."""
    parts = []
    for label, sees in request.rows:
        spans = [(0, request.prefix), *((request.prefix + each, request.prefix + each + 1) for each in sees)]
        parts.append(f'<text x="{_LEFT - 12}" y="{top + 15}" text-anchor="end">{escape(label)}</text>')
        parts += [
            f'<rect class="sees" x="{_LEFT + a * _CELL}" y="{top + 6}" width="{(b - a) * _CELL - 2}" height="10"/>'
            for a, b in spans
            if b > a
        ]
        top += _ROW
    parts.append(f'<text class="soft" x="{_LEFT - 12}" y="{top + 19}" text-anchor="end">{request.name}</text>')
    for at in range(request.prefix + len(request.new)):
        new = at >= request.prefix
        x = _LEFT + at * _CELL
        parts.append(
            f'<rect class="{"new" if new else "prefix"}" x="{x}" y="{top + 2}" width="{_CELL - 2}" height="26" rx="3"/>'
        )
        label = request.new[at - request.prefix] if new else str(at)
        css = "on-new" if new else "soft"
        parts.append(f'<text class="{css}" x="{x + _CELL / 2 - 1}" y="{top + 19}" text-anchor="middle">{label}</text>')
    end = _LEFT + request.counted * _CELL - 2
    parts.append(f'<path class="counted" d="M{_LEFT} {top + 31} v5 H{end} v-5"/>')
    parts.append(f'<text class="soft" x="{end + 8}" y="{top + 41}">seq_lens = {request.counted}</text>')
    return parts, top + 58


def _legend(top: int) -> str:
    words = (("prefix", "before the step"), ("new", "stored by the step"), ("sees", "seen by the row"))
    parts, x = [], 12.0
    for css, text in words:
        parts.append(f'<rect class="{css}" x="{x}" y="{top + 6}" width="14" height="10" rx="2"/>')
        parts.append(f'<text class="soft" x="{x + 20}" y="{top + 15}">{text}</text>')
        x += 34 + 6.2 * len(text)
    return "\n".join(parts)
