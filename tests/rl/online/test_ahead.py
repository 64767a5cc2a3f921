"""`max_staleness`: the next iterations are sampled by older policies, and a loss, a kill and a log know by which."""

import json
import threading

import numpy as np
import pytest
import torch

from tests.rl.online.helpers import EvenBytes, digest, new_trainer, tiny_policy
from tests.rl.online.test_continuing import SECONDS, Scripted
from tests.rl.online.test_loop import Killed, raise_at
from treewise import advantages
from treewise.data import load_trees
from treewise.distributed import ranks
from treewise.errors import ConfigError, TaskError
from treewise.objectives import GRPO
from treewise.rl.online import OnlineTrainer
from treewise.rl.online.ahead import Ahead
from treewise.rl.online.records import rollouts_file
from treewise.rl.samplers import TransformersSampler
from treewise.rl.tasks import RewardRunner
from treewise.trainer.step import StepRunner

RUN = {"iterations": 4, "eval_every": 2, "max_staleness": 1}
SGD = {"optim": "sgd", "learning_rate": 3.0, "max_grad_norm": 0.0}


def rows_of(trainer, iteration):
    trees = load_trees(rollouts_file(trainer.folder, iteration))
    return [row for tree in trees for row in tree.labelled_trajectories()]


def logprobs_of(model, row):
    ids = torch.tensor(row.token_ids.tolist())[None]
    return model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def policy_after(trainer, iteration):
    """The policy that so many iterations have trained; 0: before the run."""
    if not iteration:
        return tiny_policy()
    return type(trainer.model).from_pretrained(trainer.folder / f"checkpoint-{iteration}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trainer = new_trainer(tmp_path_factory.mktemp("whole") / "run", arguments_=SGD, **RUN)
    trainer.train()
    return trainer


def test_every_token_has_the_version_of_the_policy_that_made_it(undisturbed):
    for iteration in range(1, 5):
        version = max(0, iteration - 2)
        policy, later = policy_after(undisturbed, version), policy_after(undisturbed, version + 1)
        gaps = []
        for row in rows_of(undisturbed, iteration):
            is_sampled = row.loss_weights > 0
            assert set(row.policy_versions[is_sampled]) == {version}
            assert set(row.policy_versions[~is_sampled]) == {-1}
            given, trained = row.sampler_logprobs[1:], is_sampled[1:]
            with torch.no_grad():
                own, other = (logprobs_of(each, row).numpy() for each in (policy, later))
            np.testing.assert_allclose(given[trained], own[trained], atol=1e-5)
            gaps.append(np.abs(given - other)[trained].max())
        assert max(gaps) > 1e-3
    logs = [each for each in undisturbed.log_history if "staleness" in each]
    assert [each["staleness"] for each in logs] == [0, 1, 1, 1]
    assert all(abs(each["sampler_ratio"] - 1) > 1e-4 for each in logs[1:])
    assert all("sampler_truncated" in each for each in logs)


def test_an_update_has_the_gradients_of_truncated_importance_sampling(undisturbed):
    iteration = 3
    model, rows = policy_after(undisturbed, iteration - 1), rows_of(undisturbed, iteration)
    items, _ = advantages.group_normalized(rows)
    for item in items:
        logprobs = logprobs_of(model, item)
        weights = torch.tensor(item.loss_weights[1:].tolist())
        behaviour = torch.tensor(item.sampler_logprobs[1:].tolist())
        correction = (logprobs.detach() - behaviour).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        losses = -correction * ratio * torch.tensor(item.advantages[1:].tolist())
        ((weights * losses).sum() / weights.sum() / len(items)).backward()
    after = dict(policy_after(undisturbed, iteration).named_parameters())
    largest = max(float(each.grad.abs().max()) for each in model.parameters())
    assert largest > 1e-3
    for name, before in model.named_parameters():
        step = (before - after[name]).detach() / SGD["learning_rate"]
        torch.testing.assert_close(step, before.grad, rtol=0, atol=1e-5 * max(largest, 1.0), msg=name)


KILLS = {
    "reward": (RewardRunner, "rewards", 6, False),
    "within an update": (StepRunner, "end_step", 2, True),
    "after an update, before its checkpoint": (OnlineTrainer, "_train_on", 3, True),
}


@pytest.mark.representatives("within an update")
@pytest.mark.parametrize("stage", KILLS)
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(stage, undisturbed, tmp_path, monkeypatch):
    first = new_trainer(tmp_path / "run", arguments_=SGD, **RUN)
    with monkeypatch.context() as patch:
        owner, name, call, after = KILLS[stage]
        raise_at(patch, owner, name, call, after=after)
        with pytest.raises(Killed):
            first.train()
    second = new_trainer(tmp_path / "run", arguments_=SGD, **RUN)
    second.train(resume_from_checkpoint=True)
    assert digest(second.model) == digest(undisturbed.model)
    for iteration in range(1, 5):
        own, whole = (rollouts_file(each.folder, iteration).read_bytes() for each in (second, undisturbed))
        assert own == whole
    assert [each["eval_reward"] for each in second.log_history if "eval_reward" in each] == [
        each["eval_reward"] for each in undisturbed.log_history if "eval_reward" in each
    ]


def test_more_staleness_is_bounded_and_recorded(tmp_path):
    trainer = new_trainer(tmp_path / "run", **{**RUN, "max_staleness": 3, "eval_every": 0})
    trainer.train()
    for iteration in range(1, 5):
        versions = {int(v) for row in rows_of(trainer, iteration) for v in row.policy_versions[row.loss_weights > 0]}
        assert len(versions) == 1
        assert iteration - 1 - 3 <= min(versions) <= max(0, iteration - 2)


class Server(Scripted):
    """Has weights of its own: how often it got new ones, and how many it had at each call."""

    def __init__(self):
        super().__init__()
        self.num_updates, self.at_calls = 0, []

    def update(self, model):
        self.num_updates += 1

    def sample(self, requests):
        self.at_calls.append(self.num_updates)
        return super().sample(requests)


def test_a_sampler_with_weights_of_its_own_gets_them_between_iterations(tmp_path):
    server = Server()
    trainer = new_trainer(tmp_path / "run", sampler=server, **RUN)
    trainer.train()
    assert server.num_updates == 6  # at first, before each of four iterations, and for the last evaluation
    assert sorted(server.at_calls) == server.at_calls
    draws = [
        json.loads(line) for n in (1, 2, 3, 4) for line in rollouts_file(trainer.folder, n).read_text().splitlines()
    ]
    assert {max(each["policy_versions"]) for each in draws} == {0, 1, 2}


def test_what_the_thread_ends_with_ends_the_run(tmp_path):
    class Broken(EvenBytes):
        def rewards(self, requests):
            raise ValueError("no answer")

    with pytest.raises(TaskError, match=r"iteration 1: \d+ of \d+ rollouts without reward"):
        new_trainer(tmp_path / "run", Broken("broken"), **{**RUN, "eval_every": 0}).train()


def test_losses_and_curricula_that_older_policies_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="sampler_correction: truncate"):
        new_trainer(tmp_path / "run", objective=GRPO(weighting="per_rollout"), **RUN)
    new_trainer(tmp_path / "run", objective=GRPO(weighting="per_rollout"), old_logprobs="sampler", **RUN)
    force = {"curriculum": "gain", "curriculum_settings": {"force": True}, "num_items": 4, "check_items": 0}
    with pytest.raises(ConfigError, match="measures angles"):
        new_trainer(tmp_path / "run", **{**RUN, **force})


