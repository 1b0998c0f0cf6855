"""A kernel with tensor descriptors is conformant in the emulation, and a mistake in it is found."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from in_process import check_backend

# Triton before 3.9, with a NumPy that warns of it
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


CASES = [
    "decode-gqa2x2-d64-bf16-p16-k0.1.16-contiguous-mean-b3prod",
    "decode-gqa8x2-d64-fp16-p16-k3.37.9.17-shuffled-one_hot-b5nan",
    "decode-mha2-d64-bf16-p16-k21-interleaved-rising_logits-b4stale",
]


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_decode_by_descriptors_conforms(execution: str) -> None:
    found = check_backend(
        "descriptor_triton:DescriptorDecode", device="cpu", modes=["decode"], cases=CASES, executions=[execution]
    )
    assert found.ok, found
    assert {row.case for row in found} == set(CASES)


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_decode_that_counts_on_the_padding_of_a_descriptor_is_found(execution: str) -> None:
    found = check_backend(
        "descriptor_triton:DescriptorDecodeWithoutMask",
        device="cpu",
        modes=["decode"],
        cases=CASES,
        executions=[execution],
    )
    assert {row.case for row in found if any(finding.check == "reads-own-kv" for finding in row.findings)} == set(CASES)
