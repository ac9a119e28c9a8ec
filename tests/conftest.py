"""Settings of all tests: one thread for each process, no network, property tests without a time
limit per example.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

for name, value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)  # before torch and transformers are imported
# readline, which pytest imports, has put the size of a terminal that is not there into the environment
# of child processes, below Python's view of it: tables of commands would be 80 columns wide
for name in ("COLUMNS", "LINES"):
    if name not in os.environ:
        os.unsetenv(name)

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests import ranks

# torch is imported where it is needed: the process that only hands out tests to workers does
# without it (3 s)

# the machine of a test run is shared: a slow example is no failure, and the same examples come
# every time
hypothesis.settings.register_profile("whale", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("whale")


TAKEN_IN_TURNS = {
    "integration/test_exactness.py::test_trains_like_local": 36,
    "integration/test_exactness.py::test_trains_like_local_with_different_replicas": 3,
    "integration/test_waves.py::test_trains_like_local": 24,
    "integration/test_lengths.py::test_one_capture_trains_every_length_like_local": 3,
    "integration/test_zero.py::test_tied_weights_train_like_local": 5,
    "integration/test_unlike_training.py::test_trains_like_local_and_resumes_under_another_layout": 2,
    "integration/test_resume.py::test_resume_is_exact": 2,
    "integration/test_breadth.py::test_two_stages_train_like_local": 4,
    "integration/test_offload.py::test_tied_weights_train_like_local": 4,
    "integration/test_split.py::test_trains_like_local": 3,
    "integration/test_cli.py::test_a_finished_rank_ends_without_taking_the_interpreter_apart": 2,
    "integration/test_evaluation.py::test_evaluation_gives_the_local_outputs_in_sample_order": 3,
    "integration/test_stage_updates.py::test_stages_are_updated_on_the_way_with_the_same_weights": 2,
    "integration/test_split_experts.py::test_tokens_travel_to_their_experts": 2,
    "unit/test_balance.py::test_every_advice_for_a_pipeline_works_and_one_less_does_not": 2,
    "unit/test_second_call.py::test_a_memory_is_refused_by_name": 6,
    "unit/test_second_call.py::test_what_the_next_call_does_not_depend_on_trains": 6,
    "unit/test_losses.py::test_parts_add_up_to_the_whole": 18,
    "integration/test_split_recompute.py::test_less_memory_is_exact_and_sends_more": 6,
    "integration/test_emulation.py::test_an_over_full_device_fails_as_a_real_one_would": 2,
    "unit/test_samples.py::test_no_false_alarm_on_transformers": 3,
    "unit/test_losses_transformers.py::test_transformers_heads_are_exact": 3,
    "faults/test_faults.py::test_one_fault_ends_the_job_everywhere": 5,
    "faults/test_batches.py::test_different_shapes_are_named": 2,
    "device/test_failures.py::test_the_job_ends_everywhere": 2,
    "integration/test_split_core.py::test_every_grid_gives_the_local_loss_and_gradients": 2,
    "integration/test_messages.py::test_boundaries_of_waves_take_what_the_schedule_keeps": 2,
    "integration/test_state_between_calls.py::test_a_state_is_carried_from_batch_to_batch": 2,
    "integration/test_emulation.py::test_model_replicas_that_are_not_alike": 2,
    "integration/test_zero_optimizers.py::test_checkpoints_load_under_any_other_placement": 2,
    "device/test_masked_update.py::test_no_wait_before_the_update": 4,
    "device/test_new_plans.py::test_offload": 2,
    "integration/test_clusters.py::test_uneven_plans_train_like_local_pytorch": 6,
    "integration/test_rare_operations.py::test_trains_like_local": 8,
    "integration/test_python_in_forward.py::test_trains_like_local": 6,
    "integration/test_state_between_calls.py::test_trains_like_local": 2,
    "integration/test_autograd_functions.py::test_trains_like_local": 3,
    "integration/test_unlike_training.py::test_evaluates_and_loads_like_one_rank": 2,
    "integration/test_split_summa.py::test_trains_like_local": 2,
    "integration/test_weights_elsewhere.py::test_backward_finds_its_weights": 4,
    "integration/test_board.py::test_nothing_outside_of_the_folder_is_served": 2,
    "integration/test_complex.py::test_every_type_trains_like_local": 6,
    "unit/test_samples.py::test_found": 4,
    "unit/test_samples.py::test_no_false_alarm": 4,
    "unit/test_search.py::test_seven_devices_in_any_number_of_stages": 4,
    "device/test_new_plans.py::test_zero": 2,
    "integration/test_split_core.py::test_hugging_face": 2,
    "integration/test_replicas.py::test_rounding_is_made_good": 2,
    "integration/test_memory.py::test_as_many_micro_batches_are_in_flight_as_the_schedule_says": 2,
    "integration/test_memory.py::test_a_builder_gives_the_same_weights_on_any_number_of_ranks": 2,
    "unit/test_schedule_table.py::test_list_scheduled_orders_reach_or_beat_the_table_at_the_same_memory": 2,
    "unit/test_split_layer_times.py::test_the_search_splits_where_the_rows_say_so": 4,
    "unit/test_first_fit.py::test_the_fastest_point_that_fits_is_found_wherever_it_is": 4,
    "unit/test_search_memory.py::test_the_cheaper_of_recomputation_and_offload": 2,
    "unit/test_chosen_counts.py::test_no_number_by_hand_gives_a_shorter_step": 2,
    "integration/test_advise.py::test_advise_says_what_a_job_of_the_script_takes": 3,
    "unit/test_capture_cache.py::test_a_file_that_is_not_taken_is_made_anew": 3,
    "integration/test_bad_plans_and_ranks.py::test_ranks_that_disagree_all_say_so": 3,
    "unit/test_second_call.py::test_a_memory_of_the_first_length_is_refused": 2,
    "unit/test_python_numbers.py::test_the_next_step_has_the_new_number": 3,
    "integration/test_split_core.py::test_uneven_shards": 2,
    "integration/test_resume.py::test_what_is_lost_would_show": 2,
    "integration/test_bad_plans_and_ranks.py::test_a_corrupted_plan_file": 3,
    "unit/test_first_mistakes.py::test_says_what_is_wrong_and_what_to_try": 3,
    "integration/test_optimizers.py::test_a_number_that_is_not_finite": 2,
    "unit/test_wave_orders.py::test_any_number_of_micro_batches_is_proved": 3,
    "integration/test_state_between_calls.py::test_a_memory_of_samples_or_weights_is_refused": 3,
    "integration/test_messages.py::test_all_values_of_an_edge_go_in_one_message": 2,
    "unit/test_profiling.py::test_flop_equal_torch": 3,
    "integration/test_unlike_training.py::test_bad_replicas_are_refused_by_name": 3,
    "integration/test_cuts_bytes.py::test_automatic_cuts_send_the_hidden_state_only": 3,
    "integration/test_recompute.py::test_trains_like_local": 3,
    "unit/test_clean_writes.py::test_write_to_a_view_changes_the_base_and_other_views": 3,
    "unit/test_python_state.py::test_state_in_python_is_refused_by_name": 2,
    "integration/test_refusals.py::test_changed_gradients_are_refused": 3,
    "integration/test_seeds.py::test_replicate_on_all_devices_is_data_parallel": 2,
    "device/test_found.py::test_lowering_knows_who_draws_alike": 2,
    "unit/test_lean_schedules.py::test_chunks_that_fit_are_found_where_one_stage_a_device_does_not": 2,
    "integration/test_seeds.py::test_two_task_graphs_with_8_micro_batches": 2,
    "unit/test_guards.py::test_hugging_face_gradient_checkpointing": 2,
    "device/test_batches.py::test_only_the_rows_of_a_rank_are_copied": 2,
    "unit/test_zero_blocks.py::test_blocks_that_cannot_be_are_refused": 3,
    "unit/test_fast_graphs.py::test_only_a_causal_mask_becomes_is_causal": 3,
    "integration/test_optimizers.py::test_clipping_uses_the_norm_of_the_whole_model": 2,
    "unit/test_python_state.py::test_buffers_train_as_locally": 2,
    "unit/test_losses.py::test_other_losses_are_refused_with_their_line": 3,
    "integration/test_split_core.py::test_every_way_to_cut_an_operation": 3,
    "unit/test_plan_is_the_program.py::test_who_does_what_is_read": 2,
    "integration/test_replicas.py::test_more_than_rounding_ends_the_job": 2,
    "unit/test_search_marked.py::test_what_is_marked_stays": 2,
    "unit/test_guards.py::test_branches_without_chance_are_decided": 3,
    "unit/test_clean_writes.py::test_in_place_result_and_the_tensor_itself_afterwards": 3,
}
"""long tables: `make test` takes every second or third row, `make test-all` all of them"""
LATER = (
    "integration/test_search_split.py::test_a_large_classifier_is_split_and_trains_like_local",
    "unit/test_search_slices.py::test_a_slice_gives_about_the_plan_of_the_whole_cluster",
    "integration/test_evaluation.py::test_other_lengths_and_batch_sizes_are_exact",
    "integration/test_lengths.py::test_lengths_that_take_another_path_are_captured_apart",
    "integration/test_split_core.py::test_devices_that_get_nothing",
    "integration/test_cuts_bytes.py::test_only_the_hidden_state_crosses_between_layers",
    "integration/test_offload_runs.py::test_checkpoints_go_between_placements",
    "integration/test_clusters.py::test_whale_plan_and_run_take_a_cluster_file",
    "integration/test_split_training.py::test_loader_outputs_and_export_on_a_grid",
    "integration/test_benchmarks.py::test_a_benchmark_starts_as_a_script_and_as_a_module",
    "integration/test_adapt.py::test_a_loader_takes_new_shares_with_its_next_epoch",
    "integration/test_data_and_metrics.py::test_the_position_fits_another_number_of_ranks",
    "unit/test_capture_cache.py::test_the_key_is_the_same_in_another_process",
    "unit/test_search.py::test_one_large_device_beside_a_pipeline_of_small_ones",
    "integration/test_sharded_ops.py::test_exchanges_between_random_layouts",
    "integration/test_local_model.py::test_stages",
    "integration/test_examples.py::test_quickstart_on_two_hosts",
    "integration/test_split_experts.py::test_unmodified_mixtral_in_float32",
    "integration/test_accelerate.py::test_stages",
    "integration/test_split_core.py::test_another_length_runs_with_the_same_choices",
    "integration/test_optimizers.py::test_a_saved_plan_trains_the_same",
    "integration/test_emulation.py::test_a_wave_over_replicas_with_stub_chunks_does_the_actions_of_its_plan",
    "integration/test_refusals.py::test_bloom_passes_with_weights_and_is_refused_without",
    "integration/test_split_recompute.py::test_memory_decides_what_is_saved",
    "integration/test_local_model.py::test_a_model_that_is_whole_here_may_be_used",
    "integration/test_messages.py::test_boundaries_of_1f1b_take_as_much_memory_however_many_micro_batches_there_are",
    "faults/test_faults.py::test_four_faults_in_one_job",
    "integration/test_split_grids.py::test_every_grid",
    "integration/test_memory.py::test_a_builder_never_allocates_more_than_this_ranks_parameters_and_one_tensor",
    "faults/test_batches.py::test_a_rank_that_raises_in_evaluate_is_named",
    "integration/test_split_summa.py::test_bytes_are_those_of_the_formula",
    "integration/test_split_experts.py::test_experts_sorted_by_hand",
    "unit/test_losses_transformers.py::test_mixtral_router_loss_is_exact_with_all_reduced_sums",
    "integration/test_emulation.py::test_heterogeneous_devices_on_a_grid",
    "unit/test_search.py::test_one_precision_for_cards_that_want_different_ones",
    "unit/test_balance.py::test_every_advice_works_and_one_less_does_not",
    "unit/test_capture_cache.py::test_models_of_the_zoo",
    "integration/test_unlike_training.py::test_dropout_is_drawn_again_when_recomputed",
    "integration/test_clusters.py::test_ranks_load_what_their_share_needs",
    "unit/test_lean_schedules.py::test_a_schedule_saves_no_more_than_memory_holds",
    "unit/test_search_slices.py::test_the_plan_says_what_was_searched_and_what_is_left_over",
    "unit/test_search_slices.py::test_where_no_plan_of_a_slice_fits_on_all_slices_all_devices_of_one_are_taken",
    "unit/test_search.py::test_memory_is_proved_without_times",
    "unit/test_search.py::test_the_search_gives_the_same_plan_in_every_run",
    "integration/test_clusters.py::test_ranks_get_the_devices_of_their_hosts",
    "integration/test_seeds.py::test_8_task_graphs_with_35_micro_batches_on_8_ranks",
    "integration/test_adapt.py::test_suggest_says_so_and_changes_nothing",
    "faults/test_watch.py::test_a_rank_that_ends_normally_disturbs_nobody",
    "faults/test_faults.py::test_a_fault_in_replicas_that_are_not_alike_is_named",
    "integration/test_search_marked.py::test_the_unmarked_rest_trains_like_local_pytorch",
    "integration/test_search_split.py::test_a_level_of_zero_that_was_set_holds_in_the_search",
    "integration/test_unlike_training.py::test_fp16_skips_a_step_on_all_ranks_or_none",
    "integration/test_search_split.py::test_zero_is_found_where_memory_is_short",
    "unit/test_device_moves.py::test_drafts_in_common_change_nothing",
    "unit/test_device_moves.py::test_the_search_finds_what_is_one_device_away",
    "unit/test_first_fit.py::test_a_model_that_is_large_for_its_devices_has_more_points",
    "unit/test_search.py::test_a_model_too_large_for_each_device_is_cut_without_any_setting",
    "unit/test_search.py::test_a_stage_that_saves_nothing_has_memory_for_any_number_of_samples",
    "unit/test_search.py::test_an_interrupted_comparison_says_nothing",
    "unit/test_search.py::test_estimates_count_links_that_every_micro_batch_takes",
    "unit/test_search.py::test_float32_products_are_explained_where_a_device_without_tf32_is_left_out",
    "unit/test_search.py::test_no_plan_by_hand_with_the_same_settings_is_faster",
    "unit/test_search.py::test_of_several_fixed_settings_those_to_blame_are_named",
    "unit/test_search.py::test_one_of_many_devices_may_train_alone",
    "unit/test_search.py::test_the_plan_that_is_taken_is_within_every_memory",
    "unit/test_search.py::test_the_same_devices_under_another_name_are_drafted_once",
    "unit/test_search_splits.py::test_a_classifier_is_split_over_some_devices_while_a_slow_one_takes_no_part",
    "unit/test_search_splits.py::test_an_optimizer_that_looks_at_whole_stacks_keeps_them_whole",
    "unit/test_search_splits.py::test_states_in_parts_are_taken_where_updates_take_long",
)
"""long tests whose subject others show as well: `make test-all` only"""
_rows_seen: Counter[str] = Counter()


def pytest_itemcollected(item: pytest.Item) -> None:
    """What of the long tables `make test` leaves to `make test-all`. Plans of the exactness table may
    be for some models only: others show the same under such a plan.
    """
    name = f"{item.path.parent.name}/{item.path.name}::{item.name.partition('[')[0]}"
    _rows_seen[name] += 1
    if name in LATER or _rows_seen[name] % TAKEN_IN_TURNS.get(name, 1):
        item.add_marker(pytest.mark.slow)
    call = getattr(item, "callspec", None)
    few = getattr(call.params.get("plan"), "only_for", ()) if call is not None else ()
    if few and call.params.get("subject") not in few:
        item.add_marker(pytest.mark.slow)


@pytest.fixture
def fresh_session() -> Iterator[None]:
    """`wh.init()` before and after a test, so that it neither finds settings nor leaves any."""
    import whale as wh

    wh.init()
    yield
    wh.init()


LONG = (
    "test_samples.py",
    "test_losses.py",
    "test_losses_transformers.py",
    "test_guards.py",
    "test_clean_writes.py",
    "test_zoo.py",
    "test_search_optimum.py",
)
"""unit tests of more than ten seconds: they start before the others, so that no worker ends long
after the other
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: item.path.parent.name == "unit" and item.path.name not in LONG
    )  # the others keep their order


