"""Recipes of tinker-cookbook, unchanged but for flags."""

import json
import subprocess
import sys
from pathlib import Path

NAME = "Qwen/Qwen3-8B"
FLAGS = {
    "sl_loop": "batch_size=4 max_steps={steps} learning_rate=1e-3 save_every=2",
    "rl_loop": "batch_size=2 group_size=4 max_steps=2 max_tokens=16 loss_fn=importance_sampling",
    "sl_basic": "max_steps={steps} eval_every=2",
    "preference.dpo.train": "batch_size=4 max_steps={steps}",
    "distillation.on_policy_distillation": f"teacher_model={NAME} lora_rank=16 groups_per_batch=2 group_size=2 "
    "max_tokens=16 max_steps={steps}",
}
TAUGHT = 2  # steps of `sl_loop`, after which a teacher differs from the student that it teaches


def run(recipe: str, steps: int) -> None:
    flags = [f"model_name={NAME}", f"log_path=log-{recipe}", *FLAGS[recipe].split()]
    if recipe.startswith("distillation"):
        run("sl_loop", TAUGHT)
        steps -= TAUGHT
        saved = Path("log-sl_loop", "checkpoints.jsonl").read_text().splitlines()
        flags.append(f"teacher_checkpoint={json.loads(saved[-1])['sampler_path']}")
    flags = [flag.format(steps=steps) for flag in flags]
    subprocess.run([sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *flags], check=True)
