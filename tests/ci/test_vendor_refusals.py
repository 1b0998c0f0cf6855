"""``ci/vendor_agreement.py --refusals``: what it prints about kernels that agree with their fakes, and about others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_testkit_servers.fakes.refusals import Check, Refusals, refuse, to

ROOT = Path(__file__).resolve().parents[2]
WIDE = Check("a width of 3", to(width=3), lambda a: a.width % 2 == 0, "must be even", "kernel.cu:run")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "ci")
    import vendor_agreement

    yield vendor_agreement
    del sys.modules["vendor_agreement"]


def _fake(width: int) -> torch.Tensor:
    refuse((WIDE,), width=width)
    return torch.ones(width)


def _of(kernel: Callable[[int], torch.Tensor]) -> Refusals:
    return Refusals(
        "run", "run", SimpleNamespace(run=_fake), lambda: SimpleNamespace(run=kernel), lambda *_: {"width": 4}, (WIDE,),
        output=lambda returned: returned,
    )  # fmt: skip


def _refuses_other(width: int) -> torch.Tensor:
    if width % 4:
        raise RuntimeError("must be a multiple of 4")
    return torch.ones(width)


@pytest.mark.parametrize(
    ("kernel", "accepted", "refused"),
    [
        (_fake, "agrees", "agrees"),
        (torch.ones, "agrees", "kernel accepts"),
        (_refuses_other, "agrees", "kernel refuses other"),
        (torch.zeros, "kernel refuses other", "kernel accepts"),
    ],
)
def test_a_kernel_is_compared_by_its_refusals_and_its_outputs(
    script: Any, monkeypatch: pytest.MonkeyPatch, kernel: Callable[[int], torch.Tensor], accepted: str, refused: str
) -> None:
    environment = SimpleNamespace(emulated=False, device=torch.device("cpu"))
    monkeypatch.setattr(script, "sm_of", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = [script._tried(_of(kernel), check, environment) for check in (None, WIDE)]
    assert [row.outcome for row in rows] == [accepted, refused]


def test_a_kernel_for_other_devices_or_that_is_not_installed_is_left_out(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise ImportError("no such module")

    environment = SimpleNamespace(emulated=False, device=torch.device("cpu"))
    each = Refusals("run", "run", SimpleNamespace(run=_fake), missing, lambda *_: {"width": 4}, (WIDE,))
    for sm, why in ((90, "no such module"), (100, "the kernel needs SM90 to SM90")):
        monkeypatch.setattr(script, "sm_of", lambda device, sm=sm: sm)
        row = script._tried(each, WIDE, environment)
        assert (row.outcome, row.said) == ("not compared", why)


def test_arguments_that_a_kernel_cannot_make_are_its_disagreement(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some arguments come from another function of the kernel's module, which an older module may lack."""

    def made(device: torch.device, kernel: Any) -> dict[str, Any]:
        return {"width": kernel.width()}

    each = Refusals("run", "run", SimpleNamespace(run=_fake), lambda: SimpleNamespace(run=_fake), made, (WIDE,))
    monkeypatch.setattr(script, "sm_of", lambda device: 90)
    row = script._tried(each, WIDE, SimpleNamespace(emulated=False, device=torch.device("cpu")))
    assert row.outcome == "kernel refuses other"
    assert row.said.startswith("its arguments cannot be made: AttributeError")


def test_a_process_that_dies_costs_one_refusal(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that accepts what it cannot read may take its process along."""
    dying = tmp_path / "dying.py"
    dying.write_text(
        "import json, os, sys\n"
        "first = int(sys.argv[sys.argv.index('--first') + 1])\n"
        "for index in range(first, 4):\n"
        "    if index == 2:\n"
        "        os.abort()\n"
        "    print('printed by a kernel', end='')\n"
        f"    print({script._ROW!r} + json.dumps([index, 'run', str(index), 'agrees', '']), flush=True)\n"
    )
    monkeypatch.setattr(script, "__file__", str(dying))
    monkeypatch.setattr(script, "_all_tried", lambda: [(_of(_fake), None), (_of(_fake), WIDE)] * 2)
    found = [(row.tried, row.outcome) for row in script._rows("cpu")]
    assert found == [
        ("0", "agrees"), ("1", "agrees"), ("(accepted arguments)", "kernel refuses other"), ("3", "agrees"),
    ]  # fmt: skip


def test_every_fake_agrees_with_itself(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script._refusals("cpu") == 0
    assert "agrees" in capsys.readouterr().out.splitlines()[-1]
