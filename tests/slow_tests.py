"""Tests that take long: a pull request runs them on one Python and the others on all, and they start first.

A row is the beginning of a node id below ``tests/``, the slowest first. What takes about two seconds of a core, or
whose neighbours do, belongs here: ``pytest --durations=60`` says which. A file whose tests share a costly fixture
stands here whole. ``tests/ci/test_slow_tests.py`` asks that every row names tests.
"""

from __future__ import annotations

import pytest

SLOW: tuple[str, ...] = (
    "cluster/test_ray_cluster.py",
    "docs/test_several_machines.py",
    "docs/test_transcripts.py::test_a_page_shows_what_its_commands_print",
    "docs/test_readme_commands.py::test_a_backend_as_the_readme_writes_it_conforms_by_each_of_its_commands",
    "new/test_new.py::test_what_it_prints_can_be_typed_and_is_green",
    "ci/test_bench_red.py",
    "ci/test_nightly_servers.py",
    "faults/test_fault_texts.py",
    "front_ends/test_cli.py::test_an_author_in_an_empty_directory_sees_his_backend_evaluated",
    "field_bugs/test_field_bugs.py::test_a_bug_is_caught_by_its_check_and_without_it_the_case_passes",
    "diagnosis/test_hints_of_faults.py",
    "ci/test_mutants.py",
    "ci/test_bench_pytest.py",
    "fuzz/test_fuzz.py",
    "emulation/test_emulated_calibration.py",
    "minimize/test_minimize.py",
    "faults/test_audit.py",
    "front_ends/test_demo.py",
    "front_ends/test_interpreter.py",
    "front_ends/test_plugin.py",
    "front_ends/test_own_tests.py",
    "front_ends/test_results.py",
    "front_ends/test_loud_modules.py",
    "backends/test_slot_index.py",
    "backends/test_reserved_names.py::test_an_adapter_with_names_of_its_own_passes_in_every_mode_and_in_graphs",
    "fuzz/test_search.py",
    "ci/test_quick_audit.py",
    "running/test_forking.py",
    "running/test_fresh_memory.py",
    "running/test_between_cases.py",
    "running/test_diagnose_first.py",
    "cases/test_code_cases.py::test_a_decode_that_leaves_one_key_out_of_66_000_fails_a_case_of_core",
    "running/test_exit_codes.py",
    "running/test_what_pages_need.py",
    "emulation/test_emulated_large_memory.py",
    "emulation/test_emulated_programs.py",
    "doctor/test_doctor.py",
    "faults/test_query_scale_faults.py",
    "field_bugs/test_field_bugs.py::test_a_run_tries_the_case_that_catches_a_bug",
)

_SLOW = tuple(f"tests/{start}" for start in SLOW)


def slow_first(items: list[pytest.Item]) -> None:
    """Marks slow items, and puts them in front in the order of the table; the others stay in theirs.

    One that starts last keeps one core busy while the others have nothing left to do.
    """
    slow: dict[pytest.Item, int] = {}
    for item in items:
        if item.nodeid.startswith(_SLOW):
            item.add_marker(pytest.mark.slow)
            slow[item] = next(row for row, start in enumerate(_SLOW) if item.nodeid.startswith(start))
    items.sort(key=lambda item: slow.get(item, len(_SLOW)))
