"""What torch.compile says when it gives up, in a line."""

from __future__ import annotations

import logging

import pytest
import torch

from attn_testkit.checks.failures import from_exception, reason_of, site_of


def raised_by(function: object, *args: torch.Tensor, backend: object = "eager") -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its text is what is looked at
        torch.compile(function, backend=backend, fullgraph=True)(*args)  # type: ignore[call-overload]
    return raised.value


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def no_tile(graph: object, inputs: object) -> None:
    raise ValueError("no such tile\nmore of it")


def test_what_a_compiler_raised_is_said_and_not_how_to_see_more() -> None:
    error = raised_by(lambda x: x + 1, torch.ones(2), backend=no_tile)
    assert "TORCHDYNAMO_VERBOSE" in str(error)
    assert reason_of(error) == "ValueError: no such tile"
    found = from_exception(error, "forward", "", needs_cpu_lengths=False)
    assert found.headline == "forward raised BackendCompilerFailed: ValueError: no such tile"


def test_what_an_operation_raised_without_numbers_is_said() -> None:
    error = raised_by(lambda x: x @ x, torch.ones(2, 3))
    assert reason_of(error) == "RuntimeError: a and b must have same reduction dim, but got [2, 3] X [2, 3]."


def test_what_cannot_be_traced_is_said_with_the_explanation() -> None:
    error = raised_by(lambda x: x + len(open("/dev/null").read()), torch.ones(2))  # noqa: SIM115
    assert reason_of(error).startswith("Failed to trace builtin operator: Dynamo does not know how to trace")


def test_an_exception_of_nobodys_compiler_is_said_as_it_is() -> None:
    assert reason_of(ValueError("backend='x' raised:")) == "backend='x' raised:"


@pytest.mark.parametrize(
    "name",
    [
        "/opt/venv/lib/python3.12/dist-packages/torch/nn/functional.py",
        "/opt/venv/lib/python3.12/site-packages/triton/testing.py",
        "/tmp/torchinductor_me/ab/cab.py",
        "<eval_with_key>.3",
    ],
)
def test_a_line_that_a_compiler_wrote_or_that_is_torchs_is_not_the_authors(name: str) -> None:
    made: dict[str, object] = {}
    exec(compile("def run():\n    raise ValueError('deep')\n", name, "exec"), made)
    with pytest.raises(ValueError, match="deep") as raised:
        made["run"]()  # type: ignore[operator]
    assert site_of(raised.value).startswith("test_compiler_texts.py:")
