"""The plugin's options, their ini values, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from ..registry import UsageError, unknown
from ..running.planning.request import EXECUTIONS, MODES, TIERS, Request, checked_device, checked_seconds

T = TypeVar("T")

__all__ = ["add", "known_file", "min_cases", "report_file", "request"]


def add(parser: pytest.Parser) -> None:
    """One group, every flag prefixed, an ini value for what people put into CI."""
    group = parser.getgroup("attn", "attention backend conformance (attn-testkit)")
    group.addoption(
        "--attn-backend", action="append", default=[], metavar="SPEC", dest="attn_backend",
        help="Backend to judge: a name from `attn-testkit list`, or module:Class. Repeatable. ini: attn_backends.",
    )  # fmt: skip
    group.addoption(
        "--attn-tier", type=_word("tier", TIERS), metavar="TIER", dest="attn_tier",
        help="How many cases: smoke (default), core or full. ini: attn_tier.",
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
        help="Only cases whose id matches. Repeatable.",
    )  # fmt: skip
    group.addoption(
        "--attn-device", type=_device, default="auto", metavar="DEVICE", dest="attn_device",
        help="auto (default), cuda, cuda:N, or cpu, which emulates CUDA with its graphs.",
    )  # fmt: skip
    group.addoption(
        "--attn-seed", type=_number("seed"), default=0, metavar="N", dest="attn_seed",
        help="Other random data than seed 0.",
    )  # fmt: skip
    group.addoption(
        "--attn-known-failures", metavar="FILE", dest="attn_known_failures",
        help="TOML of failures that are tolerated. ini: attn_known_failures.",
    )  # fmt: skip
    group.addoption(
        "--attn-report", metavar="FILE", dest="attn_report",
        help="Write every result as JSON; complete at every moment. See `attn-testkit report`.",
    )  # fmt: skip
    group.addoption(
        "--attn-min-cases", type=_number("min-cases"), metavar="N", dest="attn_min_cases",
        help="Fail when fewer case-runs than N ran. ini: attn_min_cases.",
    )  # fmt: skip
    group.addoption(
        "--attn-timeout", type=_seconds, default=0.0, metavar="S", dest="attn_timeout",
        help="Seconds that one case-run may take (default 300); it is then given up and reported as timed out.",
    )  # fmt: skip
    group.addoption(
        "--attn-budget", type=_budget, metavar="S", dest="attn_budget",
        help="Begin no case-run of the suite after so many seconds, and the most valuable ones first; exit code 7.",
    )  # fmt: skip
    group.addoption(
        "--attn-keep-unloadable", action="store_true", dest="attn_keep_unloadable",
        help="A backend that cannot be imported is a failing row, and the others are judged all the same.",
    )  # fmt: skip
    parser.addini("attn_backends", "Backends to judge.", type="linelist")
    parser.addini("attn_tier", "smoke, core or full.", default="smoke")
    parser.addini("attn_known_failures", "TOML of tolerated failures, relative to the ini file.", default="")
    parser.addini("attn_min_cases", "Fail when fewer case-runs ran.", default="0")


def request(config: pytest.Config) -> Request:
    """What was asked for; ``pytest.UsageError`` for an ini value that does not exist."""
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
        # Somebody reads the failures from the top, or stops at the first.
        order="plainest" if option.attn_budget is None else "most valuable",
        failed_before=_failed_before(config, backends) if option.attn_budget is not None else (),
        keep_unloadable=option.attn_keep_unloadable,
    )


def _failed_before(config: pytest.Config, backends: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(backend, case) of what pytest's cache says failed the last time."""
    cache = getattr(config, "cache", None)
    names = [nodeid.partition("[")[2][:-1] for nodeid in (cache.get("cache/lastfailed", {}) if cache else {})]
    found = [
        (backend, name.removeprefix(f"{backend}-{execution}-"))
        for name in names
        for backend in backends
        for execution in EXECUTIONS
        if name.startswith(f"{backend}-{execution}-")
    ]
    return tuple(dict.fromkeys(found))


def known_file(config: pytest.Config) -> Path | None:
    """The file of known failures, absolute, or None."""
    given: str | None = config.option.attn_known_failures
    if given:
        return config.invocation_params.dir / given
    listed: str = config.getini("attn_known_failures")
    return (config.inipath.parent if config.inipath else config.rootpath) / listed if listed else None


def report_file(config: pytest.Config) -> Path | None:
    """Where the record goes, absolute, or None."""
    given: str | None = config.option.attn_report
    return config.invocation_params.dir / given if given else None


def min_cases(config: pytest.Config) -> int:
    """The fewest case-runs that make a session worth believing."""
    given: int | None = config.option.attn_min_cases
    return _from_ini(_number("min-cases"), "attn_min_cases", config) if given is None else given


def _word(what: str, words: Sequence[str]) -> Callable[[str], str]:
    def convert(value: str) -> str:
        if value in words:
            return value
        # argparse would print its own sentence around any other exception; exit code 4 either way.
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
