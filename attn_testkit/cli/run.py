"""``run``: test backends in every mode and execution that they declare."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ..registry import UsageError
from ..reports.junit import junit_xml, unfinished_xml
from ..reports.outcome import outcome_of
from ..reports.record import Record, Report, read_report, write_text
from ..reports.verdict import refuse_another_run
from ..results.case_result import BAD, RAN, CaseResult
from ..results.names import NO_CASE
from ..results.run_header import CUT
from ..running.planning.request import Options, Prepared, Request, final_code, prepare
from ..running.processes.gpus import visible_gpus
from ..running.processes.judge_process import JudgeError, JudgeProcess, judge_for
from .choosing import choose, echo_durations, echo_items, pytest_options
from .cluster_run import ray_option, refuse_with_ray, run_on_cluster
from .last_failed import keep_failed
from .options import asked_for, selection_options, settings_options
from .shards import refuse_other_shard, shard_options, sharded
from .show import Watch, echo_header, print_summary
from .since import asked_since, keep_map, mapping, only_since, since_options
from .watch import refuse_with_watch, watch_backend


@click.command(
    short_help="Test backends in every mode they declare.",
    epilog="""\b
Also: -x, --changed, --at-most N, --show-not-covered, --durations N; with a FILE --rest-of, --last, --durations-from.
Examples:
  attn-testkit run --backend my_pkg.attn:MyBackend --tier full --jobs 8 -k "decode and graph" --html out.html""",
)
@click.argument("files", nargs=-1, metavar="[FILE.py]...")
@selection_options
@pytest_options
@since_options
@click.option(
    "--cases-from", type=click.Path(), metavar="FILE",
    help="Only the cases in a file, one per line.",
)  # fmt: skip
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write results; -: one line on stdout.")
@click.option("--html", "html_file", type=click.Path(), metavar="FILE", help="Write an HTML report.")
@settings_options
@click.option(
    "--last", type=click.Path(), metavar="FILE", hidden=True,
    help="With --budget: first run what failed in FILE.",
)  # fmt: skip
@click.option(
    "--rest-of", type=click.Path(), multiple=True, metavar="FILE", hidden=True,
    help="Skip what ran in this results file.",
)  # fmt: skip
@shard_options
@ray_option
@click.option("--max-failures", type=click.IntRange(1), metavar="N", help="Stop after N failures; -x: after one.")
@click.option("-x", "stop_first", is_flag=True, hidden=True, help="Stop after the first, simplest cases first.")
@click.option("--watch", is_flag=True, help="Run again after each save, what failed first.")
@click.option("--verbose", "-v", is_flag=True, help="Print every failure in full.")
@click.option("--show-not-covered", is_flag=True, hidden=True, help="List what no case covers.")
def run(**values: Any) -> int:
    """Test backends, or the only one in FILE.py, in every mode they declare."""
    files = values.pop("files")
    for name in files:
        if not name.endswith(".py"):
            here = Path(f"{name}.py").is_file()
            instead = f"did you mean {name}.py?" if here else f"a backend is named with --backend {name}"
            raise UsageError(f"Got unexpected extra argument ({name}); {instead}")
    values["backends"] = (*files, *values["backends"])
    request, options = asked_for(values, counts_tier=True)
    if values["cases_from"]:
        cases = (*request.cases, *_cases_from(values["cases_from"]))
        request = replace(request, cases=cases, cases_from=values["cases_from"])
    _refuse_clashes(values)
    refuse_with_watch(request, values)
    with terminated_like_interrupted(), _for_programs(values), mapping(request, values) as request:
        if values["watch"]:
            return watch_backend(request, options, values)
        return _run(request, options, values)


@contextlib.contextmanager
def _for_programs(values: dict[str, Any]) -> Iterator[None]:
    """Print one line on stdout, at the end, and everything else on stderr, if ``--json -`` asks for it."""
    if values["json_file"] != "-":
        yield
        return
    stdout, values["json_file"], values["reports"] = sys.stdout, None, []
    with contextlib.redirect_stdout(sys.stderr):
        yield
    for report in values["reports"]:
        print(json.dumps(outcome_of(report)), file=stdout)


def _cases_from(name: str) -> tuple[str, ...]:
    """Ids and globs of a file. Raises ``UsageError`` for a file that cannot be read, or that is empty, for which the
    whole tier would be run.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    found = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not found:
        raise UsageError(f"{name} names no case; expected one case id or glob per line")
    return found


