"""``run --since``: the case-runs that reach changed functions, by a map that ``run --map`` keeps next to the file of
``--lf``."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ..registry import UsageError
from ..results.case_result import CaseResult, RunKey, Status
from ..results.failure_text import program
from ..running.hygiene.other_sources import OtherSources
from ..running.planning.candidate import Candidate
from ..running.planning.code_units import Unit, units_of
from ..running.planning.reach import MappedRun, Place, ReachMap, Since, Touched, changed_units, module_of, touched
from ..running.planning.request import MOST_NAMED, Item, Prepared, Request
from .choosing import only
from .last_failed import place as place_of_failed
from .last_failed import write_in_cache

F = TypeVar("F", bound=Callable[..., Any])

MOST = 300
"""Default of ``--at-most``."""
_FORMAT = "attn-testkit-reach/1"
_CODE = frozenset({".c", ".cc", ".cpp", ".cu", ".cubin", ".cuh", ".fatbin", ".h", ".hpp", ".json", ".ptx", ".so"})
"""Endings of files that code may read, and that the kit does not."""


def since_options(command: F) -> F:
    """Add the options."""
    options = [
        click.option("--map", "maps", is_flag=True, help="Note which functions each case-run reaches."),
        click.option("--since", metavar="REV", help="Only what may reach a change since REV."),
        click.option("--changed", is_flag=True, hidden=True, help="Like --since HEAD."),
        click.option(
            "--at-most", type=click.IntRange(1), metavar="N", default=MOST, hidden=True,
            help="Limit of --since.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def place() -> Path:
    """The file of the map, which need not exist."""
    return place_of_failed().with_name("reach.json")


@contextlib.contextmanager
def mapping(request: Request, values: dict[str, Any]) -> Iterator[Request]:
    """Let workers note the functions that they run, if ``--map`` asks for it. Raises ``UsageError``."""
    if not values["maps"]:
        yield request
        return
    if values["in_process"]:
        raise UsageError("--map notes what a worker runs, and --in-process has none; leave out one of them")
    with tempfile.TemporaryDirectory(prefix="attn-testkit-map-") as folder:
        noted = []
        for number, candidate in enumerate(request.candidates):
            notes = Path(folder, str(number))
            notes.mkdir()
            noted.append(replace(candidate, sources=OtherSources(notes=str(notes), functions=True)))
        values["noted"] = tuple(noted)
        yield replace(request, backends=tuple(noted))


def keep_map(noted: Iterable[Candidate], results: Sequence[CaseResult]) -> None:
    """Add what workers noted about case-runs that passed. Earlier entries stay if the files are the same."""
    maps = _read_maps()
    for candidate in noted:
        passed = {(r.execution, r.case): r.checks for r in results if _has_passed(r, candidate.spec)}
        if found := map_of(Path(candidate.sources.notes), passed):
            before = maps.get(candidate.spec)
            if before and before.root == found.root and _agree(before.digests, found.digests):
                digests = {**before.digests, **found.digests}
                imported = before.imported | found.imported
                found = replace(found, digests=digests, imported=imported, runs={**before.runs, **found.runs})
            maps[candidate.spec] = found
            words = f"{len(found.runs)} case-runs, {sum(map(len, found.digests.values()))} functions and other units"
            click.echo(f"  --map: {candidate.spec}: {words}, in {place()}", err=True)
        else:
            click.echo(f"  --map: nothing was noted of {candidate.spec}: it has no file, or nothing passed", err=True)
    if not maps:
        return
    try:
        write_in_cache(place(), json.dumps({"format": _FORMAT, "backends": {n: _plain(m) for n, m in maps.items()}}))
    except OSError as error:
        click.echo(f"  --map: cannot write {place()}: {error.strerror or error}", err=True)


def _has_passed(result: CaseResult, spec: str) -> bool:
    return result.backend == spec and bool(result.case) and result.status is Status.PASSED


def _agree(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> bool:
    return all(before[file] == now[file] for file in before.keys() & now.keys())


def map_of(notes: Path, passed: Mapping[tuple[str, str], tuple[str, ...]]) -> ReachMap | None:
    """The map of one backend. A case-run that failed may have ended early, so it is left out."""
    root, files, imported = "", set(), set()
    called: dict[tuple[str, str], set[Place]] = {}
    for file in sorted(notes.iterdir()):
        for line in file.read_text("utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a worker that was killed
            files |= set(row["files"])
            found = {(file, name) for file, name in row["functions"]}
            if "root" in row:
                root = row["root"]
                imported |= found
            else:
                called.setdefault((row["execution"], row["case"]), set()).update(found)
    runs = {key: MappedRun(frozenset(called[key]), passed[key]) for key in called.keys() & passed.keys()}
    if not root or not runs:
        return None
    digests = {
        file: {name: unit.digest for name, unit in _units(Path(root, file).read_bytes(), file).items()}
        for file in sorted(files)
    }
    return ReachMap(root, digests, frozenset(imported), runs)


def _units(text: bytes, name: str) -> dict[str, Unit]:
    try:
        return units_of(text)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{name} is not Python: {error}") from error


def _plain(reach: ReachMap) -> dict[str, Any]:
    functions = sorted({place for run in reach.runs.values() for place in run.functions} | reach.imported)
    checks = sorted({check for run in reach.runs.values() for check in run.checks})
    at = {place: number for number, place in enumerate(functions)}
    check_at = {check: number for number, check in enumerate(checks)}
    runs = {
        f"{execution}:{case}": [sorted(at[each] for each in run.functions), [check_at[each] for each in run.checks]]
        for (execution, case), run in reach.runs.items()
    }
    return {
        "root": reach.root, "digests": reach.digests, "functions": functions, "checks": checks,
        "imported": sorted(at[place] for place in reach.imported), "runs": runs,
    }  # fmt: skip


def _read_maps() -> dict[str, ReachMap]:
    """Spec -> map. The result is empty if the file does not exist or cannot be read."""
    try:
        data = json.loads(place().read_text("utf-8"))
        return {spec: _map(row) for spec, row in data["backends"].items()} if data["format"] == _FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def _map(row: dict[str, Any]) -> ReachMap:
    functions = [(file, name) for file, name in row["functions"]]
    runs = {}
    for name, (called, checks) in row["runs"].items():
        execution, _, case = name.partition(":")
        places = frozenset(functions[number] for number in called)
        runs[execution, case] = MappedRun(places, tuple(row["checks"][number] for number in checks))
    return ReachMap(row["root"], row["digests"], frozenset(functions[n] for n in row["imported"]), runs)


def asked_since(request: Request, values: dict[str, Any]) -> tuple[Request, str]:
    """The request with its selection, and the selection in words; unchanged without ``--since``. Raises
    ``UsageError``.
    """
    if values["changed"] and values["since"]:
        raise UsageError("--changed is --since HEAD; give one of them")
    revision = "HEAD" if values["changed"] else values["since"]
    if not revision:
        return request, ""
    maps = _read_maps()
    reached: set[RunKey] = set()
    checks: dict[RunKey, tuple[str, ...]] = {}
    words = []
    for candidate in request.candidates:
        if candidate.spec not in maps:
            command = shlex.join([*program(), "run", "-b", candidate.spec, "--tier", request.tier, "--map"])
            raise UsageError(
                f"there is no map of {candidate.spec} in {place()}, which says which functions each case-run reaches; "
                f"make one: {command}"
            )
        reach = maps[candidate.spec]
        found, text = changes_since(reach, revision)
        reached |= {(candidate.spec, *name) for name in found.runs(reach)}
        checks |= {(candidate.spec, *name): run.checks for name, run in reach.runs.items()}
        words.append(text)
    return replace(request, since=Since(frozenset(reached), checks, values["at_most"])), "; ".join(words)


def changes_since(reach: ReachMap, revision: str) -> tuple[Touched, str]:
    """Units that changes since a revision may reach, and the changed functions in words. Raises ``UsageError``."""
    root = Path(reach.root)
    files = _changed_files(root, revision)
    now: dict[str, Mapping[str, Unit]] = {file: present_units(root, file) for file in reach.digests}
    imported = {word for units in now.values() for unit in units.values() for word in unit.mentions}
    before: dict[str, Mapping[str, Unit]] = {}
    for file in files:
        if file.endswith(".py") and (file in reach.digests or module_of(file) in imported):
            now[file] = present_units(root, file)
            before[file] = _units(_git(root, "show", f"{revision}:{file}", missing=b""), f"{file} of {revision}")
    other = next((file for file in files if Path(file).suffix in _CODE and _is_near(file, reach)), "")
    if other:
        return Touched(frozenset(), f"{other} has changed"), f"{other} has changed"
    changed = changed_units(before, {file: now[file] for file in before})
    names = sorted(file if name.startswith("<") else name for file, name in changed)
    found = touched(reach, before, now)
    if not names:
        return found, "no function that was imported has changed"
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    text = f"{', '.join(names[:MOST_NAMED])}{more} changed"
    return found, f"{text}; every case-run may depend on it: {found.everything}" if found.everything else text


def present_units(root: Path, file: str) -> Mapping[str, Unit]:
    """Name -> unit of a file as it is now. The result is empty if the file does not exist. Raises ``UsageError``."""
    path = root / file
    return _units(path.read_bytes(), file) if path.is_file() else {}


def _is_near(file: str, reach: ReachMap) -> bool:
    """True for a file in a folder of imported modules, or below an imported package."""
    folders = {Path(each).parent for each in reach.digests}
    packages = {Path(each).parent for each in reach.digests if Path(each).name == "__init__.py"}
    return Path(file).parent in folders or any(parent in packages for parent in Path(file).parents)


def _changed_files(root: Path, revision: str) -> list[str]:
    """Files that differ from a revision, relative to the root, those that Git does not know yet included."""
    if not (root / ".git").exists():
        raise UsageError(f"--since: {root} is not a Git checkout, so nothing says what has changed there")
    if not _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", missing=b""):
        raise UsageError(f"--since: {root} has no revision {revision!r}; `git log` lists those that there are")
    known = _names(_git(root, "diff", "--name-only", "--no-renames", "-z", revision, "--"))
    new = _names(_git(root, "ls-files", "--others", "--exclude-standard", "-z"))
    # A results file, such as that of --json, does not belong to the backend.
    return sorted(known | {name for name in new if not name.endswith(".json")})


def _names(listed: bytes) -> set[str]:
    return {name.decode(errors="surrogateescape") for name in listed.split(b"\0") if name}


def _git(root: Path, *arguments: str, missing: bytes | None = None) -> bytes:
    """Output of a Git command; ``missing``: what to return if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise UsageError(f"--since needs Git: {error}") from error
    if done.returncode and missing is None:
        raise UsageError(f"--since: git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return missing if done.returncode and missing is not None else done.stdout


def only_since(prepared: Prepared, by: str, words: str) -> Prepared:
    """Leave out what ``--since`` does not select, and report it. ``by``: the option. ``words``: what has changed."""
    since = prepared.request.since
    if since is None:
        return prepared
    chosen = {item.key for item in prepared.plan.since}

    def keep(row: Item | CaseResult) -> bool:
        return row.key in chosen or (isinstance(row, CaseResult) and row.status is not Status.QUARANTINED)

    keys = [item.key for item in prepared.items]
    due = sum(map(since.reaches, keys))
    unknown = sum(key not in since.checks for key in keys)
    found = only(prepared, keep, by)
    ran = sum(since.reaches(item.key) for item in found.items)
    parts = [f"{ran} of the {due} case-runs that may reach it" if ran < due else f"{due} case-runs may reach it"]
    if unknown:
        parts.append(f"{unknown} of them because the map lacks them")
    parts.append(f"{len(found.items) - ran} more for each check and feature")
    if len(found.items) < len(keys):
        parts.append(f"PARTIAL, {len(found.items)} of {len(keys)} run")
    click.echo(f"  {by}: {words}; {', '.join(parts)}", err=True)
    return found