def test_the_copy_shares_what_is_not_trained(tmp_path):
    model = tiny_policy()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    trainer = new_trainer(tmp_path / "run", model=model, **RUN)
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    whole = sum(each.numel() * each.element_size() for each in [*model.parameters(), *model.buffers()])
    assert trainer.sampler.copy.num_bytes == whole - 4 * frozen
    assert isinstance(trainer.sampler, TransformersSampler)


def test_the_trainer_never_waits_for_the_thread_nor_the_thread_for_it_in_vain():
    order = []
    ahead = Ahead(lambda iteration, version: (iteration, version), lambda: lambda: order.append("new"), 3, 40, 2)
    ahead.start()
    for iteration in range(3, 40):
        assert ahead.take(iteration)[0] == iteration
        with ahead.working(version=iteration + 1):
            order.append(iteration)
        with ahead.newest():
            pass
    ahead.close()
    assert [each for each in order if each != "new"] == list(range(3, 40))


class Ranks:
    """Several ranks of one process: what their threads exchange, and what their trainers do together."""

    def __init__(self, number, monkeypatch):
        self.thread, self.values = threading.local(), [None] * number
        self.met, self.trained = (threading.Barrier(number, timeout=SECONDS) for _ in range(2))
        monkeypatch.setattr(ranks, "go_through", lambda rank: setattr(self.thread, "rank", rank))
        monkeypatch.setattr(ranks, "on_every_rank", self.exchange)

    def exchange(self, work):
        self.values[self.thread.rank] = work()
        self.met.wait()
        found = list(self.values)
        self.met.wait()
        return found


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("number", [2, 3])
def test_threads_of_several_processes_take_the_same_weights_between_the_same_spells(number, staleness, monkeypatch):
    """Trainers wait for one another within each spell, as collective operations do, so each ends only where all begin
    it; the work between takes as long as chance has it.
    """
    several, last = Ranks(number, monkeypatch), 60
    sampled, taken, errors = ([[] for _ in range(number)] for _ in range(3))

    def work(rng):
        sum(range(int(10 ** rng.uniform(1, 5))))

    def ahead_of(rank, rng):
        def collect(iteration, version):
            work(rng)
            sampled[rank].append((iteration, version))
            return iteration

        def hand_over():
            several.exchange(lambda: None)  # gathers weights of all
            taken[rank].append((ahead._num_ended, ahead._version))
            return lambda: work(rng)

        ahead = Ahead(collect, hand_over, 0, last, staleness, rank)
        return ahead

    def train(rank):
        rng = np.random.default_rng([number, staleness, rank])
        ahead = ahead_of(rank, np.random.default_rng([number, staleness, rank, 1]))
        ahead.start()
        try:
            for iteration in range(last):
                assert ahead.take(iteration) == iteration
                for version in (iteration + 1, None):  # trains, saves
                    work(rng)
                    with ahead.working(version):
                        several.trained.wait()
                        work(rng)
        except BaseException as error:
            errors[rank].append(error)
        ahead.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(number)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == [[] for _ in range(number)]
    assert sampled == [sampled[0]] * number
    assert taken == [taken[0]] * number
    assert all(iteration - staleness <= version <= iteration for iteration, version in sampled[0])
    assert staleness > 1 or [version for _, version in sampled[0]] == [0, *range(last - 1)]
