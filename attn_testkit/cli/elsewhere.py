"""Commands of other distributions, found by entry points. If one is not installed, its commands say what to install."""

from __future__ import annotations

import importlib.metadata as metadata
from typing import NoReturn

import click

from ..distributions import CORPUS, SERVERS
from ..registry import UsageError

GROUP = "attn_testkit.commands"
"""Entry-point group of commands: ``audit = "pkg.module:audit"``, a ``click.Command``."""

ELSEWHERE = {"record": SERVERS, "audit": CORPUS}
"""Commands that ``attn-testkit --help`` lists if their distribution is not installed, too."""


def registered(name: str) -> click.Command | None:
    """The command that an installed distribution registers under a name, or None."""
    for point in metadata.entry_points(group=GROUP, name=name):
        command: click.Command = point.load()
        return command
    return None


def registered_names() -> list[str]:
    """Names of all commands that installed distributions register."""
    return sorted({point.name for point in metadata.entry_points(group=GROUP)})


def absent(name: str) -> click.Command:
    """The command that replaces one of ``ELSEWHERE``. It raises ``UsageError`` with what to install, also for
    --help."""

    def say(words: tuple[str, ...]) -> NoReturn:
        raise UsageError(f"`attn-testkit {name}` {ELSEWHERE[name].is_missing}")

    return click.Command(
        name,
        callback=say,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
        short_help=f"Not installed: {ELSEWHERE[name].name}.",
    )
