"""What is known of each bug of this folder: where it was met, and how it is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_testkit.contract import AttentionBackend

MADE_LATER = "none: made after the set, for what it had left open"


@dataclass(frozen=True)
class Bug:
    backend: type[AttentionBackend]
    threads: str
    """Public threads that report it."""
    case: str
    check: str
    execution: str
    of_a_tier: str
    """The case of smoke or core that catches it: ``case``, or a longer one."""


BUGS: list[Bug] = []
"""In the order of their definition."""


def bug(
    threads: str, case: str, check: str = "matches-oracle", execution: str = "eager", of_a_tier: str = ""
) -> Callable[[type[AttentionBackend]], type[AttentionBackend]]:
    """Enters a class into the table: ``case`` fails on it by ``check``.

    ``of_a_tier``: the case of core that does so too, where ``case`` is a shorter one of no tier.
    """

    def enter(backend: type[AttentionBackend]) -> type[AttentionBackend]:
        BUGS.append(Bug(backend, threads, case, check, execution, of_a_tier or case))
        return backend

    return enter
