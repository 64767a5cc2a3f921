"""What every client trains and reads: a tiny random model, its tokenizer by the name that clients ask for, data sets.

All numbers are float64, so that two runs of the same client differ by nothing that Adam could make large.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hosts.material import agent_calls, problems
from treewise.models.load_model import load_tokenizer, load_weights

NAME = "Qwen/Qwen3-8B"  # for which clients have a chat format
TOKENIZER = "smollm2-demo"
QUESTIONS = [(f"What is {a} plus {b}?", a + b) for a in range(17) for b in range(17)]
# Data sets that recipes look up by their names.
CHATS, SUMS, PAIRS = ("HuggingFaceH4/no_robots",), ("openai/gsm8k", "zwhe99/DeepMath-103K"), ("Anthropic/hh-rlhf",)


def tokenizer() -> Any:
    return load_tokenizer(TOKENIZER)


def model(name: str) -> Any:
    """A random Llama of two layers, where `tiny` is asked for, or one that is loaded by its name."""
    if name != "tiny":
        return load_weights(name).double()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer()), max_position_embeddings=8192, **sizes)
    return LlamaForCausalLM(config).double()


def write(folder: Path, served: Any) -> None:
    """Files that clients look up below the folder in which they run. served: the model, whose shape they read."""
    tokenizer().save_pretrained(folder / NAME)
    served.config.save_pretrained(folder / NAME)
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {answer}."}]}
        for text, answer in QUESTIONS
    ]
    pairs = [
        {key: f"\n\nHuman: {text}\n\nAssistant: {answer + more}" for key, more in (("chosen", 0), ("rejected", 1))}
        for text, answer in QUESTIONS
    ]
    sums = [{"question": text, "answer": f"We add.\n#### {answer}"} for text, answer in QUESTIONS]
    for names, rows in ((CHATS, chats), (SUMS, sums), (PAIRS, pairs)):
        for name in names:
            for split in ("train", "test"):
                _write_rows(folder / name / f"{split}.jsonl", rows)
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
    configs = json.dumps([{"config_name": "main", "data_files": files}])
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    _write_rows(folder / "calls.jsonl", agent_calls())
    _write_rows(folder / "prompts.jsonl", problems())


def _write_rows(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
