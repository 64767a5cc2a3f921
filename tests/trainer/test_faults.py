"""Faults of a run: numbers that are not finite, signals, two runs in one folder."""

import contextlib
import json
import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerCallback

from tests.trainer.helpers import in_child, losses, tiny_model
from treewise.cli.main import main
from treewise.data import load_trees
from treewise.distributed.signals import StopSignals
from treewise.errors import ConfigError, DataError, NonFiniteError, StoppedError
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.json_values import from_plain, to_plain
from treewise.trainer.nonfinite import write_rows
from treewise.trainer.run_lock import NAME, RunLock
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# -- numbers that are not finite --------------------------------------------------------------------------------------


class PoisonGradient(TrainerCallback):
    """Makes the gradient of given steps infinite, as an overflow in some layer would."""

    def __init__(self, *steps):
        self.steps = steps

    def on_train_begin(self, args, state, control, model, **kwargs):
        def poison(gradient):
            return gradient * float("inf") if state.global_step + 1 in self.steps else gradient

        model.model.norm.weight.register_hook(poison)


class Snapshots(TrainerCallback):
    def __init__(self):
        self.taken = []

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        moments = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
        self.taken.append([each.detach().clone() for each in model.parameters()] + moments)


def test_a_skipped_step_leaves_parameters_and_optimizer_as_they_were(make_trainer, trees, caplog):
    snapshots = Snapshots()
    trainer = make_trainer(trees, max_steps=3, nonfinite="skip", callbacks=[PoisonGradient(2), snapshots])
    trainer.train()
    first, second, third = snapshots.taken
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(second, third, strict=True))
    assert "the gradient of step 2 is not finite; it was not applied. Its trees: rows.jsonl:" in caplog.text


def test_too_many_skipped_steps_in_a_row_stop_the_run(make_trainer, trees):
    poison = PoisonGradient(2, 3, 4)
    trainer = make_trainer(trees, max_steps=6, nonfinite="skip", max_skipped_steps=2, callbacks=[poison])
    with pytest.raises(NonFiniteError, match=r"step 4 is not finite.*2 steps in a row were skipped"):
        trainer.train()


def test_trees_of_a_faulty_step_are_written_as_rows_that_load_again(make_trainer, trees, tmp_path):
    trainer = make_trainer(trees, max_steps=3, callbacks=[PoisonGradient(1)], per_device_train_batch_size=7)
    with pytest.raises(NonFiniteError, match=r"nonfinite\.jsonl"):
        trainer.train()
    found = load_trees(str(tmp_path / "run" / "nonfinite.jsonl"), None)
    wanted = sorted(tuple(item.token_ids.tolist()) for tree in trees for item in tree)
    assert sorted(tuple(each.token_ids.tolist()) for tree in found for each in tree.trajectories) == wanted


def test_the_trajectory_whose_own_loss_is_not_finite_is_named(make_trainer, trees):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            model.model.embed_tokens.weight.data[2] = float("nan")  # no other tree has token 2

    odd = Trajectory(np.array([50, 2, 51, 52]), source="odd.jsonl:1")
    trainer = make_trainer([*trees, [odd]], per_device_train_batch_size=8, max_steps=2, callbacks=[Break()])
    with pytest.raises(NonFiniteError, match=r"step 2 .* Not finite by themselves: odd\.jsonl:1\."):
        trainer.train()


def test_trees_declared_by_nodes_are_written_path_by_path(tmp_path):
    ids = np.array([5, 6, 7, 8], dtype=np.int32)
    forest = Forest.from_trajectories([Trajectory(ids), Trajectory(np.array([5, 6, 9], dtype=np.int32))])
    write_rows(tmp_path / "a.jsonl", [forest], {"step": 3})
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["token_ids"] for row in rows] == [[5, 6, 7, 8], [5, 6, 9]]
    assert {row["step"] for row in rows} == {3}


