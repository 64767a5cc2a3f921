"""Starts of `treewise train` in two processes, of which one is killed or stopped: `forked_starts.py FOLDER`.

A moment is a call of a function of treewise in the main thread. An undisturbed run counts them up to the first step;
each tenth of them gives one moment, drawn in it. One more is between the process group and the watch over it, of the
rank that holds the store. Both processes are forked from one that has imported all, as in
`tests/trainer/forked_ranks.py`; the parent waits for ends of processes alone.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

from tests.cli.helpers import save_tiny_model, write_rows
from tests.trainer.forked_ranks import NUM_RANKS, free_port, join
from tests.trainer.helpers import in_child
from treewise.cli.main import main as command
from treewise.trainer import TreeTrainer, TreeTrainingArguments

NUM_MOMENTS = 10
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
TIMEOUT = 5  # ddp_timeout
ALARM = 60  # seconds; ends what hangs
ROWS = [{"token_ids": [1, 2, 3, 4 + tree, 30 + end], "group": f"g{tree}"} for tree in range(4) for end in range(2)]
FIRST_STEP = TreeTrainer.training_step.__code__
UNWATCHED = TreeTrainingArguments._take_over_compilation.__code__


class Moments:
    """Counts the calls of the main thread up to the first step; sends this process a signal at one of them, by its
    number or its code."""

    def __init__(self, at=None, how=None):
        self.count, self.at, self.how = 0, at, how
        self.is_over = False

    def __call__(self, frame, event, _):
        if event != "call" or self.is_over or "/treewise/" not in frame.f_code.co_filename:
            return
        if self.at in (self.count, frame.f_code):
            os.kill(os.getpid(), self.how)
        self.count += 1
        self.is_over = frame.f_code is FIRST_STEP


def attempt(folder, name, timeout, faults):
    """Runs both processes; returns their exit codes (negative for signals) and what they said. faults: by rank."""
    port, run = free_port(), folder / name

    def work(rank):
        with open(f"{run}.said{rank}", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        join(rank, port)
        moments = faults.get(rank, Moments())
        flags = {"model": folder / "model", "data": folder / "rows.jsonl", "output_dir": run, "ddp_timeout": timeout}
        flags |= {"max_steps": 1, "per_device_train_batch_size": 1, "use_cpu": "true", "report_to": "none"}
        sys.setprofile(moments)
        code = command(["train", *(str(word) for key, value in flags.items() for word in (f"--{key}", value))])
        sys.setprofile(None)
        assert moments.is_over or code != 0
        Path(f"{run}.count{rank}").write_text(str(moments.count))
        sys.stderr.flush()
        os._exit(code)

    children = [in_child(lambda rank=rank: work(rank), ALARM) for rank in range(NUM_RANKS)]
    codes = {}
    for rank in sorted(range(NUM_RANKS), key=lambda rank: rank in faults):  # the other one first
        if faults and len(codes) == NUM_RANKS - 1:
            os.kill(children[rank], signal.SIGKILL)  # a stopped process takes no other signal
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
    return codes, [Path(f"{run}.said{rank}").read_text() for rank in range(NUM_RANKS)]


def main():
    folder = Path(sys.argv[1])
    save_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", ROWS)
    codes, said = attempt(folder, "undisturbed", ALARM, {})
    assert codes == dict.fromkeys(range(NUM_RANKS), 0), said
    dice, found = random.Random(27), {}
    for how, number in SIGNALS.items():
        for index in range(NUM_MOMENTS + 1):
            rank = index % NUM_RANKS
            count = int((folder / f"undisturbed.count{rank}").read_text())
            at = UNWATCHED if index == NUM_MOMENTS else int(count * (index + dice.random()) / NUM_MOMENTS)
            codes, said = attempt(folder, f"{how} {index}", TIMEOUT, {rank: Moments(at, number)})
            others = [each for each in range(NUM_RANKS) if each != rank]
            found[f"{how} {index}"] = {
                "rank": rank,
                "at": f"{at} of {count}",
                "own": codes[rank],
                "codes": [codes[each] for each in others],
                "said": [said[each] for each in others],
            }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
