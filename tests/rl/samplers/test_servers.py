"""Samplers on servers, against a stand-in on loopback; tests/engines runs a real vLLM."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("httpx")

from tests.rl.samplers.stand_in import StandIn, asked_of, largest_gap, running
from tests.trainer.forked_ranks import free_port
from treewise.errors import ConfigError, RequestRefusedError, SamplerError
from treewise.rl.samplers import Sampler, SampleRequest, ServerSampler
from treewise.rl.samplers import server as one_server
from treewise.rl.samplers.protocol import TextStops
from treewise.testing import tiny_model

PREFIX = (11, 23, 5, 40)
REQUEST = SampleRequest(PREFIX, 2, 6, temperature=0.7, seed=1)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running(StandIn()) as found:
        yield found


@contextmanager
def sampler_on(*servers: StandIn, **settings: Any) -> Iterator[ServerSampler]:
    urls = [f"{each.url}/v1" for each in servers]
    sampler = ServerSampler(urls, **{"patience_seconds": 0.5, "weights": "fixed", **settings})
    try:
        yield sampler
    finally:
        sampler.close()


def trained(seed: int = 1) -> torch.nn.Module:
    """Other weights than the server's."""
    return tiny_model("llama", seed=seed)


def test_completions_come_in_order_with_ids_and_logprobs_as_sampled(server: StandIn) -> None:
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
        assert largest_gap(server.model, request, completions) < 1e-5
        for completion, other in zip(completions, others, strict=True):
            assert completion.token_ids.tolist() == other.token_ids.tolist()
            stopped = int(completion.token_ids[-1]) in request.stop_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
    assert results[0][0].top_ids.shape == (6, 3)
    assert len({tuple(c.token_ids.tolist()) for c in results[0]}) == 3


def test_entropies_are_bounded_from_below_by_the_most_likely_tokens(server: StandIn) -> None:
    vocabulary = server.model.config.vocab_size
    request = SampleRequest(PREFIX, 1, 5, temperature=0.7, seed=1, num_top=2, want_entropy=True)
    server.most_top = vocabulary
    with sampler_on(server, num_entropy_top=vocabulary) as sampler:
        (whole,) = sampler.sample([request])[0]
    with sampler_on(server, num_entropy_top=4) as sampler:
        (some,) = sampler.sample([request])[0]
    ids = torch.tensor([[*PREFIX, *whole.token_ids.tolist()]])
    with torch.no_grad():
        logits = server.model.eval()(input_ids=ids).logits[0, len(PREFIX) - 1 : -1] / 0.7
    entropies = torch.distributions.Categorical(logits=logits).entropy().numpy()
    np.testing.assert_allclose(whole.entropies, entropies, atol=1e-5)
    assert (some.entropies <= entropies + 1e-6).all()
    assert whole.top_ids.shape == (5, 2)


def test_busy_servers_are_asked_again(server: StandIn) -> None:
    server.failures = [503, 429, 500]
    with sampler_on(server, patience_seconds=600) as sampler:
        assert sampler.sample([SampleRequest(PREFIX, 1, 3)])[0][0].num_tokens == 3
    assert len(asked_of(server, "/v1/completions")) == 4


