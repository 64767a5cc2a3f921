"""What every test shares: one thread, fixed seeds, no network, its own cache, checked shapes, markers by folder."""

import gc
import os
import random
import sys
from functools import cache
from pathlib import Path, PurePosixPath

# Before torch and transformers are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TREEWISE_KEEP_FREED_MEMORY"] = "0"  # tests of memory run in the same process
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # models of the tests are tiny: more threads only wait for one another

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from treewise.testing import shape_checks

shape_checks.install("treewise.nn", "treewise.engine", "treewise.objectives")

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=6, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=3)
settings.register_profile("all", parent=settings.get_profile("ci"), max_examples=50)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Markers of folders, files and tests (`file::test`) below tests/, by measured time.
MARKED = {
    "slow": (
        "engine/test_engine.py::test_random_forests_at_random_budgets",
        "engine/test_engine.py::test_any_loss",
        "engine/test_engine.py::test_adapters",
        "engine/test_engine.py::test_objective_settings_do_not_depend_on_packing",
        "engine/test_engine.py::test_float64_is_exact_beyond_float32",
        "engine/test_engine.py::test_bfloat16_deviates_no_more_than_flat_bfloat16",
        "engine/test_engine.py::test_frozen_lower_layers",
        "engine/test_engine.py::test_offloaded_gateways",
        "engine/test_engine.py::test_tied_embeddings",
        "data/test_load.py::test_a_script_without_a_main_guard_may_use_processes",
        "data/test_load.py::test_data_imports_no_torch_and_no_transformers",
        "data/test_load.py::test_processes_give_what_one_process_gives",
        "data/test_load.py::test_what_the_result_depends_on_is_part_of_the_key",
        "planning/test_layout.py::test_layouts_of_many_random_trees",
        "planning/test_planner.py::test_a_comb_of_100_000_forks",
        "planning/test_planner.py::test_gateways_stay_near_one_path_on_a_large_tree",
        "planning/test_planner.py::test_one_long_path_is_cut_into_pieces",
        "tree/test_forest.py::test_a_comb_of_100_000_forks",
        "tree/test_streams.py::test_a_stream_is_one_line",
        "planning/test_planner.py::test_packing_in_order_costs_next_to_nothing",
        "trainer/test_data_loader.py::test_an_epoch_of_seven_trees_in_six_steps",
    ),
    "exhaustive": (
        "engine/test_step_memory.py::test_every_peak_is_what_a_step_allocates_from_above",
        *("bench/test_results.py", "rl/online/test_ranks.py"),
        *("integrations/trl/test_meshes.py", "integrations/trl/test_preferences.py"),
        *("trainer/test_idle_ranks.py", "trainer/test_launchers.py", "trainer/test_ranks_that_end.py"),
        "cli/commands/test_bench.py::test_a_run_is_printed_written_and_checked",
        "cli/commands/test_train.py::test_a_closed_pipe_does_not_end_training",
        "cli/test_online_run.py::test_a_compiled_run_samples_and_trains_as_one_without",
        "distributed/test_context.py::test_more_families_on_two_processes",
        "distributed/test_context.py::test_four_processes_give_what_one_gives",
        "distributed/test_mesh.py::test_more_families_on_a_mesh_of_two",
        "distributed/test_mesh.py::test_more_meshes_of_four",
        "distributed/test_mesh.py::test_four_processes_give_what_one_gives",
        "examples/test_examples.py::test_the_notebook_of_the_walkthrough_runs_and_learns",
        "engine/test_vision.py::test_every_family_trains_as_flat",
        "grow/test_families.py::test_logits_stay_where_one_size_grows",
        "grow/test_families.py::test_odd_configurations_keep_logits",
        "distributed/test_mesh.py::test_groups_of_meshes_wait_as_long_as_the_run",
        "nn/test_device.py::test_kept_memory_is_not_faulted_in_again",
        "rl/online/test_trainer.py::test_a_run_killed_while_it_samples_loses_one_batch_at_most",
        "test_wheel.py::test_the_wheel_works",
        "testing/test_strategies.py::test_hypothesis_is_missing",
        "trainer/test_images.py::test_two_processes_train_like_one",
        "trainer/test_ranks.py::test_measured_costs_are_fitted_the_same_on_all_ranks_and_change_no_step",
        "trainer/test_meshes.py::test_two_processes_train_like_one_and_resume",
        "trainer/test_images.py::test_a_resumed_run_and_a_killed_one_end_like_an_undisturbed_one",
        "test_cuda_pretend.py::test_of_losses_on_routers",
        "test_cuda_pretend.py::test_of_any_objective",
        "bench/test_contestants.py::test_compiled_contestants_have_the_flat_gradients",
        "bench/test_images.py::test_all_contestants_agree_on_screenshots",
        "bench/test_gpu_check.py::test_wrong_kernels_give_a_sentence_for_an_issue",
        "integrations/trl/test_sft.py::test_a_budget_far_below_one_row",
        "integrations/trl/test_rl.py::test_rloo_ten_steps",
        "integrations/trl/test_rl.py::test_rloo_with_kl_to_the_model_without_its_adapter",
        "nn/attention/test_flex.py::test_no_length_is_compiled_twice",
        "rl/online/test_trainer.py::test_adapters_train_alone_against_the_model_without_them_and_resume",
        "rl/online/test_trainer.py::test_recorded_rewards_of_reasoning_gym_are_those_of_its_verifier",
        "rl/online/test_trainer.py::test_changed_settings_of_training_apply_and_are_printed_or_are_errors",
        "trainer/test_meshes.py::test_a_lost_process_ends_the_run_which_then_goes_on_to_the_same_bits",
        "engine/test_engine.py::test_gradient_checkpointing",
        "test_shapes.py::test_nothing_is_imported",
        "bench/test_gpu_check.py::test_the_command_passes_where_all_is_well",
        "cli/commands/test_grow.py::test_training_goes_on_with_the_grown_optimizer",
        "nn/attention/test_flex.py::test_fifty_random_trees_take_four_kernels",
        "cli/commands/test_rl.py::test_log_probs_come_from_where_they_are_said_to",
        "cli/commands/test_rl.py::test_the_reference_is_another_model_or_the_one_without_adapters",
        "cli/commands/test_train.py::test_a_finished_run_is_extended_and_the_schedule_goes_on",
        "integrations/trl/test_sft.py::test_evaluation_is_shared_too",
        "nn/recurrent/test_hybrids.py::test_adapters_on_mixers",
        "nn/recurrent/test_hybrids.py::test_states_may_wait_in_host_memory",
        "nn/recurrent/test_hybrids.py::test_layers_that_run_several_times",
        "report/html/test_browser.py::test_every_control_is_reached_by_the_tab_key",
        "report/html/test_browser.py::test_a_trajectory_outside_of_the_view_is_brought_into_it",
        "report/html/test_browser.py::test_a_screenshot_is_the_same_twice_and_another_after_folding",
        "report/html/test_browser.py::test_the_theme_follows_the_system_and_can_be_switched",
        "report/html/test_browser.py::test_zooming_by_wheel_button_and_key",
        "report/html/test_browser.py::test_keys_move_between_segments_in_the_order_of_the_tree",
        "report/html/test_browser.py::test_a_trajectory_lights_up_and_the_rest_fades",
        "nn/recurrent/test_hybrids.py::test_against_a_float64_oracle",
        "nn/recurrent/test_hybrids.py::test_compiled_layers",
        "nn/test_model.py::test_layers_compiled_in_place",
        "trainer/test_step.py::test_a_compiled_run_ends_like_one_without_and_resumes",
        "nn/test_compilation.py::test_no_tree_is_compiled_again_after_the_first",
        "nn/test_compilation.py::test_adapters_and_gradient_checkpointing",
        "nn/test_compilation.py::test_windows_experts_and_recurrent_layers",
        "nn/test_compilation.py::test_inductor",
        "rl/online/test_trainer.py::test_a_run_killed_at_random_moments_again_and_again",
        "trainer/test_checkpoints.py::test_every_optimizer_resumes_bit_for_bit",
        "trainer/test_idle_ranks.py::test_micro_batches_with_router_losses_alone_train_sharded",
        "trainer/test_hybrid_shards.py::test_four_processes_in_two_copies_train_like_one_which_goes_on_from_their_checkpoint",
        "trainer/test_ranks.py::test_a_run_resumed_after_the_fit_places_as_the_uninterrupted_one",
        "trainer/test_ranks.py::test_sharded_bfloat16_is_as_near_to_float32_as_bfloat16_of_one_process",
        "trainer/test_ranks.py::test_four_processes_go_on_where_two_stopped",
        "trainer/test_meshes.py::test_four_processes_train_like_one_and_resume",
        "trainer/test_ranks.py::test_four_processes_train_like_one",
        "trainer/test_torn.py::test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one",
        "tree/test_forest.py::test_100_000_leaves_of_one_fork",
        "tree/test_forest.py::test_100_000_short_trajectories",
    ),
}

