"""``attn-testkit minimize`` for real: failing cases of the tier core end with two features or fewer.

Two tests are of the command in its own process, with a judge and workers in theirs; the others judge here.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from judge_here import Call, interrupting, sent_here

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.cli import main
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.rules import with_rule
from attn_testkit.results.run_header import RunHeader
from attn_testkit.running.planning.request import Item, Plan

PACKED = "attn_testkit_corpus.faults.a_query_offsets:QlensPackedVsUniformStride"
LAST_PAGE = "attn_testkit_corpus.faults.d_kv_extent:PartialLastPageDropped"
PADDED_ROWS = "attn_testkit_corpus.faults.b_padding:PadFillUnderflowsUniformWidth"
WINDOW = "attn_testkit_corpus.faults.f_windows:DecodeWindowOneMore"
HERE = Path(__file__).parent
PASSES = "decode-mha2-d32-bf16-p1-k0-contiguous-gauss-b1prod"


ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
COMMAND = (sys.executable, "-m", "attn_testkit", "minimize", "--device", "cpu")


@pytest.mark.parametrize(
    ("backend", "case", "check", "needs"),
    [
        (
            PACKED,
            "draft-extend-gqa2x2-d64-bf16-p1-k0.1.8-n6a6x3-shuffled-one_hot-kvfp8e4m3-w46-b4nan",
            "replay-follows-batch",
            ["rows"],
        ),
        (
            PADDED_ROWS,
            "draft-extend-mqa4-d64-bf16-p4-k7.8.9-n4a4x3-interleaved-mean-w4000-cap1.5-sink-b4prod",
            "padding-inert",
            ["rows", "padded requests"],
        ),
        (
            WINDOW,
            "decode-mqa4-d256-bf16-p1-k1.2.5.9.14.2.30-reversed-shifted-kvfp8e4m3-w4-b8stale",
            "matches-oracle",
            ["window"],
        ),
    ],
)
def test_a_failing_case_of_core_ends_with_two_features_or_fewer(
    backend: str, case: str, check: str, needs: list[str], call: Call
) -> None:
    assert len(needs) <= 2
    assert case in {each.id for each in core_of(backend, case)}
    code, out, err = call("--backend", backend, case)
    assert code == 1, out + err
    assert_minimised(out, backend, check, needs)


def test_the_command_in_a_process_of_its_own_ends_with_two_features_or_fewer() -> None:
    case = "decode-gqa3x2-d256-bf16-p4-k0.1.8-contiguous-peaked-kvfp8e4m3-w11-cap1.5-sink-b3prod"
    assert case in {each.id for each in core_of(LAST_PAGE, case)}
    done = subprocess.run(
        [*COMMAND, "--backend", LAST_PAGE, case],
        cwd=HERE, env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert_minimised(done.stdout, LAST_PAGE, "matches-oracle", ["page size"])


def assert_minimised(out: str, backend: str, check: str, needs: list[str]) -> None:
    small, *_ = (line.partition(":")[0] for line in out.splitlines() if ": request" in line)
    (words,) = re.findall(r"^  needs    (.*)$", out, re.MULTILINE)
    assert [re.split(r" (?=\S+( of \S+)? \()", need)[0] for need in words.split("; ")] == needs
    assert f"  check    {with_rule(check)}\n" in out
    assert re.search(rf"^  repro    attn-testkit repro --backend {backend} .* {small}$", out, re.MULTILINE)
    assert re.search(rf"MINIMIZED: from \d+ non-default settings to {len(needs)}, in \d+ case-runs", out)


def core_of(backend: str, case: str) -> tuple[object, ...]:
    module, _, name = backend.partition(":")
    declared = getattr(importlib.import_module(module), name).capabilities
    return generate(declared, parse_case(case).mode, "core")


def test_what_passes_leaves_nothing_to_do(call: Call) -> None:
    code, out, _ = call("--backend", "torch_native", PASSES)
    assert code == 0
    assert out.splitlines() == [
        f"{PASSES} (eager): passed",
        f"{PASSES} (graph): passed",
        "NOTHING TO MINIMIZE: it does not fail",
    ]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (
            ["-b", "torch_native", PASSES.replace("p1", "p3")],
            4,
            "needs what the backend does not declare: page size 3",
        ),
        (["-b", "torch_native", "decode-mha2"], 4, "it lacks head_dim"),
        (["-b", "torch_native", "*codes*"], 4, "minimize takes one case id, no wildcards"),
        (["-b", "torch_nativ", PASSES], 4, "did you mean 'torch_native'?"),
        (["-b", "torch_native", "--seconds", "0", PASSES], 4, "seconds is 0; expected seconds above 0"),
        (
            ["-b", LAST_PAGE, PASSES.replace("decode", "draft-decode").replace("k0", "k0-topk1steps2")],
            4,
            "needs what the backend does not declare: mode draft-decode",
        ),
    ],
)
def test_what_cannot_be_done_is_said(argv: list[str], code: int, message: str, call: Call) -> None:
    found, out, err = call(*argv)
    assert found == code
    assert message in out + err


class KeepsCount:
    """Judges a backend that is wrong with pages of 16, and with all from the fourth case-run of a process on."""

    declared = TorchNativeBackend.capabilities

    def __init__(self, case: str) -> None:
        header = RunHeader("0", "", "", "smoke", 0, "emulated", "CPU", {}, {}, 1)
        self.plan = Plan(header, (Item("m:B", "decode", "eager", case),), ())
        self.runs = 0

    def run(self, case: Case, execution: str, *, explains: str = "check") -> CaseResult:
        self.runs += 1
        wrong = case.page_size == 16 or self.runs > 3
        findings = (Finding("matches-oracle", "wrong"),) if wrong else ()
        status = Status.FAILED if wrong else Status.PASSED
        return CaseResult("m:B", case.mode.value, execution, case.id, status, findings)

    def close(self) -> None:
        self.runs = 0


def test_what_fails_after_other_case_runs_alone_is_no_smaller_case(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case = "decode-gqa2x2-d64-bf16-p16-k33.5-shuffled-gauss-b2prod"
    # Not the function `minimize`, which stands in its place in the package.
    command = sys.modules["attn_testkit.cli.minimize"]
    monkeypatch.setattr(command, "OneByOne", lambda request, timeout: KeepsCount(case))
    assert main(["minimize", "--backend", "m:B", case]) == 1
    out, err = capfd.readouterr()
    assert "passes in a fresh process: it fails only after other case-runs" in err
    assert out.startswith(f"{case}: ")
    assert re.search(r"^NOT MINIMIZED: from 6 non-default settings to 6, in ", out, re.MULTILINE)


INTERRUPTED = "draft-extend-gqa2x2-d128-fp16-p16-k300.70.12-n6a6x3-shuffled-peaked-kvfp8e4m3-b6nan"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_it_the_smallest_so_far_is_printed(
    how: signal.Signals, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_testkit.cli.one_by_one.JudgeProcess", interrupting(how, before=4))
    with sent_here():
        code, out, err = call("--backend", PADDED_ROWS, "--execution", "graph", INTERRUPTED)
    assert code == 2, out + err
    assert "  check    padding-inert (AB-PAD-001)\n" in out
    assert out.splitlines()[-1].startswith("INTERRUPTED: ")


def test_the_command_in_a_process_of_its_own_is_ended_while_another_judges() -> None:
    with subprocess.Popen(
        [*COMMAND, "--backend", PADDED_ROWS, "--execution", "graph", INTERRUPTED],
        cwd=HERE, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stderr is not None
        for line in running.stderr:
            if "minimizing" in line:
                break
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 2
    assert "  check    padding-inert (AB-PAD-001)\n" in out
    assert out.splitlines()[-1].startswith("INTERRUPTED: ")


def test_a_time_limit_leaves_the_smallest_so_far(call: Call) -> None:
    case = "decode-mla2-d128r32-fp32-p128-k0.1.128-shared-mean-kvfp8e4m3-cap1.5-b6stale"
    code, out, err = call("--backend", LAST_PAGE, "--execution", "eager", "--seconds", "0.001", case)
    # The first case-run always begins: whether it fails has to be known.
    assert code == 1, out + err
    assert out.startswith(f"{case}: ")
    assert out.splitlines()[-1].startswith("TIME IS UP: ")
