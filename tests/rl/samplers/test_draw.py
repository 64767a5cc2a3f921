"""Draws: the distribution is the one asked for, and each row's stream is its own."""

import numpy as np
import pytest
import torch

from treewise.errors import ConfigError
from treewise.rl.samplers import SampleRequest
from treewise.rl.samplers.draw import can_be_drawn, draw_tokens, exponentials, stream_key


def rule_of(temperature: float, top_p: float, top_k: int) -> SampleRequest:
    return SampleRequest((1,), temperature=temperature, top_p=top_p, top_k=top_k, num_top=5)


PLAIN = rule_of(1.0, 1.0, 0)


def _logits(rows: int = 1, size: int = 7) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(3)) * 1.5


def _frequencies(rule: SampleRequest, logits: torch.Tensor, num: int = 20_000) -> np.ndarray:
    keys = [stream_key(5, i, 0) for i in range(num)]
    ids = draw_tokens(logits.expand(num, -1), [rule] * num, keys).token_ids
    return np.bincount(ids.numpy(), minlength=logits.shape[1]) / num


@pytest.mark.representatives("rule2")
@pytest.mark.parametrize("rule", [PLAIN, rule_of(0.5, 1.0, 0), rule_of(1.3, 1.0, 3), rule_of(1.0, 0.8, 0)])
def test_frequencies_are_the_probabilities_of_what_is_kept(rule: SampleRequest) -> None:
    logits = _logits()
    probabilities = torch.softmax(logits[0].double() / rule.temperature, -1).numpy()
    order = np.argsort(-probabilities)
    kept = order[: rule.top_k or len(order)]
    share = probabilities[kept] / probabilities[kept].sum()
    kept = kept[: int((np.cumsum(share) - share < rule.top_p).sum())]
    expected = np.zeros_like(probabilities)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    # 5 standard deviations of a frequency over 20,000 draws
    assert np.abs(_frequencies(rule, logits) - expected).max() < 5 * 0.5 / np.sqrt(20_000)


def test_logprobs_are_tempered_and_candidates_are_those_that_can_be_drawn() -> None:
    logits = _logits()
    rule = rule_of(0.7, 0.6, 4)
    draw = draw_tokens(logits, [rule], [1], want_entropy=True, num_top=3)
    reference = torch.log_softmax(logits[0] / 0.7, -1)
    assert draw.logprobs[0] == pytest.approx(float(reference[draw.token_ids[0]]), abs=1e-6)
    assert draw.entropies is not None
    assert float(draw.entropies[0]) == pytest.approx(float(-(reference.exp() * reference).sum()), abs=1e-6)
    ordered = reference.sort(descending=True).values[:4].exp()
    share = ordered / ordered.sum()
    size = int((share.cumsum(0) - share < 0.6).sum())
    assert draw.top_ids is not None
    assert draw.top_logprobs is not None
    assert draw.top_ids[0, :size].tolist() == reference.topk(size).indices.tolist()  # of 3, those that can be drawn
    assert torch.isfinite(draw.top_logprobs[0]).tolist() == [rank < size for rank in range(3)]


@pytest.mark.parametrize(
    "rule", [PLAIN, rule_of(0.7, 0.6, 4), rule_of(1.0, 0.8, 0), rule_of(1.3, 1.0, 3), rule_of(0, 1, 0)]
)
def test_servers_candidates_are_cut_like_ours(rule: SampleRequest) -> None:
    """What a server gives before its cuts, cut here, is what our own draw could have drawn."""
    logits = _logits(30)
    draw = draw_tokens(logits, [rule] * 30, [1] * 30, num_top=5)
    assert draw.top_logprobs is not None
    plain = draw_tokens(logits, [rule_of(rule.temperature or 1.0, 1.0, 0)] * 30, [1] * 30, num_top=5).top_logprobs
    assert plain is not None
    assert np.array_equal(can_be_drawn(rule, plain.numpy()), torch.isfinite(draw.top_logprobs).numpy())


def test_a_row_draws_the_same_whatever_is_beside_it() -> None:
    logits = _logits(40, 50)
    keys = [stream_key(1, i, 4) for i in range(40)]
    together = draw_tokens(logits, [PLAIN] * 40, keys).token_ids
    alone = [int(draw_tokens(logits[i : i + 1], [PLAIN], [keys[i]]).token_ids[0]) for i in range(40)]
    assert together.tolist() == alone


def test_streams_differ_by_seed_continuation_and_index() -> None:
    keys = {stream_key(s, c, i) for s in range(20) for c in range(20) for i in range(20)}
    assert len(keys) == 8000
    assert all(-(1 << 63) <= key < 1 << 63 for key in keys)


def test_exponentials_are_exponential_and_independent_of_their_neighbours() -> None:
    draws = exponentials(torch.tensor([stream_key(0, i, 0) for i in range(200)]), 1000).numpy()
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(1.0, abs=0.01)
    assert draws.var() == pytest.approx(1.0, abs=0.03)
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.01


def test_temperature_zero_takes_the_most_likely_token_and_its_plain_logprob() -> None:
    logits = _logits(3)
    draw = draw_tokens(logits, [rule_of(0.0, 0.5, 2)] * 3, [1, 2, 3])
    assert draw.token_ids.tolist() == logits.argmax(-1).tolist()
    assert torch.allclose(draw.logprobs, torch.log_softmax(logits, -1).max(-1).values)


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e300, -1.0, float("nan"), float("inf")])
def test_a_temperature_beyond_float32_is_refused(temperature):
    """Logits over it would be no numbers, and the weights would be blamed."""
    with pytest.raises(ConfigError, match=r"must be 0, or 1e-30 to 1e\+30"):
        rule_of(temperature, 1.0, 0)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_the_outermost_temperatures_give_numbers(temperature):
    drawn = draw_tokens(_logits() * 1e4, [rule_of(temperature, 1.0, 0)], [stream_key(5, 0, 0)])
    assert not torch.isnan(drawn.logprobs).any()