# Parameters that `make test` runs of tests with many: one of each kind. The other parameters are exhaustive.
REPRESENTATIVES = {
    "trainer/test_ranks.py::test_two_processes_train_like_one": (
        "ddp",
        "sharded",
        "routers sharded",
    ),
    "objectives/test_preference.py::test_trees_equal_flat_training": ("kto",),
    "engine/test_vision.py::test_the_probe_computes_images": ("gemma3",),
    "planning/test_planner.py::test_plans_of_many_random_trees": ("0",),
    "verification/test_compare.py::test_other_objectives_pass": (
        "PolicyGradient2",
        "function",
    ),
    "verification/test_compare.py::test_a_right_engine_passes": (
        "None-dtype2",
        "10-dtype1",
    ),
    "grow/test_operators.py::test_an_operator_that_learned_nothing_keeps_the_function": (
        *(
            "mango-qwen3_moe-target2",
            "ligo-gpt_neox-target3",
        ),
    ),
    "rl/online/test_trainer.py::test_an_update_has_the_gradients_of_flat_training_of_the_recorded_rows": ("segments",),
    "integrations/trl/test_prefix_sharing.py::test_fields_and_gradients": (
        *(
            "plain-left-6",
            "plain-right-None",
            "tempered-right-6",
        ),
    ),
    "objectives/test_objectives.py::test_policy_gradients": (
        "reinforce masked",
        "gspo with all",
    ),
    "objectives/test_objectives_contract.py::test_cutting_rollouts_into_rows_changes_neither_loss_nor_gradient": (
        *(
            "grpo",
            "gspo with all",
            "turns",
        ),
    ),
    "objectives/test_objectives_contract.py::test_a_step_may_be_spread_over_calls": (
        *(
            "sft",
            "reinforce masked",
            "ppo dual, entropy",
            "grpo per rollout",
            "gspo",
            "cispo",
            "turns, cispo",
            "bucket",
        ),
    ),
    "integrations/trl/test_images.py::test_positions_and_images_of_qwen": ("12",),
    "nn/test_model.py::test_layers_that_count_rows_are_told_depths": ("auto",),
    "cli/commands/test_rl.py::test_a_rollout_counts_once_however_its_rows_are_cut": ("gspo",),
    "documents/test_pages.py::test_runnable_blocks_run": (
        *(
            "concepts.md",
            "README.md",
            "objectives.md",
            "training.md",
        ),
    ),
    "trainer/test_checkpoints.py::test_a_disk_that_refuses_is_a_clear_error_and_harms_nothing": ("full",),
    "examples/test_objectives.py::test_losses_fall": ("sft-3-3.46",),
    "nn/recurrent/test_hybrids.py::test_random_forests_at_random_budgets": ("nemotron_h",),
    "engine/test_profiling.py::test_flops_of_projections_and_head_are_those_of_the_model": ("whole",),
    "distributed/placement/test_split.py::test_gradients_of_all_ranks_add_up_to_those_of_one_process": (
        *("per_trajectory",),
    ),
    "rl/samplers/test_transformers_sampler.py::test_a_rollout_does_not_depend_on_its_batch": ("lfm2",),
    "rl/samplers/test_draw.py::test_frequencies_are_the_probabilities_of_what_is_kept": ("rule2",),
    "trainer/test_trainer.py::test_a_signal_saves_the_run_which_then_ends_like_an_undisturbed_one": ("backward-2",),
    "nn/attention/test_row_blocks.py::test_every_visible_pair_is_covered_once": (
        *(
            "(4096, 48, 256)",
            "(0, 1, 1)",
            "(16, 4, 7)",
        ),
    ),
    "nn/test_router_loss.py::test_tree_equals_one_flat_batch": (
        "mixtral",
        "gpt_oss",
    ),
    "nn/attention/test_flex.py::test_outputs_and_gradients_are_those_of_the_reference": (
        *(
            "softcap-no_sinks",
            "all-sinks",
        ),
    ),
    "engine/test_probe.py::test_mixtures_of_experts_pass_in_bfloat16": (
        "0",
        "3",
        "6",
    ),
    "rl/test_trl_rollouts.py::test_the_updates_are_those_of_trl_on_the_same_completions": ("entropy-None",),
    "integrations/trl/test_sft.py::test_routing_loss_of_a_mixture_of_experts": ("24",),
    "integrations/trl/test_sft.py::test_rows_without_padding": ("12",),
    "integrations/trl/test_rl.py::test_grpo_with_kl_to_the_model_without_its_adapter": ("False-20",),
    "integrations/trl/test_rl.py::test_kl_to_a_reference_model": ("GRPOTrainer-GRPOConfig",),
    "integrations/trl/test_rl.py::test_grpo_losses_over_several_updates_of_the_same_rollouts": ("dapo-20",),
    "integrations/trl/test_images.py::test_sft_on_screenshots": ("12",),
    "integrations/trl/test_sft.py::test_assistant_only_loss": ("lora-False-12",),
    "nn/vision/test_costs.py::test_predicted_flops_of_a_tower_are_those_that_are_counted": (
        "qwen2_5_vl",
        "llava",
    ),
    "engine/test_engine.py::test_adapters": ("head",),
    "trainer/test_images.py::test_a_step_is_that_of_flat_training": ("12",),
    "nn/recurrent/test_hybrids.py::test_every_hybrid_equals_flat_training": (
        "qwen3_next",
        "jamba",
    ),
    "nn/attention/test_cascade.py::test_float64_output_and_gradients_are_the_references": (
        *(
            "(4096, 48, 256)-both",
            "(24, 4, 9)-chunk",
            "(24, 4, 9)-cap",
        ),
    ),
    "engine/test_vision.py::test_images_that_attend_both_ways_in_every_implementation": (
        "reference",
        "cascade",
    ),
    "distributed/placement/test_image_costs.py::test_predicted_seconds_count_each_image_of_a_rank_once": (
        *(
            "1-1000",
            "2-None",
        ),
    ),
    "nn/attention/test_cascade.py::test_low_precision_is_within_twice_the_references_own_error": (
        "(4, 2, 8, 8)-whole-plain-bfloat16",
        "(4, 2, 8, 8)-whole-cap and window-float32",
        "(4, 2, 8, 8)-partitioned-both-bfloat16",
        "(4, 2, 8, 8)-partitioned-chunk-float32",
        "(4, 2, 8, 8)-partitioned-cap-bfloat16",
        "(4, 2, 6, 16)-whole-window-bfloat16",
        "(4, 2, 6, 16)-whole-cap-bfloat16",
        "(4, 2, 6, 16)-partitioned-plain-bfloat16",
        "(4, 2, 6, 16)-partitioned-cap and window-float32",
    ),
    "advantages/test_advantages.py::test_cutting_rollouts_into_rows_changes_nothing": (
        *("group", "siblings scaled", "turns"),
    ),
    "advantages/test_tree_credit.py::test_cutting_rollouts_into_rows_changes_nothing": (
        *("path mean whitened", "treerl local", "inter intra", "node value"),
    ),
    "advantages/test_tree_credit.py::test_equal_rewards_give_exactly_nothing": (
        *("tree_path_mean", "inter_intra", "value_steps"),
    ),
    "bench/test_contestants.py::test_all_contestants_have_the_flat_gradients": ("tau2",),
    "cli/commands/test_schema.py::test_mistakes_do_not": ("mistake1", "mistake4"),
    "distributed/placement/test_brute_force.py::test_small_steps_are_within_two_hundredths_of_the_best": (
        *("0-made", "1-real", "4-made", "6-real"),
    ),
    "distributed/placement/test_brute_force.py::test_steps_of_real_trees_are_even_and_predicted": (
        *("4096-16", "16384-4", "16384-32"),
    ),
    "distributed/placement/test_placement.py::test_steps_of_many_trees_are_even": ("8", "16"),
    "engine/test_engine.py::test_float64_is_exact_beyond_float32": ("None", "5"),
    "integrations/trl/test_rl.py::test_grpo_settings": (
        *("temperature", "steps_per_generation", "importance_sampling_level"),
    ),
    "integrations/trl/test_rl.py::test_grpo_ten_steps": ("20",),
    "integrations/trl/test_sft.py::test_settings": ("loss_type", "gradient_accumulation_steps"),
    "nn/attention/test_cascade.py::test_float64_on_large_trees": (
        *(
            "whole-plain",
            "two fifths-both",
            "two fifths-chunk",
            "a tenth-window",
            "a tenth-cap",
            "a tenth-cap and window",
        ),
    ),
    "nn/attention/test_row_blocks.py::test_large_random_trees_are_covered_once": ("None-None", "6-5"),
    "nn/recurrent/test_hybrids.py::test_bfloat16_deviates_no_more_than_flat_bfloat16": ("lfm2",),
    "objectives/test_objectives.py::test_distillation": ("bucket", "renormalize"),
    "objectives/test_objectives.py::test_float64": (
        *(
            "reinforce truncated",
            "ppo dual, entropy",
            "grpo k2, once",
            "gspo with all",
            "cispo",
            "turns with all",
            "renormalize",
        ),
    ),
    "objectives/test_preference.py::test_a_step_equals_the_formula_on_flat_logprobs": (
        *("dpo-9", "conservative-25", "hinge-None", "ipo-9", "kto-25", "kto zero-9"),
    ),
    "rl/online/test_trainer.py::test_a_signal_ends_a_run_that_can_be_resumed": ("update",),
    "trainer/checkpoint/test_background.py::test_files_are_those_of_a_save_that_training_waits_for": ("adapters",),
    "trainer/checkpoint/test_changed_settings.py::test_what_cannot_change_is_an_error_by_name": (
        *("optimizer", "schedule"),
    ),
    "trainer/test_checkpoints.py::test_a_damaged_checkpoint_is_named_and_an_earlier_one_is_taken": (
        *("unsealed", "flipped"),
    ),
    "trainer/test_checkpoints.py::test_models_that_are_saved_under_other_names_resume_bit_for_bit": ("mixtral",),
    "engine/test_engine.py::test_any_loss": ("None", "5"),
    "examples/test_objectives.py::test_rewards_rise": ("grpo-4",),
    "rl/online/test_trainer.py::test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one": ("reward",),
    "rl/online/test_trainer.py::test_any_objective_trains": ("gspo-changes2",),
    "trainer/test_checkpoints.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit": ("2-3",),
    "engine/test_engine.py::test_objective_settings_do_not_depend_on_packing": ("trajectory_mean-per_rollout",),
    "nn/attention/test_flex_kernels.py::test_kernels_give_outputs_and_gradients_of_the_reference": (
        *("whole", "all", "gateway", "broken"),
    ),
    "nn/recurrent/test_hybrids.py::test_gradient_checkpointing": ("jamba-True",),
    "nn/test_adapters.py::test_every_adapter_is_exact": ("LORA-lm_head", "IA3-lm_head", "VERA-lm_head", "LOKR-q_proj"),
    "nn/test_model.py::test_layers_from_before_the_attention_interface": ("gpt_neo-True",),
    "rl/online/test_practice.py::test_a_killed_run_draws_as_an_undisturbed_one": ("dynamic",),
    "test_cuda_pretend.py::test_the_host_waits_once_in_a_step": ("llama4_text",),
    "trainer/test_ranks.py::test_one_process_goes_on_where_two_stopped": ("sharded",),
    "trainer/test_ranks.py::test_a_signal_to_one_process_ends_and_saves_all": ("signalled-3",),
    "trainer/test_ranks.py::test_a_disk_that_refuses_one_process_harms_neither_the_run_nor_other_checkpoints": (
        "full sharded",
    ),
    "trainer/test_step.py::test_router_losses_belong_to_the_step_however_it_is_cut": ("gspo-14-4",),
    "trainer/test_steps.py::test_a_step_has_flat_loss_and_gradients_however_it_is_cut": (
        *("two accumulations", "small budget"),
    ),
    "trainer/test_steps.py::test_accumulation_changes_no_gradient_under_any_normalization": ("once",),
    "trainer/test_steps.py::test_an_epoch_trains_every_tree_once": ("2",),
    "trainer/test_steps.py::test_evaluation_is_the_token_mean_of_the_set_at_any_batch_size": ("3",),
    "trainer/test_torn.py::test_a_save_that_is_killed_at_any_call_leaves_the_old_state_or_the_new_one": ("replaced",),
    "verification/test_compare.py::test_every_form_of_sft_passes": (
        "trajectory_mean-once",
        "rollout_sum-per_trajectory",
    ),
}

