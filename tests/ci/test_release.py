"""What is released: one version, and a wheel and an sdist that hold the tree and no more."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from click.testing import CliRunner

import attn_testkit
from attn_testkit.cli import commands
from attn_testkit_corpus.calibrate.titles import calibrations

ROOT = Path(__file__).resolve().parents[2]
METADATA = """Metadata-Version: 2.4
Name: attn-testkit
Version: 1.2
License-Expression: Apache-2.0
Requires-Python: >=3.11

The README.
"""


def test_the_version_stands_in_one_place_that_each_build_reads() -> None:
    """``tests/test_dependencies.py`` compares the versions and requirements of the four."""
    version = ROOT / "attn_testkit" / "VERSION"
    assert version.read_text().strip() == attn_testkit.__version__
    for file in (ROOT / "pyproject.toml", *(ROOT / "packages").glob("*/pyproject.toml")):
        described = tomllib.loads(file.read_text())
        assert described["project"]["dynamic"] == ["version"]
        assert (file.parent / described["tool"]["setuptools"]["dynamic"]["version"]["file"]).samefile(version)


def test_the_version_names_what_the_emulation_is_held_against() -> None:
    found = CliRunner().invoke(commands, ["--version"])
    assert found.exit_code == 0
    first, *lines = found.output.splitlines()
    assert first == f"attn-testkit, version {attn_testkit.__version__}"
    assert (
        len(lines)
        == len(list((ROOT / "packages" / "corpus" / "attn_testkit_corpus" / "calibrate").glob("verdicts_*.json")))
        > 0
    )
    assert lines[0].startswith("emulated CUDA is compared with NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0: ")


def test_each_file_of_verdicts_is_counted(tmp_path: Path) -> None:
    for torch, answers in (("2.11", {"a": {"x": "1", "y": "2"}, "b": {"z": "3"}}), ("2.12", {})):
        data = {"torch": torch, "device": "GPU", "triton": "3", "verdicts": answers}
        (tmp_path / f"verdicts_torch{torch}.json").write_text(json.dumps(data))
    assert [str(each) for each in calibrations(tmp_path)] == [
        "GPU, torch 2.12, triton 3: 0 answers",
        "GPU, torch 2.11, triton 3: 3 answers",
    ]


def test_the_script_can_be_read_and_refuses_a_python_that_is_not_here() -> None:
    script = ROOT / "ci" / "release.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "ATTN_PYTHONS": "python9.9"}
    found = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "ci/release.sh: there is no python9.9" in found.stderr


def test_the_pythons_that_are_named_as_supported_are_those_that_ci_runs_and_the_script_looks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" :: ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    named.remove("Only")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "pr.yml").read_text())["jobs"]
    assert named == jobs["cpu"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={named[0]}"
    (looked_for,) = re.findall(r"^minor_versions=\((.*)\)$", (ROOT / "ci" / "release.sh").read_text(), re.M)
    assert set(named) <= set(looked_for.split())


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``ci/release_contents.py``, which looks at the kit alone."""
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    found = importlib.import_module("release_contents")
    monkeypatch.setattr(found, "DISTRIBUTIONS", found.DISTRIBUTIONS[:1])
    return found


Released = Callable[..., tuple[Path, Path]]


@pytest.fixture
def released(tmp_path: Path) -> Released:
    """A tree, and a folder with a wheel and an sdist of it; files of either may be changed, None leaves one out."""
    tree, dist = tmp_path / "tree", tmp_path / "dist"
    dist.mkdir()
    files = {
        "attn_testkit/VERSION": "1.2\n",
        "attn_testkit/__init__.py": "",
        "attn_testkit/page.j2": "",
        "runner_modes/__init__.py": "",
        "LICENSE": "a licence",
        "README.md": "",
        "pyproject.toml": '[project]\nname = "attn-testkit"\nscripts = {}\n',
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)

    def release(wheel: dict[str, str | None] | None = None, sdist: dict[str, str | None] | None = None):
        info = "attn_testkit-1.2.dist-info"
        inside = {
            "attn_testkit/VERSION": files["attn_testkit/VERSION"],
            "attn_testkit/__init__.py": "",
            "attn_testkit/page.j2": "",
            "attn_testkit/runner_modes/__init__.py": "",
            f"{info}/METADATA": METADATA,
            f"{info}/licenses/LICENSE": "a licence",
            f"{info}/entry_points.txt": "",
            **(wheel or {}),
        }
        with zipfile.ZipFile(dist / "attn_testkit-1.2-py3-none-any.whl", "w") as archive:
            for name, text in inside.items():
                if text is not None:
                    archive.writestr(name, text)
        with tarfile.open(dist / "attn_testkit-1.2.tar.gz", "w:gz") as archive:
            for name, text in {**files, **(sdist or {})}.items():
                if text is not None:
                    member = tarfile.TarInfo(f"attn_testkit-1.2/{name}")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
        return tree, dist

    return release


