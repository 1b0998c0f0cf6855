"""What a change may reach, by a map of the functions that case-runs called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_testkit.cases.case import parse_case
from attn_testkit.running.planning.code_units import Unit, units_of
from attn_testkit.running.planning.most_valuable import reaching
from attn_testkit.running.planning.reach import MappedRun, ReachMap, Since, touched
from attn_testkit.running.planning.request import Item

ADAPTER = """
from kernels import BLOCK, copy_kernel, scale
class Backend:
    def forward(self, q):
        return self.small(q) if len(q) < 4 else self.large(q)
    def small(self, q):
        return scale(q)
    def large(self, q):
        return self.launch(q)
    def launch(self, q):
        copy_kernel[1](q, BLOCK)
    def dead(self):
        return scale(0)
    def _private(self):
        return 1
def made():
    return 1
TABLE = made()
"""
KERNELS = """
import triton
BLOCK = 64
@triton.jit
def copy_kernel(q, block):
    inner(q)
@triton.jit
def inner(q):
    q = q + 1
def scale(q):
    return q
"""
FILES = {"adapter.py": ADAPTER, "kernels.py": KERNELS}
FORWARD, SMALL, LARGE, LAUNCH, SCALE = (
    ("adapter.py", "Backend.forward"), ("adapter.py", "Backend.small"), ("adapter.py", "Backend.large"),
    ("adapter.py", "Backend.launch"), ("kernels.py", "scale"),
)  # fmt: skip
RUNS = {"small": {FORWARD, SMALL, SCALE}, "large": {FORWARD, LARGE, LAUNCH}}


def units(**changes: tuple[str, str]) -> dict[str, dict[str, Unit]]:
    """Units of the files, with a text replaced in some of them."""
    found = {}
    for file, text in FILES.items():
        before, after = changes.get(file.removesuffix(".py"), ("", ""))
        assert before in text
        found[file] = units_of(text.replace(before, after, 1) if before else text)
    return found


def map_of(made_of: dict[str, dict[str, Unit]] | None = None) -> ReachMap:
    """A map on a GPU, where no kernel is seen."""
    digests = {file: {name: unit.digest for name, unit in each.items()} for file, each in (made_of or units()).items()}
    runs = {("eager", name): MappedRun(frozenset(called), ("finite",)) for name, called in RUNS.items()}
    return ReachMap("/somewhere", digests, frozenset({("adapter.py", "made")}), runs)


def reached(
    now: dict[str, dict[str, Unit]], before: dict[str, dict[str, Unit]] | None = None, **of: object
) -> set[str]:
    """Case-runs that a change reaches."""
    reach = replace(map_of(), **of) if of else map_of()
    return {case for _, case in touched(reach, before or units(), now).runs(reach)}


@pytest.mark.parametrize(
    ("changes", "cases"),
    [
        ({}, set()),
        ({"adapter": ("return scale(q)", "return scale(2 * q)")}, {"small"}),
        ({"kernels": ("return q", "return q + q")}, {"small"}),
        ({"adapter": ("return scale(0)", "return 7")}, set()),
        ({"adapter": ("return 1\ndef made", "return 2\ndef made")}, set()),
        ({"adapter": ("len(q) < 4", "len(q) < 5")}, {"small", "large"}),
        # No case-run calls a kernel as Python: the functions that name it do.
        ({"kernels": ("inner(q)\n", "inner(-q)\n")}, {"large"}),
        ({"kernels": ("q = q + 1", "q = q + 2")}, {"large"}),
        ({"kernels": ("BLOCK = 64", "BLOCK = 32")}, {"large"}),
        # These run at the import.
        ({"adapter": ("def made():\n    return 1", "def made():\n    return 2")}, {"small", "large"}),
        ({"adapter": ("class Backend:", "class Backend(dict):")}, {"small", "large"}),
        # It may override a hook, or no longer do so.
        ({"adapter": ("def dead(self)", "def alive(self)")}, {"small", "large"}),
        ({"adapter": ("def _private(self)", "def _other(self)")}, set()),
        ({"adapter": ("def _private(self)", "def small(self)")}, {"small"}),
    ],
)
def test_a_change_reaches_the_case_runs_that_call_what_it_changes(changes, cases) -> None:
    assert reached(units(**changes)) == cases


def test_a_name_at_the_top_of_a_module_does_not_concern_a_module_that_does_not_import_it() -> None:
    beside = units_of("import triton\nclass Other:\n    size = triton.cdiv(1, 2)\n")
    before = {**units(), "beside.py": beside}
    changed = {**before, "kernels.py": units(kernels=("import triton", "import triton_fork as triton"))["kernels.py"]}
    found = touched(map_of(), before, changed)
    assert not found.everything
    assert {case for _, case in found.runs(map_of())} == {"large"}


def test_a_changed_name_that_nothing_mentions_reaches_everything() -> None:
    files = {"kernels.py": units_of(KERNELS + "import patches_torch\n")}
    found = touched(map_of(), {"kernels.py": units()["kernels.py"]}, {**units(), **files})
    assert found.everything == "nothing that was read mentions patches_torch of kernels.py"
    assert len(found.runs(map_of())) == 2


def test_functions_that_changed_since_the_map_was_made_may_call_whatever_they_mention() -> None:
    """Between the map and the revision ``small`` began to call the kernel, and since then the kernel has changed."""
    before = units(adapter=("return scale(q)", "return self.large(q)"))
    assert reached({**before, "kernels.py": units(kernels=("q + 1", "q + 2"))["kernels.py"]}, before) == {
        "small",
        "large",
    }


def entries(*cases: str) -> list[tuple[Item, object]]:
    found = [parse_case(case) for case in cases]
    return [
        (Item("a:B", case.mode.value, execution, case.id), case) for case in found for execution in ("eager", "graph")
    ]


PLAIN, LONGER, CAPPED = (
    "decode-mha2-d64-bf16-p16-k5-contiguous-gauss-b1prod", "decode-mha2-d64-bf16-p16-k9-contiguous-gauss-b1prod",
    "decode-mha2-d64-bf16-p16-k5-contiguous-gauss-cap1.5-b1prod",
)  # fmt: skip


def test_selected_are_those_that_reach_a_change_and_one_for_each_feature_check_mode_and_execution() -> None:
    rows = entries(PLAIN, LONGER, CAPPED)
    keys = [(item.backend, item.execution, item.case) for item, _ in rows]
    checks = {key: ("finite", *(("rare",) if key[1:] == ("graph", rows[2][0].case) else ())) for key in keys}
    since = Since(frozenset({keys[1]}), checks, most=10)
    chosen = {(item.execution, item.case) for item in reaching(rows, since)}
    longer, capped = rows[2][0].case, rows[4][0].case
    # The graph that reaches it; eager; the cap; the graph in which a check is evaluated that no other has.
    assert ("graph", rows[0][0].case) in chosen
    assert ("graph", longer) in chosen
    assert {execution for execution, case in chosen if case == capped} == {"eager"}
    assert len(chosen) == 3


def test_a_case_run_that_the_map_lacks_may_reach_the_change() -> None:
    rows = entries(PLAIN, LONGER)
    assert reaching(rows, Since(frozenset(), {}, most=10)) == tuple(item for item, _ in rows)


def test_the_limit_keeps_the_most_valuable_of_those_that_reach_a_change() -> None:
    rows = entries(PLAIN, LONGER, CAPPED)
    chosen = reaching(rows, Since(frozenset(), {}, most=2))
    assert len(chosen) == 2
    assert {item.execution for item in chosen} == {"eager", "graph"}
    assert rows[4][0].case in {item.case for item in chosen}