# Files whose fixtures run processes or whole commands for all of their tests: with `--dist loadgroup`, one worker runs
# all tests of a file, so that they run once.
SHARED_FIXTURES = (
    *("bench/test_contestants.py", "bench/test_results.py", "cli/commands/test_rl.py", "cli/test_hostile.py"),
    *("distributed/test_context.py", "distributed/test_mesh.py", "nn/attention/test_flex_kernels.py"),
    *("cli/test_online_run.py", "report/html/test_browser.py", "rl/online/test_ranks.py", "rl/online/test_trainer.py"),
    *(
        "test_house.py",
        "test_wheel.py",
        "trainer/test_idle_ranks.py",
        "trainer/test_launchers.py",
        "trainer/test_ranks.py",
    ),
    "trainer/test_ranks_that_end.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the groups. pytest-xdist reads them before it calls the hook below."""
    below = _below(item.path)
    if below in SHARED_FIXTURES:
        item.add_marker(pytest.mark.xdist_group(below))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what the tables list; skips tests marked `gpu` where there is no CUDA device."""
    for item in items:
        name = _name_of(item)
        for marker in _markers_of(name):
            item.add_marker(marker)
        if name in REPRESENTATIVES and item.callspec.id not in REPRESENTATIVES[name]:
            item.add_marker("exhaustive")
    _check_representatives(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leaves what the imports made out of every later collection of garbage, of which each costs half a second."""
    gc.collect()
    gc.freeze()


def _name_of(item: pytest.Item) -> str:
    """The file below this folder, and the test without its parameters."""
    return f"{_below(item.path)}::{item.name.partition('[')[0]}"


@cache
def _below(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


@cache
def _markers_of(name: str) -> tuple[str, ...]:
    """The rows of `MARKED` that list a test, its file or a folder around it."""
    file = name.partition("::")[0]
    places = {name, file, *map(str, PurePosixPath(file).parents)}
    return tuple(marker for marker, listed in MARKED.items() if places.intersection(listed))


def _check_representatives(items: list[pytest.Item]) -> None:
    """Fails where the table lists parameters that a collected test has not."""
    parameters: dict[str, set[str]] = {}
    for item in items:
        name = _name_of(item)
        if name in REPRESENTATIVES:
            parameters.setdefault(name, set()).add(item.callspec.id)
    for name, there in parameters.items():
        missing = set(REPRESENTATIVES[name]) - there
        if missing and len(there) > 1:  # one alone was asked for by its name
            raise pytest.UsageError(f"{name} has no parameters {sorted(missing)}; it has {sorted(there)}")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - transformers draws from the global generator
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEWISE_CACHE", str(tmp_path_factory.mktemp("treewise_cache")))
        yield
