"""Records what the kit plans, finds and catches, and compares two records: a guard for changes of form.

    python ci/guard.py record g1 g2 --out before.json -j 8
    python ci/guard.py record g3 --out faults.json -j 32 --only 'qlens-.*'
    python ci/guard.py compare before.json after.json

g1  plans of the registered backends in each tier: ids, derived parameters, digests of schedules and data (not in full)
g2  smoke of the registered backends: status, checks and first lines of each case-run
g3  the audit: each seeded bug and field bug with the checks that caught it, each known-good and adversarial backend
g4  mutants of the kit that no test notices, for each package: a sample

Everything runs on a CPU, and prints its progress. ``--only`` is a regular expression for names of backends (g1, g2), of
entries of the corpus (g3), or for paths of a comparison. Exit code 1 if two records differ, 2 if one came to nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import entry_points
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIELD_BUGS = HERE.parent / "packages" / "corpus" / "tests" / "field_bugs"
TIERS = ("smoke", "core", "full")
Record = dict[str, Any]


def plan_of(backend: str, tier: str) -> Record:
    """What a tier plans for a registered backend. All names of the kit that g1 needs are imported here."""
    from attn_testkit.cases.case import parse_case
    from attn_testkit.cases.derived_parameters import chosen
    from attn_testkit.registry import load_backend
    from attn_testkit.running.planning.plan import plan_run
    from attn_testkit.running.planning.request import Request
    from attn_testkit.steps.data import make_step_data
    from attn_testkit.steps.digest import digest, digest_of_schedule
    from attn_testkit.steps.numerics import numerics_of
    from attn_testkit.steps.schedule import make_schedule

    declared = load_backend(backend).capabilities
    plan = plan_run(Request((backend,), tier=tier, device="cpu"), lambda _: declared)
    ids: dict[str, list[str]] = {}
    for item in plan.items:
        ids.setdefault(f"{item.mode} {item.execution}", []).append(item.case + " probe" * item.probe)
    preset = [f"{row.mode} {row.execution} {row.case}: {row.status} {row.reason}" for row in plan.preset]
    not_covered = [text for texts in plan.header.not_covered.values() for text in texts]
    found: Record = {"planned": ids, "preset": preset, "not covered": not_covered}
    cases: Record = {}
    for case_id in dict.fromkeys(item.case for item in plan.items):
        case = parse_case(case_id)
        schedule = make_schedule(case, numerics_of(case, declared))
        facts = {
            "derived": {each.name: each.values.index(value) for each, value in chosen(case) if value},
            "schedule": digest_of_schedule(schedule),
        }
        if tier != "full":
            facts["data"] = digest([make_step_data(schedule, step) for step in schedule.steps])
        cases[case_id] = facts
    # Ids of the full tier are tens of thousands: one digest for all that they stand for.
    return found | ({"cases": digest(cases)} if tier == "full" else {"cases": cases})


def names_of_corpus(folder: str) -> list[str]:
    """Names of everything that an audit runs: of the corpus, or of a folder of field bugs."""
    from attn_testkit_corpus.faults import all_controls, all_faults
    from attn_testkit_corpus.faults.adversarial import all_adversarial
    from attn_testkit_corpus.faults.catalogue import field_bugs_in

    entries = field_bugs_in(folder) if folder else (*all_faults(), *all_controls(), *all_adversarial())
    return [entry.slug for entry in entries]


def registered() -> list[str]:
    """Names of the registered backends."""
    return sorted({point.name for point in entry_points(group="attn_testkit.backends")})


def g1(asked: argparse.Namespace) -> Record:
    """Plans of every backend and tier, each in a process of a pool."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    backends = [name for name in registered() if re.search(asked.only, name)]
    found: Record = {backend: {} for backend in backends}
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        tasks = {pool.submit(plan_of, name, tier): (name, tier) for tier in reversed(TIERS) for name in backends}
        for count, task in enumerate(as_completed(tasks), start=1):
            backend, tier = tasks[task]
            found[backend][tier] = task.result()
            print(f"g1: {count} of {len(tasks)}, {backend} {tier}", file=sys.stderr, flush=True)
    return {backend: {tier: found[backend][tier] for tier in TIERS} for backend in backends}


def g2(asked: argparse.Namespace) -> Record:
    """Smoke of every backend. All failures are explained: which one is the first of its kind depends on the jobs."""
    backends = [f"--backend={name}" for name in registered() if re.search(asked.only, name)]
    run = result_of(kit("run", *backends, "--device=cpu", "--diagnose=all", f"--jobs={asked.jobs}"), "--json")
    found: Record = {}
    for row in sorted(run["results"], key=lambda row: (row["mode"], row["execution"], row["case"])):
        lines = [f"{finding['check']}: {finding['message'].partition(chr(10))[0]}" for finding in row["findings"]]
        facts = {"status": row["status"], "reason": row["reason"], "checks": sorted(row["checks"]), "says": lines}
        name = f"{row['mode']} {row['execution']} {row['case']}"
        found.setdefault(row["backend"], {})[name] = {key: value for key, value in facts.items() if value}
    return found


