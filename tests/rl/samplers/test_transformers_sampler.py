"""Log-probs of the sampler equal flat teacher forcing; a rollout is a function of weights, request and seed."""

import logging
import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.image_models import FAMILIES as SEEING
from tests.image_models import IMAGE_TOKEN, num_rows, png, row_inputs, seeing_model
from tests.rl.online.helpers import digest
from treewise import Trajectory, TreeEngine
from treewise.errors import ConfigError, DataError, NonFiniteError, RequestRefusedError, UnsupportedModelError
from treewise.rl.samplers import Completion, SampleRequest, TransformersSampler, shared_prefix
from treewise.rl.samplers.decoder import Recompute, why_not
from treewise.rl.samplers.shared_prefix import SharedPrefix
from treewise.rl.samplers.transformers_sampler import sampling_mode
from treewise.testing import tiny_model
from treewise.tree.images import ImageSpan

TRUNK = (11, 23, 5, 40, 8, 61, 17, 33)
REQUESTS = [
    SampleRequest(TRUNK[:7], 3, 12, temperature=0.7, seed=1, want_entropy=True, num_top=4),
    SampleRequest((*TRUNK[:4], 5, 5, 6), 2, 8, seed=2),
    SampleRequest(TRUNK[:5], 2, 10, temperature=1.3, seed=3, stop_ids=tuple(range(7, 15))),
    SampleRequest(TRUNK[:7], 1, 5, seed=4, top_p=0.8, top_k=20),
    SampleRequest((9,), 1, 6, seed=5),
]
FAMILIES = {
    "llama": "shared_prefix",
    "qwen3": "shared_prefix",
    "gemma2": "shared_prefix",  # a cap on scores
    "gemma3_text": "shared_prefix",  # windows of 4, over and under the prefix
    "gpt_oss": "shared_prefix",  # sinks
    "mamba2": "copied_cache",
    "lfm2": "copied_cache",
    "qwen3_next": "copied_cache",
}


def flat_logprobs(model: torch.nn.Module, request: SampleRequest, completion: Completion) -> torch.Tensor:
    """float32 [T, V], by one plain forward over prefix and completion."""
    ids = torch.tensor([[*request.prefix_ids, *completion.token_ids.tolist()]])
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1].float()
    model.train(training)
    return torch.log_softmax(logits / (request.temperature or 1.0), -1)


def assert_exact(model: torch.nn.Module, request: SampleRequest, completion: Completion) -> None:
    table = flat_logprobs(model, request, completion)
    ids = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
    np.testing.assert_allclose(completion.logprobs, table.gather(1, ids)[:, 0].numpy(), atol=1e-5)
    if request.want_entropy:
        np.testing.assert_allclose(completion.entropies, -(table.exp() * table).sum(-1).numpy(), atol=1e-5)
    if request.num_top:
        np.testing.assert_allclose(completion.top_logprobs, table.topk(request.num_top).values.numpy(), atol=1e-5)


def ids_of(results: list[tuple[Completion, ...]]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in completions] for completions in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_flat_teacher_forcing(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(family)
    caplog.set_level(logging.INFO, logger="treewise.rl.samplers")
    results = TransformersSampler(model).sample(REQUESTS)
    assert FAMILIES[family] in caplog.text
    assert [len(completions) for completions in results] == [3, 2, 2, 1, 1]
    for request, completions in zip(REQUESTS, results, strict=True):
        for completion in completions:
            assert_exact(model, request, completion)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_all_methods_give_the_same_tokens(family: str) -> None:
    model = tiny_model(family)
    methods = ["recompute", "copied_cache", *(["shared_prefix"] if family == "llama" else [])]
    results = [TransformersSampler(model, method=method).sample(REQUESTS) for method in methods]
    assert all(ids_of(result) == ids_of(results[0]) for result in results)


@pytest.mark.parametrize(
    ("family", "forward_tokens", "num_buckets"),
    [("llama", 2, 2), ("llama", 8, 1), ("gemma3_text", 0, 4), ("gemma3_text", 32, 1)],
)
def test_first_logits_of_random_prefixes_are_those_of_a_plain_forward(
    family, forward_tokens, num_buckets, monkeypatch
) -> None:
    """Prefixes computed alone, or as padded batches where a forward costs more than the padding."""
    monkeypatch.setattr(shared_prefix, "FORWARD_TOKENS", forward_tokens)
    assert len(shared_prefix._buckets(sorted({request.prefix_ids for request in REQUESTS}))) == num_buckets
    model = tiny_model(family)
    draw = random.Random(0)
    for _ in range(12):
        stems = [(), *(tuple(draw.choices(range(60), k=draw.randint(1, 12))) for _ in range(2))]
        prefixes = sorted({(*draw.choice(stems), *draw.choices(range(4), k=draw.randint(1, 6))) for _ in range(7)})
        counts = [draw.randint(1, 3) for _ in prefixes]
        with sampling_mode(model):
            decoders = [SharedPrefix(model), Recompute(model)]
            found = [each.start(prefixes, counts, 3) for each in decoders]
            tokens = torch.arange(sum(counts)) % 50
            later = [each.step(tokens) for each in decoders]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)
        torch.testing.assert_close(later[0], later[1], rtol=0, atol=1e-4)


