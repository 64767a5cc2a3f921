"""`tree_rollouts`: a GRPOTrainer of TRL samples trees in place of independent completions.

Three seams of the trainer are used, and nothing else changes: its `rollout_func` samples (every prompt of a batch grows
a tree until it has `num_generations` leaves, which are the completions), the results of `_calculate_rewards` are
recorded, and the advantages that `_generate_and_score_completions` returns are replaced by those of the tree, one for
each token, which TRL's loss takes. `share_prefixes` then computes every shared token of the batch once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treewise.errors import ConfigError, DataError
from treewise.integrations.trl import Sharing, share_prefixes
from treewise.rl.branching import PROMPT, Branching, RolloutTree, branching_named
from treewise.rl.online.continuing import Rounds, continue_all
from treewise.rl.online.growing import GrowingTree
from treewise.rl.online.journal import Journal
from treewise.rl.online.rollout import Continuation, Limits, OneTurn
from treewise.rl.samplers import Sampler, SampleRequest, TransformersSampler
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import TaskItem
from treewise.rl.update import credit

if TYPE_CHECKING:
    from trl import GRPOTrainer

_WITHOUT_LIMIT = 1 << 62  # generated tokens; here the number of completions ends a tree
_NEEDS_REWARDS = ("lcr",)
_NOT_FOR_COMPLETIONS = {"segments": "its nodes end at a budget of tokens", "turns": "completions have one turn"}


@dataclass(slots=True)
class RolloutCounts:
    """Of all batches of training so far. num_completion_tokens: of the completions; num_sampled_tokens: generated for
    them, where a shared token counts once.
    """

    num_batches: int = 0
    num_trees: int = 0
    num_branches: int = 0
    num_completion_tokens: int = 0
    num_sampled_tokens: int = 0

    @property
    def share_ratio(self) -> float:
        """Tokens of completions / sampled tokens; 1 before the first batch."""
        return self.num_completion_tokens / self.num_sampled_tokens if self.num_sampled_tokens else 1.0


class TreeRollouts:
    """What `tree_rollouts` installs. `counts` are its statistics, `sharing` those of the update."""

    def __init__(
        self,
        trainer: "GRPOTrainer",
        policy: Branching,
        sampler: Sampler,
        advantages: str | None,
        advantages_settings: Mapping[str, Any],
    ) -> None:
        self.trainer, self.policy, self.sampler = trainer, policy, sampler
        self.advantages, self.advantages_settings = advantages, dict(advantages_settings)
        self.counts = RolloutCounts()
        self.sharing: Sharing | None = None
        self.book = SuccessBook()
        self._grown: list[GrowingTree] = []  # the number of each: of the row of the batch that its first leaf is
        self._known: dict[tuple[int, int], torch.Tensor] = {}  # [F], by tree and leaf: rewards while trees grew
        self._inputs: Sequence[Mapping[str, Any]] = ()
        self._rewards: torch.Tensor | None = None  # [rows of all processes, F]
        self._last_step, self._calls = -1, 0
        self._calculate = trainer._calculate_rewards
        self._generate = trainer._generate_and_score_completions

    def install(self) -> None:
        """Puts this in place of the trainer's own sampling."""
        trainer = self.trainer

        def calculate(
            _: object, inputs: object, prompts: object, completions: object, completion_ids: object
        ) -> torch.Tensor:
            leaves = [(each.number, leaf) for each in self._grown for leaf in each.tree.leaves]
            if leaves and self._known.keys() >= set(leaves):
                self._rewards = torch.stack([self._known[leaf] for leaf in leaves])
            else:
                self._rewards = self._calculate(inputs, prompts, completions, completion_ids)
            return self._rewards

        def generate(_: object, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            self._inputs = inputs
            output: dict[str, Any] = self._generate(inputs)
            if self.trainer.model.training:
                self._credit(output)
            self._grown, self._known, self._rewards = [], {}, None
            return output

        trainer.rollout_func = self.rollouts
        trainer._calculate_rewards = MethodType(calculate, trainer)
        trainer._generate_and_score_completions = MethodType(generate, trainer)

    # -- sampling -----------------------------------------------------------------------------------------------------

    def rollouts(self, prompts: list[Any], trainer: "GRPOTrainer") -> dict[str, Any]:
        """TRL's `rollout_func`: `num_generations` completions of each prompt, from one tree.

        Raises:
            ConfigError: images; groups that are spread over processes.
        """
        is_training = trainer.model.training
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        _check_groups(prompts, size)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ConfigError("tree_rollouts samples from token ids alone, and the prompts hold images.")
        policy = self.policy if is_training else branching_named("none", roots=size)
        self._grown = self._new_trees(prompts, prompt_ids, size)
        rounds = self._rounds(trainer, policy)
        while batch := [(each, one) for each in self._grown for one in self._next_round(each, size, rounds)]:
            continue_all([one for _, one in batch], rounds)
            ended = [(each, each.add(one)) for each, one in batch]
            if policy.name in _NEEDS_REWARDS:
                self._judge([(each, leaf) for each, leaf in ended if leaf is not None])
        rows = [(each, leaf) for each in self._grown for leaf in each.tree.leaves]
        if is_training:
            self._count(rows)
        return {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "completion_ids": [_completion_ids(each, leaf) for each, leaf in rows],
            "logprobs": [each.tree.path(leaf, "logprobs").tolist() for each, leaf in rows],
        }

    def _new_trees(self, prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]], size: int) -> list[GrowingTree]:
        step = int(self.trainer.state.global_step)
        self._calls = self._calls + 1 if step == self._last_step else 0
        self._last_step = step
        rank = self.trainer.accelerator.process_index
        found = []
        for first in range(0, len(prompts), size):
            seed = (self.trainer.args.seed, step, self._calls, rank, first)
            tree = RolloutTree(prompt_ids[first], group=first)
            key = " ".join(map(str, prompt_ids[first]))
            item, begin = TaskItem(key, prompts[first]), OneTurn(list(prompt_ids[first]))
            rng = np.random.default_rng(seed)
            found.append(GrowingTree(first, item, key, tree, begin, _WITHOUT_LIMIT, seed, rng))
        return found

    def _rounds(self, trainer: "GRPOTrainer", policy: Branching) -> Rounds:
        stop_ids = tuple(dict.fromkeys(int(token) for token in trainer.eos_token_ids))
        request = SampleRequest(
            (0,),
            temperature=float(trainer.temperature),
            top_p=float(trainer.top_p),
            top_k=int(trainer.top_k or 0),
            stop_ids=stop_ids,
            want_entropy="entropies" in policy.streams,
        )
        nothing: Any = None  # rewards are the trainer's
        return Rounds(
            branching=policy,
            sampler=self.sampler,
            book=self.book,
            rewards=nothing,
            journal=Journal(None),
            limits=Limits(int(trainer.max_completion_length), _WITHOUT_LIMIT, stop_ids),
            request=request,
        )

    def _next_round(self, each: GrowingTree, size: int, rounds: Rounds) -> list[Continuation]:
        """As many as the tree has room for."""
        room = size - len(each.tree.leaves)
        started = each.next_round(rounds) if room > 0 else []
        each.num_started -= len(started[room:])
        return started[:room]

    def _judge(self, ended: Sequence[tuple[GrowingTree, int]]) -> None:
        """Rewards of completions while their trees grow, by the trainer's own functions, which are not called again."""
        texts = self._completions(ended)
        inputs = [dict(self._inputs[each.number]) for each, _ in ended]
        prompts = [each.item.prompt for each, _ in ended]
        rewards = self._calculate(inputs, prompts, texts, [_completion_ids(each, leaf) for each, leaf in ended])
        for (each, leaf), row, total in zip(ended, rewards, _totals(self.trainer, rewards), strict=True):
            self._known[each.number, leaf] = row
            _give(each.tree, leaf, total)

    def _completions(self, ended: Sequence[tuple[GrowingTree, int]]) -> list[Any]:
        """As TRL decodes them for reward functions."""
        from trl.chat_template_utils import parse_response

        tokenizer = self.trainer._tokenizer
        ids = [_completion_ids(each, leaf) for each, leaf in ended]
        if isinstance(ended[0][0].item.prompt, str):
            texts: list[Any] = self.trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
            return texts
        names = ("response_template", "response_schema")
        if any(getattr(tokenizer, name, None) is not None for name in names):
            prefixes = [each.tree.prompt_ids.tolist() for each, _ in ended]
            return [[parse_response(tokenizer, own, prefix=before)] for own, before in zip(ids, prefixes, strict=True)]
        contents = self.trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]

    def _count(self, rows: Sequence[tuple[GrowingTree, int]]) -> None:
        counts = self.counts
        counts.num_batches += 1
        counts.num_trees += len(self._grown)
        counts.num_branches += sum(node.parent != PROMPT for each in self._grown for node in each.tree.nodes)
        counts.num_completion_tokens += sum(len(_completion_ids(each, leaf)) for each, leaf in rows)
        counts.num_sampled_tokens += sum(each.tree.num_sampled_tokens for each in self._grown)

    # -- advantages ---------------------------------------------------------------------------------------------------

    def _credit(self, output: dict[str, Any]) -> None:
        """Replaces the advantages [B] of a batch by those of its trees, [B, C]; rows without a reward have 0."""
        assert self._rewards is not None
        rows = [(each, leaf) for each in self._grown for leaf in each.tree.leaves]
        first = self.trainer.accelerator.process_index * len(rows)
        totals = _totals(self.trainer, self._rewards[first : first + len(rows)])
        for (each, leaf), total in zip(rows, totals, strict=True):
            if each.tree[leaf].reward is None and each.tree[leaf].error is None:
                _give(each.tree, leaf, total)
        for each in self._grown:
            self.book.observe_tree(each.key, each.tree)
        if self.advantages is None:
            return
        table = torch.zeros(output["completion_ids"].shape, dtype=torch.float32)
        row_of = {(id(each), leaf): number for number, (each, leaf) in enumerate(rows)}
        rewarded = [each for each in self._grown if each.tree.rewarded_leaves]
        if rewarded:
            trees = [each.tree.trajectories() for each in rewarded]
            credited, _ = credit(trees, self.advantages, self.advantages_settings)
            for each, own in zip(rewarded, credited, strict=True):
                for leaf, item in zip(each.tree.rewarded_leaves, own, strict=True):
                    values = np.asarray(item.advantages)[len(each.tree.prompt_ids) :]
                    table[row_of[id(each), leaf], : len(values)] = torch.from_numpy(values.astype(np.float32))
        output["advantages"] = table.to(output["advantages"].device)


