"""Every command-line option that a page names exists: with the command it stands with, or with some command at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import all_pages
from transcript import ROOT, fences_of

from attn_testkit.cli import all_commands
from attn_testkit.plugin import options as plugin_options
from attn_testkit.running.planning import request

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_OURS = re.compile(r"(?:attn-testkit|-m attn_testkit) +((?:results )?[a-z]+)(?![\w.])")
ELSEWHERE = {
    "--no-deps", "--no-build-isolation", "--index-url", "--system-site-packages",  # pip, venv
    "--pyargs", "--deselect", "--ff", "--lf", "--junitxml", "--maxfail",  # pytest
    "--strict",  # mypy, mkdocs
    "--disable-hybrid-kv-cache-manager", "--model-path",  # vLLM, SGLang
    "--dsa-decode-backend", "--dsa-prefill-backend", "--dsv", "--enable-page-major-kv-layout",  # SGLang
    "--kv-cache-dtype", "--linear-attn-backend", "--linear-attn-decode-backend",  # SGLang
    "--page-size", "--speculative-eagle-topk",  # SGLang
    "--enable-mamba-cache-stochastic-rounding",  # SGLang, vLLM
    "--working-dir",  # Ray
    "--split-compile",  # nvcc
}  # fmt: skip
"""Options of programs that are not ours."""


def options_of() -> dict[str, set[str]]:
    """Of each command of ``attn-testkit``."""
    everywhere = {"--help", "--version"}
    return {
        name: everywhere | {word for param in command.params for word in (*param.opts, *param.secondary_opts)}
        for name, command in all_commands().items()
    }


def of_pytest() -> set[str]:
    of_a_run = {f"--attn-{option.flag}" for option in request.options_of("pytest").values()}
    return of_a_run | set(_OPTION.findall(Path(str(plugin_options.__file__)).read_text()))


def of_scripts() -> set[str]:
    """What the repository's own scripts and modules read, by the text of their sources."""
    sources = [*(ROOT / "ci").glob("*.py")]
    for package in ("attn_testkit", "packages"):
        sources += (ROOT / package).rglob("*.py")
    return {word for path in sources for word in re.findall(r"[\"'](--[a-z][a-z-]*)[\"']", path.read_text())}


def lines_of(body: str) -> list[str]:
    """Lines of a fence; one that ends with a backslash with the next."""
    return body.replace("\\\n", " ").splitlines()


def wrong_in(line: str) -> list[str]:
    """Options of a line that the command in it does not have; one without a command is asked of none."""
    match = _OURS.search(line)
    if not match:
        return []
    known = options_of()
    if match[1] not in known:
        return [f"attn-testkit {match[1]}: no such command"]
    # Behind a lone -- is the command of another program.
    rest = re.split(r"[|>]|&&| -- ", line[match.end() :])[0]
    return [f"attn-testkit {match[1]} {word}" for word in _OPTION.findall(rest) if word not in known[match[1]]]


def commands_of(page: Path, text: str) -> list[str]:
    shown = [line for fence in fences_of(page, text) if not fence.title for line in lines_of(fence.body)]
    return [*shown, *re.findall(r"`([^`\n]*attn-testkit [^`\n]*)`", text)]


def test_the_options_of_every_shown_command_are_its_own() -> None:
    lines = [(page.name, line) for page, text in all_pages().items() for line in commands_of(page, text)]
    assert [f"{name}: {wrong}" for name, line in lines for wrong in wrong_in(line)] == []


def test_every_option_that_is_named_exists_somewhere() -> None:
    known = set().union(*options_of().values()) | of_pytest() | of_scripts() | ELSEWHERE
    named = [(page.name, option) for page, text in all_pages().items() for option in sorted(set(_OPTION.findall(text)))]
    assert [f"{name}: {option}" for name, option in named if option not in known] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("$ attn-testkit run --backend x --device cpu", []),
        ("attn-testkit run --bakend x", ["attn-testkit run --bakend"]),
        ("python -m attn_testkit repro --jobs 3 CASE", ["attn-testkit repro --jobs"]),
        ("attn-testkit rum --backend x", ["attn-testkit rum: no such command"]),
        ("attn-testkit results report x.json --markdown", []),
        ("attn-testkit results merge x.json --markdown", ["attn-testkit results merge --markdown"]),
        ("attn-testkit results mrge x.json", ["attn-testkit results mrge: no such command"]),
        ("attn-testkit list | grep --count x", []),
        ("attn-testkit record --to x -- serve --port 1", []),
        ("python -m attn_testkit_corpus.calibrate --measure", []),
    ],
)
def test_a_wrong_option_is_seen(line: str, wrong: list[str]) -> None:
    assert wrong_in(line) == wrong
