"""Reward functions and an environment as a user's file holds them, for tests that call them in worker processes."""

import os
import threading


def loops(prompts, **_):
    """For ever where a prompt is bad."""
    while "bad" in prompts:
        pass
    return [float(len(prompts))] * len(prompts)


def ends_its_process(prompts, **_):
    """As a segmentation fault does."""
    os._exit(7)


async def logs(prompts, trainer_state, log_extra, log_metric, **_):
    """Logs what it sees."""
    log_extra("prompt", prompts)
    log_metric("step", trainer_state.global_step)
    return [1.0] * len(prompts)


class Counter:
    """Counts; `stop` never answers."""

    def __init__(self, start=0):
        self.total = start

    def reset(self, seed):
        self.total += seed

    def add(self, number: int) -> str:
        """Adds.

        Args:
            number: What to add.
        """
        self.total += number
        return f"total {self.total}"

    def stop(self) -> str:
        """Never answers."""
        while True:
            pass

    def get_reward(self):
        return float(self.total)


class Locked(Counter):
    """Cannot be sent to another process."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
