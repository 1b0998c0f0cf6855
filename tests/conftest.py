"""Helpers that tests of several folders share lie here, beside this file."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before any test file imports Triton, which makes its own functions for a GPU or for its interpreter, once.
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).parent))

# Modules and items live until the end: the collector would look at all of them again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from slow_tests import slow_first

    slow_first(items)


@pytest.fixture
def evaluated_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """``minimize`` and ``fuzz`` judge in the test's own process."""
    from judge_here import JudgeHere

    monkeypatch.setattr("attn_testkit.cli.one_by_one.JudgeProcess", JudgeHere)
