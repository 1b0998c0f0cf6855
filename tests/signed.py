"""Results files that a test changes: with the digest of the new content, or as versions without a digest wrote them."""

from __future__ import annotations

from typing import Any

from attn_testkit.reports.record_check import digest_of

__all__ = ["of_an_earlier_version", "signed"]


def signed(data: dict[str, Any]) -> dict[str, Any]:
    """The edited data with its new digest, and without the verdict on the data before the edit."""
    edited = {name: value for name, value in data.items() if name != "verdict"}
    return {**edited, "digest": digest_of(edited)}


def of_an_earlier_version(data: dict[str, Any]) -> dict[str, Any]:
    """The data without what files of the versions before the digest lack."""
    header = {name: value for name, value in data["header"].items() if name != "selection"}
    return {**{name: value for name, value in data.items() if name not in ("digest", "verdict")}, "header": header}
