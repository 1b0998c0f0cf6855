"""A backend that answers wrongly where the kit asks it is blamed for it: it is never a failure of the kit's own."""

import pytest
from in_process import plan_run, run

from attn_testkit.results.case_result import Status
from attn_testkit.results.finding import Finding
from attn_testkit.running.planning.request import final_code

DECODE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
VERIFY = "target-verify-gqa2x2-d64-fp16-p16-k29.125.61-t0.0.1.1.3-reversed-gauss-b5prod"


def findings(name: str, execution: str, case: str) -> list[Finding]:
    plan = plan_run(backends=[f"wrong_answers:{name}"], executions=[execution], device="cpu", cases=[case])
    (result,) = (result for result in run(plan) if result.case)
    assert final_code(plan.header, [result]) == (1 if result.findings else 0), result.reason
    assert result.status is (Status.FAILED if result.findings else Status.PASSED)
    return list(result.findings)


ANSWERS = [
    ("ForgetsSuper", "eager", "completes", "has no attribute '_kit_mask'", "begin it with super().__init__(context)"),
    ("SkipsAParent", "eager", "completes", "'workspace'", "SkipsAParent.__init__ did not call that of _WithWorkspace"),
    ("MaskRaises", "eager", "completes", "verify_mask raised AttributeError", ""),
    ("MaskIsNoneTwice", "eager", "completes", "verify_mask raised AttributeError: 'NoneType'", ""),
    ("MaskIsAMethod", "eager", "output-contract", "verify_mask is a method", "write @property above"),
    ("FillRaises", "graph", "completes", "get_cuda_graph_seq_len_fill_value raised KeyError: 'fill'", ""),
    ("FillIsNone", "graph", "output-contract", "fill_value returned None, expected 0 or 1", "leave the hook out for 1"),
    ("FillIsFive", "graph", "output-contract", "fill_value returned 5, expected 0 or 1", "seq_lens of padded requests"),
    ("KernelsRaises", "eager", "completes", "kernels raised OSError: no library", ""),
    (
        "KernelsAreUnheardOf",
        "eager",
        "output-contract",
        "kernels is 'fake', expected 'real', 'stores' or 'emulated'",
        "torch fake",
    ),
]


@pytest.mark.parametrize(("name", "execution", "check", "headline", "hint"), ANSWERS, ids=[a[0] for a in ANSWERS])
def test_a_wrong_answer_is_the_backends_mistake(
    name: str, execution: str, check: str, headline: str, hint: str
) -> None:
    (finding,) = findings(name, execution, DECODE)
    assert finding.check == check
    assert headline in finding.headline
    assert hint in finding.hint


def test_a_right_number_of_another_type_is_right() -> None:
    assert findings("FillIsATensor", "graph", DECODE) == []


MASKS = [
    ("LendsATensor", "verify_mask gave a Tensor, expected a VerifyMask or None", "return VerifyMask(buffer, "),
    (
        "LendsTooLittle",
        "has 30 elements; QLEN_ONLY for max_bs 5 and N 6 takes max_bs * N * N = 180",
        "N = context.num_",
    ),
    ("LendsTooLittleForAllKeys", "takes max_bs * N * (most keys of a request) = ", "init_cuda_graph_state"),
    ("LendsNumbers", "verify_mask.buffer is torch.int32; QLEN_ONLY of 6 nodes is bool or uint8", "allocate it as"),
    ("LendsBytesForWords", "torch.int32; QLEN_ONLY_BITPACKING of 6 nodes is uint8", "allocate it as uint8"),
    ("LendsAMatrix", "shape (5, 6, 6), strides (36, 6, 1), expected a flat contiguous", "buffer.view(-1)"),
    ("LendsHostMemory", "verify_mask.buffer is on cpu, expected cuda:0", "context.device"),
    ("LendsInNoMode", "verify_mask.mode is 1, expected a TreeMaskMode", "TreeMaskMode.QLEN_ONLY"),
    ("LendsForNobody", "verify_mask.max_bs is None", "max_bs"),
]


@pytest.mark.parametrize(("name", "headline", "hint"), MASKS, ids=[m[0] for m in MASKS])
def test_a_mask_that_cannot_be_filled_is_reported_with_what_the_contract_wants(
    name: str, headline: str, hint: str
) -> None:
    (finding,) = findings(name, "graph", VERIFY)
    assert finding.check == "output-contract"
    assert headline in finding.headline
    assert hint in finding.hint


def test_a_mask_of_the_longest_request_is_large_enough_for_a_table_of_whole_pages() -> None:
    case = "target-verify-gqa2x2-d64-fp16-p16-k9.64.1-chain4-shuffled-gauss-b4prod-context_of_prefixes"
    assert findings("LendsForTheLongestRequest", "graph", case) == []
