"""The programs that the emulation is compared with a GPU on are ordinary CUDA programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from rules_of_programs import changed_names, lines_of_attention, names_at_the_top

from attn_testkit_corpus import calibrate

FILES = sorted(Path(calibrate.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_program_says_nothing_of_attention(path):
    assert lines_of_attention(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_program_changes_a_name_or_a_table_of_its_module(path):
    assert changed_names(path, names_at_the_top(path)) == []
