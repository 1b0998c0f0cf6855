"""Missing KV tokens that repeat with a period: the same part of every tile or page."""

from __future__ import annotations

from .evidence import Evidence
from .hint import Level, hint

_LEAST = 4
"""Shortest period that is reported; a shorter pattern may be a coincidence."""


@hint(Level.PATTERN, silences=(Level.GUESS, "read_twice"))
def missing_in_every_tile(e: Evidence) -> str:
    """The missing KV tokens are the same part of every tile that the row should see."""
    attended = e.attended
    if attended is None or attended.elsewhere or attended.not_asked or attended.heads or e.misrouted:
        return ""
    missing = sorted(attended.wanted - attended.used)
    starts = [key for key in missing if key - 1 not in missing]
    if len(starts) < 2 or attended.used - attended.wanted:
        return ""
    first, period = starts[0], starts[1] - starts[0]
    lost = next(n for n in range(1, period + 1) if first + n not in missing)
    if period < _LEAST or first // period != min(attended.wanted) // period:
        return ""
    begin = first % period
    if missing != sorted(key for key in attended.wanted if begin <= key % period < begin + lost):
        return ""
    page = e.schedule.case.page_size
    what = "page" if period == page else "tile"
    end = begin + lost - 1
    part = f"KV token {begin}" if lost == 1 else f"KV tokens {begin}..{end}"
    text = f"{part} of every {period} {'is' if lost == 1 else 'are'} missing, in each {what} of {period}"
    if not attended.doubled:
        return f"{text}: probably a tile that is loaded or masked by a width other than its own"
    shift = missing[0] - min(attended.doubled)
    if abs(shift) >= period or {key - shift for key in missing} != attended.doubled:
        return ""
    at = (begin - shift) % period
    return (
        f"{text}, and {at}..{at + lost - 1} count twice: a part of a {what} is loaded from another part of it, as when "
        "a copy loads more than its width"
    )
