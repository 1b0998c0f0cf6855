"""Shards of a run, and the one verdict that merge makes of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import jsonschema
import pytest
from fake_runner import known, plan_run, run_item

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import Report, read_report, schema
from attn_testkit.reports.shards import Shard, merge_reports, parse_shard, requested_shard
from attn_testkit.reports.verdict import conclude
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.running.planning.request import Item
from attn_testkit.running.planning.shards import durations_of, shard_of, shards_of


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capfd.readouterr()
        return code, out, err

    return _call


WORDS = "fake:" + ",".join(["ok"] * 10)


def shard_report(words: str, number: int, count: int, **changes) -> Report:
    plan = shard_of(plan_run(backends=[words]), Shard(number, count))
    header = replace(plan.header, **changes)
    rows = (*plan.preset, *(run_item(item) for item in plan.items))
    return Report(header, rows, finished=True, exit_code=conclude(header, rows).code)


def all_shards(words: str = WORDS, count: int = 3) -> list[tuple[str, Report]]:
    return [(f"{number}.json", shard_report(words, number, count)) for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "shard is '3'; expected K/N, such as 3/8"),
        ("0/8", "expected K from 1 to N (the first shard is 1)"),
        ("9/8", "shard is '9/8'; expected K from 1 to N, and N up to 10000"),
        ("1/0", "expected K from 1 to N"),
        ("1/10001", "N up to 10000"),
        ("-1/8", "expected K/N"),
    ],
)
def test_a_shard_that_there_is_not_is_wrong_usage(text, message):
    with pytest.raises(UsageError) as error:
        parse_shard(text)
    assert message in str(error.value)
    assert parse_shard("8/8") == Shard(8, 8)


def test_the_ci_names_the_shard_and_an_option_goes_before_it():
    ci = {"SHARD_INDEX": "2", "SHARD_COUNT": "8"}
    assert requested_shard(None, {}) is None
    assert requested_shard(None, ci) == Shard(2, 8)
    assert requested_shard("1/4", ci) == Shard(1, 4)
    for name in ci:
        with pytest.raises(UsageError, match=f"{name} is set and SHARD_"):
            requested_shard(None, {name: ci[name]})


def test_every_case_run_is_in_one_shard_and_eager_and_graph_of_a_case_in_the_same():
    items = plan_run(backends=["fake:" + ",".join(["ok"] * 40)]).items
    shards = shards_of(items, 8, seed=0)
    assert Counter(item for shard in shards for item in shard) == Counter(items)
    assert all(1 <= len(shard) <= len(items) // 3 for shard in shards)
    place = {(item.case, item.execution): n for n, shard in enumerate(shards) for item in shard}
    assert all(place[item.case, "eager"] == place[item.case, "graph"] for item in items)
    order = {item: n for n, item in enumerate(items)}
    assert all([*map(order.get, shard)] == sorted(map(order.get, shard)) for shard in shards), "in the plan's order"


def test_a_case_that_is_added_moves_no_other():
    before = plan_run(backends=["fake:ok,ok,ok,ok"]).items
    new = [Item("fake:ok,ok,ok,ok", "decode", "eager", f"decode-ok-k{number}") for number in range(4, 9)]
    was, now = shards_of(before, 4, seed=0), shards_of([*new, *before], 4, seed=0)
    assert [set(shard) for shard in was] == [set(shard) - set(new) for shard in now]


def test_recorded_times_balance_shards_whatever_the_seed():
    seconds = [8, 4, 4, 2, 2, 2, 1, 1]
    rows = tuple(
        CaseResult("b", "decode", "eager", f"decode-{n}-s7", Status.PASSED, seconds={"eager": float(each)})
        for n, each in enumerate(seconds)
    )
    header = replace(plan_run(backends=["fake:ok"]).header, seed=7)
    durations = durations_of([Report(header, rows, finished=True)])
    items = [Item("b", "decode", "eager", f"decode-{n}-s9") for n in range(len(seconds))]
    shards = shards_of(items, 3, 9, durations)
    loads = [sum(seconds[int(item.case.split("-")[1])] for item in shard) for shard in shards]
    assert sorted(loads) == [8, 8, 8]
    unknown = Item("b", "decode", "eager", "decode-new-s9")
    assert Counter(each for shard in shards_of([*items, unknown], 3, 9, durations) for each in shard)[unknown] == 1
    with pytest.raises(UsageError, match="no results file with a case-run that ran"):
        durations_of([Report(header, (), finished=True)])


def test_a_shard_says_so_and_no_shard_is_conformant(call):
    code, out, err = call("run", "--backend", WORDS, "--shard", "2/3")
    assert code == 0, err
    last = out.splitlines()[-1]
    assert last.startswith("SHARD 2/3: ")
    assert "of 40 planned case-runs ran, all passed" in last
    assert last.endswith("; `attn-testkit results merge` of all 3 shards has the verdict")


def test_shards_of_one_run_merge_into_what_the_run_itself_says(call, tmp_path):
    words = "fake:ok,ok,wrong,ok,ok"
    whole_code, whole, _ = call("run", "--backend", words, "--json", "whole.json")
    for number in (1, 2, 3):
        call("run", "--backend", words, "--shard", f"{number}/3", "--json", f"{number}.json")
    code, out, err = call("results", "merge", "1.json", "3.json", "2.json", "--json", "all.json")
    assert code == whole_code == 1, err
    assert out.splitlines()[-1] == whole.splitlines()[-1] == "NOT CONFORMANT: 4 failed of 20 planned case-runs"
    merged, ran = read_report("all.json"), read_report("whole.json")
    jsonschema.validate(json.loads((tmp_path / "all.json").read_text()), schema())
    assert sorted(map(repr, merged.results)) == sorted(map(repr, ran.results))
    assert replace(merged.header, command="", started="") == replace(ran.header, command="", started="")
    assert (merged.finished, merged.exit_code) == (True, 1)


def test_all_shards_together_can_be_conformant(call):
    for number in (1, 2):
        call("run", "--backend", WORDS, "--shard", f"{number}/2", "--json", f"{number}.json")
    code, out, _ = call("results", "merge", "1.json", "2.json")
    assert code == 0
    assert out.splitlines()[-1].startswith("CONFORMANT (smoke): 40 of 40 planned case-runs passed")


def test_a_shard_to_which_no_case_run_falls_passes_and_merges(call):
    codes = [
        call("run", "--backend", "fake:ok", "--mode", "decode", "--shard", f"{n}/5", "--json", f"{n}.json")[0]
        for n in range(1, 6)
    ]
    assert codes == [0] * 5
    code, out, _ = call("results", "merge", *(f"{n}.json" for n in range(1, 6)))
    assert code == 0
    assert out.splitlines()[-1].startswith("PARTIAL: 2 of 4 planned case-runs ran, all passed"), "--mode selected"


def test_known_failures_of_other_shards_match_and_a_shard_of_known_failures_is_no_verdict(call, tmp_path):
    (tmp_path / "known.toml").write_text(known("*-wrong-*"))
    codes = []
    for number in range(1, 9):
        argv = ("run", "--backend", "fake:wrong,ok", "--known-failures", "known.toml", "--shard", f"{number}/8")
        code, out, _ = call(*argv, "--json", f"{number}.json")
        codes.append(code)
        assert "matches no case" not in out
    assert codes == [0] * 8
    code, out, _ = call("results", "merge", *(f"{n}.json" for n in range(1, 9)))
    assert (code, out.splitlines()[-1].split(":")[0]) == (0, "CONFORMANT (smoke)")


def test_a_run_in_which_nothing_passes_is_red_when_it_is_merged(call, tmp_path):
    (tmp_path / "known.toml").write_text(known("*-wrong-*"))
    for number in (1, 2):
        argv = ("run", "--backend", "fake:wrong", "--known-failures", "known.toml", "--shard", f"{number}/2")
        assert call(*argv, "--json", f"{number}.json")[0] == 0
    assert call("results", "merge", "1.json", "2.json")[0] == 1


def test_a_missing_shard_is_refused_and_named_and_with_missing_the_verdict_is_incomplete(call):
    for number in (1, 3):
        call("run", "--backend", WORDS, "--shard", f"{number}/3", "--json", f"{number}.json")
    code, out, err = call("results", "merge", "1.json", "3.json", "--json", "all.json")
    assert (code, out) == (4, "")
    assert err == ("attn-testkit: shard 2/3 is missing: there are 1, 3 of 3; --missing merges what there is\n")
    assert "shards 2/3, 3/3 are missing: there are 1 of 3" in call("results", "merge", "1.json")[2]
    code, out, _ = call("results", "merge", "1.json", "3.json", "--missing", "--json", "all.json")
    assert code == 1
    assert out.splitlines()[-1].startswith("INCOMPLETE: ")
    assert not read_report("all.json").finished


def test_a_shard_that_was_cut_off_makes_the_merged_run_incomplete():
    (first, one), (second, two) = all_shards(count=2)
    cut = replace(two, results=two.results[:-1], finished=False, exit_code=None)
    merged = merge_reports([(first, one), (second, cut)])
    assert (merged.finished, merged.exit_code) == (False, 1)
    assert conclude(merged.header, merged.results).word == "INCOMPLETE"
    assert merge_reports([(first, one), (second, two)]).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kit": "0.2.0"}, "kit is '0.2.0' there and '0.1.0' in 1.json"),
        ({"tier": "core"}, "tier is 'core' there and 'smoke' in 1.json"),
        ({"seed": 5}, "seed is 5 there and 0 in 1.json"),
        ({"device_name": "NVIDIA H200 sm90"}, "device name is 'NVIDIA H200 sm90' there and 'CPU (emulated CUDA)' in"),
        ({"versions": {"python": "3.11", "torch": "2.14"}}, "versions, torch is '2.14' there and '2.13.0' in 1.json"),
        ({"backends": {WORDS: "1.1"}}, f"backends, {WORDS} is '1.1' there and '1.0' in 1.json"),
        ({"plan": "0123"}, "plan is '0123' there and '"),
        ({"planned_in_all": 41}, "planned in all is 41 there and 40 in 1.json"),
    ],
)
def test_what_does_not_belong_together_is_refused_with_both_values(changes, message):
    files = all_shards()
    files[1] = "2.json", shard_report(WORDS, 2, 3, **changes)
    with pytest.raises(UsageError) as error:
        merge_reports(files)
    assert str(error.value).startswith("2.json is from a different run than 1.json: ")
    assert message in str(error.value)


def test_another_selection_and_another_count_of_shards_are_refused():
    files = all_shards()
    selected = files[1][1].header.selection
    other = replace(selected, by=("mode decode", *selected.by))
    with pytest.raises(UsageError, match=r"selection is .*mode decode"):
        merge_reports([files[0], ("2.json", shard_report(WORDS, 2, 3, selection=other)), files[2]])
    with pytest.raises(UsageError, match=r"1\.json is a shard of 3 and 2\.json is a shard of 2"):
        merge_reports([files[0], ("2.json", shard_report(WORDS, 2, 2))])


def test_a_shard_that_is_there_twice_is_refused_and_so_is_a_run_that_is_no_shard():
    files = all_shards()
    with pytest.raises(UsageError, match=r"shard 1/3 is in 1\.json and in again\.json"):
        merge_reports([*files, ("again.json", files[0][1])])
    whole = Report(plan_run(backends=[WORDS]).header, (), finished=True)
    with pytest.raises(UsageError, match=r"whole\.json is not a shard of a run: its command was 'attn-testkit run'"):
        merge_reports([*files, ("whole.json", whole)])


def test_shards_that_were_cut_by_other_times_are_refused():
    """Each would look whole, and a case-run be in none of them."""
    files = all_shards(count=2)
    lacking = replace(files[1][1], header=replace(files[1][1].header, planned=files[1][1].header.planned - 2))
    with pytest.raises(UsageError, match="the 2 shards have 38 case-runs and the plan has 40: give all"):
        merge_reports([files[0], ("2.json", lacking)])
    doubled = replace(files[1][1], results=(*files[1][1].results, files[0][1].results[-1]))
    with pytest.raises(UsageError, match=r"is in 1\.json and in 2\.json: give all shards the same"):
        merge_reports([files[0], ("2.json", doubled)])


def test_times_without_a_shard_are_wrong_usage(call):
    call("run", "--backend", WORDS, "--json", "whole.json")
    code, _, err = call("run", "--backend", WORDS, "--durations-from", "whole.json")
    assert (code, err) == (4, "attn-testkit: --durations-from balances shards; give it with --shard, or with --ray\n")
    code, out, _ = call("run", "--backend", WORDS, "--durations-from", "whole.json", "--shard", "1/4")
    assert (code, out.splitlines()[-1][:33]) == (0, "SHARD 1/4: 10 of 40 planned case-"), "all take equally long"


def test_the_rest_of_another_shard_is_refused(call):
    call("run", "--backend", WORDS, "--shard", "1/2", "--json", "1.json")
    code, _, err = call("run", "--backend", WORDS, "--shard", "2/2", "--rest-of", "1.json")
    assert code == 4
    assert "1.json is from another run: it is shard 1/2, here it is 2/2" in err
    code, _, err = call("run", "--backend", WORDS, "--rest-of", "1.json")
    assert "it is shard 1/2, here it is of everything" in err


def test_report_and_compare_take_the_shards_of_a_run(call):
    for name, selected in (("old", ()), ("new", ("--execution", "eager"))):
        words = ("-b", "fake:ok,wrong,ok", "--mode", "decode", *selected)
        for number in (1, 2):
            call("run", *words, "--shard", f"{number}/2", "--json", f"{name}-{number}.json")
        call("results", "merge", f"{name}-1.json", f"{name}-2.json", "--json", f"{name}.json")
    code, out, _ = call("results", "report", "new-1.json", "new-2.json", "--markdown", "--html", "out.html")
    assert code == 0
    assert out == call("results", "report", "new.json", "--markdown")[1]
    assert "NOT CONFORMANT" in out
    assert "SHARD 1/2" in call("results", "report", "old-1.json", "--markdown")[1], "one shard has a page too"
    code, out, err = call("results", "compare", "old.json", "new-1.json", "new-2.json")
    assert code == 1, err
    assert out == call("results", "compare", "old.json", "new.json")[1]


def test_a_page_is_of_one_run_and_a_summary_of_each(call):
    for tier in ("smoke", "full"):
        call("run", "-b", "fake:ok", "--tier", tier, "--json", f"{tier}.json")
    code, _, err = call("results", "report", "smoke.json", "full.json", "--html", "out.html")
    assert (code, err) == (
        4,
        "attn-testkit: the files are from 2 runs, but a page shows one: give the files of one run\n",
    )
    _, out, _ = call("results", "report", "smoke.json", "full.json", "--markdown")
    assert out.count("CONFORMANT") == 2


def test_shards_of_other_code_are_not_merged():
    def of(number: int, code: str) -> tuple[str, Report]:
        return f"{number}.json", shard_report(WORDS, number, 2, sources={WORDS: {"file": f"/{number}", "code": code}})

    assert merge_reports([of(1, "a" * 64), of(2, "a" * 64)]).exit_code == 0, "the same code in another place"
    with pytest.raises(
        UsageError, match=r"2\.json is from other code: .* was /2 \(b{12}\) there, in 1\.json /1 \(a{12}\)"
    ):
        merge_reports([of(1, "a" * 64), of(2, "b" * 64)])
