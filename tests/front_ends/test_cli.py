"""The command line: right answers, exit codes, streams, and one line for everything that is spelled wrong."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jsonschema
import pytest
from alive import alive
from fake_runner import known

from attn_testkit.cli import all_commands, main
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import read_report, schema
from attn_testkit.results.case_result import Status
from attn_testkit.results.names import MODES

HERE = Path(__file__).parent


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    """Call the command line in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capfd.readouterr()
        return code, out, err

    return _call


def test_a_conformant_run_is_zero_and_says_what_it_is_worth(call):
    code, out, err = call("run", "--backend", "fake:ok,ok")
    assert code == 0, err
    assert "decode           graph           2    0.40      1.0\n" in out, "the backend and the emulation are said once"
    assert out.splitlines()[-1] == (
        "CONFORMANT (smoke): 8 of 8 planned case-runs passed; emulated device, graph: no proof about hardware"
    )
    assert "attn-testkit 0.1.0: fake:ok,ok 1.0" in err


def test_a_failure_is_reported_in_full_with_its_command(call):
    code, out, _ = call("run", "--backend", "fake:wrong", "--mode", "decode", "--execution", "graph")
    assert code == 1
    assert out.startswith("decode-wrong-k0: request 3 differs from the oracle, 56x over the limit\n  check    matches-")
    assert "attn-testkit repro --backend fake:wrong --execution graph --device cpu decode-wrong-k0" in out
    assert out.splitlines()[-1] == "NOT CONFORMANT: 1 failed of 1 selected case-runs (4 planned)"


def test_cases_come_from_a_file_beside_those_of_the_command(call, tmp_path):
    (tmp_path / "ids.txt").write_text("# of a record\n\ndecode-ok-k0\n*verify-wrong*\n")
    code, out, _ = call("run", "--backend", "fake:ok,wrong", "--cases-from", "ids.txt", "--execution", "eager")
    assert code == 1
    assert "target-verify-wrong-k1: request 3" in out
    assert out.splitlines()[-1] == "NOT CONFORMANT: 1 failed of 2 selected case-runs (8 planned)"
    both = ("--cases-from", "ids.txt", "--case", "decode-wrong-k1", "--execution", "eager")
    _, out, _ = call("run", "--backend", "fake:ok,wrong", *both)
    assert out.splitlines()[-1] == "NOT CONFORMANT: 2 failed of 3 selected case-runs (8 planned)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read ids.txt: No such file or directory"),
        ("# none\n", "ids.txt names no case; expected one case id"),
    ],
)
def test_a_file_of_cases_that_names_none_is_wrong_usage_and_no_whole_tier(call, tmp_path, text, message):
    if text is not None:
        (tmp_path / "ids.txt").write_text(text)
    code, _, err = call("run", "--backend", "fake:ok", "--cases-from", "ids.txt")
    assert code == 4
    assert message in err


def test_the_printed_reproduction_reproduces(call):
    _, out, _ = call("run", "--backend", "fake:ok,wrong", "--mode", "target-verify", "--execution", "graph")
    (line,) = [line for line in out.splitlines() if line.startswith("  repro ")]
    code, again, _ = call(*line.split()[2:])
    assert code == 1
    assert again.rstrip("\n") in out


def test_the_same_failure_again_and_again_does_not_flood(call):
    """300 failures of one cause are one text, and must not bury the one of another cause."""
    _, out, _ = call("run", "--backend", "fake:" + ",".join(["wrong"] * 9), "--mode", "decode", "--in-process")
    assert out.count("  where    ") == 1
    assert out.count("56x over the limit") == 1
    (line,) = (line for line in out.splitlines() if line.startswith("did not pass"))
    assert line == "did not pass: 18 case-runs, 1 cause (-v prints all, --diagnose all looks for the cause of each)"
    assert [line for line in out.splitlines() if line.startswith("start here: attn-testkit repro")]
    _, out, _ = call("run", "--backend", "fake:" + ",".join(["wrong"] * 9), "--mode", "decode", "--in-process", "-v")
    assert out.count("  where    ") == 18


def test_crashes_cost_one_case_run_each(call):
    code, out, _ = call("run", "--backend", "fake:ok,segfault,ok", "--mode", "decode", "--json", "out.json")
    assert code == 1
    assert "killed by SIGSEGV" in out
    assert [r.status for r in read_report("out.json").results if r.case].count(Status.PASSED) == 4


