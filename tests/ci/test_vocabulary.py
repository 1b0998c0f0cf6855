"""The vocabulary check: wrong and right sentences of each phrase, the kinds of files, and the counts of the project."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("vocabulary")


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
    "Which keys a row sees. Is it all?",
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
    "Which page sizes of the KV pool, in slots? Default: 16.",
    "With an FP8 pool: to what are queries rounded? Default: nothing.",
)


@pytest.mark.parametrize("text", FRAGMENTS)
def test_a_docstring_that_needs_the_line_above_it_is_a_fragment(check: ModuleType, text: str) -> None:
    assert check.begins_as_fragment(text)


@pytest.mark.parametrize("text", SENTENCES)
def test_a_docstring_that_begins_with_a_noun_or_a_verb_is_not_a_fragment(check: ModuleType, text: str) -> None:
    assert not check.begins_as_fragment(text)


def found(check: ModuleType, name: str, source: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.text) for finding in check.findings(name, source, check.phrases())]


def test_each_phrase_is_found_in_its_wrong_sentences_and_not_in_its_right_ones(check: ModuleType) -> None:
    missed, false_alarms = [], []
    for phrase in check.phrases():
        assert phrase.wrong
        for text in phrase.wrong:
            for name, source in (
                ("a.py", f'def f():\n    """Module.\n\n    {text}"""\n'),
                ("a.py", f"x = 1  # {text}\n"),
                ("a.py", f'x = "{text}"\n'),
                ("a.py", f'x = f"{text} {{1}}"\n'),
                ("a.md", f"# Title\n\n{text}\n"),
                ("a.md", f"* One.\n* {text}\n"),
                ("a.md", f"| a | {text} |\n"),
                ("a.html.j2", f"<p>{text}</p>\n"),
            ):
                hits = [words for _, words in found(check, name, source) if words.endswith(phrase.write)]
                missed += [] if len(hits) == 1 else [(source, hits)]
        false_alarms += [(text, phrase.write) for text in phrase.right if found(check, "a.md", f"{text}\n")]
    assert missed == []
    assert false_alarms == []


def test_docstrings_of_all_kinds_are_read_with_their_lines(check: ModuleType) -> None:
    source = '''"""Whether one."""

class A:
    """Of two."""

    x: int
    """How three is."""

    def f(self):
        """As four."""
        return "what a string is"  # what a comment is
'''
    assert [line for line, _ in found(check, "a.py", source)] == [1, 4, 7, 10]


def test_a_phrase_over_two_lines_has_the_line_on_which_it_begins(check: ModuleType) -> None:
    assert [line for line, _ in found(check, "a.py", "x = 1\n# modes by\n# turns\ny = 2\n# by\n\n# turns\n")] == [2]
    assert [line for line, _ in found(check, "a.py", '"""One.\n\nTwo\nmodes by\nturns.\n"""\n')] == [4]
    assert [line for line, _ in found(check, "a.md", "One.\n\n* two\n  modes by\n  turns\n")] == [4]


def test_code_and_names_are_not_read(check: ModuleType) -> None:
    assert not found(check, "a.py", 'told = {"claimed": 1, "alone": 2}\n')
    assert not found(check, "a.py", '"""The field ``told``, and `alone`."""\n')
    assert not found(check, "a.md", "```\nrows alone\n```\n\nThe field `alone`, [this](beside.md). <!-- alone -->\n")
    assert not found(check, "a.toml", 'word = {also = ["told", "by turns"], text = "A word."}\n')
    assert [line for line, _ in found(check, "a.md", "```\nrows alone\n```\nRows alone.\n")] == [4]


def test_the_pattern_of_a_hint_is_not_a_text(check: ModuleType) -> None:
    assert not found(check, "a.py", 'fault("a", "finite", "only here|in graphs alone")\n')
    assert not found(check, "a.py", 'fault("a", "finite", hint="only here|in graphs alone")\n')
    assert found(check, "a.py", 'fault("a", "finite", modelled="in graphs alone")\n')
    assert found(check, "a.py", 'told("a", "finite", "in graphs alone")\n')


def test_a_count_that_rises_or_falls_differs_from_the_table(check: ModuleType) -> None:
    assert not check.differences({"a": 2}, {"a": 2})
    (risen,) = check.differences({"a": 3}, {"a": 2})
    assert risen.startswith("a: 3 findings, 2 are accepted")
    (new,) = check.differences({"b": 1}, {})
    assert new.startswith("b: 1 findings, 0 are accepted")
    (fallen,) = check.differences({}, {"a": 2})
    assert fallen == "a: 2 findings are accepted, it has 0: `python ci/vocabulary.py --write`"


def test_writing_the_table_lowers_numbers_and_never_raises_one(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "vocabulary.toml"
    table.write_text('# Why.\n[accepted]\na = 3\nb = 1\n"c.md" = 2\n\n[[phrase]]\nfind = "x"\n')
    monkeypatch.setattr(check, "TABLE", table)
    monkeypatch.setattr(check, "counts", lambda: {"a": 5, "b": 0, "c.md": 1, "d": 1})
    monkeypatch.setattr("sys.argv", ["vocabulary.py", "--write"])
    assert check.main() == 0
    assert table.read_text() == '# Why.\n[accepted]\n"a" = 3\n"c.md" = 1\n\n[[phrase]]\nfind = "x"\n'


def test_the_check_fails_and_names_the_package_if_a_number_rises(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "counts", lambda: {**check.accepted(), "running": 1000})
    monkeypatch.setattr("sys.argv", ["vocabulary.py", "--check"])
    assert check.main() == 1
    assert "running: 1000 findings" in capsys.readouterr().err
