"""What a user's first day runs, on whatever versions are installed: `make versions` runs it on all that we admit.

Each test is one thing that a user does, with the right value in it where there is one. What a missing package or a
version lacks is skipped by name, or one sentence of ours.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM

import treewise as tw
from tests import needs
from tests.integrations.trl.helpers import model_for_trl, settings, tiny_tokenizer
from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.cli.main import main
from treewise.distributed.mesh import check_mesh_sizes
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.tensor_parallel import require_meshes
from treewise.testing import assert_equals_flat, tiny_model
from treewise.tree.images import ImageSpan

PROMPT = list(range(10, 40))
ANSWERS = [([50, 51, 52], 1.0), ([50, 51, 60], 0.0), ([70, 71], 0.0), ([70, 72, 73, 74], 1.0)]
ROWS = [
    {"token_ids": PROMPT + answer, "loss_weights": [0] * 30 + [1] * len(answer), "reward": reward, "group": "task-1"}
    for answer, reward in ANSWERS
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user stands: a model and rollouts."""
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen3", vocab_size=128).save_pretrained("my-model")
    Path("rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def run_command(*arguments: object) -> None:
    assert main([str(each) for each in arguments]) == 0


def trees() -> list[list[tw.Trajectory]]:
    """Ten trees of two answers each."""
    return [[tw.Trajectory([tree, *range(20, 30), tree + answer]) for answer in (3, 40)] for tree in range(1, 11)]


def trainer_in(output: Path, model: torch.nn.Module, **changes: object) -> tw.TreeTrainer:
    chosen = {"max_tokens": 16, "max_steps": 5, "learning_rate": 1e-2, "save_strategy": "no", **changes}
    args = tw.TreeTrainingArguments(output_dir=str(output), report_to="none", use_cpu=True, disable_tqdm=True, **chosen)
    return tw.TreeTrainer(model, args, train_dataset=trees())


# Dense, with experts, with windows, with sinks, and with states.
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_a_step_is_that_of_flat_training(family: str) -> None:
    items = [tw.Trajectory(**row) for row in ROWS]
    assert_equals_flat(tiny_model(family, vocab_size=128), items, max_tokens=[None, 16])
    forest = tw.Forest.from_trajectories(items)
    assert (forest.num_flat_tokens, forest.num_tokens) == (132, 39)


def test_five_steps_and_a_run_that_goes_on(tmp_path: Path) -> None:
    whole = trainer_in(tmp_path / "whole", tiny_model("qwen3"), save_strategy="steps", save_steps=3)
    whole.train()
    assert whole.state.global_step == 5
    resumed = trainer_in(tmp_path / "resumed", tiny_model("qwen3", seed=1), save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-5")
    ids = torch.tensor([[1, 20, 21]])
    assert torch.equal(loaded(ids).logits, whole.model.eval()(ids).logits)


@needs.packages("peft")
def test_adapters(tmp_path: Path) -> None:
    import peft

    base = tiny_model("qwen3")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert_equals_flat(adapted, trees()[0], max_tokens=[None, 8])
    trainer = trainer_in(tmp_path / "run", adapted, save_strategy="steps", save_steps=5)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-5"
    again = peft.PeftModel.from_pretrained(tiny_model("qwen3"), folder)
    ids = torch.tensor([[1, 20, 21]])
    assert torch.equal(again(ids).logits, adapted.eval()(ids).logits)


@needs.packages("peft")
def test_the_example_of_a_configuration_with_adapters(folder: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "configs" / "lora.yaml"
    run_command(
        "train", example, "--model", "./my-model", "--data", "rollouts.jsonl", "--output_dir", "runs/lora",
        "--eval_data", "rollouts.jsonl", "--dtype", "float32", "--use_cpu", "--report_to", "none", "--max_steps", 2,
    )  # fmt: skip
    assert (folder / "runs" / "lora" / "adapter_model.safetensors").is_file()


@needs.packages("trl", "datasets")
@needs.LOSS_OF_TRL
def test_one_line_in_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    asked = [{"role": "user", "content": "w1 w2 w3"}]
    turns = [[*asked, {"role": "assistant", "content": f"w{number}"}] for number in range(12)]

    def trained(share: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        args, rows = SFTConfig(**settings(tmp_path)), Dataset.from_dict({"messages": turns})
        trainer = SFTTrainer(model_for_trl(), args, train_dataset=rows, processing_class=tiny_tokenizer())
        sharing = tw.share_prefixes(trainer.model) if share else None
        trainer.train()
        assert sharing is None or sharing.counts.num_calls > 0
        return trainer.model

    for ours, theirs in zip(trained(share=True).parameters(), trained(share=False).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_commands_on_a_file_of_rollouts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts, model = ("rollouts.jsonl", "--model"), "./my-model"
    run_command("inspect", *rollouts, model, "--html", "report.html")
    assert "Worth it against one row per call (3.3 times by FLOPs)" in capsys.readouterr().out
    assert "<script" in Path("report.html").read_text()
    run_command("plan", *rollouts, model, "--max_tokens", 16, "--gpu_memory", "80GiB")
    run_command("verify", *rollouts, model)
    run_command("profile", *rollouts, model, "--device", "cpu")
    run_command("models", "qwen3")


def test_an_update_on_a_file_of_rollouts(folder: Path) -> None:
    run_command(
        "rl", "--data", "rollouts.jsonl", "--model", "./my-model", "--objective", "grpo", "--output", "runs/step-1",
        "--use_cpu", "true", "--report_to", "none",
    )  # fmt: skip
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in ("my-model", "runs/step-1"))
    assert any(not torch.equal(one, two) for one, two in zip(before.parameters(), after.parameters(), strict=True))
    run_command("inspect", "--run", "runs/step-1", "--html", "run.html")


def test_an_online_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_policy().save_pretrained("policy")
    TOKENIZER.save_pretrained("policy")
    run_command(
        "rl", "--tasks", "sum", "--model", "policy", "--output", "out", "--use_cpu", "true", "--report_to", "none",
        "--chat_template", "chatml", "--iterations", 2, "--trees_per_iteration", 2, "--tokens_per_iteration", 32,
        "--max_new_tokens", 6, "--eval_items", 1, "--max_tokens", 64,
    )  # fmt: skip
    assert (tmp_path / "out" / "rollouts" / "iteration-00002.jsonl").is_file()


@needs.packages("tinker", "starlette", "uvicorn", "orjson", "peft")
def test_a_server_and_the_official_client(folder: Path) -> None:
    import tinker
    from tinker import types

    command = [sys.executable, "-u", "-m", "treewise", "serve", "--model", "./my-model", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            printed: list[str] = []
            for line in server.stdout:
                printed.append(line)
                if "running on http" in line:
                    break
            url = next((word for word in printed[-1].split() if word.startswith("http")), None)
            assert url is not None, "".join(printed)
            client = tinker.ServiceClient(base_url=url, api_key="tml-first-day")
            run = client.create_lora_training_client(base_model="./my-model", rank=4, seed=0).result()
            ids = [*PROMPT, 50, 51]
            inputs = {"target_tokens": np.asarray(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)}
            datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
            losses = []
            for _ in range(3):
                out = run.forward_backward([datum], "cross_entropy")
                run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
                losses.append(-float(out.result().loss_fn_outputs[0]["logprobs"].to_numpy().mean()))
            assert losses[0] > losses[1] > losses[2]
            sampler = run.save_weights_and_get_sampling_client().result()
            asked = types.SamplingParams(max_tokens=4, seed=3)
            sampled = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, asked).result()
            assert [len(each.tokens) for each in sampled.sequences] == [4, 4]
            client.close("success").result()
        finally:
            os.kill(server.pid, signal.SIGTERM)
            server.stdout.read()


def test_meshes_where_transformers_has_them() -> None:
    try:
        require_meshes()
    except ConfigError as error:
        assert "transformers>=5.23" in str(error)  # noqa: PT017
        with pytest.raises(ConfigError, match=r"transformers>=5\.23"):
            check_mesh_sizes(2, 1, 2)
    else:
        check_mesh_sizes(2, 1, 2)


@needs.packages("PIL")
def test_images_where_transformers_has_them() -> None:
    from tests.image_models import FAMILIES, IMAGE_TOKEN, png
    from tests.nn.vision.test_forest_images import HISTORIES, trajectories

    model, images = tiny_model("llava", image_token_id=IMAGE_TOKEN), FAMILIES["llava"].images()
    if Version("5.18") <= needs.RELEASE:
        items = trajectories(model, images, HISTORIES[:3])
        assert tw.TreeEngine(model, 12, processor=images).step(items).loss > 0
    else:
        item = tw.Trajectory([1, *[IMAGE_TOKEN] * 4, 2], images=[ImageSpan(png(1), 1, 5)])
        with pytest.raises(UnsupportedModelError, match=r"transformers before 5\.18"):
            tw.TreeEngine(model, 12, processor=images).step([item])
