"""What the page about CI gives to copy: a workflow that is one, and an entry point that the kit finds."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from transcript import ROOT, fences

from attn_testkit.cli import all_commands, main

PAGE = ROOT / "docs" / "how-to" / "ci.md"


def titled(name: str) -> str:
    (body,) = [fence.body for fence in fences(PAGE) if fence.title == name]
    return body


def workflow() -> dict[Any, Any]:
    loaded = yaml.safe_load(titled(".github/workflows/attention.yml"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_workflow_has_a_trigger_and_jobs_whose_steps_do_one_thing_each() -> None:
    flow = workflow()
    # YAML 1.1 reads the word ``on`` as true.
    assert set(flow) == {"name", True, "permissions", "env", "jobs"}
    assert set(flow[True]) == {"pull_request", "schedule"}
    for job in flow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            assert set(step) <= {"run", "uses", "with", "if", "name"}


def test_no_pull_request_reaches_a_machine_of_ones_own() -> None:
    for job in workflow()["jobs"].values():
        if job["runs-on"] != "ubuntu-latest":
            assert job["if"] == "github.event_name == 'schedule'"


def test_what_the_workflow_runs_is_a_command_that_knows_its_options_and_values() -> None:
    lines = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    runs = [line.split(">>")[0].split("attn-testkit ", 1)[1].split() for line in lines if "attn-testkit " in line[:30]]
    assert [words[:2] for words in runs] == [["run", "--backend"], ["results", "report"], ["run", "--backend"]]
    for name, *words in runs:
        command = all_commands()[name] if name != "results" else all_commands()[f"{name} {words.pop(0)}"]
        with command.make_context(name, list(words)) as context:
            assert not context.args
    backends = {words[words.index("--backend") + 1] for words in runs if "--backend" in words}
    assert backends == set(entry_points())


def entry_points() -> dict[str, str]:
    found = tomllib.loads(titled("pyproject.toml"))["project"]["entry-points"]["attn_testkit.backends"]
    assert isinstance(found, dict)
    return found


def test_the_entry_point_is_found_and_its_backend_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an installer would write it down, in a folder on the path."""
    ((name, spec),) = entry_points().items()
    module, _, attribute = spec.partition(":")
    source = tmp_path / Path(*module.split(".")).with_suffix(".py")
    source.parent.mkdir(parents=True)
    (source.parent / "__init__.py").touch()
    shutil.copy(ROOT / "docs" / "code" / "my_decode.py", source)
    with source.open("a") as more:
        more.write(f"\n\nclass {attribute}(MyDecode):\n    pass\n")
    metadata = tmp_path / "my_pkg-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-pkg\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[attn_testkit.backends]\n{name} = {spec}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    case = "decode-gqa2x2-d64-fp16-p16-k3.37.9.17-contiguous-gauss-b4prod"
    code = main(["run", "--backend", name, "--device", "cpu", "--mode", "decode", "--case", case, "--in-process"])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert out.splitlines()[-1].startswith("PARTIAL: 2 of 18 planned case-runs ran, all passed")
    assert f"attn-testkit 0.1.0: {name} 1.0" in err
