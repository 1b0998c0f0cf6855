"""A hunt through a tiny backend: one mutant that is killed, one that nobody can see, one that no case reaches."""

from __future__ import annotations

import json
import textwrap
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit_corpus.mutants import Hunt, Settings, hunt
from attn_testkit_corpus.mutants.hunting import _stable
from attn_testkit_corpus.mutants.journal import CAPABILITIES, KILLED, OPEN, SURVIVED, TIMED_OUT, UNREACHED, Verdict
from attn_testkit_corpus.mutants.report import counts, exit_code, hunt_text, plain, score

BACKEND = """
from attn_testkit.examples.minimal import MinimalBackend

MOST_ROWS = 1
_DECODE = {"eager": {"decode"}, "graph": (), "heads": {"families": {"mha"}}, "kv_pool": {"page_sizes": {16}}}

class Tiny(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(bounds={"max_q_rows": MOST_ROWS, "max_topk": 0}, **_DECODE)

    def run(self, q, kv, plan):
        if plan.page_size > 4096:
            return self.never(q)
        return super().run(q, kv, plan) * 1.0

    def never(self, q):
        return q * 3.0

class Derived(Tiny):
    def run(self, q, kv, plan):
        return super().run(q, kv, plan) * 7.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Write a module: its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        # A name of its own for each test: what workers are forked from may remember that there was none.
        name = f"tiny_{zlib.crc32(request.node.name.encode())}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write


def evaluated(found: Hunt) -> dict[str, str]:
    """The mutated line -> what became of it."""
    return {m.becomes: found.verdicts[m.id].status for m in found.mutants if m.id in found.verdicts}


def settings(module: str, tmp_path: Path) -> Settings:
    return Settings(f"{module}:Tiny", tier="smoke", device="cpu", jobs=1, journal=tmp_path / "mutants.jsonl")


def test_a_wrong_number_is_killed_a_limit_survives_and_an_unreached_line_is_named(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    name = module(BACKEND)
    asked = settings(name, tmp_path)
    seen: list[str] = []
    found = hunt(asked, lambda what, done, total: seen.append(what))
    was = evaluated(found)
    assert was["return super().run(q, kv, plan) * 2.0"] == KILLED
    assert was["return super().run(q, kv, plan) * 0.5"] == KILLED
    assert was["return None"] in (KILLED, UNREACHED)
    assert was["if True:"] == KILLED
    assert was["if plan.page_size > 4097:"] == SURVIVED
    assert was["if plan.page_size >= 4096:"] == SURVIVED
    assert was["return q * 6.0"] == UNREACHED
    assert was["MOST_ROWS = 2"] == CAPABILITIES
    assert not any("capabilities" in line for line in was)
    assert not any(mutant.scope.startswith("Derived") for mutant in found.mutants)
    killed = next(v for m in found.mutants if "* 2.0" in m.becomes for v in [found.verdicts[m.id]])
    assert (killed.by, killed.runs) == ("matches-oracle", 1)
    # The file itself was never touched, and nothing was written beside it but the journal and byte code.
    assert (tmp_path / f"{name}.py").read_text() == textwrap.dedent(BACKEND)
    assert {path.name for path in tmp_path.iterdir()} <= {f"{name}.py", "mutants.jsonl", "__pycache__"}

    text = hunt_text(found)
    path = f"{name}.py"
    line = BACKEND.splitlines().index("        return q * 3.0") + 1
    assert f"{path}:{line} constant, in Tiny.never: no case-run that was tried executes this line" in text
    assert "  - return q * 3.0\n  + return q * 6.0" in text
    assert exit_code(found) == 1

    again = hunt(asked, lambda what, done, total: seen.append("again"))
    assert again.verdicts == found.verdicts
    assert "again" not in seen, "everything was in the journal"


def test_a_journal_goes_on_where_it_was_and_not_with_another_text(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module(BACKEND)
    asked = settings(name, tmp_path)
    few = hunt(replace(asked, sample=2))
    assert len(few.verdicts) == len(few.mutants) == 2
    new: list[str] = []
    more = hunt(replace(asked, sample=3), lambda what, done, total: new.append(what))
    assert [mutant.id for mutant in more.mutants[:2]] == [mutant.id for mutant in few.mutants]
    assert len(new) == 1
    module(BACKEND.replace("4096", "8192"))
    other: list[str] = []
    hunt(replace(asked, sample=1), lambda what, done, total: other.append(what))
    assert len(other) > 1, "the backend as it is was run again"


def test_a_backend_that_is_red_as_it_is_is_refused(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module(BACKEND.replace("* 1.0", "* 1.5"))
    with pytest.raises(UsageError, match=r"Tiny as it is fails: matches-oracle; .* leave the mode out with --mode"):
        hunt(settings(name, tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample", "3"], "--sample needs --mutants BACKEND"),
        (["--mutants", "m:A", "--fault", "x"], "--fault cannot be used with --mutants"),
        (["--mutants", "m:A", "--timeout", "240"], "--timeout cannot be used with --mutants"),
        (["--mutants", "m:A", "--tier", "full"], "take --tier smoke or core"),
        (["--mutants", "attn_testkit.nowhere:A"], "does not exist"),
        (["--mutants", "attn_testkit.examples:MinimalBackend", "--mutate", "no_such"], "'no_such' cannot be imported"),
        (["--mutants", "attn_testkit.examples:MinimalBackend", "--mutate", "_struct"], "not written in Python"),
        (
            ["--mutants", "attn_testkit.examples:MinimalBackend", "--mutate", "attn_testkit.contract"],
            "by the kit before",
        ),
    ],
)
def test_bad_input_is_four_with_a_line_that_says_what_to_do(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "--device", "cpu", *options]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_an_entry_takes_a_survivor_out_and_one_that_matches_nothing_is_refused(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    name = module(BACKEND)
    entry = (
        f'[[equivalent]]\npath = "{name}.py"\nwas = "if plan.page_size > 4096:"\n'
        'becomes = "{}"\nreason = "no page is so large"\n'
    )
    file = tmp_path / "equivalents.toml"
    file.write_text(entry.format("if plan.page_size >= 4096:"))
    found = hunt(replace(settings(name, tmp_path), equivalents=file, minutes=1e-9))
    assert list(found.reasons.values()) == ["no page is so large"]
    assert (found.verdicts, exit_code(found)) == ({}, 1), "no time: nothing was judged, and that is no green"
    assert "not evaluated: the time was over" in hunt_text(found)
    file.write_text(entry.format("if nothing:"))
    with pytest.raises(UsageError, match=r"entry 1 .* matches no mutant"):
        hunt(replace(settings(name, tmp_path), equivalents=file))


def made_up(**statuses: int) -> Hunt:
    """A hunt with so many of each status."""
    from attn_testkit_corpus.mutants.operators import mutants_of

    names = {
        "killed": KILLED,
        "timed_out": TIMED_OUT,
        "survived": SURVIVED,
        "unreached": UNREACHED,
        "declared": CAPABILITIES,
    }
    listed = [names[key] for key, count in statuses.items() for _ in range(count)]
    source = "".join(f"x{n} = a < b{n}\n" for n in range(len(listed))).encode()
    mutants = mutants_of(source, "m.py")
    verdicts = {m.id: Verdict(s, by="finite" if s == KILLED else "") for m, s in zip(mutants, listed, strict=True)}
    return Hunt(Settings("m:A"), {"m": source}, len(mutants), tuple(mutants), verdicts, {}, 5, "CPU", 1.0)


def test_the_score_counts_what_is_not_reached_as_survived_and_other_capabilities_not_at_all() -> None:
    found = made_up(killed=5, timed_out=1, survived=1, unreached=1, declared=3)
    assert score(found) == 6 / 8
    assert exit_code(found) == 1
    assert plain(found)["score"] == 6 / 8
    assert counts(found)[CAPABILITIES] == 3
    named = next(mutant.id for mutant in found.mutants if found.verdicts[mutant.id].status == UNREACHED)
    assert score(replace(found, reasons={named: "because"})) == 6 / 7
    assert exit_code(made_up(killed=1, declared=1)) == 0
    assert score(made_up(declared=1)) is None
    assert exit_code(made_up()) == 5


def test_a_digest_of_capabilities_is_the_same_in_every_process() -> None:
    assert _stable({"b": frozenset({"y", "x"}), "a": (1, None)}) == "{'a': [1, None], 'b': {'x', 'y'}}"
    assert json.loads(json.dumps(_stable(frozenset({2, 1})))) == "{1, 2}"


def test_a_few_case_runs_of_core_come_before_all_of_smoke(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_testkit_corpus.mutants.hunting._FIRST_TRY", 1)
    text = BACKEND.replace("plan.page_size > 4096", "len(q) > 1").replace("self.never(q)", "super().run(q, kv, plan)")
    asked = replace(settings(module(text), tmp_path), tier="core", most=2)
    found = hunt(asked)
    survivors = {m.becomes: found.verdicts[m.id] for m in found.mutants if found.verdicts[m.id].status == SURVIVED}
    smoke = hunt(replace(asked, tier="smoke", journal=None, sample=1)).runs
    assert found.runs == smoke + 2
    assert {verdict.runs for line, verdict in survivors.items() if line.startswith("if len(q)")} == {smoke + 2}
    assert OPEN not in {verdict.status for verdict in found.verdicts.values()}
    assert not hunt_text(found).count("so far")


def test_what_survived_smoke_alone_is_not_settled_where_core_was_asked_for(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    asked = replace(settings(module(BACKEND), tmp_path), sample=3)
    smoke = hunt(asked)
    cut_short = hunt(replace(asked, tier="core", minutes=1e-9))
    for name, verdict in smoke.verdicts.items():
        open_now = verdict.status in (SURVIVED, UNREACHED)
        assert cut_short.verdicts[name].status == (OPEN if open_now else verdict.status)
    assert OPEN in {verdict.status for verdict in cut_short.verdicts.values()}, "draw another sample"
