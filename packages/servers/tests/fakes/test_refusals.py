"""Every fake refuses what its tables say that the kernel refuses, and accepts the arguments from which they start."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from attn_testkit_servers.fakes.all_refusals import all_refusals
from attn_testkit_servers.fakes.refusals import Check, Refusals
from cuda_on_cpu import emulated_cuda

CUDA = torch.device("cuda", 0)
TRIED = [
    pytest.param(each, check, id=f"{each.entry}: {check.tried}") for each in all_refusals() for check in each.checks
]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with emulated_cuda(), torch.no_grad():
        yield


@pytest.mark.parametrize(("each", "check"), TRIED)
def test_it_refuses_what_the_compiled_code_refuses(each: Refusals, check: Check) -> None:
    given = each.accepted(CUDA, each.fake)
    with pytest.raises((RuntimeError, AssertionError), match=re.escape(check.text or check.tried)):
        each.call(each.fake, each.function, given | check.change(given))


@pytest.mark.parametrize("each", all_refusals(), ids=lambda each: each.entry)
def test_it_accepts_the_arguments_that_are_changed(each: Refusals) -> None:
    found = each.output(each.call(each.fake, each.function, each.accepted(CUDA, each.fake)))
    if found is not None:
        assert bool(found.float().isfinite().all())


@pytest.mark.parametrize("each", all_refusals(), ids=lambda each: each.entry)
def test_no_two_checks_are_provoked_by_the_same_words(each: Refusals) -> None:
    words = [check.tried for check in each.checks]
    assert len(words) == len(set(words))
    assert all(re.fullmatch(r"[\w./]+:\w+(\.\w+)*", check.source) for check in each.checks)
