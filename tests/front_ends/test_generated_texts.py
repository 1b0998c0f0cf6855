"""One mistake of an author is one cause, however many files, kernels and addresses a compiler makes up for it."""

from __future__ import annotations

import pytest
import torch
from generated_texts import FILES, OWN_FILES, TEXTS, text_of

from attn_testkit.checks.failures import from_exception, site_of
from attn_testkit.reports.grouping import group_failures, without_numbers
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.texts import is_generated
from cuda_on_cpu.sites import UNKNOWN, author_site

AUTHORS = "attn.py:12 in run: return self.compiled(q)"
SHAPES = range(3, 40)


def failed(headline: str, where: str, hint: str = "", check: str = "completes") -> CaseResult:
    return CaseResult(
        "mine", "decode", "eager", "decode-a", Status.FAILED, (Finding(check, headline, where, hint=hint),)
    )


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize(
    "where",
    [AUTHORS, "", "/tmp/torchinductor_root/{two}/c{hash}.py:{n} in call", "<eval_with_key>.{n}:7 in forward"],
)
def test_failures_of_one_line_and_type_are_one_cause(kind: str, where: str) -> None:
    found = group_failures(failed(text_of(TEXTS[kind], n), text_of(where, n)) for n in SHAPES)
    assert [len(group.results) for group in found] == [len(SHAPES)]
    for made_up in ("torchinductor_", "<eval_with_key>", "0x7f", ".triton/", text_of("{hash}", 3), text_of("{sha}", 3)):
        assert made_up not in found[0].cause


def test_a_compiler_that_says_another_thing_for_each_shape_is_one_cause_at_one_line_of_one_type() -> None:
    words = ["no layout", "too many warps", "bad stride", "not divisible"]
    same = [failed(f"forward raised InductorError: {word}", AUTHORS) for word in words]
    assert len(group_failures(same)) == 1
    assert len(group_failures([*same, failed("forward raised ValueError: no", AUTHORS)])) == 2
    assert len(group_failures([*same, failed("forward raised InductorError: x", "attn.py:13 in run")])) == 2
    other = failed("forward raised InductorError: x", AUTHORS, check="captures-cleanly")
    assert len(group_failures([*same, other])) == 1, "the line is the cause, whichever check it fails"
    assert len(group_failures(failed(f"forward raised InductorError: {word}", "") for word in words)) == 4


def test_different_texts_of_compilers_without_a_line_stay_different_causes() -> None:
    found = group_failures(failed(text_of(text, n), "") for text in TEXTS.values() for n in SHAPES)
    assert len(found) == len(TEXTS)


@pytest.mark.parametrize("file", FILES)
def test_a_dead_process_is_put_down_to_the_authors_frame_and_not_to_a_compilers(file: str) -> None:
    def crashed(n: int) -> CaseResult:
        stack = f'\n  File "{text_of(file, n)}", line {n} in call\n  File "/home/me/attn.py", line 12 in run'
        return CaseResult("mine", "decode", "eager", "decode-a", Status.CRASHED, (), reason="killed by SIGSEGV" + stack)

    (group,) = group_failures(map(crashed, SHAPES))
    assert group.cause == "killed by SIGSEGV, in attn.py:12 run"


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_a_compiler_wrote_is_known(file: str) -> None:
    assert is_generated(text_of(file, 3))


@pytest.mark.parametrize("file", OWN_FILES)
def test_a_file_that_somebody_wrote_is_not_taken_for_one(file: str) -> None:
    assert not is_generated(file)
    assert raised_in(file).startswith(f"{file.rpartition('/')[2]}:1 in ")


def raised_in(file: str) -> str:
    inner: dict[str, object] = {}
    exec(compile("def call(): raise ValueError('no')", file, "exec"), inner)
    try:
        inner["call"]()  # type: ignore[operator]
    except ValueError as error:
        return site_of(error)
    raise AssertionError


@pytest.mark.parametrize("file", FILES)
def test_what_generated_code_raises_stands_at_the_authors_line_that_called_it(file: str) -> None:
    assert ' in raised_in: inner["call"]()' in raised_in(text_of(file, 3))


@pytest.mark.parametrize("file", ["/tmp/torchinductor_root/ab/c123.py", "<eval_with_key>.5"])
def test_the_emulation_names_the_authors_line_too(file: str) -> None:
    seen: dict[str, object] = {"look": author_site}
    exec(compile("def call(): return look()", file, "exec"), seen)
    site = seen["call"]()  # type: ignore[operator]
    assert site != UNKNOWN
    assert site.function == "test_the_emulation_names_the_authors_line_too"


def test_an_error_that_a_compiler_wraps_twice_stands_where_it_was_raised_first() -> None:
    def first() -> None:
        raise KeyError("plan")

    def wrapped() -> None:
        try:
            try:
                first()
            except KeyError as error:
                raise TypeError("lowering") from error
        except TypeError as error:
            raise RuntimeError("backend failed") from error

    with pytest.raises(RuntimeError) as raised:
        wrapped()
    assert ' in first: raise KeyError("plan")' in site_of(raised.value)


def test_torchs_compiler_leads_to_the_line_of_the_backend_that_it_compiled_for() -> None:
    def refuse(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise NotImplementedError(f"no kernel for {graph.graph}")

    def attend(q: torch.Tensor) -> torch.Tensor:
        return torch.compile(lambda rows: rows * 2, backend=refuse)(q)

    findings = []
    for rows in (2, 3, 5):
        torch.compiler.reset()
        with pytest.raises(Exception, match="no kernel for") as raised:
            attend(torch.ones(rows, 4))
        findings.append(from_exception(raised.value, "forward", "", needs_cpu_lengths=True))
    assert all("test_generated_texts.py:" in finding.where for finding in findings)
    assert len(group_failures(failed(f.headline, f.where) for f in findings)) == 1


@pytest.mark.parametrize(
    "text", ["int64, bf16, e4m3 and sm90", "head_dim 64 of q", "the step before replay", "cutoff at fp8_e4m3"]
)
def test_words_of_the_field_are_no_made_up_names(text: str) -> None:
    assert without_numbers(text).replace("N", "64") == text
