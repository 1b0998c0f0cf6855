"""What servers say in different ways, and a backend must know to read a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DIALECTS", "Dialect"]

DIALECTS: Mapping[str, tuple[str, ...]] = {
    "padded_requests": ("rows", "nothing"),
    "verify_lens": ("prefix", "all"),
}
"""Field of a ``Dialect``, and claim -> its values; the first is the usual one."""


@dataclass(frozen=True)
class Dialect:
    """How the server around an instance says it: of each claim of the same name one value."""

    padded_requests: str = "rows"
    """What a padded request of a graph has. ``rows``: as many rows as it was captured with, and the fill value as
    ``seq_lens`` (SGLang). ``nothing``: neither rows nor keys, whatever the fill value of the backend is; the batch has
    ``query_start_loc`` (vLLM). A graph is captured on requests that have rows either way."""
    verify_lens: str = "prefix"
    """``seq_lens`` of target-verify. ``prefix``: keys before the step (SGLang). ``all``: with its N new ones, in
    ``spec_info`` as well (vLLM). The cells of a FULL_MASK are laid out by prefixes either way."""
