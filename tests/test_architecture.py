"""The architecture of the four packages: imports point down and in no circle, the package list is complete, nothing
heavy is imported early."""

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

ROOTS = {
    "attn_testkit": KIT,
    "attn_testkit.runner_modes": MODES,
    "cuda_on_cpu": ROOT / "packages" / "cuda_on_cpu" / "cuda_on_cpu",
    "attn_testkit_corpus": ROOT / "packages" / "corpus" / "attn_testkit_corpus",
    "attn_testkit_servers": ROOT / "packages" / "servers" / "attn_testkit_servers",
}
"""Package that one imports -> its folder."""

MAY_IMPORT = {
    "cuda_on_cpu": set(),
    "attn_testkit": {"cuda_on_cpu"},
    "attn_testkit_corpus": {"attn_testkit", "cuda_on_cpu"},
    "attn_testkit_servers": {"attn_testkit", "cuda_on_cpu"},
}
"""Distribution -> the others that it imports. The kit finds those above it by entry points."""

TABLE = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
LAYERS = {package: int(layer) for layer, packages in TABLE for package in re.findall(r"`([\w.]+)`", packages)}
"""A package imports packages of lower layers, and itself. ARCHITECTURE.md has the table."""

ONLY = {
    "contract": set(),
    "cuda_on_cpu": set(),
    "distributions": set(),
    "glossary": set(),
    "graphs": set(),
    "results": set(),
    "backends": {"contract"},
    "examples": {"contract", "cuda_on_cpu"},
    "cases": {"contract", "glossary"},
    "steps": {"cases", "contract"},
    "catalogue": {"cases", "contract"},
    "families": {"contract", "cases", "steps", "model", "watches"},
    # `cuda_on_cpu` for `confine`: the tensors of a batch share one block of memory.
    "watches": {"contract", "cases", "cuda_on_cpu", "steps"},
    "reports": {"registry", "results"},
    "plugin": {"registry", "reports", "results", "running"},
    "suite": {"plugin", "running"},
    "servers.fakes": {"backends"},
    # `cuda_on_cpu` for `scratch`: memory for which programs of a server kernel may race.
    "servers.bridges": {"backends", "contract", "cuda_on_cpu", "servers.fakes"},
    "servers.record": {"cases", "contract"},
    "servers.commands": {"contract", "registry", "reports", "running", "servers.record"},
    "corpus.calibrate": {"cuda_on_cpu", "results", "running"},
}
"""Packages that may import less than their layer allows."""


def root_of(path: Path) -> str:
    """The package of ``ROOTS`` that a file is in."""
    return next(package for package, folder in ROOTS.items() if folder in path.parents)


def room_of(module: str) -> str:
    """The package of the table that a module is in: of the kit the one below its top, ``corpus.faults`` elsewhere."""
    top, *inside = module.split(".")
    if top == "cuda_on_cpu":
        return top
    distribution = top.removeprefix("attn_testkit").lstrip("_")
    return ".".join(filter(None, (distribution, inside[0]))) if inside else "__init__"


def package_of(path: Path) -> str:
    return room_of(module_name(path))


@cache
def imports_in(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Import statements of a file."""
    every = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in every if isinstance(node, ast.Import | ast.ImportFrom))


@cache
def imported_names(path: Path) -> set[str]:
    """Modules of the four packages that a file names in imports, at run time or for types."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    found = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module] if "." in module else [f"{module}.{alias.name}" for alias in node.names]
        found |= {name for name in names if name.partition(".")[0] in MAY_IMPORT}
    return found


@cache
def imported_packages(path: Path) -> set[str]:
    """Packages of the table that a file imports."""
    return {room_of(name) for name in imported_names(path)} - {"__init__"}


FILES = sorted(path for folder in ROOTS.values() for path in folder.rglob("*.py"))


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


def beyond_its_distribution(path: Path) -> list[str]:
    """Imports of a file from distributions that its own may not import."""
    own = root_of(path).partition(".")[0]
    tops = {name.partition(".")[0] for name in imported_names(path)} - {own}
    return [f"{path.name}: {own} imports {other}" for other in sorted(tops - MAY_IMPORT[own])]


def test_no_distribution_imports_one_above_it() -> None:
    assert [line for path in FILES for line in beyond_its_distribution(path)] == []


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("cuda_on_cpu", "from attn_testkit.contract import ForwardMode"),
        ("attn_testkit", "import attn_testkit_corpus.faults"),
        ("attn_testkit", "def f():\n    from attn_testkit_servers import bridges"),
        ("attn_testkit_servers", "from attn_testkit_corpus.faults import all_faults"),
    ],
)
def test_an_import_of_a_distribution_above_is_seen(package: str, line: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(ROOTS, package, tmp_path)
    (tmp_path / "new.py").write_text(line)
    assert len(beyond_its_distribution(tmp_path / "new.py")) == 1


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
    package = root_of(path)
    parts = (package, *path.relative_to(ROOTS[package]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imported_modules(name: str, path: Path) -> set[str]:
    """Modules of the kit that a module imports: at its top, inside a function, or for types alone.

    `from package import x` imports `package.x` where that is a module, else `package`. That Python runs the `__init__`
    of every package on the way is not counted.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
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


def folders_that_import_each_other(graph: dict[str, set[str]], folders: set[str]) -> set[tuple[str, str]]:
    """Pairs of folders side by side in one package, each of which imports the other."""

    def folder_of(module: str) -> str:
        return module if module in folders else module.rpartition(".")[0]

    pairs = {(folder_of(module), folder_of(other)) for module, others in graph.items() for other in others}
    return {
        (one, other)
        for one, other in pairs
        if {one, other} <= folders and one < other and (other, one) in pairs
        if one.rpartition(".")[0] == other.rpartition(".")[0]
    }


FOLDERS = {name for name, path in MODULES.items() if path.name == "__init__.py" and name.count(".") > 1}
"""Packages within a package of the table."""


def test_no_folders_of_one_package_import_each_other() -> None:
    graph = {name: imported_modules(name, path) for name, path in MODULES.items()}
    assert folders_that_import_each_other(graph, FOLDERS) == set()


def test_folders_that_import_each_other_are_seen() -> None:
    one, other = "attn_testkit.running.processes", "attn_testkit.running.planning"
    graph = {f"{one}.wire": {f"{other}.plan"}, other: {"attn_testkit.cases.case"}}
    assert folders_that_import_each_other(graph, FOLDERS) == set()
    graph[other].add(f"{one}.child")
    assert folders_that_import_each_other(graph, FOLDERS) == {(other, one)}


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
    "packages/servers/attn_testkit_servers/",
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


TESTS = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "packages").glob("*/tests/**/*.py")]


def test_docs_name_tests_that_exist() -> None:
    named = set(
        re.findall(r"`(test_\w+)`", (ROOT / "packages" / "corpus" / "tests" / "adversarial" / "README.md").read_text())
    )
    defined = {
        name
        for path in TESTS
        if path.name.startswith("test_")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named
    assert named <= defined, named - defined


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone: the second of a name is an error of the collection, and is not run."""
    names = Counter(path.name for path in TESTS)
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


def test_the_package_list_is_complete() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = [path.parent for folder in (KIT, MODES) for path in folder.rglob("__init__.py")]
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert listed == {name if name.startswith("attn_testkit") else f"attn_testkit.{name}" for name in found}


@pytest.mark.parametrize("module", ["", ".cli", ".plugin", ".running.check_backend", ".registry", ".results"])
def test_a_front_end_starts_without_torch(module: str) -> None:
    code = f"import sys, attn_testkit{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0
