"""The check of docstrings and phrases: bad and good examples of each, and the counts of the kit's own files."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("docstrings")


FRAGMENTS = (
    "What a step read.",
    "Whether it is right.",
    "Of a draft, from 0 on.",
    "As ``clear``.",
    "Which keys a row sees.",
    "Those of a layer.",
    "How it is written.",
    "The same as one object.",
    "Where it was raised.",
    "That it is empty.",
    "Whose page it is.",
    "In the words of torch.",
    "If any.",
    "rows of a request",
    "auto, cuda or cpu.",
)
SENTENCES = (
    "Rows of a request.",
    "Return the rows of a request.",
    "True if a row is right.",
    "A page.",
    "The same value in each layer of a case.",
    "Of-page rows.",
    "[rows, heads] float32.",
    "``seq_lens`` of the batch.",
    "q of all rows.",
    "seq_lens of the batch.",
    "torch's allocator.",
    "Asked keys.",
    "Whatsoever.",
    "Isolate a process.",
    "Forward one batch.",
    "Input of a layer.",
)


@pytest.mark.parametrize("text", FRAGMENTS)
def test_a_docstring_that_needs_the_line_above_it_is_a_fragment(check: ModuleType, text: str) -> None:
    assert check.begins_as_fragment(text)


@pytest.mark.parametrize("text", SENTENCES)
def test_a_docstring_that_begins_with_a_noun_or_a_verb_is_not_a_fragment(check: ModuleType, text: str) -> None:
    assert not check.begins_as_fragment(text)


BANNED = (
    "chains alone",
    "4 rows a request",
    "once a launch",
    "Rows a request are counted",
    "one file a command",
    "pages beside the last",
    "it was mended",
    "held against the oracle",
    "holds each row against the oracle",
    "modes by turns",
    "the judge is told",
    "it is no gate",
    "there are mutants that are none",
    "what stands between two pages",
    "a stub stands in for SGLang",
    "checks that were judged",
    "launched as ever",
    "drawn by lot",
    "the file is put back",
    "the table says so",
    "modes that it claims",
    "an unclaimed mode",
    "values that are untried",
    "a neighbour of the instance",
    "a twin of the case",
    "hostile backends",
    "it drives a backend",
    "rows that went astray",
    "enriched cases",
    "the plainest case",
    "a way of servers",
    "parts of the keys",
    "the check to blame",
    "It runs. What is not declared is not tried. It ends.",
)
ALLOWED = (
    "leave it alone",
    "let alone two",
    "4 rows per request",
    "gives a request a page",
    "pages a server keeps hold rows",
    "makes a case",
    "one inside a capture",
    "there is no gate",
    "it is no longer open",
    "it is None",
    "the judge",
    "a stand-in for SGLang",
    "a stand-alone file",
    "one value stands out",
    "understood",
    "the driver of CUDA",
    "the way of the row",
    "``claims.alone`` is read",
    "It runs. What is declared? It ends.",
    "hold a row. Against this",
)


@pytest.mark.parametrize("text", BANNED)
def test_a_private_phrase_is_found_in_docstrings_comments_and_strings(check: ModuleType, text: str) -> None:
    assert len(list(check.phrases(text))) == 1
    for source in (f'"""Module: {text}"""', f"x = 1  # {text}", f'x = "{text}"', f'x = f"{text} {{1}}"'):
        assert [finding.kind for finding in check.findings(source)] == ["phrase"]


@pytest.mark.parametrize("text", ALLOWED)
def test_a_phrase_of_ordinary_english_is_not_found(check: ModuleType, text: str) -> None:
    assert not list(check.phrases(text))


def test_docstrings_of_all_kinds_are_read_with_their_lines(check: ModuleType) -> None:
    source = '''"""Whether one."""

class A:
    """Of two."""

    x: int
    """What three is."""

    def f(self):
        """As four."""
        return "what a string is"  # what a comment is
'''
    assert [(finding.line, finding.kind) for finding in check.findings(source)] == [
        (line, "fragment") for line in (1, 4, 7, 10)
    ]


def test_a_phrase_over_two_lines_is_found_and_a_name_is_not(check: ModuleType) -> None:
    assert [finding.line for finding in check.findings("x = 1\n# modes by\n# turns\ny = 2\n# by\n\n# turns\n")] == [2]
    assert not check.findings('claims = {"claimed": 1, "alone": 2}\n')


def test_the_pattern_of_a_hint_is_not_a_text(check: ModuleType) -> None:
    assert not check.findings('fault(slug="a", hint="only here|in graphs alone")\n')
    assert check.findings('fault(slug="a", modelled="in graphs alone")\n')


def test_a_count_that_rises_or_falls_differs_from_the_table(check: ModuleType) -> None:
    assert not check.differences({"a": 2}, {"a": 2})
    (risen,) = check.differences({"a": 3}, {"a": 2})
    assert risen.startswith("a: 3 findings, 2 are accepted")
    (new,) = check.differences({"b": 1}, {})
    assert new.startswith("b: 1 findings, 0 are accepted")
    (fallen,) = check.differences({}, {"a": 2})
    assert fallen == "a: 2 findings are accepted, it has 0; write 0 (`python ci/docstrings.py --write`)"


def test_writing_the_table_lowers_numbers_and_never_raises_one(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "docstrings.toml"
    table.write_text("# Why.\na = 3\nb = 1\nc = 2\n")
    monkeypatch.setattr(check, "TABLE", table)
    monkeypatch.setattr(check, "counts", lambda: {"a": 5, "b": 0, "c": 1, "d": 1})
    monkeypatch.setattr("sys.argv", ["docstrings.py", "--write"])
    check.main()
    assert table.read_text() == "# Why.\na = 3\nc = 1\n"


def test_the_kit_has_no_more_fragments_and_private_phrases_than_the_table_accepts(check: ModuleType) -> None:
    assert not check.differences(check.counts(), check.accepted())
