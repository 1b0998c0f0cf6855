"""The architecture: imports point down and in no circle, the package list is complete, nothing heavy is imported
early."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KIT = ROOT / "attn_testkit"
MODES = ROOT / "runner_modes"

TABLE = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
LAYERS = {package: int(layer) for layer, packages in TABLE for package in re.findall(r"`(\w+)`", packages)}
"""A package imports packages of lower layers, and itself. ARCHITECTURE.md has the table."""

ONLY = {
    "contract": set(),
    "emulation": set(),
    "graphs": set(),
    "results": set(),
    "backends": {"contract"},
    # `emulation` for `scratch`: memory for which programs of a server kernel may race.
    "bridges": {"backends", "contract", "emulation"},
    "examples": {"contract", "emulation"},
    "cases": {"contract"},
    "steps": {"cases", "contract"},
    "catalogue": {"cases", "contract"},
    "calibrate": {"emulation", "results", "running"},
    "families": {"contract", "cases", "steps", "model", "watches"},
    "watches": {"contract", "cases", "steps"},
    "record": {"cases", "contract"},
    "reports": {"registry", "results"},
    "plugin": {"registry", "reports", "results", "running"},
    "suite": {"plugin", "running"},
}
"""Packages that may import less than their layer allows."""


def package_of(path: Path) -> str:
    if MODES in path.parents:
        return "runner_modes"
    inside = path.relative_to(KIT)
    return inside.parts[0].removesuffix(".py")


@cache
def imported_packages(path: Path) -> set[str]:
    """Rooms of the kit that a file imports, at run time or for types."""
    package = ["attn_testkit", *(["runner_modes"] if MODES in path.parents else path.relative_to(KIT).parent.parts)]
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
        packages |= {name.split(".")[1] for name in names if name.startswith("attn_testkit.")}
    return packages


FILES = sorted([*KIT.rglob("*.py"), *MODES.rglob("*.py")])


def test_imports_point_down() -> None:
    """All at once: several hundred tests of one line each are collected longer than they run."""
    up, beyond = [], []
    for path in FILES:
        package = package_of(path)
        for other in sorted(imported_packages(path) - {package}):
            dependency = (
                f"{path.relative_to(ROOT)}: {package} (layer {LAYERS[package]}) imports {other} (layer {LAYERS[other]})"
            )
            up += [dependency] if LAYERS[other] >= LAYERS[package] else []
            beyond += [dependency] if other not in ONLY.get(package, LAYERS) else []
    assert up == []
    assert beyond == [], "ONLY says what these packages may import"


def test_architecture_names_every_package_and_counts_right() -> None:
    assert set(LAYERS) == {package_of(path) for path in FILES}
    packages = {package for package in LAYERS if not package.startswith("__")}
    dependencies = {
        (package_of(path), other) for path in FILES for other in imported_packages(path) if package_of(path) in packages
    }
    dependencies = {(package, other) for package, other in dependencies if package != other}
    layers = {LAYERS[package] for package in packages}
    said = f"{len(packages)} packages on {len(layers)} layers, {len(dependencies)} dependencies"
    assert said in (ROOT / "ARCHITECTURE.md").read_text(), said


def module_name(path: Path) -> str:
    parts = ("attn_testkit", *path.relative_to(ROOT if MODES in path.parents else KIT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imported_modules(name: str, path: Path) -> set[str]:
    """Modules of the kit that a module imports: at its top, inside a function, or for types alone.

    `from package import x` imports `package.x` where that is a module, else `package`. That Python runs the `__init__`
    of every package on the way is not counted.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            parts = {f"{source}.{alias.name}" for alias in node.names}
            found |= {part if part in MODULES else source for part in parts}
    return (found & MODULES.keys()) - {name}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """One circle of `graph` as a list whose first and last are the same; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    circle = circle_in({name: imported_modules(name, path) for name, path in MODULES.items()})
    assert not circle, " imports ".join(reversed(circle))


RUNNING = re.findall(r"^\| `(\w+)/` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
"""Packages of `running/`, the lowest first. ARCHITECTURE.md has the table."""


def part_of_running(module: str) -> str:
    """Package of `running/` that a module lies in, its own name where it lies in none, empty outside of `running/`."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["attn_testkit", "running"] and len(parts) > 2 else ""


