"""Mutation test of the kit itself: it lists mutants that no test notices.

    python ci/mutants.py --list --only attn_testkit/checks
    python ci/mutants.py --sample 40
    python ci/mutants.py --sample 240 --jobs 16 --minutes 8 --json mutants.json

A mutant is the kit with one small change: a moved boundary, a dropped term, an inverted condition. The first test that
fails kills it; some tests run faults that must be caught and healthy backends that must pass. A survivor is a line that
could be wrong without any test failing: it needs a test, or an entry in ci/mutants_equivalent.toml with the reason why
the difference cannot be seen. ci/mutants.toml lists what is mutated, and the tests for it.

An interrupted run can be continued: verdicts stay in a journal (--journal), and are valid until the kit or a test
changes. Nothing is written into the tree: a process that tests a mutant imports its text instead of the module's, and
so does every process that it starts.

Exit code 0 when no mutant survived, 1 when one did, 2 interrupted or out of time, 3 when a test fails without a mutant,
4 wrong usage.

Why no library: cosmic-ray writes each mutant into the tree and starts a fresh interpreter for it, which imports torch
for longer than most mutants live here; it has no operator for statements, elements or slices. mutmut mutates only the
bodies of functions, but much of this kit is in tables at the top of modules; it wraps each function, which would show
in tracebacks that tests compare; its constants only ever grow by one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mutation.config import Config, ConfigError, Stage, load_config
from mutation.judge import Judge, Trial, Verdict
from mutation.operators import Mutant, read_equivalents, read_mutants
from mutation.records import Journal

HERE = Path(__file__).resolve().parent
SURVIVED, KILLED, TIMED_OUT, EQUIVALENT = "survived", "killed", "timed out", "equivalent"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutants, and run none")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="a file or folder; repeatable")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only those that survived in this earlier --json")
    parser.add_argument(
        "--sample", type=_at_least_one, metavar="N", help="only N random ones, spread over all packages"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of --sample; default 0")
    parser.add_argument("--jobs", type=_at_least_one, default=1, metavar="N", help="mutants at a time; default 1")
    parser.add_argument(
        "--limit",
        type=float,
        default=30.0,
        metavar="S",
        dest="limit_s",
        help="least seconds per stage; at least five times what it takes without a mutant",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after M minutes, and report")
    parser.add_argument(
        "--without", action="append", default=[], metavar="TEST", help="a test that cannot run here; repeatable"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="default build/mutants.jsonl")
    parser.add_argument("--config", type=Path, default=HERE / "mutants.toml", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--equivalent", type=Path, metavar="FILE", help="default mutants_equivalent.toml next to --config"
    )
    return parser  # fmt: skip


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def room(path: str) -> str:
    """The folder of a file, by which scores are counted."""
    return str(PurePosixPath(path).parent)


def lot(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Random mutants, spread over all folders, in an order that does not change if others come or go."""
    rooms: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.id}".encode()).digest()):
        rooms.setdefault(room(mutant.path), []).append(mutant)
    turns = [[(turn, name) for turn in range(len(inside))] for name, inside in sorted(rooms.items())]
    return [rooms[name][turn] for turn, name in sorted(pair for turn in turns for pair in turn)[:count]]


def survivors_of(file: Path) -> set[str]:
    """Ids that survived in an earlier run. Raises ``ConfigError`` for a file that is not of ``--json``."""
    try:
        return {row["id"] for row in json.loads(file.read_text())["mutants"] if row["status"] == SURVIVED}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


@dataclass(frozen=True)
class Report:
    """The results of a run."""

    config: Config
    mutants: Sequence[Mutant]
    verdicts: dict[str, Verdict]
    """Id -> verdict, for all that have one."""

    def counts(self, name: str = "") -> dict[str, int]:
        """Status -> number of mutants, in one folder or in all."""
        kept = [
            self.verdicts[m.id].status for m in self.mutants if m.id in self.verdicts and name in ("", room(m.path))
        ]
        return {status: kept.count(status) for status in (KILLED, TIMED_OUT, SURVIVED, EQUIVALENT)}

    @staticmethod
    def score(counts: dict[str, int]) -> float:
        """Part of non-equivalent mutants that were killed or timed out; 1 if there are none."""
        noticed = counts[KILLED] + counts[TIMED_OUT]
        return noticed / (noticed + counts[SURVIVED]) if noticed + counts[SURVIVED] else 1.0

    @property
    def survivors(self) -> list[Mutant]:
        """Mutants that no test noticed."""
        return [m for m in self.mutants if m.id in self.verdicts and self.verdicts[m.id].status == SURVIVED]

    def diff(self, mutant: Mutant) -> str:
        """Unified diff of a mutant."""
        return mutant.diff((self.config.root / mutant.path).read_bytes())

    def text(self) -> str:
        """The report as text for a terminal."""
        lines = []
        for mutant in self.survivors:
            lines.append(f"\nsurvived {mutant.path}:{mutant.line} {mutant.operator}, in {mutant.scope or 'the module'}")
            lines += self.diff(mutant).splitlines()[2:]
        lines.append(f"\n{'room':40} {'killed':>9} {TIMED_OUT:>9} {'survived':>9} {'equivalent':>10}  score")
        for name in [*sorted({room(m.path) for m in self.mutants}), ""]:
            counts = self.counts(name)
            columns = " ".join(f"{counts[s]:9}" for s in (KILLED, TIMED_OUT, SURVIVED)) + f" {counts[EQUIVALENT]:10}"
            lines.append(f"{name or 'all':40} {columns}  {self.score(counts):5.3f}")
        return "\n".join(lines)

    def plain(self) -> dict[str, object]:
        """The report as plain values for JSON."""
        rooms = {name: self.counts(name) for name in sorted({room(m.path) for m in self.mutants})}
        rows = [
            {"id": m.id, "path": m.path, "line": m.line, "scope": m.scope, "operator": m.operator, "was": m.was,
             "becomes": m.becomes, "status": v.status, "by": v.by, "seconds": round(v.seconds, 2),
             "diff": self.diff(m) if v.status == SURVIVED else ""}
            for m in self.mutants if (v := self.verdicts.get(m.id))
        ]  # fmt: skip
        scores = {name: round(self.score(counts), 4) for name, counts in rooms.items()}
        return {"score": round(self.score(self.counts()), 4), "scores": scores, "rooms": rooms, "mutants": rows}


