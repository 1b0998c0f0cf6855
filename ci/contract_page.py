"""The page of the attention backend contract, made from ``attn_testkit/results/rules.py``."""

from __future__ import annotations

import re

from attn_testkit.results.checks import CHECKS
from attn_testkit.results.rules import AREAS, RULES, VERSION, Rule
from attn_testkit_corpus.faults import all_known_bugs, thread_address

__all__ = ["contract_page"]

_BEFORE = """\
This document says what an attention backend of an LLM server must do, independent of a server and of a kernel. The
other pages describe the [interface](../reference/hooks.md) and its [tensors](../reference/forward-batch.md).

`MUST`: every backend keeps the rule, in the modes and families that it declares. `MAY`: a backend may declare it, and
then keeps it. Words in `features` are those that [cases](../reference/case-ids.md) vary to break the rule. The bugs are
public, and broke it. Failures name the rule after their check, and `attn-testkit explain RULE` prints it.

## Versions

* A minor version (1.1) adds a `MAY`, or a `MUST` for capabilities that backends could not declare before. It may make a
  `MUST` a `MAY`, and test a rule that was not tested. A backend that keeps 1.0 and declares nothing new keeps 1.1.
* A major version (2.0) adds a `MUST` for capabilities that backends already declare, makes a `MAY` a `MUST`, changes
  the meaning of a rule, or removes one. CHANGELOG.md announces such a change one minor version before.
* An id is never used again for another rule. Words may become clearer without a new version.
* Results are for the version of the kit that made them, which has one version of the contract.
"""


def contract_page() -> dict[str, str]:
    """Path in ``docs/`` of the page -> its text."""
    lines = [f"# Attention backend contract {VERSION}", "", _BEFORE]
    for area, title in AREAS.items():
        lines += [f"## {title}", ""]
        for rule in RULES:
            if rule.id.split("-")[1] == area:
                lines += _section(rule)
    return {"contract/index.md": "\n".join(lines).rstrip() + "\n"}


def _section(rule: Rule) -> list[str]:
    facts = [f"| {label} | {_linked(label, text)} |" for label, text in rule.facts]
    return [f"### {rule.id}", "", f"| {rule.level} | {rule.text} |", "|---|---|", *facts, ""]


def _linked(label: str, text: str) -> str:
    """A fact with links to the pages of its checks, and to the threads of its bugs."""
    if label == "checks":
        names = text.split(", ")
        return ", ".join(f"[`{name}`](../reference/checks/{name}.md)" if name in CHECKS else name for name in names)
    if label == "bugs":
        return _THREAD.sub(lambda found: _thread(found[0]), text)
    if label in ("declared", "features"):
        return ", ".join(f"`{word}`" for word in text.split(", "))
    return text


_THREAD = re.compile(r"[\w-]\S* (?:#\d+|[0-9a-f]{8,})")


def _thread(thread: str) -> str:
    """A thread as a link, if the address of its project is known."""
    projects = all_known_bugs().projects
    return f"[{thread}]({thread_address(thread, projects)})" if thread.split(" ")[0] in projects else thread
