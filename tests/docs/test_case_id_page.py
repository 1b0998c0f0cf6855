"""The page of case ids and the parser say the same: every word parses, and every value of the code stands there."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

import pytest
from transcript import ROOT

from attn_testkit.cases.case import DATA, LAYOUTS, PADDINGS, WORDS, parse_case
from attn_testkit.cases.features.server.table import SERVER_VARIANTS
from attn_testkit.cases.fields import DEFAULTS
from attn_testkit.cases.rows import Rows
from attn_testkit.cases.state import STATE_DATA
from attn_testkit.contract import ForwardMode

PAGE = (ROOT / "docs" / "reference" / "case-ids.md").read_text()
PLAIN = {
    "decode": "decode-gqa4x2-d64-bf16-p8-k33-shuffled-gauss-b5prod",
    "target-verify": "target-verify-gqa4x2-d64-bf16-p8-k33-chain5-shuffled-gauss-b5prod",
    "draft-extend": "draft-extend-gqa4x2-d64-bf16-p8-k33x2-n7a1.2-shuffled-gauss-b5prod",
    "draft-extend-v2": "draft-extend-v2-gqa4x2-d64-bf16-p8-k33x2-n7a1.2-shuffled-gauss-b5prod",
    "extend": "extend-gqa4x2-d64-bf16-p8-k0.15.32-n13a17.1x2-shuffled-gauss-b5prod",
    "draft-decode": "draft-decode-gqa4x2-d64-bf16-p8-k33-topk2steps3-shuffled-gauss-b5prod",
}
NEEDED = {
    "idx": ["sel16"],
    "freed_": ["w7", "layers3from5groups"],
    "leftof": ["w7", "noncausal"],
    "bothsides": ["w7", "noncausal"],
    "encoder": ["noncausal"],
}
"""Beginning of a word -> other words without which no case has it."""
STATES = "decode-gdn4x2-d64-bf16-p8-k33-shuffled-mild_decay-k32w2s32-b5prod"
"""A case whose layers keep a state."""


def table(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without those of its head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


EVERYWHERE = [(word, "decode") for row in table("Always there") for word in words(row[0]) if word not in PLAIN]
OF_MODES = [(w, mode) for row in table("Of a mode") for w in words(row[0]) for mode in row[1].split(", ")]
OPTIONAL = [(word, "decode") for row in table("Optional") for word in words(row[0])]
OF_OTHER_SHAPES = {"lightning8": "k32w1", "rwkv8": "k32w1", "conv8": "k0w2", "k0w3s32": "k0w3"}
"""Word -> shape of a state that it needs."""


def states_with(word: str) -> str:
    """A case that may have the word."""
    if word not in OF_OTHER_SHAPES:
        return STATES
    kind = word[:-1] if word.endswith("8") else "conv"
    return STATES.replace("gdn4x2-", f"{kind}4-").replace("k32w2", OF_OTHER_SHAPES[word])


OF_STATES = [(word, states_with(word)) for row in table("Of layers that keep a state") for word in words(row[0])]
COMPRESSED = "decode-compressor1-d128-bf16-p128-k5.9-shuffled-gauss-ratio8-b2prod"
OF_COMPRESSORS = [(word, COMPRESSED) for row in table("Of layers that compress keys") for word in words(row[0])]


def kinds() -> list[re.Pattern[str]]:
    """The words that the parser knows: a pattern each."""
    return [re.compile(word.pattern) for word in WORDS]


def kind_of(word: str) -> re.Pattern[str]:
    return next(pattern for pattern in kinds() if pattern.fullmatch(word))


def with_word(case_id: str, word: str) -> str:
    """The id with this word in the place of the one of its kind, or where a word of its kind stands."""
    mode = next(m for m in sorted(PLAIN, key=len, reverse=True) if case_id.startswith(m + "-"))
    parts = case_id[len(mode) + 1 :].split("-")
    for needed in (others for start, others in NEEDED.items() if word.startswith(start)):
        parts[parts.index("gauss") : parts.index("gauss") + 1] = ["gauss", *needed]
    if word.startswith("encoder"):
        # A sequence is encoded at once.
        parts = ["k0x3" if part.startswith("k0.") else part for part in parts]
    if word.startswith("sel4of16pages"):
        # An index is a page.
        parts = ["p16" if part == "p8" else part for part in parts]
    if word.endswith("dsmla") or word.startswith("kvfp8dsmla"):
        # Packed rows are latent ones, in whole tiles.
        parts[:2] = ["mla4", "d128" if "v4" in word else "d128r64"]
    kind = kind_of(word)
    # A tree takes the chain's place.
    same = [at for at, part in enumerate(parts) if kind_of(part) is kind or (part == "chain5" and word[0] == "t")]
    if same:
        parts[same[0]] = word
        return "-".join([mode, *parts])
    # The parser names the usual form of an id whose words stand in another order.
    with pytest.raises(ValueError, match="not in its usual form; write ") as refused:
        parse_case("-".join([mode, word, *parts]))
    return str(refused.value).rpartition("write ")[2]


def test_every_word_of_the_page_parses() -> None:
    of_modes = [(word, PLAIN[mode]) for word, mode in (*EVERYWHERE, *OF_MODES, *OPTIONAL)]
    for word, case_id in (*of_modes, *OF_STATES, *OF_COMPRESSORS):
        changed = with_word(case_id, word)
        assert f"-{word}" in changed
        assert parse_case(changed).id == changed


def test_every_pattern_of_states_is_on_the_page() -> None:
    assert [row[0].strip("`") for row in table("Data patterns of states")] == list(STATE_DATA)


def test_the_example_of_the_page_parses() -> None:
    (example,) = re.findall(r"^extend-\S+$", PAGE, re.M)
    assert parse_case(example).id == example


def test_every_mode_is_on_the_page_and_parses() -> None:
    assert set(PLAIN) == {mode.value for mode in ForwardMode} == set(words(table("Always there")[0][0]))
    assert all(parse_case(case_id).id == case_id for case_id in PLAIN.values())


def test_every_word_that_the_parser_knows_is_on_the_page() -> None:
    shown = [word for word, _ in (*EVERYWHERE, *OF_MODES, *OPTIONAL, *OF_STATES, *OF_COMPRESSORS)]
    assert [kind.pattern for kind in kinds() if not any(kind.fullmatch(word) for word in shown)] == []


def test_every_value_of_a_list_is_on_the_page() -> None:
    shown = {word for word, _ in EVERYWHERE}
    assert {*LAYOUTS, *DATA, "fp16", "bf16", "fp32"} <= shown
    assert {f"b4{padding}" for padding in PADDINGS} <= shown
    assert {row[0].strip("`") for row in table("Data patterns")} == set(DATA)
    assert set(SERVER_VARIANTS) <= {word for word, _ in OPTIONAL}


def test_every_field_of_a_case_can_be_said_by_a_word_of_the_page() -> None:
    """A feature that is added has a word, which stands on the page: ids that differ in it differ in the case."""
    said: set[str] = set()
    for word, mode in (*EVERYWHERE, *OF_MODES, *OPTIONAL):
        one, other = parse_case(with_word(PLAIN[mode], word)), parse_case(PLAIN[mode])
        said |= {name for name, value in one.values.items() if value != other.values[name]}
    of_states = [(parse_case(with_word(each, word)), parse_case(each)) for word, each in OF_STATES]
    said |= {"state" for one, other in of_states if one.state != other.state}
    compressed = {parse_case(with_word(COMPRESSED, word)).compression for word, _ in OF_COMPRESSORS}
    said |= {"compression"} if len(compressed) > 1 else set()
    of_rows = {field.name for rows in get_args(Rows) for field in fields(rows)}
    assert said | {"v2"} == DEFAULTS.keys() - {"rows"} | of_rows
