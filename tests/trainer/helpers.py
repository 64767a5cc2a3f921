"""A tiny model, a few trees that share a prompt, and what a run logged."""

import contextlib
import os
import signal
import warnings

import numpy as np
import torch

from treewise import testing
from treewise.tree.trajectory import Trajectory

VOCABULARY = 61


def tiny_model(seed=0):
    return testing.tiny_model(
        seed=seed, vocab_size=VOCABULARY, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=128
    )


def some_trees(num_trees=7, seed=0):
    """Lists of trajectories: one system prompt for all, one prompt per tree, two to four answers."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, VOCABULARY, 6)
    trees = []
    for tree in range(num_trees):
        prompt = np.concatenate([system, rng.integers(3, VOCABULARY, int(rng.integers(2, 9)))])
        answers = [rng.integers(3, VOCABULARY, int(rng.integers(2, 9))) for _ in range(int(rng.integers(2, 5)))]
        trees.append(
            [
                Trajectory(
                    np.concatenate([prompt, answer]),
                    loss_weights=np.concatenate([np.zeros(len(prompt)), np.ones(len(answer))]),
                    source=f"rows.jsonl:{tree}",
                )
                for answer in answers
            ]
        )
    return trees


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def flat_loss(model, trajectories):
    """The token-mean over trajectories computed one by one, by transformers alone."""
    total, weight = torch.zeros(()), 0.0
    for item in trajectories:
        ids = torch.as_tensor(item.token_ids, dtype=torch.long)[None]
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        weights = torch.as_tensor(item.loss_weights[1:])
        total = total - (weights * logprobs.gather(-1, ids[0, 1:, None])[:, 0]).sum()
        weight += float(weights.sum())
    return total / weight


def in_child(work, seconds=200):
    """Runs `work` in a forked process, for so many seconds at most; returns its process id at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; the child does not need them
        child = os.fork()
    if child == 0:
        # A lock that another thread held at the fork is never given back here; the alarm ends such a child.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return child
