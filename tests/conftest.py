"""What every test shares: one thread, fixed seeds, no network, its own cache, checked shapes, markers by folder."""

import gc
import os
import random
import sys
from pathlib import Path

# Before torch and transformers are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # models of the tests are tiny: more threads only wait for one another

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from treewise.testing import shape_checks

shape_checks.install("treewise.nn", "treewise.engine", "treewise.objectives")

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=15, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=3)
settings.register_profile("all", parent=settings.get_profile("ci"), max_examples=50)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Markers of folders, files and tests (`file::test`) below tests/, by measured time; `make quick` leaves all out.
MARKED = {
    "slow": (
        *("bench", "integrations", "nn/recurrent", "report/html", "nn/test_router_loss.py", "nn/test_support_table.py"),
        *("documents/test_errors.py", "documents/test_pages.py", "examples/test_examples.py"),
        *("examples/test_objectives.py", "rl", "grow", "test_cuda_pretend.py", "test_wheel.py"),
        *("engine/test_differentiable.py", "engine/test_lockstep.py", "distributed/placement/test_brute_force.py"),
        "data/test_declared_nodes.py::test_a_chain_of_20000_nodes_does_not_recurse",
        "distributed/placement/test_placement.py::test_steps_of_many_trees_are_even",
        "engine/test_engine.py::test_random_forests_at_random_budgets",
        "engine/test_engine.py::test_gradient_checkpointing",
        "engine/test_engine.py::test_any_loss",
        "engine/test_engine.py::test_adapters",
        "engine/test_engine.py::test_objective_settings_do_not_depend_on_packing",
        "nn/attention/test_cascade.py::test_float64_output_and_gradients_are_the_references",
        "nn/test_model.py::test_a_compiled_model_is_trained_through_the_model_inside",
        "nn/test_model.py::test_layers_from_before_the_attention_interface",
    ),
    "cli": ("cli",),
    "exhaustive": (
        *("bench/test_results.py", "integrations/trl/test_preferences.py", "rl/online/test_ranks.py"),
        *("trainer/test_ranks_that_end.py",),
        "cli/commands/test_bench.py::test_a_run_is_printed_written_and_checked",
        "cli/commands/test_train.py::test_a_closed_pipe_does_not_end_training",
        "distributed/test_mesh.py::test_more_families_on_a_mesh_of_two",
        "engine/test_vision.py::test_every_family_trains_as_flat",
        "grow/test_families.py::test_logits_stay_where_one_size_grows",
        "grow/test_families.py::test_odd_configurations_keep_logits",
        "nn/recurrent/test_hybrids.py::test_against_a_float64_oracle",
        "nn/recurrent/test_hybrids.py::test_compiled_layers",
        "rl/online/test_trainer.py::test_a_run_killed_at_random_moments_again_and_again",
        "trainer/test_checkpoints.py::test_every_optimizer_resumes_bit_for_bit",
        "trainer/test_idle_ranks.py::test_micro_batches_with_router_losses_alone_train_sharded",
        "trainer/test_ranks.py::test_four_processes_go_on_where_two_stopped",
        "trainer/test_ranks.py::test_four_processes_train_like_one",
        "trainer/test_torn.py::test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one",
        "tree/test_forest.py::test_100_000_leaves_of_one_fork",
        "tree/test_forest.py::test_100_000_short_trajectories",
    ),
    "processes": ("trainer", "distributed/test_mesh.py", "distributed/test_watchdog.py", "distributed/test_signals.py"),
}

# Parameters that `make test` runs of tests with many: one of each kind. The other parameters are exhaustive.
REPRESENTATIVES = {
    "engine/test_engine.py::test_objective_settings_do_not_depend_on_packing": (
        *("token_mean-per_trajectory", "trajectory_mean-per_rollout", "constant-once"),
    ),
    "integrations/trl/test_rl.py::test_grpo_losses_over_several_updates_of_the_same_rollouts": (
        *("dapo-20", "luspo-None", "vespo-20"),
    ),
    "integrations/trl/test_rl.py::test_rloo_ten_steps": ("20",),
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
    "trainer/test_launchers.py::test_accelerate_launches_processes_that_train_like_one": ("--use_fsdp",),
    "trainer/test_step.py::test_router_losses_belong_to_the_step_however_it_is_cut": ("sft-14-2", "gspo-14-4"),
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
    "distributed/test_mesh.py",
    *("cli/test_online_run.py", "report/html/test_browser.py", "rl/online/test_ranks.py", "rl/online/test_trainer.py"),
    *("test_wheel.py", "trainer/test_idle_ranks.py", "trainer/test_launchers.py", "trainer/test_ranks.py"),
    "trainer/test_ranks_that_end.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the groups. pytest-xdist reads them before it calls the hook below."""
    below = item.path.relative_to(Path(__file__).parent).as_posix()
    if below in SHARED_FIXTURES:
        item.add_marker(pytest.mark.xdist_group(below))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what the tables list; skips tests marked `gpu` where there is no CUDA device."""
    for item in items:
        below = item.path.relative_to(Path(__file__).parent)
        name = f"{below.as_posix()}::{item.name.partition('[')[0]}"
        for marker, listed in MARKED.items():
            if name in listed or any(below.is_relative_to(path) for path in listed):
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


def _check_representatives(items: list[pytest.Item]) -> None:
    """Fails where the table lists parameters that a collected test has not."""
    parameters: dict[str, set[str]] = {}
    for item in items:
        below = item.path.relative_to(Path(__file__).parent)
        name = f"{below.as_posix()}::{item.name.partition('[')[0]}"
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
