"""What `explain` says about a case: in words of its family, and with every convention of its id."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.heads import HEADS
from attn_testkit.cases.features.layers import LAYERS
from attn_testkit.cases.features.selection import SELECTION
from attn_testkit.cases.features.state import STATE
from attn_testkit.cases.state import _WORDS, PATTERN, StateShape

STATES = "decode-gdn{}-d64-bf16-p16-k5-shuffled-mild_decay-k64w4s32{}-b2prod"
SELECTS = "decode-gqa{}-d32-fp32-p1-k5.9-shuffled-gauss-sel{}-b2small"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (STATES.format("2x4", ""), "gdn: 8 value heads, 4 key heads"),
        (STATES.format("1x1", ""), "gdn: 1 value head, 1 key head"),
        (SELECTS.format("2x1", "16"), "gqa: 2 query heads, 1 KV head"),
    ],
)
def test_heads_have_the_names_of_their_family(case: str, said: str) -> None:
    assert HEADS.describe(parse_case(case))["heads"] == said


def state_of(words: str) -> str:
    """What is said about a state, whichever cases may have it."""
    match = re.fullmatch(PATTERN, f"k64w4s32{words}")
    assert match
    return STATE.describe(SimpleNamespace(state=StateShape.read(match)))["state"]  # type: ignore[arg-type]


def test_each_convention_of_a_state_is_said_in_words_and_no_other() -> None:
    assert state_of("") == "fp32 states with keys of 64 and a convolution of 4 (k64w4s32)"
    said = {state_of(f".{word}").partition("; ")[2] for word in _WORDS}
    assert len(said) == len(_WORDS)
    assert "" not in said
    assert state_of(".null.kv.snap64").split("; ")[1:] == [
        "padded requests have index 0 and are skipped",
        "states are [Hv, K, V]",
        "states are copied at the ends of chunks of 64",
    ]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("1", "up to 1 selected key per row, as positions"),
        ("16slots", "up to 16 selected keys per row, as slots"),
        ("16holes", "up to 16 selected keys per row, as positions with -1 before a key"),
        ("16empty", "up to 16 selected keys per row, as positions with a row of each layer without a key"),
        ("4of16", "up to 4 selected blocks of 16 keys per row"),
        ("1of16", "up to 1 selected block of 16 keys per row"),
    ],
)
def test_a_selection_is_said_with_its_number(word: str, said: str) -> None:
    assert SELECTION.describe(parse_case(SELECTS.format("2x1", word)))["selection"] == said


@pytest.mark.parametrize(("word", "said"), [("1from7", "1, of id 7"), ("3from5", "3, of ids 5 to 7")])
def test_one_layer_has_one_id(word: str, said: str) -> None:
    case = parse_case(f"decode-mha2-d32-bf16-p16-k5-shuffled-gauss-layers{word}-b2prod")
    assert LAYERS.describe(case)["layers"] == said
