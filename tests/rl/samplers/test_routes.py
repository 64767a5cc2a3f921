"""The experts that the sampler records are those of its own forwards, for each way to decode."""

import numpy as np
import pytest
import torch

from treewise.errors import UnsupportedModelError
from treewise.nn.model import split_model
from treewise.nn.routing import heard, routers_of
from treewise.rl.samplers import SampleRequest, TransformersSampler, heard_decoders, shared_prefix
from treewise.testing import tiny_model

REQUESTS = [
    SampleRequest((11, 23, 5, 40, 8, 61, 17), 3, 12, seed=1, want_routes=True),
    SampleRequest((11, 23, 5, 40, 5, 5, 6), 2, 8, seed=2, want_routes=True),
    SampleRequest((11, 23, 5, 40, 8), 2, 10, seed=3, want_routes=True, stop_ids=tuple(range(7, 25))),
    SampleRequest((9,), 1, 6, seed=5, want_routes=True),
    SampleRequest((9,), 1, 4, seed=6),
]


def mixture(family):
    model = tiny_model(family)
    for router in routers_of(split_model(model).decoder):
        for parameter in router.module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def assert_experts_of_plain_forwards(model, requests, answers):
    for request, found in zip(requests, answers, strict=True):
        for completion in found:
            if not request.want_routes:
                assert completion.routed_experts is None
                continue
            ids = [*request.prefix_ids, *completion.token_ids.tolist()]
            with torch.no_grad(), heard(split_model(model.eval()).decoder) as routes:
                model(input_ids=torch.tensor([ids]), use_cache=False)
                whole = np.sort(routes.taken(1)[0], axis=-1)
            assert np.array_equal(completion.routed_experts, whole[:-1])


@pytest.mark.parametrize("method", ["shared_prefix", "copied_cache", "recompute"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_recorded_experts_are_those_of_a_plain_forward(family, method):
    model = mixture(family)
    sampler = TransformersSampler(model, method=method)
    plain = TransformersSampler(model, method=method)
    answers = sampler.sample(REQUESTS)
    assert_experts_of_plain_forwards(model, REQUESTS, answers)
    [(one,)] = plain.sample([REQUESTS[-1]])  # nothing is left of what listened
    assert np.array_equal(one.token_ids, answers[-1][0].token_ids)


def test_prefixes_that_are_computed_in_parts_and_after_others(monkeypatch):
    """Batches of neighbours, what is known of the one before, and forwards of few tokens."""
    for module in (shared_prefix, heard_decoders):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 5)
    monkeypatch.setattr(shared_prefix, "FORWARD_TOKENS", 2)
    model, draw = mixture("qwen3_moe"), np.random.default_rng(0)
    trunk, requests = draw.integers(3, 60, 30), []
    for length in (30, 30, 21, 21, 20, 9, 1):
        own = draw.integers(3, 60, int(draw.integers(0, 12)))
        requests.append(SampleRequest((*trunk[:length], *own), 2, 5, seed=length, want_routes=True))
    buckets = shared_prefix._buckets(sorted(request.prefix_ids for request in requests))
    assert len(buckets) > 2
    assert max(map(len, buckets)) > 1
    answers = TransformersSampler(model, method="shared_prefix").sample(requests)
    assert_experts_of_plain_forwards(model, requests, answers)


def test_a_dense_model_has_no_experts_to_record():
    with pytest.raises(UnsupportedModelError, match="has no router"):
        TransformersSampler(tiny_model("llama")).sample([SampleRequest((3, 4), want_routes=True, max_new_tokens=2)])
