"""Public bugs of bounds, races and order are reported, and quiet once they are repaired."""

from __future__ import annotations

import importlib
import os
import re

import pytest
import torch

from cuda_on_cpu import emulated_cuda

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

BUGS = [pytest.param(bug, id=bug.run.__name__) for bug in importlib.import_module("public_bugs").BUGS]


@pytest.mark.parametrize("bug", BUGS)
def test_a_public_bug_is_reported_and_its_repair_is_quiet(bug):
    for _ in range(2):  # noted down, then walked
        with torch.no_grad(), emulated_cuda():
            bug.run(False)
        with torch.no_grad(), emulated_cuda(), pytest.raises(bug.error) as raised:
            bug.run(True)
        assert re.search(bug.says, str(raised.value)), raised.value
