"""Words of case ids were renamed once: what has an old one is answered, and what a case draws stayed the same."""

from __future__ import annotations

import re

import pytest

from attn_testkit.cases.case import WORDS, parse_case
from attn_testkit.cases.renamed_words import RENAMED_WORDS, first_written, renamed

ID = "decode-mha2-d64-bf16-p16-k9-shuffled-gauss-b2prod"


def is_read(word: str) -> bool:
    return any(re.fullmatch(kind.pattern, word) for kind in WORDS)


def test_every_present_word_is_one_and_no_old_word_is() -> None:
    assert [word for word in RENAMED_WORDS.values() if not is_read(word)] == []
    assert [word for word in RENAMED_WORDS if is_read(word)] == []
    assert len(set(RENAMED_WORDS.values())) == len(RENAMED_WORDS)


@pytest.mark.parametrize(("old", "new"), [*RENAMED_WORDS.items(), ("lsepages2own", "lsepages2merged")])
def test_an_old_word_is_answered_with_the_present_one(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=f"case word '{old}' is now '{new}'"):
        parse_case(f"{ID}-{old}")
    assert renamed(f"decode-*-{old}") == f"case word '{old}' is now '{new}'"
    assert renamed(f"decode-*-{new}") == ""


@pytest.mark.parametrize(("old", "new"), [*RENAMED_WORDS.items(), ("lsepages2own", "lsepages2merged")])
def test_what_an_id_draws_follows_from_the_words_that_it_had_first(old: str, new: str) -> None:
    assert first_written(f"{ID}-{new}-s1") == f"{ID}-{old}-s1"
    assert first_written(ID) == ID
