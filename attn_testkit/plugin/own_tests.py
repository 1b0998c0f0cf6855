"""Case-runs as tests in a user's own suite: ``@attn_testkit.conformance_cases("my_pkg.attn:MyBackend")``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import pytest

from ..registry import UsageError
from ..reports.junit import properties
from ..reports.outcome import Results, verdict
from ..reports.shards import Shard
from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import format_failure
from ..results.run_header import RunHeader
from ..running.planning.candidate import candidate_for
from ..running.planning.request import (
    CaseArguments,
    Item,
    Judge,
    Options,
    Prepared,
    Request,
    asked,
    kit_error,
    options_of,
    param_id,
    prepare,
    with_options,
)
from ..running.planning.shards import shard_of
from ..running.processes.judge_process import JudgeError, JudgeProcess
from .reporting import OWN_RESULT, CaseFailed
from .shared_plans import SharedPlans

MARK = "attn_conformance"
FIXTURE = "attn_case"


@dataclass(frozen=True)
class Wanted:
    """The request of a decorator."""

    request: Request
    options: Options


@dataclass(frozen=True)
class Param:
    """One parameter of a decorated test: a case-run, a result that needs no run, or a message with which the test
    fails."""

    id: str
    header: RunHeader
    due: Item | CaseResult | str
    wanted: Wanted


@with_options("conformance_cases")
def conformance_cases(
    *backends: str | type[Any], **arguments: Unpack[CaseArguments]
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Parametrize a test with the case-runs of one or more backends::

        @attn_testkit.conformance_cases("my_pkg.attn:MyBackend", tier="core")
        def test_conformance(attn_case):
            attn_case()

    Calling ``attn_case`` runs the case-run and fails, xfails (a known failure) or skips (not runnable here) the test; a
    test that does not call it fails. Its attributes are ``backend``, ``mode``, ``execution`` and ``case``. The backend
    runs in its own process; pytest never imports a spec. If no case-run can run, one test fails with the reason.
    Arguments are those of ``check_backend``; ``known_failures`` is looked for next to the file of the test and in
    pytest's root.

    Raises ``UsageError``. An error that only planning can find, such as a backend that cannot be imported, is reported
    when the test is collected.
    """
    return getattr(pytest.mark, MARK)(_wanted(*backends, **arguments))  # type: ignore[no-any-return]


def _wanted(*backends: str | type[Any], **arguments: Any) -> Wanted:
    """Make the request from the arguments, which decorator, mark and fixture share. Raises ``UsageError``."""
    if not backends:
        raise UsageError("no backend is named; write conformance_cases('module:Class') or conformance_cases(MyBackend)")
    candidates = [candidate_for(backend) for backend in backends]
    more = {"command": "conformance_cases", "counts_tier": True, "order": "plainest"}
    return Wanted(*asked("conformance_cases", candidates, arguments, **more))


def _of_mark(mark: pytest.Mark) -> Wanted:
    """Make a request from a mark, either the decorator's or one that was written with the decorator's arguments."""
    if len(mark.args) == 1 and isinstance(mark.args[0], Wanted):
        return mark.args[0]
    try:
        return _wanted(*mark.args, **mark.kwargs)
    except TypeError as error:
        known = ", ".join(options_of("conformance_cases"))
        raise UsageError(f"@pytest.mark.{MARK}: {str(error).partition(' ')[2]} (arguments: {known})") from None


