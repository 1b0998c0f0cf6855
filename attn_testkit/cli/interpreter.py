"""``--python``: run the same command with another Python, from an environment that has a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import attn_testkit

from ..registry import UsageError
from ..results.failure_text import PYTHON_VARIABLE

_SERVERS = "`bash ci/servers.sh` in a checkout of the kit creates environments with the kit and a server"
_ASK = "import attn_testkit, attn_testkit.cli; print(attn_testkit.__version__)"


def continue_in(python: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process: ``python -m attn_testkit`` with these arguments.

    Raises ``UsageError`` for an interpreter that does not exist, lacks the kit, or has another version of it.
    """
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"--python {python}: cannot be run: {error.strerror}; {_SERVERS}") from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise UsageError(f"--python {python}: attn_testkit cannot be imported there ({last}); {_SERVERS}")
    found = asked.stdout.strip()
    here = attn_testkit.__version__
    if found != here:
        raise UsageError(
            f"--python {python}: it has attn-testkit {found}, this Python has {here}; install the same version in both"
        )
    sys.stdout.flush()
    os.environ[PYTHON_VARIABLE] = python
    os.execvp(python, [python, "-m", "attn_testkit", *arguments])
