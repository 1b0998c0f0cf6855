"""The file of failures: plain lines, written whole, and a wrong one is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_testkit.fuzz.database import Database, Entry
from attn_testkit.registry import UsageError

ONE, TWO = Entry("m:A", "eager", "decode-1", "finite"), Entry("m:B", "graph", "decode-2", "crashed")


def test_what_is_kept_is_there_the_next_time_and_a_line_each(tmp_path: Path) -> None:
    made = Database(tmp_path / "new" / "folder")
    made.replace(None, ONE)
    made.replace(None, TWO)
    made.replace(None, TWO)
    assert made.file.read_text() == "m:A\teager\tdecode-1\tfinite\nm:B\tgraph\tdecode-2\tcrashed\n"
    again = Database(tmp_path / "new" / "folder")
    assert again.of("m:A") == [ONE]
    assert again.of("m:B") == [TWO]
    assert list(made.file.parent.iterdir()) == [made.file]


def test_a_smaller_failure_takes_the_place_of_a_larger_one_and_one_that_is_gone_goes(tmp_path: Path) -> None:
    made = Database(tmp_path)
    made.replace(None, ONE)
    made.replace(ONE, Entry("m:A", "eager", "decode-0", "finite"))
    assert [entry.case for entry in Database(tmp_path).of("m:A")] == ["decode-0"]
    made.replace(made.of("m:A")[0], None)
    assert Database(tmp_path).of("m:A") == []


@pytest.mark.parametrize("text", ["m:A eager decode finite\n", "a\tb\tc\n", "a\tb\tc\td\te\n"])
def test_a_line_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "failures.tsv").write_text("m:A\teager\tdecode-1\tfinite\n" + text)
    with pytest.raises(UsageError, match=r"failures.tsv, line 2: expected backend, execution, case and check"):
        Database(tmp_path)


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(UsageError, match=rf"cannot use {folder} for failures: "):
            Database(folder)