class FilesTogether(LoadScopeScheduling):
    """With several workers the tests of a file stay together, since they share captured models;
    those of the exactness table by model, and the many seeds of the search one by one.

    Files start in the order of their folders, so that the short unit tests come last and fill up
    both workers. (The groups that xdist makes of marks are lost without a word under pytest 9.2:
    every shared model was made twice.)
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file, _, case = nodeid.partition("::")
        if file.endswith("test_search_optimum.py"):
            return nodeid  # 25 minutes, and nothing is shared
        if file.endswith("test_exactness.py") and "[" in case:
            return nodeid.partition("-")[0].partition("[")[2]
        return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether:
    return FilesTogether(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What all tests share is there now: the garbage collector need not look through it again and
    again.

    Tests on Hugging Face models: their servers fork from a process that has transformers imported
    already (4 s each otherwise).
    """
    import torch

    torch.set_num_threads(1)
    if threading.current_thread() is threading.main_thread():
        # a job in the background of a shell ignores SIGINT, and so would the programs that tests
        # start and interrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()
    if "tests.zoo" in sys.modules:
        ranks.preload("transformers.modeling_utils")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Every test starts from the same seed, whatever ran before."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def settings_end_with_the_test() -> Iterator[None]:
    """What a test gave to `wh.init` or set as torch's dtype in this process is forgotten: the next
    test finds the defaults, whatever ran before.
    """
    import torch

    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    settings = sys.modules.get("whale.session")
    if settings is not None:
        settings.session.config = settings.Config()
        settings.session.cluster = None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["umount", "-l", str(place)], check=True)
