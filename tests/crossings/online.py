"""Crossings of the online loop: a run with drawn settings, and a plain loop on the rollouts that it recorded.

The plain loop reads the rows of each iteration, credits them (`plain_credit`), computes the other policies' log-probs
and the loss of every trajectory alone, and takes the same optimizer steps. Weights must agree after the last one. What
the sampler gave is counted by a wrapper around it, and each recorded log-prob is held to the model's own distribution.
Of a mixture, the plain loop replaces the outputs of routers by those of the recorded experts. The episodes of an agent
are one row each where it goes on with what it has, and several where it edits its history.
"""

import copy
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import treewise as tw
from tests.crossings.case import wide
from tests.crossings.drawing import Draw, ImpossibleError, Rule, WrongError
from tests.crossings.plain_credit import CREDIT, OF_ROLLOUTS, advantages_of
from tests.crossings.sides import differences, moves_of, quiet, weights_of
from tests.flat_objectives import Rows, loss_of_rows, run_alone
from tests.replayed_rows import filled, replayed
from tests.rl.agents.plain_agents import __file__ as AGENTS
from tests.rl.online.helpers import TOKENIZER
from treewise.data.io.encoded_arrays import decoded
from treewise.errors import check_choice
from treewise.nn.model import split_model
from treewise.nn.routing import routers_of
from treewise.objectives import Objective
from treewise.rl.agents.collecting import AgentCollector
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.tasks import TaskItem
from treewise.rl.tasks.agent_task import AgentTask
from treewise.testing.families import tiny_model
from treewise.tree.trajectory import Trajectory

ITERATIONS, TREES, EPISODES, TOKENS, LONGEST, SUCCESS_AT = 2, 3, 3, 60, 6, 0.5
BESIDE = ("iteration", "prompt_text", "completion_text")  # in a row of an iteration, and no part of a trajectory
LEARNING_RATE, MAX_NORM = 0.003, 1.0
BRANCHINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {"roots": 3}),
    "random": ("random", {"roots": 2, "variations": 4, "per_round": 2}),
    "entropy": ("entropy", {"variations": 4, "per_round": 2}),
    "surprisal": ("entropy", {"variations": 4, "repeats": 2, "definition": "surprisal"}),
    "segments": ("segments", {"segment_tokens": 2, "width": 5, "first": 2}),
    "turns": ("turns", {"roots": 2, "variations": 4}),
    "lcr": ("lcr", {"variations": 5, "per_round": 2, "threshold": 0.1}),
    "lcr_plain": ("lcr", {"variations": 4, "threshold": 0.1, "strength": 0.0, "weight_by_depth": False}),
    "lcr_turns": ("lcr", {"variations": 4, "threshold": 0.1, "points": "turns"}),
}
OBJECTIVES: dict[str, Any] = {
    "grpo": tw.GRPO,
    "dr_grpo": lambda **given: tw.DrGRPO(max_length=LONGEST, **given),
    "dapo": tw.DAPO,
    "gspo": tw.GSPO,
    "cispo": tw.CISPO,
    "reinforce": tw.REINFORCE,
    "ppo": tw.PPO,
}
CURRICULA: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {}),
    "dynamic": ("dynamic", {"refills": 1}),
    "gain": ("gain", {"force": True}),
    "gain_shuffled": ("gain", {"force": True, "control": True}),
}
# What an objective was published with; the plain loop reads nothing from the objective.
USUAL = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "grpo", "gspo": "grpo", "cispo": "grpo", "reinforce": "rloo"}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "branching": tuple(BRANCHINGS),
    "credit": ("usual", *CREDIT, "batch"),
    "objective": tuple(OBJECTIVES),
    "weighting": ("per_rollout", "per_trajectory", "once"),
    "curriculum": tuple(CURRICULA),
    "temperature": (1.0, 0.7, 1.4),
    "top_k": (0, 4),
    "top_p": (1.0, 0.8),
    "candidates": (0, 3, 6),
    "mini_batches": (1, 3),
    "epochs": (1, 2),
    "old_logprobs": ("auto", "recompute", "sampler"),
    "correction": (None, "truncate", "mask"),
    "beta": (0.0, 0.1),
    "drop_flat_groups": (False, True),
    "budget": (None, 12),
    "clip": (0.0, MAX_NORM),
    "replay": ("none", "exact", "by_tokens", "off"),  # of recorded experts; none: the model is no mixture
    "agent": ("none", "replying", "talking", "editing"),  # functions of `plain_agents`
}
RECORDED = ("exact", "by_tokens")
RULES = (
    Rule(("objective", "credit"), lambda objective, credit: (objective, credit) != ("ppo", "usual")),
    Rule(("agent", "branching"), lambda agent, branching: agent == "none" or branching == "none"),
    Rule(("agent", "candidates"), lambda agent, number: agent == "none" or not number),
    Rule(("agent", "curriculum"), lambda agent, name: agent == "none" or not name.startswith("gain")),
    # Values of prefixes are of rollouts that are one row.
    Rule(("agent", "credit"), lambda agent, credit: agent != "editing" or credit in ("usual", *OF_ROLLOUTS)),
)


