"""How pages are compared with programs, held by lines that differ in one thing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transcript import Command, changed, commands, fences, rewritten, same, same_line

ROW = "my:Backend  decode  eager      8    0.37      0.2  emulated: device"


@pytest.mark.parametrize(
    "printed",
    [
        "my:Backend  decode  eager      8    0.37     10.2  emulated: device",
        "my:Backend      decode      eager  8  0.37  0.4  emulated: device",
        "my:Backend  decode  eager      8    0.47      0.2  emulated: device",
        "my:Backend  decode  eager      8    0.27      0.2  emulated: device",
    ],
)
def test_times_widths_and_a_margin_near_by_are_the_same(printed: str) -> None:
    assert same_line(ROW, printed)


@pytest.mark.parametrize(
    "printed",
    [
        "my:Backend  decode  eager      9    0.37      0.2  emulated: device",
        "my:Backend  decode  eager      8    0.48      0.2  emulated: device",
        "my:Backend  decode  eager      8    0.26      0.2  emulated: device",
        "my:Backend  decode  eager      8              0.2  emulated: device",
        "my:Backend  decode  graph      8    0.37      0.2  emulated: device",
        "my:Backend  decode  eager      8    0.37      0.2  emulated: device, graph",
        "",
    ],
)
def test_all_else_is_compared(printed: str) -> None:
    assert not same_line(ROW, printed)


@pytest.mark.parametrize(
    ("printed", "alike"),
    [
        ("my:Backend  decode  eager      8    0.37      3.5       12.1  emulated: device", True),
        ("my:Backend  decode  eager      8    0.60      0.2        1.2  emulated: device", False),
        ("my:Backend  decode  eager      9    0.37      0.2        1.2  emulated: device", False),
    ],
)
def test_the_seconds_of_a_diagnosis_are_a_time(printed: str, alike: bool) -> None:
    assert same_line("my:Backend  decode  eager      8    0.37      0.2        1.2  emulated: device", printed) is alike


@pytest.mark.parametrize(
    ("shown", "printed", "alike"),
    [
        ("  backend  my:B · torch 2.13.0+cpu · eager", "  backend  my:B · torch 2.12.1 · eager", True),
        ("  backend  my:B · torch 2.13.0+cpu · eager", "  backend  my:C · torch 2.13.0+cpu · eager", False),
        ("x (graph): passed, margin 0.05; setup 0.171 s", "x (graph): passed, margin 0.15; setup 1.2 s", True),
        ("x (graph): passed, margin 0.05; setup 0.171 s", "x (graph): passed, margin 0.16; setup 0.171 s", False),
        ("  check    finite", " check    finite", False),
    ],
)
def test_versions_and_seconds_in_a_sentence(shown: str, printed: str, alike: bool) -> None:
    assert same_line(shown, printed) is alike


@pytest.mark.parametrize(
    ("shown", "printed", "alike"),
    [
        (("a", "...", "d"), ("a", "b", "c", "d"), True),
        (("a", "...", "d"), ("a", "d"), True),
        (("a", "...", "d"), ("a", "b", "c"), False),
        (("a", "..."), ("a", "b"), True),
        (("a",), ("a", "b"), False),
        (("a", "b"), ("a",), False),
        ((), (), True),
    ],
)
def test_three_dots_stand_for_any_lines(shown: tuple[str, ...], printed: tuple[str, ...], alike: bool) -> None:
    assert same(shown, printed) is alike


def test_a_fence_holds_commands_and_what_each_prints() -> None:
    body = "$ one \\\n    --more\n1\n\n1\n$ two\n"
    assert commands(body) == [Command("one \\\n    --more", ("1", "", "1")), Command("two", ())]
    with pytest.raises(ValueError, match="begins with a command"):
        commands("1\n$ one\n")


def test_a_diff_changes_the_lines_that_it_shows() -> None:
    assert changed("a\nb\nc\nd\n", " a\n-b\n+B\n@@\n+x\n d\n") == "a\nB\nc\nx\nd\n"


@pytest.mark.parametrize(("text", "times"), [("a\na\n", 2), ("b\n", 0)])
def test_a_diff_must_fit_exactly_once(text: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"{times} times"):
        changed(text, "-a\n+b\n")


def test_a_page_is_rewritten_where_it_differs_and_keeps_what_it_abbreviates(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    text = (
        "# Page\n\n"
        '```text title="in.txt"\none\n```\n\n'
        "```console\n$ cat in.txt\nold\nold\n```\n\n"
        '```diff title="in.txt"\n-one\n+two\n```\n\n'
        "```console\n$ cat in.txt\nold\n```\n\n"
        "```console\n$ seq 9\n1\n...\n```\n\n"
        "```console\n$ echo 0.1 s\n9.9 s\n```\n"
    )
    page.write_text(text)
    assert [fence.line for fence in fences(page)] == [4, 8, 14, 19, 24, 30]
    wanted = text.replace("old\nold\n", "one\n").replace("old\n", "two\n")
    assert rewritten(page, folder) == wanted
