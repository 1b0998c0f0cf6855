"""The installed version of a server, or an error if its bridge does not know that version."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection


def installed(server: str, driven: Collection[str], named: str, how: str) -> str:
    """The installed version of a server, whose package has its name in lower case.

    ``driven`` are the versions that the bridge knows, ``named`` their names in a sentence, and ``how`` a sentence about
    how to install one. Raises ``LookupError``, which says what to do, if no version or another one is installed.
    """
    try:
        found = importlib.metadata.version(server.lower())
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(f"{server} is not installed here; {how}") from None
    if found not in driven:
        raise LookupError(
            f"{server} {found} is installed; the kit runs {named}. The attributes of a server that a backend reads "
            f"change with every release; {how}"
        )
    return found
