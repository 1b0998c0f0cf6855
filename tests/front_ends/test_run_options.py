"""All front ends offer the same options of a run, with the same defaults, or the option says why one does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any, get_args

import pytest

from attn_testkit import assert_conformant, check_backend, conformance_cases
from attn_testkit.cli import all_commands
from attn_testkit.cli.options import asked_for as asked_for_by_command
from attn_testkit.plugin import options as plugin_options
from attn_testkit.registry import UsageError
from attn_testkit.running.planning.request import (
    OPTIONS,
    CaseArguments,
    CheckArguments,
    Options,
    Request,
    asked,
    options_of,
)
from attn_testkit.running.planning.run_option import FrontEnd


def of_run() -> dict[str, Any]:
    """What the command gets if nobody gives an option."""
    with all_commands()["run"].make_context("run", []) as context:
        return dict(context.params)


class Parser:
    """The part of pytest's parser that the plugin uses."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.ini: dict[str, Any] = {}

    def getgroup(self, *_: str) -> Parser:
        return self

    def addoption(self, name: str, **words: Any) -> None:
        self.found[words["dest"]] = words.get("default", False if words.get("action") == "store_true" else None)

    def addini(self, name: str, text: str, **words: Any) -> None:
        self.ini[name] = words.get("default", [])


def of_pytest() -> Parser:
    parser = Parser()
    plugin_options.add(parser)  # type: ignore[arg-type]
    return parser


def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
    shown = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in shown if each.kind is each.KEYWORD_ONLY}


def test_what_a_front_end_lacks_has_a_reason_and_an_option_that_nobody_offers_is_none() -> None:
    for name, option in OPTIONS.items():
        assert {*option.lacking} < {*get_args(FrontEnd)}, name
        assert all(reason for reason in option.lacking.values()), name
        assert option.help.endswith("."), name


def test_the_command_offers_each_option_with_its_default() -> None:
    found = of_run()
    for name, option in options_of("run").items():
        assert name in found, name
        assert option.repeatable or found[name] == option.default, name
    assert not {*OPTIONS} - {*options_of("run")} & {*found}


def test_the_plugin_offers_each_option_with_its_default_on_the_command_line_or_in_the_ini_file() -> None:
    parser = of_pytest()
    for name, option in options_of("pytest").items():
        default = parser.found[f"attn_{option.flag.replace('-', '_')}"]
        if option.ini and not option.repeatable:
            assert (default, parser.ini[f"attn_{name}"]) == (None, option.default or ""), name
        else:
            assert default == (list(option.default) if option.repeatable else option.default), name


@pytest.mark.parametrize(
    ("function", "front_end", "typed"),
    [
        (check_backend, "check_backend", CheckArguments),
        (assert_conformant, "check_backend", CheckArguments),
        (conformance_cases, "conformance_cases", CaseArguments),
    ],
)
def test_a_function_offers_each_option_to_help_and_to_mypy(
    function: Callable[..., Any], front_end: FrontEnd, typed: type
) -> None:
    offered = {name: each.default for name, each in options_of(front_end).items() if name != "backends"}
    assert arguments_of(function) == offered
    assert {*typed.__annotations__} == {*offered}
    shown = (function.__doc__ or "").partition("Args:")[2].splitlines()
    assert [line.split(":")[0].strip() for line in shown if line.strip()] == list(offered)


VALUES: dict[str, Any] = {
    "modes": ("decode",), "executions": ("graph",), "tier": "full", "device": "cpu", "seed": 7, "cases": ("x*",),
    "known_failures": "/known.toml", "jobs": 3, "timeout_s": 5.0, "in_process": True, "budget_s": 60.0,
    "diagnose": "none", "diagnose_seconds": 2.5, "mps": "off", "keep_unloadable": True,
    "profile": "2026.12/decode",
}  # fmt: skip
"""Another value of each option than its default."""


def handed(name: str, request: Request, options: Options) -> Any:
    return getattr(request if name in {each.name for each in fields(Request)} else options, name)


def config(name: str, value: Any) -> Any:
    parser = of_pytest()
    option = Of(**parser.found | {f"attn_{OPTIONS[name].flag.replace('-', '_')}": value})
    return Of(option=option, getini=parser.ini.__getitem__, inipath=None, rootpath=Path("/"), invocation_params=PLACE)


PLACE = Of(dir=Path("/"))


@pytest.mark.parametrize(("name", "value"), list(VALUES.items()))
def test_every_front_end_hands_an_option_on(name: str, value: Any) -> None:
    lacking = OPTIONS[name].lacking
    by_command = handed(name, *asked_for_by_command({**of_run(), "backends": (), name: value}))
    assert by_command == (OPTIONS[name].default if "run" in lacking else value)
    if "pytest" not in lacking:
        # pytest itself makes a path of the file's name.
        assert type(value)(handed(name, *plugin_options.asked_for(config(name, value)))) == value
    if "conformance_cases" not in lacking:
        wanted = conformance_cases("m:A", **{name: value}).args[0]  # type: ignore[attr-defined]
        assert handed(name, wanted.request, wanted.options) == value


def test_each_option_has_a_value_above() -> None:
    assert {*VALUES} == {*OPTIONS} - {"backends"}


def test_another_argument_is_refused_by_its_name_and_a_text_in_place_of_a_list_too() -> None:
    with pytest.raises(TypeError, match=r"^check_backend\(\) got .* argument 'mode'; did you mean 'modes'\?$"):
        check_backend("m:A", mode=["decode"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="argument 'jobs'"):
        conformance_cases("m:A", jobs=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"^modes is a list of names: write modes=\['decode'\]"):
        check_backend("m:A", modes="decode")


def test_a_budget_puts_the_most_valuable_case_runs_first() -> None:
    assert asked("run", ("m:A",), {"budget_s": 9.0})[0].order == "most valuable"
    assert asked("run", ("m:A",), {})[0].order == "listed"
