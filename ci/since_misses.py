"""Bugs that ``run --since`` would have missed: ``python ci/since_misses.py -b torch_native --mutants 40 --faults 20``.

The map is made of the healthy backend. A mutant changes one place of its file, and a fault overrides methods of a
healthy parent, which stands for an edit of these methods. Of each, first the case-runs that ``--since`` selects run,
until one fails, and then all others. A bug that only one of the others notices is missed. Bugs that no case-run of the
tier notices are not counted. Exit code 1 if more than ``--most-missed`` percent are missed.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from attn_testkit.cli.since import MOST, map_of, present_units
from attn_testkit.environment import resolve
from attn_testkit.registry import UsageError, load_backend
from attn_testkit.results.case_result import BAD, Status
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.hygiene.other_sources import OtherSources
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.code_units import units_of
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.reach import ReachMap, Since, Units, touched
from attn_testkit.running.planning.request import Item, Options, Plan, Request
from attn_testkit.running.processes.forking import begin_forking
from attn_testkit_corpus.faults.catalogue import all_faults
from attn_testkit_corpus.mutants.baseline import MEMORY
from attn_testkit_corpus.mutants.operators import mutants_of
from attn_testkit_corpus.mutants.specials import ALL, UNSEEN, is_capability


@dataclass(frozen=True)
class Bug:
    """A changed backend, and its files before and after the change."""

    name: str
    candidate: Candidate
    before: Units
    now: Units


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-b", "--backend", action="append", default=[])
    parser.add_argument("--tier", default="smoke")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mutants", type=int, default=40, help="of each backend")
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--at-most", type=int, default=MOST)
    parser.add_argument("--most-missed", type=float, default=1.0, metavar="PERCENT")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    resolve(asked.device).prepare_process()
    begin_forking()
    draw = random.Random(asked.seed)
    caught = missed = share = tried = 0.0
    for spec in [*asked.backend, *(("faults",) if asked.faults else ())]:
        for base, bugs in _mutants(spec, asked, draw) if spec != "faults" else _faults(asked, draw):
            for bug in bugs:
                found = _tried(base, bug, asked)
                tried += 1
                share += found.share
                caught += found.by == "selected"
                missed += found.by == "others"
                print(f"{found.by or 'unnoticed':9} {found.share:4.0%} selected  {bug.name}", flush=True)
    noticed = caught + missed
    rate = 100 * missed / noticed if noticed else 0.0
    mean = share / tried if tried else 0.0
    print(
        f"{noticed:.0f} of {tried:.0f} bugs noticed, {missed:.0f} missed: {rate:.1f}%; {mean:.0%} of case-runs selected"
    )
    return int(rate > asked.most_missed)


@dataclass(frozen=True)
class Base:
    """A healthy backend with its plan and its map."""

    plan: Plan
    reach: ReachMap
    now: Units


@dataclass(frozen=True)
class Outcome:
    """``by``: ``selected``, ``others`` or empty. ``share``: part of all case-runs that is selected."""

    by: str
    share: float


def _base(spec: str, asked: argparse.Namespace) -> Base:
    """Run the healthy backend, with notes."""
    with tempfile.TemporaryDirectory(prefix="attn-testkit-map-") as folder, closing(_runner(asked)) as runner:
        candidate = Candidate(spec, sources=OtherSources(notes=folder, functions=True))
        plan = runner.plan(Request(backends=(candidate,), tier=asked.tier, device=asked.device))
        results = list(runner.run(replace(plan, explains="nothing"), plan.items))
        passed = {(r.execution, r.case): r.checks for r in results if r.status is Status.PASSED}
        reach = map_of(Path(folder), passed)
    if reach is None:
        raise UsageError(f"nothing of {spec} passed")
    return Base(plan, reach, {file: present_units(Path(reach.root), file) for file in reach.digests})


def _runner(asked: argparse.Namespace) -> Runner:
    return Runner(Options(jobs=asked.jobs, asks_afresh=False, diagnose="none", timeout_s=60.0))


def _mutants(spec: str, asked: argparse.Namespace, draw: random.Random) -> Iterator[tuple[Base, list[Bug]]]:
    base = _base(spec, asked)
    module = load_backend(spec).__module__
    path = inspect.getfile(sys.modules[module])
    file = str(Path(path).relative_to(base.reach.root))
    source = Path(path).read_bytes()
    mutants = mutants_of(source, f"{module.replace('.', '/')}.py", UNSEEN, ALL, is_capability)
    with tempfile.TemporaryDirectory(prefix="attn-testkit-mutants-") as folder:
        bugs = []
        for mutant in draw.sample(mutants, min(asked.mutants, len(mutants))):
            text = mutant.apply(source)
            copy = Path(folder, f"{mutant.id}.py")
            copy.write_bytes(text)
            sources = OtherSources(((module, str(copy)),), memory=MEMORY)
            name = f"{mutant.path}:{mutant.line} {mutant.operator}: {mutant.was!r} becomes {mutant.becomes!r}"
            bugs.append(
                Bug(name, Candidate(spec, sources=sources), {file: base.now[file]}, {**base.now, file: units_of(text)})
            )
        yield base, bugs


def _faults(asked: argparse.Namespace, draw: random.Random) -> Iterator[tuple[Base, list[Bug]]]:
    """Faults with the capabilities of a parent that has a file of its own, by parent."""
    of_parent: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {}
    for entry in all_faults():
        (parent, *_) = entry.backend.__bases__
        methods = [name for name, found in vars(entry.backend).items() if callable(getattr(found, "__func__", found))]
        places = [where for name in methods if (where := _defined(parent, name))]
        if places and len(places) == len(methods) and parent.capabilities == entry.backend.capabilities:
            found = of_parent.setdefault(f"{parent.__module__}:{parent.__qualname__}", [])
            found.append((entry.slug, entry.spec, places))
    chosen = draw.sample([(parent, fault) for parent, found in of_parent.items() for fault in found], asked.faults)
    for spec in dict.fromkeys(parent for parent, _ in chosen):
        base = _base(spec, asked)
        bugs = []
        for slug, fault, places in (fault for parent, fault in chosen if parent == spec):
            before, now = {}, dict(base.now)
            for path, name in places:
                file = str(Path(path).relative_to(base.reach.root))
                if name in base.now.get(file, {}):
                    before[file] = base.now[file]
                    now[file] = {**now[file], name: replace(base.now[file][name], digest="changed")}
            if before:
                bugs.append(Bug(slug, Candidate(fault), before, now))
        yield base, bugs


def _defined(parent: type, name: str) -> tuple[str, str] | None:
    """File and qualified name of the method that a class inherits; None if it is not one."""
    found = inspect.unwrap(getattr(parent, name)) if callable(getattr(parent, name, None)) else None
    code = getattr(found, "__code__", None)
    return (code.co_filename, found.__qualname__) if found and code else None


def _tried(base: Base, bug: Bug, asked: argparse.Namespace) -> Outcome:
    found = touched(base.reach, bug.before, bug.now)
    healthy = base.plan.candidates[0].spec
    since = Since(
        frozenset((healthy, *name) for name in found.runs(base.reach)),
        {(healthy, *name): run.checks for name, run in base.reach.runs.items()},
        asked.at_most,
    )
    request = Request(backends=(healthy,), tier=asked.tier, device=asked.device, since=since)
    with closing(_runner(asked)) as runner:
        try:
            declared = runner.declared(replace(base.plan.candidates[0], sources=OtherSources()), asked.device)
            runner.declared(bug.candidate, asked.device)
        except UsageError:
            return Outcome("selected", 1.0)  # the import fails, so any run notices it
        selected = {(item.execution, item.case) for item in plan_run(request, lambda _: declared).since}
        spec = bug.candidate.spec
        items = [replace(item, backend=spec, probe=False) for item in base.plan.items]
        first = [item for item in items if (item.execution, item.case) in selected]
        share = len(first) / len(items)
        plan = replace(base.plan, candidates=(bug.candidate,), explains="nothing", since=())
        plan = replace(plan, header=replace(plan.header, sources={}))
        if _fails(runner, plan, first):
            return Outcome("selected", share)
    with closing(_runner(asked)) as runner:
        rest = [item for item in items if item not in first]
        return Outcome("others" if rest and _fails(runner, plan, rest) else "", share)


def _fails(runner: Runner, plan: Plan, items: Sequence[Item]) -> bool:
    with closing(runner.run(plan, items)) as results:
        return any(result.status in BAD for result in results)


if __name__ == "__main__":
    sys.exit(main())
