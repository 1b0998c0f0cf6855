"""``flashinfer_gdn`` passes over its fakes, bound to the package's signatures, and mistakes with its entry points are
caught."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

pytest.importorskip("flashinfer")

from in_process import check_backend

from attn_testkit.backends.flashinfer_gdn import FlashInferGDNBackend
from attn_testkit.backends.vendor import VendorMismatch, VendorMissing, fake_of, real
from attn_testkit.backends.vendor.gdn_kernels import DECODE, PREFILL, VERIFY
from attn_testkit.backends.vendor.source_signature import stub_of
from attn_testkit.contract import Requires
from attn_testkit.environment import Environment, missing_here
from attn_testkit.results.case_result import CaseResult, Status

MODULE = "attn_testkit.backends.flashinfer_gdn"
IN_DECODE = "decode-gdn2x2-d128-bf16-p16-k3.9-shuffled-mild_decay-k128w4s32.zeroed-layers1from0-b3prod"
COMMITTED = "target-verify-gdn2x2-d128-bf16-p16-k5.1-chain3-shuffled-mild_decay-k128w4s32.zeroed-layers1from0-b2prod"
BY_SLOTS = (
    "target-verify-gdn2x2-d128-bf16-p16-k5.1-chain3-shuffled-mild_decay-k128w4s32.null.zeroed.slots-layers1from0-b3prod"
)
LOOP = (
    "target-verify-gdn2x2-d128-bf16-p16-k5-chain2-loop1-shuffled-mild_decay-k128w4s32.zeroed.slots-layers1from0-b2prod"
)
IN_EXTEND = "extend-gdn2x2-d128-bf16-p16-k0.17-n5a1.9-shuffled-mild_decay-k128w4s32.zeroed-layers1from0-b2prod"
HALF = "decode-gdn2x2-d128-bf16-p16-k3.9-shuffled-mild_decay-k128w4sb16.slot0.zeroed-layers1from0-b3prod"
HALF_VERIFY = (
    "target-verify-gdn2x2-d128-bf16-p16-k5.1-chain3-shuffled-mild_decay-k128w4sb16.slot0.zeroed-layers1from0-b2prod"
)


def run(backend: str, case: str, execution: str) -> CaseResult:
    (row,) = [each for each in check_backend(backend, device="cpu", executions=[execution], cases=[case]) if each.case]
    return row


@pytest.mark.parametrize(
    ("name", "case", "execution"),
    [
        ("FlashInferGDNBackend", IN_DECODE, "graph"),
        ("FlashInferGDNBackend", COMMITTED, "eager"),
        ("FlashInferGDNBackend", BY_SLOTS, "eager"),
        ("FlashInferGDNBackend", IN_EXTEND, "eager"),
        # Prompts on an instance whose windows have columns for drafts.
        ("FlashInferGDNBackend", LOOP, "eager"),
        ("FlashInferGDNBF16Backend", HALF, "eager"),
        ("FlashInferGDNBF16Backend", HALF_VERIFY, "eager"),
    ],
)
def test_it_passes_over_the_fakes_and_says_so(name: str, case: str, execution: str) -> None:
    row = run(f"{MODULE}:{name}", case, execution)
    assert (row.status, row.kernels) == (Status.PASSED, "emulated"), [each.headline for each in row.findings]
    assert 0.01 < (row.margin or 0) < 0.6


@pytest.mark.parametrize(
    ("name", "case", "execution", "checks"),
    [
        ("LogarithmOfTheDecay", IN_EXTEND, "eager", {"matches-oracle"}),
        ("PaddingClamped", IN_DECODE, "graph", {"writes-own-state"}),
        ("DraftsUpdateTheState", COMMITTED, "eager", {"verify-keeps-state"}),
    ],
)
def test_a_mistake_with_an_entry_point_is_caught(name: str, case: str, execution: str, checks: set[str]) -> None:
    row = run(f"faulty_flashinfer_gdn:{name}", case, execution)
    assert row.status is Status.FAILED
    assert checks & {each.check for each in row.findings}


def test_a_signature_in_the_source_is_that_of_the_function() -> None:
    for entry in (DECODE, VERIFY):
        assert list(inspect.signature(stub_of(entry.path)).parameters.values()) == [
            each.replace(annotation=inspect.Parameter.empty)
            for each in inspect.signature(real(entry)).parameters.values()
        ]
    with pytest.raises(NotImplementedError, match="read from its source only"):
        stub_of(PREFILL.path)()


def test_the_fake_of_the_prefill_is_bound_without_an_import_of_its_module() -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        fake_of(PREFILL)(None, None, None, no_such_argument=1)


def test_a_function_or_a_package_that_is_gone_is_named() -> None:
    with pytest.raises(VendorMismatch, match="no_such_function"):
        fake_of(replace(PREFILL, path="flashinfer.gdn_prefill:no_such_function"))
    with pytest.raises(VendorMissing, match="no_such_package"):
        fake_of(replace(PREFILL, path="no_such_package.gdn:function"))


def test_a_compiler_is_asked_for_on_a_real_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = FlashInferGDNBackend.capabilities.with_changes(requires=Requires(compilers=("no-such-compiler>1",)))
    assert missing_here(declared, Environment(emulated=True)) == ""
    assert missing_here(declared, Environment(emulated=False)) == "no-such-compiler>1 is not installed"
    with pytest.raises(ValueError, match=r"Requires.compilers must be a tuple, got 'a>=1'; write \('a>=1',\)"):
        Requires(compilers="a>=1")  # type: ignore[arg-type]