def _refuse_clashes(values: dict[str, Any]) -> None:
    refuse_with_ray(values)
    if values["in_process"] and values["jobs"] > 1:
        raise UsageError("--in-process runs in one process; leave out --jobs")
    if values["stop_first"] and values["max_failures"]:
        raise UsageError("-x is --max-failures 1; give one of them")
    if values["last"] and not values["budget_s"]:
        raise UsageError("--last orders the cases of a run with a time limit; give it with --budget")
    if values["json_file"] in values["rest_of"]:
        raise UsageError("--json would overwrite the results file that --rest-of reads; name another file")


def _run(request: Request, options: Options, values: dict[str, Any]) -> int:
    earlier = {name: read_report(name) for name in values["rest_of"]}
    if options.budget_s:
        request = replace(request, failed_before=_failed(values["last"]))
    elif values["stop_first"]:
        request = replace(request, order="plainest")
    if not request.backends:
        raise UsageError("no backend is named; give --backend module:Class, or a name from `attn-testkit list`")
    request, words = asked_since(request, values)
    limit = 1 if values["stop_first"] else values["max_failures"]
    if values["ray_address"]:

        def follow(prepared: Prepared, values: dict[str, Any]) -> int:
            _begin(prepared, values)
            return _follow(prepared, values, limit, carried=0)

        return run_on_cluster(request, options, values, follow)
    options = replace(options, gpus=_gpus_to_share(request, options.jobs))
    with contextlib.closing(judge_for(options, request.device)) as judge:
        prepared = prepare(judge, request, sharded(judge.plan(request), values))
        prepared, carried = _rest_of(prepared, earlier)
        prepared = only_since(prepared, "--changed" if values["changed"] else f"--since {values['since']}", words)
        prepared = choose(prepared, values["keyword_text"], values["last_failed"])
        if values["collect_only"]:
            return echo_items(prepared)
        _begin(prepared, values)
        return _follow(prepared, values, limit, carried)


def _begin(prepared: Prepared, values: dict[str, Any]) -> None:
    """Print the header and warnings before anything runs."""
    echo_header(prepared.plan.header)
    if values["in_process"]:
        click.echo(NO_GATE, err=True)
    for warning in prepared.ledger.warnings():
        click.echo(f"warning: {warning}", err=True)


NO_GATE = (
    "  --in-process is for debugging only: the backend shares this process with the checker, and could change "
    "the verdict"
)


def _failed(record: str | None) -> tuple[tuple[str, str], ...]:
    """Backend and case of every failure in a results file."""
    results = read_report(record).results if record else ()
    return tuple(dict.fromkeys((r.backend, r.case) for r in results if r.case and r.status in BAD))


def _rest_of(prepared: Prepared, earlier: Mapping[str, Report]) -> tuple[Prepared, int]:
    """Leave out what ran in results files of the same run, and include the results of these files: the verdict covers
    all of it. Returns also the number of included failures. Raises ``UsageError`` for a file of another run.
    """
    rows: dict[tuple[str, str, str], CaseResult] = {}
    for name, before in earlier.items():
        refuse_another_run(name, before.header, "here", prepared.plan.header)
        refuse_other_shard(name, before.header, prepared.plan.header)
        for row in before.results:
            raw = prepared.ledger.undone(row) if row.case and row.status in RAN else None
            key = (row.backend, row.execution, row.case)
            # A failure is never hidden by a file in which the same case-run passed.
            if raw is not None and not (key in rows and rows[key].status in BAD):
                rows[key] = raw
    due = {(item.backend, item.execution, item.case) for item in prepared.items}
    # The row of a mode or a backend as a whole is planned again.
    failed = {key for key, row in rows.items() if row.status in BAD and not row.case.endswith(NO_CASE)}
    kept = {key: row for key, row in rows.items() if key in due | failed}
    items = tuple(item for item in prepared.items if (item.backend, item.execution, item.case) not in kept)
    if earlier and not items:
        raise UsageError(f"nothing is left to run: all {len(prepared.items)} case-runs ran in {', '.join(earlier)}")
    failures = sum(prepared.ledger.judge(row).status in BAD for row in kept.values())
    return replace(prepared, items=items, preset=(*prepared.preset, *kept.values())), failures


