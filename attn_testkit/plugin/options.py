"""The plugin's options and their ini values: options of a run, and options of pytest only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ..registry import UsageError
from ..reports.shards import Shard, requested_shard
from ..running.planning.request import EXECUTIONS, Options, Request, asked, options_of
from ..running.planning.run_option import SWITCH, Kind, RunOption, whole

_MIN_CASES = whole("min-cases")


def add(parser: pytest.Parser) -> None:
    """Add one group of prefixed options, and ini values for what is set in CI."""
    group = parser.getgroup("attn", "attention backend conformance (attn-testkit)")
    for option in options_of("pytest").values():
        group.addoption(f"--attn-{option.flag}", dest=_dest(option), help=_help(option), **_action(option))
        if option.ini:
            default = "" if option.repeatable or option.default is None else str(option.default)
            kind: Any = {"type": "linelist"} if option.repeatable else {"default": default}
            parser.addini(_ini(option), option.help, **kind)
    group.addoption(
        "--attn-report", metavar="FILE", dest="attn_report",
        help="Write results as JSON, updated as they come. See `attn-testkit results report`.",
    )  # fmt: skip
    group.addoption(
        "--attn-min-cases", type=_reader(_MIN_CASES), metavar="N", dest="attn_min_cases",
        help="Fail if fewer than N case-runs ran. ini: attn_min_cases.",
    )  # fmt: skip
    group.addoption(
        "--attn-show-not-covered", action="store_true", dest="attn_show_not_covered",
        help="List the declared values that no case covers.",
    )  # fmt: skip
    group.addoption(
        "--attn-shard", metavar="K/N", dest="attn_shard",
        help="Run only part K of N of the suite, for `attn-testkit results merge`, and of conformance_cases. "
        "Default: SHARD_INDEX/SHARD_COUNT, if they are set.",
    )  # fmt: skip
    parser.addini("attn_min_cases", "Fail if fewer case-runs ran.", default="0")


def _dest(option: RunOption) -> str:
    return f"attn_{option.flag.replace('-', '_')}"


def _ini(option: RunOption) -> str:
    return f"attn_{option.name}"


def _help(option: RunOption) -> str:
    words = option.kind.words if option.kind.metavar.isupper() else ()
    without = option.repeatable or option.default is None or option.kind is SWITCH
    more = (
        f"One of {', '.join(words)}." if words else "",
        "" if without else f"Default: {option.default}.",
        f"ini: {_ini(option)}." if option.ini else "",
    )
    return " ".join(filter(None, (option.help_on_command_lines, *more)))


def _action(option: RunOption) -> dict[str, Any]:
    """Arguments for pytest's parser. An option with an ini value has no default here."""
    if option.kind is SWITCH:
        return {"action": "store_true"}
    read = {"type": _reader(option.kind), "metavar": option.kind.metavar}
    if option.repeatable:
        return {**read, "action": "append", "default": []}
    return read if option.ini else {**read, "default": option.default}


def asked_for(config: pytest.Config) -> tuple[Request, Options]:
    """The records of options and ini values; raises ``pytest.UsageError`` for a wrong ini value."""
    given = {option.name: _given(option, config) for option in options_of("pytest").values()}
    given["known_failures"] = _known_file(config)
    backends = given.pop("backends")
    # A user reads the failures from the top, or stops at the first.
    request, options = asked("pytest", backends, given, counts_tier=True, order="plainest")
    if options.budget_s is not None:
        request = replace(request, failed_before=_failed_before(config, backends))
    return request, options


def _given(option: RunOption, config: pytest.Config) -> Any:
    given = getattr(config.option, _dest(option))
    if not option.ini or given:
        return given
    listed = config.getini(_ini(option))
    return listed if option.repeatable else _from_ini(option.kind, _ini(option), config)


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

    Deselections by a hook or another plugin do not count: the command line does not show them.
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


def _known_file(config: pytest.Config) -> Path | None:
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
    return int(_from_ini(_MIN_CASES, "attn_min_cases", config)) if given is None else given


def _reader(kind: Kind) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind.parse(text)
        except UsageError as error:
            # argparse would wrap any other exception in its own sentence; the exit code is 4 either way.
            raise pytest.UsageError(str(error)) from None

    return read


def _from_ini(kind: Kind, name: str, config: pytest.Config) -> Any:
    try:
        return _reader(kind)(config.getini(name))
    except pytest.UsageError as error:
        raise pytest.UsageError(f"ini value {name}: {error}") from None