@pytest.mark.representatives("lfm2")
@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_a_rollout_does_not_depend_on_its_batch(family: str) -> None:
    model = tiny_model(family)
    together = ids_of(TransformersSampler(model).sample(REQUESTS))
    alone = [ids_of(TransformersSampler(model).sample([request]))[0] for request in REQUESTS]
    assert together == alone
    assert together == ids_of(TransformersSampler(model, max_rows=2).sample(REQUESTS))
    assert together == ids_of(TransformersSampler(model, max_cached_tokens=40).sample(REQUESTS))
    assert together[::-1] == ids_of(TransformersSampler(model).sample(REQUESTS[::-1]))


def test_isolated_requests_are_equal_to_the_bit_whatever_else_is_sampled() -> None:
    model = tiny_model("llama")
    sampler = TransformersSampler(model, isolate_requests=True)
    together = sampler.sample(REQUESTS)
    for request, completions in zip(REQUESTS, together, strict=True):
        for one, other in zip(completions, sampler.sample([request])[0], strict=True):
            assert one.token_ids.tobytes() == other.token_ids.tobytes()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_two_threads_may_sample_from_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while attention of the first is that of a shared prefix, and may not begin with it."""
    sampler = TransformersSampler(tiny_model("llama"))
    expected = [ids_of(sampler.sample([request])) for request in REQUESTS[:2]]
    attend, found = shared_prefix._attend, list[list[list[list[int]]]]()
    other = threading.Thread(target=lambda: found.append(ids_of(sampler.sample([REQUESTS[1]]))), daemon=True)

    def beside(*args: Any) -> torch.Tensor:
        if other.ident is None:
            other.start()
            other.join(0.3)  # all that it can do meanwhile
        return attend(*args)

    monkeypatch.setattr(shared_prefix, "_attend", beside)
    assert ids_of(sampler.sample([REQUESTS[0]])) == expected[0]
    other.join()
    assert found == [expected[1]]


def test_stops_and_limits() -> None:
    model = tiny_model("llama")
    sampler = TransformersSampler(model)
    free = sampler.sample([SampleRequest(TRUNK, 1, 12, seed=2)])[0][0]
    assert (free.finish_reason, free.num_tokens) == ("length", 12)
    ids = free.token_ids.tolist()
    by_id = sampler.sample([SampleRequest(TRUNK, 1, 12, seed=2, stop_ids=(ids[5],))])[0][0]
    assert by_id.finish_reason == "stop"
    assert by_id.token_ids.tolist() == ids[: ids.index(ids[5]) + 1]


def test_training_state_comes_back_also_when_sampling_fails() -> None:
    model = tiny_model("llama", attention_dropout=0.5)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}

    def checkpointed() -> bool:
        return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    name = model.config._attn_implementation
    with sampling_mode(model):
        assert not checkpointed()
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    sampler = TransformersSampler(model)
    one, two = ids_of(sampler.sample(REQUESTS[:2])), ids_of(sampler.sample(REQUESTS[:2]))
    assert one == two  # dropout was off
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="request 0, continuation 0"):
        sampler.sample(REQUESTS[:1])
    assert {name: module.training for name, module in model.named_modules()} == before
    assert checkpointed()
    assert model.config._attn_implementation == name


def test_a_shared_prefix_is_refused_where_it_does_not_hold() -> None:
    model = tiny_model("mamba2")
    assert "recurrent" in (why_not(model, "shared_prefix") or "")
    with pytest.raises(UnsupportedModelError, match="shared_prefix: it has layers with a recurrent state"):
        TransformersSampler(model, method="shared_prefix").sample(REQUESTS[:1])


def test_wrong_logits_of_a_cache_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    right = shared_prefix.attention_forward

    def wrong(*args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        return right(*args, **kwargs)[0] * 1.1, None

    monkeypatch.setattr(shared_prefix, "attention_forward", wrong)
    with sampling_mode(model):
        assert "logits differ" in (why_not(model, "shared_prefix") or "")


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("family", "rope", "limit"),
    [
        ("phi3", {**LONGROPE, "original_max_position_embeddings": 16}, 16),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, 15),
    ],
)
def test_rows_that_training_would_refuse_are_refused_before_anything_is_sampled(family, rope, limit):
    rope = {"rope_theta": 10000.0, **rope}
    model = tiny_model(family, rope_parameters=rope, max_position_embeddings=16, original_max_position_embeddings=16)
    calls, sampler = [], TransformersSampler(model)
    model.register_forward_pre_hook(lambda *given: calls.append(given))
    most = SampleRequest(TRUNK[:7], 2, limit - 7, seed=1)
    for request in (replace(most, max_new_tokens=limit - 6), replace(most, prefix_ids=TRUNK)):
        with pytest.raises(
            UnsupportedModelError, match=f"max_new_tokens=.*{limit + 1} tokens, but from {limit + 1} on"
        ):
            sampler.sample([most, request])
    assert calls == []
    (completions,) = sampler.sample([most])
    rows = [Trajectory([*most.prefix_ids, *each.token_ids.tolist()]) for each in completions]
    for each, logprobs in zip(completions, TreeEngine(model.eval()).logprobs(rows), strict=True):
        assert_exact(model, most, each)
        np.testing.assert_allclose(each.logprobs, logprobs.detach()[6:], atol=1e-5)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="empty prefix"):
        SampleRequest(())
    with pytest.raises(ConfigError, match="num_continuations of a sample request is 0"):
        SampleRequest((1,), 0)
    with pytest.raises(ConfigError, match="top_p"):
        SampleRequest((1,), top_p=0.0)
    with pytest.raises(ConfigError, match="temperature"):
        SampleRequest((1,), temperature=-1.0)
    with pytest.raises(ConfigError, match="sampling method 'fast'"):
        TransformersSampler(tiny_model("llama"), method="fast")


@pytest.mark.parametrize("family", SEEING)
def test_prompts_with_images_give_the_log_probs_of_the_models_own_forward(family):
    """Beside a prompt of text, with seeds; the images' rows, positions and mask are those of a whole flat row."""
    model, processor = seeing_model(family), SEEING[family].images()
    pictures = [png(1), png(2, 30, 20)]
    ids: list[int] = [3, 4]
    spans = []
    for picture in pictures:
        size = num_rows(model, processor, picture)
        spans.append(ImageSpan(picture, len(ids), len(ids) + size))
        ids += [*[IMAGE_TOKEN] * size, 5, 6]
    seen = SampleRequest(tuple(ids), 3, 5, temperature=0.8, seed=4, stop_ids=(IMAGE_TOKEN,), images=tuple(spans))
    text = SampleRequest((3, 4, 5), 2, 4, seed=1)
    sampler = TransformersSampler(model, processor=processor)
    before = digest(model)
    (both, words), (again,), (alone,) = (sampler.sample(each) for each in ([seen, text], [seen], [text]))
    assert digest(model) == before
    assert [each.token_ids.tolist() for each in both] == [each.token_ids.tolist() for each in again]
    assert [each.token_ids.tolist() for each in words] == [each.token_ids.tolist() for each in alone]
    assert len({tuple(each.token_ids) for each in both}) > 1
    for each in both:
        own = each.token_ids[: len(each.token_ids) - (each.finish_reason == "stop")].astype(np.int64)  # no picture more
        row = Trajectory([*ids, *own.tolist()], images=tuple(spans))
        inputs = row_inputs(model, processor, row)
        logits = model(input_ids=torch.tensor([[*ids, *own]]), use_cache=False, **inputs).logits[0].detach()
        wanted = torch.log_softmax(logits[len(ids) - 1 : -1] / 0.8, -1)
        wanted = wanted.gather(1, torch.from_numpy(own)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(each.logprobs[: len(own)], wanted, atol=1e-5)
    size = spans[0].end - spans[0].start + 1
    wrong = SampleRequest((3, *[IMAGE_TOKEN] * size, 5), images=(ImageSpan(pictures[0], 1, 1 + size),))
    with pytest.raises((DataError, UnsupportedModelError)):
        sampler.sample([wrong])


@pytest.mark.parametrize("token", [64, -1])
def test_an_id_without_an_embedding_is_refused_before_anything_is_sampled(token: int) -> None:
    with pytest.raises(RequestRefusedError, match=f"token id {token} is beyond the model's 64 embeddings"):
        TransformersSampler(tiny_model("llama")).sample([SampleRequest((3, token, 5), 1, 2)])
