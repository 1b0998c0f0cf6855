"""Each batch size up to 48 and each remainder of a length by up to 128 is met in every mode of core."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.catalogue.seldom_cases import BATCHES
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Bounds, Capabilities, ForwardMode
from attn_testkit.steps.sizes_met import Met, met_by

CAPABILITIES = TorchNativeBackend.capabilities
FEW = Capabilities(eager=frozenset(ForwardMode), graph=frozenset(ForwardMode), bounds=Bounds(max_q_rows=8, max_topk=2))
CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("declared", [CAPABILITIES, FEW], ids=["much", "little"])
def test_core_meets_every_remainder_by_up_to_128_and_every_batch_size_up_to_48(
    declared: Capabilities, mode: ForwardMode
) -> None:
    met = met_by(generate(declared, mode, "core"))
    assert [number for number in range(1, 129) if number not in met.moduli(128)] == []
    assert [size for size in range(1, 49) if size not in met.sizes] == []


def test_few_cases_do_it() -> None:
    """A tenth of a second each on a CPU: 10 of some 240 cases of decode."""
    for mode in ForwardMode:
        own = [case for case in generate(CAPABILITIES, mode, "core") if (case.bs, case.bucket) in BATCHES]
        assert len(own) == len(BATCHES)
        assert max(max(case.prefixes) for case in own) == 128
        smoke = [case for case in generate(CAPABILITIES, mode, "smoke") if (case.bs, case.bucket) in BATCHES]
        assert smoke == []


def test_a_modulus_is_met_if_every_remainder_occurs() -> None:
    met = Met(frozenset({3, 4, 5, 12}), frozenset())
    assert met.moduli(5) == [1, 2, 3]
    assert Met(frozenset(range(100)), frozenset()).moduli(512) == list(range(1, 101))


def test_the_script_prints_the_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(CI))
    script = importlib.import_module("seldom")
    assert script.ranges([1, 2, 3, 66, 9, 10]) == "1-3, 9-10, 66"
    monkeypatch.setattr("sys.argv", ["seldom.py", "attn_testkit.examples:MinimalBackend", "--tier", "smoke"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(": every remainder of a length by 1-" in line and "; batches of 1-" in line for line in lines)
