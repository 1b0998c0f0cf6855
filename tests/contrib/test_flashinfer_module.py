"""The module for FlashInfer's tests: what it collects, that it can be switched off, and what an entry does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flashinfer", reason="the module tests FlashInfer's wrappers")

CONTRIB = Path(__file__).resolve().parents[2] / "contrib" / "flashinfer"
MODULE, KNOWN = "test_attention_conformance.py", "attention_known_failures.toml"
LEDGER = '''"""Stands in for FlashInfer's module of this name."""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    match: Any
    reason: str
    quarantine: bool = False
    backend: str | None = None


class FuzzLedger:
    def __init__(self, op, findings=()):
        assert all(re.search(r"#\\d+", each.reason) for each in findings)
        print(op, [(each.reason, each.quarantine, each.backend) for each in findings])
'''
ENTRY = """
[[known]]
cases = "{case}"
backend = "flashinfer"
execution = "eager"
kind = "tolerated"
check = "matches-oracle"
issue = "https://github.com/flashinfer-ai/flashinfer/issues/12"
until = 2027-06-30
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree as FlashInfer's, as far as the module uses it."""
    root = tmp_path_factory.mktemp("project")
    for folder in ("attention", "test_helpers"):
        (root / "tests" / folder).mkdir(parents=True)
        (root / "tests" / folder / "__init__.py").touch()
    (root / "tests" / "__init__.py").touch()
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "tests" / "test_helpers" / "fuzz_ledger.py").write_text(LEDGER)
    for name in (MODULE, KNOWN):
        shutil.copy(CONTRIB / name, root / "tests" / "attention")
    return root


def pytest_in(project: Path, *arguments: str, **settings: str) -> str:
    environment = {f"FLASHINFER_ATTENTION_CONFORMANCE{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    own = {"PATH": str(Path(sys.executable).parent), "HOME": str(project), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=project, env=own | environment, capture_output=True, text=True, timeout=300)
    return done.stdout


@pytest.fixture(scope="module")
def names(project: Path) -> list[str]:
    """Ids of the tests that the module collects."""
    found = pytest_in(project, "--collect-only", f"tests/attention/{MODULE}", _EMULATED="1")
    return [line for line in found.splitlines() if "::" in line]


@pytest.fixture(scope="module")
def small(names: list[str]) -> str:
    return next(name for name in names if "[flashinfer-eager-decode-" in name)


def test_it_collects_about_160_case_runs_of_three_wrappers(names: list[str]) -> None:
    assert 150 <= len(names) <= 180
    for part in ("wrappers[flashinfer-graph-", "wrappers[flashinfer_ragged-eager-", "test_mla_wrapper[graph-decode-"):
        assert any(part in name for name in names), part


def test_a_case_run_prints_the_seed_and_how_to_repeat_it(project: Path, small: str) -> None:
    ran = pytest_in(project, "-s", small, _EMULATED="1")
    assert "1 passed" in ran
    assert f"seed 0; REPRO: FLASHINFER_ATTENTION_CONFORMANCE_SEED=0 pytest '{small}'" in ran


def test_it_can_be_switched_off(project: Path, small: str) -> None:
    off = pytest_in(project, "-rs", small, _EMULATED="1", **{"": "0"})
    assert "1 skipped" in off
    assert "switched off by FLASHINFER_ATTENTION_CONFORMANCE=0" in off


def test_an_entry_is_in_the_ledger_and_an_unexpected_pass_fails(project: Path, small: str) -> None:
    case = small.partition("-eager-")[2].rstrip("]")
    file = project / "tests" / "attention" / KNOWN
    before = file.read_text()
    file.write_text(before + ENTRY.format(case=case))
    found = pytest_in(project, "-s", small, _EMULATED="1")
    file.write_text(before)
    assert f"attention [('#12: {case}, until 2027-06-30', False, 'flashinfer')]" in found
    assert "1 failed" in found
    assert "https://github.com/flashinfer-ai/flashinfer/issues/12" in found