def test_the_record_is_valid_and_says_how_it_ended(call):
    call("run", "--backend", "fake:ok,wrong,inf", "--json", "out.json", "--html", "out.html")
    data = json.loads(Path("out.json").read_text())
    jsonschema.validate(data, schema())
    assert data["finished"] is True
    assert data["exit_code"] == 1
    assert data["counts"] == {"passed": 4, "failed": 8}
    assert "NOT CONFORMANT: 8 failed" in Path("out.html").read_text()


@pytest.mark.parametrize(("words", "verdict"), [("ok,ok", 3), ("ok,wrong", 1)])
def test_a_full_disk_costs_the_record_and_the_green_and_not_the_verdict(call, words, verdict):
    code, out, err = call("run", "--backend", f"fake:{words}", "--json", "/dev/full")
    assert code == verdict
    assert "of 8 planned case-runs" in out.splitlines()[-1]
    assert (
        "attn-testkit: the results file is incomplete: /dev/full lacks what came after 0 results: No space left" in err
    )
    assert "Traceback" not in err


def test_a_page_that_cannot_be_written_in_the_end_costs_no_verdict(call, monkeypatch):
    run = importlib.import_module("attn_testkit.cli.run")
    write, written = run.write_text, []

    def once(path, text):
        if written:
            raise UsageError(f"cannot write {path}: No space left on device")
        written.append(write(path, text))

    monkeypatch.setattr(run, "write_text", once)
    code, out, err = call("run", "--backend", "fake:ok", "--html", "out.html", "--json", "out.json")
    assert code == 0
    assert out.splitlines()[-1].startswith("CONFORMANT")
    assert err.splitlines()[-1] == "attn-testkit: cannot write out.html: No space left on device"
    assert read_report("out.json").finished


def test_a_run_that_stops_early_is_not_green(call):
    code, out, _ = call("run", "--backend", "fake:ok,wrong,ok", "--mode", "decode", "-x")
    assert code == 1
    assert out.splitlines()[-1] == "NOT CONFORMANT: 1 failed of 6 selected case-runs (12 planned); 4 did not run"


def test_in_process_says_that_it_is_no_gate(call):
    code, _, err = call("run", "--backend", "fake:ok", "--in-process")
    assert code == 0
    assert "for debugging only" in err
    assert "for debugging only" not in call("run", "--backend", "fake:ok")[2]
    assert "for debugging only" in call("repro", "--backend", "fake:ok", "--in-process", "decode-ok-k0")[2]


def test_case_runs_that_were_not_run_are_not_green(call):
    code, out, _ = call("run", "--backend", "fake:lost,notrun,notrun", "--mode", "decode")
    assert code == 1
    assert "not run here" in out
    assert out.splitlines()[-1] == "NOT CONFORMANT: 2 crashed of 6 selected case-runs (12 planned); 4 did not run"


def test_a_judge_that_dies_costs_one_case_run_and_is_three(call):
    args = ("--mode", "decode", "--execution", "eager", "--json", "out.json")
    code, out, err = call("run", "--backend", "fake:ok,dies,ok", *args)
    assert code == 3
    assert "the judge is out of memory" in err
    assert "repeated, since a process of the kit ended in the middle of them: 1: the judge's process ended with" in out
    assert out.splitlines()[-1].startswith("INCOMPLETE: the kit itself failed in 1 of 3 ")
    report = read_report("out.json")
    assert report.finished
    results = [(r.of_the_kit, bool(r.repeated)) for r in report.results if r.is_case_run]
    assert results == [(False, False), (True, True), (False, False)]


def test_judges_that_die_again_and_again_are_three_and_leave_a_record(call):
    words = ",".join(["ok", *["dies"] * 5])
    args = ("--mode", "decode", "--execution", "eager", "--json", "out.json")
    code, _, err = call("run", "--backend", f"fake:{words}", *args)
    assert code == 3
    assert "the kit itself failed: the judge's process ended with exit code 9, as 9 before it did" in err
    report = read_report("out.json")
    assert not report.finished
    assert [r.status for r in report.results if r.case] == [Status.PASSED, *[Status.CRASHED] * 5]


@pytest.mark.parametrize("how", [(), ("--in-process",)])
def test_the_kits_own_failure_is_three(call, how):
    code, out, _ = call("run", "--backend", "fake:ok,bug", *how)
    assert code == 3
    assert "the kit itself failed: ZeroDivisionError" in out
    assert out.splitlines()[-1].startswith("INCOMPLETE: the kit itself failed")