def _gpus_to_share(request: Request, jobs: int) -> tuple[str, ...]:
    if jobs == 1 or request.device not in ("auto", "cuda"):
        return ()
    gpus = visible_gpus(os.environ)
    return gpus if len(gpus) > 1 else ()


def _follow(prepared: Prepared, values: dict[str, Any], limit: int | None, carried: int) -> int:
    """Run, print and record. ``carried``: number of failures among the results of earlier runs."""
    header = prepared.plan.header
    if values["html_file"]:
        # Written now, so that a path that cannot be written fails at once and not after hours.
        write_text(values["html_file"], "<!doctype html><title>running</title>The run has not ended yet.")
    if values["junit_file"]:
        write_text(values["junit_file"], unfinished_xml(header))
    record = Record(values["json_file"], header) if values["json_file"] else None
    _warn(record)
    results: list[CaseResult] = []
    interrupted = False
    total = len(prepared.items) + sum(row.status in RAN for row in prepared.preset)
    # Asked now: the judge's process may have ended at the end of the run.
    problems = prepared.problems()
    try:
        source = prepared.judge.run(prepared.plan, prepared.items)
        with _closing(source), Watch(total, header, verbose=values["verbose"]) as watch:
            if isinstance(prepared.judge, JudgeProcess):
                prepared.judge.note = watch.note
            for raw in itertools.chain(prepared.preset, source):
                result = prepared.ledger.judge(raw)
                results.append(result)
                watch.see(result)
                if record and not record.failure:
                    record.add(result)
                    _warn(record)
                if limit and sum(r.status in BAD for r in results) - carried >= limit:
                    click.echo(f"stopped after {limit} failure{'s' if limit > 1 else ''}", err=True)
                    break
    except KeyboardInterrupt:
        interrupted, problems = True, []
    except JudgeError:
        if record:
            record.close()
        raise
    code = final_code(header, results, problems, interrupted)
    if record:
        record.finish(code, interrupted=interrupted, problems=problems)
    if record and record.failure and code in (0, CUT):
        # Readers of the file, in this job or the next, would not see the findings of this run.
        code = 3
    keep_failed(results)
    if "noted" in values:
        keep_map(values["noted"], results)
    report = Report(header, tuple(results), not interrupted, interrupted, code, tuple(problems))
    values.get("reports", []).append(report)
    if values["durations"] is not None:
        echo_durations(prepared, results, values["durations"])
    print_summary(
        header, results, problems=problems, interrupted=interrupted, code=code, verbose=values["verbose"],
        show_not_covered=values["show_not_covered"],
    )  # fmt: skip
    _warn(record)
    if values["html_file"]:
        _write_html(report, values)
    if values["junit_file"]:
        _write(values["junit_file"], junit_xml(report))
    return code


def _warn(record: Record | None) -> None:
    if record and record.failure:
        click.echo(f"attn-testkit: the results file is incomplete: {record.failure}", err=True)


def _write_html(report: Report, values: dict[str, Any]) -> None:
    from ..reports.render import html_page

    _write(values["html_file"], html_page(report))


def _write(name: str, text: str) -> None:
    try:
        write_text(name, text)
    except UsageError as error:
        # The verdict is printed already, and holds without a page.
        click.echo(f"attn-testkit: {error}", err=True)


@contextlib.contextmanager
def _closing(source: Iterator[CaseResult]) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(source, Generator):
            source.close()


@dataclass
class Interrupts:
    """A request to stop. Python drops a KeyboardInterrupt that is raised in a callback of its garbage collector."""

    asked: bool = False

    def heed(self) -> None:
        """Raise ``KeyboardInterrupt`` if an interrupt was requested and lost."""
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[Interrupts]:
    """Turn SIGTERM into a KeyboardInterrupt, and remember that one of the two arrived."""
    interrupts = Interrupts()

    # A cancelled CI job sends SIGTERM: its report must be closed like that of a run that a user interrupts.
    def stop(signum: int, frame: FrameType | None) -> None:
        interrupts.asked = True
        raise KeyboardInterrupt

    # Under nohup SIGINT is ignored, and stays so.
    ours = [signal.SIGTERM, *([signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else [])]
    before = {each: signal.signal(each, stop) for each in ours}
    try:
        yield interrupts
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
