"""What a run writes into its folder for people: rollouts of each iteration as token rows, which `treewise inspect` and
`load_trees` open, held-out samples of each evaluation, and what each iteration drew; a few samples in the terminal.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.base import features
from treewise.base.durable import write_atomically
from treewise.base.own_files import sealed
from treewise.data.io.field_checks import printable
from treewise.rl.curriculum import PractisedItem
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treewise.rl.online.drawn import Drawn

ROLLOUTS, EVALUATIONS, DRAWS = "rollouts", "evaluations", "curriculum"  # folders
CHECK = "check.json"
NUM_SHOWN = 3  # held-out samples in the terminal
MAX_SHOWN = 400  # characters of a prompt's end and of a completion in the terminal


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout as text. key: of its item; reward: None where it failed."""

    key: str
    prompt: str
    completion: str
    reward: float | None


def rollouts_file(run_dir: Path, iteration: int) -> Path:
    """The rows of an iteration; the first is 1."""
    return run_dir / ROLLOUTS / f"iteration-{iteration:05d}.jsonl"


def write_rollouts(
    run_dir: Path, iteration: int, rows: Sequence[Sequence[Trajectory]], tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Writes all rows of an iteration, or none of them."""
    lines = [json.dumps(_record(row, iteration, tokenizer)) + "\n" for own in rows for row in own]
    _write(rollouts_file(run_dir, iteration), "".join(lines))


def write_evaluation(run_dir: Path, iteration: int, samples: Sequence[Sample]) -> None:
    """Writes the held-out samples of an evaluation; iteration 0 is before the first update."""
    text = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples)
    _write(run_dir / EVALUATIONS / f"iteration-{iteration:05d}.jsonl", text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _record(row: Trajectory, iteration: int, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    assert row.sampler_logprobs is not None
    weights, sample = row.loss_weights.tolist(), sample_of(row, tokenizer)
    record: dict[str, Any] = {
        "token_ids": row.token_ids.tolist(),
        "loss_weights": weights,
        "sampler_logprobs": [
            value if weight else None for value, weight in zip(row.sampler_logprobs.tolist(), weights, strict=True)
        ],
    }
    if row.draws is not None:
        record["draws"] = row.draws.astype(int).tolist()
    if row.policy_versions is not None:
        record["policy_versions"] = row.policy_versions.astype(int).tolist()
    if row.routed_experts is not None:
        record["routed_experts"] = features.encoded_arrays.encoded(row.routed_experts)
    if row.token_rewards is not None:
        record["token_rewards"] = row.token_rewards.tolist()
    return record | {
        "reward": row.reward,
        "group": row.group,
        "rollout": row.rollout,
        "iteration": iteration,
        # Not `prompt` and `completion`, which loading compares with the ids: sampled ids often differ from what
        # their text would be tokenised to.
        "prompt_text": sample.prompt,
        "completion_text": sample.completion,
    }


def sample_of(row: Trajectory, tokenizer: "PreTrainedTokenizerBase") -> Sample:
    """A row as text: the prompt ends before the first trained token."""
    ids, first = row.token_ids.tolist(), int(np.argmax(np.asarray(row.loss_weights) > 0))
    return Sample(str(row.group), tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:]), row.reward)


def best_and_worst(trees: Sequence[Sequence[Trajectory]], tokenizer: "PreTrainedTokenizerBase") -> list[Sample]:
    """Of the first tree with unequal rewards (else of the first tree) a best and a worst rollout."""
    rewarded = [[row for row in rows if row.reward is not None] for rows in trees]
    spans = [sorted(rows, key=lambda row: float(row.reward or 0.0), reverse=True) for rows in rewarded if rows]
    unequal = [rows for rows in spans if rows[0].reward != rows[-1].reward]
    chosen = [unequal[0][0], unequal[0][-1]] if unequal else [rows[0] for rows in spans[:1]]
    return [sample_of(row, tokenizer) for row in chosen]


def lines_of(title: str, samples: Sequence[Sample]) -> str:
    """Samples for a terminal, control characters escaped: the end of each prompt once, below it what was sampled."""
    lines, above = [f"  {title}"], ""
    for sample in samples:
        if sample.prompt != above:
            lines.append(f"    {'…' if len(sample.prompt) > MAX_SHOWN else ''}{printable(sample.prompt[-MAX_SHOWN:])}")
            above = sample.prompt
        reward = "none" if sample.reward is None else f"{sample.reward:.3g}"
        more = "…" if len(sample.completion) > MAX_SHOWN else ""
        lines.append(f"      reward {reward:>5}  {printable(sample.completion[:MAX_SHOWN])}{more}")
    return "\n".join(lines) + "\n"


# -- what was drawn ---------------------------------------------------------------------------------------------------


def draws_file(run_dir: Path, iteration: int) -> Path:
    """The draws of an iteration; the first is 1."""
    return run_dir / DRAWS / f"iteration-{iteration:05d}.json"


def write_draws(
    run_dir: Path, iteration: int, curriculum: str, drawn: "Drawn", outcomes: Sequence[PractisedItem]
) -> None:
    """Writes which items an iteration drew, what the book predicted of them, and what came.

    predicted, observed: probabilities of success, before and in the trials of this iteration; observed is null where no
    rollout has a reward. is_kept: whether the tree may be trained.
    """
    draws: list[dict[str, Any]] = [
        {
            "item": group.request.item.key,
            "index": outcome.index,
            "wave": wave,
            "is_kept": position in drawn.kept,
            "predicted": outcome.predicted,
            "observed": outcome.success,
            "trials": outcome.trials,
            "reward": sum(outcome.rewards) / len(outcome.rewards) if outcome.rewards else None,
            "num_tokens": group.num_sampled,
        }
        for position, (group, wave, outcome) in enumerate(zip(drawn.groups, drawn.waves, outcomes, strict=True))
    ]
    values = {"iteration": iteration, "curriculum": curriculum, "draws": draws}
    _write(draws_file(run_dir, iteration), sealed(values) + "\n")


def write_check(run_dir: Path, curriculum: str, facts: Mapping[str, Any]) -> None:
    """Writes the result of a self-check."""
    _write(run_dir / DRAWS / CHECK, json.dumps({"curriculum": curriculum, **facts}, indent=1) + "\n")
