"""The plugin's options, their ini values, and the request that they make."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from ..registry import UsageError, unknown
from ..reports.shards import Shard, requested_shard
from ..running.planning.request import (
    DIAGNOSE,
    DIAGNOSE_SECONDS,
    EXECUTIONS,
    MODES,
    TIERS,
    Request,
    checked_device,
    checked_seconds,
)

T = TypeVar("T")


def add(parser: pytest.Parser) -> None:
    """Add one group of prefixed options, and ini values for what is set in CI."""
    group = parser.getgroup("attn", "attention backend conformance (attn-testkit)")
    _add_selection(group)
    _add_conduct(group)
    parser.addini("attn_backends", "Backends to test.", type="linelist")
    parser.addini("attn_tier", "smoke, core or full.", default="smoke")
    parser.addini("attn_known_failures", "TOML file of failures to tolerate, relative to the ini file.", default="")
    parser.addini("attn_min_cases", "Fail if fewer case-runs ran.", default="0")


def _add_selection(group: pytest.OptionGroup) -> None:
    """Options of what is run."""
    group.addoption(
        "--attn-backend", action="append", default=[], metavar="SPEC", dest="attn_backend",
        help="Backend to test: module:Class, or a name from `attn-testkit list`. Repeatable. ini: attn_backends.",
    )  # fmt: skip
    group.addoption(
        "--attn-tier", type=_word("tier", TIERS), metavar="TIER", dest="attn_tier",
        help="Number of cases: smoke (default), core or full. ini: attn_tier.",
    )  # fmt: skip
    group.addoption(
        "--attn-mode", action="append", default=[], type=_word("mode", MODES), metavar="MODE", dest="attn_mode",
        help=f"Only this runner mode: {', '.join(MODES)}. Repeatable.",
    )  # fmt: skip
    group.addoption(
        "--attn-execution", action="append", default=[], type=_word("execution", EXECUTIONS), metavar="HOW",
        dest="attn_execution", help="Only eager or only graph. Repeatable.",
    )  # fmt: skip
    group.addoption(
        "--attn-case", action="append", default=[], metavar="GLOB", dest="attn_case",
        help="Only cases whose id matches, as 'decode-*'. Repeatable.",
    )  # fmt: skip
    group.addoption(
        "--attn-device", type=_device, default="auto", metavar="DEVICE", dest="attn_device",
        help="auto (default), cuda, cuda:N, or cpu, which emulates CUDA and its graphs.",
    )  # fmt: skip
    group.addoption(
        "--attn-seed", type=_number("seed"), default=0, metavar="N", dest="attn_seed",
        help="Random seed.",
    )  # fmt: skip


def _add_conduct(group: pytest.OptionGroup) -> None:
    """Options of how it is run and reported."""
    group.addoption(
        "--attn-known-failures", metavar="FILE", dest="attn_known_failures",
        help="TOML file of failures to tolerate. ini: attn_known_failures.",
    )  # fmt: skip
    group.addoption(
        "--attn-report", metavar="FILE", dest="attn_report",
        help="Write results as JSON, updated as they come. See `attn-testkit report`.",
    )  # fmt: skip
    group.addoption(
        "--attn-min-cases", type=_number("min-cases"), metavar="N", dest="attn_min_cases",
        help="Fail if fewer than N case-runs ran. ini: attn_min_cases.",
    )  # fmt: skip
    group.addoption(
        "--attn-timeout", type=_seconds, default=0.0, metavar="S", dest="attn_timeout",
        help="Time limit of one case-run in seconds (default 300); after that it is reported as timed out.",
    )  # fmt: skip
    group.addoption(
        "--attn-budget", type=_budget, metavar="S", dest="attn_budget",
        help="Start no case-run of the suite after S seconds; the most valuable ones come first. Exit code 7.",
    )  # fmt: skip
    group.addoption(
        "--attn-diagnose", type=_word("diagnose", DIAGNOSE), default="first", metavar="WHICH", dest="attn_diagnose",
        help="Look for the cause of the first failure of a kind (default), of all failures, or of none.",
    )  # fmt: skip
    group.addoption(
        "--attn-diagnose-seconds", type=_diagnose_seconds, default=DIAGNOSE_SECONDS, metavar="S",
        dest="attn_diagnose_seconds", help="Time limit of the diagnosis of one case-run (default 20).",
    )  # fmt: skip
    group.addoption(
        "--attn-show-not-covered", action="store_true", dest="attn_show_not_covered",
        help="List the declared values that no case covers.",
    )  # fmt: skip
    group.addoption(
        "--attn-shard", metavar="K/N", dest="attn_shard",
        help="Run only part K of N of the suite, for `attn-testkit merge`, and of conformance_cases. "
        "Default: SHARD_INDEX/SHARD_COUNT, if they are set.",
    )  # fmt: skip
    group.addoption(
        "--attn-keep-unloadable", action="store_true", dest="attn_keep_unloadable",
        help="Report a backend that cannot be imported as a failing row, and test the others.",
    )  # fmt: skip


def request(config: pytest.Config) -> Request:
    """Make the request of options and ini values; raises ``pytest.UsageError`` for a wrong ini value."""
    option = config.option
    tier = option.attn_tier or _from_ini(_word("tier", TIERS), "attn_tier", config)
    backends = tuple(option.attn_backend or config.getini("attn_backends"))
    return Request(
        backends=backends,
        modes=tuple(option.attn_mode),
        executions=tuple(option.attn_execution),
        tier=tier,
        device=option.attn_device,
        seed=option.attn_seed,
        cases=tuple(option.attn_case),
        # A user reads the failures from the top, or stops at the first.
        order="plainest" if option.attn_budget is None else "most valuable",
        failed_before=_failed_before(config, backends) if option.attn_budget is not None else (),
        keep_unloadable=option.attn_keep_unloadable,
        counts_tier=True,
    )


def _failed_before(config: pytest.Config, backends: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of backend and case that failed last time according to pytest's cache."""
    cache = getattr(config, "cache", None)
    names = [nodeid.partition("[")[2][:-1] for nodeid in (cache.get("cache/lastfailed", {}) if cache else {})]
    found = [
        (backend, name.removeprefix(beginning))
        for name in names
        for backend in backends
        for execution in EXECUTIONS
        # As ``param_id`` names the tests of one backend, and of several.
        for beginning in [f"{execution}-" if len(backends) == 1 else f"{backend}-{execution}-"]
        if name.startswith(beginning)
    ]
    return tuple(dict.fromkeys(found))


