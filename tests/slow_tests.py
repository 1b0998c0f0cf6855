"""Tests that take long: ``ci/pr.sh`` leaves them out, ``.ci/run`` and the nightly run them, and they start first.

A row is the beginning of a node id, the slowest first. What takes more than two seconds of a core with all its cases, or
whose neighbours do, belongs here: ``pytest --durations=60`` says which. A file whose tests share a costly fixture
stands here whole. A row that ends with ``[`` is a test of many cases, of which the first of each kind is not slow.
``tests/ci/test_slow_tests.py`` asks that every row names tests.
"""

from __future__ import annotations

from typing import Any

import pytest

SLOW: tuple[str, ...] = (
    "tests/cluster/test_ray_cluster.py",
    "tests/docs/test_several_machines.py",
    "tests/docs/test_transcripts.py::test_a_page_shows_what_its_commands_print",
    "tests/docs/test_readme_commands.py::test_a_backend_as_the_readme_writes_it_conforms_by_each_of_its_commands",
    "tests/new/test_new.py::test_what_it_prints_can_be_typed_and_is_green",
    "tests/ci/test_bench_red.py",
    "tests/ci/test_nightly_servers.py",
    "packages/corpus/tests/faults/test_fault_texts.py",
    "tests/front_ends/test_cli.py::test_an_author_in_an_empty_directory_sees_his_backend_evaluated",
    "packages/corpus/tests/field_bugs/test_field_bugs.py::test_a_bug_is_caught_by_its_check_and_without_it_the_case_passes[",
    "tests/diagnosis/test_hints_of_faults.py",
    "tests/ci/test_mutants.py",
    "tests/ci/test_bench_pytest.py",
    "tests/fuzz/test_fuzz.py",
    "packages/corpus/tests/calibrate/test_emulated_calibration.py",
    "tests/minimize/test_minimize.py",
    "packages/corpus/tests/faults/test_audit.py",
    "tests/front_ends/test_demo.py",
    "tests/front_ends/test_interpreter.py",
    "tests/front_ends/test_plugin.py",
    "tests/front_ends/test_own_tests.py",
    "tests/front_ends/test_results.py",
    "tests/front_ends/test_loud_modules.py",
    "tests/backends/test_slot_index.py",
    "tests/backends/test_reserved_names.py::test_an_adapter_with_names_of_its_own_passes_in_every_mode_and_in_graphs",
    "tests/fuzz/test_search.py",
    "tests/ci/test_quick_audit.py",
    "tests/running/test_forking.py",
    "tests/running/test_fresh_memory.py",
    "tests/running/test_between_cases.py",
    "tests/running/test_diagnose_first.py",
    "tests/cases/test_code_cases.py::test_a_decode_that_leaves_one_key_out_of_66_000_fails_a_case_of_core",
    "tests/running/test_exit_codes.py",
    "tests/running/test_what_pages_need.py",
    "packages/cuda_on_cpu/tests/test_emulated_large_memory.py",
    "packages/cuda_on_cpu/tests/test_emulated_programs.py",
    "tests/doctor/test_doctor.py",
    "packages/corpus/tests/faults/test_query_scale_faults.py",
    "packages/corpus/tests/field_bugs/test_field_bugs.py::test_a_run_tries_the_case_that_catches_a_bug[",
)


def kind_of(item: Any) -> object:
    """What a case stands for. A field bug: what it breaks, for which its file is named, and the check that sees it."""
    bug = item.callspec.params.get("bug")
    return bug and (bug.backend.__module__.split("_")[-1], bug.checks[0])


def slow_first(items: list[pytest.Item]) -> None:
    """Marks slow items, and puts them in front in the order of the table; the others stay in theirs.

    One that starts last keeps one core busy while the others have nothing left to do.
    """
    slow: dict[pytest.Item, int] = {}
    quick: set[tuple[str, object]] = set()
    for item in items:
        if not item.nodeid.startswith(SLOW):
            continue
        row = next(row for row, start in enumerate(SLOW) if item.nodeid.startswith(start))
        if SLOW[row].endswith("[") and (kind := (SLOW[row], kind_of(item))) not in quick:
            quick.add(kind)
            continue
        item.add_marker(pytest.mark.slow)
        slow[item] = row
    items.sort(key=lambda item: slow.get(item, len(SLOW)))
