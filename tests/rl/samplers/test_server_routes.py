"""vLLM's documented answer with the experts of a prompt and of a completion; and what does not fit."""

import base64
import io

import numpy as np
import pytest

from treewise.errors import SamplerError
from treewise.rl.samplers import SampleRequest
from treewise.rl.samplers.server_answers import answered

TABLE = np.random.default_rng(0).permuted(np.tile(np.arange(8), (6, 3, 1)), axis=-1)[..., :2].astype(np.uint8)
REQUEST = SampleRequest((5, 6, 7), max_new_tokens=4, stop_ids=(2,), want_routes=True)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def answer(prompt, completion):
    logprobs = {"tokens": [f"token_id:{i}" for i in (9, 8, 2, 11)], "token_logprobs": [-1.0, -2.0, -3.0, -4.0]}
    choice = {"token_ids": [9, 8, 2, 11], "logprobs": logprobs, "routed_experts": completion}
    return {"choices": [choice], "prompt_routed_experts": prompt}


@pytest.mark.parametrize(("prompt", "completion"), [(npy(TABLE[:3]), npy(TABLE[3:])), (None, npy(TABLE))])
def test_experts_of_the_prompt_and_of_what_was_kept_are_taken(prompt, completion):
    found = answered(answer(prompt, completion), REQUEST, 0, "server")
    assert found.token_ids.tolist() == [9, 8, 2]
    assert np.array_equal(found.routed_experts, np.sort(TABLE, axis=-1))
    assert found.routed_experts.dtype == np.int16


def test_nothing_is_read_where_nobody_asks():
    plain = SampleRequest((5, 6, 7), max_new_tokens=4, stop_ids=(2,))
    assert answered(answer(None, npy(TABLE)), plain, 0, "server").routed_experts is None


def test_missing_experts_and_other_numbers_of_them_are_named():
    with pytest.raises(SamplerError, match="start vLLM with --enable-return-routed-experts"):
        answered(answer(None, None), REQUEST, 0, "server")
    with pytest.raises(SamplerError, match="the experts of 3 tokens, for a prefix of 3 and 4 sampled"):
        answered(answer(None, npy(TABLE[3:])), REQUEST, 0, "server")