def selected_by(config: pytest.Config) -> str:
    """The arguments of pytest itself that select tests, as written; empty if there are none.

    What a hook or another plugin deselects is not among them: nobody reads of it on the command line.
    """
    option = config.option
    words = [
        *([f"-k {option.keyword!r}"] if option.keyword else []),
        *([f"-m {option.markexpr!r}"] if option.markexpr else []),
        *(f"--deselect {name}" for name in option.deselect or ()),
        *(["--lf"] if getattr(option, "lf", False) else []),
        *(["--sw"] if getattr(option, "stepwise", False) else []),
        *(name for name in map(str, config.args) if "::" in name),
    ]
    return ", ".join(words)


def known_file(config: pytest.Config) -> Path | None:
    """The absolute path of the known-failures file, or None."""
    given: str | None = config.option.attn_known_failures
    if given:
        return config.invocation_params.dir / given
    listed: str = config.getini("attn_known_failures")
    return (config.inipath.parent if config.inipath else config.rootpath) / listed if listed else None


def shard(config: pytest.Config) -> Shard | None:
    """The shard of the suite, or None for all of it; raises ``pytest.UsageError``."""
    given: str | None = config.option.attn_shard
    if not given and not (config.option.attn_backend or config.getini("attn_backends")):
        return None  # a session without the suite: the variables are meant for something else
    try:
        return requested_shard(given, os.environ)
    except UsageError as error:
        raise pytest.UsageError(f"attn-testkit: {error}") from None


def report_file(config: pytest.Config) -> Path | None:
    """The absolute path of the results file, or None."""
    given: str | None = config.option.attn_report
    return config.invocation_params.dir / given if given else None


def min_cases(config: pytest.Config) -> int:
    """The number of case-runs that must run."""
    given: int | None = config.option.attn_min_cases
    return _from_ini(_number("min-cases"), "attn_min_cases", config) if given is None else given


def _word(what: str, words: Sequence[str]) -> Callable[[str], str]:
    def convert(value: str) -> str:
        if value in words:
            return value
        # argparse would wrap any other exception in its own sentence; the exit code is 4 either way.
        raise pytest.UsageError(unknown(what, value, words))

    return convert


def _device(value: str) -> str:
    try:
        return checked_device(value)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _seconds(value: str, what: str = "timeout") -> float:
    try:
        return checked_seconds(float(value), what)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    except ValueError:
        raise pytest.UsageError(f"{what} is {value!r}; expected seconds, such as 300") from None


def _diagnose_seconds(value: str) -> float:
    return _seconds(value, "diagnose-seconds")


def _budget(value: str) -> float:
    return _seconds(value, "budget")


def _number(what: str) -> Callable[[str], int]:
    def convert(value: str) -> int:
        if value.isdecimal():
            return int(value)
        raise pytest.UsageError(f"{what} is {value!r}; expected a whole number from 0 up")

    return convert


def _from_ini(convert: Callable[[str], T], name: str, config: pytest.Config) -> T:
    try:
        return convert(config.getini(name))
    except pytest.UsageError as error:
        raise pytest.UsageError(f"ini value {name}: {error}") from None
