"""The walls of the house: imports point down, the package list is complete, nothing heavy is imported early."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KIT = ROOT / "attn_testkit"
MODES = ROOT / "runner_modes"

FLOORS = {
    "results": 0,
    "contract": 1,
    "emulation": 1,
    "registry": 2,
    "graphs": 2,
    "cases": 2,
    "backends": 2,
    "examples": 2,
    "model": 3,
    "oracle": 4,
    "checks": 5,
    "runner_modes": 6,
    "reports": 6,
    "environment": 6,
    "diagnosis": 7,
    "running": 8,
    "faults": 9,
    "audit": 10,
}
"""A room imports rooms of lower floors, and itself. Rooms that are not named are doors and may import everything."""

ONLY = {
    "contract": set(),
    "emulation": set(),
    "backends": {"contract"},
    "examples": {"contract"},
    "cases": {"contract"},
    "oracle": {"contract", "cases", "model"},
}
"""Rooms that know less than their floor allows."""


def room_of(path: Path) -> str:
    if MODES in path.parents:
        return "runner_modes"
    inside = path.relative_to(KIT)
    return inside.parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of the kit that a file imports, at run time or for types."""
    package = ["attn_testkit", *(["runner_modes"] if MODES in path.parents else path.relative_to(KIT).parent.parts)]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("attn_testkit.")}
    return rooms


FILES = sorted([*KIT.rglob("*.py"), *MODES.rglob("*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    if room not in FLOORS:
        return
    for other in imported_rooms(path) - {room}:
        assert other in FLOORS, f"{room} imports {other}, a door"
        assert FLOORS[other] < FLOORS[room], f"{room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"
        assert room not in ONLY or other in ONLY[room], (
            f"{room} may import {ONLY[room] or 'nothing of ours'}, not {other}"
        )


def test_the_rule_sees_both_ways_of_importing() -> None:
    assert "contract" in imported_rooms(KIT / "oracle" / "attention.py"), "relative"
    assert "model" in imported_rooms(MODES / "drive.py"), "absolute"


def test_the_package_list_is_complete() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in KIT.rglob("__init__.py")}
    assert listed == found | {"attn_testkit.runner_modes"}


@pytest.mark.parametrize("module", ["attn_testkit.plugin", "attn_testkit.results", "attn_testkit.registry"])
def test_a_door_opens_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0