def test_nothing_declared_is_five(call):
    code, out, _ = call("run", "--backend", "fake:")
    assert code == 5
    assert out.splitlines()[-1].startswith("NOTHING RAN")


def test_known_failures_pass_and_outdated_entries_do_not(call):
    Path("known.toml").write_text(known("*-wrong-*") + known("*-exit-*", "crashed"))
    args = ("run", "--mode", "decode", "--known-failures", "known.toml", "--backend")
    code, out, _ = call(*args, "fake:ok,wrong,exit")
    assert code == 0
    assert out.splitlines()[-1].startswith("PARTIAL: 6 of 12 planned case-runs ran: 2 passed, 4 known failures;")
    code, out, _ = call(*args, "fake:ok,exit")
    assert code == 1
    assert "problem: known failure 1 (cases = '*-wrong-*', https://example.org/issues/12) matches no case" in out
    Path("known.toml").write_text(known("*-ok-*", "finite"))
    code, out, _ = call(*args, "fake:ok")
    assert code == 1
    assert "unexpectedly passed" in out


def test_known_failures_alone_and_errors_of_the_kit_are_no_green(call):
    Path("known.toml").write_text(known("*-wrong-*") + known("*-bug-*", "crashed"))
    args = ("run", "--mode", "decode", "--known-failures", "known.toml", "--backend")
    code, out, _ = call(*args, "fake:wrong,bug")
    assert code == 3
    assert out.splitlines()[-1].startswith("INCOMPLETE: the kit itself failed in 2 of 4 selected case-runs (8 planned)")
    Path("known.toml").write_text(known("*-wrong-*"))
    code, out, _ = call(*args, "fake:wrong")
    assert code == 1
    assert out.splitlines()[-1] == (
        "NOT CONFORMANT: 0 of 2 selected case-runs (4 planned) passed, 2 known failures; nothing is known to work"
    )


def test_an_entry_for_cases_outside_of_this_run_is_no_problem(call):
    """One file serves the quick run of a pull request and the full run of the night."""
    Path("known.toml").write_text(known("target-verify-full-*", kind="quarantine"))
    args = ("run", "--mode", "decode", "--known-failures", "known.toml")
    assert call(*args, "--backend", "fake:ok")[0] == 0
    Path("known.toml").write_text(known("*-gone-*", kind="quarantine"))
    assert call(*args, "--backend", "fake:ok")[0] == 1


