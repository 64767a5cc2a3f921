"""Draws of several processes: workers that stay, each of which judges the whole draw and must find the same.

`python -m treewise.testing.crossings.ranks` is one of them: it reads draws from its standard input, one JSON object a
line, and answers with an outcome. Every process trains the flat side by itself and compares whole gradients with it.
"""

import atexit
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import astuple
from typing import Any

from treewise import errors
from treewise.errors import TreewiseError
from treewise.testing.crossings.drawing import Draw, ImpossibleError, Outcome, WrongError, judged

SECONDS = 240  # for one draw, after which the processes are taken to wait for one another
DRAWS = 40  # of one pool; gloo keeps threads of each group that a draw made, some 170 after 100 draws, and they poll
_MARK = "outcome "
_pools: dict[int, "Pool"] = {}


class Pool:
    """So many processes of one gloo group."""

    def __init__(self, num_ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        group = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        self.workers, self.outcomes, self.num_draws = [], [], 0
        for rank in range(num_ranks):
            own = {name: str(value) for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()}
            worker = subprocess.Popen(
                [sys.executable, "-m", "treewise.testing.crossings.ranks"],
                env={**os.environ, "MASTER_ADDR": "127.0.0.1", **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
            found: queue.Queue[Outcome | None] = queue.Queue()
            threading.Thread(target=_listen, args=(worker.stdout, found), daemon=True).start()
            self.workers.append(worker)
            self.outcomes.append(found)

    def judge(self, draw: Draw) -> Outcome:
        """What the processes find; a disagreement is wrong."""
        self.num_draws += 1
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(draw) + "\n")
        ends = time.monotonic() + SECONDS
        outcomes = []
        for found in self.outcomes:
            with contextlib.suppress(queue.Empty):
                outcome = found.get(timeout=max(0.0, ends - time.monotonic()))
                outcomes += [] if outcome is None else [outcome]
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
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                if stream is not None:
                    stream.close()


def check(draw: Draw, num_ranks: int) -> None:
    """Raises what the processes of a draw found."""
    pool = _pools.get(num_ranks)
    if pool is None or pool.num_draws == DRAWS or any(worker.poll() is not None for worker in pool.workers):
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


def _listen(stream: Any, found: queue.Queue[Outcome | None]) -> None:
    """Takes outcomes from a process, and None where it ends."""
    for line in stream:
        if line.startswith(_MARK):
            found.put(Outcome(*json.loads(line.removeprefix(_MARK))))
    found.put(None)


def main() -> None:
    """Answers draws until standard input ends."""
    import torch

    from treewise.testing.crossings import sides

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for line in sys.stdin:
        outcome = judged(sides.check_here, json.loads(line))
        sys.stdout.write(f"\n{_MARK}{json.dumps(astuple(outcome))}\n")
        sys.stdout.flush()
    os._exit(0)  # threads of gloo may not end


if __name__ == "__main__":
    main()
