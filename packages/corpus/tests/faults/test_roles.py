"""Each feature of cases has its roles: a bug that needs it, a page that explains its word, and a case in core."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_encoder import TorchNativeEncoderBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.backends.torch_native_two_batches import TorchNativeTwoBatchesBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.server.table import SERVER_VARIANTS
from attn_testkit.cases.features.table import FEATURES
from attn_testkit.cases.fields import DEFAULTS
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit_corpus.faults.catalogue import all_faults, field_bugs_in
from attn_testkit_corpus.faults.with_row_ranks import RankOfAllModesBackend

ROOT = Path(__file__).parents[4]
KNOWN_GOOD = (
    TorchNativeBackend.capabilities,
    TorchNativeBackend.capabilities.with_changes(options={"any_scaling": False}),
    TorchNativeFormatsBackend.capabilities,
    TorchNativeEncoderBackend.capabilities,
    TorchNativeTwoBatchesBackend.capabilities,
    TorchNativeSparseBackend.capabilities,
    TorchNativeStateBackend.capabilities,
    RankOfAllModesBackend.capabilities,
)


def _differs(fields: tuple[str, ...]) -> Callable[[Case], bool]:
    return lambda case: any(getattr(case, name) != DEFAULTS[name] for name in fields)


def _has(word: str) -> Callable[[Case], bool]:
    return lambda case: word in case.variants


ASKED = {
    **{each.name: _differs(each.fields) for each in FEATURES if each.option},
    **{word: _has(word) for word in SERVER_VARIANTS},
}
"""Feature -> whether a case has it."""
WORDS = {
    **{each.name: tuple(entry.word for entry in each.explained) for each in FEATURES if each.option},
    **{word: (word,) for word in SERVER_VARIANTS},
}
NAMES = {
    **{each.name: each.fields for each in FEATURES if each.option},
    **{word: (word, *each.also) for word, each in SERVER_VARIANTS.items()},
    "local chunk": ("attention_chunk_size",),
    "seq_lens_with_new": ("verify_lens",),
}
"""Feature -> names in code: its fields, its word, or what servers call it."""
LACK: dict[str, tuple[str, ...]] = {}
"""Feature -> roles that it lacks. A new feature has all of them."""


@cache
def _cases_of_bugs() -> tuple[Case, ...]:
    """The cases that catch field bugs."""
    bugs = field_bugs_in(str(ROOT / "packages" / "corpus" / "tests" / "field_bugs"))
    return tuple(parse_case(each.case_of_tier or each.case) for each in bugs)


@cache
def _core() -> tuple[Case, ...]:
    return tuple(case for declared in KNOWN_GOOD for mode in ForwardMode for case in generate(declared, mode, "core"))


@cache
def _pages() -> str:
    return "\n".join(page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md"))


@cache
def _seeded() -> str:
    """The sources of seeded bugs, without those of known-good backends."""
    files = {Path(inspect.getfile(each.backend)) for each in all_faults()}
    return "\n".join(file.read_text("utf-8") for file in sorted(files))


def _named_by_a_fault(feature: str) -> bool:
    """True if a seeded bug names the feature by its word, its field, or what a backend declares for it."""
    return any(re.search(rf"\b{re.escape(name)}\b", _seeded()) for name in NAMES[feature])


def lacking(feature: str) -> Iterator[str]:
    """Roles that a feature lacks."""
    if not (any(map(ASKED[feature], _cases_of_bugs())) or _named_by_a_fault(feature)):
        yield "bug"
    if not any(map(ASKED[feature], _core())):
        yield "case in core"
    if not any(f"`{word}" in _pages() for word in WORDS[feature]):
        yield "page"


@pytest.mark.parametrize("feature", ASKED)
def test_a_feature_has_a_bug_a_case_in_core_and_a_page(feature: str) -> None:
    assert tuple(lacking(feature)) == LACK.get(feature, ())
