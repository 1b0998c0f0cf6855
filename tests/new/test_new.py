"""``attn-testkit new``: what it writes is good as it stands, and what it prints works."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attn_testkit.cli import main
from attn_testkit.running.planning.known_failures import load_known

WRITTEN = {"my_attention.py", "test_my_attention.py", "known_failures.toml", ".github/workflows/conformance.yml"}


@pytest.fixture
def call(capfd, tmp_path, monkeypatch):
    """Call the command line in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capfd.readouterr()
        return code, out, err

    return _call


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def next_commands(out: str) -> list[str]:
    return [line.strip() for line in out.partition("next:\n")[2].splitlines()]


@pytest.mark.cold
def test_what_it_prints_can_be_typed_and_is_green(call, tmp_path):
    """The adapter is a backend that conforms, and its test passes, before anybody has written a line."""
    code, out, _ = call("new", "my-attention")
    assert code == 0
    assert files_in(tmp_path / "my_attention") == WRITTEN
    for name in WRITTEN:
        assert name in out
    commands = next_commands(out)
    assert commands == [
        "cd my_attention",
        "attn-testkit run --backend my_attention:MyAttentionBackend",
        "python -m pytest test_my_attention.py",
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": "-W error"}
    found = subprocess.run(
        ["bash", "-c", " && ".join(commands)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    planned = int(found.stdout.partition("CONFORMANT (smoke): ")[2].split()[0])
    assert planned > 20
    assert f"{planned} passed in" in found.stdout


@pytest.mark.parametrize("name", ["x", "a2345678901234567890123456789012345678_9"])
def test_what_it_writes_passes_ruff_as_it_is_and_by_the_rules_of_the_kit(call, tmp_path, name):
    """Also with the shortest and the longest name, where lines would be broken otherwise."""
    pytest.importorskip("ruff")
    code, _, err = call("new", name)
    assert code == 0, err
    rules = Path(__file__).resolve().parents[2] / "pyproject.toml"
    for args in (["check"], ["format", "--check"], ["check", "--config", str(rules)]):
        found = subprocess.run(
            [sys.executable, "-m", "ruff", *args, "."], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stdout


def test_the_file_of_known_failures_is_empty_and_its_example_is_valid(call, tmp_path):
    call("new", "mine")
    file = tmp_path / "mine" / "known_failures.toml"
    assert load_known(file) == ()
    lines = file.read_text().partition("# [[known]]")[2].splitlines()
    file.write_text("[[known]]\n" + "\n".join(line.removeprefix("# ") for line in lines))
    (entry,) = load_known(file)
    assert entry.until > datetime.datetime.now(datetime.UTC).date()
    assert tomllib.loads(file.read_text())["known"][0]["kind"] == "tolerated"


def test_the_workflow_installs_the_kit_from_where_the_page_about_ci_does(call, tmp_path):
    """It is on no package index, so a name alone cannot be installed."""
    call("new", "mine")
    flow = (tmp_path / "mine" / ".github" / "workflows" / "conformance.yml").read_text()
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "ci.md").read_text()
    for name, variable in (("attn-testkit[xdist]", "KIT"), ("cuda-on-cpu", "CUDA_ON_CPU")):
        (place,) = [
            line.partition(" @ ")[2].split()[0] for line in page.splitlines() if line.startswith(f"  {variable}: ")
        ]
        assert f'"{name} @ {place}"' in flow
    (torch,) = [line.partition("install ")[2] for line in page.splitlines() if "whl/cpu" in line]
    assert torch in flow


@pytest.mark.parametrize("there", sorted(WRITTEN))
def test_nothing_that_exists_is_overwritten_and_nothing_else_is_written_beside_it(call, tmp_path, there):
    path = tmp_path / "here" / there
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    code, out, err = call("new", "my_attention", "--into", "here")
    assert code == 4
    assert not out
    assert err == (f"attn-testkit: here has {there} already; name another folder with --into\n")
    assert files_in(tmp_path / "here") == {there}
    assert path.read_text() == "mine"


def test_it_writes_beside_what_is_there(call, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    code, out, _ = call("new", "my_attention", "--into", ".")
    assert code == 0
    assert files_in(tmp_path) == WRITTEN | {"README.md"}
    assert next_commands(out)[0].startswith("attn-testkit run")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["my.attention"], "'my.attention' cannot be the name of a module; expected letters, digits and _"),
        (["2fast"], "'2fast' cannot be the name of a module"),
        (["class"], "'class' cannot be the name of a module"),
        (["FlashAttention"], "the name of a module is in lower case; did you mean 'flash_attention'?"),
        (["torch"], "'torch' would hide the module of that name; choose another, such as torch_attention"),
        (["json"], "'json' would hide the module of that name"),
        (["a" * 41], "has 41 characters; the name of a module may have 40"),
        (["mine", "--into", "a_file"], "a_file is a file; name another folder with --into"),
        (["mine", "--into", "/proc/nope"], "cannot make /proc/nope: No such file or directory"),
        ([], "Missing argument 'NAME'. Usage: attn-testkit new [OPTIONS] NAME"),
    ],
)
def test_what_cannot_be_is_one_line_and_four(call, tmp_path, argv, message):
    (tmp_path / "a_file").write_text("")
    code, out, err = call("new", *argv)
    assert code == 4
    assert not out
    assert message in err
    assert err.count("\n") == 1
    assert files_in(tmp_path) == {"a_file"}


def test_a_folder_that_cannot_be_written_is_said(call, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    if os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    code, _, err = call("new", "mine", "--into", "locked")
    assert code == 4
    assert "Permission denied" in err
