"""What dumps of other stacks are: one table. A dump is recognised by the keys of its first record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Format:
    """A dump of another stack.

    Parameters:
        text: what it is, for messages and `--help`.
        reader: module and function of `treewise.data.importers`, which makes rows of records.
        signs: alternatives, each the keys that must all be there; no other format has them.
        is_log: whether it is a log of calls, of which several records, and files, make one run: `reader` then makes
            requests with their responses of records, for `importers.runs`.
    """

    text: str
    reader: str
    signs: tuple[str, ...]
    is_log: bool = False


FORMATS = {
    "verifiers": Format(
        "traces.jsonl of verifiers v1 (also written by prime-rl), or results.jsonl of its earlier versions",
        "traces.read_verifiers",
        (
            *("traces task", "traces env", "nodes task agent", "nodes calls rewards"),
            "example_id prompt completion reward timing",
            "example_id prompt completion reward is_completed",
            "example_id prompt completion reward trajectory",
        ),
    ),
    "prime-rl": Format(
        "token_exports/step_N/rank_R.jsonl, or its traces.jsonl",
        "token_dumps.read_prime_rl",
        ("token_ids inference_logprobs loss_mask",),
    ),
    "slime": Format(
        "--save-debug-rollout-data (.pt), or its samples one per line",
        "token_dumps.read_slime",
        ("tokens response_length reward", "samples rollout_id"),
    ),
    "verl": Format(
        "tensors of a batch (.pt), or trainer.rollout_data_dir (text without ids)",
        "token_dumps.read_verl",
        ("input output score step", "prompts responses attention_mask", "prompts responses response_mask"),
    ),
    "areal": Format(
        "trajectories (.pt), or rollout.dump_to_file (text; needs --tokenizer)",
        "token_dumps.read_areal",
        (
            "prompt completion reward seqlen prompt_len tail_version",
            "input_ids loss_mask logprobs",
            "input_ids loss_mask versions",
        ),
    ),
    "art": Format(
        "trajectories of OpenPipe ART, .jsonl or .parquet (text without ids)",
        "traces.read_art",
        ("trajectories", "messages_and_choices reward", "group_index messages reward"),
    ),
    "trl": Format(
        "prompts, completions and rewards: what a rollout_func returns, or completions_N.parquet (text)",
        "token_dumps.read_trl",
        ("prompt_ids completion_ids", "prompt completion advantage step"),
    ),
    "openai": Format(
        "recorded calls of OpenAI's chats and Responses and of Anthropic's Messages, {request, response} or "
        "{messages, response} a line; requests alone; batch files",
        "call_records.openai_calls",
        (
            *("request", "custom_id body", "custom_id response", "messages response", "messages choices"),
            *("custom_id params", "custom_id result"),
        ),
        is_log=True,
    ),
    "langfuse": Format(
        "observations, or traces with their observations, as .jsonl or .json",
        "call_records.langfuse_calls",
        ("traceId type", "trace_id type input", "id observations"),
        is_log=True,
    ),
    "langsmith": Format(
        "runs, as .jsonl, .json or .parquet", "call_records.langsmith_calls", ("run_type inputs",), is_log=True
    ),
}


def detect_format(record: Mapping[str, Any]) -> str | None:
    """The format whose keys a record has; None where it has those of none, or of several."""
    keys = {str(key) for key, value in record.items() if value is not None}
    names = [name for name, format in FORMATS.items() if any(keys.issuperset(sign.split()) for sign in format.signs)]
    return names[0] if len(names) == 1 else None
