"""Samplers on servers, against an HTTP server on loopback and TRL's real client class.

No server for token-id completions runs on a CPU from PyPI here (llama-cpp-python has no wheel; `transformers serve`
returns no ids and no log-probs), so the server below speaks the request and response fields that vLLM documents for
`/v1/completions`: `prompt` as ids, `return_token_ids`, `return_tokens_as_token_ids`, `stop_token_ids`, `ignore_eos`.
Its model is a tiny one, sampled by our own sampler, so log-probs are held to teacher forcing through the wire.
"""

import inspect
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("tenacity")

from treewise.errors import ConfigError, SamplerError
from treewise.rl.samplers import Completion, OpenAISampler, Sampler, SampleRequest, TransformersSampler, VLLMSampler
from treewise.testing import tiny_model

PREFIX = (11, 23, 5, 40)
VLLM_FIELDS = {
    *("model", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "stop_token_ids"),
    *("ignore_eos", "skip_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
}


class Server(ThreadingHTTPServer):
    """Completes token ids. `failures` are statuses that it answers first; `edit` changes an answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = tiny_model("llama")
        self.sampler = TransformersSampler(self.model)
        self.lock = threading.Lock()
        self.failures: list[int] = []
        self.seen: list[dict[str, Any]] = []
        self.edit = lambda answer: answer
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        request = SampleRequest(
            tuple(asked["prompt"]),
            max_new_tokens=asked["max_tokens"],
            temperature=asked["temperature"],
            seed=asked["seed"],
            stop_ids=tuple(asked["stop_token_ids"]),
            num_top=max(1, asked["logprobs"]),
        )
        with self.lock:
            completion = self.sampler.sample([request])[0][0]
        ids = completion.token_ids.tolist()
        tops = [
            {f"token_id:{i}": v for i, v in zip([*top, token], [*values, value], strict=True)}
            for top, values, token, value in zip(
                completion.top_ids.tolist(),
                completion.top_logprobs.tolist(),
                ids,
                completion.logprobs.tolist(),
                strict=True,
            )
        ]
        logprobs = {
            "tokens": [f"token_id:{i}" for i in ids],
            "token_logprobs": completion.logprobs.tolist(),
            "top_logprobs": tops,
        }
        choice = {"index": 0, "text": "?", "token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
        return self.edit({"object": "text_completion", "choices": [choice]})


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(asked)
            status = self.server.failures.pop(0) if self.server.failures else 200
        body = json.dumps(self.server.complete(asked) if status == 200 else {"error": "busy"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@contextmanager
def sampler_on(server: Server, **settings: Any) -> Iterator[OpenAISampler]:
    sampler = OpenAISampler(server.url, "tiny", first_wait_seconds=0.001, **settings)
    try:
        yield sampler
    finally:
        sampler.close()


def assert_teacher_forced(model: torch.nn.Module, request: SampleRequest, completion: Completion) -> None:
    ids = torch.tensor([[*request.prefix_ids, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1] / request.temperature
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(request.prefix_ids) :, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-5)


def test_completions_come_in_order_with_ids_and_logprobs_as_sampled(server: Server) -> None:
    requests = [
        SampleRequest(PREFIX, 3, 6, temperature=0.7, seed=1, num_top=3),
        SampleRequest(PREFIX[:2], 2, 4, seed=2, stop_ids=tuple(range(10, 30))),
    ]
    with sampler_on(server) as sampler:
        assert isinstance(sampler, Sampler)
        results = sampler.sample(requests)
        again = sampler.sample(requests)
    assert [len(result) for result in results] == [3, 2]
    for request, completions, others in zip(requests, results, again, strict=True):
        for completion, other in zip(completions, others, strict=True):
            assert_teacher_forced(server.model, request, completion)
            assert completion.token_ids.tolist() == other.token_ids.tolist()
            stopped = int(completion.token_ids[-1]) in request.stop_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
    assert results[0][0].top_ids.shape == (6, 3)
    assert len({tuple(c.token_ids.tolist()) for c in results[0]}) == 3
    assert all(set(asked) == VLLM_FIELDS for asked in server.seen)


def test_busy_servers_are_asked_again(server: Server) -> None:
    server.failures = [503, 429, 500]
    with sampler_on(server) as sampler:
        assert sampler.sample([SampleRequest(PREFIX, 1, 3)])[0][0].num_tokens == 3
    assert len(server.seen) == 4


def test_a_server_that_stays_busy_is_an_error(server: Server) -> None:
    server.failures = [503] * 9
    with sampler_on(server, num_tries=3) as sampler, pytest.raises(SamplerError, match="answers 503"):
        sampler.sample([SampleRequest(PREFIX, 1, 3)])
    assert len(server.seen) == 3


def test_a_refusal_is_not_repeated(server: Server) -> None:
    server.failures = [400]
    with sampler_on(server) as sampler, pytest.raises(SamplerError, match="answers 400"):
        sampler.sample([SampleRequest(PREFIX, 1, 3)])
    assert len(server.seen) == 1


def test_no_server_is_an_error() -> None:
    sampler = OpenAISampler("http://127.0.0.1:9/v1", "tiny", num_tries=2, first_wait_seconds=0.001)
    with pytest.raises(SamplerError, match="no answer"):
        sampler.sample([SampleRequest(PREFIX, 1, 3)])
    sampler.close()


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["choices"][0]["token_ids"]
    return answer


def test_ids_may_come_as_names_of_tokens(server: Server) -> None:
    server.edit = _without_ids
    with sampler_on(server) as sampler:
        assert sampler.sample([SampleRequest(PREFIX, 1, 3)])[0][0].num_tokens == 3


def test_answers_that_cannot_be_trained_on(server: Server) -> None:
    def as_text(answer: dict[str, Any]) -> dict[str, Any]:
        _without_ids(answer)["choices"][0]["logprobs"]["tokens"] = ["a", "b", "c"]
        return answer

    def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0]["logprobs"] = None
        return answer

    def short(answer: dict[str, Any]) -> dict[str, Any]:
        del answer["choices"][0]["token_ids"][2:], answer["choices"][0]["logprobs"]["token_logprobs"][2:]
        return answer

    cases = [(as_text, "text and no token ids"), (without_logprobs, r"no choices\[0\].logprobs"), (short, "stop_ids")]
    with sampler_on(server) as sampler:
        for edit, message in cases:
            server.edit = edit
            with pytest.raises(SamplerError, match=message):
                sampler.sample([SampleRequest(PREFIX, 1, 3)])


def test_logprobs_that_the_server_cannot_give_are_refused(server: Server) -> None:
    with sampler_on(server) as sampler:
        with pytest.raises(ConfigError, match="processed log-probs"):
            sampler.sample([SampleRequest(PREFIX, top_p=0.9)])
        with pytest.raises(ConfigError, match="entropies"):
            sampler.sample([SampleRequest(PREFIX, want_entropy=True)])
    with (
        sampler_on(server, logprobs_mode="raw_logprobs") as sampler,
        pytest.raises(ConfigError, match="those of temperature 1"),
    ):
        sampler.sample([SampleRequest(PREFIX, temperature=0.7)])
    assert not server.seen


def test_old_weights_are_not_sampled_from_in_silence(server: Server) -> None:
    with sampler_on(server) as sampler, pytest.raises(ConfigError, match="old weights"):
        sampler.update(server.model)
    handed: list[Any] = []
    with sampler_on(server, on_update=handed.append) as sampler:
        sampler.update(server.model)
    assert handed == [server.model]


class BoundClient:
    """Takes the calls of VLLMSampler and holds each to the signature of TRL's client; answers from a tiny model."""

    def __init__(self) -> None:
        self.real = pytest.importorskip("trl.generation.vllm_client").VLLMClient
        self.sampler = TransformersSampler(tiny_model("llama"))
        self.names: list[str] = []
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.real, name)  # AttributeError where TRL has no such method

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(method).bind(None, *args, **kwargs)
            bound.apply_defaults()
            del bound.arguments["self"]
            self.names.append(name)
            if name == "weight_update":
                return _nothing()
            return self.answer(**bound.arguments) if name == "generate" else None

        return call

    def answer(self, prompts: Any, n: int, max_tokens: int, temperature: float, **rest: Any) -> dict[str, Any]:
        assert n == 1
        kwargs = rest["generation_kwargs"]
        request = SampleRequest(
            tuple(prompts[0]),
            1,
            max_tokens,
            temperature,
            seed=kwargs["seed"],
            num_top=2,
            stop_ids=tuple(kwargs["stop_token_ids"]),
        )
        with self.lock:
            one = self.sampler.sample([request])[0][0]
        table = [
            dict([*zip(top, values, strict=True), (token, value)])
            for top, values, token, value in zip(
                one.top_ids.tolist(),
                one.top_logprobs.tolist(),
                one.token_ids.tolist(),
                one.logprobs.tolist(),
                strict=True,
            )
        ]
        table = [dict(sorted(top.items(), key=lambda item: -item[1])) for top in table]
        return {
            "prompt_ids": prompts,
            "completion_ids": [one.token_ids.tolist()],
            "logprobs": [[list(top.values()) for top in table]],
            "logprob_token_ids": [[list(top) for top in table]],
        }


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_vllm_calls_fit_the_signatures_of_trl() -> None:
    client = BoundClient()
    sampler = VLLMSampler(client=client)
    request = SampleRequest(PREFIX, 2, 5, temperature=0.8, seed=3, num_top=2, stop_ids=(7,))
    model = client.sampler.model
    for completion in sampler.sample([request])[0]:
        assert_teacher_forced(model, request, completion)
        assert completion.top_ids.shape[1] == 2
    sampler.update(model)
    sampler.close()
    num = len(list(model.named_parameters()))
    sent = ["init_communicator", "weight_update", *["update_named_param"] * num, "reset_prefix_cache"]
    assert client.names == ["generate", "generate", *sent, "close_communicator"]


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # peft asks by the old name
def test_merged_adapters_are_sent_under_the_names_of_the_model() -> None:
    peft = pytest.importorskip("peft")
    from treewise.rl.samplers.servers import _merged_weights

    model = tiny_model("llama")
    plain = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    with _merged_weights(adapted) as weights:
        sent = {name: tensor.clone() for name, tensor in weights}
    assert set(sent) == set(plain)
    changed = {name for name in plain if not torch.equal(plain[name], sent[name])}
    assert changed == {name for name in plain if "q_proj" in name}
