"""Runs of a tiny model on real servers, and what is compared of them."""

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from tests.rl.online.helpers import new_trainer, tiny_policy
from tests.trainer.helpers import in_child
from treewise.rl.online.records import rollouts_file
from treewise.rl.samplers import ServerSampler

HEADS = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}  # of 16: refused by vLLM
MOST_GAP = 1e-5  # of a log-prob; and of `logprob_gap` from 1
SECONDS = 900  # for a run in a process of its own, on a machine that does other things, too


def sampler_on(*servers, **settings):
    return ServerSampler([each.url for each in servers], **{"weights": "reload", "patience_seconds": 540, **settings})


def policy(**adapter):
    model = tiny_policy(**HEADS)
    if not adapter:
        return model
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(**adapter))


def run(folder, *servers, model=None, resume=None, weights="reload", **changes):
    """A whole run, of three iterations unless it is stated."""
    model = policy() if model is None else model
    changes = {"iterations": 3, **changes}
    trainer = new_trainer(folder, model=model, sampler=sampler_on(*servers, weights=weights), **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def gaps(trainer):
    return [each["logprob_gap"] - 1 for each in trainer.log_history if "logprob_gap" in each]


def sampled_ids(trainer):
    """The token ids of every rollout of every iteration."""
    files = [rollouts_file(trainer.folder, number) for number in range(1, trainer.settings.iterations + 1)]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row["token_ids"] for row in rows]


def assert_the_same(trainer, whole):
    pairs = list(zip(sampled_ids(trainer), sampled_ids(whole), strict=True))
    others = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    assert not others, f"{len(others)} of {len(pairs)} rollouts are others, the first: {others[0]}"
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, atol=1e-6, rtol=0)


# -- calls that are under way -----------------------------------------------------------------------------------------


@contextmanager
def at_calls(happenings: dict[int, Callable[[], None]], server=None):
    """While a run samples: something happens in the call of a number, from 1, as others are under way. server: whose
    calls alone are counted. Yields the list of calls so far.
    """
    original, lock, calls = ServerSampler._complete, threading.Lock(), []

    def complete(self, asked, request, continuation):
        if server is None or asked.url == server.url.removesuffix("/v1"):
            with lock:
                calls.append(request.seed)
                happen = happenings.get(len(calls))
            if happen is not None:
                happen()
        return original(self, asked, request, continuation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerSampler, "_complete", complete)
        yield calls


def run_until_killed(folder, *servers, call, kills=(), **changes):
    """A process that goes on with a run, if there is one, and ends by SIGKILL in its `call`-th call, with the servers
    `kills`. Whether it came so far.
    """

    def end():
        for each in kills:
            os.killpg(each.process.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        try:
            with at_calls({call: end}):
                run(folder, *servers, resume=True, **changes)
        except BaseException:
            traceback.print_exc()
            raise

    code = os.waitstatus_to_exitcode(os.waitpid(in_child(work, SECONDS), 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0
