"""Experts in dumps: verl's and prime-rl's with rows of zeros where none were recorded, slime's without the last row."""

import base64
import json

import numpy as np
import pytest

from treewise.data import load_trees
from treewise.data.importers import import_rollouts
from treewise.errors import DataError

TABLE = np.array([[[1, 0]], [[2, 3]], [[0, 3]], [[1, 2]]])


def routes_of(path):
    return load_trees(path)[0].trajectories[0].routed_experts[:, 0].tolist()


def test_verls_experts_lose_their_padding_as_tokens_do(write):
    padded = np.concatenate([np.zeros_like(TABLE[:2]), TABLE, np.zeros_like(TABLE[:1])])
    record = {
        **{"prompts": [0, 0, 4, 5], "responses": [6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 0]},
        **{"response_mask": [1, 1, 0], "uid": "a", "routed_experts": padded.tolist()},
    }
    assert routes_of(write(record)) == [[0, 1], [2, 3], [0, 3], [1, 2]]


def test_prime_rls_experts_come_with_a_start(write):
    data = base64.b64encode(TABLE[1:].astype(np.uint8).tobytes()).decode()
    record = {
        **{"token_ids": [4, 5, 6, 7], "loss_mask": [0, 0, 1, 1], "inference_logprobs": [0, 0, -1, -1]},
        **{
            "advantages": [0, 0, 1, 1],
            "routed_experts": {"data": data, "shape": [3, 1, 2], "dtype": "uint8", "start": 1},
        },
    }
    [row] = import_rollouts(write(record))
    assert routes_of([row]) == [[-1, -1], [2, 3], [0, 3], [1, 2]]


def test_slimes_experts_lack_the_last_token(write):
    record = {"tokens": [4, 5, 6, 7, 8], "response_length": 2, "reward": 1.0, "rollout_routed_experts": TABLE.tolist()}
    assert routes_of(write(record)) == [[0, 1], [2, 3], [0, 3], [1, 2], [-1, -1]]


def test_another_number_of_rows_is_named(write):
    record = {"tokens": [4, 5, 6], "response_length": 2, "reward": 1.0, "rollout_routed_experts": TABLE.tolist()}
    with pytest.raises(DataError, match=r"rollout_routed_experts has shape \(4, 1, 2\); \[3, layers, experts\]"):
        load_trees(write(json.loads(json.dumps(record))))
