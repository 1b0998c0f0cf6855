"""Which version of a server is installed, and what to say where it is none that its bridge knows."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection

__all__ = ["installed"]


def installed(server: str, driven: Collection[str], named: str, how: str) -> str:
    """The version of a server that is installed; its package is called like it, in small letters.

    Args:
        server: its name, as it is written.
        driven: versions that the bridge knows.
        named: the same in words.
        how: what to do to have one of them.

    Raises ``LookupError``, with what to do, where there is none or another one.

    """
    try:
        found = importlib.metadata.version(server.lower())
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(f"{server} is not installed here; {how}") from None
    if found not in driven:
        raise LookupError(
            f"{server} {found} is installed; the kit drives {named}. What a backend reads of its server changes with "
            f"every release; {how}"
        )
    return found
