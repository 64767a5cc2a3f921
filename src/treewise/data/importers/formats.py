"""The formats that can be imported, and how a record shows which one it has: by keys that no other format holds."""

from collections.abc import Mapping
from typing import Any

from treewise.errors import ConfigError, DataError, did_you_mean

# name: what it is, for messages and `--help`
FORMATS = {
    "verifiers": "traces.jsonl of verifiers v1 (also written by prime-rl), or results.jsonl of its earlier versions",
    "prime-rl": "token_exports/step_N/rank_R.jsonl, or its traces.jsonl",
    "slime": "--save-debug-rollout-data (.pt), or its samples one per line",
    "verl": "tensors of a batch (.pt), or trainer.rollout_data_dir (text without ids)",
    "areal": "trajectories (.pt), or rollout.dump_to_file (text; needs --tokenizer)",
    "art": "trajectories of OpenPipe ART, .jsonl or .parquet (text without ids)",
    "trl": "prompts, completions and rewards: what a rollout_func returns, or completions_N.parquet (text)",
    "openai": "recorded chat calls, {request, response} or {messages, response} a line; requests alone; batch files",
    "langfuse": "observations, or traces with their observations, as .jsonl or .json",
    "langsmith": "runs, as .jsonl, .json or .parquet",
}

# Each alternative: keys that must all be there. A record may fit several alternatives of one format.
_SIGNS: dict[str, tuple[frozenset[str], ...]] = {
    "verifiers": (
        frozenset({"traces", "task"}),
        frozenset({"traces", "env"}),
        frozenset({"nodes", "task", "agent"}),
        frozenset({"nodes", "calls", "rewards"}),
        frozenset({"example_id", "prompt", "completion", "reward", "timing"}),
        frozenset({"example_id", "prompt", "completion", "reward", "is_completed"}),
        frozenset({"example_id", "prompt", "completion", "reward", "trajectory"}),
    ),
    "prime-rl": (frozenset({"token_ids", "inference_logprobs", "loss_mask"}),),
    "slime": (
        frozenset({"tokens", "response_length", "reward"}),
        frozenset({"samples", "rollout_id"}),
    ),
    "verl": (
        frozenset({"input", "output", "score", "step"}),
        frozenset({"prompts", "responses", "attention_mask"}),
        frozenset({"prompts", "responses", "response_mask"}),
    ),
    "areal": (
        frozenset({"prompt", "completion", "reward", "seqlen", "prompt_len", "tail_version"}),
        frozenset({"input_ids", "loss_mask", "logprobs"}),
        frozenset({"input_ids", "loss_mask", "versions"}),
    ),
    "art": (
        frozenset({"trajectories"}),
        frozenset({"messages_and_choices", "reward"}),
        frozenset({"group_index", "messages", "reward"}),
    ),
    "trl": (
        frozenset({"prompt_ids", "completion_ids"}),
        frozenset({"prompt", "completion", "advantage", "step"}),
    ),
    "openai": (
        frozenset({"request"}),
        frozenset({"custom_id", "body"}),
        frozenset({"custom_id", "response"}),
        frozenset({"messages", "response"}),
        frozenset({"messages", "choices"}),
    ),
    "langfuse": (
        frozenset({"traceId", "type"}),
        frozenset({"trace_id", "type", "input"}),
        frozenset({"id", "observations"}),
    ),
    "langsmith": (frozenset({"run_type", "inputs"}),),
}


def detect_format(record: Mapping[str, Any]) -> str | None:
    """The format whose keys a record has; None where it has those of none, or of several."""
    keys = {str(key) for key, value in record.items() if value is not None}
    names = [name for name, signs in _SIGNS.items() if any(sign <= keys for sign in signs)]
    return names[0] if len(names) == 1 else None


def required_format(record: Mapping[str, Any], location: str) -> str:
    """The same, where there must be one.

    Raises:
        DataError: the keys fit no format, or several.
    """
    name = detect_format(record)
    if name is None:
        keys = ", ".join(str(key) for key in list(record)[:12]) or "none"
        raise DataError(
            f"{location}: a record with the keys {keys} matches no known format; name it with --from "
            f"({', '.join(FORMATS)}). Records in treewise's own forms (docs/data.md) need no import."
        )
    return name


def check_format(name: str) -> str:
    """A name of `FORMATS`; underscores and capitals are forgiven.

    Raises:
        ConfigError: another name; the nearest one is given.
    """
    plain = name.lower().replace("_", "-")
    plain = {"prime": "prime-rl", "primerl": "prime-rl"}.get(plain, plain)
    if plain in FORMATS:
        return plain
    hint = did_you_mean(plain, FORMATS)
    raise ConfigError(f"unknown format {name!r}; choose one of {', '.join(FORMATS)}.{hint}")
