"""``attn-testkit doctor``: each backend is real, emulated, fake, absent or broken, and the reason is the right one."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attn_testkit.cli import main
from attn_testkit.registry import BackendInfo, Origin

doctor = importlib.import_module("attn_testkit.cli.doctor")


@pytest.fixture
def call(fake, capfd, monkeypatch):
    """Examine a machine with these registered backends: (exit code, stdout, stderr)."""

    def _call(*argv: str, backends: tuple[str, ...] = ("fake:ok",), plain: str = "fake:ok") -> tuple[int, str, str]:
        infos = [BackendInfo(name, name, Origin()) for name in backends]
        monkeypatch.setattr(doctor, "registered_backends", lambda: infos)
        monkeypatch.setattr(doctor, "PLAIN", plain)
        code = main(["doctor", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return _call


def found(out: str) -> dict[str, tuple[str, str]]:
    return {each["backend"]: (each["how"], each["reason"]) for each in json.loads(out)["backends"]}


def test_every_backend_is_tried_and_a_broken_one_does_not_keep_the_kit_from_running(call):
    code, out, _ = call("--json", backends=("fake:ok", "fake:wrong", "fake:segfault", "nofake"))
    assert code == 0
    assert found(out) == {
        "fake:ok": ("emulated", ""),
        "fake:wrong": ("broken", "decode-wrong-k0: request 3 differs from the oracle, 56x over the limit"),
        "fake:segfault": (
            "broken", "decode-segfault-k0: the process was killed by SIGSEGV\n  about to read a freed page"
        ),
        "nofake": ("not run here", "unknown backend 'nofake'; did you mean 'fake:ok'?"),
    }  # fmt: skip
    data = json.loads(out)
    assert (data["format"], data["can_run"], data["device"]) == ("attn-testkit-doctor/1", True, "emulated")


def test_where_the_plain_backend_does_not_pass_the_kit_cannot_run(call):
    code, out, _ = call(backends=("fake:wrong", "fake:ok"), plain="fake:wrong")
    assert code == 1
    assert out.splitlines()[-1].startswith("the kit cannot run here: torch_native does not pass: decode-wrong")


def test_where_the_judge_ends_the_kit_cannot_run_and_the_machine_is_still_described(call):
    code, out, _ = call(backends=("fake:dies",))
    assert code == 1
    assert "the kit cannot run here: the judge's process ended with exit code 9" in out
    assert re.search(r"\npackages\n(  .+\n)*  torch +2", out)


def test_text_and_json_say_the_same(call):
    _, out, _ = call(backends=("fake:ok", "nofake"))
    assert "device: CPU (emulated CUDA); torch 2.13.0" in out
    assert "  fake:ok  its own kernels, on emulated CUDA\n" in out
    assert "  nofake   not run here: unknown backend 'nofake'" in out
    assert out.splitlines()[-1] == "the kit can run here"


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--device", "gpu"], "unknown device 'gpu'; did you mean 'cuda'?"), (["--timeout", "nan"], "timeout is nan")],
)
def test_wrong_usage_is_one_line_and_four(call, argv, message):
    code, out, err = call(*argv)
    assert (code, out) == (4, "")
    assert message in err


def test_a_vendor_package_that_cannot_be_imported_is_said_once_with_its_line(tmp_path):
    """Nine adapters need it, and none of them is to blame."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("\nraise ImportError('libcudart.so.13: no such file')\n")
    info = tmp_path / "flashinfer_python-0.7.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.3\n")
    (info / "top_level.txt").write_text("flashinfer\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def examined(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "attn_testkit", "doctor", "--device", "cpu", *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    text = examined()
    assert text.returncode == 0, text.stdout + text.stderr
    out = text.stdout
    said = "0.7.3 is installed and cannot be imported: ImportError: libcudart.so.13: no such file (at "
    assert out.count(said) == 1
    assert f"{Path('flashinfer') / '__init__.py'}:2)" in out
    assert out.count("not run here: flashinfer-python cannot be imported\n") == 9
    assert re.search(r"^  torch_native +its own kernels, on emulated CUDA$", out, re.M)
    assert "pip install --force-reinstall 'flashinfer-python>=0.7.2,<0.8'" in out
