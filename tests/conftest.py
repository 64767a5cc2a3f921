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
    "ci", deadline=None, derandomize=True, max_examples=10, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=3)
settings.register_profile("all", parent=settings.get_profile("ci"), max_examples=50)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Markers of folders, files and tests (`file::test`) below tests/, by measured time.
MARKED = {
    "slow": (
        "engine/test_engine.py::test_random_forests_at_random_budgets",
        "engine/test_engine.py::test_gradient_checkpointing",
        "engine/test_engine.py::test_any_loss",
        "engine/test_engine.py::test_adapters",
        "engine/test_engine.py::test_objective_settings_do_not_depend_on_packing",
    ),
    "exhaustive": (
        *("bench/test_results.py", "rl/online/test_ranks.py"),
        *("integrations/trl/test_meshes.py", "integrations/trl/test_preferences.py"),
        *("trainer/test_idle_ranks.py", "trainer/test_launchers.py", "trainer/test_ranks_that_end.py"),
        "cli/commands/test_bench.py::test_a_run_is_printed_written_and_checked",
        "cli/commands/test_train.py::test_a_closed_pipe_does_not_end_training",
        "distributed/test_context.py::test_more_families_on_two_processes",
        "distributed/test_context.py::test_four_processes_give_what_one_gives",
        "distributed/test_mesh.py::test_more_families_on_a_mesh_of_two",
        "distributed/test_mesh.py::test_more_meshes_of_four",
        "distributed/test_mesh.py::test_four_processes_give_what_one_gives",
        "examples/test_examples.py::test_the_notebook_of_the_walkthrough_runs_and_learns",
        "engine/test_vision.py::test_every_family_trains_as_flat",
        "grow/test_families.py::test_logits_stay_where_one_size_grows",
        "grow/test_families.py::test_odd_configurations_keep_logits",
        "nn/recurrent/test_hybrids.py::test_against_a_float64_oracle",
        "nn/recurrent/test_hybrids.py::test_compiled_layers",
        "nn/test_model.py::test_layers_compiled_in_place",
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
    "engine/test_engine.py::test_adapters": ("dora", "head"),
    "engine/test_engine.py::test_any_loss": ("None", "5"),
    "engine/test_engine.py::test_gradient_checkpointing": ("True",),
    "examples/test_objectives.py::test_rewards_rise": ("grpo-4", "ppo_critic-8"),
    "nn/attention/test_cascade.py::test_float64_output_and_gradients_are_the_references": (
        *(
            "(4096, 48, 256)-both",
            "(0, 1, 16)-cap and window",
            "(24, 4, 9)-plain",
            "(24, 4, 9)-chunk",
            "(24, 4, 9)-cap",
        ),
    ),
    "rl/online/test_trainer.py::test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one": (
        *("reward", "after an update, before its checkpoint", "files of a checkpoint are written"),
    ),
    "rl/online/test_trainer.py::test_any_objective_trains": ("gspo-changes2",),
    "trainer/test_checkpoints.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit": ("1-4", "2-3"),
    "trainer/test_meshes.py::test_two_processes_train_like_one_and_resume": ("tensor", "experts"),
    "engine/test_engine.py::test_objective_settings_do_not_depend_on_packing": (
        *("token_mean-per_trajectory", "trajectory_mean-per_rollout", "constant-once"),
    ),
    "integrations/trl/test_rl.py::test_grpo_losses_over_several_updates_of_the_same_rollouts": (
        *("dapo-20", "luspo-None", "vespo-20"),
    ),
    "integrations/trl/test_rl.py::test_rloo_ten_steps": ("20",),
    "nn/attention/test_flex_kernels.py::test_kernels_give_outputs_and_gradients_of_the_reference": (
        *("whole", "all", "gateway", "broken"),
    ),
    "nn/recurrent/test_hybrids.py::test_every_hybrid_equals_flat_training": (
        *("lfm2", "qwen3_next", "nemotron_h", "jamba", "minimax", "recurrent_gemma"),
    ),
    "nn/recurrent/test_hybrids.py::test_gradient_checkpointing": ("qwen3_5_text-False", "jamba-True"),
    "nn/test_adapters.py::test_every_adapter_is_exact": (
        *("LORA-lm_head", "LORA-q_proj", "IA3-lm_head", "OFT-lm_head", "VERA-lm_head", "SHIRA-lm_head", "LOKR-q_proj"),
    ),
    "nn/test_model.py::test_layers_from_before_the_attention_interface": ("gpt_neo-True",),
    "nn/test_router_loss.py::test_tree_equals_one_flat_batch": (
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "jamba",
        "granitemoe",
    ),
    "objectives/test_objectives.py::test_policy_gradients": (
        *("reinforce masked", "ppo dual, entropy", "grpo per rollout", "gspo with all", "cispo", "turns with all"),
    ),
    "rl/online/test_practice.py::test_a_killed_run_draws_as_an_undisturbed_one": (
        *("dynamic", "vcrl", "speed", "gain_x_learnability"),
    ),
    "test_cuda_pretend.py::test_the_host_waits_once_in_a_step": ("llama4_text",),
    "trainer/test_meshes.py::test_a_process_that_dies_ends_the_run": ("context",),
    "trainer/test_ranks.py::test_two_processes_train_like_one": (*("ddp", "sharded", "adapters", "routers sharded"),),
    "trainer/test_ranks.py::test_one_process_goes_on_where_two_stopped": ("sharded", "adapters"),
    "trainer/test_ranks.py::test_a_signal_to_one_process_ends_and_saves_all": ("signalled-3",),
    "trainer/test_ranks.py::test_a_disk_that_refuses_one_process_harms_neither_the_run_nor_other_checkpoints": (
        "full sharded",
    ),
    "trainer/test_ranks.py::test_measured_costs_are_fitted_the_same_on_all_ranks_and_change_no_step": (
        "measured sharded",
    ),
    "trainer/test_step.py::test_router_losses_belong_to_the_step_however_it_is_cut": ("sft-14-2", "gspo-14-4"),
    "trainer/test_steps.py::test_a_step_has_flat_loss_and_gradients_however_it_is_cut": (
        *("two accumulations", "small budget"),
    ),
    "trainer/test_steps.py::test_accumulation_changes_no_gradient_under_any_normalization": ("once",),
    "trainer/test_steps.py::test_an_epoch_trains_every_tree_once": ("2",),
    "trainer/test_steps.py::test_evaluation_is_the_token_mean_of_the_set_at_any_batch_size": ("3",),
    "trainer/test_torn.py::test_a_save_that_is_killed_at_any_call_leaves_the_old_state_or_the_new_one": ("replaced",),
    "trainer/test_trainer.py::test_a_signal_saves_the_run_which_then_ends_like_an_undisturbed_one": (
        *("begin-15", "backward-2", "save-15", "optimizer-2"),
    ),
    "verification/test_compare.py::test_every_form_of_sft_passes": (
        "trajectory_mean-once",
        "rollout_sum-per_trajectory",
    ),
    "verification/test_compare.py::test_other_objectives_pass": ("PolicyGradient2", "Distillation0", "function"),
}

# Files whose fixtures run processes or whole commands for all of their tests: with `--dist loadgroup`, one worker runs
# all tests of a file, so that they run once.
SHARED_FIXTURES = (
    *("bench/test_contestants.py", "bench/test_results.py", "cli/commands/test_rl.py", "cli/test_hostile.py"),
    *("distributed/test_context.py", "distributed/test_mesh.py", "nn/attention/test_flex_kernels.py"),
    *("cli/test_online_run.py", "report/html/test_browser.py", "rl/online/test_ranks.py", "rl/online/test_trainer.py"),
    *("test_wheel.py", "trainer/test_idle_ranks.py", "trainer/test_launchers.py", "trainer/test_ranks.py"),
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
