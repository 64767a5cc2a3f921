"""Servers in a thread of the test, workers in the test's own, and a flat loop to hold losses and steps against."""

import gc
import json
import threading
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from treewise.serve.app import make_app
from treewise.serve.journal import ERRORS, QueuedRequest, RequestJournal, digest_of
from treewise.serve.settings import ServeSettings
from treewise.serve.store import Store
from treewise.serve.weights import ServedModel
from treewise.serve.worker import Worker
from treewise.testing.families import tiny_model

KEY, OTHER_KEY = "tml-test", "tml-other"
FACTS = {"shape": {"rank": 2, "mlp": True, "attn": True, "unembed": True}, "seed": 1, "path": None}
RATE = {"adam_params": {"learning_rate": 0.05}}


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    url: str

    def ask(self, path: str, body: object = None, *, method: str | None = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a plain request; sent again where its answer is not there yet, as the SDK does."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"X-API-Key": KEY, **headers}, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, content = error.code, error.read()
        if status == 408:
            return self.ask(path, body, method=method, **headers)
        return status, json.loads(content) if content[:1] in (b"{", b"[") else content


@contextmanager
def running(folder: Path, model: Any, tokenizer: Any = None, **settings: Any) -> Iterator[Address]:
    """A server on a free port."""
    chosen = ServeSettings(**{"model": "tiny", "folder": str(folder), "port": 0, "max_tokens": "none", **settings})
    config = uvicorn.Config(
        make_app(chosen, model, tokenizer), port=0, log_level="warning", timeout_graceful_shutdown=1, ws="none"
    )
    server, is_up = uvicorn.Server(config), threading.Event()
    startup = server.startup

    async def announced(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        is_up.set()

    server.startup = announced  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert is_up.wait(600)
        yield Address(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join()


def collect_sockets() -> None:
    """The SDK leaves the connection open by which it asks for its flags: collected here, not in somebody's test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def datum(ids: Sequence[int], **inputs: Any) -> types.Datum:
    """All ids but the last, which predict all but the first."""
    arrays = {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(ids[:-1])),
        loss_fn_inputs={"target_tokens": np.asarray(ids[1:], dtype=np.int64), **arrays},
    )


def tree_of_data(loss: str, seed: int = 0, vocabulary: int = 64) -> list[types.Datum]:
    """Data that share prefixes: two groups of samples, turns of one episode, a row twice, and one alone."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return rng.integers(0, vocabulary, count).tolist()

    first, second, episode = ids(9), ids(5), ids(30)
    rows = [first + ids(n) for n in (3, 6, 4)] + [second + ids(n) for n in (2, 7)]
    rows += [episode[:end] for end in (8, 17, 30)] + [rows[0], ids(4)]
    data = []
    for row in rows:
        size = len(row) - 1
        logprobs, advantages = rng.normal(-4.1, 0.4, size), rng.normal(size=size)
        inputs: dict[str, Any] = {"logprobs": logprobs, "advantages": advantages}
        if loss == "cross_entropy":
            inputs = {"weights": rng.normal(size=size) * (rng.random(size) < 0.7)}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = np.arange(size) >= size // 2
        data.append(datum(row, **inputs))
    return data


def flat_losses(model: Any, datum: types.Datum, loss: str, settings: Mapping[str, float]) -> tuple[Any, Any]:
    """The loss of one datum, a scalar with a graph, and its [T] or [T, K] log-probs: a plain forward of its row."""
    ids = torch.tensor([datum.model_input.to_ints()])
    given = {name: each.to_torch().double() for name, each in datum.loss_fn_inputs.items()}
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    wide = targets.reshape(len(targets), -1)
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits, -1).gather(1, wide).reshape(targets.shape)
    if loss == "cross_entropy":
        return -(given.get("weights", torch.ones_like(logprobs)) * logprobs).sum(), logprobs
    advantages, gap = given["advantages"], logprobs - given["logprobs"]
    ratios = torch.exp(gap)
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    if loss == "gspo":
        inside = given["sequence_ratio_mask"] != 0
        ratios = torch.exp(gap.detach()[inside].mean()) * torch.exp(logprobs - logprobs.detach())
    if loss == "importance_sampling":
        return -(ratios * advantages).sum(), logprobs
    if loss in ("ppo", "gspo"):
        return -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages).sum(), logprobs
    if loss == "cispo":
        return -(ratios.clamp(low, high).detach() * logprobs * advantages).sum(), logprobs
    assert loss == "dro"
    return -(logprobs * advantages - settings["beta"] / 2 * gap**2).sum(), logprobs


class Served:
    """A worker that runs in the test's thread; `died` gives one that begins where a kill leaves it. Its model is a tiny
    one, or that of the setting `model`."""

    def __init__(self, folder, **settings):
        folder.mkdir(exist_ok=True)
        self.folder, self.settings = folder, settings
        given = {"model": "tiny", "max_tokens": "none", "snapshot_every": 100, **settings}
        chosen = ServeSettings(folder=str(folder), **given)
        self.model = ServedModel(chosen, None if "model" in settings else tiny_model("llama"))
        self.journal = RequestJournal(folder / "journal.sqlite")
        self.store = Store(folder, self.model, "tiny", self.journal)
        self.worker = Worker(self.store, lambda: None)

    def died(self):
        self.journal.close()
        return Served(self.folder, **self.settings)

    def run(self, name, **facts):
        if self.journal.get("model", name) is None:
            self.journal.put("session", name.partition(":")[0], digest_of(KEY), {})
            self.journal.put("model", name, name.partition(":")[0], {**FACTS, **facts})
        return self.ask(name, 0, "create", {})

    def send(self, name, seq, kind, body):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.worker.submit(QueuedRequest(f"{name}:{seq}", name, seq, kind), content)

    def work(self):
        while works := self.worker._take():
            self.worker._begin(works)

    def ask(self, name, seq, kind, body):
        """JSON of the answer, with `error` where it failed."""
        self.send(name, seq, kind, body)
        self.work()
        _, media, content = self.journal.find(f"{name}:{seq}")
        return json.loads(content) if media in (*ERRORS, "application/json") else content

    def values(self, name):
        return [each.detach().clone() for each in self.worker.held.of(name).weights.parameters.values()]


def call(seed=0, **inputs):
    rng, loss = np.random.default_rng(seed), "importance_sampling" if "advantages" in inputs else "cross_entropy"
    message = pb.ForwardBackwardRequest(loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = rng.integers(0, 64, 3).astype(np.int32).tobytes()
    for key, array in {"target_tokens": rng.integers(0, 64, 3), **inputs}.items():
        tensor = datum.loss_fn_inputs[key]
        tensor.dtype = pb.DTYPE_INT64 if key == "target_tokens" else pb.DTYPE_FLOAT32
        tensor.dense = np.asarray(array, dtype=np.int64 if key == "target_tokens" else np.float32).tobytes()
    return message.SerializeToString()


def same(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))