def imports_up(graph: dict[str, set[str]]) -> list[str]:
    """Imports of `running/` that go to a later package of the table, or to what stands on top of all of them."""
    layers = {name: layer for layer, name in enumerate(RUNNING)}
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if (part := part_of_running(module)) and (goal := part_of_running(other)) not in {"", part}
        if layers.get(goal, len(layers)) >= layers.get(part, len(layers))
    ]


def test_packages_of_running_import_one_way() -> None:
    assert set(RUNNING) == {path.parent.name for path in (KIT / "running").glob("*/__init__.py")}
    assert {path.name for path in (KIT / "running").glob("*.py")} == {"__init__.py", "check_backend.py"}
    assert imports_up({name: imported_modules(name, path) for name, path in MODULES.items()}) == []


def test_an_import_to_a_later_package_of_running_is_seen() -> None:
    within = "attn_testkit.running"
    wire, plan = f"{within}.processes.wire", f"{within}.planning.plan"
    assert imports_up({wire: {plan, "attn_testkit.results"}, f"{within}.check_backend": {wire}}) == []
    assert imports_up({plan: {wire}}) == [f"{plan} imports {wire}"]
    assert imports_up({wire: {f"{within}.check_backend"}}) == [f"{wire} imports {within}.check_backend"]


def test_an_import_for_types_or_inside_a_function_closes_a_circle(tmp_path: Path) -> None:
    lower, upper = "cuda_on_cpu.session", "cuda_on_cpu.graph"
    (tmp_path / "a.py").write_text(f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {upper}\n")
    (tmp_path / "b.py").write_text("def f():\n    from . import session\n")
    graph = {lower: imported_modules(lower, tmp_path / "a.py"), upper: imported_modules(upper, tmp_path / "b.py")}
    assert graph == {lower: {upper}, upper: {lower}}
    assert set(circle_in(graph)) == {lower, upper}


def test_the_rule_sees_both_ways_of_importing() -> None:
    assert "cases" in imported_packages(KIT / "families" / "table.py"), "relative"
    assert "model" in imported_packages(MODES / "forward.py"), "absolute"


ASKS_FOR_MLA = re.compile(r"""\bis_mla\b|["']mla["']""")
MAY_ASK = (
    "attn_testkit/backends/",
    "packages/servers/attn_testkit_servers/bridges/",
    "packages/corpus/attn_testkit_corpus/faults/",
    "attn_testkit/contract/head_layout.py",
)


def asks_for_mla(path: Path) -> list[str]:
    """Lines of a file that ask for one head layout by its name, and not for the property that matters there."""
    if path.relative_to(ROOT).as_posix().startswith(MAY_ASK):
        return []
    lines = enumerate(path.read_text().splitlines(), 1)
    return [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in lines if ASKS_FOR_MLA.search(line)]


def test_only_the_table_of_head_layouts_and_adapters_know_mla_by_name() -> None:
    assert [line for path in FILES for line in asks_for_mla(path)] == [], "ask HeadLayout for the property that matters"


@pytest.mark.parametrize("line", ['if heads.family == "mla":', "if layer.is_mla:", "families - {'mla'}"])
def test_a_question_for_mla_is_seen(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for name, found in {"attn_testkit/cases/new.py": 1, "attn_testkit/contract/head_layout.py": 0}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"{line}\n")
        assert len(asks_for_mla(tmp_path / name)) == found


def test_docs_name_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "contributing" / "isolation.md").read_text()))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named
    assert named <= defined, named - defined


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone: the second of a name is an error of the collection, and is not run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


def test_the_package_list_is_complete() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in KIT.rglob("__init__.py")}
    assert listed == found | {"attn_testkit.runner_modes"}


@pytest.mark.parametrize("module", ["", ".cli", ".plugin", ".running.check_backend", ".registry", ".results"])
def test_a_front_end_starts_without_torch(module: str) -> None:
    code = f"import sys, attn_testkit{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0
