"""Nothing is lost when a run is killed, every token is accounted for, and updates equal flat training of the rows."""

import itertools
import logging
import os
import random
import shutil
import signal
import threading
import traceback
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.cli.helpers import files_of
from tests.rl.online.helpers import EvenBytes, arguments, digest, new_trainer, settings, tiny_policy
from treewise.errors import CheckpointError, ConfigError, StoppedError, TaskError, UnsupportedModelError
from treewise.objectives import GRPO, objective_named
from treewise.rl.online import OnlineTrainer, growing, records
from treewise.rl.online.records import rollouts_file
from treewise.rl.online.settings import check_parted
from treewise.rl.samplers import TransformersSampler, copied_weights
from treewise.rl.tasks import RewardRunner
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.manager import CheckpointManager
from treewise.trainer.step import StepRunner

pytestmark = pytest.mark.xdist_group("rl/online/test_loop")


class Killed(BaseException):
    """The end of the process, as far as the run can tell."""


class Counting:
    """A sampler that counts what it gives, and may end the process instead."""

    def __init__(self, model, kill_at=None):
        self.inner, self.kill_at = TransformersSampler(model), kill_at
        self.num_calls = self.num_tokens = 0

    def sample(self, requests):
        self.num_calls += 1
        if self.num_calls == self.kill_at:
            raise Killed
        results = self.inner.sample(requests)
        self.num_tokens += sum(each.num_tokens for group in results for each in group)
        return results

    def update(self, model):
        self.inner.update(model)

    def close(self):
        self.inner.close()


