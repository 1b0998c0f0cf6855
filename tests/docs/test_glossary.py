"""The glossary has every word that a reader meets, in plain sentences, and its page has them all."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from pages import DOCS, all_pages, generated
from transcript import ROOT

from attn_testkit.cases import explained
from attn_testkit.cases.case import WORDS
from attn_testkit.cases.explained import all_entries, entry_of
from attn_testkit.cases.features.server.table import SERVER_VARIANTS
from attn_testkit.glossary import Entry
from attn_testkit.reports import verdict
from attn_testkit.reports.tally import text_table
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.checks import CHECKS
from attn_testkit.results.failure_text import format_failure
from attn_testkit.results.finding import Finding
from attn_testkit.results.names import EXECUTIONS, MODES
from attn_testkit.running.planning.request import TIERS

BANNED = re.compile(
    r"\b(by turns|of its own|as ever|(is|are) told|told|says so|stands? (in|at|behind)|beside|who declares|is no|are "
    r"none"
    r"|at the least|by lot|puts? back|has it that|in company|mended|held against|alone|what is not)\b",
    re.IGNORECASE,
)
"""Phrases that English readers stumble over. ``alone`` is meant as "only" too often to be let in."""
ENTRIES = {entry.word: entry for entry in all_entries()}


def sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.?!])\s+", text) if each]


def words_of_ids() -> list[str]:
    """Entries that are one word of a case id."""
    return [word for word in ENTRIES if any(re.fullmatch(kind.pattern, word) for kind in WORDS)]


def literal_headings(page: str) -> set[str]:
    text = next(path for path in ROOT.rglob(page) if "build" not in path.parts).read_text()
    cells = re.findall(r"<th\b[^>]*>(.*?)</th>", text)
    found = {re.sub(r"<.*?>", "", cell).strip() for cell in cells}
    return {cell for cell in found if cell and "{" not in cell}


def result(status: Status, **more: object) -> CaseResult:
    return CaseResult("b", "decode", "eager", "decode-x", status, **more)  # type: ignore[arg-type]


def test_the_page_has_a_row_for_each_entry() -> None:
    page = generated()["reference/glossary.md"]
    assert [word for word in ENTRIES if f"| [{word}](" not in page] == []


def test_each_kind_of_word_of_a_case_id_has_an_entry_and_each_listed_value_its_own() -> None:
    of_ids = words_of_ids()
    for kind in WORDS:
        assert any(re.fullmatch(kind.pattern, word) for word in of_ids), f"no entry is a word like {kind.pattern}"
    for value in (value for kind in WORDS for value in kind.spelled):
        found = entry_of(value)
        assert found is not None, f"no feature explains {value!r}, a word of case ids"
        assert found.word == value, f"{value!r} has the entry of {found.word!r}, another word of case ids"


def test_each_optional_ending_of_a_word_has_an_entry() -> None:
    # Endings change the meaning, and a pattern does not list them: `w11same` and `b4nan` are read by one pattern each.
    listed = [(kind, each) for kind in WORDS for each in re.findall(r"\(([a-z]+(?:\|[a-z]+)*)\)", kind.pattern)]
    endings = {(kind.pattern, ending) for kind, each in listed for ending in each.split("|")}
    assert {"one", "same", "nan", "groups", "merged"} <= {ending for _, ending in endings}
    for pattern, ending in endings:
        fitting = [word for word in words_of_ids() if re.fullmatch(pattern, word)]
        assert any(ending in word for word in fitting), f"no entry with {ending!r} of {pattern}"


def test_every_word_of_a_real_case_id_is_found_whatever_its_numbers() -> None:
    ids = [
        "extend-gqa8x2-d96-fp16-p32-k0.15x3.7-n12a17.1x2-chunks5-shared-gauss-kvfp8e4m3-w7same-cap2.25-sink-b7nan-multi_mode-s3",
        "target-verify-mla4-d64r16-bf16-p8-k9.40-t0.0.1.1-reversed-rising_logits-layers4from9-b3stale",
        "draft-decode-mqa8-d128-fp32-p1-k33-topk3steps5-prefixed-loop4-contiguous-mean-b1prod",
        "decode-mha6-d64-bf16-p16-k33x2-shuffled-plus_minus_one-layers3from2by4x2d64.8x1d32-b2small",
    ]
    for case_id in ids:
        mode = next(mode for mode in sorted(MODES, key=len, reverse=True) if case_id.startswith(mode))
        assert entry_of(mode) is not None
        for word in case_id.removeprefix(f"{mode}-").split("-"):
            found = entry_of(word)
            assert found is not None, word
            kind = next(kind for kind in WORDS if re.fullmatch(kind.pattern, word))
            assert re.fullmatch(kind.pattern, found.word), f"{word} has the entry of {found.word}"


def test_a_number_that_changes_the_meaning_is_not_ignored() -> None:
    assert entry_of("fp64") is None
    assert entry_of("kvfp8e5m2") is None
    assert entry_of("draft-extend-v3") is None


def test_modes_executions_tiers_variants_and_statuses_have_entries() -> None:
    words = [*MODES, *EXECUTIONS, *TIERS, *SERVER_VARIANTS, *(status.value for status in Status)]
    assert [word for word in words if not entry_of(word)] == [], "neither glossary.toml nor a feature has an entry"


def test_every_label_of_a_failure_text_has_an_entry() -> None:
    texts = {each.name: "x" for each in fields(Finding) if each.init and each.type == "str"}
    text = format_failure(result(Status.FAILED, findings=(Finding(**texts),), not_evaluated=("finite",)))
    labels = [line.split()[0] for line in text.splitlines()[1:]]
    assert {"check", "step", "where", "spread", "attended", "hint", "untested", "backend", "repro"} <= set(labels)
    assert [label for label in labels if entry_of(label) is None] == []


def test_every_heading_of_a_table_has_an_entry() -> None:
    head = text_table(
        [replace(result(status, margin=0.5), backend=backend, device="cuda") for backend in "ab" for status in Status]
    )[0]
    headings = re.split(r"\s{2,}", head.strip())
    assert {"backend", "ran on", *(status.value for status in Status)} <= set(headings)
    headings += sorted(literal_headings("report.html.j2") | literal_headings("audit.html.j2"))
    assert "false alarms" in headings
    assert [each for each in headings if entry_of(each) is None] == []


def test_every_word_of_a_verdict_has_an_entry() -> None:
    sources = [inspect.getsource(each) for each in (verdict._words, verdict._partial)]
    constants = [n.value for source in sources for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    texts = [text for text in constants if isinstance(text, str)]
    found = [re.match(r"[A-Z]{2,}(?: [A-Z]{2,})*", text) for text in texts]
    words = {match[0] for match in found if match}
    assert {"CONFORMANT", "INCOMPLETE", "NOT CONFORMANT", "NOTHING RAN", "PARTIAL", "SHARD"} == words
    assert [word for word in words - {"SHARD"} if entry_of(word) is None] == []


def test_an_entry_has_one_or_two_whole_sentences_without_a_banned_phrase() -> None:
    assert len(ENTRIES) > 150
    for entry in all_entries():
        parts = sentences(entry.text)
        assert 1 <= len(parts) <= 2, entry.word
        assert entry.text.endswith("."), entry.word
        found = BANNED.search(" ".join((entry.text, *entry.also)))
        assert found is None, f"{entry.word}: {found and found[0]}"
        assert "|" not in entry.text, f"{entry.word}: a bar ends the cell of its table"


@pytest.mark.parametrize("text", ["Modes run by turns.", "That is no proof.", "In decode alone.", "It is told to it."])
def test_the_banned_phrases_are_seen(text: str) -> None:
    assert BANNED.search(text)


def test_every_entry_names_a_page_and_none_takes_the_name_of_another_check() -> None:
    for entry in all_entries():
        assert DOCS / entry.page in all_pages(), entry.word
        assert ENTRIES[entry.word] is entry, f"{entry.word} has two entries"
    shadowed = {word for entry in all_entries() for word in (entry.word, *entry.also)} & set(CHECKS)
    # `explain` prints both texts of an entry.
    assert shadowed == {"log-sum-exp"}


def test_a_word_that_two_entries_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = (Entry("slot", "A."), Entry("place", "B.", also=("Slot",)))
    monkeypatch.setattr(explained, "general_entries", lambda: twice)
    with pytest.raises(ValueError, match="'slot' twice, as 'slot' and as 'place'"):
        entry_of("slot")


def test_a_general_word_is_found_without_the_features_that_import_torch() -> None:
    program = (
        "import sys; from attn_testkit.cases.explained import entry_of\n"
        "assert entry_of('bucket')\nprint('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_pages_link_the_glossary() -> None:
    assert "(../reference/glossary.md)" in (ROOT / "docs" / "how-to" / "find-the-cause.md").read_text()
