"""Trees in a GRPOTrainer: TRL trains what it would have trained on the same completions, at the tree's advantages."""

from types import MethodType

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import treewise as tw
from tests.integrations.trl.conftest import build, prompts  # noqa: F401 - fixtures
from treewise.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


class SmallIds:
    """A reward that a sampled completion earns in part, and how often it was asked for."""

    __name__ = "small_ids"

    def __init__(self):
        self.num_rewards = 0

    def __call__(self, completion_ids, **_):
        self.num_rewards += len(completion_ids)
        return [float(sum(token < 32 for token in ids) > len(ids) / 2) for ids in completion_ids]


def new_trainer(build, prompts, reward, **changes):  # noqa: F811
    given = {
        "num_generations": 6,
        "per_device_train_batch_size": 12,
        "max_completion_length": 8,
        "learning_rate": 0.05,
        "max_steps": 2,
        "beta": 0.0,
        **changes,
    }
    torch.manual_seed(0)
    return build(GRPOTrainer, GRPOConfig, prompts, more=lambda: {"reward_funcs": reward}, **given)()


def recorded(trainer):
    """What the sampling of a trainer gave at each step: (rollouts, advantages)."""
    found = []
    sample, generate = trainer.rollout_func, trainer._generate_and_score_completions

    def rollouts(*args):
        found.append([sample(*args)])
        return found[-1][0]

    def scored(_, inputs):
        output = generate(inputs)
        found[-1].append(output["advantages"].clone())
        return output

    trainer.rollout_func = rollouts
    trainer._generate_and_score_completions = MethodType(scored, trainer)
    return found


def recorded_training(trainer):
    found = recorded(trainer)
    train(trainer)
    return found


def train(trainer):
    torch.manual_seed(1)
    trainer.train()
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


@pytest.mark.representatives("entropy-None")
@pytest.mark.parametrize(("branching", "advantages"), [("random", "tree_path_mean"), ("entropy", None)])
def test_the_updates_are_those_of_trl_on_the_same_completions(build, prompts, branching, advantages):  # noqa: F811
    trainer = new_trainer(build, prompts, SmallIds())
    settings = {"variations": 4, "per_round": 2}
    installed = tw.tree_rollouts(trainer, branching, branching_settings=settings, advantages=advantages)
    steps = recorded(trainer)
    found = train(trainer)
    assert installed.counts.share_ratio > 1.1
    assert installed.counts.num_trees == 2 * len(steps) == 4
    assert installed.sharing.counts.share_ratio > installed.counts.share_ratio
    assert [table.dim() for _, table in steps] == [1 if advantages is None else 2] * 2

    flat = new_trainer(build, prompts, SmallIds())
    answers = iter(steps)
    generate = flat._generate_and_score_completions

    def scored(_, inputs):
        output = generate(inputs)
        if advantages is not None:
            output["advantages"] = current[0][1]
        else:
            torch.testing.assert_close(output["advantages"], current[0][1])
        return output

    current = []

    def rollouts(*_):
        current[:] = [next(answers)]
        return current[0][0]

    flat.rollout_func = rollouts
    flat._generate_and_score_completions = MethodType(scored, flat)
    expected = train(flat)
    before = new_trainer(build, prompts, SmallIds()).model.state_dict()
    moved = sum(float((expected[name] - before[name]).square().sum()) for name in expected) ** 0.5
    error = sum(float((expected[name] - found[name]).square().sum()) for name in expected) ** 0.5
    assert moved > 1e-4
    assert error < 1e-5 * moved


def path_means(group, rewards):
    """TreePO's advantage by definition: against each set of completions that share some prefix, equal sets once."""
    found = []
    for row, ids in enumerate(group):
        sets = {
            tuple(other for other in range(len(group)) if group[other][:size] == ids[:size])
            for size in range(len(ids) + 1)
        }
        steps = [rewards[row] - sum(rewards[each] for each in own) / len(own) for own in sets if len(own) > 1]
        found.append(sum(steps) / len(steps))
    return found


def test_advantages_are_those_of_the_tree_by_definition(build, prompts):  # noqa: F811
    trainer = new_trainer(build, prompts, SmallIds(), max_steps=1)
    tw.tree_rollouts(trainer, branching_settings={"variations": 6})
    (step,) = recorded_training(trainer)
    ids, rewards = step[0]["completion_ids"], SmallIds()(step[0]["completion_ids"])
    assert len(set(rewards)) == 2
    for first in (0, 6):
        expected = path_means(ids[first : first + 6], rewards[first : first + 6])
        for row, value in enumerate(expected, start=first):
            torch.testing.assert_close(step[1][row, : len(ids[row])], torch.full((len(ids[row]),), value))
            assert not step[1][row, len(ids[row]) :].any()


def test_lcr_gets_every_reward_once_while_trees_grow(build, prompts):  # noqa: F811
    reward = SmallIds()
    trainer = new_trainer(build, prompts, reward)
    installed = tw.tree_rollouts(trainer, "lcr", branching_settings={"threshold": 0.3, "variations": 6})
    train(trainer)
    assert reward.num_rewards == 24  # two steps of two prompts
    assert installed.counts.num_branches > 0
    assert len(installed.book.state_dict()["tasks"]) > 0


def test_evaluation_samples_independent_completions(build, prompts):  # noqa: F811
    trainer = new_trainer(build, prompts, SmallIds(), num_generations_eval=3, per_device_eval_batch_size=6)
    installed = tw.tree_rollouts(trainer)
    logs = trainer.evaluate(prompts.select(range(4)))
    assert 0 <= logs["eval_reward"] <= 1
    assert installed.counts.num_batches == 0


def test_trainers_that_trees_cannot_follow_are_refused(build, prompts):  # noqa: F811
    trainer = new_trainer(build, prompts, SmallIds())
    with pytest.raises(ConfigError, match="fixed number"):
        tw.tree_rollouts(trainer, "segments")
    with pytest.raises(ConfigError, match="GRPOTrainer"):
        tw.tree_rollouts(object())
    tw.tree_rollouts(trainer)
    with pytest.raises(ConfigError, match="rollout_func"):
        tw.tree_rollouts(trainer)
    with pytest.raises(ConfigError, match="multiple of num_generations"):
        trainer.rollout_func(["w1 w2"] * 5, trainer)
