"""Backends that torch compiles: here their regions run eagerly, and the results say so."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from in_process import check_backend

from attn_testkit.results.case_result import Status, emulated_parts
from attn_testkit.results.failure_text import format_failure
from attn_testkit.results.names import NOT_COMPILED

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

MODES = [
    "decode-gqa2x2-d64-fp16-p64-k300.70.12-interleaved-shifted-w11-b3prod",
    "target-verify-gqa8x2-d64-fp16-p1-k3.21.5.17-chain2-shuffled-one_hot-w0-b5nan",
    "extend-gqa2x2-d64-fp16-p64-k300.70.12-n23a67.1x2-interleaved-shifted-w11-b3prod",
    "draft-extend-gqa8x2-d64-fp16-p1-k3.21.5.17-n2a1x4-shuffled-one_hot-w0-b5nan",
    "draft-extend-v2-mha2-d128-bf16-p16-k21-n4a4-interleaved-rising_logits-w4-b4stale",
    "draft-decode-gqa8x2-d64-fp16-p1-k3.21.5.17-topk1steps4-shuffled-one_hot-w0-b5nan",
]


@pytest.fixture(scope="module", autouse=True)
def inductor() -> None:
    """Import it here, and not when each worker of xdist collects: it takes 2 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        import attn_testkit.examples.flex  # noqa: F401


@pytest.mark.parametrize("case", MODES)
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_flex_attention_passes_and_says_that_nothing_was_compiled(case: str, execution: str) -> None:
    results = check_backend(
        "attn_testkit.examples.flex:FlexBackend", device="cpu", executions=[execution], cases=(case,)
    )
    (result,) = (each for each in results if each.case)
    assert result.status is Status.PASSED, format_failure(result)
    assert result.kernels == NOT_COMPILED
    assert "compiled regions" in emulated_parts(result)


WRONG = [
    ("WrongMask", "matches-oracle", ""),
    ("SyncInPlan", "no-host-lengths", "planning an eager step waits for the device"),
    ("SyncInCompiled", "no-host-lengths", "an eager forward waits for the device"),
]


@pytest.mark.parametrize(("name", "check", "headline"), WRONG, ids=[name for name, *_ in WRONG])
def test_what_is_wrong_beside_or_inside_compiled_code_is_found(name: str, check: str, headline: str) -> None:
    results = check_backend(f"flex_variants:{name}", device="cpu", executions=["eager"], cases=(MODES[0],))
    (result,) = (each for each in results if each.case and each.status is not Status.UNSUPPORTED)
    assert result.status is Status.FAILED
    assert result.findings[0].check == check
    assert headline in result.findings[0].headline


TUNED = [
    ("Tuned", "", ""),
    ("TunedByLength", "compiles-once", "compiles again: triton.autotune, of kernel _copy_by_length"),
    ("TunedAndWaiting", "no-host-lengths", "an eager forward waits for the device"),
]


@pytest.mark.parametrize(("name", "check", "headline"), TUNED, ids=[name for name, *_ in TUNED])
def test_a_kernel_may_be_tuned_at_its_first_call_and_no_more(name: str, check: str, headline: str) -> None:
    case = "decode-gqa2x2-d64-fp16-p16-k300.70.12-interleaved-shifted-b3prod"
    results = check_backend(f"tuned_triton:{name}", device="cpu", executions=["eager"], cases=(case,))
    (result,) = (each for each in results if each.case and each.status is not Status.UNSUPPORTED)
    assert [finding.check for finding in result.findings] == ([check] if check else [])
    assert all(headline in finding.headline for finding in result.findings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
def test_triton_was_set_up_for_its_interpreter() -> None:
    language = pytest.importorskip("triton.language")
    assert type(language.cdiv).__name__ == "InterpretedFunction"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
def test_and_also_if_the_first_file_of_a_session_imports_inductor_which_imports_triton() -> None:
    name = f"{__file__}::{test_triton_was_set_up_for_its_interpreter.__name__}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
