"""20 clients of the SDK at once, with five keys, each with a loss of its own and steps that are refused, beside
malformed requests, on a server that is killed at drawn moments of any of them, with the settings that it has by
default: each ends as it does alone and undisturbed.
"""

import http.client
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.serve.servers import Address, running, tree_of_data
from tests.serve.test_journal import Killer
from tests.trainer.forked_ranks import free_port
from treewise.serve.settings import ServeSettings
from treewise.testing.families import tiny_model
from treewise.trainer.checkpoint.store import read_manifest

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("test_serve_crowd")]
ADAM = types.AdamParams(learning_rate=1e-2)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "custom")
SETTINGS = {"dro": {"beta": 0.1}}
NUM_CLIENTS, NUM_STEPS, NUM_KILLS = 20, 3, 12
MALFORMED = [
    (path, body)
    for path in ("forward_backward", "optim_step", "asample", "create_model", "load_weights", "save_weights", "nothing")
    for body in (b"", b"{", b"[1]", b"\xff\xfe" * 50, b'{"model_id": [1]}', b'{"seq_id": -1}', b'{"prompt": 5}')
]


def insisted(ask):
    """The SDK asks for a session or a run once, and gives up where the connection ends; its user asks again."""
    while True:
        try:
            return ask()
        except (tinker.APIError, tinker.RequestFailedError):
            time.sleep(0.2)


def squares(data, logprobs):
    return sum((each**2).sum() for each in logprobs), {}


def train(url, number, begins=lambda step: None):
    """Of each step the norm of its gradient, its loss and its checkpoint; the last log-probs."""
    client = insisted(lambda: tinker.ServiceClient(base_url=url, api_key=f"tml-{number % 5}"))
    made = {"base_model": "tiny", "rank": 2 + number % 3, "seed": number}
    run = insisted(lambda: client.create_lora_training_client(**made).result())
    loss, seen = LOSSES[number % len(LOSSES)], []
    for step in range(NUM_STEPS):
        begins(step)
        if loss == "custom":
            call = run.forward_backward_custom(tree_of_data("cross_entropy", seed=number), squares)
        else:
            call = run.forward_backward(tree_of_data(loss, seed=number), loss, SETTINGS.get(loss))
        refused, stepped = run.optim_step(types.AdamParams(learning_rate=float("nan"))), run.optim_step(ADAM)
        norm = stepped.result().metrics["grad_norm:mean"]
        with pytest.raises(tinker.BadRequestError, match="learning_rate"):
            refused.result()
        seen.append((norm, call.result().metrics["loss:sum"], run.save_state(f"step-{step}").result().path))
    last = run.forward(tree_of_data("cross_entropy"), "cross_entropy").result()
    listed = client._rest_client().list_checkpoints(run.model_id).result().checkpoints
    assert {path for *_, path in seen} <= {each.tinker_path for each in listed}
    client.close("success").result()
    return seen, np.concatenate([each["logprobs"].to_numpy() for each in last.loss_fn_outputs])


def weights_of(folder: Path, path: str) -> dict[str, np.ndarray]:
    """Of a checkpoint, every file of which is what its manifest says."""
    run, *rest = path.removeprefix("tinker://").split("/")
    found = folder.joinpath("runs", run.replace(":", "."), *rest, "checkpoint-1")
    read_manifest(found)
    return {file.name: load_file(file) for file in found.glob("*.safetensors")}


def disturb(url, is_done, statuses):
    draw, address = random.Random(1), Address(url)
    while not is_done.wait(0.05):
        path, body = draw.choice(MALFORMED)
        try:
            statuses.append(address.ask(f"/api/v1/{path}", body + draw.randbytes(draw.choice((0, 1, 300))))[0])
        except (OSError, http.client.HTTPException):  # the server is away, or goes in the middle of an answer
            statuses.append(0)


def test_a_crowd_ends_as_each_alone(tmp_path):
    alone, together, statuses = {}, {}, []
    with running(tmp_path / "alone", tiny_model("llama"), max_tokens="24") as address:
        for number in range(NUM_CLIENTS):
            alone[number] = train(address.url, number)
    chosen = {"max_starts": ServeSettings(model="tiny").max_starts}
    killer = Killer(tmp_path / "together", free_port(), NUM_KILLS, (0.5, 12.0), **chosen)
    killer.start()
    killer.may_kill.set()
    url, is_done = f"http://127.0.0.1:{killer.port}", threading.Event()

    def begins(step):
        if step == NUM_STEPS - 1:  # a fast machine ends its steps before the first kill
            assert killer.has_killed.wait(600)

    threads = [
        threading.Thread(target=lambda number=number: together.update({number: train(url, number, begins)}))
        for number in range(NUM_CLIENTS)
    ]
    malformed = threading.Thread(target=disturb, args=(url, is_done, statuses))
    for thread in (*threads, malformed):
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    malformed.join()
    killer.end()
    assert sorted(together) == list(range(NUM_CLIENTS))
    assert {status for status in statuses if status} <= {400, 404, 413}
    for number, (seen, logprobs) in together.items():
        wanted, last = alone[number]
        assert [each[:2] for each in seen] == [each[:2] for each in wanted], LOSSES[number % len(LOSSES)]
        assert np.array_equal(logprobs, last)
        for (*_, path), (*_, other) in zip(seen, wanted, strict=True):
            found, saved = weights_of(tmp_path / "together", path), weights_of(tmp_path / "alone", other)
            assert {file: sorted(each) for file, each in found.items()} == {file: sorted(saved[file]) for file in saved}
            assert all(np.array_equal(each, saved[file][key]) for file in found for key, each in found[file].items())
    assert statuses.count(0) < len(statuses)
    assert killer.num_killed
