"""A tiny tokenizer and model, TRL trainers over them, and a run of a trainer with and without the line."""

import random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainingArguments

import treewise
from treewise.testing.families import tiny_model

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>"]
WORDS = [*SPECIAL, *(f"w{number}" for number in range(64 - len(SPECIAL)))]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} "
    "{% for call in m.tool_calls or [] %}<|call|> {{ call.function.name }} {% endfor %}</s> {% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
# transformers renames the argument in 5.20 or so; the old name warns from then on.
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
TIMES = ("runtime", "per_second", "step_time", "flos")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS[len(SPECIAL) :]) for _ in range(rng.randint(least, most)))


def settings(tmp_path: Any, **changes: Any) -> dict[str, Any]:
    """Arguments of any TRL trainer; SGD, because Adam's first steps turn a gradient of rounding into a full step."""
    return {
        "output_dir": str(tmp_path),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "optim": "sgd",
        "per_device_train_batch_size": 4,
        CHECKPOINTING: False,
        "seed": 5,
        **changes,
    }


def model_for_trl(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> torch.nn.Module:
    """Its end token is likely in some contexts, so rollouts differ in length; in float64 rounding decides nothing."""
    model = tiny_model(family, dtype, pad_token_id=0, **changes)
    model.config._experts_implementation_internal = "eager"  # the grouped kernel knows no float64
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 25
    return model


class Run:
    """One training: its logs, what its steps changed, and what was shared."""

    def __init__(self, make: Any, share: bool, **options: Any) -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - transformers draws from the global generator
        torch.manual_seed(0)
        trainer = make()
        before = _parameters(trainer.model)
        models = [trainer.model, getattr(trainer, "ref_model", None)]
        self.sharings = [treewise.share_prefixes(each, **options) for each in models if share and each is not None]
        torch.manual_seed(1)
        trainer.train()
        self.trainer = trainer
        self.logs = [_values(entry) for entry in trainer.state.log_history]
        self.updates = {name: after - before[name] for name, after in _parameters(trainer.model).items()}


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def _values(entry: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if not name.endswith(TIMES) and isinstance(value, int | float)}


def assert_same_training(make: Any, tolerance: float = 1e-6, **options: Any) -> Run:
    """The line changes no logged number, and no step, by more than the tolerance; and trees were computed."""
    flat, tree = Run(make, share=False), Run(make, share=True, **options)
    assert len(flat.logs) == len(tree.logs)
    for step, (expected, found) in enumerate(zip(flat.logs, tree.logs, strict=True)):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert abs(found[name] - value) <= tolerance * max(1.0, abs(value)), (step, name, found[name], value)
    assert update_error(tree, flat) <= tolerance
    for sharing in tree.sharings:
        assert sharing.counts.num_calls > 0
        assert sharing.counts.num_left == 0
    return tree


def update_error(found: Run, expected: Run) -> float:
    """Norm of the difference of all updates over the norm of the expected ones."""
    difference = norm = 0.0
    for name, update in expected.updates.items():
        difference += float((found.updates[name] - update).double().square().sum())
        norm += float(update.double().square().sum())
    assert norm > 0
    return (difference / norm) ** 0.5