def parametrize(metafunc: pytest.Metafunc, own: OwnTests) -> None:
    """Give a decorated test its parameters. The first one starts the judge's process, for planning."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        return
    if FIXTURE not in metafunc.fixturenames:
        pytest.fail(f"{metafunc.function.__name__} has conformance_cases but no parameter {FIXTURE}", pytrace=False)
    try:
        folders = (metafunc.definition.path.parent, metafunc.config.rootpath)
        wanted = _with_known(_of_mark(mark), folders)
        params = list(_params(own, wanted))
    except (UsageError, JudgeError) as error:
        raise pytest.fail.Exception(f"attn-testkit: {error}", pytrace=False) from None
    metafunc.parametrize(FIXTURE, params, ids=[param.id for param in params], indirect=True)


def _with_known(wanted: Wanted, folders: Sequence[Path]) -> Wanted:
    """Look for the file of known failures in the folders; if none has it, an error names it in the first."""
    if not wanted.request.known_failures:
        return wanted
    places = [folder / wanted.request.known_failures for folder in folders]
    found = next((place for place in places if place.exists()), places[0])
    return replace(wanted, request=replace(wanted.request, known_failures=found))


def _params(own: OwnTests, wanted: Wanted) -> Iterator[Param]:
    whole, prepared = own.prepared(wanted), own.part(wanted)
    header = prepared.plan.header
    if not whole.items and not any(row.status in BAD for row in whole.preset):
        why = verdict(header, whole.preset)
        yield Param("nothing-ran", header, f"{why}\n(if this is expected, skip the test: pytest.mark.skipif)", wanted)
    rows = [row for row in prepared.preset if row.status is not Status.UNSUPPORTED]
    if whole.items and not prepared.items:
        why = f"shard {own.shard} has none of its {len(whole.items)} case-runs"
        first = whole.items[0]
        row = CaseResult(first.backend, first.mode, first.execution, "", Status.NOT_RUN_HERE, reason=why)
        yield Param("nothing-in-this-shard", header, row, wanted)
    backends = wanted.request.candidates
    for item in prepared.items:
        yield Param(param_id(item, backends), header, item, wanted)
    for row in rows:
        place = row.case or f"{row.mode}-{row.status.value.replace(' ', '-')}"
        yield Param(param_id(replace(row, case=place), backends), header, row, wanted)
    problems = prepared.problems()
    if problems:
        yield Param("known-failures", header, "\n".join(problems), wanted)


class OwnTests:
    """State that decorated tests of one pytest process share: a plan per request, and the judge's processes."""

    def __init__(self, shard: Shard | None = None, shared: SharedPlans | None = None) -> None:
        self.shard = shard
        """The shard whose case-runs become tests of this session; None for all."""
        self._shared = shared or SharedPlans()
        self.in_shard = (0, 0)
        """Numbers of tests in this shard and in all shards; zeros without a shard."""
        self._judges: dict[tuple[Options, str], Judge] = {}
        self._prepared: dict[Wanted, Prepared] = {}
        self.seen: list[tuple[str, str]] = []
        """Node id of each test that called its case-run or had none that can run here, and the status."""

    def prepared(self, wanted: Wanted) -> Prepared:
        """The plan, made once for all workers of xdist. Raises ``UsageError`` and ``JudgeError``."""
        if wanted not in self._prepared:
            judge = self._judge(wanted)
            plan = self._shared.plan(wanted.request, lambda: judge.plan(wanted.request))
            self._prepared[wanted] = prepare(judge, wanted.request, plan)
        return self._prepared[wanted]

    def part(self, wanted: Wanted) -> Prepared:
        """The plan of this session's shard. Raises as ``prepared`` does."""
        whole = self.prepared(wanted)
        if self.shard is None:
            return whole
        found = prepare(whole.judge, wanted.request, shard_of(whole.plan, self.shard))
        here, of = self.in_shard
        self.in_shard = here + len(found.items), of + len(whole.items)
        return found

    def run(self, item: Item, wanted: Wanted) -> CaseResult:
        """The result of one case-run, whatever the backend does."""
        prepared = self.prepared(wanted)
        try:
            (result,) = self._judge(wanted).run(prepared.plan.to_run(), [item])
        except JudgeError as error:
            self._drop(wanted)
            return kit_error(item, str(error))
        except BaseException:
            # If a test is interrupted, as by a timeout of pytest, the next test needs another process.
            self._drop(wanted)
            raise
        return prepared.ledger.judge(result)

    def check(self, wanted: Wanted) -> Results:
        """Run all case-runs of a request. Raises ``UsageError`` and ``JudgeError``."""
        prepared = self.prepared(wanted)
        try:
            found = tuple(map(prepared.ledger.judge, self._judge(wanted).run(prepared.plan, prepared.items)))
        except BaseException:
            self._drop(wanted)
            raise
        return Results(prepared.plan.header, (*prepared.preset, *found), tuple(prepared.problems()))

    def close(self) -> None:
        """End the processes."""
        for judge in self._judges.values():
            judge.close()
        self._judges.clear()

    def _drop(self, wanted: Wanted) -> None:
        self._judges.pop(_key(wanted)).close()

    def _judge(self, wanted: Wanted) -> Judge:
        key = _key(wanted)
        if key not in self._judges:
            self._judges[key] = JudgeProcess(*key)
        return self._judges[key]