def tree_rollouts(
    trainer: "GRPOTrainer",
    branching: str = "random",
    *,
    branching_settings: Mapping[str, Any] | None = None,
    advantages: str | None = "tree_path_mean",
    advantages_settings: Mapping[str, Any] | None = None,
    sampler: Sampler | None = None,
    max_tokens: int | str | None = None,
) -> TreeRollouts:
    """Lets a `GRPOTrainer` of TRL (1.16 or later) sample trees, credit them on the tree, and train each shared token
    once. Call it after the trainer is built, and before `train()`.

    Each prompt grows one tree of exactly `num_generations` leaves. Lengths, temperature, top-p and top-k are the
    trainer's. In evaluation completions are independent. `lcr` gets rewards while a tree grows, by the trainer's reward
    functions, each of which sees every completion once; its book of successes is not in TRL's checkpoints.

    Parameters:
        branching, branching_settings: a policy of `treewise.rl.branching`.
        advantages, advantages_settings: of `treewise rl --advantages`, one for each token; None keeps TRL's.
        sampler: None for the trainer's model, in this process.
        max_tokens: of `share_prefixes`.

    Raises:
        ConfigError: a trainer with vLLM, tools, environments, Liger's loss or a `rollout_func`; settings that trees
            cannot follow.
    """
    policy = branching_named(branching, **(branching_settings or {}))
    _check_trainer(trainer, policy, advantages)
    model = trainer.accelerator.unwrap_model(trainer.model)
    installed = TreeRollouts(
        trainer,
        policy,
        TransformersSampler(model) if sampler is None else sampler,
        advantages,
        advantages_settings or {},
    )
    installed.install()
    installed.sharing = share_prefixes(trainer.model, max_tokens)
    return installed


