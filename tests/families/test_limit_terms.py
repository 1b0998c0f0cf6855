"""The terms of a limit add up to it, name what the case asks for, and ``explain --limit`` prints them."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.cli import main
from attn_testkit.cli.explain_limit import explain_limit_of
from attn_testkit.families.softmax.limit_terms import limit_terms
from attn_testkit.families.table import family_of
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.schedule import make_schedule

PLAIN = "decode-gqa2x2-d64-bf16-p16-k2-shuffled-gauss-b1prod"


@pytest.mark.parametrize(
    ("case_id", "matmul_dtype", "names"),
    [
        (PLAIN, "model", {"floor", "output", "weights", "logits"}),
        (PLAIN.replace("bf16", "fp16").replace("gauss", "gauss-sink"), "model", {"small weights"}),
        (PLAIN.replace("bf16", "fp32"), "tf32", {"factors"}),
        (PLAIN.replace("gauss", "gauss-kvfp8e4m3"), "fp8_e4m3", {"small weights"}),
        (PLAIN.replace("gauss", "gauss-lsepages2merged"), "model", {"merging"}),
    ],
)
def test_the_terms_are_not_negative_and_their_sum_is_the_limit(
    case_id: str, matmul_dtype: str, names: set[str]
) -> None:
    schedule = make_schedule(parse_case(case_id), Numerics(matmul_dtype=matmul_dtype))
    data = family_of(schedule.case).data(schedule, schedule.steps[0], None)
    out, terms = limit_terms(schedule, data)
    found = family_of(schedule.case).answer(schedule, data, schedule.new_rows_as_given)
    assert torch.equal(out, found.out)
    torch.testing.assert_close(sum(term.value for term in terms), found.limit)
    assert all((term.value >= 0).all() for term in terms)
    assert names <= {term.name for term in terms if (term.value > 0).any()}


def test_the_command_prints_the_terms_of_the_element_that_a_failure_names(capsys: pytest.CaptureFixture[str]) -> None:
    case_id = PLAIN.replace("-k2-", "-k2.9-").replace("b1prod", "b2prod")
    assert main(["explain", case_id, "--limit", "--at", "layer 1, request 1 row 0, head 3, dim 5", "--step", "1"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == "out[layer 1, request 1 row 0, head 3, dim 5], step 1"
    values = {name: float(value) for name, value in (row.split()[:2] for row in rows)}
    assert list(values) == ["answer", "floor", "output", "weights", "logits", "limit"]
    assert values["output"] == pytest.approx(2 * 2**-8 * abs(values["answer"]), rel=1e-3)
    terms = sum(values[name] for name in ("floor", "output", "weights", "logits"))
    assert values["limit"] == pytest.approx(terms, rel=1e-3)


def of_failure(where: str, step: str = "") -> CaseResult:
    finding = Finding("matches-oracle", "request 1 differs from the oracle", where=where, step=step)
    return CaseResult("b", "decode", "eager", PLAIN, Status.FAILED, (finding,))


@pytest.mark.parametrize(
    ("step", "name"), [("", "step 0"), ("replay 2 of 9 (one request), bucket 1, 1 live", "step 1")]
)
def test_repro_prints_the_terms_of_the_element_that_failed(
    step: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    explain_limit_of(of_failure("out[layer 1, request 0 row 0, head 3, dim 5] = 1, want 2 (limit 1e9)", step))
    first, *_, limit, declared = capsys.readouterr().out.splitlines()
    assert first == f"out[layer 1, request 0 row 0, head 3, dim 5], {name}"
    assert limit.split()[0] == "limit"
    assert "which declares its numerics" in declared, "the limit of the failure is another"


def test_repro_says_why_there_are_no_terms(capsys: pytest.CaptureFixture[str]) -> None:
    explain_limit_of(of_failure("out[layer 1, request 0, head 3, dim 5] is nan"))
    explain_limit_of(of_failure("out[layer 1, request 0, head 3, dim 5] = 1, want 2 (limit 3)", "another eager step"))
    no_element, other_step = capsys.readouterr().out.splitlines()
    assert "names no element" in no_element
    assert "another eager step" in other_step


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([PLAIN, "--limit", "--at", "layer 0, request 1 row 0, head 0, dim 0"], "has no such element"),
        ([PLAIN, "--limit", "--at", "0,0,0,0,64"], "has no such element"),
        ([PLAIN, "--limit", "--at", "0,0"], "write layer, request, row, head and dim"),
        ([PLAIN, "--limit", "--step", "99"], "the case has steps 0 to"),
        ([PLAIN, "--step", "0"], "add --limit"),
        (["decode-gdn4x2-d64-bf16-p8-k33-shuffled-mild_decay-k32w2s32-b5prod", "--limit"], "softmax attention"),
    ],
)
def test_an_element_that_is_not_there_is_an_error_in_a_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
