"""Tests that take long: ``ci/pr.sh`` leaves them out, ``.ci/run`` and the nightly run them, and they start first.

A row is the beginning of a node id. What takes two seconds of a core with all its cases, or whose neighbours do,
is one: ``pytest --durations=60`` says which. A file whose tests share a costly fixture stands here whole. A row that
ends with ``[`` is a test of many cases, of which the first of each kind is not slow. The slowest stand first.
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
    "tests/contrib/test_flashinfer_module.py",
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
    "tests/front_ends/test_since.py",
    "tests/front_ends/test_watch.py::test_each_save_runs_the_changed_backend_and_first_what_failed",
    "tests/front_ends/test_watch.py::test_a_file_that_cannot_be_imported_is_reported_and_the_next_save_runs",
    "tests/front_ends/test_watch.py::test_ctrl_c_gives_the_exit_code_of_the_last_run",
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
    "tests/backends/test_trtllm.py::test_every_kind_of_case_passes_and_says_that_its_kernels_are_emulated[",
    "tests/running/test_killed_processes.py::test_a_process_that_is_killed_costs_no_result_but_that_of_its_own_worker[",
    "tests/cases/test_declared.py::test_every_case_that_declares_make_is_declared[",
    "tests/runner_modes/test_kernel_kv_splits.py::test_tables_of_parts_are_right_eager_and_in_graphs[",
    "packages/corpus/tests/adversarial/test_adversarial_backends.py::test_no_adversarial_backend_gets_a_green_and_without_the_cheat_it_does[",
    "tests/cases/test_not_covered.py::test_core_tries_every_value_that_a_bundled_backend_declares_but_those_of_long_capabilities[",
    "tests/families/test_hybrids.py::test_mistakes_of_wrappers_are_found[",
    "tests/front_ends/test_shards_in_pytest.py::test_shards_of_the_suite_merge_into_one_verdict",
    "tests/families/test_states.py::test_the_usual_mistakes_are_named[",
    "tests/cases/test_not_covered.py::test_the_page_says_what_the_tiers_try",
    "tests/backends/test_trtllm.py::test_a_historic_mistake_is_caught[",
    "tests/cases/test_case_catalogue.py::test_no_step_of_a_case_is_longer_than_is_declared[",
    "tests/cases/test_seldom_cases.py::test_core_meets_every_remainder_by_up_to_128_and_every_batch_size_up_to_48[",
    "tests/families/test_indexer.py::test_a_right_indexer_passes[",
    "tests/backends/test_blocks_of_vllm.py::test_a_backend_over_a_pool_of_its_own_conforms",
    "tests/diagnosis/test_misread_indices.py::test_other_mistakes_are_not_taken_for_a_wrong_look_up[",
    "tests/cases/test_not_covered.py::test_core_leaves_no_value_of_a_capability_and_smoke_prints_what_it_leaves[",
    "tests/cases/test_nearest_declared.py::test_no_layer_of_a_case_has_a_window_below_the_smallest_that_is_declared[",
    "tests/families/test_states.py::test_the_reference_passes_each_kind_eagerly_and_in_graphs[",
    "tests/budget/test_budget.py::test_in_pytest_what_is_left_is_skipped_and_the_session_ends_with_seven",
    "tests/front_ends/test_own_session.py::test_a_case_run_that_failed_makes_the_session_red_whatever_became_of_its_test[",
    "tests/families/test_prefix_cache_states.py::test_right_backends_pass",
    "tests/families/test_hybrids.py::test_a_right_wrapper_passes_eagerly_and_in_graphs[",
    "tests/cases/test_case_catalogue.py::test_requests_have_as_many_rows_as_are_declared_and_never_more[",
    "tests/backends/test_flashinfer_ragged.py::test_every_kind_of_case_passes_and_says_that_its_kernels_are_emulated",
    "tests/running/test_unset_width.py::test_the_healthy_one_passes_and_another_cause_is_not_put_down_to_the_width",
    "tests/backends/test_compile.py::test_each_kind_of_launch_is_compiled",
    "packages/cuda_on_cpu/tests/test_emulation_tool.py::test_a_kernel_that_no_device_can_hold_is_refused_and_a_small_one_compiles",
    "tests/cases/test_nearest_declared.py::test_layers_have_the_usual_scaling_where_no_other_is_declared_and_mla_has_its_own[",
    "packages/cuda_on_cpu/tests/test_emulated_fuzz.py::test_random_programs_replay_bitwise_equal_to_eager[",
    "tests/front_ends/test_page_in_browser.py::test_a_page_opens_without_an_error_asks_nobody_and_shows_its_matrix[",
    "tests/ci/test_first_lines.py::test_a_fault_is_run_and_its_mechanism_stands_above_what_its_failure_says",
    "tests/running/test_worker_process.py::test_workers_die_with_a_judge_that_is_killed",
    "tests/runner_modes/test_dialects.py::test_padded_requests_have_neither_rows_nor_keys_for_who_has_it_so[",
    "tests/cases/test_nearest_declared.py::test_windowed_layers_have_one_window_beside_full_layers_where_one_is_declared[",
    "tests/backends/test_flashinfer_gdn.py::test_it_passes_over_the_fakes_and_says_so[",
    "tests/cases/test_nearest_declared.py::test_all_layers_have_the_same_window_where_that_is_declared[",
    "tests/test_dependencies.py::test_the_command_line_runs_without_pytest",
    "tests/front_ends/test_accidental_bugs.py::test_that_case_finds_it_and_passes_without_the_bug[",
    "tests/cases/test_server_variants.py::test_what_is_declared_decides_which_ways_are_tried[",
    "tests/diagnosis/test_hints_of_places.py::test_a_mistake_about_places_is_named_and_no_other[",
    "tests/runner_modes/test_modes.py::test_host_lengths_are_there_only_for_those_who_need_them[",
    "tests/diagnosis/test_misread_indices.py::test_an_index_that_is_looked_up_wrongly_is_named_and_nothing_else_of_it[",
    "tests/cases/test_case_ids.py::test_an_id_alone_rebuilds_the_case[",
    "tests/front_ends/test_accidental_bugs.py::test_smoke_is_green_and_says_that_it_was_smoke[",
    "tests/cases/test_not_covered.py::test_small_cases_keep_within_what_is_declared[",
    "tests/running/test_graphs_alone.py::test_what_is_wrong_is_found_and_no_eager_run_is_made_up",
    "tests/running/test_tested_file.py::test_byte_code_that_python_would_not_trust_is_no_alarm",
    "tests/cases/test_steps.py::test_steps_beside_the_own_batch_hold_512_prefix_tokens_at_most",
    "tests/running/test_unset_width.py::test_who_cannot_deal_with_an_unset_width_is_reported_what_it_was_and_where_it_stands_besides[",
    "tests/running/test_tested_file.py::test_fresh_byte_code_is_no_alarm",
    "tests/cases/test_indexer_cases.py::test_each_server_variant_of_a_mode_has_a_case_with_an_indexer[",
    "tests/families/test_states.py::test_conventions_of_servers_pass[",
    "tests/running/test_tested_file.py::test_stale_byte_code_is_refused_and_names_both_files",
    "tests/running/test_attended_keys.py::test_what_another_mode_left_behind_is_reported_as_such",
    "tests/cases/test_steps.py::test_pages_rows_and_tables_are_enough_and_no_more[",
    "tests/front_ends/test_known_from.py::test_a_wrong_use_is_one_line[",
    "tests/backends/test_descriptor_triton.py::test_a_decode_that_counts_on_the_padding_of_a_descriptor_is_found",
    "tests/cases/test_extend.py::test_no_case_has_more_new_tokens_than_are_declared_and_one_has_so_many",
    "tests/running/test_attended_keys.py::test_the_failure_says_where_the_weight_went[",
    "packages/cuda_on_cpu/tests/test_readme.py::test_two_lines_around_a_test_find_what_the_readme_says",
    "tests/cases/test_head_shapes.py::test_cases_have_shapes_where_they_are_declared_with_options_without_and_in_groups[",
    "tests/cases/test_server_variants.py::test_a_backend_with_an_indexer_has_one_case_per_mode_of_an_index_pool_beyond_32_bits[",
    "tests/backends/test_triton_backend.py::test_replays_follow_their_batch[",
    "tests/running/test_worker_process.py::test_a_crash_names_its_signal_and_last_words_and_the_run_goes_on",
    "tests/running/test_raising_backends.py::test_a_message_of_two_megabytes_makes_no_record_of_seven",
    "tests/running/test_judge_of_worker.py::test_one_finds_what_the_controllers_finds_and_ends_by_itself",
    "tests/minimize/test_features.py::test_what_is_nearer_differs_in_no_feature_in_which_the_case_does_not",
    "tests/cases/test_steps.py::test_a_full_context_is_filled_to_its_last_token_and_a_roomy_one_is_whole_pages[",
    "tests/backends/test_flex.py",
    "tests/backends/test_flashinfer.py::test_every_kind_of_case_passes_and_says_that_its_kernels_are_emulated[",
    "tests/backends/test_flashinfer.py::test_a_historic_mistake_is_caught[",
    "tests/running/test_killed_processes.py",
    "tests/families/test_prefix_cache_states.py::test_mistakes_are_found[",
    "tests/families/test_row_formats.py::test_mistakes_about_formats_are_found_and_named[",
    "tests/diagnosis/test_hints_of_spans.py::test_a_rule_of_spans_that_a_backend_gets_wrong_is_named_and_no_other[",
    "tests/running/test_failure_texts.py::test_the_hint_points_at_the_bug_and_at_nothing_else[",
    "tests/families/test_encoder_only.py::test_who_reads_the_offsets_is_right_eagerly_and_in_graphs[",
    "tests/families/test_encoder_only.py::test_a_mistake_is_found_and_named[",
    "tests/families/test_encoder_only.py::test_offsets_after_those_of_a_batch_repeat_the_last_one[",
    "tests/families/test_state_trees.py::test_offsets_of_32_bits_are_caught_and_others_pass",
    "tests/families/test_state_trees.py::test_mistakes_with_branches_are_named[",
    "tests/families/test_state_trees.py::test_drafts_that_branch_pass[",
    "tests/backends/test_flashinfer_ragged.py::test_a_mistake_in_a_part_is_caught[",
    "tests/backends/test_split_merge.py::test_splits_that_are_merged_by_a_ticket_pass_and_by_place_are_a_race",
    "tests/running/test_unruly_backends.py::test_what_a_backend_leaves_behind_is_reported_with_before_and_after[",
    "tests/backends/test_triton_state.py::test_a_bug_of_a_kernel_is_caught[",
    "tests/front_ends/test_pytest_habits.py::test_junit_xml_has_reasons_of_failures_crashes_and_timeouts",
    "tests/front_ends/test_pytest_habits.py::test_crashes_and_timeouts_have_their_reason_in_the_short_summary",
    "tests/running/test_non_causal.py::test_who_does_not_is_found_and_the_mask_is_named[",
    "tests/running/test_random_states.py::test_numbers_that_were_drawn_are_no_change[",
    "tests/backends/test_triton_state.py::test_it_passes_in_each_mode[",
    "tests/front_ends/test_page_in_browser.py::test_the_filter_hides_and_shows_by_each_of_its_fields[",
    "tests/runner_modes/test_running_row_ranks.py",
    "tests/runner_modes/test_running_ranks.py::test_each_rank_has_an_index_pool_with_the_index_keys_of_all_tokens",
    "tests/runner_modes/test_modes.py::test_all_modes_share_one_instance_and_replay_interleaved",
    "tests/cases/test_server_variants.py::test_in_full_every_mode_but_draft_decode_has_a_pool_beyond_32_bits[",
    "tests/families/test_row_formats.py::test_the_reference_backend_passes_every_format_in_graphs[",
    "tests/runner_modes/test_running_verify_loop.py::test_any_acceptance_equals_plain_decode[",
    "tests/cases/test_kv_splits.py::test_ranks_have_pages_of_several_keys_where_any_are_declared[",
    "tests/runner_modes/test_modes.py::test_a_replay_view_is_what_the_contract_writes_down[",
    "tests/runner_modes/test_slots_in_decode.py::test_a_backend_whose_decodes_read_the_slot_of_the_last_accepted_node_passes[",
    "tests/runner_modes/test_slots_in_decode.py::test_a_decode_that_ignores_the_accepted_count_fails_the_loop_of_verifies[",
    "tests/runner_modes/test_wider_buffers.py::test_a_stride_that_is_computed_from_the_columns_fails_eager_and_in_graphs[",
    "tests/families/test_halfway_numbers.py::test_half_away_from_zero_fails_with_halfway_numbers_and_passes_others[",
    "tests/runner_modes/test_draft_decode.py::test_one_graph_of_all_forwards_is_right_for_every_batch[",
    "tests/cases/test_extend.py::test_every_step_fits_its_graph[",
    "tests/cases/test_server_variants.py::test_decode_has_a_pool_of_slots_beyond_24_bits_if_rows_can_be_so_narrow[",
    "tests/cases/test_layers.py::test_one_query_head_and_one_kv_head_where_mha_is_declared[",
    "tests/runner_modes/test_dialects.py::test_a_forward_has_more_rows_than_its_plan_for_who_takes_it[",
    "tests/cases/test_switches.py::test_each_side_of_a_switch_has_a_batch_behind_all_but_the_seldom_cases[",
    "tests/runner_modes/test_modes.py::test_each_mode_returns_exactly_its_fields_for_exactly_its_rows[",
    "tests/runner_modes/test_modes.py::test_replays_are_right_under_both_ways_of_turning_gradients_off[",
    "tests/running/test_packed_masks.py::test_a_bit_packed_mask_passes_eager_and_graph[",
    "tests/runner_modes/test_running_greedy_loop.py::test_drafts_that_are_right_are_accepted_as_far_as_they_were_left_alone[",
    "packages/servers/tests/record",
    "packages/corpus/tests/mutants/test_hunt.py",
    "tests/budget/test_most_valuable.py",
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
