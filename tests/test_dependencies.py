"""The kit is installed next to a server: it moves no version without need, and its command line does without pytest."""

from __future__ import annotations

import datetime
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from attn_testkit import distributions
from attn_testkit.cli.doctor import NEWEST_TORCH, is_newer

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_PYTEST = """
import importlib.abc, sys

class Refuses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytest", "_pytest", "pluggy", "xdist", "execnet"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuses())
"""


@pytest.fixture
def without_pytest(tmp_path: Path):
    """Run Python where nothing of pytest can be imported, in the judge's and the backend's processes too."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PYTEST)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def _run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *args]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert _run("-c", "import pytest").returncode == 1
    return _run


def test_the_command_line_runs_without_pytest(without_pytest):
    case = "decode-mha2-d64-bf16-p16-k33-shuffled-gauss-b1prod"
    files = ("--json", "out.json", "--html", "out.html", "--junit", "out.xml", "-k", "eager", "--lf")
    run = ("-m", "attn_testkit", "run", "-b", "attn_testkit.examples:OffByOneBackend", "--device", "cpu")
    done = without_pytest(*run, "--case", case, *files)
    assert done.returncode == 1, done.stderr
    assert "NOT CONFORMANT" in done.stdout
    until = ("--issue", "https://example.org/1", "--until", str(datetime.date.today() + datetime.timedelta(days=30)))
    known = ("results", "known", "out.json", *until)
    for args in (("results", "report", "out.json", "--markdown"), known, ("new", "mine")):
        done = without_pytest("-m", "attn_testkit", *args)
        assert done.returncode == 0, (args, done.stderr)


def test_the_decorator_says_which_extra_it_needs(without_pytest):
    done = without_pytest("-c", "from attn_testkit import check_backend, conformance_cases")
    assert done.returncode == 1
    assert (
        "conformance_cases needs pytest, an extra of the kit: pip install 'PATH_OF_THE_CHECKOUT[pytest]'" in done.stderr
    )
    assert without_pytest("-c", "from attn_testkit import check_backend, assert_conformant").returncode == 0


VERSION = (ROOT / "attn_testkit" / "VERSION").read_text().strip()
DISTRIBUTIONS = {
    tomllib.loads(path.read_text())["project"]["name"]: path
    for path in (ROOT / "pyproject.toml", *(ROOT / "packages").glob("*/pyproject.toml"))
}


def requirements_of(project: dict[str, Any]) -> Iterator[Requirement]:
    for listed in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
        yield from map(Requirement, listed)


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_distributions_have_one_version_and_ask_for_each_other_by_it(name):
    read = importlib.import_module("setuptools.config.pyprojecttoml").read_configuration
    project = read(DISTRIBUTIONS[name])["project"]
    assert project["version"].strip() == VERSION
    others = [each for each in requirements_of(project) if each.name in DISTRIBUTIONS]
    assert len(others) == {"attn-testkit": 3, "cuda-on-cpu": 0}.get(name, 1)
    assert {str(each.specifier) for each in others} <= {f"=={VERSION}"}


def test_the_kit_knows_where_each_distribution_is_in_a_checkout():
    known = {each.name: ROOT / each.folder / "pyproject.toml" for each in distributions.DISTRIBUTIONS}
    assert {name: path.resolve() for name, path in known.items()} == DISTRIBUTIONS
    for each in distributions.DISTRIBUTIONS:
        assert Path(distributions.folder_of(each)).resolve() == (ROOT / each.folder / each.module).resolve()


def test_pytest_is_an_extra():
    assert "pytest" not in {Requirement(text).name for text in PROJECT["dependencies"]}
    for extra in ("pytest", "xdist"):
        assert "pytest" in {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}


def test_an_upper_bound_has_its_reason_next_to_it():
    """An environment of a server has other versions than ours; pip would move them for a bound."""
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)
    for line in block.splitlines():
        assert not re.search(r"<|==|~=", line) or "#" in line, line


@pytest.mark.parametrize(
    ("version", "newer"), [("2.11.0", False), ("2.14.9+cpu", False), ("2.15.0.dev1", True), ("3.0", True)]
)
def test_a_torch_that_nobody_tried_is_named_by_doctor(version, newer):
    assert NEWEST_TORCH == "2.14"
    assert is_newer(version) is newer