def _completion_ids(each: GrowingTree, leaf: int) -> list[int]:
    ids: list[int] = each.tree.path(leaf, "token_ids").tolist()
    return ids


def _check_trainer(trainer: "GRPOTrainer", policy: Branching, advantages: str | None) -> None:
    if not hasattr(trainer, "_generate_and_score_completions") or not hasattr(trainer, "rollout_func"):
        raise ConfigError(f"tree_rollouts needs a GRPOTrainer of TRL 1.16 or later, not {type(trainer).__name__}.")
    if policy.name in _NOT_FOR_COMPLETIONS:
        why = _NOT_FOR_COMPLETIONS[policy.name]
        raise ConfigError(f"branching={policy.name!r} does not give a fixed number of completions: {why}.")
    problems = {
        "use_vllm": getattr(trainer, "use_vllm", False),
        "tools or environment_factory": getattr(trainer, "tools", None)
        or getattr(trainer, "environment_factories", None),
        "a rollout_func": trainer.rollout_func is not None,
        "use_liger_kernel": getattr(trainer, "use_liger_kernel", False),
        "min_p": getattr(trainer, "min_p", None),
        "repetition_penalty": getattr(trainer, "repetition_penalty", 1.0) not in (None, 1.0),
        "generation_kwargs": getattr(trainer.args, "generation_kwargs", None),
    }
    found = [name for name, is_set in problems.items() if is_set]
    if found:
        raise ConfigError(f"tree_rollouts cannot be combined with {', '.join(found)}; leave that out.")
    if policy.name in _NEEDS_REWARDS and trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"branching={policy.name!r} needs rewards while a tree grows, which TRL gathers over all processes; run "
            "one process, or choose random or entropy."
        )
    if advantages is not None and getattr(trainer, "multi_objective_aggregation", "") == "normalize_then_sum":
        raise ConfigError(
            "advantages of a tree need one reward a completion; set multi_objective_aggregation to "
            "'sum_then_normalize', or advantages=None."
        )


def _check_groups(prompts: Sequence[Any], size: int) -> None:
    for first in range(0, len(prompts), size):
        own = prompts[first : first + size]
        if len(own) != size or any(each != own[0] for each in own):
            raise ConfigError(
                f"a group of {size} completions is spread over processes or batches; let per_device_train_batch_size * "
                f"steps_per_generation (now {len(prompts)} rows) be a multiple of num_generations, {size}."
            )


def _totals(trainer: "GRPOTrainer", rewards: torch.Tensor) -> list[float]:
    """The weighted sum of each row; NaN where no function rewards it."""
    weighted = rewards * trainer.reward_weights.to(rewards.device)[None]
    totals = weighted.nansum(dim=1)
    totals[rewards.isnan().all(dim=1)] = float("nan")
    values: list[float] = totals.tolist()
    return values


def _give(tree: RolloutTree, leaf: int, total: float) -> None:
    if np.isnan(total):
        tree.judge(leaf, error="no reward function rewards it")
    elif not np.isfinite(total):
        raise DataError(f"completion {leaf} of a tree: its reward is {total}; rewards must be finite.")
    else:
        tree.judge(leaf, reward=total)