def test_a_server_that_stays_busy_is_an_error(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of its clock goes by with each try."""
    server.failures = [503] * 99
    monkeypatch.setattr(one_server, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None))
    with (
        sampler_on(server, model="tiny", patience_seconds=3) as sampler,
        pytest.raises(SamplerError, match="answers 503"),
    ):
        sampler.sample([SampleRequest(PREFIX, 1, 3)])
    *tries, another = [each["prompt"] for each in asked_of(server, "/v1/completions")]
    assert tries == [list(PREFIX)] * 4
    assert another != list(PREFIX)  # whether it answers any


def test_a_refusal_is_not_repeated(server: StandIn) -> None:
    server.failures = [400]
    with sampler_on(server) as sampler, pytest.raises(RequestRefusedError, match="answers 400"):
        sampler.sample([SampleRequest(PREFIX, 1, 3)])
    assert len(asked_of(server, "/v1/completions")) == 1


@pytest.mark.parametrize(("failures", "is_of_request"), [([500], True), ([500, 500], False), ([401], False)])
def test_whose_fault_a_refusal_is(server: StandIn, failures: list[int], is_of_request: bool) -> None:
    """The request's, where the server answers another one."""
    server.failures = failures
    with sampler_on(server, patience_seconds=0.0) as sampler, pytest.raises(SamplerError) as caught:
        sampler.sample([SampleRequest(PREFIX, 1, 3)])
    assert isinstance(caught.value, RequestRefusedError) == is_of_request


def test_a_server_without_as_many_candidates_refuses_one_request(server: StandIn) -> None:
    server.most_top = 5
    with sampler_on(server) as sampler:
        with pytest.raises(RequestRefusedError, match="fewer than 20 log-probs"):
            sampler.sample([SampleRequest(PREFIX, 1, 3, num_top=20)])
        assert sampler.sample([SampleRequest(PREFIX, 1, 3, num_top=5)])[0][0].num_tokens == 3
        assert sampler.max_length == 64


def decode(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in token_ids)


def test_texts_that_end_a_continuation_are_sent_and_what_comes_beyond_is_counted(server: StandIn) -> None:
    """The stand-in goes on, as a server that does not know `stop`, or samples several tokens at a time."""
    with sampler_on(server) as sampler:
        (whole,) = sampler.sample([SampleRequest(PREFIX, 1, 6, seed=3)])[0]
        stop = decode(whole.token_ids[2:3])
        stops = TextStops(PREFIX, 1, 6, seed=3, stop_texts=(stop, "none"), decode=decode)
        (cut,) = sampler.sample([stops])[0]
        sizes = whole.num_tokens, cut.num_tokens
        gone = replace(stops, stop_texts=("none",), is_cancelled=lambda: True)
        assert sampler.sample([gone])[0][0].token_ids.tolist() == whole.token_ids.tolist()
    asked = asked_of(server, "/v1/completions")
    assert "stop" not in asked[0]
    assert asked[1]["stop"] == [stop, "none"]
    assert cut.token_ids.tolist() == whole.token_ids[: cut.num_tokens].tolist()
    assert decode(cut.token_ids).endswith(stop)
    assert (cut.finish_reason, cut.num_beyond, whole.num_beyond) == ("stop", sizes[0] - sizes[1], 0)
    assert cut.num_beyond >= 3


def test_a_server_may_see_a_text_where_we_decode_another(server: StandIn) -> None:
    def ended(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0] |= {"finish_reason": "stop", "stop_reason": "stop here"}
        return short(answer)

    server.edit = ended
    with sampler_on(server) as sampler:
        stops = TextStops(PREFIX, 1, 6, stop_texts=("stop here",), decode=decode)
        (found,) = sampler.sample([stops])[0]
    assert (found.num_tokens, found.finish_reason, found.num_beyond) == (2, "stop", 0)


@dataclass
class Rules:
    """Of a JSON schema; a server is asked by it alone."""

    schema: Any = field(default_factory=lambda: {"type": "object"})
    is_plain: bool = True

    def allowed(self, token_ids: Sequence[int]) -> None:
        raise AssertionError("the server's own grammar decides")


def test_a_server_is_asked_for_a_schema_and_for_the_policys_log_probs(server: StandIn) -> None:
    """Those that come with the reply are of the grammar."""

    def of_a_grammar(answer: dict[str, Any]) -> dict[str, Any]:
        if "logprobs" in answer["choices"][0]:
            values = answer["choices"][0]["logprobs"]["token_logprobs"]
            answer["choices"][0]["logprobs"]["token_logprobs"] = [0.0] * len(values)
        return answer

    server.edit = of_a_grammar
    request = TextStops(PREFIX, 1, 6, seed=3, rules=Rules())
    with sampler_on(server) as sampler:
        (found,) = sampler.sample([request])[0]
        first, second = asked_of(server, "/v1/completions")
        assert first["structured_outputs"] == {"json": {"type": "object"}}
        assert second["prompt"] == [*PREFIX, *found.token_ids.tolist()]
        assert largest_gap(server.model, request, [found]) < 1e-5
        for wrong, words in (
            (replace(request, temperature=0.7), "temperature 1"),
            (replace(request, num_top=2), "no top_logprobs"),
            (replace(request, rules=Rules(is_plain=False)), "tool_choice none"),
        ):
            with pytest.raises(ConfigError, match=words):
                sampler.sample([wrong])
        server.edit = lambda answer: {"choices": [{**answer["choices"][0], "prompt_logprobs": None}]}
        with pytest.raises(RequestRefusedError, match="scores no prompts"):
            sampler.sample([request])


def test_nobody_waits_for_a_server_that_is_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is named while the call is tried again; the call ends once nobody waits for it, and not with the
    patience."""
    tries = itertools.count()
    stops = TextStops(PREFIX, 1, 6, is_cancelled=lambda: next(tries) > 0)
    sampler = ServerSampler("http://127.0.0.1:9/v1", "tiny", weights="fixed", patience_seconds=600)
    sampler._has_reached = True
    clock = itertools.count(0, 3)
    monkeypatch.setattr(one_server, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda _: None))
    with pytest.raises(SamplerError, match="nobody waits for it any more"):
        sampler.sample([stops])
    sampler.close()
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == ["http://127.0.0.1:9"]
    assert "it is asked again for 600 s (patience_seconds)" in caplog.text


def test_a_proxy_is_not_asked_for_what_is_on_this_machine(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with sampler_on(server) as sampler:
        assert sampler.sample([SampleRequest(PREFIX, 1, 3)])[0][0].num_tokens == 3
    for name in ("ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "socks9://a")
    with sampler_on(server) as sampler:
        assert sampler.sample([SampleRequest(PREFIX, 1, 3)])[0][0].num_tokens == 3
    with pytest.raises(ConfigError, match="ALL_PROXY"):
        ServerSampler("http://models.example/v1")


def test_no_server_is_an_error() -> None:
    sampler = ServerSampler("http://127.0.0.1:9/v1", "tiny", patience_seconds=0.05)
    with pytest.raises(SamplerError, match="no answer"):
        sampler.sample([SampleRequest(PREFIX, 1, 3)])
    sampler.close()


def test_relatives_stay_on_one_server_and_trees_are_spread() -> None:
    with running(StandIn()) as one, running(StandIn()) as other, sampler_on(one, other) as sampler:
        requests = [SampleRequest((*PREFIX, i), 1, 2, tree=tree) for i, tree in enumerate((7, 8, 9, 10, 7, 9))]
        for _ in range(2):
            sampler.sample(requests)
        prompts = [
            {tuple(each["prompt"])[-1] for each in asked_of(server, "/v1/completions")} for server in (one, other)
        ]
    assert prompts == [{0, 2, 4, 5}, {1, 3}]


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["choices"][0]["token_ids"]
    return answer


def test_ids_may_come_as_names_of_tokens(server: StandIn) -> None:
    server.edit = _without_ids
    with sampler_on(server) as sampler:
        assert sampler.sample([SampleRequest(PREFIX, 1, 3)])[0][0].num_tokens == 3


def as_text(answer: dict[str, Any]) -> dict[str, Any]:
    _without_ids(answer)["choices"][0]["logprobs"]["tokens"] = ["a", "b", "c"]
    return answer


def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["logprobs"] = None
    return answer


def short(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["choices"][0]["token_ids"][2:], answer["choices"][0]["logprobs"]["token_logprobs"][2:]
    return answer


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (as_text, "text and no token ids"),
        (without_logprobs, r"no choices\[0\].logprobs"),
        (short, "stop_ids"),
    ],
)
def test_answers_that_cannot_be_trained_on(server: StandIn, edit: Callable[[Any], Any], message: str) -> None:
    server.edit = edit
    with sampler_on(server) as sampler, pytest.raises(SamplerError, match=message):
        sampler.sample([SampleRequest(PREFIX, 1, 3)])


def test_logprobs_that_the_server_cannot_give_are_refused(server: StandIn) -> None:
    with sampler_on(server) as sampler, pytest.raises(ConfigError, match="processed log-probs"):
        sampler.sample([SampleRequest(PREFIX, top_p=0.9)])
    with (
        sampler_on(server, logprobs_mode="raw_logprobs") as sampler,
        pytest.raises(ConfigError, match="those of temperature 1"),
    ):
        sampler.sample([SampleRequest(PREFIX, temperature=0.7)])
    assert not server.seen
    server.most_top = 3
    with sampler_on(server) as sampler, pytest.raises(SamplerError, match="--max-logprobs"):
        sampler.sample([SampleRequest(PREFIX, want_entropy=True)])


def test_a_server_that_dies_and_comes_back_gets_the_weights_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are refused until the sampler has waited twice, and it begins with the weights of its start."""
    model, waits = trained(), itertools.count(1)
    first = StandIn(free_port())
    with sampler_on(first, weights="reload", patience_seconds=600) as sampler, ExitStack() as stack:
        with running(first):
            sampler.update(model)
        back: list[StandIn] = []

        def wait(_: float) -> None:
            if next(waits) == 2:
                back.append(stack.enter_context(running(StandIn(first.server_port))))
                back[0].num_starts = 5

        monkeypatch.setattr(one_server, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
        request = SampleRequest(PREFIX, 1, 6, temperature=0.7, seed=1)
        completions = sampler.sample([request])[0]
        assert largest_gap(model, request, completions) < 1e-5
        paths = [path for path, _ in back[0].seen]
        assert paths.count("/collective_rpc") == 1
        assert paths.index("/collective_rpc") < paths.index("/v1/completions")


def test_a_server_that_was_started_anew_unseen_is_noticed(server: StandIn) -> None:
    """Between two batches no connection is lost; its start says so, and the batch is sampled once more."""
    model = trained()
    with sampler_on(server, weights="reload", patience_seconds=600) as sampler:
        sampler.update(model)
        before = sampler.sample([REQUEST])[0]
        server.start_anew()
        after = sampler.sample([REQUEST])[0]
    assert largest_gap(model, REQUEST, after) < 1e-5
    assert [each.token_ids.tolist() for each in before] == [each.token_ids.tolist() for each in after]


def test_several_servers_behind_one_address_are_an_error(server: StandIn) -> None:
    """Each of them says another start."""
    model = trained()
    with sampler_on(server, weights="reload", patience_seconds=600) as sampler:
        sampler.update(model)
        server.on_metrics = lambda _: (200, f"process_start_time_seconds {len(server.seen)}.0\n")  # type: ignore[method-assign]
        with pytest.raises(SamplerError, match="several servers"):
            sampler.sample([REQUEST])


def test_settings_that_are_wrong_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": []}, "base_url"),
        ({"base_url": "http://a", "weights": "reloads"}, "Did you mean 'reload'"),
        ({"base_url": "http://a", "weights": "nccl"}, "choose one of reload, adapter, fixed"),
        ({"base_url": "http://a", "logprobs_mode": "raw"}, "logprobs_mode"),
    ]
    for given, message in cases:
        with pytest.raises(ConfigError, match=message):
            ServerSampler(**given)
