"""A case id that is misspelled is answered in one sentence, whatever is wrong with it."""

from __future__ import annotations

import random
import re

import pytest

from attn_testkit.cases.case import WORDS, Case, parse_case
from attn_testkit.cases.features.feature import Bound, Word
from attn_testkit.catalogue.tiers import generate
from attn_testkit.cli import main
from attn_testkit.contract import ForwardMode
from attn_testkit.registry import load_backend

NUMBERS = ("0", "1", "2", "7", "00", "01", "1025", "65537", "99999999999", "9" * 30, "9" * 5000, "-1", "", "1.2.3", "x")


def mutated(lot: random.Random, ids: list[str]) -> str:
    """An id with one to three mistakes."""
    case_id = lot.choice(ids)
    for _ in range(lot.choice((1, 1, 2, 3))):
        words = case_id.split("-")
        at = lot.randrange(len(words))
        kind = lot.randrange(7)
        if kind == 0:
            case_id = re.sub(r"\d+", lambda found: lot.choice((found[0], lot.choice(NUMBERS))), case_id)
        elif kind == 1:
            words[at] = re.sub(r"\d+", lambda found: lot.choice(NUMBERS), words[at], count=1)
        elif kind == 2:
            del words[at]
        elif kind == 3:
            words.insert(at, lot.choice(words))
        elif kind == 4:
            words.insert(at, lot.choice(lot.choice(ids).split("-")))
        elif kind == 5:
            words[at] = lot.choice(lot.choice(ids).split("-"))
        else:
            place = lot.randrange(len(case_id) + 1)
            case_id = case_id[:place] + lot.choice("0x.-d_a\u0661\n ") + case_id[place + lot.randrange(2) :]
        if kind not in (0, 6):
            case_id = "-".join(words)
    return case_id


@pytest.fixture(scope="module")
def ids() -> list[str]:
    """Ids of every mode, and some with words that few cases have."""
    declared = load_backend("attn_testkit.backends.torch_native:TorchNativeBackend").capabilities
    smoke = [case.id for mode in ForwardMode for case in generate(declared, mode, "smoke", 3)]
    return [
        *smoke,
        "decode-mla16-d64r32-bf16-p64-k33.7-shuffled-gauss-kvfp8e4m3-w7one-cap1.5-sink-b4prod-s12",
        "decode-gqa4x2-d64-bf16-p16-k9-shuffled-gauss-layers3from5groups-b1prod",
        "decode-gqa2x4-d128-fp16-p16-k9-reversed-gauss-layers3from5by8x4d64.8x2d128-b1prod",
        "extend-mha2-d64-bf16-p16-k0.5-n4a3.4-chunks3-shuffled-gauss-b2prod",
        "draft-decode-mha2-d64-bf16-p16-k33-topk2steps3-prefixed-loop4-shuffled-gauss-b1prod",
        "decode-mha2-d64-bf16-p16-k33-shuffled-gauss-lsetokens3merged-b1prod",
    ]


def test_no_mutated_id_raises_anything_but_one_sentence(ids):
    """10,000 ids, of which a few are right by chance: these have the id that they were read from."""
    lot, read = random.Random(20), 0
    for _ in range(10_000):
        case_id = mutated(lot, ids)
        try:
            case = parse_case(case_id)
        except ValueError as error:
            text = str(error)
            assert text.startswith("case id "), text
            assert "\n" not in text
            assert len(text) < 1200
        else:
            read += 1
            assert isinstance(case, Case)
            assert case.id == case_id
    assert 100 < read < 5_000, "mutations are too strong, or none"


def test_what_the_mutations_begin_with_is_read(ids):
    assert [parse_case(case_id).id for case_id in ids] == ids


