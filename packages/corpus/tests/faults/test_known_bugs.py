"""The journal of known bugs: one verdict for each, and every fault that it names is one that the audit runs."""

from __future__ import annotations

import re

import pytest

from attn_testkit_corpus.audit import Settings
from attn_testkit_corpus.audit.tasks import tasks_for
from attn_testkit_corpus.faults import all_faults, all_known_bugs, thread_address
from attn_testkit_corpus.faults.catalogue import CLASSES

KNOWN = all_known_bugs()
FAULTS = {fault.slug: fault for fault in all_faults()}


def test_the_journal_is_read_as_it_is_written_and_names_are_unique() -> None:
    names = [bug.name for bug in KNOWN.bugs]
    assert len(names) == len(set(names)) >= 144
    first = KNOWN.bugs[0]
    assert (first.name, first.bug_class) == ("qlens-packed-vs-uniform-stride", "A")
    assert first.threads[0] == "sglang #21987"
    assert [bug.bug_class for bug in KNOWN.bugs] == sorted(bug.bug_class for bug in KNOWN.bugs)


def test_a_bug_has_a_class_of_the_catalogue_threads_and_exactly_one_verdict() -> None:
    for bug in KNOWN.bugs:
        assert bug.bug_class in CLASSES, bug
        assert bug.threads, bug
        assert bool(bug.faults) is not bool(bug.outside), bug
        assert bool(bug.why) is bool(bug.outside), bug
        assert not bug.outside or bug.outside in KNOWN.outside, bug
        assert bug.wrong or bug.faults, bug
        assert not bug.wrong or re.match(r"[A-Zq].*\.$", bug.wrong), bug


def test_every_fault_that_meets_a_bug_is_run_by_the_audit() -> None:
    run = {task.name for task in tasks_for(Settings()) if task.kind == "fault"}
    for bug in KNOWN.bugs:
        assert len(bug.faults) == len(set(bug.faults)), bug
        assert set(bug.faults) <= run, bug


def test_a_fault_of_the_bugs_own_name_meets_it_first_and_cites_a_thread_of_it() -> None:
    for bug in (bug for bug in KNOWN.bugs if bug.name in FAULTS):
        assert bug.faults[0] == bug.name
        numbers = re.findall(r"#\d+|\b[0-9a-f]{8,}\b|C\.\d|[a-z]+(?:_[a-z]+)+", ", ".join(bug.threads))
        assert any(number in FAULTS[bug.name].source for number in numbers), (numbers, FAULTS[bug.name].source)


def test_what_the_first_fault_says_stands_for_the_bug_only_where_it_has_the_bugs_name() -> None:
    assert [bug.name for bug in KNOWN.bugs if not bug.wrong and bug.name not in FAULTS] == []


def test_every_reason_and_every_project_is_used() -> None:
    assert {bug.outside for bug in KNOWN.bugs if bug.outside} == set(KNOWN.outside)
    cited = {thread.rpartition(" ")[0] for bug in KNOWN.bugs for thread in bug.threads}
    assert set(KNOWN.projects) - cited == set()


def test_numbers_and_commits_have_an_address_and_words_have_none() -> None:
    projects = {"vLLM": "vllm-project/vllm", "FlashMLA of vLLM": "vllm-project/FlashMLA"}
    assert thread_address("vLLM #12", projects) == "https://github.com/vllm-project/vllm/issues/12"
    assert thread_address("FlashMLA of vLLM #3", projects) == "https://github.com/vllm-project/FlashMLA/issues/3"
    assert thread_address("vLLM 26d7d92f", projects) == "https://github.com/vllm-project/vllm/commit/26d7d92f"
    assert thread_address("vLLM 26d7d92", projects) == ""
    assert thread_address("sglang 0.5.23, comment in aiter_backend", projects) == ""
    with pytest.raises(KeyError):
        thread_address("sglang #12", projects)


def test_every_number_in_a_thread_leads_to_an_address() -> None:
    for thread in (thread for bug in KNOWN.bugs for thread in bug.threads):
        numbered = "#" in thread or bool(re.search("[0-9a-f]{8}", thread))
        assert bool(thread_address(thread, KNOWN.projects)) is numbered, thread