def test_data_goes_to_stdout_and_nothing_else_does(call):
    code, out, _ = call("list", "--cases", "--backend", "fake:ok,wrong", "--mode", "decode")
    assert code == 0
    assert out.splitlines() == ["decode-ok-k0", "decode-wrong-k1"]
    _, out, _ = call("list", "--cases", "--json", "--backend", "fake:ok", "--mode", "decode", "--execution", "eager")
    assert json.loads(out) == [{"backend": "fake:ok", "mode": "decode", "execution": "eager", "case": "decode-ok-k0"}]
    _, out, _ = call("run", "--backend", "fake:noisy", "--mode", "decode")
    assert "noise" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rnu"], "unknown command 'rnu'; did you mean 'run'?"),
        (["merge", "a.json"], "unknown command 'merge'; did you mean 'results merge'?"),
        (["results", "mrge", "a.json"], "unknown command 'mrge'; did you mean 'merge'?"),
        (["known", "red.json"], "`attn-testkit results known red.json` writes one"),
        (["run"], "no backend is named; give --backend module:Class, or a name from `attn-testkit list`"),
        (["run", "--backend", "nofake"], "unknown backend 'nofake'; did you mean 'fake:ok'?"),
        (["run", "-b", "fake:ok", "--mode", "target_verify"], "'target_verify'; did you mean 'target-verify'?"),
        (["run", "-b", "fake:ok", "--mode", "v3"], "unknown mode 'v3' (decode, target-verify, draft-ext"),
        (["run", "-b", "fake:ok", "--execution", "grpah"], "unknown execution 'grpah'; did you mean 'graph'?"),
        (["run", "-b", "fake:ok", "--tier", "Full"], "unknown tier 'Full'; did you mean 'full'?"),
        (["run", "-b", "fake:ok", "--device", "gpu"], "unknown device 'gpu'; did you mean 'cuda'? (auto, cuda"),
        (["run", "-b", "fake:ok", "--timeout", "nan"], "timeout is nan; expected seconds above 0, and at most 86400"),
        (["run", "-b", "fake:ok", "--timeout", "-1"], "timeout is -1; expected seconds above 0"),
        (["run", "-b", "fake:ok", "--timeout", "0"], "timeout is 0; expected seconds above 0"),
        (["run", "-b", "fake:ok", "--timeout", "inf"], "timeout is inf; expected seconds above 0"),
        (["run", "-b", "fake:ok", "--timeout", "5m"], "timeout is '5m'; expected seconds, such as 60"),
        (["audit", "--timeout", "nan"], "timeout is nan; expected seconds above 0"),
        (["audit", "--seed", "-1"], "seed is -1; expected a whole number from 0 up"),
        (["run", "-b", "fake:ok", "--seed", "-1"], "seed is -1; expected a whole number from 0 up"),
        (["run", "-b", "fake:ok", "--seed", "x"], "seed is 'x'; expected a whole number from 0 up"),
        (["run", "-b", "fake:ok", "--case", "nope*"], "no case matches 'nope*'"),
        (["run", "-b", "fake:ok", "--jbos", "2"], "No such option '--jbos'. (Did you mean one of: '--jobs'"),
        (["run", "-b", "fake:ok", "--jobs", "0"], "jobs is 0; expected a whole number from 1 up"),
        (["run", "-b", "fake:ok", "--jobs", "2", "--in-process"], "--in-process runs in one process"),
        (["run", "-b", "fake:ok", "-x", "--max-failures", "2"], "-x is --max-failures 1"),
        (["run", "-b", "fake:ok", "--json", "/proc/nope/x.json"], "cannot write /proc/nope/x.json"),
        (["run", "-b", "fake:ok", "--html", "/proc/nope/x.html"], "cannot write /proc/nope/x.html"),
        (["run", "-b", "fake:ok", "--json", "reprots/x.json"], "there is no directory reprots; create it, or fix"),
        (["run", "-b", "fake:ok", "--html", "reprots/x.html"], "cannot write reprots/x.html: there is no directory"),
        (["run", "-b", "fake:ok", "--known-failures", "none.toml"], "none.toml; if no failure is known, leave it out"),
        (["repro", "-b", "fake:ok"], "Missing argument 'CASE'. Usage: attn-testkit repro [OPTIONS] CASE"),
        (["run", "fake:ok"], "extra argument (fake:ok); a backend is named with --backend fake:ok"),
        (["demo", "x"], "'x' is not 'sparse'"),
        (["demo", "--jsn"], "No such option '--jsn'. `attn-testkit demo --help` lists the options."),
        (["demo", "--html", "reprots/x.html"], "cannot write reprots/x.html: there is no directory"),
        (["audit", "--html", "reprots/x.html"], "cannot write reprots/x.html: there is no directory"),
        (["audit", "--json", "."], "cannot write .: Is a directory"),
        (["repro", "-b", "fake:ok", "decode-okk-k0"], "no case matches 'decode-okk-k0'"),
        (["results", "report", "none.json", "--markdown"], "cannot read none.json"),
        (["results", "report", "none.json"], "cannot read none.json"),
        (["results", "compare", "a.json", "b.json"], "cannot read a.json"),
        (["known", "none.toml"], "none.toml; if no failure is known, leave it out"),
        (["list", "--backend", "fake:ok"], "did you mean list --cases --backend SPEC?"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_line_and_four(call, argv, message):
    code, out, err = call(*argv)
    assert code == 4
    assert out == ""
    assert message in err
    # The run's header may have been said before a file turned out not to be writable.
    assert len([line for line in err.splitlines() if line.startswith("attn-testkit: ")]) == 1
    assert err.splitlines()[-1].startswith("attn-testkit: ")
    assert "Traceback" not in err


def test_explain_gives_a_check_its_cause_and_the_right_spelling(call):
    code, out, _ = call("explain", "reads-own-kv")
    assert code == 0
    assert "check" in out
    assert "cause" in out
    code, _, err = call("explain", "read-own-kv")
    assert code == 4
    assert "did you mean 'reads-own-kv'?" in err
    code, out, _ = call("explain")
    assert code == 0
    assert "matches-oracle" in out


def test_explain_gives_a_word_of_ids_failures_and_tables_its_meaning(call):
    code, out, _ = call("explain", "spread")
    assert code == 0
    assert out.splitlines()[0] == "spread"
    assert "which requests, how many values and rows" in out
    for spelled in (["ran on"], ["ran", "on"], ["RAN_ON"]):
        assert call("explain", *spelled)[1].splitlines()[0] == "ran on"
    _, out, _ = call("explain", "way")
    assert out.splitlines()[0] == "server variant", "the standard word, with the kit's present one below"
    assert "also     way" in out
    assert call("explain", "b7nan")[1] == call("explain", "b4nan")[1]
    _, out, _ = call("explain", "log-sum-exp")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["rule", "check", "cause", "source", "reading", "word"]


def test_explain_suggests_near_words_and_lists_all(call):
    code, _, err = call("explain", "spred")
    assert code == 4
    assert "no check, word or case id 'spred'; did you mean 'spread'?" in err
    code, _, err = call("explain", "xyzzy")
    assert code == 4
    assert "attn-testkit explain --list" in err
    code, out, _ = call("explain", "--list")
    assert code == 0
    assert "  server variant, way, ways, dialect" in out.splitlines()
    code, _, err = call("explain", "--list", "spread")
    assert code == 4
    assert "leave out" in err


def test_explain_reads_a_misspelt_case_id_as_one(call):
    for case_id in ("decode-gqa4x2-d64", "decod-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod"):
        code, _, err = call("explain", case_id)
        assert code == 4
        assert "no check, word" not in err
        assert "case id" in err


def test_explain_needs_torch_only_for_words_of_case_ids():
    code = (
        "import sys; from attn_testkit.cli import main\n"
        "code = main(['explain', 'spread'])\n"
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_explain_says_what_a_case_id_stands_for(call):
    from attn_testkit.cases.case import Case, Heads
    from attn_testkit.cases.rows import Decode

    case = Case(Decode(), Heads("gqa", 8, 2), 64, "bf16", 16, (1, 33), bucket=2)
    code, out, _ = call("explain", case.id)
    assert code == 0
    fields, steps, choices = [part.splitlines()[1:] for part in out.split("\n\n")]
    assert any(line.split()[:2] == ["step", "8"] for line in steps)
    assert any(line.split()[:2] == ["grad-mode", "torch.no_grad"] for line in choices) is not case.inference_mode
    assert any("shuffled: The pages of all requests are in random places" in line for line in fields)
    # A phrase that is only a word is followed by a colon and its text in the glossary.
    phrases = [line.split(None, 1) for line in fields]
    assert [[label, phrase if label == "heads" else phrase.split(":")[0]] for label, phrase in phrases] == [
        ["mode", "decode"],
        ["heads", "gqa: 8 query heads, 2 KV heads"],
        ["head_dim", "64"],
        ["dtype", "bf16"],
        ["page_size", "16"],
        ["prefixes", "1, 33 keys before this step"],
        ["layout", "shuffled"],
        ["data", "gauss"],
        ["bucket", "2 requests in the graph"],
    ]


def test_explain_leaves_out_what_a_case_does_not_have(call):
    code, out, _ = call(
        "explain", "target-verify-mla4-d64r16-fp16-p8-k9.40-t0.0.1-shuffled-gauss-w0-cap1.5-sink-b3nan-s7"
    )
    assert code == 0
    fields = dict(line.split(None, 1) for line in out.split("\n\n")[0].splitlines()[1:])
    assert fields["heads"] == "mla: 4 query heads, 1 KV head"
    assert fields["tree"] == "4 nodes, parents 0, 0, 1"
    assert fields["window"] == "0 keys back, in one layer"
    assert fields["bucket"] == "3 requests in the graph, 1 of them padding (nan)"
    assert fields["seed"] == "7"
    assert "new" not in fields
    assert "None" not in out
    code, out, _ = call("explain", "draft-extend-mha2-d64-fp16-p8-k9.40-n4a1.3-shuffled-gauss-b2prod")
    assert code == 0
    assert "accepted tokens of each request: 1, 3 of 4 rows" in " ".join(out.split())


def test_compare_fails_when_something_got_worse(call):
    call("run", "--backend", "fake:ok,ok", "--mode", "decode", "--json", "old.json")
    call("run", "--backend", "fake:ok,ok", "--mode", "decode", "--execution", "eager", "--json", "new.json")
    code, out, _ = call("results", "compare", "old.json", "new.json")
    assert code == 1
    assert out.splitlines()[-1].startswith("WORSE: 0 newly failing, 2 vanished")
    assert call("results", "compare", "new.json", "old.json")[0] == 0
    code, _, err = call("results", "compare", "old.json", "old.json")
    assert (code, err.splitlines()[-1].partition(";")[0]) == (4, "attn-testkit: old.json and old.json are the same run")
    assert json.loads(call("results", "compare", "old.json", "new.json", "--json")[1])["exit_code"] == 1


def test_known_lints_a_file(call):
    Path("known.toml").write_text(known("*", "matchs-oracle"))
    code, _, err = call("known", "known.toml")
    assert code == 4
    assert "no check 'matchs-oracle'; did you mean 'matches-oracle'?" in err
    Path("known.toml").write_text(Path("known.toml").read_text().replace("matchs", "matches"))
    code, out, err = call("known", "known.toml")
    assert code == 0
    assert re.search(r"[1-9]\d* days left", out)
    assert "entries: 1, problems: 0" in err
    Path("known.toml").write_text(re.sub(r"until = \S+", "until = 2001-01-01", Path("known.toml").read_text()))
    code, out, _ = call("known", "known.toml")
    assert code == 1
    assert "expired on 2001-01-01" in out
    assert re.search(r"expired [1-9]\d+ days ago", out)


@pytest.mark.parametrize("verb", [*all_commands(), "results"])
def test_every_verb_has_one_screen_of_help_with_examples(call, verb):
    code, out, _ = call(*verb.split(), "--help")
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert f"attn-testkit {verb}" in out.partition("Examples:")[2]


def test_the_modes_are_spelled_as_the_contract_spells_them():
    from attn_testkit.catalogue.tiers import TIERS as catalogue_tiers
    from attn_testkit.contract import Execution, ForwardMode
    from attn_testkit.running.planning.request import EXECUTIONS, TIERS

    assert tuple(mode.value for mode in ForwardMode) == MODES
    assert tuple(execution.value for execution in Execution) == EXECUTIONS
    assert tuple(catalogue_tiers) == TIERS


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"
from attn_testkit.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_two_leaves_a_record_and_no_process(tmp_path, number):
    (tmp_path / "cli.py").write_text(SCRIPT.format(here=str(HERE)))
    command = [sys.executable, "cli.py", "run", "-b", "fake:pid,hang", "--mode", "decode", "--json", "out.json"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup a child would inherit "ignored"
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    record = tmp_path / "out.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (record.exists() and "pid " in record.read_text()):
        time.sleep(0.05)
    child = int(read_report(record).results[-1].hints[0].split()[1])
    assert read_report(record).finished is False
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in out + err
    assert out.splitlines()[-1] == "INCOMPLETE: interrupted after 1 of 4 selected case-runs (8 planned)"
    report = read_report(record)
    assert report.interrupted
    assert not report.finished
    assert not alive(child)


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    (tmp_path / "cli.py").write_text(SCRIPT.format(here=str(HERE)))
    words = ",".join(["ok"] * 5000)
    shell = f"{sys.executable} cli.py list --cases -b fake:{words} | head -n 1"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "decode-ok-k0\n"
    assert done.stderr == ""


@pytest.mark.cold
def test_an_author_in_an_empty_directory_sees_his_backend_evaluated(tmp_path):
    """The whole way once, with the real judge: a module of one's own, named by its spec, and its bug found."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from attn_testkit.backends.torch_native import TorchNativeBackend

            class TooSmall(TorchNativeBackend):
                def forward(self, q, k, v, layer, batch, save_kv_cache=True):
                    return super().forward(q, k, v, layer, batch, save_kv_cache) * 0.75
            """
        )
    )
    args = ["--mode", "decode", "--execution", "eager", "--device", "cpu", "-x", "--json", "out.json"]
    command = [str(Path(sys.executable).with_name("attn-testkit")), "run", "--backend", "mine:TooSmall", *args]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "differs from the oracle" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  repro ")]
    assert read_report(tmp_path / "out.json").header.backends == {"mine:TooSmall": "(mine.py)"}
    command = [*line.split()[1:]]
    command[0] = str(Path(sys.executable).with_name("attn-testkit"))
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 1
    assert done.stdout.splitlines()[0] in again.stdout