def test_a_spike_of_the_gradient_is_said_with_its_trees(make_trainer, trees, caplog):
    class Amplify(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.model.norm.weight.register_hook(lambda grad: grad * (1e4 if state.global_step + 1 == 12 else 1))

    make_trainer(trees, max_steps=13, callbacks=[Amplify()], learning_rate=1e-5).train()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "treewise"]
    assert line.startswith("step 12: gradient norm")
    assert "rows.jsonl:" in line


def context_only(token_ids):
    item = Trajectory(token_ids)
    item.loss_weights[:] = 0
    return item


def test_a_step_without_a_trained_token_is_an_error_not_a_nan(make_trainer):
    trees = [[context_only(np.array([3, 4, 5 + tree]))] for tree in range(2)]
    with pytest.raises(DataError, match="step 1 has no trained token"):
        make_trainer(trees, max_steps=1).train()


def test_a_path_beyond_the_models_positions_is_named_and_not_cut(make_trainer, trees, caplog):
    long = Trajectory(np.arange(200) % 50 + 3, source="long.jsonl:7")
    trainer = make_trainer([*trees, [long]], max_steps=1)
    trainer.train()
    assert "long.jsonl:7 has 200 tokens, the model was made for 128" in caplog.text


# -- signals ----------------------------------------------------------------------------------------------------------


class SignalAt(TrainerCallback):
    def __init__(self, number, step, moment):
        self.number, self.step, self.moment = number, step, moment

    def _maybe(self, state, moment):
        if state.global_step == self.step and moment == self.moment:
            os.kill(os.getpid(), self.number)

    def on_step_begin(self, args, state, control, **kwargs):
        self._maybe(state, "begin")

    def on_step_end(self, args, state, control, **kwargs):
        self._maybe(state, "end")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._maybe(state, "optimizer")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._maybe(state, "updated")

    def on_save(self, args, state, control, **kwargs):
        self._maybe(state, "save")


def signal_in_backward(trainer, number, step):
    """The signal comes while step `step + 1` is in its backward."""

    def send(gradient):
        if trainer.state.global_step == step:
            os.kill(os.getpid(), number)
        return gradient

    trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(send)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["begin", "end", "optimizer", "updated", "save", "backward"])
def test_a_signal_saves_the_run_which_then_ends_like_an_undisturbed_one(make_trainer, trees, number, moment):
    # Saved at step 5 alone, so that what the signal saves is all that there is.
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2 if moment == "save" else 5}
    whole = make_trainer(trees, folder="whole", **settings)
    whole.train()
    callbacks = [] if moment == "backward" else [SignalAt(number, 2, moment)]
    stopped = make_trainer(trees, callbacks=callbacks, **settings)
    if moment == "backward":
        signal_in_backward(stopped, number, 3)
    with pytest.raises(
        StoppedError, match=rf"{number.name}: stopped after step \d; saved in .*checkpoint-\d"
    ) as caught:
        stopped.train()
    assert caught.value.exit_code == 128 + number
    assert stopped.state.global_step in (2, 3)
    assert signal.getsignal(number) is not None
    resumed = make_trainer(trees, model=tiny_model(seed=9), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_handlers_are_given_back(make_trainer, trees):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    make_trainer(trees, max_steps=1).train()
    assert before == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]


def test_a_signal_before_the_first_step_is_over_saves_nothing(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=2)
    signal_in_backward(trainer, signal.SIGTERM, 0)
    with pytest.raises(StoppedError, match="stopped after step 0; nothing to save"):
        trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_second_signal_ends_the_process_at_once():
    def twice():
        with StopSignals(may_abandon=False):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    _, status = os.waitpid(in_child(twice), 0)
    assert os.WEXITSTATUS(status) == 128 + signal.SIGTERM


def test_the_command_ends_with_the_code_of_the_signal(tmp_path, monkeypatch, capsys):
    def stopped(*args, **kwargs):
        error = StoppedError("SIGTERM: stopped after step 7; saved in run/checkpoint-7.")
        error.exit_code = 143
        raise error

    monkeypatch.setattr("treewise.cli.commands.train.run", stopped)
    assert main(["train", "run.yaml"]) == 143
    assert "saved in run/checkpoint-7" in capsys.readouterr().err


# -- one run per folder -----------------------------------------------------------------------------------------------