def g3(asked: argparse.Namespace) -> Record:
    """The audit of the corpus, and that of the field bugs."""
    found: Record = {}
    for part, folder in (("corpus", ""), ("field bugs", str(FIELD_BUGS))):
        options = ["--device=cpu", f"--jobs={asked.jobs}"] + [f"--field-bugs={folder}"] * bool(folder)
        if asked.only:
            names = [name for name in names_of_corpus(folder) if re.search(asked.only, name)]
            if not names:
                continue
            options += [f"--fault={name}" for name in names]
        audit = result_of(kit("audit", *options), "--json")
        caught, known_good = {}, {}
        for row in audit["faults"]:
            says = row["text"].partition("\n")[0].partition(": ")[2] or row["not_run"]
            caught[row["slug"]] = {key: row[key] for key in ("caught_by", "case", "execution")} | {"says": says}
        for row in audit["controls"]:
            name = f"{row['name']} {row['mode']} {row['execution']}"
            known_good[name] = {key: row[key] for key in ("case_runs", "alarms", "texts")}
        adversarial = {row["slug"]: [row["exit_code"], row["honest_exit_code"]] for row in audit["adversarial"]}
        found[part] = {"caught": caught, "known-good": known_good, "adversarial": adversarial}
        found[part]["idle checks"] = audit["idle_checks"]
    return found


def g4(asked: argparse.Namespace) -> Record:
    """Mutants of the kit that are killed and that survive, by package."""
    options = [f"--sample={asked.sample}", f"--seed={asked.seed}", f"--jobs={asked.jobs}"]
    mutants = result_of([sys.executable, str(HERE / "mutants.py"), *options], "--json")
    alive = [row for row in mutants["mutants"] if row["status"] == "survived"]
    named = [f"{row['path']} {row['scope']}: {row['was']} -> {row['becomes']}" for row in alive]
    return {"packages": mutants["rooms"], "survived": sorted(named)}


GUARDS: dict[str, Callable[[argparse.Namespace], Record]] = {"g1": g1, "g2": g2, "g3": g3, "g4": g4}


def kit(*words: str) -> list[str]:
    """A command of the kit."""
    return [sys.executable, "-m", "attn_testkit", *words]


def result_of(command: Sequence[str], option: str) -> Any:
    """What a command writes into the file of this option; its progress goes to stderr. Failures that it found are no
    reason to stop; exits with 2 where it writes nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        done = subprocess.run([*command, option, str(file)], stdout=sys.stderr, check=False)
        if not file.exists():
            print(f"ci/guard.py: exit code {done.returncode} of {' '.join(command)}"[:500], file=sys.stderr)
            sys.exit(2)
        return json.loads(file.read_text())


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of everything that differs: values that changed, and what only one of the two has."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            inside = f"{path} / {key}".removeprefix(" / ")
            if key not in after:
                yield inside, "is missing"
            elif key not in before:
                yield inside, "is new"
            else:
                yield from differences(before[key], after[key], inside)
    elif isinstance(before, list) and isinstance(after, list):
        less, more = (Counter(map(str, one)) for one in (before, after))
        yield from ((path, f"lost {each}") for each in (less - more).elements())
        yield from ((path, f"gained {each}") for each in (more - less).elements())
        if less == more and before != after:
            yield path, "is in another order"
    elif before != after or type(before) is not type(after):
        yield path, f"{before} -> {after}"


def record(asked: argparse.Namespace) -> int:
    """Record the guards asked for; the file is written after each."""
    found: Record = {}
    for name in asked.guards:
        found[name] = GUARDS[name](asked)
        asked.out.write_text(json.dumps(found, indent=0) + "\n")
    return 0


def compare(asked: argparse.Namespace) -> int:
    """Print what differs, and return 1 if anything does."""
    before, after = (json.loads(file.read_text()) for file in (asked.before, asked.after))
    found = [(path, text) for path, text in differences(before, after) if re.search(asked.only, path)]
    for path, text in found[: asked.most]:
        print(f"{path}: {text}")
    if found:
        places = Counter(" / ".join(path.split(" / ")[:3]) for path, _ in found)
        print(
            f"{len(found)} differences", *(f"  {count} in {place}" for place, count in places.most_common()), sep="\n"
        )
    return 1 if found else 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("record", help="record guards into a file")
    make.add_argument("guards", nargs="+", choices=GUARDS, metavar="GUARD", help="g1, g2, g3, g4")
    make.add_argument("--out", type=Path, required=True, metavar="FILE")
    make.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="default: every core")
    make.add_argument("--only", default="", metavar="REGEX", help="only names that it finds a match in")
    make.add_argument("--sample", type=int, default=400, metavar="N", help="g4: mutants; default 400")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="g4: of the sample; default 0")
    make.set_defaults(does=record)
    two = commands.add_parser("compare", help="print what differs between two records")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    two.add_argument("--only", default="", metavar="REGEX", help="only paths that it finds a match in")
    two.add_argument("--most", type=int, default=200, metavar="N", help="lines to print before the counts; default 200")
    two.set_defaults(does=compare)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    asked = arguments().parse_args(argv)
    with contextlib.suppress(BrokenPipeError):
        return int(asked.does(asked))
    return 1


if __name__ == "__main__":
    sys.exit(main())