def counted(folder, kill_at=None, **options):
    model = tiny_policy()
    return new_trainer(folder, model=model, sampler=Counting(model, kill_at), **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights, the sampled tokens and the rows of a run that nothing happens to."""
    trainer = counted(tmp_path_factory.mktemp("whole") / "run")
    trainer.train()
    rows = [rollouts_file(trainer.folder, iteration).read_bytes() for iteration in (1, 2)]
    return digest(trainer.model), trainer.sampler.num_tokens, rows


def raise_at(monkeypatch, owner, name, call, *, after=False):
    """Ends the process at a call of a function, before or after its work."""
    original, calls = getattr(owner, name), itertools.count(1)

    def replaced(*args, **kwargs):
        is_last = next(calls) == call  # of all threads
        if is_last and not after:
            raise Killed
        result = original(*args, **kwargs)
        if is_last:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, replaced)


KILLS = {
    "reward": (RewardRunner, "rewards", 4, False),
    "rows are written": (records, "write_atomically", 1, False),
    "update": (StepRunner, "begin_step", 2, False),
    "within an update": (StepRunner, "end_step", 1, True),
    "after an update, before its checkpoint": (OnlineTrainer, "_train_on", 1, True),
    "files of a checkpoint are written": (contents, "write_model", 1, True),
    "before a checkpoint gets its name": (store, "publish", 1, False),
    "after a checkpoint got its name": (CheckpointManager, "save", 1, True),
}


@pytest.mark.representatives("reward")
@pytest.mark.parametrize("stage", KILLS)
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(stage, undisturbed, tmp_path, monkeypatch):
    weights, num_tokens, rows = undisturbed
    first = counted(tmp_path / "run")
    with monkeypatch.context() as patch:
        owner, name, call, after = KILLS[stage]
        raise_at(patch, owner, name, call, after=after)
        with pytest.raises(Killed):
            first.train()
    assert digest(first.model) != weights
    second = counted(tmp_path / "run")
    second.train(resume_from_checkpoint=True)
    assert digest(second.model) == weights
    assert first.sampler.num_tokens + second.sampler.num_tokens == num_tokens  # nothing is sampled twice
    assert [rollouts_file(second.folder, iteration).read_bytes() for iteration in (1, 2)] == rows


@pytest.mark.exhaustive
def test_a_run_killed_at_random_moments_again_and_again(undisturbed, tmp_path):
    draw = random.Random(0)
    for _ in range(40):
        pid = os.fork()
        if pid == 0:
            try:
                counted(tmp_path / "run").train(resume_from_checkpoint=True)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        timer = threading.Timer(draw.uniform(0.0, 1.0), os.kill, (pid, signal.SIGKILL))
        timer.start()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        timer.cancel()
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            break
    again = counted(tmp_path / "run")
    again.train(resume_from_checkpoint=True)  # nothing is left; it loads the end
    assert digest(again.model) == undisturbed[0]
    assert [rollouts_file(again.folder, iteration).read_bytes() for iteration in (1, 2)] == undisturbed[2]


@pytest.mark.parametrize("save_every", [1, 9])
def test_other_settings_of_updates_leave_no_rollout_of_a_policy_that_this_run_does_not_have(
    save_every, tmp_path, monkeypatch, caplog
):
    """The first run dies when it has sampled its third iteration; with `save_every` 9 that is before a checkpoint."""
    changes = {"iterations": 3, "eval_every": 1, "save_every": save_every}
    first = new_trainer(tmp_path / "run", **changes)
    with monkeypatch.context() as patch:
        raise_at(patch, OnlineTrainer, "_train_on", 3)
        with pytest.raises(Killed):
            first.train()
    for name in ("run", "same"):
        shutil.copytree(first.folder, tmp_path / f"copy-{name}")
    second = new_trainer(tmp_path / "copy-run", arguments_={"learning_rate": 0.05}, **changes)
    with caplog.at_level(logging.WARNING):
        second.train(resume_from_checkpoint=True)
    assert ("settings of updates changed" in caplog.text) == (save_every == 9)  # else the checkpoint's policy sampled
    gaps = [each["logprob_gap"] for each in second.log_history if "logprob_gap" in each]
    assert gaps == pytest.approx([1.0] * 3, abs=1e-4)
    if save_every == 9:
        whole = new_trainer(tmp_path / "whole", arguments_={"learning_rate": 0.05}, **changes)
        whole.train()
        assert digest(second.model) == digest(whole.model)
        for folder in (records.ROLLOUTS, records.EVALUATIONS):
            own, other = (sorted((each.folder / folder).iterdir()) for each in (second, whole))
            assert [path.read_bytes() for path in own] == [path.read_bytes() for path in other]
    caplog.clear()
    same = new_trainer(tmp_path / "copy-same", arguments_={"logging_steps": 7}, **changes)
    monkeypatch.setattr(same.sampler, "sample", lambda requests: pytest.fail("sampled again"))
    raise_at(monkeypatch, OnlineTrainer, "_train_on", 3 if save_every == 9 else 1, after=True)
    with pytest.raises(Killed):  # up to there all is in the journal
        same.train(resume_from_checkpoint=True)
    assert "settings of updates" not in caplog.text


SIGNALLED = {
    "reward": ("rewards", RewardRunner, 6),
    "update": ("_train_on", OnlineTrainer, 2),
    "saving": ("save", CheckpointManager, 1),
}


@pytest.mark.representatives("update")
@pytest.mark.parametrize("stage", SIGNALLED)
def test_a_signal_ends_a_run_that_can_be_resumed(stage, undisturbed, tmp_path, monkeypatch):
    weights, num_tokens, rows = undisturbed
    name, owner, call = SIGNALLED[stage]
    original, calls = getattr(owner, name), []

    def signalled(*args, **kwargs):
        calls.append(name)
        result = original(*args, **kwargs)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return result

    first = counted(tmp_path / "run", save_every=2 if stage == "reward" else 1)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(owner, name, signalled)
    with pytest.raises(StoppedError, match="SIGTERM: stopped after") as stopped:
        first.train()
    monkeypatch.undo()
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert (first.folder / "checkpoint-1").is_dir()  # saved, also where it was not due
    second = counted(tmp_path / "run")
    second.train(resume_from_checkpoint=True)
    assert digest(second.model) == weights
    assert first.sampler.num_tokens + second.sampler.num_tokens == num_tokens
    assert [rollouts_file(second.folder, iteration).read_bytes() for iteration in (1, 2)] == rows


def test_a_signal_while_a_run_starts_ends_it_at_once(tmp_path, monkeypatch):
    trainer = counted(tmp_path / "run")
    monkeypatch.setattr(OnlineTrainer, "_begin", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(OnlineTrainer, "_is_finished", lambda _: pytest.fail("went on"))
    with pytest.raises(StoppedError, match="SIGTERM: stopped after iteration 0"):
        trainer.train()


class AtFirst(TrainerCallback):
    """Ends a run after its first iteration."""

    def on_log(self, args, state, control, logs=None, **_):
        control.should_training_stop = control.should_training_stop or "iteration" in (logs or {})


def test_a_callback_ends_a_run_which_is_whole_and_can_be_resumed(undisturbed, tmp_path):
    folder = tmp_path / "run"
    stopped = counted(folder)
    stopped.add_callback(AtFirst())
    stopped.train()
    assert stopped.loop.iteration == 1
    assert (folder / "model.safetensors").is_file()
    assert store.checkpoints(folder)
    resumed = counted(folder)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed.model) == undisturbed[0]


def test_a_run_of_other_settings_is_not_resumed(tmp_path):
    new_trainer(tmp_path / "run", iterations=1, eval_every=0).train()
    with pytest.raises(CheckpointError, match="online_settings"):
        new_trainer(tmp_path / "run", iterations=2, max_new_tokens=9).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="--resume or --overwrite it"):
        new_trainer(tmp_path / "run").train()


class KilledAtLog(TrainerCallback):
    def on_log(self, *_, **__):
        raise Killed


def test_a_finished_run_is_loaded_and_not_written_again(tmp_path):
    first = new_trainer(tmp_path / "run", iterations=1, eval_every=0)
    first.train()
    files = files_of(first.folder)
    second = new_trainer(tmp_path / "run", iterations=1, eval_every=0)
    assert second.train(resume_from_checkpoint=True)["iteration"] == 1.0
    assert digest(second.model) == digest(first.model)
    assert files_of(first.folder) == files
    longer = new_trainer(tmp_path / "run", iterations=2, eval_every=0)
    longer.add_callback(KilledAtLog())
    with pytest.raises(Killed):  # in the second iteration; what the folder holds is no longer the end
        longer.train(resume_from_checkpoint=True)
    assert not (first.folder / "trainer_state.json").exists()


class HalfFlat(EvenBytes):
    """Of two items, each rollout of the first gets the same reward."""

    def rewards(self, requests):
        found = super().rewards(requests)
        return [1.0 if each.item.key.endswith("/0") else reward for each, reward in zip(requests, found, strict=True)]


def test_fewer_trees_than_mini_batches_are_as_many_steps_which_are_logged(tmp_path):
    settings = {"iterations": 1, "eval_every": 0, "mini_batches": 2, "num_items": 2, "drop_flat_groups": True}
    trainer = new_trainer(tmp_path / "run", HalfFlat(), **settings)
    trainer.train()
    assert trainer.log_history[-1]["optimizer_steps"] == 1
    assert trainer.loop.num_updates == 1


# -- the update -------------------------------------------------------------------------------------------------------


def test_a_token_that_is_lost_is_an_error(tmp_path, monkeypatch):
    trainer = new_trainer(tmp_path / "run", iterations=1, eval_every=0)
    original = growing.GrowingTree.add

    def add(self, continuation):
        continuation.num_drawn += 1
        return original(self, continuation)

    monkeypatch.setattr(growing.GrowingTree, "add", add)
    with pytest.raises(Exception, match="the sampler gave"):
        trainer.train()


def test_an_objective_without_advantages_trains(tmp_path):
    trainer = new_trainer(tmp_path / "run", objective="sft", iterations=2, eval_every=0)
    before = digest(trainer.model)
    assert trainer.train()["logprob_gap"] == pytest.approx(1, abs=1e-3)
    assert digest(trainer.model) != before


# -- the loop ---------------------------------------------------------------------------------------------------------


class Failing(EvenBytes):
    """Every third rollout has no reward."""

    def rewards(self, requests):
        if any(sum(each.token_ids) % 3 == 0 for each in requests):
            raise ValueError("no answer")
        return super().rewards(requests)


def test_rollouts_whose_reward_fails_are_counted_and_leave_the_rows(tmp_path):
    trainer = new_trainer(tmp_path / "run", Failing("failing"), iterations=1, eval_every=0)
    logs = trainer.train()
    assert logs["failed_rollouts"] == trainer.loop.failures["raised"] > 0
    rows = rollouts_file(trainer.folder, 1).read_text().splitlines()
    assert len(rows) == logs["num_rollouts"] - logs["failed_rollouts"]
    with pytest.raises(TaskError, match="no answer"):
        new_trainer(tmp_path / "other", Failing("failing"), on_reward_error="raise").train()


def test_a_gap_beyond_the_limit_is_a_warning(tmp_path, caplog):
    class Shifted(Counting):
        def sample(self, requests):

            return [
                tuple(replace(c, logprobs=c.logprobs - np.float32(0.1)) for c in g) for g in super().sample(requests)
            ]

    model = tiny_policy()
    with caplog.at_level(logging.WARNING):
        logs = new_trainer(tmp_path / "run", model=model, sampler=Shifted(model), iterations=1, eval_every=0).train()
    assert logs["logprob_gap"] == pytest.approx(np.exp(0.1), rel=1e-3)
    assert "sampler_correction" in caplog.text
    caplog.clear()
    corrected = objective_named("grpo", weighting="per_rollout", sampler_correction="truncate")
    model = tiny_policy()
    new_trainer(
        tmp_path / "other", model=model, sampler=Shifted(model), objective=corrected, iterations=1, eval_every=0
    ).train()
    assert "sampler_correction" not in caplog.text


def test_prompts_that_may_grow_beyond_what_training_follows_are_refused_before_anything_is_sampled(tmp_path):
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
    model = tiny_policy(rope_parameters=rope, max_position_embeddings=64)
    sampler = Counting(model)
    trainer = new_trainer(tmp_path / "run", model=model, sampler=sampler, max_new_tokens=60)
    with pytest.raises(
        UnsupportedModelError, match=r"item even/.*max_new_tokens=60 has .* but from 64 on the 'dynamic'"
    ):
        trainer.train()
    assert sampler.num_calls == 0
    bounded = new_trainer(tmp_path / "bounded", model=model, sampler=sampler, max_new_tokens=60, max_length=63)
    assert np.isfinite(bounded.train()["loss"])


def test_curricula_of_a_policy_in_parts_and_a_lone_kl_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="reference"):
        new_trainer(tmp_path / "run", objective=GRPO(beta=0.1))
    with pytest.raises(ConfigError, match="unknown setting 'scal' of advantages='grpo'"):
        new_trainer(tmp_path / "run", advantages_settings={"scal": "batch"})
    args = arguments(tmp_path / "run")
    check_parted(settings(curriculum="gain", num_items=4), args)
    monkeypatch.setattr(type(args), "world_size", property(lambda self: 2))
    monkeypatch.setattr(args, "context_size", 2)
    with pytest.raises(ConfigError, match="'gain' measures angles with the model"):
        check_parted(settings(curriculum="gain", num_items=4), args)


def test_a_copy_for_which_there_is_no_room_is_an_error_with_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(copied_weights, "free_bytes", lambda device: 2048)
    with pytest.raises(ConfigError, match=r"takes 137.41 KiB on cpu, and 2.00 KiB are free"):
        new_trainer(tmp_path / "run", max_staleness=1)


# -- adapters, tasks of a package -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # peft asks by the old name
def test_adapters_train_alone_against_the_model_without_them_and_resume(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")

    def trainer_of(name):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.0)
        objective = GRPO(beta=0.1, weighting="per_rollout")
        return new_trainer(tmp_path / name, model=peft.get_peft_model(tiny_policy(), config), objective=objective)

    whole = trainer_of("whole")
    before = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    changed = {name for name, value in whole.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    logs = [entry for entry in whole.log_history if "kl" in entry]
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert logs[1]["kl"] > 1e-6
    first = trainer_of("run")
    with monkeypatch.context() as patch:
        raise_at(patch, StepRunner, "begin_step", 2)
        with pytest.raises(Killed):
            first.train()
    second = trainer_of("run")
    second.train(resume_from_checkpoint=True)
    assert digest(second.model) == digest(whole.model)
