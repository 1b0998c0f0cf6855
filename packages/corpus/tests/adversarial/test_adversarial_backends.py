"""Backends that try to be found right though they are wrong: none is, and without the cheat the same code passes."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import attn_testkit_corpus.faults.adversarial as adversarial_backends
from attn_testkit_corpus.audit import Audit, Settings
from attn_testkit_corpus.audit.adversarial import FrontEnd, run_adversarial
from attn_testkit_corpus.audit.show import audit_text
from attn_testkit_corpus.audit.tasks import tasks_for
from attn_testkit_corpus.audit.verdicts import AdversarialVerdict, Task
from attn_testkit_corpus.faults.adversarial import Adversarial, all_adversarial
from attn_testkit_corpus.faults.adversarial.catalogue import adversarial
from attn_testkit_corpus.faults.adversarial.parent import AdversarialBackend

ENTRIES = all_adversarial()


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    made = FrontEnd(Settings(device="cpu", timeout_s=60.0))
    yield made
    made.close()


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.slug for entry in ENTRIES])
def test_no_adversarial_backend_gets_a_green_and_without_the_cheat_it_does(
    entry: Adversarial, front_end: FrontEnd
) -> None:
    verdict = run_adversarial(Task("adversarial", entry.slug), front_end)
    assert verdict.exit_code, "a false green"
    if entry.slug != "ends-the-judge":
        assert "the kit itself failed" not in verdict.ending, "blamed on the kit"
    assert ENDINGS.get(entry.slug, "") in verdict.ending
    assert (verdict.honest_exit_code, verdict.honest_ending) == (0, "passed")


ENDINGS = {
    "answers-the-next-question-with-the-last-answer": "the process spoke for itself: it sent an answer to another",
    "asks-the-oracle": "failed: completes",
    "claims-of-two-faces": "its capabilities are not plain values",
    "claims-other-things-once-described": "failed: no-host-lengths",
    "drops-steps-of-its-drive": "failed: completes",
    "ends-the-judge": "the judge's process ended",
    "exits-in-forward": "crashed: the process ended itself with exit code 0",
    "forges-a-drive-of-nothing-but-its-first-step": "failed: completes",
    "forges-the-answer-to-the-question": "failed: completes",
    "graph-that-is-never-replayed": "failed: replay-follows-batch",
    "host-syncs-allowed-while-it-plans": "failed: no-host-lengths",
    "mode-entered-until-the-step-is-over": "failed: output-contract",
    "output-kept-by-shape": "failed: steps-independent",
    "output-of-two-minds": "failed: output-contract",
    "reads-memory-left-behind": "failed: output-written",
    "replaces-the-judge": "failed: matches-oracle",
    "right-for-the-cases-it-knows": "failed: matches-oracle",
    "sends-an-empty-answer": "the process spoke for itself: it sent a RunRecord, which is not an answer",
    "sends-code-to-the-judge": "the process spoke for itself: it sent posix._exit",
}
"""Adversarial backend -> text that proves what stopped it, where a failure could also be luck."""


def test_each_says_what_it_tries() -> None:
    assert {entry.slug for entry in ENTRIES} >= ENDINGS.keys()
    for entry in ENTRIES:
        assert entry.mechanism.endswith("."), entry.slug
        assert entry.backend.cheats
        assert not entry.honest.cheats


def test_modules_of_the_kit_that_a_cheat_asks_for_exist() -> None:
    # A cheat that names a module of yesterday fails by its import, whatever protects the kit.
    sources = Path(adversarial_backends.__file__).parent.glob("*.py")
    asked = {name for source in sources for name in re.findall(r'_kit\("([\w.]+)"\)', source.read_text())}
    assert "families.expected" in asked
    assert not [name for name in asked if importlib.util.find_spec(f"attn_testkit.{name}") is None]


def test_the_page_on_isolation_has_a_row_for_each() -> None:
    page = Path(__file__).with_name("README.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {slug for row in rows for slug in re.findall(r"`([a-z0-9-]+)`", row)}
    assert named == {entry.slug for entry in ENTRIES}


def test_a_adversarial_backend_that_cannot_be_audited_is_refused() -> None:
    with pytest.raises(ValueError, match="a docstring that says how"):
        adversarial("without-a-docstring")(type("Mute", (AdversarialBackend,), {"__module__": __name__}))
    taken = type("Taken", (AdversarialBackend,), {"__module__": __name__, "__doc__": "Something."})
    with pytest.raises(ValueError, match="the slug is taken"):
        adversarial(ENTRIES[0].slug)(taken)


NONE = AdversarialVerdict("a-cheat", "It cheats.", 1, "failed: matches-oracle", 0, "passed")


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        ({}, 0, "adversarial backends: 1 of 1 failed; 1 of 1 pass without the cheat"),
        ({"exit_code": 0, "ending": "passed"}, 1, "GREEN  a-cheat: an adversarial backend that passes"),
        (
            {"honest_exit_code": 1, "honest_ending": "failed: finite"},
            1,
            "FALSE ALARM  a-cheat without its cheat: failed: finite",
        ),
    ],
)
def test_a_green_or_a_false_alarm_fails_the_audit_and_heads_its_text(
    change: dict[str, object], code: int, line: str
) -> None:
    found = Audit(Settings(faults=("a-cheat",)), adversarial=[dataclasses.replace(NONE, **change)])
    assert found.exit_code == code
    assert audit_text(found).splitlines()[0] == line
    assert found.as_plain()["adversarial"][0]["slug"] == "a-cheat"


def test_the_audit_runs_all_of_them_unless_classes_of_faults_are_asked_for() -> None:
    def named(**asked: object) -> set[str]:
        return {task.name for task in tasks_for(Settings(**asked)) if task.kind == "adversarial"}

    assert named() == {entry.slug for entry in ENTRIES}
    assert named(faults=("sends-*",)) == {entry.slug for entry in ENTRIES if entry.slug.startswith("sends-")}
    assert named(classes="AB") == set()
