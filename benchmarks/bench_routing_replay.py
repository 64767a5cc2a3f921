"""Routing replay: a mixture that samples in bfloat16 and trains in float32, with the sampler's experts and without.

The policy is a Qwen3-MoE shape of 4 layers with 16 experts, 4 of them chosen, whose routers are far from even. It
practises to write the letters of its prompt (GRPO, four updates for each iteration, with the sampler's log-probs as
the old ones and no correction). Both runs of a seed start from the same weights and are given the same tasks.

    python benchmarks/bench_routing_replay.py [--seeds 3] [--iterations 12]
"""

import argparse
import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from tiny_policy import LETTERS, new_tokenizer

from treewise import testing
from treewise.nn.model import split_model
from treewise.nn.routing import routers_of
from treewise.rl.online import OnlineSettings, OnlineTrainer
from treewise.rl.samplers import SampleRequest, TransformersSampler
from treewise.rl.tasks import TaskItem
from treewise.trainer import TreeTrainingArguments

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@dataclass
class Copy:
    """The share of the sampled letters that are among the prompt's."""

    tokenizer: Any
    name: str = "copy"

    def num_items(self, split: str) -> None:
        """No end."""

    def item(self, split: str, index: int) -> TaskItem:
        """Three letters."""
        rng = np.random.default_rng([index, split == "train"])
        text = "".join(rng.choice(list(LETTERS[10:18]), 3))
        return TaskItem(f"{split}/{index}", ({"role": "user", "content": text},), {"text": text})

    def rewards(self, requests: Any) -> list[float]:
        """From 0 to 1."""
        found = []
        for request in requests:
            found.append(sum(letter in request.item.extra["text"] for letter in request.text) / 4)
        return found


class LowerPrecision:
    """A sampler with a copy of the weights in bfloat16."""

    def __init__(self, model: Any) -> None:
        self._own = TransformersSampler(copy.deepcopy(model).to(torch.bfloat16))

    def sample(self, requests: list[SampleRequest]) -> Any:
        """See `Sampler`."""
        return self._own.sample(requests)

    def update(self, model: Any) -> None:
        """Rounds the present weights."""
        self._own.model.load_state_dict(model.state_dict())

    def close(self) -> None:
        """Nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    args = parser.parse_args()
    rows = []
    for seed in range(args.seeds):
        for replay in ("off", "exact"):
            rows.append({"seed": seed, "routing_replay": replay, **run(seed, replay, args.iterations)})
            print(rows[-1], flush=True)
    print("written to", save("routing-replay", rows))


def policy(tokenizer: Any, seed: int) -> Any:
    """The mixture, with routers that prefer some experts by far, as trained ones do."""
    model = testing.tiny_model(
        "qwen3_moe",
        seed=seed,
        **{"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "hidden_size": 64, "head_dim": 16},
        **{"num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
        max_position_embeddings=64,
    )
    for router in routers_of(split_model(model).decoder):
        torch.nn.init.normal_(router.module.weight, std=0.3)
    for name, each in model.named_parameters():
        if "experts" in name or "lm_head" in name:
            torch.nn.init.normal_(each, std=0.3)
    return model


def run(seed: int, replay: str, iterations: int) -> dict[str, Any]:
    """Rewards, the gap of log-probs to the sampler, and the tokens that were routed otherwise, by iteration."""
    tokenizer = new_tokenizer()
    model = policy(tokenizer, seed)
    settings = OnlineSettings(
        **{"iterations": iterations, "trees_per_iteration": 8, "tokens_per_iteration": 256, "max_new_tokens": 4},
        **{"mini_batches": 2, "update_epochs": 2, "old_logprobs": "sampler", "eval_every": 0, "show_every": 0},
        **{"save_every": iterations, "chat_template": TEMPLATE, "routing_replay": replay, "logprob_gap_limit": 1e9},
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TreeTrainingArguments(
            **{"output_dir": str(Path(folder) / "run"), "learning_rate": 1e-3, "lr_scheduler_type": "constant"},
            **{"use_cpu": True, "disable_tqdm": True, "report_to": "none", "seed": seed},
        )
        trainer = OnlineTrainer(
            model, Copy(tokenizer), tokenizer, settings, arguments, objective="grpo", sampler=LowerPrecision(model)
        )
        trainer.train()
        logs = [each for each in trainer.state.log_history if "iteration" in each]
    names = (
        "reward",
        "live_gap",
        "replayed_gap",
        "routed_otherwise",
        "choices_otherwise",
        "clip_fraction",
        "approx_kl",
    )
    return {name: [round(each[name], 5) for each in logs] for name in names if name in logs[0]}


if __name__ == "__main__":
    main()
