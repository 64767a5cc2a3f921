"""Kills a run at random calls to the file system until it ends: `torn.py FOLDER`, with a model and settings in it.

The runs are forked from a process that has imported all and computed nothing, so no thread of torch is lost in them.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

from tests.trainer.helpers import in_child, some_trees, tiny_model
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.checkpoint import store

# What Python reports of its calls to the file system; between two of them a killed process leaves no new state behind,
# apart from the length of a file that is not sealed yet.
FILE_EVENTS = ("open", "os.", "shutil.")


def killed_at(event_number, work):
    """Whether `work` was killed at its n-th call to the file system, and had not ended before."""
    left = iter(range(event_number, -1, -1))

    def die(name, arguments):
        if name.startswith(FILE_EVENTS) and next(left, 1) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def run():
        sys.addaudithook(die)
        work()

    _, status = os.waitpid(in_child(run), 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code  # the alarm, too, is a failure: the run hung
    return code != 0


def main():
    folder = Path(sys.argv[1])
    run_dir, settings = folder / "run", json.loads((folder / "settings.json").read_text())
    random_moments = random.Random(1)

    def train():
        model = tiny_model(seed=9 if store.checkpoints(run_dir) else 0)
        args = TreeTrainingArguments(**{**settings, "output_dir": str(run_dir)})
        store.recover(run_dir)
        trainer = TreeTrainer(model, args, train_dataset=some_trees())
        trainer.train(resume_from_checkpoint=bool(store.checkpoints(run_dir)))
        torch.save(trainer.model.state_dict(), folder / "final.pt")

    num_kills = 0
    while killed_at(random_moments.randrange(50, 400), train):
        num_kills += 1
    (folder / "kills.json").write_text(str(num_kills))


if __name__ == "__main__":
    main()
