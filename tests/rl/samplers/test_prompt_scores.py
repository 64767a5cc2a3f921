"""Scores of prompts against the log-probs of each prompt alone."""

import numpy as np
import pytest
import torch

from treewise import TreeEngine
from treewise.nn.decoder import DecoderAndHead
from treewise.rl.samplers.prompt_scores import PromptRequest, prompt_scores
from treewise.testing.families import tiny_model

PROMPTS = [np.array(ids) for ids in ([5, 9, 17, 23], [5, 9, 17, 31, 40], [8, 12])]


def test_the_head_is_taken_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters it is a sum over all of its weight; and without prompts it is not taken."""
    engine, taken, head = TreeEngine(tiny_model(), check=False), list[DecoderAndHead](), DecoderAndHead.head
    monkeypatch.setattr(DecoderAndHead, "head", lambda lm: (taken.append(lm), head(lm))[1])
    assert prompt_scores(engine, []) == []
    assert not taken
    found = prompt_scores(engine, [PromptRequest(ids, np.zeros((len(ids) - 1, 0), np.int64)) for ids in PROMPTS])
    assert len(taken) == 1
    for ids, scores in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logprobs = torch.log_softmax(engine.model(input_ids=torch.tensor(ids)[None]).logits[0, :-1], -1)
        assert np.allclose(scores["own"][1:], logprobs.gather(1, torch.tensor(ids[1:, None]))[:, 0], atol=1e-5)
