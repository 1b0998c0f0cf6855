"""`python -m cuda_on_cpu run SCRIPT`: what it finds, its exit codes, its record, and kernels compiled."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from cuda_on_cpu.__main__ import main

SCRIPT = str(Path(__file__).with_name("tool_script.py"))


@pytest.fixture(autouse=True)
def own_process_state(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_right_program_ends_with_0_and_optimizer_sampler_and_functions_run(capfd):
    assert main(["run", SCRIPT, "optimizer"]) == 0
    assert "3 launches of 1 kinds" in capfd.readouterr().err, "integers of a width are one kernel"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("stray", r"StrayAccessError: a load of triton kernel scale"),
        ("race", r"RaceError: a load of triton kernel count"),
    ],
)
def test_a_wrong_program_ends_with_1_and_the_record_has_the_finding(what, says, tmp_path, capfd):
    record = tmp_path / "found.json"
    assert main(["run", "--json", str(record), SCRIPT, what]) == 1
    assert says in capfd.readouterr().err
    found = json.loads(record.read_text())
    assert found["exit_code"] == 1
    assert found["finding"].startswith(says)
    assert "tool_script.py" in found["finding"]


def test_an_error_of_the_script_is_2_and_a_wrong_argument_is_4(capfd):
    assert main(["run", SCRIPT, "raises"]) == 2
    assert "ValueError: of the script" in capfd.readouterr().err
    assert main(["run", "no_such_script.py"]) == 4
    assert "there is no file no_such_script.py" in capfd.readouterr().err
    assert main(["run", "--compile-for", "sm91", SCRIPT]) == 4
    assert "--compile-for has no sm91; it has sm80" in capfd.readouterr().err


OPTIMIZER = str(Path(__file__).parents[3] / "docs" / "code" / "paged_optimizer.py")


def test_the_paged_optimizer_of_the_docs_is_quiet_until_it_forgets_to_wait(capfd):
    assert main(["run", OPTIMIZER]) == 0
    assert "moments 0.19 weight -0.29" in capfd.readouterr().out
    assert main(["run", OPTIMIZER, "no-wait"]) == 1
    assert "EmulationError: Tensor.mul_" in capfd.readouterr().err


def test_programs_may_run_in_reverse_and_the_device_may_be_late(capfd):
    for words, says in (
        ([], "100 101 102 True"),
        (["--program-order", "reverse"], "102 101 100 True"),
        (["--device", "late"], "100 101 102 False"),
    ):
        assert main(["run", *words, SCRIPT, "order"]) == 0
        assert says in capfd.readouterr().out


def test_races_may_be_left_out():
    assert main(["run", "--races", "off", SCRIPT, "race"]) == 0


def test_a_kernel_that_no_device_can_hold_is_refused_and_a_small_one_compiles(tmp_path, capfd):
    record = tmp_path / "found.json"
    assert main(["run", "--compile-for", "sm90", "--json", str(record), SCRIPT, "large"]) == 1
    said = capfd.readouterr().err
    assert "REFUSED sm90: product(bfloat16, float32; WIDTH=2048, num_warps=8): it needs 524,288 bytes of shared" in said
    small, large = json.loads(record.read_text())["compiled"]
    assert (small["launch"]["kernel"], small["refused"], small["unknown"]) == ("scale", "", "")
    assert 0 < small["registers"] < 64
    assert large["refused"]
