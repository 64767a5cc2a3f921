"""Online runs of two processes, forked from one that has imported all and computed nothing: `ranks.py FOLDER`."""

import os
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch

from tests.rl.online.helpers import EvenBytes, new_trainer, tiny_policy
from tests.trainer.forked_ranks import NUM_RANKS, free_port, join
from tests.trainer.helpers import in_child
from treewise.errors import StoppedError
from treewise.rl.samplers import TransformersSampler
from treewise.rl.tasks import EnvironmentTask, GuessNumber
from treewise.trainer.checkpoint import store

SECONDS = 400  # on a machine that does other things, too
CASES = {
    "sums": {"trees_per_iteration": 3, "tokens_per_iteration": 72, "mini_batches": 2},
    "failing": {"curriculum": "uniform", "max_failed": 1.0, "trees_per_iteration": 3, "update_epochs": 2},
    "turns": {"branching": "none", "branching_settings": {"roots": 3}, "max_new_tokens": 12, "max_length": 900},
    "ahead": {"trees_per_iteration": 3, "tokens_per_iteration": 72, "max_staleness": 1},
}

SIGNALLED = (
    "sums",
    "ahead",
)  # ended by a signal to one process after its first iteration; the others by their settings


class Failing(EvenBytes):
    """Every third rollout has no reward."""

    def rewards(self, requests):
        if any(sum(each.token_ids) % 3 == 0 for each in requests):
            raise ValueError("no answer")
        return super().rewards(requests)


def task_of(case):
    if case == "turns":
        return EnvironmentTask(GuessNumber, name="guess")
    return Failing("failing") if case == "failing" else EvenBytes()


def trainer_of(case, folder, **changes):
    """One process's part of a run. Other processes than the first begin with other weights."""
    longer = {"max_position_embeddings": 1024} if case == "turns" else {}
    model = tiny_policy(**longer)
    budget = "auto" if case == "turns" else 64
    if os.environ.get("RANK", "0") != "0":
        for parameter in model.parameters():
            parameter.data += 0.1
    return new_trainer(
        folder,
        task_of(case),
        model=model,
        sampler=TransformersSampler(model, isolate_requests=True),
        arguments_={"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 1.0, "max_tokens": budget},
        **{**CASES[case], **changes},
    )


def stop_by_signal(rank, trainer):
    """Rank 1 alone gets SIGTERM, while it waits for rewards: both finish the iteration, save it and stop."""
    judge = trainer.task.rewards

    def signalled(requests):
        trainer.task.rewards = judge  # a second signal would end the process at once
        os.kill(os.getpid(), signal.SIGTERM)
        return judge(requests)

    if rank == 1:
        trainer.task.rewards = signalled
    with pytest.raises(StoppedError, match="SIGTERM"):
        trainer.train()
    assert trainer.loop.iteration == 1
    assert [path.name for path in store.checkpoints(trainer.folder)] == ["checkpoint-1"]


def run_two(rank, folder, port):
    join(rank, port)
    for case in CASES:
        if case in SIGNALLED:
            stop_by_signal(rank, trainer_of(case, folder / case, save_every=2))
        else:
            trainer_of(case, folder / case, iterations=1).train()
        trainer = trainer_of(case, folder / case)
        logs = trainer.train(resume_from_checkpoint=True)
        torch.save({"weights": trainer.model.state_dict(), "logs": logs}, folder / f"{case}-{rank}.pt")
    torch.distributed.barrier()


def main():
    folder, port = Path(sys.argv[1]), free_port()

    def work(rank):
        try:
            run_two(rank, folder, port)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)

    children = [in_child(lambda rank=rank: work(rank), SECONDS) for rank in range(NUM_RANKS)]
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


if __name__ == "__main__":
    main()