def _key(wanted: Wanted) -> tuple[Options, str]:
    return wanted.options, wanted.request.device


class CaseRun:
    """One case-run, as a decorated test receives it. It is called once."""

    def __init__(self, own: OwnTests, node: pytest.Item, param: object) -> None:
        if not isinstance(param, Param):
            pytest.fail(f"{FIXTURE} needs the decorator @attn_testkit.conformance_cases(...)", pytrace=False)
        self._own, self._node, self._param = own, node, param
        self._node.stash[_CALLED] = False
        due = None if isinstance(param.due, str) else param.due
        self.backend = due.backend if due else ""
        self.mode = due.mode if due else ""
        self.execution = due.execution if due else ""
        self.case = due.case if due else ""

    def __call__(self) -> None:
        """Run the case-run, and pass, fail, xfail or skip the test accordingly."""
        __tracebackhide__ = True
        self._node.stash[_CALLED] = True
        due = self._param.due
        if isinstance(due, str):
            self._own.seen.append((self._node.nodeid, Status.FAILED.value))
            raise CaseFailed(due)
        result = self._own.run(due, self._param.wanted) if isinstance(due, Item) else due
        # Kept here and not taken from the test's report, which a hook may rewrite.
        self._own.seen.append((self._node.nodeid, result.status.value))
        self._node.stash[OWN_RESULT] = result
        self._node.user_properties += properties(result)
        if result.status is Status.KNOWN_FAILURE:
            pytest.xfail(result.reason)
        if result.status in (Status.NOT_RUN_HERE, Status.QUARANTINED):
            pytest.skip(f"{result.status}: {result.reason}")
        if result.status in BAD:
            raise CaseFailed(format_failure(result, self._param.header, brief=True))

    def __repr__(self) -> str:
        return self._param.id


class Check:
    """The fixture ``attn_check``: it tests a backend inside a test, in processes that all tests share."""

    def __init__(self, own: OwnTests, folders: Sequence[Path]) -> None:
        """``folders``: folders in which a file of known failures is looked for, in this order."""
        self._own, self._folders = own, folders

    def __call__(self, *backends: str | type[Any], **arguments: Unpack[CaseArguments]) -> Results:
        """Check backends; the arguments are the same as for ``conformance_cases``.

        Fails the test with the verdict and the failures unless they conform; else returns the ``Results``. Raises
        ``UsageError`` for a wrong request, and ``JudgeError`` if the judge's process died.
        """
        __tracebackhide__ = True
        try:
            results = self._own.check(_with_known(_wanted(*backends, **arguments), self._folders))
        except (UsageError, JudgeError) as error:
            # Only the test's own line of the traceback is of use, not those of the kit.
            raise error.with_traceback(None) from None
        if not results:
            raise CaseFailed("\n".join(filter(None, (results.verdict, results.texts))), results.verdict)
        return results


def uncalled(item: pytest.Item) -> str:
    """Describe the mistake of a test that passed without running its case-run; empty if it ran."""
    if item.stash.get(_CALLED, True):
        return ""
    return f"the test did not call {FIXTURE}(), so nothing was tested"


def cannot_run(item: pytest.Item) -> bool:
    """True for the test of a case-run that cannot run on this machine, so skipping it loses nothing."""
    callspec = getattr(item, "callspec", None)
    param = callspec.params.get(FIXTURE) if callspec else None
    return isinstance(param, Param) and isinstance(param.due, CaseResult) and param.due.status is Status.NOT_RUN_HERE


_CALLED: pytest.StashKey[bool] = pytest.StashKey()
OWN_TESTS: pytest.StashKey[OwnTests] = pytest.StashKey()
