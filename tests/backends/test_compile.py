"""`attn-testkit compile`: the kernels of a backend are compiled as a device would launch them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from attn_testkit.cli import main

CASE = "decode-gqa2x2-d64-bf16-p16-k5.40.17-shuffled-gauss-b3prod"


def test_each_kind_of_launch_is_compiled(tmp_path, capfd):
    record = tmp_path / "compiled.json"
    words = ["compile", "-b", "split_merge:ByTicket", "--for", "sm90", "--case", CASE, "--json", str(record)]
    assert main(words) == 0
    said = capfd.readouterr().err
    assert "1 kinds of launches for sm90: 1 compiled, 0 refused, 0 not compiled" in said
    (launch,) = json.loads(record.read_text())["compiled"]
    assert launch["launch"]["kernel"] == "attend_and_merge"
    assert launch["launch"]["kwargs"] == {"BY_TICKET": True, "SPLITS": 3, "PAGE": 16, "WIDTH": 64}


def test_a_machine_without_triton_is_told_to_install_it(capfd, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["compile", "-b", "torch_native", "--for", "sm90"]) == 4
    assert "compile needs Triton: pip install 'triton" in capfd.readouterr().err


def test_a_backend_without_triton_kernels_and_an_unknown_target_say_so(capfd):
    assert main(["compile", "-b", "torch_native", "--for", "sm90", "--case", CASE]) == 5
    assert "no Triton kernel was launched" in capfd.readouterr().err
    assert main(["compile", "-b", "torch_native", "--for", "sm91"]) == 4
    assert "--for has no sm91; it has sm80" in capfd.readouterr().err


def test_the_targets_are_those_of_the_compiler():
    from attn_testkit.cli.compile import TARGETS
    from cuda_on_cpu import compile_for

    assert TARGETS == compile_for.TARGETS
