"""Draws of several processes: workers that stay, each of which judges the whole draw and must find the same.

Every process trains the flat side by itself and compares whole gradients with it.
"""

import atexit
import multiprocessing
import os
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
from accelerate.state import AcceleratorState

from tests.crossings.drawing import Draw, ImpossibleError, Outcome, WrongError, judged
from tests.trainer.forked_ranks import free_port
from treewise import errors
from treewise.errors import TreewiseError

SECONDS = 240  # for one draw on idle cores, after which the processes are taken to wait for one another
DRAWS = 40  # of one pool; gloo keeps threads of each group that a draw made, some 170 after 100 draws, and they poll
_pools: dict[int, "Pool"] = {}


class Pool:
    """So many processes of one gloo group."""

    def __init__(self, num_ranks: int) -> None:
        context, self.num_draws, port = multiprocessing.get_context("fork"), 0, free_port()  # all is imported here
        self.ends: list[Connection] = []
        self.workers: list[Any] = []
        for rank in range(num_ranks):
            own, theirs = context.Pipe()
            self.ends.append(own)
            arguments = (theirs, rank, num_ranks, port, tuple(self.ends))
            self.workers.append(context.Process(target=work, args=arguments, daemon=True))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; a worker needs none
                self.workers[-1].start()
            theirs.close()

    def judge(self, draw: Draw) -> Outcome:
        """What the processes find; a disagreement is wrong."""
        self.num_draws += 1
        for end in self.ends:
            end.send(draw)
        crowd = len(self.workers) + os.getloadavg()[0]  # processes that share the cores
        until, outcomes = time.monotonic() + SECONDS * max(1.0, crowd / (os.cpu_count() or 1)), []
        for end in self.ends:
            try:
                outcomes += [end.recv()] if end.poll(max(0.0, until - time.monotonic())) else []
            except EOFError:
                continue
        if len(outcomes) < len(self.workers):
            self.close()
            ended = "; ".join(f"{each.kind} {each.reason}" for each in outcomes) or "nothing"
            return Outcome("wrong", "a process ended or waits for ever", f"a process ended or waits; others: {ended}")
        if len({each.kind for each in outcomes}) > 1:
            return Outcome("wrong", "processes disagree", "\n".join(f"{each.kind}: {each.text}" for each in outcomes))
        return outcomes[0]

    def close(self) -> None:
        """Ends the processes."""
        for worker in self.workers:
            worker.kill()
            worker.join()


def check(draw: Draw, num_ranks: int) -> None:
    """Raises what the processes of a draw found."""
    pool = _pools.get(num_ranks)
    if pool is None or pool.num_draws == DRAWS or not all(worker.is_alive() for worker in pool.workers):
        if pool is not None:
            pool.close()
        pool = _pools[num_ranks] = Pool(num_ranks)
        atexit.register(pool.close)
    outcome = pool.judge(draw)
    if outcome.kind == "impossible":
        raise ImpossibleError(outcome.text)
    if outcome.kind == "refused":
        raise getattr(errors, outcome.reason, TreewiseError)(outcome.text)
    if outcome.kind == "wrong":
        raise WrongError(outcome.text)


def work(end: Connection, rank: int, num_ranks: int, port: int, of_parent: tuple[Connection, ...]) -> None:
    """Answers draws until the other end is closed, of which a fork has copies."""
    for each in of_parent:
        each.close()
    AcceleratorState._reset_state(reset_partial_state=True)  # of runs of the parent
    from tests.crossings import sides

    group = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port, "RANK": rank}
    os.environ |= {name: str(value) for name, value in {**group, "LOCAL_RANK": rank}.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    try:
        while True:
            end.send(judged(sides.check_here, end.recv()))
    finally:
        os._exit(0)  # threads of gloo may not end
