"""What the kit costs to hold: what counts as a file that a feature touches, and figures that pages say too."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return importlib.import_module("cost")


def test_a_file_touches_a_feature_if_it_says_its_words_as_a_whole(cost: ModuleType, tmp_path: Path) -> None:
    said = {
        "code": "max_spans = 1",
        "text": '"""Of a span."""',
        "part": "spanned, wingspan = 1, 2",
        "id": "no-spans-here",
    }
    for name, line in said.items():
        (tmp_path / name).write_text(line)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in cost.touched(cost.FEATURES["spans"], files)] == ["code", "text"]


def test_adapters_and_what_lies_in_packages_are_not_core(cost: ModuleType) -> None:
    core = {path.relative_to(ROOT).parts[1] for path in cost.modules() if cost.is_core(path)}
    assert {"contract", "cases", "checks", "running", "graphs.py"} <= core
    assert "backends" not in core
    assert not any("packages" in path.parts for path in cost.modules() if cost.is_core(path))


def test_every_feature_is_found_in_a_file_of_its_name(cost: ModuleType) -> None:
    core = [path for path in cost.modules() if cost.is_core(path)]
    for feature, word in cost.FEATURES.items():
        assert cost.touched(word, core), feature
        names = {path.stem for path in cost.touched(word, core)}
        assert feature in names or feature == "padding-finite", feature
