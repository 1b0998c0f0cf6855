"""Results of an earlier audit: the case that caught a fault then will most likely catch it now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..registry import UsageError

__all__ = ["caught_before"]


def caught_before(path: str) -> Mapping[str, tuple[str, str]]:
    """Slug of each fault that was caught in a recorded audit -> (execution, case) that caught it.

    Raises ``UsageError`` for a file that cannot be read, or is not a record of an audit.
    """
    try:
        record = json.loads(Path(path).read_text("utf-8"))
        return {row["slug"]: (row["execution"], row["case"]) for row in record["faults"] if row["case"]}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a record of an audit, as --json writes it: {type(error).__name__}: {error}"
        ) from error
