"""The mutants of bundled adapters that are named equivalent: none speaks of code that is gone."""

from __future__ import annotations

import tomllib
from pathlib import Path

from attn_testkit_corpus.mutants.equivalents import read_equivalents
from attn_testkit_corpus.mutants.operators import mutants_of
from attn_testkit_corpus.mutants.specials import ALL, UNSEEN, is_capability

ROOT = Path(__file__).resolve().parents[4]
FILE = ROOT / "ci" / "adapter_mutants_equivalent.toml"


def test_every_entry_matches_a_mutant_and_has_a_reason_of_its_own_words() -> None:
    entries = tomllib.loads(FILE.read_text())["equivalent"]
    paths = sorted({entry["path"] for entry in entries})
    mutants = [m for path in paths for m in mutants_of((ROOT / path).read_bytes(), path, UNSEEN, ALL, is_capability)]
    assert len(read_equivalents(FILE, mutants, lambda path: False)) >= len(entries)
    assert all(entry["reason"].endswith(".") for entry in entries)
