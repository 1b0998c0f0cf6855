"""First lines of failures of faults drawn at random: do they name what is really wrong?

    python ci/first_lines.py --sample 40 --seed 1
    python ci/first_lines.py --fault 'plan-*' --whole

Each drawn fault runs on the CPU until the first case that catches it. Printed are its name, what is wrong with it, the
first line of the failure and its first two hints; with ``--whole`` the whole failure. A reader must compare them:
nothing is evaluated here, and the exit code is 1 only if a fault was not caught.
"""

from __future__ import annotations

import fnmatch
import random
import sys

import click

from attn_testkit_corpus.audit import Settings, audit
from attn_testkit_corpus.audit.verdicts import FaultVerdict, Verdict, caught_before
from attn_testkit_corpus.faults import all_faults

_HINTS = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--sample", type=click.IntRange(1), default=40, show_default=True, help="Faults to draw.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draw; cases are those of an audit.")
@click.option("--fault", "globs", multiple=True, metavar="GLOB", help="These instead of a draw; repeatable.")
@click.option("--last", type=click.Path(), metavar="FILE", help="A file of `audit --json`: its case is tried first.")
@click.option("--whole", is_flag=True, help="Print the whole text of each failure.")
def first_lines(sample: int, seed: int, globs: tuple[str, ...], last: str | None, whole: bool) -> None:
    """Print the first lines of failures of faults."""
    slugs = drawn(sample, seed, globs)
    if not slugs:
        raise click.BadParameter(f"no fault matches {', '.join(globs)}", param_hint="--fault")
    mechanisms = {fault.slug: fault.about for fault in all_faults()}
    missed: list[str] = []

    def see(verdict: Verdict, done: int, total: int) -> None:
        assert isinstance(verdict, FaultVerdict), "only faults are requested"
        click.echo(f"[{done} of {total}] {verdict.slug}: {mechanisms[verdict.slug]}")
        lines = verdict.text.splitlines() if whole else read_first(verdict.text)
        click.echo("\n".join(f"    {line}" for line in lines or ["NOT CAUGHT"]) + "\n")
        if not verdict.caught:
            missed.append(verdict.slug)

    audit(Settings(device="cpu", faults=tuple(slugs), jobs=1, caught_before=caught_before(last) if last else {}), see)
    if missed:
        sys.exit(1)


def drawn(sample: int, seed: int, globs: tuple[str, ...]) -> list[str]:
    """Names of faults: those that ``globs`` match, or as many as requested, the same for the same seed."""
    names = sorted(fault.slug for fault in all_faults())
    if globs:
        return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    return sorted(random.Random(seed).sample(names, min(sample, len(names))))


def read_first(text: str) -> list[str]:
    """The first line of a failure with the check that it fails, and the first two of its hints, each in one line."""
    first, *rest = text.splitlines() or [""]
    rows: list[tuple[str, str]] = []
    for line in rest:
        if not line.startswith("  "):
            break  # the next finding
        name, words = line[2:10].strip(), line[11:].strip()
        if name or not rows:
            rows.append((name, words))
        else:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {words}")
    check = next((words.partition(" ")[0] for name, words in rows if name == "check"), "")
    hints = [f"hint: {words}" for name, words in rows if name == "hint"]
    _, _, headline = first.partition(": ")
    return [line for line in (f"{headline} ({check})", *hints[:_HINTS]) if first]


if __name__ == "__main__":
    first_lines()
