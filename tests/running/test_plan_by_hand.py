"""What is planned, in which order, and what is known without running: capabilities are given, nothing is imported."""

from __future__ import annotations

import datetime

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Capabilities, Requires
from attn_testkit.environment import Environment
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.names import KIT_ERROR
from attn_testkit.results.run_header import RunHeader
from attn_testkit.running.planning import plan as planning
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.plan import _unsatisfiable, plan_run
from attn_testkit.running.planning.request import (
    Item,
    Plan,
    Request,
    bare_result,
    final_code,
    kit_error,
    prepare,
)

ONE, TWO = "attn_testkit.backends.torch_native:TorchNativeBackend", "attn_testkit.examples:MinimalBackend"
CAPABILITIES = TorchNativeBackend.capabilities
DECODE = "decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod"
VERIFY = "target-verify-gqa2x2-d32-fp32-p4-k5.9-t0.0.1-shuffled-gauss-b2prod"


def planned(*backends: str, declared: Capabilities = CAPABILITIES, **fields: object) -> Plan:
    request = Request(backends or (ONE,), device="cpu", **fields)  # type: ignore[arg-type]
    return plan_run(request, lambda _: declared)


def test_no_grad_comes_first_then_cases_as_listed_each_eager_before_graph_and_one_backend_after_the_other() -> None:
    items = planned(ONE, TWO, ONE, modes=("decode", "target-verify")).items
    backends = [item.backend for item in items]
    assert backends == [ONE] * (len(items) // 2) + [TWO] * (len(items) // 2)
    assert [(i.mode, i.execution, i.case) for i in items if i.backend == ONE] == [
        (i.mode, i.execution, i.case) for i in items if i.backend == TWO
    ]
    own = [item for item in items if item.backend == ONE]
    modes = [parse_case(item.case).inference_mode for item in own]
    assert modes == sorted(modes)
    assert set(modes) == {False, True}
    for wanted in (False, True):
        part = [item for item in own if parse_case(item.case).inference_mode is wanted]
        cases = list(dict.fromkeys(item.case for item in part))
        order = [(item.case, item.execution) for item in part]
        assert order == [pair for case in cases for pair in ((case, "eager"), (case, "graph"))]
        listed = [item.case for item in planned(modes=("decode",), executions=("eager",)).items]
        assert [case for case in cases if case.startswith("decode")] == [case for case in listed if case in cases]


def test_what_is_not_declared_is_a_row_and_no_item() -> None:
    found = planned(declared=CAPABILITIES.with_changes(eager={"decode"}, graph={"target-verify"}))
    assert {(item.mode, item.execution) for item in found.items} == {("decode", "eager"), ("target-verify", "graph")}
    assert len(found.preset) == 10
    assert {(row.status, row.reason, row.case) for row in found.preset} == {(Status.UNSUPPORTED, "not declared", "")}
    assert found.header.planned == len(found.items)


def test_a_named_case_that_is_not_declared_is_a_row_and_no_item_beside_those_that_are() -> None:
    wide = DECODE.replace("d32", "d256")
    found = planned(cases=(DECODE, wide), declared=CAPABILITIES.with_changes(heads={"head_dims": {32}}))
    assert [(item.case, item.execution) for item in found.items] == [(DECODE, "eager"), (DECODE, "graph")]
    rows = [row for row in found.preset if row.case]
    assert [(row.case, row.mode, row.execution) for row in rows] == [
        (wide, "decode", "eager"),
        (wide, "decode", "graph"),
    ]
    assert {(row.status, row.reason) for row in rows} == {(Status.UNSUPPORTED, "not declared: head dim 256")}
    assert found.header.planned == 2


def test_a_pattern_that_matches_nothing_is_an_error_although_another_one_matches() -> None:
    assert planned(cases=("decode-*", DECODE)).items
    with pytest.raises(UsageError, match=r"no case matches decode-gqq\*, and other patterns match"):
        planned(cases=("decode-*", "decode-gqq*"))
    with pytest.raises(UsageError, match="no case matches target-verify-"):
        planned(cases=(DECODE, VERIFY), modes=("decode",))
    absent = CAPABILITIES.with_changes(mode_requires={"target-verify": Requires(packages=("no-such-package>=1",))})
    assert planned(cases=("decode-*", "target-verify-*"), declared=absent).items, "it matches, and cannot run here"


def test_a_mode_without_a_named_case_has_no_row_if_it_cannot_run_here() -> None:
    absent = CAPABILITIES.with_changes(mode_requires={"target-verify": Requires(packages=("no-such-package>=1",))})
    assert planned(cases=(DECODE,), declared=absent).preset == ()
    assert {row.mode for row in planned(cases=(DECODE, VERIFY), declared=absent).preset} == {"target-verify"}


def test_a_selection_is_counted_in_what_the_tier_plans_for_everything() -> None:
    whole = planned(ONE, TWO)
    assert not whole.header.selection
    for fields in ({"modes": ("decode",)}, {"executions": ("eager",)}, {"cases": ("decode-*", "extend-*")}):
        part = planned(ONE, TWO, counts_tier=True, **fields).header
        assert 0 < part.planned < whole.header.planned
        assert (part.selection.of, part.selection.beyond) == (whole.header.planned, 0)
        uncounted = planned(ONE, TWO, **fields).header.selection
        assert (bool(uncounted), uncounted.of) == (True, 0)
    assert not planned(cases=("*",), counts_tier=True).header.selection, "all of it"
    named = planned(cases=("decode-*", DECODE), counts_tier=True).header
    assert named.selection.beyond == 2, "the tier does not plan it, eager or graph"


def test_the_words_of_a_selection_name_few_values_and_count_the_rest() -> None:
    request = Request((ONE,), modes=("decode", "extend"), cases=tuple("abcde"))
    assert request.selected_by == ("mode decode, extend", "case 'a', 'b', 'c' and 2 more")
    assert Request((ONE,), cases=tuple("abc")).selected_by == ("case 'a', 'b', 'c'",)
    assert Request((ONE,), cases=tuple("abcde"), cases_from="ids.txt").selected_by == ("the cases of ids.txt",)
    assert Request((ONE,), tier="core", seed=3).selected_by == ()


def test_modes_of_graphs_alone_are_said_not_to_be_held_against_eager_runs() -> None:
    def said(**fields: object) -> list[str]:
        declared = CAPABILITIES.with_changes(eager={"extend"}, graph={"decode", "target-verify", "extend"})
        (phrases,) = planned(declared=declared, tier="smoke", **fields).header.not_covered.values()
        return [phrase for phrase in phrases if "replays" in phrase]

    assert said() == ["replays against eager runs (decode, target-verify: declared only in graphs)"]
    assert said(modes=("decode",)) == ["replays against eager runs (decode: declared only in graphs)"]
    assert said(modes=("extend",)) == said(executions=("eager",)) == []


def test_modes_whose_rows_no_extend_is_compared_with_are_not_covered() -> None:
    def said(eager: set[str], graph: set[str], promised: bool = True, **fields: object) -> list[str]:
        declared = CAPABILITIES.with_changes(eager=eager, graph=graph, promises={"mode_invariant": promised})
        (phrases,) = planned(declared=declared, tier="smoke", **fields).header.not_covered.values()
        return [phrase for phrase in phrases if "mode_invariant" in phrase]

    both = "mode_invariant: equal bits of rows of extend and of decode, target-verify"
    assert said({"extend", "decode", "target-verify"}, set()) == []
    assert said({"extend"}, {"decode", "target-verify"}) == [], "they are replayed"
    assert said({"decode", "target-verify"}, {"extend", "decode"}) == [both], "extend has to be eager"
    assert said({"extend", "decode", "target-verify"}, set(), modes=("decode",)) == [both]
    one = "mode_invariant: equal bits of rows of extend and of decode"
    assert said({"extend", "decode"}, set(), executions=("graph",)) == [one]
    assert said({"decode"}, set(), promised=False) == []
    assert said({"decode"}, set()) == [one]


def test_what_cannot_run_here_is_a_row_with_the_reason() -> None:
    declared = CAPABILITIES.with_changes(requires=Requires(packages=("no-such-package>=1",)))
    found = planned(declared=declared, modes=("decode",))
    assert found.items == ()
    assert [row.status for row in found.preset] == [Status.NOT_RUN_HERE] * 2
    assert "no-such-package" in found.preset[0].reason
    assert found.header.planned == 0


def test_an_undeclared_graph_is_tried_once_a_mode_with_the_first_eager_case_and_never_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared = CAPABILITIES.with_changes(graph={"target-verify"})
    found = planned(declared=declared, modes=("decode", "target-verify"), executions=("eager",))
    listed = planned(declared=declared, modes=("decode",), executions=("eager",), tier="smoke")
    probes = [item for item in found.items if item.probe]
    assert [item.mode for item in probes] == ["decode"]
    first = planning.generate(declared, planning.ForwardMode.DECODE, "smoke", 0)[0]
    assert probes[0].case == first.id
    assert sum(item.probe for item in listed.items) == 1
    assert not any(item.probe for item in planned(modes=("decode",)).items)
    monkeypatch.setattr(planning, "resolve", lambda _: Environment(emulated=True))
    monkeypatch.setattr(Environment, "name", "a device")
    monkeypatch.setattr(planning, "missing_here", lambda *_: "")
    assert any(item.probe for item in planned(declared=declared, modes=("decode",)).items)
    monkeypatch.setattr(planning, "resolve", lambda _: Environment(emulated=False))
    assert not any(item.probe for item in planned(declared=declared, modes=("decode",)).items)


NONE = [
    ({"heads": {"families": ()}}, "families is empty"),
    ({"precision": {"dtypes": ()}}, "dtypes is empty"),
    ({"kv_pool": {"kv_dtypes": ()}}, "kv_dtypes is empty"),
    ({"kv_pool": {"page_sizes": ()}}, "page_sizes is empty"),
    ({"heads": {"head_dims": ()}}, "head_dims is empty, or holds only widths above 512"),
    ({"heads": {"head_dims": (513,)}}, "head_dims is empty, or holds only widths above 512"),
    ({"heads": {"families": ("mla",), "mla_rope_dims": ()}}, "mla_rope_dims is empty"),
    ({"heads": {"families": ("gqa",), "gqa_ratios": ()}}, "gqa_ratios is empty, and mha is not declared"),
    ({"heads": {"families": ("gqa", "mqa"), "gqa_ratios": (1,)}}, "gqa and mqa need a number above 1 in gqa_ratios"),
    ({"bounds": {"max_context_len": 3}}, "max_context_len 3 has no room for the shortest case"),
    ({"bounds": {"max_context_len": 3}, "heads": {"head_dims": (512,)}}, "max_context_len 3 has no room"),
    (
        {"bounds": {"max_context_len": 3}, "heads": {"mla_rope_dims": (), "families": ("mha",)}},
        "max_context_len 3 has no room",
    ),
    (
        {"bounds": {"max_context_len": 3}, "heads": {"gqa_ratios": (), "families": ("mha",)}},
        "max_context_len 3 has no room",
    ),
    (
        {"bounds": {"max_context_len": 3}, "heads": {"gqa_ratios": (1,), "families": ("mha", "gqa")}},
        "max_context_len 3 has no room",
    ),
    (
        {"bounds": {"max_context_len": 3}, "heads": {"gqa_ratios": (1, 2), "families": ("gqa",)}},
        "max_context_len 3 has no room",
    ),
]


@pytest.mark.parametrize(("changes", "hint"), NONE, ids=[str(changes) for changes, _ in NONE])
def test_capabilities_that_no_case_can_meet_fail_with_the_capability_that_is_in_the_way(
    changes: dict[str, object], hint: str
) -> None:
    declared = CAPABILITIES.with_changes(**changes)
    row = _unsatisfiable(ONE, declared, planning.ForwardMode.DECODE, planning.Execution.EAGER)
    assert (row.status, row.case, row.checks) == (Status.FAILED, "decode-(no case)", ("capabilities-honest",))
    assert row.findings[0].hint.startswith(hint)
    found = planned(declared=declared, modes=("decode",), executions=("eager",))
    assert (found.items, found.preset) == ((), (row,))
    assert found.header.planned == 1, "it is part of the denominator"


def test_cases_are_named_by_globs_of_the_tier_and_by_exact_ids_of_any() -> None:
    every = [item.case for item in planned(modes=("decode",), executions=("eager",)).items]
    glob = every[0][:-6] + "*"
    assert {i.case for i in planned(cases=(glob,), executions=("eager",)).items} == {
        case for case in every if case.startswith(glob[:-1])
    }
    assert [i.case for i in planned(cases=(DECODE,), executions=("eager",)).items] == [DECODE]
    both = planned(cases=(DECODE, VERIFY, glob), executions=("eager",)).items
    assert {DECODE, VERIFY, every[0]} <= {item.case for item in both}
    assert [i.mode for i in both if i.case == VERIFY] == ["target-verify"]
    assert planned(cases=(DECODE,), executions=("eager",)).preset == ()


@pytest.mark.parametrize("wildcard", ["decode-*", "decode-?qa*", "[d]ecode-*"])
def test_every_wildcard_is_one(wildcard: str) -> None:
    assert planned(cases=(wildcard,)).items


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tier": "smok"}, "unknown tier 'smok'; did you mean 'smoke'?"),
        ({"modes": ("decod",)}, "unknown mode 'decod'; did you mean 'decode'?"),
        ({"executions": ("graphs",)}, "unknown execution 'graphs'; did you mean 'graph'?"),
        ({"cases": ("decode-x*", "y*")}, "no case matches decode-x*, y*; correct it or remove it"),
        ({"cases": ("decode-x",)}, "decode-x"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        planned(**fields)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_no_backend_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="no backend was named"):
        plan_run(Request((), device="cpu"), lambda _: CAPABILITIES)


def test_a_pattern_that_matches_elsewhere_is_no_error_where_another_backend_has_a_row() -> None:
    found = planned(cases=("nothing-*",), declared=CAPABILITIES.with_changes(graph=()))
    assert found.items == ()
    assert found.preset


def test_words_are_taken_once_in_the_order_given() -> None:
    found = planned(
        modes=("target-verify", "decode", "target-verify"), declared=CAPABILITIES.with_changes(eager=(), graph=())
    )
    assert [(row.mode, row.execution) for row in found.preset] == [
        (mode, execution) for mode in ("target-verify", "decode") for execution in ("eager", "graph")
    ]


def test_the_header_says_what_was_asked_for_and_where_it_ran() -> None:
    header = planned(ONE, seed=3, tier="smoke", command="attn-testkit run", modes=("decode",)).header
    assert (header.command, header.tier, header.seed, header.device) == ("attn-testkit run", "smoke", 3, "emulated")
    assert header.device_name == "CPU (emulated CUDA)"
    assert header.started.endswith("+00:00")
    assert "torch" in header.versions
    assert list(header.backends) == [ONE]
    assert header.limits
    assert header.kit


# What front ends do with a plan.


class Judge:
    def __init__(self, *plans: Plan | UsageError) -> None:
        self.plans, self.asked = list(plans), list[Request]()

    def plan(self, request: Request) -> Plan:
        self.asked.append(request)
        answer = self.plans.pop(0)
        if isinstance(answer, UsageError):
            raise answer
        return answer


HEADER = RunHeader("1", "", "", "smoke", 0, "emulated", "CPU", {}, {"a:B": "1"}, 2)
ITEMS = (Item("a:B", "decode", "eager", "decode-one"), Item("a:B", "decode", "graph", "decode-two"))
PRESET = CaseResult("a:B", "draft-extend", "eager", "", Status.UNSUPPORTED)
PLAN = Plan(HEADER, ITEMS, (PRESET,), (Candidate("a:B"),), "cpu")
ENTRY = """[[known]]
cases = "{cases}"
kind = "quarantine"
issue = "https://example.org/1"
until = {until}
"""


def prepared(tmp_path, cases: str, *more: Plan | UsageError):
    (tmp_path / "known.toml").write_text(ENTRY.format(cases=cases, until=datetime.datetime.now(datetime.UTC).date()))
    judge = Judge(PLAN, *more)
    return prepare(judge, Request(("a:B",), known_failures=tmp_path / "known.toml")), judge  # type: ignore[arg-type]


def test_a_quarantined_case_is_accounted_for_and_not_launched(tmp_path) -> None:
    found, _ = prepared(tmp_path, "*-two")
    assert found.items == ITEMS[:1]
    assert found.preset[0] == PRESET
    assert [(r.case, r.status, r.reason) for r in found.preset[1:]] == [
        ("decode-two", Status.QUARANTINED, "https://example.org/1")
    ]
    (problem,) = found.problems()
    assert problem.startswith(
        "known failure 1 (cases = '*-two', https://example.org/1) quarantines a:B graph decode-two,"
    )
    assert found.plan is PLAN


def test_an_entry_beyond_this_run_is_looked_for_in_everything_that_the_backends_declare(tmp_path) -> None:
    wide = Plan(HEADER, (Item("a:B", "decode", "eager", "other-case"),), ())
    found, judge = prepared(tmp_path, "other-*", wide)
    assert found.problems() == []
    asked = judge.asked[-1]
    assert (asked.tier, asked.modes, asked.executions, asked.cases) == ("full", (), (), ("other-*",))
    for answer in (Plan(HEADER, ITEMS, ()), UsageError("no case matches")):
        found, _ = prepared(tmp_path, "other-*", answer)
        assert found.problems() == ["known failure 1 (cases = 'other-*', https://example.org/1) matches no case"]


def test_a_plan_that_was_made_is_not_made_again() -> None:
    judge = Judge()
    found = prepare(judge, Request(("a:B",)), plan=PLAN)  # type: ignore[arg-type]
    assert (found.items, found.preset, found.problems()) == (ITEMS, (PRESET,), [])
    with pytest.raises(UsageError, match="no backend is named"):
        prepare(judge, Request(()), plan=PLAN)  # type: ignore[arg-type]


def test_a_backend_that_is_named_twice_is_one_candidate() -> None:
    assert Request(("a:B", Candidate("a:B"), "c:D")).candidates == (Candidate("a:B"), Candidate("c:D"))
    assert Candidate("a:B", here=int) == Candidate("a:B"), "a class at hand makes no other candidate"
    assert Candidate("a:B", fingerprint="x") != Candidate("a:B")


def test_a_result_that_has_none_of_its_own_says_where_and_why() -> None:
    for item, graph in zip(ITEMS, ("", "emulated"), strict=True):
        found = bare_result(item, Status.TIMED_OUT, "hung", "emulated")
        assert (found.backend, found.mode, found.execution, found.case) == ("a:B", "decode", item.execution, item.case)
        assert (found.status, found.reason, found.device, found.graph) == (Status.TIMED_OUT, "hung", "emulated", graph)
    failed = kit_error(ITEMS[0], "oops")
    assert (failed.status, failed.reason) == (Status.CRASHED, f"{KIT_ERROR}oops")


def test_the_exit_code_never_hides_a_problem_and_three_is_our_own_fault() -> None:
    passed = [bare_result(item, Status.PASSED, "") for item in ITEMS]
    bad = CaseResult("a:B", "decode", "eager", "x", Status.FAILED, (Finding("finite", "nan"),))
    ours = kit_error(ITEMS[0], "oops")
    nothing = RunHeader("1", "", "", "smoke", 0, "emulated", "CPU", {}, {}, 0)
    assert final_code(HEADER, passed) == 0
    assert final_code(HEADER, passed, ["expired"]) == 1
    assert final_code(HEADER, passed[:1]) == 1
    assert final_code(HEADER, [*passed, bad], ["expired"]) == 1
    assert final_code(HEADER, [*passed, ours]) == 3
    assert final_code(HEADER, [*passed, ours], interrupted=True) == 2
    assert final_code(nothing, []) == 5
    assert final_code(nothing, [], ["expired"]) == 1
    assert final_code(HEADER, passed, ["expired"], interrupted=True) == 2


def test_what_is_too_large_for_a_cpu_is_not_run_there_unless_it_is_named() -> None:
    plan = planned(modes=("extend",), tier="full", executions=("eager",))
    (row,) = plan.preset
    assert row.status is Status.NOT_RUN_HERE
    assert "needs a GPU" in row.reason
    assert row.case not in {item.case for item in plan.items}
    assert plan.header.planned == len(plan.items)
    named = planned(modes=("extend",), executions=("eager",), cases=(row.case,))
    assert [item.case for item in named.items] == [row.case]
    assert not named.preset
    by_glob = planned(
        modes=("extend",), tier="full", executions=("eager",), cases=(f"{row.case[:20]}*{row.case[-9:]}",)
    )
    assert [each.case for each in by_glob.preset] == [row.case]


def test_spans_run_in_graphs_only_where_that_is_declared() -> None:
    case = "extend-gqa2x2-d32-fp32-p4-k19.6-n9a9.4-shuffled-gauss-spans-b2prod"
    both = planned(cases=(case,))
    assert [item.execution for item in both.items] == ["eager", "graph"]
    found = planned(cases=(case,), declared=CAPABILITIES.with_changes(spans={"in_graphs": False}))
    assert [item.execution for item in found.items] == ["eager"]
    rows = [row for row in found.preset if row.case]
    assert [(row.execution, row.case, row.reason) for row in rows] == [
        ("graph", case, "not declared: bidirectional spans in graphs")
    ]
    tier = planned(tier="core", modes=("extend",), declared=CAPABILITIES.with_changes(spans={"in_graphs": False}))
    assert {item.execution for item in tier.items if "-spans" in item.case} == {"eager"}
