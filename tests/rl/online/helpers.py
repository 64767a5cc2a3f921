"""A small model, a byte tokenizer and a task whose reward a random model gets now and then."""

import hashlib
import json
from dataclasses import dataclass

import pytest
import torch

from tests.rl.tasks.test_episode import byte_tokenizer
from treewise import testing
from treewise.rl.online import OnlineSettings, OnlineTrainer
from treewise.rl.online.records import rollouts_file
from treewise.rl.tasks import TaskItem
from treewise.trainer import TreeTrainingArguments

TOKENIZER = byte_tokenizer()


@dataclass
class EvenBytes:
    """The reward is 1 where the sum of the sampled ids is even."""

    name: str = "even"

    def num_items(self, split):
        return None

    def item(self, split, index):
        return TaskItem(f"{self.name}/{split}/{index}", ({"role": "user", "content": f"{split[0]}{index}"},))

    def rewards(self, requests):
        return [float(sum(request.token_ids) % 2 == 0) for request in requests]


def tiny_policy(seed=0, family="llama", **changes):
    return testing.tiny_model(
        family,
        seed=seed,
        vocab_size=len(TOKENIZER),
        num_hidden_layers=2,
        intermediate_size=64,
        eos_token_id=TOKENIZER.eos_token_id,
        **{"max_position_embeddings": 256, **changes},
    )


def settings(**changes):
    given = {
        "iterations": 2,
        "trees_per_iteration": 2,
        "tokens_per_iteration": 48,
        "max_new_tokens": 8,
        "branching": "random",
        "branching_settings": {"variations": 4, "per_round": 2, "roots": 2},
        "eval_every": 2,
        "eval_items": 2,
        "save_every": 1,
        "chat_template": "chatml",
    }
    return OnlineSettings(**{**given, **changes})


def arguments(folder, **changes):
    given = {
        "output_dir": str(folder),
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "max_tokens": 64,
        "seed": 5,
    }
    return TreeTrainingArguments(**{**given, **changes})


def new_trainer(folder, task=None, *, model=None, arguments_=None, objective="grpo", sampler=None, **changes):
    return OnlineTrainer(
        tiny_policy() if model is None else model,
        EvenBytes() if task is None else task,
        TOKENIZER,
        settings(**changes),
        arguments(folder, **(arguments_ or {})),
        objective=objective,
        sampler=sampler,
    )


def assert_same_rollouts(one, other):
    """The first iteration of two runs is the same to the bit; the second, after an update whose sums have another
    order, to the rounding of its log-probs.
    """
    first = [rollouts_file(folder, 1).read_bytes() for folder in (one, other)]
    assert first[0] == first[1]
    assert len(first[0]) > 0
    rows = [[json.loads(line) for line in rollouts_file(at, 2).read_text().splitlines()] for at in (one, other)]
    assert len(rows[0]) == len(rows[1]) > 0
    for pair in zip(*rows, strict=True):
        found, expected = ([value or 0.0 for value in row.pop("sampler_logprobs")] for row in pair)
        assert found == pytest.approx(expected, abs=1e-5)
        assert pair[0] == pair[1]


def digest(model):
    """SHA-256 of all weights."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().to(torch.float64).numpy().tobytes())
    return found.hexdigest()
