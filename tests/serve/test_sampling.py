"""What clients may ask of continuations and of prompts, with the sampler of the server's own process."""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.serve.servers import KEY, running
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_sampling")


class Words:
    """A tokenizer for the tests: each token is a word."""

    eos_token_id = None
    all_special_tokens = ()
    chat_template = None

    def decode(self, ids):
        return " ".join(f"w{each}." for each in ids)

    def __call__(self, texts, **_):
        return {"input_ids": [[0] * bool(text) for text in texts]}

    def save_pretrained(self, folder):
        pass


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with running(tmp_path_factory.mktemp("served"), tiny_model("llama"), Words()) as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
        yield client.create_sampling_client(base_model="tiny").result()
        client.close("success").result()


def drawn(base, num=1, **params):
    asked = types.SamplingParams(**{"max_tokens": 8, "seed": 5, **params})
    return base.sample(types.ModelInput.from_ints([5, 6, 7]), num, asked).result().sequences


def test_a_text_of_several_tokens_ends_a_continuation(base):
    """Where it is complete, which no token alone shows; other texts do not."""
    (free,) = drawn(base)
    assert len(free.tokens) == 8
    text = Words().decode(free.tokens[2:4])
    (stopped,) = drawn(base, stop=["w999.", text])
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[:4], "stop")
    assert np.array_equal(stopped.logprobs, free.logprobs[:4])
    (cut,) = drawn(base, stop=[text[:-2]])  # within a token
    assert cut.tokens == free.tokens[:4]
    (whole,) = drawn(base, stop=["w999."])
    assert (whole.tokens, whole.stop_reason) == (free.tokens, "length")


def test_top_p_leaves_the_likeliest_tokens(base):
    """A tiny share leaves one, which greedy sampling takes, too; log-probs are those before the cut."""
    free, likeliest = drawn(base, 4), drawn(base, 4, top_p=1e-6)
    (greedy,) = drawn(base, temperature=0.0)
    assert all(each.tokens == greedy.tokens for each in likeliest)
    assert np.allclose(likeliest[0].logprobs, greedy.logprobs, atol=1e-5)
    assert len({tuple(each.tokens) for each in free}) == 4


def test_a_prompt_of_one_token_has_no_log_prob(base):
    """Nor one that is only asked for its last tokens before them."""
    params = types.SamplingParams(max_tokens=2, seed=1)
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    one = base.sample(types.ModelInput.from_ints([5]), 1, params, **options).result()
    assert (one.prompt_logprobs, one.topk_prompt_logprobs) == ([None], [None])
    with pytest.raises(tinker.RequestFailedError, match="prompt_logprobs_last_n"):
        base.sample(types.ModelInput.from_ints([5]), 1, params, **options, prompt_logprobs_last_n=1).result()
    last = base.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params, **options, prompt_logprobs_last_n=1).result()
    assert [each is None for each in last.topk_prompt_logprobs] == [True, True, False]
