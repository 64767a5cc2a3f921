"""A server on loopback that speaks what vLLM's server documents, with a tiny model of ours behind it.

Its model is sampled by our own sampler, so log-probs are held to teacher forcing through the wire. tests/engines runs
the same against a real vLLM.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from treewise.rl.samplers import Completion, SampleRequest, TransformersSampler
from treewise.testing import tiny_model
from treewise.trainer.saved_model import LOADING


class StandIn(ThreadingHTTPServer):
    """Completes token ids. `failures` are statuses that it answers first; `edit` changes an answer; `missing` are paths
    that it does not have; `raw` log-probs are those of temperature 1."""

    daemon_threads = True

    def __init__(self, port: int = 0, model: Any = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.first = tiny_model("llama") if model is None else model
        self.lock = threading.Lock()
        self.failures: list[int] = []
        self.seen: list[tuple[str, Any]] = []
        self.missing: set[str] = set()
        self.raw = False
        self.most_top = 20
        self.num_starts = 0
        self.edit: Any = lambda answer: answer
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.start_anew()

    def start_anew(self) -> None:
        """As after a kill: with the weights that it was started with."""
        self.num_starts += 1
        self.model, self.adapters = self.first, {}

    def completions(
        self, model: Any, request: SampleRequest, num_top: int
    ) -> tuple[Completion, list[dict[int, float]]]:
        with self.lock:
            one = TransformersSampler(model, method="recompute").sample([request])[0][0]
        ids = torch.tensor([[*request.prefix_ids, *one.token_ids.tolist()]])
        temperature = 1.0 if self.raw else request.temperature or 1.0
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1] / temperature
        logprobs = torch.log_softmax(logits, -1)
        own = logprobs.gather(1, ids[0, len(request.prefix_ids) :, None])[:, 0].tolist()
        best = logprobs.topk(max(1, min(num_top, self.most_top)))
        tops = [
            {**dict(zip(i, v, strict=True)), token: value}
            for i, v, token, value in zip(
                best.indices.tolist(), best.values.tolist(), one.token_ids.tolist(), own, strict=True
            )
        ]
        return one, [{**top, "own": value} for top, value in zip(tops, own, strict=True)]  # type: ignore[dict-item]

    def answer(self, path: str, asked: Any) -> tuple[int, Any]:
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        name = path.strip("/").replace("/", "_")
        return getattr(self, f"on_{name}", lambda _: (404, {"detail": "Not Found"}))(asked)

    def on_v1_models(self, _: Any) -> tuple[int, Any]:
        more = [{"id": name, "parent": "tiny"} for name in self.adapters]
        return 200, {"data": [{"id": "tiny", "parent": None, "max_model_len": 64}, *more]}

    def on_metrics(self, _: Any) -> tuple[int, Any]:
        return 200, f"# HELP x\nprocess_start_time_seconds {self.num_starts}.5\n"

    def on_v1_completions(self, asked: Any) -> tuple[int, Any]:
        if asked["model"] != "tiny" and asked["model"] not in self.adapters:
            return 404, {"error": "no such model"}
        if "prompt_logprobs" in asked:
            scores = self.scores(asked["prompt"], self.adapters.get(asked["model"], self.model))
            return 200, self.edit({"choices": [{"prompt_logprobs": scores}]})
        request = SampleRequest(
            tuple(asked["prompt"]),
            max_new_tokens=asked["max_tokens"],
            temperature=asked["temperature"],
            seed=asked["seed"],
            stop_ids=tuple(asked["stop_token_ids"]),
        )
        one, tops = self.completions(self.adapters.get(asked["model"], self.model), request, asked["logprobs"])
        own = [top.pop("own") for top in tops]  # type: ignore[call-overload]
        logprobs = {
            "tokens": [f"token_id:{i}" for i in one.token_ids.tolist()],
            "token_logprobs": own,
            "top_logprobs": [{f"token_id:{i}": v for i, v in top.items()} for top in tops],
        }
        choice = {"text": "?", "token_ids": one.token_ids.tolist(), "logprobs": logprobs, "finish_reason": "length"}
        return 200, self.edit({"choices": [choice]})

    def scores(self, ids: list[int], model: Any) -> list[dict[str, Any] | None]:
        """Of a prompt's tokens, each beside the likeliest, without what rules a reply."""
        with torch.no_grad():
            logprobs = torch.log_softmax(model.eval()(input_ids=torch.tensor([ids])).logits[0].float(), -1)
        found: list[dict[str, Any] | None] = [None]
        for row, token in zip(logprobs[:-1], ids[1:], strict=True):
            both = dict.fromkeys([int(row.argmax()), token])
            found.append({str(each): {"logprob": float(row[each]), "rank": 1} for each in both})
        return found

    def on_server_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"vllm_config": "model='tiny', dtype=torch.float32, seed=0"}

    def on_collective_rpc(self, asked: Any) -> tuple[int, Any]:
        if "method" not in asked:
            return 400, {"detail": "Missing 'method' in request body"}
        with LOADING:
            self.model = AutoModelForCausalLM.from_pretrained(asked["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def on_reset_prefix_cache(self, _: Any) -> tuple[int, Any]:
        return 200, {"success": True}

    def on_v1_load_lora_adapter(self, asked: Any) -> tuple[int, Any]:
        from peft import PeftModel

        if "lora_name" not in asked:
            return 400, {"detail": "lora_name"}
        base = tiny_model("llama")
        base.load_state_dict(self.model.state_dict())
        self.adapters[asked["lora_name"]] = PeftModel.from_pretrained(base, asked["lora_path"])
        return 200, "Success"

    def on_v1_unload_lora_adapter(self, asked: Any) -> tuple[int, Any]:
        return (200, "Success") if self.adapters.pop(asked["lora_name"], None) is not None else (404, "unknown")


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self.respond(None)

    def respond(self, asked: Any) -> None:
        with self.server.lock:
            self.server.seen.append((self.path, asked))
            fails = self.server.failures and self.path == "/v1/completions"
            status = self.server.failures.pop(0) if fails else 200
        status, answer = self.server.answer(self.path, asked) if status == 200 else (status, {"error": "busy"})
        body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


@contextmanager
def running(server: StandIn) -> Iterator[StandIn]:
    """A server while it answers."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked_of(server: StandIn, path: str) -> list[Any]:
    """What was posted to a path, in order."""
    return [asked for seen, asked in server.seen if seen == path]


def largest_gap(model: Any, request: SampleRequest, completions: Any) -> float:
    """Between the log-probs of completions and teacher forcing by a model."""
    gaps = []
    for each in completions:
        ids = torch.tensor([[*request.prefix_ids, *each.token_ids.tolist()]])
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1]
        expected = torch.log_softmax(logits / (request.temperature or 1.0), -1)
        expected = expected.gather(1, ids[0, len(request.prefix_ids) :, None])[:, 0]
        gaps.append(float(np.abs(expected.numpy() - each.logprobs).max()))
    return max(gaps)
