"""Words of case ids that were renamed, once: an old one is answered with the present one.

The random draws of a case follow from its id. A renamed word changes none of them: the hash is that of the words as
they were first written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

RENAMED_WORDS: Mapping[str, str] = {
    "footprint": "one_hot",
    "cliff": "rising_logits",
    "swamped": "large_and_small_values",
    "loud": "large_queries",
    "towering": "fp16_overflow",
    "colossal": "beyond_fp16",
    "faint": "small_weights",
    "codes": "plus_minus_one",
    "mixed": "multi_mode",
    "idle": "empty_batches",
    "norows": "zero_length_padding",
    "withnew": "seq_lens_with_new",
    "bare": "no_tree_tensors",
    "lent": "given_out",
    "ahead": "overlap_scheduling",
    "morerows": "padded_tokens",
    "kvown": "kvcustom",
}
"""Old word -> present word."""
_SPLITS = r"lse(?:prefix|(?:pages|tokens)[^-]*)"
_MERGED = re.compile(rf"(?<=-)({_SPLITS})merged(?!\w)")
_OWN = re.compile(rf"({_SPLITS})own")
FIRST_NAMES: Mapping[str, str] = {"undeclared": "unclaimed"}
"""Present name of a derived parameter -> the name that hashes are made of."""
_FIRST = {new: old for old, new in RENAMED_WORDS.items()}
_PRESENT = re.compile(rf"(?<=-)({'|'.join(_FIRST)})(?!\w)")


@lru_cache(maxsize=1 << 14)
def first_written(case_id: str) -> str:
    """The id in the words of the first version, which hashes are made of."""
    return _MERGED.sub(r"\1own", _PRESENT.sub(lambda match: _FIRST[match[1]], case_id))


def renamed(pattern: str) -> str:
    """An answer to the first old word of an id or a glob; empty without one."""
    for word in pattern.split("-"):
        present = RENAMED_WORDS.get(word) or (f"{match[1]}merged" if (match := _OWN.fullmatch(word)) else "")
        if present:
            return f"case word {word!r} is now {present!r}"
    return ""
