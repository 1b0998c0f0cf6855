"""ci/side_by_side.py: the shapes of the other kit as cases of this one, the table, and what it says outside its
environment. Neither kit is run.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Bounds, Capabilities, ForwardMode, HeadShapes, KVPools, Precision
from attn_testkit_servers.bridges.sglang.versions import CURRENT, OLDER

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "ci"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("side_by_side")


@pytest.fixture
def shapes(script: ModuleType) -> ModuleType:
    return importlib.import_module("side.shapes")


@pytest.fixture
def results(script: ModuleType) -> ModuleType:
    return importlib.import_module("side.results")


def theirs(**changes: Any) -> dict[str, Any]:
    with_bug = {"DoubleCount": [7, 60]}
    found = {"cases": 60, "red": [], "seconds": 12.0, "cpu_seconds": 10.0, "checked": 84, "with_bug": with_bug}
    return {**found, **changes}


def ours(**with_bug: list[int]) -> dict[str, Any]:
    rate = {"who": "this kit", "cases": 8, "red": [], "seconds": 0.5, "cpu_seconds": 0.8, "checked": 96}
    return {"rates": [rate], "with_bug": {bug: {"this kit": found} for bug, found in with_bug.items()}}


def text(script: ModuleType, results: ModuleType, *sides: dict[str, Any]) -> str:
    made: str = results.as_text(script.compared("triton", "A, 2 cores", {"sglang": "0.5.23"}, *sides))
    return made


def test_a_rate_counts_cases_and_checked_forwards_a_second(script: ModuleType, results: ModuleType) -> None:
    lines = text(script, results, theirs(), ours()).splitlines()
    assert lines[0] == "triton on A, 2 cores; sglang 0.5.23"
    assert lines[3].split() == ["SGLang's", "kit", "60", "0", "12.0", "5.0", "10.0", "6.0", "84", "7.0", "8.4"]
    assert lines[4].split() == ["this", "kit", "8", "0", "0.5", "16.0", "0.8", "10.0", "96", "192.0", "120.0"]


def test_a_bug_that_nothing_saw_is_said_to_be_missed(script: ModuleType, results: ModuleType) -> None:
    said = text(script, results, theirs(with_bug={"PackedOffsets": [0, 60]}), ours(PackedOffsets=[8, 8]))
    assert said.splitlines()[-1].split("  ")[0] == "PackedOffsets"
    assert "missed: 0 of 60" in said
    assert "8 of 8" in said


def test_one_case_that_sees_a_bug_is_enough(results: ModuleType) -> None:
    assert [str(results.Count(*each)) for each in ((0, 1), (1, 1), (0, 0))] == [
        "missed: 0 of 1", "1 of 1", "none has it"
    ]  # fmt: skip


def test_a_bug_of_the_release_itself_is_looked_for_where_the_other_kit_ran_as_it_is(
    script: ModuleType, results: ModuleType
) -> None:
    made = script.compared("triton", "", {}, theirs(red=["a: wrong"]), ours(WindowsInDecode=[3, 4]))
    assert made.found["WindowsInDecode"][script.THEIRS] == results.Count(1, 60)


def test_what_fails_without_a_bug_is_named(script: ModuleType, results: ModuleType) -> None:
    said = text(script, results, theirs(red=["a: AssertionError"]), ours())
    assert "not passed without a bug, SGLang's kit: a: AssertionError" in said


def test_the_figures_are_written_as_json(script: ModuleType, results: ModuleType) -> None:
    made = script.compared("triton", "A", {"torch": "2"}, theirs(), ours(DoubleCount=[8, 8]))
    read = json.loads(json.dumps(results.as_json(made)))
    assert read["found"]["DoubleCount"]["this kit"] == {"red": 8, "cases": 8}
    assert read["rates"][1]["checked"] == 96


@pytest.mark.parametrize("backend", ["triton", "torch_native"])
def test_every_shape_becomes_a_case_or_is_known_to_have_none(shapes: ModuleType, backend: str) -> None:
    for shape in shapes.shapes_of(backend):
        case = shape.case
        assert (case is None) == (shape.kind in ("split-op", "draft-runner", "mtp-runner"))
        if case is not None:
            assert parse_case(case.id) == case
            assert (case.mode.value, case.prefixes) == (shape.mode, shape.prefixes)


def test_a_verify_of_three_nodes_is_a_chain_or_a_root_with_two_children(shapes: ModuleType) -> None:
    trees = {
        shape.topk: shape.case.tree.parents
        for shape in shapes.shapes_of("triton")
        if shape.mode == ForwardMode.TARGET_VERIFY.value
    }
    assert trees == {1: (0, 1), 2: (0, 0)}


def test_the_graph_of_an_extend_holds_all_new_tokens_and_no_request_more(shapes: ModuleType) -> None:
    case = shapes.Shape("a", "dense", "extend", (0, 8, 16), (15, 8, 2)).case
    assert (case.width, case.bucket) == (9, 3)
    assert shapes.Shape("a", "dense", "extend", (0, 8, 16), (15, 8, 1)).case.width == 8


def test_a_shape_that_two_cases_share_is_run_once_in_each_execution(shapes: ModuleType) -> None:
    verify = shapes.Shape("a", "verify", "target-verify", (4, 7), (3, 3))
    graph = shapes.Shape("b", "verify-graph", "target-verify", (4, 7), (3, 3))
    runs = shapes.case_runs([graph, graph, verify, verify])
    assert [execution for _, execution in runs] == ["eager", "graph", "eager"]
    assert [case.rpartition("-")[2] for case, _ in runs] == ["b4small", "b4small", "b2small"]


def test_every_kind_of_case_has_a_function_of_the_other_kit(shapes: ModuleType) -> None:
    functions = importlib.import_module("side.theirs").FUNCTIONS
    assert functions.keys() == shapes.CHECKED.keys()
    assert {shape.kind for shape in shapes.shapes_of("triton")} == shapes.CHECKED.keys()


def test_every_bug_is_one_of_those_that_are_put_into_the_class(results: ModuleType) -> None:
    source = (ROOT / "packages" / "servers" / "tests" / "bridges" / "sglang_bugs.py").read_text()
    for bug in (*results.BUGS, *results.SHIPPED):
        of_it = source.partition(f"class {bug.name}(Triton):")[2].partition("\nclass ")[0]
        assert f"sglang {bug.thread}" in of_it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bug", "none", "--bug", "FP8"), "--bug none excludes other bugs"),
        (("--backend", "torch_native", "--bug", "FP8"), "bugs are of TritonAttnBackend"),
        (("--bug", "Nothing"), "'Nothing' is not one of"),
        (("--backend", "fa3"), "'fa3' is not one of"),
    ],
)
def test_wrong_usage_is_reported_before_anything_runs(
    script: ModuleType, options: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(script.main, options)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("installed", "message"),
    [("", "SGLang is not installed here"), (OLDER, f"SGLang {OLDER} is installed"), ("0.6.0", "SGLang 0.6.0 is")],
)
def test_another_environment_is_reported_which_one_to_make(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, installed: str, message: str
) -> None:
    def version(name: str) -> str:
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(script.main, [])
    assert result.exit_code == 1
    assert message in result.output
    assert f"build/servers/sglang-{CURRENT}/bin/python ci/side_by_side.py" in result.output


def test_a_bug_is_looked_for_where_it_shows_and_in_what_the_class_declares(
    script: ModuleType, results: ModuleType
) -> None:
    of_ours = importlib.import_module("side.ours")
    decode, windowed, verify = (
        "decode-mha4-d16-fp16-p16-k7-shuffled-gauss-usualscale-b4small",
        "decode-mha4-d16-fp16-p16-k7-shuffled-gauss-w4one-usualscale-b4small",
        "target-verify-mha4-d16-fp16-p16-k4.7-chain3-shuffled-gauss-usualscale-b4small",
    )
    wanted = [(decode, "eager"), (decode, "graph"), (windowed, "graph"), (verify, "graph")]
    modes = {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}
    declared = Capabilities(
        eager=modes,
        graph=modes,
        heads=HeadShapes(families={"mha"}, head_dims={16}),
        kv_pool=KVPools(page_sizes={16}),
        precision=Precision(dtypes={"fp16"}),
        bounds=Bounds(max_q_rows=3, max_topk=1),
    )
    fresh = next(bug for bug in results.BUGS if bug.name == "FreshTensor")
    assert of_ours.supported(declared, wanted, fresh) == [(decode, "graph")]
    assert of_ours.supported(declared, wanted, None) == [(decode, "eager"), (decode, "graph"), (verify, "graph")]
