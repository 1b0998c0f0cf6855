"""``--lf``: the case-runs that failed when they last ran in this directory, in a file that ``run`` keeps."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from ..results.case_result import BAD, RAN, CaseResult, RunKey

CACHE_VARIABLE = "ATTN_TESTKIT_CACHE"
"""Environment variable with another folder than ``.attn_testkit_cache`` of the current directory."""
_FORMAT = "attn-testkit-lastfailed/1"


def place() -> Path:
    """The file, which need not exist."""
    return Path(os.environ.get(CACHE_VARIABLE) or ".attn_testkit_cache") / "lastfailed.json"


def failed_before() -> frozenset[RunKey]:
    """The case-runs that failed when they last ran; empty if there is no such file, or none that can be read."""
    try:
        data = json.loads(place().read_text("utf-8"))
        return (
            frozenset((str(b), str(e), str(c)) for b, e, c in data["failed"])
            if data["format"] == _FORMAT
            else frozenset()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def keep_failed(results: Iterable[CaseResult]) -> None:
    """Add the case-runs that failed, and drop those that ran and did not fail. The others keep their entries, as in
    pytest.

    Nothing is raised for a folder that cannot be written: the results were printed.
    """
    before, failed = failed_before(), set(failed_before())
    for result in results:
        if result.case and result.status in BAD:
            failed.add(result.key)
        elif result.status in RAN:
            failed.discard(result.key)
    if failed == before:
        return
    with contextlib.suppress(OSError):
        write_in_cache(place(), json.dumps({"format": _FORMAT, "failed": sorted(failed)}, indent=1) + "\n")


def write_in_cache(path: Path, text: str) -> None:
    """Write a file into the folder that ``run`` keeps, which Git ignores. Raises ``OSError``."""
    folder = path.parent
    if not folder.is_dir():
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n", "utf-8")
    path.write_text(text, "utf-8")
