"""TRL's trainers, of any release from 0.20 on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import treewise as tw
from tests.hosts.material import reward
from tests.hosts.recipes.common import records, settings

IMPORTED = trl.SFTTrainer  # before runs are forked; others do not import in every release
# Four completions to each of two prompts, in a call of four rows.
SAMPLED = {"num_generations": 4, "max_completion_length": 24, "temperature": 1.0}


def sft(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    rows = records(folder / "calls.jsonl")
    run(trl.SFTTrainer, trl.SFTConfig, rows, model, output, line, assistant_only_loss=True, max_length=4096)


def sft_packed(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    """Without padding: the rows of a batch in one row, whose positions start anew."""
    rows = records(folder / "calls.jsonl")
    chosen = {"padding_free": True, "max_length": None, "model_init_kwargs": {"use_cache": False}}
    run(trl.SFTTrainer, trl.SFTConfig, rows, model, output, line, assistant_only_loss=True, **chosen)


def dpo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    run(trl.DPOTrainer, trl.DPOConfig, records(folder / "pairs.jsonl"), model, output, line, max_length=512)


def kto(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    pairs = records(folder / "pairs.jsonl")
    rows = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    kinds: Any = trl
    if not hasattr(trl, "KTOTrainer"):
        import trl.experimental.kto as kinds
    run(kinds.KTOTrainer, kinds.KTOConfig, rows, model, output, line, max_length=512)


def grpo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    rows = records(folder / "prompts.jsonl")
    run(trl.GRPOTrainer, trl.GRPOConfig, rows, model, output, line, reward_funcs=reward, beta=0.04, **SAMPLED)


def rloo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    rows = records(folder / "prompts.jsonl")
    run(trl.RLOOTrainer, trl.RLOOConfig, rows, model, output, line, reward_funcs=reward, **SAMPLED)


def run(
    kind: Callable[..., Any],
    arguments: Callable[..., Any],
    rows: list[dict[str, Any]],
    path: Path,
    output: Path,
    line: bool,
    reward_funcs: Any = None,
    **chosen: Any,
) -> None:
    known = arguments.__dataclass_fields__  # type: ignore[attr-defined]
    order = {"shuffle_dataset": False, "train_sampling_strategy": "sequential", "gradient_checkpointing": False}
    order |= {"activation_checkpointing": False}
    order = {name: value for name, value in order.items() if name in known}
    if "activation_checkpointing" in order:
        del order["gradient_checkpointing"]
    model = AutoModelForCausalLM.from_pretrained(path, **chosen.pop("model_init_kwargs", {}))
    model.warnings_issued = {}  # transformers 5 has it no more, and TRL before 0.27 or so writes to it
    more = {} if reward_funcs is None else {"reward_funcs": reward_funcs}
    trainer = kind(
        model=model,
        args=arguments(**settings(output, **order, **chosen)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
        **more,
    )
    models = [trainer.model, getattr(trainer, "ref_model", None)]
    sharings = [tw.share_prefixes(each) for each in models if line and each is not None]
    trainer.train()
    print(*sharings)
