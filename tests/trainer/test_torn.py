"""kill -9 at any moment of a save loses nothing that was published, and a killed run ends like an undisturbed one."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.trainer import torn
from tests.trainer.helpers import some_trees
from tests.trainer.torn import killed_at
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.store import MANIFEST, read_manifest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def save(run_dir, step, content):
    folder = store.new_folder(run_dir, step)
    (folder / "model.json").write_text(f'"{content}"')
    (folder / "part").mkdir()
    (folder / "part" / "more.json").write_text("1")
    store.publish(folder, {"step": step})
    store.prune(run_dir, 2, None)


def state_of(run_dir):
    """Complete checkpoints and their content, after what a new run does first."""
    store.recover(run_dir)
    assert not list(run_dir.glob(".checkpoint-*"))
    for folder in store.checkpoints(run_dir):
        if (folder / MANIFEST).exists():
            read_manifest(folder)  # nothing sealed is torn
    sealed = [folder for folder in store.checkpoints(run_dir) if (folder / MANIFEST).exists()]
    return {store.step_of(folder): (folder / "model.json").read_text() for folder in sealed}


@pytest.mark.representatives("replaced")
@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        (3, {1: '"old"', 2: '"old"'}, {2: '"old"', 3: '"new"'}),
        (2, {1: '"old"', 2: '"old"'}, {1: '"old"', 2: '"new"'}),
    ],
    ids=["new", "replaced"],
)
def test_a_save_that_is_killed_at_any_call_leaves_the_old_state_or_the_new_one(tmp_path, step, before, after):
    seen, number = set(), 0
    while True:
        run_dir = tmp_path / str(number)
        for old in (1, 2):
            save(run_dir, old, "old")
        was_killed = killed_at(number, lambda run_dir=run_dir: save(run_dir, step, "new"))
        found = state_of(run_dir)
        assert max(found) >= max(before)
        assert found[max(found)] in {before.get(max(found)), after.get(max(found))}
        seen.add(tuple(found.items()))
        shutil.rmtree(run_dir)
        if not was_killed:
            break
        number += 1
    assert number > 20  # it was killed, again and again
    assert {tuple(before.items()), tuple(after.items())} <= seen
    assert found == after


@pytest.mark.exhaustive
def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(make_trainer, tmp_path):
    settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    whole = make_trainer(some_trees(), folder="whole", max_tokens=40, **settings)
    whole.train()
    (tmp_path / "settings.json").write_text(json.dumps(whole.args.to_dict(), default=str))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", torn.__file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert int((tmp_path / "kills.json").read_text()) > 3
    weights = torch.load(tmp_path / "final.pt", weights_only=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(weights[name], value)