def test_what_holds_the_tree_and_no_more_is_good(contents: ModuleType, released: Released, capsys) -> None:
    assert contents.main(*released(), 10) == 0
    assert capsys.readouterr().err == ""


INFO = "attn_testkit-1.2.dist-info"


@pytest.mark.parametrize(
    ("wheel", "sdist", "complaint"),
    [
        ({"attn_testkit/page.j2": None}, {}, "the wheel lacks attn_testkit/page.j2"),
        ({"attn_testkit/runner_modes/__init__.py": None}, {}, "the wheel lacks attn_testkit/runner_modes/__init__.py"),
        ({"tests/test_x.py": ""}, {}, "the wheel has tests/test_x.py, which is not in the tree"),
        ({f"{INFO}/METADATA": None}, {}, f"the wheel lacks {INFO}/METADATA"),
        ({f"{INFO}/licenses/LICENSE": None}, {}, f"the wheel lacks {INFO}/licenses/LICENSE"),
        ({f"{INFO}/licenses/LICENSE": "another"}, {}, "the wheel's licence is not the tree's"),
        ({f"{INFO}/METADATA": METADATA.replace("1.2", "1.3")}, {}, "Version is '1.3', expected '1.2'"),
        ({f"{INFO}/METADATA": METADATA.replace("Apache", "MIT")}, {}, "License-Expression is 'MIT-2.0'"),
        ({f"{INFO}/METADATA": METADATA.replace("The README.\n", "")}, {}, "lack Requires-Python or the README"),
        ({}, {"LICENSE": None}, "the sdist lacks LICENSE"),
        ({}, {"attn_testkit/page.j2": None}, "the sdist lacks attn_testkit/page.j2"),
        ({}, {"attn_testkit/x.pyc": ""}, "the sdist has attn_testkit/x.pyc"),
    ],
)
def test_what_is_wrong_is_named(contents, released, capsys, wheel, sdist, complaint) -> None:
    assert contents.main(*released(wheel, sdist), 10) == 1
    assert complaint in capsys.readouterr().err


def test_each_distribution_has_its_folder_and_must_be_there(contents, released, capsys, monkeypatch) -> None:
    monkeypatch.undo()
    every = contents.DISTRIBUTIONS
    assert {ROOT / each.folder for each in every} == {
        ROOT,
        *(path.parent for path in ROOT.glob("packages/*/README.md")),
    }
    assert all((ROOT / each.folder / name).is_file() for each in every for name in each.needed)
    assert all((ROOT / each.folder / name).is_dir() for each in every for name, _ in each.packages)
    tree, dist = released()
    monkeypatch.setattr(contents, "DISTRIBUTIONS", every[:2])
    folder = tree / "packages" / "cuda_on_cpu"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "cuda-on-cpu"\n')
    assert contents.main(tree, dist, 10) == 1
    assert "there is no cuda_on_cpu-1.2-py3-none-any.whl and no cuda_on_cpu-1.2.tar.gz" in capsys.readouterr().err


def test_what_is_too_large_is_named(contents: ModuleType, released: Released, capsys) -> None:
    found = released({"attn_testkit/page.j2": "x" * 10 * 1024})
    size = (found[1] / "attn_testkit-1.2-py3-none-any.whl").stat().st_size
    limit, rest = divmod(size, 1024)
    assert rest
    assert contents.main(*found, limit + 1) == 0
    assert contents.main(*found, limit) == 1
    assert f"attn_testkit-1.2-py3-none-any.whl has {size / 1024:.0f} KiB, more than {limit}" in capsys.readouterr().err
