"""The text of a case-run that did not pass, and the command that repeats it."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Sequence

from .case_result import CaseResult
from .names import NO_CASE, NOT_COMPILED
from .rules import with_rule
from .run_header import RunHeader
from .texts import telling_first

WIDTH = 120
"""Columns of a failure's prose."""


def format_failure(
    result: CaseResult, header: RunHeader | None = None, *, first_only: bool = False, brief: bool = False
) -> str:
    """The text of a case-run that did not pass. Its first line is complete in itself.

    ``first_only``: only the first finding. ``brief``: one line for each further finding, and for a failure like an
    earlier one only the text that is needed to find both.
    """
    if not result.case:
        return f"{result.backend} {result.mode} {result.execution}: {result.status}: {result.reason}"
    lines: list[str] = []
    for finding in result.findings[:1] if first_only or brief else result.findings:
        lines.append(f"{result.case}: {finding.headline}")
        rows = [("check", with_rule(finding.check)), ("step", finding.step)]
        if not (brief and result.like and not result.diagnosed):
            rows += [(name, getattr(finding, name)) for name in ("where", "spread", "attended")]
            rows.append(("hint", telling_first(finding.hint)))
        lines += [line for name, text in rows if text for line in _row(name, text)]
    if brief:
        lines += [f"  also     {finding.check}: {finding.headline}" for finding in result.findings[1:]]
    if result.like and not result.diagnosed:
        lines += _row(
            "cause", f"assumed to be that of {result.like}; --diagnose all looks for the cause of each failure"
        )
    if not result.findings:
        first, *rest = result.reason.splitlines() or [""]
        lines.append(f"{result.case}: {result.status}: {first}" if first else f"{result.case}: {result.status}")
        lines += [f"  {line}" for line in rest]
    if brief and result.like and not result.diagnosed:
        return "\n".join([*lines, f"  repro    {repro_command(result, header)}"])
    if result.not_evaluated:
        lines += _row("untested", _some(result.not_evaluated))
    lines += printed_rows(result)
    version = header.backends.get(result.backend, "") if header else ""
    parts = [f"{result.backend} {version}".strip()]
    if header:
        parts += [header.device_name, f"torch {header.versions.get('torch', '?')}"]
    parts += [f"graph: {result.graph}" if result.graph else result.execution] if result.execution else []
    if result.kernels != "real":
        parts.append(_KERNELS[result.kernels])
    lines.append(f"  backend  {' · '.join(parts)}")
    lines.append(f"  repro    {repro_command(result, header)}")
    return "\n".join(lines)


_KERNELS = {
    "emulated": "kernels: emulated",
    "stores": "stores: emulated",
    NOT_COMPILED: "compiled regions: run eagerly",
}


def _row(name: str, text: str) -> list[str]:
    # Values are not wrapped, so that they can be searched for and copied; prose is.
    lines = text.splitlines()
    if name in ("hint", "untested"):
        return [
            f"  {name if not index else '':<8} {part}"
            for line in lines
            for index, part in enumerate(textwrap.wrap(line, WIDTH - 11, break_long_words=False))
        ]
    return [f"  {name:<8} {line}" for line in lines]


def printed_rows(result: CaseResult) -> list[str]:
    """The last lines that the backend printed in a case-run, as rows of a failure."""
    lines = [line for line in result.printed.splitlines() if line.strip()]
    left = len(lines) - MOST_PRINTED_LINES
    shown = [f"({left} earlier lines)", *lines[-MOST_PRINTED_LINES:]] if left > 0 else lines
    return [line for text in shown for line in _row("printed", text[:WIDTH])]


MOST_PRINTED_LINES = 6
"""Number of lines of a backend's output that a failure's text shows; the results file has more."""


def _some(names: Sequence[str]) -> str:
    """All names if they are few, else the first ones and the number of the rest."""
    shown = names if len(names) <= MOST_UNTESTED + 1 else names[:MOST_UNTESTED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


MOST_UNTESTED = 5
"""Number of unevaluated checks that a failure's text names; the results file has them all."""

PYTHON_VARIABLE = "ATTN_TESTKIT_PYTHON"
"""Environment variable that ``attn-testkit --python PATH`` sets to PATH for the process in which it continues."""


def program() -> tuple[str, ...]:
    """The words before the verb of a command that repeats this one."""
    python = os.environ.get(PYTHON_VARIABLE)
    return ("attn-testkit", "--python", python) if python else ("attn-testkit",)


def repro_command(result: CaseResult, header: RunHeader | None = None) -> str:
    """The command that shows this result again; for a class that cannot be imported, the Python call."""
    if result.backend.startswith("__main__:") or "<locals>" in result.backend:
        name = result.backend.rpartition(":")[2].rpartition(".")[2]
        return f"check_backend({name}, executions=[{result.execution!r}], cases=[{result.case!r}])"
    rest = ["--execution", result.execution] if result.execution else []
    if (header.device if header else result.device) == "emulated":
        rest.append("--device cpu")
    if not result.case.endswith(NO_CASE):
        rest += [f"--after {each}" for each in result.after]
        return " ".join([shlex.join(program()), "repro --backend", result.backend, *rest, result.case])
    # Without a case to name, planning the mode again shows the failure.
    if header and header.tier != "smoke":
        rest.append(f"{'--profile' if header.profile else '--tier'} {header.tier}")
    mode = ["--mode", result.mode] if result.mode else []
    return " ".join([shlex.join(program()), "run --backend", result.backend, *mode, *rest])