def choose(args: argparse.Namespace, config: Config) -> tuple[list[Mutant], dict[str, str]]:
    """Select the requested mutants; also return id -> reason of those that are named equivalent.

    Raises ``ConfigError`` for paths that hold none, and for an entry that matches none.
    """
    files = list(dict.fromkeys(config.files(args.only)))
    mutants = [mutant for file in files for mutant in read_mutants(config.root, file, config.unseen)]
    if not mutants:
        raise ConfigError(f"nothing to mutate in {', '.join(args.only or config.paths)}")
    listed = args.equivalent or args.config.parent / "mutants_equivalent.toml"
    # An entry of a file that no run mutates is an error: it is about code that no longer exists.
    elsewhere = {str(file.relative_to(config.root)) for file in {*config.files()} - {*files}}
    reasons = {}
    if listed.exists() or args.equivalent:
        try:
            reasons = read_equivalents(listed, mutants, elsewhere.__contains__)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if args.again:
        again = survivors_of(args.again)
        mutants = [mutant for mutant in mutants if mutant.id in again]
    return (mutants if args.sample is None else lot(mutants, args.sample, args.seed)), reasons


def judge(args: argparse.Namespace, config: Config, mutants: Sequence[Mutant], journal: Journal) -> int:
    """Run mutants that the journal lacks; return 0, 2 if time is up, or 3 if a stage fails without a mutant."""
    started = time.monotonic()
    until = float("inf") if args.minutes is None else started + 60 * args.minutes
    stages: dict[str, list[Stage]] = {path: config.stages(path) for path in dict.fromkeys(m.path for m in mutants)}
    waiting = [mutant for mutant in mutants if mutant.id not in journal.verdicts]
    if not waiting:
        return 0
    jury = Judge(config, args.limit_s, args.without)
    jury.seconds.update(journal.stages)
    unknown = dict.fromkeys(stage for mutant in waiting for stage in stages[mutant.path])
    for stage, verdict in jury.baselines([stage for stage in unknown if stage.name not in journal.stages], args.jobs):
        if verdict.status != SURVIVED:
            print(f"{verdict.output}\nfails without a mutant: {stage.name} ({verdict.by})", file=sys.stderr)
            return 3
        journal.passed(stage.name, verdict.seconds)
        print(f"passes without a mutant in {verdict.seconds:.0f} s: {stage.name}", file=sys.stderr)

    def trials() -> Iterator[Trial]:
        for mutant in waiting:
            yield mutant, stages[mutant.path], journal.killers(mutant.path)

    count = 0
    for count, (mutant, verdict) in enumerate(jury.run(trials(), args.jobs, until), start=1):
        assert mutant
        journal.add(mutant, verdict)
        done = f"{count}/{len(waiting)} {time.monotonic() - started:.0f} s"
        what = f"{verdict.status:9} {mutant.path}:{mutant.line} {mutant.operator}"
        print(f"{done}  {what}  {verdict.by}"[:150], file=sys.stderr)
    return 0 if count == len(waiting) else 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    try:
        args = arguments().parse_args(argv)
    except SystemExit as end:
        return 4 if end.code else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = load_config(args.config)
        mutants, reasons = choose(args, config)
        if args.list:
            for mutant in mutants:
                print(
                    f"{mutant.id} {mutant.path}:{mutant.line} {mutant.operator}: {mutant.was!r} -> {mutant.becomes!r}"
                )
            print(f"{len(mutants)} mutants, {sum(m.id in reasons for m in mutants)} named equivalent", file=sys.stderr)
            return 0
        journal = Journal(args.journal or config.root / "build" / "mutants.jsonl", config.fingerprint())
        unfinished = ""
        try:
            code = judge(args, config, [m for m in mutants if m.id not in reasons], journal)
            if code == 3:
                return code
            unfinished = "time is up" if code else ""
        except KeyboardInterrupt:
            unfinished = "interrupted"
    except ConfigError as error:
        print(f"ci/mutants.py: {error}", file=sys.stderr)
        return 4
    verdicts = journal.verdicts | {key: Verdict(EQUIVALENT, reason) for key, reason in reasons.items()}
    report = Report(config, mutants, verdicts)
    print(report.text())
    if args.json:
        args.json.write_text(json.dumps(report.plain(), indent=1) + "\n")
    if unfinished:
        print(f"{unfinished}: the same command goes on from here", file=sys.stderr)
        return 2
    return 1 if report.survivors else 0


if __name__ == "__main__":
    sys.exit(main())