@dataclass
class Letters:
    """Continue a letter; the reward is 0, 0.5 or 1, by the sum of the sampled ids."""

    name: str = "letters"

    def num_items(self, _split: str) -> int:
        return 6

    def item(self, split: str, index: int) -> TaskItem:
        from treewise.rl.tasks import TaskItem

        return TaskItem(f"{split}/{index}", ({"role": "user", "content": "abcdefgh"[index] + split[0]},))

    def rewards(self, requests: Sequence[Any]) -> list[float]:
        return [sum(request.token_ids) % 3 / 2 for request in requests]


class Counting:
    """A sampler, and how many tokens it gave in each call."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.num_tokens = 0

    def sample(self, requests: Sequence[Any]) -> Any:
        answers = self.sampler.sample(requests)
        self.num_tokens += sum(len(each.token_ids) for group in answers for each in group)
        return answers

    def update(self, model: torch.nn.Module) -> None:
        self.sampler.update(model)

    def close(self) -> None:
        self.sampler.close()


def check(draw: Draw) -> None:
    """Raises `WrongError` where the loop and the plain loop differ, and what treewise raises."""
    check_choice("branching", draw["branching"], BRANCHINGS)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        begun = policy(draw)
        trained = copy.deepcopy(begun)
        logs, counted = run_loop(draw, trained, Path(folder))
        rows = [recorded(Path(folder), number) for number in range(1, ITERATIONS + 1)]
        if any((row.routed_experts is None) == (draw["replay"] in RECORDED) for own in rows for row in own):
            raise WrongError("rows hold experts where none are to be recorded, or lack them.")
        check_counts(logs, counted, rows)
        sides = [plain_loop(draw, each, rows) for each in (copy.deepcopy(begun), wide(begun))]
    flat, exact = sides
    if not all(each.isfinite().all() for each in exact.values()):
        raise ImpossibleError("training alone diverges")
    eps = torch.finfo(torch.float32).eps
    wrong = differences("move", moves_of(trained, weights_of(begun)), flat, exact, 8.0, eps)
    if wrong:
        raise WrongError("\n".join(wrong[:6]))


def policy(draw: Draw) -> PreTrainedModel:
    """A model of few tokens that is sure of some: draws repeat one another. Its routers are sure, too."""
    family = "llama" if draw["replay"] == "none" else "qwen3_moe"
    changes: dict[str, Any] = {"vocab_size": 32, "eos_token_id": 31}
    if draw["agent"] != "none":
        changes = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id, "max_position_embeddings": 512}
    model = tiny_model(family, seed=draw["seed"] % 1000, num_hidden_layers=2, tie_word_embeddings=False, **changes)
    model.get_output_embeddings().weight.data *= 12.0
    for router in routers_of(split_model(model).decoder):
        torch.nn.init.normal_(router.module.weight, std=0.5)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """A letter is a token; the last one ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    raw = Tokenizer(models.WordLevel(letters | {"<u>": 26, "<end>": 31}, unk_token="<u>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<u>")


def objective_of(draw: Draw) -> Objective:
    """An instance with the drawn settings."""
    given = {"weighting": draw["weighting"], "beta": draw["beta"]}
    if draw["correction"]:
        given |= {"sampler_correction": draw["correction"], "sampler_max": 1.5}
    return OBJECTIVES[draw["objective"]](**given)


def run_loop(draw: Draw, model: torch.nn.Module, folder: Path) -> tuple[list[dict[str, float]], list[int]]:
    """The run: the figures of each iteration, and the tokens that the sampler had given after it."""
    from transformers import TrainerCallback

    from treewise.rl.samplers import TransformersSampler

    branching, branching_settings = BRANCHINGS[draw["branching"]]
    curriculum, curriculum_settings = CURRICULA[draw["curriculum"]]
    has_agent = draw["agent"] != "none"
    settings = tw.OnlineSettings(
        iterations=ITERATIONS,
        trees_per_iteration=TREES,
        tokens_per_iteration=TOKENS,
        max_new_tokens=LONGEST,
        branching=branching,
        branching_settings={} if has_agent else branching_settings,
        advantages=None if draw["credit"] == "usual" else draw["credit"],
        update_epochs=draw["epochs"],
        num_candidates=draw["candidates"],
        **{name: draw[name] for name in ("drop_flat_groups", "mini_batches", "old_logprobs", "top_p", "top_k")},
        routing_replay="off" if draw["replay"] == "none" else draw["replay"],
        curriculum=curriculum,
        curriculum_settings=curriculum_settings,
        check_items=0,
        eval_every=0,
        gather_seconds=0.0 if has_agent else 0.1,
        success_at=SUCCESS_AT,
        chat_template="chatml" if has_agent else "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
    args = tw.TreeTrainingArguments(
        output_dir=str(folder),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=draw["clip"],
        max_tokens=draw["budget"],
        temperature=draw["temperature"],
        seed=draw["seed"] % 1000,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    sampler, counted = Counting(TransformersSampler(model)), []

    class Count(TrainerCallback):
        def on_log(self, *_: object, logs: dict[str, float] | None = None, **__: object) -> None:
            counted.extend([sampler.num_tokens] if logs and "iteration" in logs else [])

    task, words, collector = Letters(), tokenizer(), None
    if has_agent:
        task, words = AgentTask([{"question": letter} for letter in "abcdefgh"], held_out=0.25), TOKENIZER
        own = AgentSettings(episodes=EPISODES)
        given = {"temperature": draw["temperature"], "folder": folder}
        collector = AgentCollector(f"{AGENTS}:{draw['agent']}", words, model, task, settings, own, **given)
    trainer = tw.OnlineTrainer(
        model,
        task,
        words,
        settings,
        args,
        objective=objective_of(draw),
        sampler=sampler,
        reference=copy.deepcopy(model) if draw["beta"] else None,
        callbacks=[Count()],
        collector=collector,
    )
    trainer.train()
    return [each for each in trainer.log_history if "iteration" in each], counted


def recorded(folder: Path, iteration: int) -> list[Trajectory]:
    """The rows of an iteration as they were written."""
    lines = (folder / "rollouts" / f"iteration-{iteration:05d}.jsonl").read_text().splitlines()
    rows = []
    for line in lines:
        values = json.loads(line)
        values["sampler_logprobs"] = [value or 0.0 for value in values["sampler_logprobs"]]
        if "routed_experts" in values:
            values["routed_experts"] = decoded(values["routed_experts"], "routed_experts", "a row")
        rows.append(Trajectory(**{name: value for name, value in values.items() if name not in BESIDE}))
    trees = defaultdict(list)
    for row in rows:
        trees[row.group].append(row)
    with_experts = {group: iter(filled(tree)) for group, tree in trees.items()}
    return [next(with_experts[row.group]) for row in rows]


def check_counts(logs: Sequence[dict[str, float]], counted: Sequence[int], rows: Sequence[list[Trajectory]]) -> None:
    """Raises `WrongError` where charged tokens are not those that the sampler gave, or not those of the rows."""
    for number, (figures, own) in enumerate(zip(logs, rows, strict=True), start=1):
        given = counted[number - 1] - (counted[number - 2] if number > 1 else 0)
        charged, chosen = figures["sampled_tokens"], figures.get("candidate_tokens", 0)
        places = {
            (row.group, row.draws[at], at)
            for row in own
            for at in np.flatnonzero(row.loss_weights).tolist()
            if row.draws is not None
        }
        if charged != given or len(places) != charged + chosen or figures["unfinished_tokens"]:
            raise WrongError(
                f"iteration {number}: the sampler gave {given} tokens, {charged:.0f} are charged and {chosen:.0f} "
                f"drawn from candidates; {len(places)} are in rows, {figures['unfinished_tokens']:.0f} are unfinished."
            )


# -- the plain loop ---------------------------------------------------------------------------------------------------


def run_rows(draw: Draw, model: torch.nn.Module, rows: Sequence[Trajectory]) -> Rows:
    """Each row by itself, through the experts that it recorded."""
    with replayed(model) if draw["replay"] in RECORDED else nullcontext() as replayer:
        return run_alone(model, rows, temperature=draw["temperature"], replayer=replayer)


def plain_loop(draw: Draw, model: torch.nn.Module, rows: Sequence[list[Trajectory]]) -> dict[str, torch.Tensor]:
    """Trains on the rows of each iteration; how far each weight has moved."""
    before, reference = weights_of(model), copy.deepcopy(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)
    for iteration, own in enumerate(rows):
        check_draws(draw, model, own, iteration)
        trees = prepared(draw, model, reference, own)
        for epoch in range(draw["epochs"] if trees else 0):
            order = np.random.default_rng([draw["seed"] % 1000, iteration, 3, epoch]).permutation(len(trees))
            for part in np.array_split(order, min(draw["mini_batches"], len(trees))):
                items = [row for index in sorted(part.tolist()) for row in trees[index]]
                optimizer.zero_grad()
                loss = loss_of_rows(run_rows(draw, model, items), items, objective_of(draw))
                loss.backward()
                if draw["clip"]:
                    torch.nn.utils.clip_grad_norm_(parameters, draw["clip"])
                optimizer.step()
    return moves_of(model, before)


def prepared(
    draw: Draw, model: torch.nn.Module, reference: torch.nn.Module, rows: list[Trajectory]
) -> list[list[Trajectory]]:
    """The trees that are trained, with advantages and log-probs of other policies."""
    if draw["curriculum"] == "dynamic":
        rewards = defaultdict(set)
        for row in rows:
            rewards[row.group].add(row.reward)
        rows = [row for row in rows if len(rewards[row.group]) > 1]
    if not rows:
        return []
    method = USUAL[draw["objective"]] if draw["credit"] == "usual" else draw["credit"]
    advantages = advantages_of(rows, method)
    pairs = list(zip(rows, advantages, strict=True))
    rows = [replace(row, advantages=values) for row, values in pairs]
    if draw["drop_flat_groups"]:
        acting = {row.group for row, values in pairs if values[row.loss_weights > 0].any()}
        rows = [row for row in rows if row.group in acting]
    is_one_step = draw["mini_batches"] * draw["epochs"] == 1 or draw["objective"] == "reinforce"
    streams = {"old_logprobs": model} if draw["old_logprobs"] == "recompute" or not is_one_step else {}
    if draw["old_logprobs"] == "sampler":
        streams, rows = {}, [replace(row, old_logprobs=row.sampler_logprobs) for row in rows]
    streams |= {"ref_logprobs": reference} if draw["beta"] else {}
    for name, scorer in streams.items():
        with torch.no_grad():
            logprobs = [run_rows(draw, scorer, [row]).logprobs[0].numpy() for row in rows]
        changes: list[dict[str, Any]] = [{name: values} for values in logprobs]
        rows = [replace(row, **each) for row, each in zip(rows, changes, strict=True)]
    trees = defaultdict(list)
    for row in rows:
        trees[row.group].append(row)
    return list(trees.values())


# -- draws ------------------------------------------------------------------------------------------------------------


def check_draws(draw: Draw, model: torch.nn.Module, rows: list[Trajectory], iteration: int) -> None:
    """Raises `WrongError` where a recorded log-prob is not the one of the draw, or a token could not be drawn."""
    candidates = first_tokens(rows) if BRANCHINGS[draw["branching"]][0] == "lcr" and draw["candidates"] else {}
    if BRANCHINGS[draw["branching"]][1].get("points") == "turns":
        candidates = {}
    for row in rows:
        assert row.draws is not None
        assert row.sampler_logprobs is not None
        with torch.no_grad():
            every = run_rows(draw, model, [row]).everything[0].double()
        for at in np.flatnonzero(row.loss_weights).tolist():
            token, logprobs = int(row.token_ids[at]), every[at]
            kept = possible(logprobs, draw)
            taken = candidates.get((row.group, row.draws[at], at))
            expected = float(logprobs[token])
            if taken is not None:
                chosen = [each for each in kept[: draw["candidates"]] if each not in taken]
                expected -= float(logprobs[chosen].logsumexp(0)) if token in chosen else float("nan")
            if token not in kept or not abs(expected - float(row.sampler_logprobs[at])) < 1e-3:
                raise WrongError(
                    f"iteration {iteration + 1}, {row.group}, rollout {row.rollout}, token {at} ({token}): recorded "
                    f"with {row.sampler_logprobs[at]:.5g}, drawn with {expected:.5g}; it could be one of {kept}, taken "
                    f"before were {taken}."
                )


def possible(logprobs: torch.Tensor, draw: Draw) -> list[int]:
    """The tokens that top-k and then top-p leave, the most likely first, and one more where rounding decides."""
    order = logprobs.argsort(descending=True)[: draw["top_k"] or len(logprobs)]
    share = (logprobs[order] - logprobs[order].logsumexp(0)).exp()
    kept: list[int] = order[share.cumsum(0) - share < draw["top_p"] + 1e-6].tolist()
    return kept


def first_tokens(rows: list[Trajectory]) -> dict[tuple[Any, float, int], set[int]]:
    """Of the first token of each branch within a rollout, by group, draw and position: what was taken there before."""
    tokens: dict[tuple[Any, float, int], int] = {}
    above: dict[tuple[Any, float, int], float] = {}
    for row in rows:
        assert row.draws is not None
        for at in np.flatnonzero(row.loss_weights).tolist():
            place = (row.group, row.draws[at], at)
            tokens[place] = int(row.token_ids[at])
            if row.draws[at - 1] not in (-1, row.draws[at]):
                above[place] = row.draws[at - 1]
    result = {}
    for (group, own, at), parent in above.items():
        mates = [
            parent,
            *(each for (g, each, a), p in above.items() if (g, a, p) == (group, at, parent) and each < own),
        ]
        result[group, own, at] = {tokens[group, each, at] for each in mates if (group, each, at) in tokens}
    return result