@pytest.fixture
def other_run(tmp_path):
    """The process id of another run in the folder `run`."""
    read, write = os.pipe()

    def hold():
        RunLock(tmp_path / "run").take()
        os.write(write, b"held")
        signal.pause()

    child = in_child(hold)
    assert os.read(read, 4) == b"held"
    yield child
    os.close(read)
    os.close(write)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_in_use_is_refused_with_its_holder(make_trainer, trees, other_run):
    with pytest.raises(ConfigError, match=rf"in use by process {other_run} on .* \(since 20"):
        make_trainer(trees, max_steps=1).train()


def test_a_killed_runs_workers_do_not_keep_its_lock(tmp_path):
    read, write = os.pipe()

    def hold():
        with RunLock(tmp_path):
            worker = in_child(signal.pause)
            os.write(write, f"{worker}\n".encode())
            signal.pause()

    run = in_child(hold)
    worker = int(os.read(read, 20))
    try:
        with pytest.raises(ConfigError, match=f"in use by process {run}"):
            RunLock(tmp_path).take()  # the worker gave up its share alone
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        os.kill(worker, 0)
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_forked_process_leaves_the_file_of_the_lock(tmp_path):
    with RunLock(tmp_path) as lock:
        os.waitpid(in_child(lock.release), 0)
        assert (tmp_path / NAME).exists()


def test_the_lock_of_a_killed_run_is_stale(make_trainer, trees, other_run, tmp_path):
    os.kill(other_run, signal.SIGKILL)
    os.waitpid(other_run, 0)
    assert (tmp_path / "run" / NAME).exists()
    make_trainer(trees, max_steps=1).train()
    assert not (tmp_path / "run" / NAME).exists()


def test_without_locks_of_the_file_system_a_dead_holder_is_stale_and_a_live_or_remote_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("treewise.trainer.run_lock.fcntl", None)
    with RunLock(tmp_path):
        holder = json.loads((tmp_path / NAME).read_text())
    dead = in_child(lambda: None)
    os.waitpid(dead, 0)
    (tmp_path / NAME).write_text(json.dumps({**holder, "pid": dead}))
    with RunLock(tmp_path):
        pass
    for change in ({}, {"host": "elsewhere", "pid": dead}):
        (tmp_path / NAME).write_text(json.dumps({**holder, **change}))
        with pytest.raises(ConfigError, match="If that run is gone, remove"):
            RunLock(tmp_path).take()


def test_a_lock_whose_file_is_removed_in_the_very_moment_is_taken_anew(tmp_path, monkeypatch):
    lock = RunLock._lock

    def after_the_last_holder_left(self, descriptor):
        monkeypatch.setattr(RunLock, "_lock", lock)
        (tmp_path / NAME).unlink()
        lock(self, descriptor)

    monkeypatch.setattr(RunLock, "_lock", after_the_last_holder_left)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_one_process_may_hold_a_folder_twice(tmp_path):
    with RunLock(tmp_path):
        with RunLock(tmp_path):
            pass
        assert (tmp_path / NAME).exists()
    assert not (tmp_path / NAME).exists()


def test_what_a_killed_run_left_aside_is_cleared_and_said(make_trainer, trees, tmp_path, caplog):
    store.new_folder(tmp_path / "run", 4)
    make_trainer(trees, max_steps=1).train()
    assert "checkpoint-4: never finished" in caplog.text
    assert not list((tmp_path / "run").glob(".checkpoint*"))


# -- values as JSON ---------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("__is__"),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.just("__is__"), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_survive_json_with_their_types(value):
    found = from_plain(json.loads(json.dumps(to_plain(value))))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64])
def test_tensors_and_arrays_survive_json(dtype):
    for value in (torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype), torch.empty(0, 2, dtype=dtype)):
        found = from_plain(json.loads(json.dumps(to_plain({"a": value}))))["a"]
        assert found.dtype == dtype
        assert torch.equal(found, value)
    array = np.arange(4, dtype=np.uint32)
    assert np.array_equal(from_plain(json.loads(json.dumps(to_plain(array)))), array)
