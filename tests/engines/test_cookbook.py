"""Recipes of tinker-cookbook, unchanged but for flags, against a server: `make serve-recipes`, which installs it.

The model is a random Llama of two layers with SmolLM2's tokenizer; RECIPES_MODEL=smollm2-demo takes SmolLM2. Data sets
and the tokenizer are folders of the names that recipes ask the Hub for.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.serve.servers import KEY, running
from treewise.models.load_model import load_tokenizer, load_weights

pytest.importorskip("tinker_cookbook", reason="needs tinker-cookbook: make serve-recipes")
pytestmark = pytest.mark.engines

NAME = "Qwen/Qwen3-8B"  # for which the cookbook has a chat format
MODEL = os.environ.get("RECIPES_MODEL", "tiny")
RECIPES = {
    "sl_loop": "batch_size=4 max_steps=3 learning_rate=1e-3 save_every=2",
    "rl_loop": "batch_size=2 group_size=4 max_steps=2 max_tokens=16 loss_fn=importance_sampling",
    "sl_basic": "max_steps=2 eval_every=2",
    "rl_basic": "max_steps=1 max_tokens=4",  # 2,048 samples
    "preference.dpo.train": "batch_size=4 max_steps=3",
    "distillation.on_policy_distillation": f"teacher_model={NAME} lora_rank=16 groups_per_batch=2 group_size=2 "
    "max_tokens=16 max_steps=2",
}
REWARDED = ("rl_loop", "rl_basic")  # no answer of a model that knows nothing earns a reward, so there is no step
QUESTIONS = [(f"What is {a} plus {b}?", a + b) for a in range(17) for b in range(17)]


def write_data(folder):
    """Rows as JSONL, by the names of the data sets."""
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {answer}."}]}
        for text, answer in QUESTIONS
    ]
    pairs = [
        {key: f"\n\nHuman: {text}\n\nAssistant: {answer + more}" for key, more in (("chosen", 0), ("rejected", 1))}
        for text, answer in QUESTIONS
    ]
    sums = [{"question": text, "answer": f"We add.\n#### {answer}"} for text, answer in QUESTIONS]
    rows = {
        "HuggingFaceH4/no_robots": chats,
        "openai/gsm8k": sums,
        "Anthropic/hh-rlhf": pairs,
        "zwhe99/DeepMath-103K": sums,
    }
    for name, own in rows.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
    configs = json.dumps([{"config_name": "main", "data_files": files}])
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    load_tokenizer("smollm2-demo").save_pretrained(folder / NAME)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Where a server listens, and the folder in which recipes run."""
    folder, tokenizer = tmp_path_factory.mktemp("recipes"), load_tokenizer("smollm2-demo")
    write_data(folder)
    if MODEL == "tiny":
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **sizes))
    else:
        model = load_weights(MODEL)
    with running(folder / "served", model, tokenizer, name=NAME, max_tokens="auto") as address:
        yield address, folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_unchanged(recipe, served):
    """To its end: samples, or as many optimizer steps as it was asked for, on data that share their prefixes."""
    address, folder = served
    before = address.ask("/api/v1/status")[1]
    own = {"TINKER_BASE_URL": address.url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    flags = [f"model_name={NAME}", f"log_path=log-{recipe}", *RECIPES[recipe].split()]
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *flags]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    after = address.ask("/api/v1/status")[1]
    if recipe in REWARDED:
        assert after["sampled_tokens"] > before["sampled_tokens"]
        return
    (curve,) = (points for name, points in after["curves"].items() if name not in before["curves"])
    assert len(curve) == int(RECIPES[recipe].split("max_steps=")[1].split()[0])
    assert all(flat > tree for _, _, flat, tree, _, _ in curve)
