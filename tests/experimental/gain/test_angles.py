"""The self-check within a run: what it measures, what it refuses, and that it resumes."""

import json
import logging

import pytest

from tests.rl.online.helpers import digest, new_trainer
from tests.rl.online.test_drawn import Odd, draws_of
from tests.rl.online.test_loop import Killed, counted
from treewise.errors import ConfigError, DataError
from treewise.experimental.gain.self_check import CheckReport
from treewise.rl.online.records import CHECK, DRAWS

RUN = {
    "iterations": 2,
    "eval_every": 0,
    "num_items": 6,
    "branching": "none",
    "branching_settings": {"roots": 2},
    "max_new_tokens": 3,
    "tokens_per_iteration": 12,
    "check_items": 4,
    "check_rollouts": 4,
}


def read_check(trainer):
    return CheckReport.from_dict(json.loads((trainer.folder / DRAWS / CHECK).read_text()))


def test_gain_is_refused_where_angles_predict_nothing_and_runs_where_forced(tmp_path):
    trainer = new_trainer(tmp_path / "run", task=Odd("odd"), curriculum="gain", **RUN)
    with pytest.raises(ConfigError, match=r"'gain' draws by angle, which is useless here.*force=true"):
        trainer.train()
    assert "angle" in read_check(trainer).useless
    assert not list(trainer.folder.glob("journal/*"))  # the folder may hold another run
    forced = {"curriculum": "gain", "curriculum_settings": {"force": True}}
    first = counted(tmp_path / "run", kill_at=2, task=Odd("odd"), **RUN, **forced)
    with pytest.raises(Killed):
        first.train()
    second = counted(tmp_path / "run", task=Odd("odd"), **RUN, **forced)
    second.train(resume_from_checkpoint=True)
    whole = counted(tmp_path / "whole", task=Odd("odd"), **RUN, **forced)
    whole.train()
    assert digest(whole.model) == digest(second.model)
    assert draws_of(whole) == draws_of(second)
    assert read_check(whole) == read_check(second)
    memory = whole.items.memory
    assert len(memory["scores"]) == 6
    assert memory["mean"] > 0
    assert whole.loop.num_sampled == whole.sampler.num_tokens
    assert whole.log_history[0]["check_tokens"] == read_check(whole).num_tokens


def test_a_forced_run_warns_prints_the_check_and_its_book_keeps_what_that_saw(tmp_path, caplog, capsys):
    forced = {"curriculum": "gain", "curriculum_settings": {"force": True}, "iterations": 1}
    trainer = new_trainer(tmp_path / "run", task=Odd("odd"), **RUN | forced)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    report = read_check(trainer)
    assert "which is useless here" in caplog.text
    assert report.text() in capsys.readouterr().out
    assert (report.num_tasks, report.num_rollouts) == (4, 16)
    assert len(trainer.loop.book.state_dict()["tasks"]) >= 4


def test_what_cannot_be_checked(tmp_path):
    with pytest.raises(ConfigError, match="check_items is 0; give check_items, or force it"):
        new_trainer(tmp_path / "run", curriculum="gain", **RUN | {"check_items": 0})
    with pytest.raises(ConfigError, match="at least 3 items and 4 rollouts"):
        new_trainer(tmp_path / "run", **RUN | {"check_items": 2})
    trainer = new_trainer(tmp_path / "run", **RUN)
    with pytest.raises(DataError, match="2 tasks; a rank"):
        trainer.check_items(2, 4)
