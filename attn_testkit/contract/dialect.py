"""Conventions in which servers differ; an instance has one value of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DIALECTS", "Dialect"]

DIALECTS: Mapping[str, tuple[str, ...]] = {
    "padded_requests": ("rows", "nothing"),
    "verify_lens": ("prefix", "all"),
    "context_len": ("all", "prefix"),
    "freed_pages": ("listed", "minus_one", "null_page"),
}
"""Field of a ``Dialect``, and of ``ServerConventions`` -> its values; the first is the usual one."""


@dataclass(frozen=True)
class Dialect:
    """Conventions of the server around an instance: one value of each field of ``ServerConventions`` with this name."""

    padded_requests: str = "rows"
    """Contents of a padded request of a graph. ``rows``: as many rows as at capture, and the fill value as ``seq_lens``
    (SGLang). ``nothing``: neither rows nor keys, whatever the backend's fill value is; the batch has
    ``query_start_loc`` (vLLM). In both, a graph is captured with requests that have rows."""
    verify_lens: str = "prefix"
    """Keys that ``seq_lens`` counts in target-verify. ``prefix``: keys before the step (SGLang). ``all``: keys before
    the step and its N new ones, in ``spec_info`` as well (vLLM). A FULL_MASK is laid out by prefixes either way."""
    context_len: str = "all"
    """Keys that ``max_context_len`` bounds in target-verify, draft-extends and draft-decode. ``all``: the step's own as
    well (vLLM). ``prefix``: keys before the step (SGLang); ``req_to_token`` has columns for the others."""
    freed_pages: str = "listed"
    """Entries of ``KVGroup.req_to_token`` for keys in pages that a windowed group has freed. ``listed``: the slots that
    the keys had. ``minus_one``: -1 (SGLang's unified pool). ``null_page``: slots of page 0 (null block of vLLM). Rows
    never see these keys, and a backend that reads such an entry may read anything."""
