"""What an online run is made of besides the model's training: tasks per iteration, budgets, branching, evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from treewise.base.given_settings import check_setting_types
from treewise.data.io.options import check_date
from treewise.errors import ConfigError, check_fields
from treewise.rl.branching import Branching, branching_named
from treewise.rl.checks import MAX_GAP
from treewise.rl.curriculum import Curriculum, curriculum_named
from treewise.rl.success_book import BookSettings
from treewise.rl.tasks.rewards import MAX_FAILED

if TYPE_CHECKING:
    from treewise.objectives import Objective
    from treewise.trainer import TreeTrainingArguments

Count = Annotated[int, Ge(1)]
CountOrNone = Annotated[int, Ge(0)]  # 0: none, or never


def check_parted(settings: "OnlineSettings", args: "TreeTrainingArguments") -> None:
    """Raises `ConfigError` for a curriculum that computes with the model beside its steps, where several processes
    compute one batch together, or hold its parameters in parts.
    """
    if not args.is_parted and args.ranks_per_batch == 1:
        return
    if settings.chosen_curriculum().measures_angles:
        raise ConfigError(
            f"curriculum {settings.curriculum!r} measures angles with the model, which fsdp, tp_size, ep_size or "
            "context_size spread over processes; leave one of the two out."
        )


def online_objective(
    objective: "Objective | str",
    settings: "OnlineSettings",
    args: "TreeTrainingArguments",
    reference: object,
    model: object,
) -> "Objective":
    """The objective of a run; one that is given by its name has the settings of online runs.

    Raises:
        ConfigError: settings of a training run that an online run does not have; older weights sample than a loss or a
            curriculum allows; a KL without a reference that stays where it is, or a reference
            without a KL.
    """
    from treewise.objectives.registry import objective_named

    check_parted(settings, args)
    staleness = settings.max_staleness
    if isinstance(objective, str):
        is_policy_gradient = objective not in ("sft", "distillation")
        more: dict[str, Any] = {"measure_entropy": True} if is_policy_gradient else {}
        if staleness and is_policy_gradient:
            more["sampler_correction"] = "truncate"
        objective = objective_named(objective, weighting="per_rollout", **more)
    has_ratio = settings.old_logprobs == "sampler" and getattr(objective, "surrogate", None) != "reinforce"
    if staleness and getattr(objective, "sampler_correction", "none needed") is None and not has_ratio:
        raise ConfigError(
            f"max_staleness={staleness}: rollouts are sampled by an older policy than the one that trains on them; "
            "give the objective sampler_correction: truncate (or mask), or old_logprobs: sampler."
        )
    if staleness and settings.chosen_curriculum().measures_angles:
        raise ConfigError(
            f"curriculum {settings.curriculum!r} measures angles with the model that trains, so it cannot draw items "
            "meanwhile; leave max_staleness out."
        )
    beta = getattr(objective, "beta", 0.0)
    if beta and reference is None and not hasattr(model, "peft_config"):
        raise ConfigError(
            f"beta={beta} is a KL to a reference, and the policy itself moves at every iteration; give "
            "reference=<the model before the run>, or train adapters."
        )
    if reference is not None and not beta:
        raise ConfigError("reference is given, but the objective has no KL to it (beta); leave one of them out.")
    return objective


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSettings:
    """Settings of `OnlineTrainer`. A token counts here when it was generated; prompts and observations do not.

    Parameters:
        iterations: of the run.
        trees_per_iteration: tasks of an iteration, one tree each.
        tokens_per_iteration: generated tokens of an iteration, over all of its trees, whatever their shape. What an
            iteration passes it by is taken off later ones.
        max_new_tokens: generated tokens of one rollout at most.
        max_staleness: 0: sampling and training take turns. 1 and more: while an iteration trains, the next ones are
            sampled with weights that are so many iterations old at most.
        max_length: tokens of prompt and rollout at most; None: what the model's positions allow.
        branching, branching_settings: a policy of `treewise.rl.branching` and its settings.
        advantages, advantages_settings: of `treewise rl --advantages`; None: the one that the objective was published
            with.
        drop_flat_groups: leave out the trees that teach nothing, as where all rewards are equal.
        mini_batches, update_epochs: the trees of an iteration are cut into so many optimizer steps, so many times.
        old_logprobs: as of `treewise rl`.
        top_p, top_k: cut the distribution that is sampled; the temperature is that of the training arguments.
        num_candidates: most likely tokens recorded at each position, of those that top-k and top-p leave (`lcr` draws
            new actions from them); 0: none.
        routing_replay: of a mixture of experts: `exact` has the sampler record the experts of every token, trains
            through them, and rollouts part where they differ; `by_tokens` merges by tokens alone and gives all the
            experts of the first rollout, which is not exact; `off` records none.
        curriculum, curriculum_settings: which items are practised next (`treewise.rl.curriculum`), and its settings.
        book_settings: of the book of successes: `decay`, `prior_successes`, `prior_failures`.
        check_items, check_rollouts: of `gain`, how many items its self-check samples before the first iteration, and
            rollouts of each; 0 items: no self-check.
        num_items: only the first so many items are practised; None: all of the task, and for a task without end new
            ones at every iteration.
        eval_every: iterations between evaluations on held-out items (also before the first and after the last
            iteration); 0: never.
        eval_items: their number.
        eval_temperature: of their rollouts; 0 is greedy.
        show_every: iterations between two of which a best and a worst rollout are printed, with their text (the first
            and the last, too), and held-out samples of each evaluation; 0: never.
        success_at: rewards from here on are successes: of pass@1, the book, and `lcr`.
        save_every: iterations between checkpoints; there is always one after the last.
        reward_timeout: seconds for one call of a reward function, a tool or `reset`; None: no limit.
        on_reward_error: `quarantine` (set the rollout aside and count it) or `raise`.
        max_failed: the share of an iteration's rollouts that may have no reward; beyond it the run ends with an error.
        reward_workers: processes in which reward functions and environments run, and which are killed at the time
            limit; 0: threads of this process, which are left behind.
        episodes_at_once: environments that work at a time in such threads; 1: one after the other.
        gather_seconds: for so long requests that are ready wait for environments, or agents, that have none, to be
            sampled as one batch; null: until all have, so that no log-prob depends on time, not even by rounding.
        logprob_gap_limit: a run warns where sampler and engine differ by more (1: no gap).
        chat_template: in place of the tokenizer's: a text, a file, or `chatml`.
        template_date: the date that a chat template writes as today's, as 2026-11-28; that of the first start where not
            given.

    Raises:
        ConfigError: a value out of range, an unknown branching or curriculum, or one of their settings.
    """

    iterations: Count = 50
    trees_per_iteration: Count = 8
    tokens_per_iteration: Count = 8192
    max_new_tokens: Count = 256
    max_staleness: CountOrNone = 0
    max_length: Annotated[int, Ge(2)] | None = None
    branching: str = "none"
    branching_settings: Mapping[str, Any] = field(default_factory=dict)
    advantages: str | None = None
    advantages_settings: Mapping[str, Any] = field(default_factory=dict)
    drop_flat_groups: bool = False
    mini_batches: Count = 1
    update_epochs: Count = 1
    old_logprobs: str = "auto"
    top_p: float = 1.0
    top_k: CountOrNone = 0
    num_candidates: CountOrNone = 0
    routing_replay: Literal["off", "exact", "by_tokens"] = "off"
    curriculum: str = "uniform"
    curriculum_settings: Mapping[str, Any] = field(default_factory=dict)
    book_settings: Mapping[str, Any] = field(default_factory=dict)
    check_items: CountOrNone = 24
    check_rollouts: int = 8
    num_items: Count | None = None
    eval_every: CountOrNone = 10
    eval_items: Count = 64
    eval_temperature: Annotated[float, Ge(0)] = 0.0
    show_every: CountOrNone = 10
    success_at: float = 0.5
    save_every: Count = 5
    reward_timeout: Annotated[float, Gt(0)] | None = 30.0
    on_reward_error: Literal["quarantine", "raise"] = "quarantine"
    max_failed: Annotated[float, Ge(0), Le(1), "it is a share of rollouts"] = MAX_FAILED
    reward_workers: CountOrNone = 0
    episodes_at_once: Count = 64
    gather_seconds: Annotated[float, Ge(0)] | None = 0.1
    logprob_gap_limit: Annotated[float, Ge(1), "at 1 there is no gap"] = MAX_GAP
    chat_template: str | None = None
    template_date: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_date(self.template_date)
        if self.mini_batches > self.trees_per_iteration:
            raise ConfigError(
                f"mini_batches={self.mini_batches} needs at least so many trees, but "
                f"trees_per_iteration={self.trees_per_iteration}."
            )
        if self.num_items is not None and self.num_items < self.trees_per_iteration:
            raise ConfigError(
                f"num_items={self.num_items} is less than trees_per_iteration={self.trees_per_iteration}; the trees "
                "of an iteration are of different items."
            )
        self.policy()
        self.settings_of_book()
        curriculum = self.chosen_curriculum()
        if self.check_items and (self.check_items < 3 or self.check_rollouts < 4):
            raise ConfigError(
                f"check_items={self.check_items}, check_rollouts={self.check_rollouts}: a self-check needs at least 3 "
                "items and 4 rollouts of each; check_items=0 leaves it out."
            )
        if curriculum.measures_angles and not self.check_items and not curriculum.settings.force:
            raise ConfigError(
                f"curriculum {curriculum.name!r} runs only after its self-check, and check_items is 0; give "
                "check_items, or force it: curriculum_settings.force=true."
            )

    def policy(self) -> Branching:
        """The policy that `branching` and `branching_settings` choose."""
        return branching_named(self.branching, **self.branching_settings)

    def chosen_curriculum(self) -> Curriculum:
        """Which items are practised next."""
        return curriculum_named(self.curriculum, **self.curriculum_settings)

    def settings_of_book(self) -> BookSettings:
        """Settings of the book of successes: `book_settings` and `success_at`."""
        given = dict(self.book_settings)
        known = {setting.name: setting.type for setting in fields(BookSettings) if setting.name != "success_at"}
        check_setting_types("book_settings", given, known)
        return BookSettings(**given, success_at=self.success_at)

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer steps of an iteration."""
        return self.mini_batches * self.update_epochs

    def is_due(self, iteration: int, setting: str) -> bool:
        """Whether an `..._every` is due after an iteration (the first is 0); each is after the last, unless it is 0."""
        every = getattr(self, setting)
        return every > 0 and ((iteration + 1) % every == 0 or iteration + 1 == self.iterations)

    def batches(self, num_trees: int, stream: tuple[int, ...]) -> list[list[int]]:
        """The trees of each optimizer step: where fewer are left than `mini_batches`, each is a step. stream: names the
        random streams, with an epoch's number.
        """
        batches: list[list[int]] = []
        for epoch in range(self.update_epochs):
            order = np.random.default_rng([*stream, epoch]).permutation(num_trees)
            batches += [sorted(part.tolist()) for part in np.array_split(order, min(self.mini_batches, num_trees))]
        return batches

    def sampling_facts(self) -> dict[str, Any]:
        """What decides which rollouts a run samples; a resumed run must agree."""
        free = {"iterations", "eval_every", "eval_items", "eval_temperature", "show_every", "save_every"}
        free |= {"reward_timeout", "max_failed", "reward_workers", "episodes_at_once", "gather_seconds"}
        free |= {"logprob_gap_limit", "template_date"}  # of a warning; in `Collector.facts` where prompts hold it
        facts = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name not in free}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in facts.items()}
