"""A results file is checked when it is read: its digest, its counts, its statuses and its exit code agree.

The digest finds a file that was edited, merged by hand or cut. It does not sign the file: a program
that can write the file can also write its digest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..results.case_result import BAD, RAN, CaseResult, Status
from ..results.run_header import RunHeader
from .verdict import conclude

END = ("counts", "problems", "interrupted", "exit_code", "finished", "verdict")
"""Fields of a results file that say how the run ended. Files of earlier versions lack the verdict."""


class Digest:
    """The digest of a results file, made while the file grows: SHA-256 of header, results and end, whatever the layout
    of the JSON.
    """

    def __init__(self, header: object) -> None:
        self._sha = hashlib.sha256()
        self.add(header)

    def add(self, part: object) -> None:
        """Add the next result as plain values."""
        self._sha.update(_canonical(part))

    def with_end(self, end: Mapping[str, Any]) -> str:
        """The digest if the file ends here. The file may still grow."""
        whole = self._sha.copy()
        whole.update(_canonical({name: end[name] for name in END if name in end or name != "verdict"}))
        return f"sha256:{whole.hexdigest()}"


def digest_of(data: Mapping[str, Any]) -> str:
    """The digest that a results file with this content must have; ``KeyError`` if a part is missing."""
    digest = Digest(data["header"])
    for result in data["results"]:
        digest.add(result)
    return digest.with_end(data)


def _canonical(part: object) -> bytes:
    return json.dumps(part, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def contradiction(data: Mapping[str, Any], header: RunHeader, results: Sequence[CaseResult]) -> str:
    """Find a contradiction in a results file, in words that follow the file's name; empty if there is none."""
    # Files of the versions before the digest lack the selection, too.
    if "digest" not in data and "selection" in data["header"]:
        return "has no digest: somebody removed it"
    if "digest" in data and data["digest"] != digest_of(data):
        return (
            f"was changed after it was written: its digest is {data['digest']}, that of its content {digest_of(data)}"
        )
    counts = dict(Counter(result.status.value for result in results if result.case))
    if data["counts"] != counts:
        return f"says counts {data['counts']}, but its results give {counts}"
    return _wrong_row(header, results) or _wrong_ending(data, header, results)


def _wrong_row(header: RunHeader, results: Sequence[CaseResult]) -> str:
    for row in results:
        place = f"{row.backend} {row.execution} {row.case}"
        if row.backend not in header.backends:
            return f"has a result of {row.backend}, which is not one of its backends: {', '.join(header.backends)}"
        if row.status is Status.PASSED and row.findings:
            return f"says that {place} passed, with the finding {row.findings[0].headline!r}"
        if row.status is Status.PASSED and row.margin is not None and not row.margin <= 1:
            return f"says that {place} passed, with an error of {row.margin:g} times the limit"
    keys = Counter((row.backend, row.execution, row.case) for row in results if row.case and row.status in RAN)
    twice = next((key for key, count in keys.items() if count > 1), None)
    return f"has the result of {' '.join(twice)} more than once" if twice else ""


def _wrong_ending(data: Mapping[str, Any], header: RunHeader, results: Sequence[CaseResult]) -> str:
    code, finished, interrupted = data["exit_code"], data["finished"], data["interrupted"]
    if finished and (code is None or interrupted):
        return f"says that the run finished, with exit code {code} and interrupted {interrupted}"
    if code is None:
        return ""
    red = sum(row.status in BAD for row in results if row.case)
    if code == 0 and red:
        return f"says exit code 0, but {red} of its case-runs did not pass"
    # Another version of the kit may conclude otherwise.
    if "digest" in data and header.kit == importlib.metadata.version("attn-testkit"):
        due = conclude(header, results, problems=data.get("problems", ()), interrupted=interrupted)
        if due.code != code:
            return f"says exit code {code}, but its results give {due.code}"
        if data.get("verdict", str(due)) != str(due):
            return f"says {data['verdict']!r}, but its results give {str(due)!r}"
    return ""
