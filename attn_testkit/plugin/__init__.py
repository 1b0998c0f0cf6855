"""The pytest plugin: ``pytest --pyargs attn_testkit.suite --attn-backend=SPEC``.

It is loaded in every pytest run of every user, so nothing here imports torch before the suite is collected.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shlex
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.junitxml import xml_key

from ..reports.junit import VERDICT_PROPERTY
from ..results.case_result import Status
from ..running.planning.request import param_id
from ..running.processes.gpus import visible_gpus
from . import options as plugin_options
from .own_session import OWN_SESSION, OwnSession
from .own_tests import MARK, OWN_TESTS, CaseRun, Check, OwnTests, cannot_run, parametrize, uncalled
from .reporting import Run, complete, text_only
from .session import SESSION, Session, pickled_plan
from .shared_plans import SharedPlans

if TYPE_CHECKING:
    from ..running.planning.request import Item


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the group ``attn`` and their ini values."""
    plugin_options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Store the session's state; on a worker, take the GPU that the controller assigned."""
    config.addinivalue_line("markers", "attn_mode(mode): the runner mode whose case-runs a test of the suite runs")
    config.addinivalue_line("markers", f"{MARK}(backend, ..., tier=...): one test per case-run, like conformance_cases")
    shard = plugin_options.shard(config)
    config.stash[OWN_TESTS] = OwnTests(shard, SharedPlans(_workerinput(config).get("attn_plans", "")))
    gpu = _workerinput(config).get("attn_gpu")
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    request, options = plugin_options.asked_for(config)
    state = Session(
        request,
        options,
        report=plugin_options.report_file(config),
        min_cases=plugin_options.min_cases(config),
        command=shlex.join(["pytest", *map(str, config.invocation_params.args)]),
        show_not_covered=config.option.attn_show_not_covered,
        collects_only=config.option.collectonly,
        named=bool(config.option.attn_backend or config.option.attn_report),
        selected_by=plugin_options.selected_by(config),
        shard=shard,
        planned=pickled_plan(_workerinput(config).get("attn_plan")),
        judge_place=_workerinput(config).get("attn_judge", ""),
    )
    config.stash[SESSION] = state
    if _is_worker(config):
        return
    config.pluginmanager.register(state, "attn_testkit_session")
    own = OwnSession(config.stash[OWN_TESTS], verbose=config.option.verbose > 0)
    config.stash[OWN_SESSION] = own
    config.pluginmanager.register(own, "attn_testkit_own_session")
    if config.pluginmanager.hasplugin("xdist"):
        from .xdist import XdistHooks

        config.pluginmanager.register(XdistHooks(state, own), "attn_testkit_xdist")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the record if the session broke before its end, and end the processes."""
    if SESSION in config.stash:
        config.stash[SESSION].close()
    if OWN_TESTS in config.stash:
        config.stash[OWN_TESTS].close()


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return one worker per GPU for ``-n auto``, if case-runs use GPUs."""
    request, _ = plugin_options.asked_for(config)
    if not request.backends or request.device not in ("auto", "cuda"):
        return None
    return len(visible_gpus(os.environ)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse a wrong request before workers start: a worker could only crash on it."""
    config = session.config
    distributed = getattr(config.option, "tx", None) and not _is_worker(config)
    named = config.option.attn_backend or any("attn_testkit.suite" in arg for arg in config.args)
    if distributed and named:
        _refuse(config.stash[SESSION])


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return one line for the header, if a backend was requested."""
    request = config.stash[SESSION].request
    if not request.backends:
        return []
    parts = [
        f"backend {', '.join(map(str, request.backends))}",
        f"tier {request.tier_name}",
        f"device {request.device}",
    ]
    return [f"attn-testkit {metadata.version('attn-testkit')}: {'; '.join(parts)}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per case-run, for a decorated test, or for the mode with which a test of the suite is marked."""
    parametrize(metafunc, metafunc.config.stash[OWN_TESTS])
    if "attn_item" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("attn_mode")
    prepared = metafunc.config.stash[SESSION].plan()
    items: list[Item] = []
    if prepared is not None:
        items = [item for item in prepared.items if mark is None or item.mode == mark.args[0]]
    if items:
        backends = metafunc.config.stash[SESSION].request.candidates
        metafunc.parametrize("attn_item", items, ids=[param_id(item, backends) for item in items])
    else:
        # pytest's placeholder for an empty set is a skipped test, which would look like a test that should have run.
        metafunc.parametrize("attn_item", [None], ids=["nothing"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a wrong request; drop the placeholders of modes in which nothing was planned."""
    suite = [item for item in items if _is_ours(item)]
    if not suite:
        return
    _refuse(config.stash[SESSION])
    items[:] = [item for item in items if not _is_placeholder(item)]
    config.stash[SESSION].sort(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember which case-runs are expected to run."""
    state = session.config.stash[SESSION]
    if state.prepared is not None and not _is_worker(session.config) and not session.config.option.collectonly:
        state.begin([item.nodeid for item in session.items if _is_ours(item)])


@pytest.fixture
def attn_run(request: pytest.FixtureRequest) -> Run:
    """Return a callable that runs one case-run, keeps its result, and fails the test if a check fails."""
    return Run(request.config.stash[SESSION], request.node)


@pytest.fixture
def attn_case(request: pytest.FixtureRequest) -> CaseRun:
    """The case-run of a test that ``attn_testkit.conformance_cases`` decorates; calling it runs it."""
    return CaseRun(request.config.stash[OWN_TESTS], request.node, getattr(request, "param", None))


@pytest.fixture
def attn_check(request: pytest.FixtureRequest) -> Check:
    """Return a callable, ``attn_check(backend, ...)``, that fails the test unless the backend conforms."""
    return Check(request.config.stash[OWN_TESTS], (request.path.parent, request.config.rootpath))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the report the result as plain values, and the failure's text instead of a traceback of the kit."""
    report = yield
    complete(item, call, report)
    if report.when == "call" and report.passed and (complaint := uncalled(item)):
        report.outcome, report.longrepr = "failed", text_only(item, complaint)
    if report.skipped and cannot_run(item):
        item.config.stash[OWN_TESTS].seen.append((item.nodeid, Status.NOT_RUN_HERE.value))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the session if planned case-runs did not run, or failed and no test reports it."""
    stash = session.config.stash
    if _is_worker(session.config):
        own = stash[OWN_TESTS]
        session.config.workeroutput |= {"attn_seen": own.seen, "attn_in_shard": own.in_shard}  # type: ignore[attr-defined]
    else:
        session.exitstatus = stash[OWN_SESSION].finish(stash[SESSION].finish(int(exitstatus)))
        junit = stash.get(xml_key, None)
        if junit is not None and (verdict := stash[SESSION].verdict()):
            junit.add_global_property(VERDICT_PROPERTY, verdict)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, the remarks and the verdict."""
    config.stash[OWN_SESSION].summarize(terminalreporter)
    config.stash[SESSION].summarize(terminalreporter)


def _refuse(state: Session) -> None:
    if state.plan() is None:
        raise pytest.UsageError(state.refusal)


def _workerinput(config: pytest.Config) -> dict[str, Any]:
    found: dict[str, Any] = getattr(config, "workerinput", {})
    return found


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _is_ours(item: pytest.Item) -> bool:
    return "attn_item" in getattr(item, "fixturenames", ())


def _is_placeholder(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return _is_ours(item) and callspec is not None and callspec.params.get("attn_item") is None
