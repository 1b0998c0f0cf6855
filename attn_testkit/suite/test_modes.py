"""One test per runner mode; each of its parameters is a case-run (backend, execution, case)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..plugin.reporting import Run
    from ..running.planning.request import Item


@pytest.mark.attn_mode("decode")
def test_decode(attn_run: Run, attn_item: Item) -> None:
    """Decode: one new token per request."""
    attn_run(attn_item)


@pytest.mark.attn_mode("target-verify")
def test_target_verify(attn_run: Run, attn_item: Item) -> None:
    """Target-verify: a draft tree per request, checked by the target model."""
    attn_run(attn_item)


@pytest.mark.attn_mode("draft-extend")
def test_draft_extend(attn_run: Run, attn_item: Item) -> None:
    """Draft-extend v1: the accepted tokens of each request, packed."""
    attn_run(attn_item)


@pytest.mark.attn_mode("draft-extend-v2")
def test_draft_extend_v2(attn_run: Run, attn_item: Item) -> None:
    """Draft-extend v2: the same number of tokens for each request."""
    attn_run(attn_item)


@pytest.mark.attn_mode("extend")
def test_extend(attn_run: Run, attn_item: Item) -> None:
    """Extend: new tokens over a cached prefix, ragged and packed; prompts next to rows that decode."""
    attn_run(attn_item)


@pytest.mark.attn_mode("draft-decode")
def test_draft_decode(attn_run: Run, attn_item: Item) -> None:
    """Draft-decode: all forwards of a draft, one row per branch, in one graph."""
    attn_run(attn_item)
