"""Gives each field bug a case of smoke or core that catches it, after the cases of the tiers have changed.

python ci/field_bug_cases.py --jobs 2
python ci/field_bug_cases.py --most 400 FieldNameOfBug ...
python ci/field_bug_cases.py --check

A bug whose case is still one of its tier, and is still caught by its check, stays. For each other one the cases of its
mode are tried, those first that are most like the old one, until one is caught by the bug's check and passed by its
parent; its id replaces the old one in the bug's file. Bugs that none of these cases catches are printed.
``--check`` only asks whether each case is still one of its tier. Exit code 1 if one is not; nothing is changed.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Options, Request
from attn_testkit_corpus.audit import Settings
from attn_testkit_corpus.audit.tasks import _run_bug, _run_healthy
from attn_testkit_corpus.audit.verdicts import Task
from attn_testkit_corpus.faults.catalogue import CorpusEntry, field_bugs_in

FOLDER = Path(__file__).parents[1] / "packages" / "corpus" / "tests" / "field_bugs"
SETTINGS = Settings(device="cpu")


@lru_cache
def bugs() -> Mapping[str, CorpusEntry]:
    """Every field bug, by its slug."""
    return {bug.slug: bug for bug in field_bugs_in(str(FOLDER))}


@lru_cache(maxsize=64)
def cases_of(declared: Capabilities, mode: ForwardMode, execution: str) -> tuple[str, ...]:
    """Ids of a plan for any backend with these capabilities, smoke first."""
    found: dict[str, None] = {}
    for tier in ("smoke", "core"):
        request = Request((Candidate("any:Backend"),), (mode.value,), (execution,), tier=tier, device="cpu")
        found |= dict.fromkeys(item.case for item in plan_run(request, lambda _: declared).items)
    return tuple(found)


def unlike(case: Case, old: Case) -> float:
    """Number of values in which a case differs from the old one; lengths by how much."""
    values, others = case.values, old.values
    found = sum(value != others[name] for name, value in values.items() if name not in ("prefixes", "new"))
    longest = (max(each.prefixes) + 1 for each in (case, old))
    more, less = sorted(longest, reverse=True)
    most, fewest = sorted((case.most_new, old.most_new), reverse=True)
    return found + (case.variants != old.variants) + min(3.0, more / less - 1) + min(2.0, most / max(1, fewest) - 1)


def candidates(bug: CorpusEntry, most: int) -> Iterator[str]:
    """Cases to try, the most promising first."""
    old = parse_case(bug.case_of_tier)
    ids = cases_of(bug.backend.capabilities, old.mode, bug.executions[0].value)
    if bug.case_of_tier in ids:
        yield bug.case_of_tier
    yield from sorted(ids, key=lambda each: unlike(parse_case(each), old))[:most]


def found(bug: CorpusEntry, most: int) -> str:
    """Id of the first case that shows the bug and passes without it; empty if there is none."""
    quick, runner = (Runner(Options(in_process=True, diagnose=each)) for each in ("none", "all"))
    for case in dict.fromkeys(candidates(bug, most)):
        each = replace(bug, case=case)
        # Diagnosis can change which check is named, but not whether one fails; without it a case is ten times faster.
        if _run_bug(each, SETTINGS, quick).caught and _run_bug(each, SETTINGS, runner).first == bug.checks[0]:
            task = Task("control", bug.slug, bug.modes[0].value, bug.executions[0].value)
            if not _run_healthy(each, task, SETTINGS, runner).alarms:
                return case
    return ""


def is_of_its_tier(slug: str) -> bool:
    """True if a plan for the bug's capabilities has its case."""
    bug = bugs()[slug]
    mode = parse_case(bug.case_of_tier).mode
    return bug.case_of_tier in cases_of(bug.backend.capabilities, mode, bug.executions[0].value)


def new_case(slug: str, most: int) -> tuple[str, str] | None:
    """(old id, new id) of a bug if another case shows it now; the new one is empty if none of those tried does."""
    bug = bugs()[slug]
    if bug.case != bug.case_of_tier and is_of_its_tier(slug):
        return None
    try:
        new = found(bug, most)
    except Exception as error:  # one bug is not to hide the others
        print(f"{slug}: {type(error).__name__}: {error}", flush=True)
        return None
    if new == bug.case_of_tier:
        return None
    print(f"{slug}: {new or 'NOT CAUGHT, was ' + bug.case_of_tier}", flush=True)
    return bug.case_of_tier, new


def rewritten(text: str, name: str, old: str, new: str) -> str:
    """Text of a file in which the decorators of one class have another id, which may be written in pieces. Raises
    ``ValueError`` if none says the old one."""
    at = re.search(rf"^class {name}\b", text, re.M)
    if at is None:
        raise ValueError(f"no class {name}")
    start = text.rfind("\n\n\n", 0, at.start())
    changed, count = re.subn(r'(?:"\s+")?'.join(map(re.escape, old)), new, text[start : at.start()])
    if not count:
        raise ValueError(f"{name} does not say {old}")
    return text[:start] + changed + text[at.start() :]


def main() -> None:
    """Look for the cases, file by file."""
    parser = argparse.ArgumentParser(description="Field bugs get a case of a tier that catches them.")
    parser.add_argument("names", nargs="*", help="names of bugs; all by default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, default=60, help="cases that are tried for each bug")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a case is of no tier any more")
    wanted = parser.parse_args()
    slugs = [slug for slug, bug in bugs().items() if not wanted.names or bug.backend.__name__ in wanted.names]
    with ProcessPoolExecutor(wanted.jobs) as pool:
        if wanted.check:
            lost = [slug for slug, kept in zip(slugs, pool.map(is_of_its_tier, slugs), strict=True) if not kept]
            sys.exit("\n".join(f"{slug}: no case of smoke or core" for slug in lost) or None)
        for slug, changed in zip(slugs, pool.map(new_case, slugs, repeat(wanted.most)), strict=True):
            if changed is not None and changed[1]:
                backend = bugs()[slug].backend
                path = Path(inspect.getfile(backend))
                path.write_text(rewritten(path.read_text(), backend.__name__, *changed))


if __name__ == "__main__":
    main()