BOUNDS = [
    ("decode-gqa{}x2-d64-bf16-p16-k33-shuffled-gauss-b1prod", "query heads of a KV head", 1, 1024),
    ("decode-gqa4x{}-d64-bf16-p16-k33-shuffled-gauss-b1prod", "KV heads", 1, 1024),
    ("decode-mha{}-d64-bf16-p16-k33-shuffled-gauss-b1prod", "query heads of a KV head", 1, 1024),
    ("decode-mha2-d{}-bf16-p16-k33-shuffled-gauss-b1prod", "head dim", 1, 4096),
    ("decode-mla16-d64r{}-bf16-p16-k33-shuffled-gauss-b1prod", "rope width", 1, 4096),
    ("decode-mha2-d64-bf16-p{}-k33-shuffled-gauss-b1prod", "page size", 1, 65536),
    ("decode-mha2-d64-bf16-p16-k{}-shuffled-gauss-b1prod", "keys before the step", 0, 1 << 24),
    ("decode-mha2-d64-bf16-p16-k33-shuffled-gauss-b{}prod", "batch size of the graph", 1, 1 << 17),
    ("decode-mha2-d64-bf16-p16-k33-shuffled-gauss-w{}-b1prod", "window", 0, 1 << 24),
    ("decode-mha2-d64-bf16-p16-k33-shuffled-gauss-b1prod-s{}", "seed", 1, 10**18 - 1),
    ("decode-mha2-d64-bf16-p16-k33-shuffled-gauss-cap{}-b1prod", "soft cap", 0, 999_999),
    ("decode-mha2-d64-bf16-p16-k33-shuffled-gauss-layers{}from1-b1prod", "number of layers", 1, 6),
    ("decode-mha2-d64-bf16-p16-k33-shuffled-gauss-layers2from{}-b1prod", "id of the first layer", 0, 1 << 20),
    ("decode-mha2-d64-bf16-p16-k33-shuffled-gauss-lsetokens{}-b1prod", "number of KV splits", 2, 4096),
    ("target-verify-mha2-d64-bf16-p16-k33-chain{}-shuffled-gauss-b1prod", "nodes of the chain", 1, 4096),
    ("draft-decode-mha2-d64-bf16-p16-k33-topk{}steps3-shuffled-gauss-b1prod", "branches of the draft", 1, 1024),
    ("draft-decode-mha2-d64-bf16-p16-k33-topk2steps{}-shuffled-gauss-b1prod", "steps of the draft", 1, 1024),
    ("draft-extend-mha2-d64-bf16-p16-k33-n{}a1-shuffled-gauss-b1prod", "rows of a request", 1, 1 << 20),
    ("draft-extend-mha2-d64-bf16-p16-k33-n1048576a{}-shuffled-gauss-b1prod", "tokens of each request", 0, 1 << 20),
    ("extend-mha2-d64-bf16-p16-k33-n4a4-chunks{}-shuffled-gauss-b1prod", "number of chunks", 2, 4096),
]


@pytest.mark.parametrize(("text", "what", "least", "most"), BOUNDS, ids=[text for text, _, _, _ in BOUNDS])
def test_a_number_outside_its_bounds_is_named_with_them(text, what, least, most):
    expected = f"{what} is {{}}; expected {least} to {most}"
    for value in filter(lambda value: value >= 0, (least - 1, most + 1)):
        with pytest.raises(ValueError, match=re.escape(expected.format(value))):
            parse_case(text.format(value))
    assert refusal(text.format(least)) == refusal(text.format(most)) == ""


def refusal(case_id: str) -> str:
    """What a bound says of an id; another rule than a bound may refuse it."""
    try:
        parse_case(case_id)
    except ValueError as error:
        return str(error) if "; expected " in str(error) else ""
    return ""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("k1..2", "'1..2' is not a list of numbers; expected one such as 5x2.9, which is 5, 5, 9"),
        ("kx3", "'x3' is not a list of numbers"),
        ("k5x0", "5x0 repeats 5 that often; expected 1 or more"),
        (f"k5x{1 << 17}", ""),
        (f"k5x{(1 << 17) + 1}", "keys before the step has 131073 numbers; expected at most 131072"),
        (f"k{1 << 24}x4", ""),
        (f"k{1 << 24}x4.1", "keys before the step is 67108865 in all; expected at most 67108864"),
    ],
)
def test_a_list_is_bounded_by_its_length_and_its_sum(word, message):
    text = f"decode-mha2-d64-bf16-p16-{word}-shuffled-gauss-b131072prod"
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_case(text)
    else:
        assert parse_case(text).id == text


def test_a_word_with_a_number_cannot_be_without_bounds():
    with pytest.raises(ValueError, match="has a number; say which values it may have"):
        Word(r"zoom(\d+)", lambda match, so_far: {}, lambda case: "")
    Word(r"zoom(\d+)", lambda match, so_far: {}, lambda case: "", bounds=(Bound("zoom", 1, 2),))
    assert all(word.bounds for word in WORDS if r"\d" in word.pattern)


@pytest.mark.parametrize(
    ("word", "instead", "message"),
    [
        ("gqa4x2", "gqa0x0", "query heads of a KV head is 0; expected 1 to 1024"),
        ("p16", "p0", "page size is 0; expected 1 to 65536"),
        ("k33", "k99999999999", "keys before the step is 99999999999; expected 0 to 16777216"),
        ("d64", "d0", "head dim is 0; expected 1 to 4096"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "run"])
def test_the_command_line_answers_in_one_line_with_exit_code_4(capfd, word, instead, message, verb):
    case_id = "decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod".replace(word, instead)
    of_run = ["run", "--backend", "attn_testkit.examples:MinimalBackend", "--device", "cpu", "--in-process", "--case"]
    assert main([*(of_run if verb == "run" else [verb]), case_id]) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
