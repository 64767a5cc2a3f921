"""Runs of two processes that end in the middle: `forked_ranks.py FOLDER`, with `kills.json` and `faults.json` in it.

Both processes of a run are forked from one that has imported all and computed nothing: a run takes two seconds, where a
launcher would take ten.
"""

import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.trainer.helpers import in_child, some_trees, tiny_model
from tests.trainer.torn import FILE_EVENTS
from treewise.errors import TreewiseError
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.store import MANIFEST, read_manifest

NUM_RANKS = 2
NUM_KILLS = 3  # of each run; then it is left to end
FAULT_STEP = 3
SECONDS = 200  # for one attempt, on a machine that does other things, too; a process that hangs is ended by an alarm
HELD: list[socket.socket] = []  # bound, and listening to nobody


class Killer:
    """Ends this process at its n-th moment: a call to the file system about the run's folder, or a forward.

    Two of three moments are within saves.
    """

    def __init__(self, moment):
        self.left = moment

    def watch(self, trainer):
        folder = str(trainer.args.output_dir)

        def notice(name, arguments):
            if name.startswith(FILE_EVENTS) and any(folder in str(each) for each in arguments):
                self.count()

        sys.addaudithook(notice)
        trainer.model.model.layers[0].register_forward_pre_hook(lambda *_: self.count())

    def count(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Fault:
    """What goes wrong on rank 1 between the first and the second layer of a forward."""

    def __init__(self, how):
        self.how = how

    def watch(self, trainer):
        trainer.model.model.layers[1].register_forward_pre_hook(lambda *_: self.happen(trainer.state.global_step + 1))

    def happen(self, step):
        if step == FAULT_STEP:
            if self.how in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
            raise RuntimeError("the moon is full" if self.how == "raise" else "can't allocate memory: 7 bytes")


def join(rank, port, num_ranks=NUM_RANKS):
    """Makes this process one of a run, as a launcher would."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in (here | {"MASTER_PORT": port}).items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def free_port():
    """A port for a server of this test. Linux gives it to nobody else while this process lives, and still lets a
    server listen there that reuses addresses, as those of torch, asyncio and http do.
    """
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
    if sys.platform == "linux":
        HELD.append(found)
    else:
        found.close()
    return port


def train(run_dir, settings, trouble):
    """This process's part of a run, from its newest checkpoint if there is one."""
    has_begun = bool(store.checkpoints(run_dir))
    trainer = TreeTrainer(
        tiny_model(seed=9 if has_begun else 0),
        TreeTrainingArguments(**settings, output_dir=str(run_dir)),
        train_dataset=some_trees(),
    )
    if trouble is not None:
        trouble.watch(trainer)
    trainer.train(resume_from_checkpoint=has_begun)
    whole = [getattr(each.data, "full_tensor", lambda each=each: each.data)() for each in trainer.model.parameters()]
    digest = hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in whole))
    found = {"digest": digest.hexdigest(), "moments": -getattr(trouble, "left", 0)}
    (run_dir / f"end{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


def attempt(run_dir, settings, troubles):
    """Runs all processes; returns how they ended (exit codes, negative for signals) and what they said."""
    started, port = f"{run_dir}.{time.monotonic_ns()}", free_port()

    def work(rank):
        with open(f"{started}.said{rank}", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        try:
            join(rank, port)
            train(run_dir, settings, troubles[rank])
        except TreewiseError as error:
            os.write(2, f"error: {error}\n".encode())
            os._exit(getattr(error, "exit_code", 2))
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            raise

    children = [in_child(lambda rank=rank: work(rank), SECONDS) for rank in range(NUM_RANKS)]
    statuses = [os.waitpid(children[0], 0)[1]]
    if getattr(troubles[1], "how", "") == "stop":
        os.kill(children[1], signal.SIGKILL)  # a stopped process takes no other signal
    statuses.append(os.waitpid(children[1], 0)[1])
    codes = [os.waitstatus_to_exitcode(status) for status in statuses]
    said = [Path(f"{started}.said{rank}").read_text() for rank in range(NUM_RANKS)]
    assert -signal.SIGALRM not in codes, f"a process hung: {said}"
    return codes, said


def newest_step(run_dir):
    """Of what a killed run left; nothing sealed is torn."""
    sealed = [folder for folder in store.checkpoints(run_dir) if (folder / MANIFEST).exists()]
    for folder in sealed:
        read_manifest(folder)
    return max(map(store.step_of, sealed), default=0)


def ends_of(run_dir):
    return [json.loads((run_dir / f"end{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def killed_again_and_again(run_dir, settings, dice, num_moments):
    """Kills one process or both, and resumes; returns exit codes and the newest step after each kill.

    num_moments: of each process of an undisturbed run.
    """
    history = []
    while True:
        moments = [int(number * dice.uniform(0.2, 0.6)) for number in num_moments]
        victims = dice.choice([[0], [1], [0, 1]]) if len(history) < NUM_KILLS else []
        codes, said = attempt(
            run_dir, settings, [Killer(each) if rank in victims else None for rank, each in enumerate(moments)]
        )
        if codes == [0] * NUM_RANKS:
            return history
        assert victims, said
        history.append((codes, newest_step(run_dir)))


def main():
    folder = Path(sys.argv[1])
    found = {}
    for name, settings in json.loads((folder / "kills.json").read_text()).items():
        whole, killed = folder / f"{name} whole", folder / f"{name} killed"
        codes, said = attempt(whole, settings, [Killer(0) for _ in range(NUM_RANKS)])  # counts, and never kills
        assert codes == [0] * NUM_RANKS, said
        num_moments = [each["moments"] for each in ends_of(whole)]
        history = killed_again_and_again(killed, settings, random.Random(name), num_moments)
        digests = [each["digest"] for path in (whole, killed) for each in ends_of(path)]
        found[name] = {"history": history, "digests": digests, "moments": num_moments}
    for name, (how, settings) in json.loads((folder / "faults.json").read_text()).items():
        codes, said = attempt(folder / name, settings, [None, Fault(how)])
        found[name] = {"codes": codes, "said": said, "step": newest_step(folder / name)}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
