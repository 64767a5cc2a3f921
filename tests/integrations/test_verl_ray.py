"""verl's own trainer on Ray, on a CPU (`make verl`): `verl.trainer.main_ppo`, two updates on two ranks, as verl is,
with the line, and with the trainer mode.

Rollouts come from a server of `verl_scripted`, which answers the same in every run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.integrations import verl_runs

pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)
pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    tokens = solution_str.split()
    return sum(int(token[1:]) % 2 for token in tokens) / max(len(tokens), 1)
"""
SLOW_START = "The current node timed out during startup"  # Ray waits for 30 s, which nothing changes
RUNS = {
    "verl": (),
    "line": ("actor_rollout_ref.model.external_lib=treewise.integrations.verl",),
    "mode": ("trainer.v1.trainer_mode=treewise_sync",),
}


def save_inputs(folder):
    """A model, its tokenizer, eight prompts and a reward."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    verl_runs.save_model(folder / "model")
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(verl_runs.VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    prompts = [" ".join(f"t{token}" for token in rng.integers(3, verl_runs.VOCABULARY, 12)) for _ in range(8)]
    rows = [
        {
            "data_source": "parity",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)


def settings(folder):
    """Of all runs: four prompts with four answers a step, on two ranks that are FSDP2 on gloo."""
    prompts, actor, rollout, ref = (
        folder / "prompts.parquet",
        *(f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref")),
    )
    return [
        *(f"data.train_files={prompts}", f"data.val_files={prompts}", "data.train_batch_size=4", "data.shuffle=false"),
        *("data.max_prompt_length=32", "data.max_response_length=8", "data.dataloader_num_workers=0"),
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.model.use_fused_kernels=true",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        *(f"{actor}.strategy=fsdp2", f"{actor}.optim.lr=1e-4", f"{actor}.ppo_mini_batch_size=4"),
        *(f"{actor}.use_kl_loss=true", f"{actor}.entropy_coeff=0.01", f"{actor}.use_torch_compile=false"),
        *(f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu=48"),
        *(f"{rollout}.log_prob_max_token_len_per_gpu=48", f"{ref}.log_prob_max_token_len_per_gpu=48"),
        *(f"{role}.fsdp_config.model_dtype=fp32" for role in (actor, ref)),
        *(f"{role}.fsdp_config.use_torch_compile=false" for role in (actor, ref)),
        *(f"+{role}.fsdp_config.mixed_precision.param_dtype=fp32" for role in (actor, ref)),
        *(f"{rollout}.name=scripted", f"{rollout}.n=4", f"{rollout}.tensor_model_parallel_size=1"),
        *(f"{rollout}.prompt_length=32", f"{rollout}.response_length=8", f"{rollout}.calculate_log_probs=false"),
        *(f"{rollout}.agent.num_workers=1", "reward.num_workers=1"),
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        *("algorithm.adv_estimator=grpo", "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.nnodes=1"),
        *("trainer.total_training_steps=2", "trainer.total_epochs=9", "trainer.val_before_train=false"),
        *("trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume_mode=disable", "trainer.logger=[file]"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        *("ray_kwargs.ray_init.num_cpus=32", "+ray_kwargs.ray_init.num_gpus=2"),  # slots, not devices
        "+ray_kwargs.ray_init.include_dashboard=false",
    ]


def run(folder, name):
    """The metrics of both steps, the weights before and after them, and what each rank's engines computed on trees."""
    found = folder / name
    found.mkdir()
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the only name under which verl registers its FSDP engines
        "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl_scripted",
        "VERL_FILE_LOGGER_PATH": str(found / "metrics.jsonl"),
        "SCRIPTED_FOLDER": str(found),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "RAY_worker_niceness": "0",  # 15 by default: beside other work its workers do not get to their first line
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *settings(folder), *RUNS[name]]
    for _ in range(3):
        with (found / "log").open("w") as log:
            done = subprocess.run(
                command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, timeout=1200
            )
        if SLOW_START not in (found / "log").read_text():
            break
    assert done.returncode == 0, (found / "log").read_text()[-3000:]
    lines = [json.loads(line)["data"] for line in (found / "metrics.jsonl").read_text().splitlines()]
    weights = [torch.load(found / f"weights-{step}.pt") for step in range(3)]
    return lines, weights, [json.loads((found / f"counts-2-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    save_inputs(folder)
    return {name: run(folder, name) for name in RUNS}


@pytest.mark.parametrize("name", ["line", "mode"])
def test_two_updates_are_those_of_verl(runs, name):
    (own, own_weights, none), (lines, weights, counts) = runs["verl"], runs[name]
    assert none == [[], []]
    assert len(own) == len(lines) == 2
    for expected, found in zip(own, lines, strict=True):
        for key in (key for key in expected if key.startswith(("actor/", "critic/")) and "/perf/" not in key):
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key
    torch.testing.assert_close(weights, own_weights, rtol=0, atol=1e-5)
    moved = max((weights[2][name] - before).abs().max() for name, before in weights[0].items())
    assert moved > 1e-4
    assert all(engine["num_calls"] for rank in counts for engine in rank)  # actor and reference


def test_the_mode_keeps_groups_on_ranks(runs):
    lines, _, counts = runs["mode"]
    assert [line["treewise/cut_groups"] for line in lines] == [0, 0]
    for engine in (engine for rank in counts for engine in rank):
        assert engine["left"] == {}
        assert engine["num_flat_tokens"] > 2.5 * engine["num_tree_tokens"]
