"""What importing a server changes in a process is told and stays; what a backend changes itself is a failure."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import check_backend, plan_run

from attn_testkit.examples import MinimalBackend
from attn_testkit.running.hygiene import server_imports
from attn_testkit.running.hygiene.process_state import changes, restore, take_state
from attn_testkit.running.hygiene.server_imports import ServerImports

DECODE = "decode-gqa2x2-d64-bf16-p16-k3.9-shuffled-gauss-b2prod"
OFF = "import torch\ntorch.backends.cuda.enable_cudnn_sdp(False)\n"
CHANGE = "kernels of scaled_dot_product_attention: 'flash, mem_efficient, math, cudnn' -> 'flash, mem_efficient, math'"
FILES = {
    "pretend_server/__init__.py": "",
    "pretend_server/cuda.py": OFF,
    "pretend_server/outer.py": "import pretend_server.cuda, pretend_library\n",
    "pretend_server/quiet.py": "value = 1\n",
    "pretend_server/breaks.py": "import attn_testkit.model\nattn_testkit.model.pack = None\n",
    "pretend_library.py": "import torch\ntorch.set_float32_matmul_precision('high')\n",
    "pretend_author.py": OFF,
}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(server_imports, "bridges", lambda: {"pretend_server": "attn_testkit_servers.bridges.pretend"})
    torch.backends.cuda.enable_cudnn_sdp(True)
    before = take_state()
    yield
    restore(before)
    for name in [name for name in sys.modules if name.startswith("pretend_")]:
        del sys.modules[name]


@pytest.fixture
def watch() -> Iterator[ServerImports]:
    made = ServerImports("my_backends.triton:Mine")
    made.install()
    yield made
    made.remove()
    assert made not in sys.meta_path


def test_what_an_import_of_a_server_changed_is_reported_and_accepted_once(watch: ServerImports) -> None:
    before = take_state()
    module = importlib.import_module("pretend_server.cuda")
    importlib.import_module("pretend_server.quiet")
    assert watch.reported == [f"importing pretend_server.cuda changed the process: {CHANGE}"]
    assert changes(before) == [CHANGE], "it stays in force"
    accepted = watch.accept_into(before)
    assert changes(accepted) == []
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert len(changes(accepted)) == 1, "what somebody else changes later is a change"
    assert type(module.__loader__).__name__ == "SourceFileLoader", "and the module has its own loader"


def test_an_import_inside_another_belongs_to_the_outer_one(watch: ServerImports) -> None:
    before = take_state()
    importlib.import_module("pretend_server.outer")
    (line,) = watch.reported
    assert line.startswith("importing pretend_server.outer changed the process: ")
    assert CHANGE in line
    assert "matmul precision" in line, "a library that the server imports is the server's, too"
    assert changes(watch.accept_into(before)) == []


def test_of_two_watches_in_a_process_the_later_one_has_what_an_import_changed(watch: ServerImports) -> None:
    later = ServerImports("my_backends.triton:Another")
    later.install()
    try:
        importlib.import_module("pretend_server.cuda")
    finally:
        later.remove()
    assert (later.reported, watch.reported) == ([f"importing pretend_server.cuda changed the process: {CHANGE}"], [])


@pytest.mark.parametrize("name", ["pretend_author", "pretend_library"])
def test_an_import_of_somebody_else_is_not_accepted(watch: ServerImports, name: str) -> None:
    before = take_state()
    importlib.import_module(name)
    assert watch.reported == []
    assert len(changes(watch.accept_into(before))) == 1


def test_whatever_a_bridge_imports_is_the_servers_but_not_the_backends_own_module(watch: ServerImports) -> None:
    bridge: dict[str, Any] = {
        "__name__": "attn_testkit_servers.bridges.pretend.driver",
        "load": importlib.import_module,
    }
    before = take_state()
    exec("def forward(name):\n    return load(name)", bridge)
    bridge["forward"]("pretend_library")
    assert [line.partition(" changed")[0] for line in watch.reported] == ["importing pretend_library"]
    assert changes(watch.accept_into(before)) == []
    own = ServerImports("pretend_author:Mine")
    own.install()
    bridge["forward"]("pretend_author")
    own.remove()
    assert own.reported == []


def test_what_is_changed_of_the_kit_is_never_accepted(watch: ServerImports) -> None:
    before = take_state()
    importlib.import_module("pretend_server.breaks")
    assert watch.reported == []
    assert changes(watch.accept_into(before)) == ["attn_testkit.model.pack was replaced"]


class ImportsAtFirstUse(MinimalBackend):
    """Healthy."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        importlib.import_module("pretend_server.cuda")
        return super().forward(*given, **named)


class ChangesItself(MinimalBackend):
    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        importlib.import_module("pretend_server.quiet")
        torch.backends.cuda.enable_cudnn_sdp(False)
        return super().forward(*given, **named)


class HasNotes(MinimalBackend):
    notes = ("a compiled module does not load",)


class NotHere(MinimalBackend):
    not_here = "its compiled module does not load"


def test_an_import_at_first_use_is_a_remark_and_a_change_by_the_backend_a_failure() -> None:
    results = check_backend(ImportsAtFirstUse, device="cpu", executions=["eager"], cases=[DECODE])
    assert results.ok
    (row,) = [row for row in results if row.case]
    assert row.hints == (f"importing pretend_server.cuda changed the process: {CHANGE}",)
    torch.backends.cuda.enable_cudnn_sdp(True)
    for _ in range(2):
        (row,) = [r for r in check_backend(ChangesItself, device="cpu", executions=["eager"], cases=[DECODE]) if r.case]
        assert [finding.check for finding in row.findings] == ["leaves-process-alone"]


def test_notes_of_a_class_are_in_the_header_and_a_class_that_is_not_here_is_not_run() -> None:
    plan = plan_run(backends=[HasNotes, MinimalBackend], device="cpu", executions=["eager"], modes=["decode"])
    assert list(plan.header.notes.values()) == [HasNotes.notes]
    plan = plan_run(backends=[NotHere], device="cpu", executions=["eager"], modes=["decode"])
    assert not plan.items
    assert [(row.status.value, row.reason) for row in plan.preset] == [("not run here", NotHere.not_here)]
