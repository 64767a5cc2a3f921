"""What every host trains: a tiny random model with a tokenizer, and recorded conversations whose rows form trees.

The model is written twice, the second time with its hidden units in another order: the same function with the same
gradients, whose sums are rounded otherwise. How far two such runs of a host without treewise are apart is what rounding
does, and no difference that treewise makes may be much larger.
"""

import copy
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parents[2] / "examples" / "data"
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' -%}{%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}"
    "{{ '\n' }}{%- else -%}{{ message.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
ADAPTER = "adapter"  # a folder of LoRA's weights beside each model, to go on from: what is drawn has no other order
WIDTH, HIDDEN, LAYERS, VOCABULARY = 128, 256, 3, 512
LIKELY, HOPELESS = 20.0, 0.01  # values that the search of the game of 24 gave to a move


def write(folder: Path) -> None:
    """The folders `model` and `reordered`, and the files that hosts read."""
    calls, pairs, prompts = agent_calls(), preferences(), problems()
    texts = [turn["content"] for row in calls for turn in row["messages"]]
    tokenizer = tokenizer_of([*texts, *(row["prompt"] + row["chosen"] for row in pairs)])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    kind = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(copy.deepcopy(model), kind)
    states = model.state_dict(), get_peft_model_state_dict(adapted)
    for name, (whole, adapter) in {"model": states, "reordered": tuple(map(reordered, states))}.items():
        model.load_state_dict(whole)
        model.save_pretrained(folder / name)
        set_peft_model_state_dict(adapted, adapter)
        adapted.save_pretrained(folder / name / ADAPTER)
        tokenizer.save_pretrained(folder / name)
    for name, rows in {"calls": calls, "pairs": pairs, "prompts": prompts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# -- rows -------------------------------------------------------------------------------------------------------------


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes()).splitlines()]


def agent_calls() -> list[dict[str, Any]]:
    """Branches of one agent's search over tools, as chats in which its replies and the tools' alternate."""
    rows = []
    for record in records("toolbench"):
        turns: list[dict[str, str]] = []
        for message in record["messages"]:
            called = "".join(json.dumps(each["function"]) for each in message.get("tool_calls") or [])
            role = "user" if message["role"] == "tool" else message["role"]
            turns.append({"role": role, "content": ((message.get("content") or "") + called)[:200] or "-"})
        while turns[-1]["role"] != "assistant":
            turns.pop()
        rows.append({"messages": turns})
    return rows


def searches() -> dict[str, list[dict[str, Any]]]:
    """Moves of the game of 24 by problem."""
    found = defaultdict(list)
    for record in records("searches"):
        if record["group"].startswith("game24"):
            found[record["group"]].append(record)
    return found


def preferences() -> list[dict[str, str]]:
    """A promising first move and a hopeless one; pairs of one problem stand together."""
    rows = []
    for found in searches().values():
        good = [each["messages"] for each in found if each["reward"] >= LIKELY]
        bad = [each["messages"] for each in found if each["reward"] <= HOPELESS]
        for chosen, rejected in list(zip(good, bad, strict=False))[:8]:
            rows.append(dict(zip(("prompt", "chosen"), (each["content"] for each in chosen[:2]), strict=True)))
            rows[-1]["rejected"] = rejected[1]["content"]
    return rows


def problems() -> list[dict[str, str]]:
    return [{"prompt": found[0]["messages"][0]["content"]} for found in searches().values()]


def reward(completions: list[Any], **_: Any) -> list[float]:
    """How many of the letters are digits: of texts, or of chats of one message."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in texts]


# -- the model with its hidden units in another order -----------------------------------------------------------------

# Axes of weights that are counted by the model's width, and by the width inside its feed-forward layers.
_WIDTHS = {
    **dict.fromkeys(("embed_tokens", "q_proj", "k_proj", "v_proj", "lm_head"), (None, "width")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("hidden", "width")),
    "o_proj": ("width", None),
    "down_proj": ("width", "hidden"),
    **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), ("width",)),
}


def _orders() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "width": torch.randperm(WIDTH, generator=generator),
        "hidden": torch.randperm(HIDDEN, generator=generator),
    }


def reordered(state: dict[str, torch.Tensor], *, back: bool = False) -> dict[str, torch.Tensor]:
    """The same model with its units in another order, or back in their own."""
    orders = {name: torch.argsort(order) if back else order for name, order in _orders().items()}
    found = {}
    for name, weight in state.items():
        for axis, kind in enumerate(_widths(name)):
            weight = weight if kind is None else weight.index_select(axis, orders[kind])
        found[name] = weight.contiguous()
    return found


def _widths(name: str) -> tuple[str | None, ...]:
    layer, _, part = name.removesuffix(".weight").rpartition(".lora_")
    widths = _WIDTHS[(layer or part).rpartition(".")[2]]
    return {"A": (None, widths[-1]), "B": (widths[0], None)}.get(part, widths)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a folder in transformers' format."""
    return {
        name: each.double() for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()
    }
