"""Clients' weights on servers that sample for them, against the stand-in for vLLM; tests/engines runs a real one."""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.rl.samplers.stand_in import StandIn, asked_of
from tests.rl.samplers.stand_in import running as standing_in
from tests.serve.servers import KEY, datum, running, tree_of_data
from treewise.errors import ConfigError
from treewise.serve.settings import ServeSettings
from treewise.serve.weights import ServedModel
from treewise.testing.families import tiny_model

pytestmark = [
    pytest.mark.xdist_group("test_serve_weights"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),  # peft asks by the old name
]
ADAM = types.AdamParams(learning_rate=3e-2)
PROMPT = [5, 6, 7, 8]


def gap(run, sampler, **params):
    """Between log-probs of samples and of prompts from a sampling client, and a forward of the run's weights."""
    asked = types.SamplingParams(**{"max_tokens": 6, "seed": 1, **params})
    prompt = types.ModelInput.from_ints(PROMPT)
    found = sampler.sample(prompt, 3, asked, include_prompt_logprobs=True, topk_sample_logprobs=2).result()
    forward = run.forward([datum([*PROMPT, *each.tokens]) for each in found.sequences], "cross_entropy").result()
    gaps = []
    for sequence, row in zip(found.sequences, forward.loss_fn_outputs, strict=True):
        own = [*found.prompt_logprobs[1:], *sequence.logprobs]
        gaps.append(np.abs(row["logprobs"].to_numpy() - np.array(own, dtype=float)).max())
    return max(gaps)


@pytest.mark.parametrize(("train", "weights"), [("lora", None), ("lora", "reload"), ("full", None)])
def test_clients_sample_from_their_own_weights_on_a_server(train, weights, tmp_path):
    """Two runs and the base model in turns, in one server that is started anew between, by either way of weights."""
    with standing_in(StandIn()) as stand_in:
        settings = {"base_url": f"{stand_in.url}/v1"} | ({} if weights is None else {"weights": weights})
        more = {"train": train, "sampler": "vllm", "sampler_settings": settings}
        with running(tmp_path, tiny_model("llama"), **more) as address:
            client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
            runs = [client.create_lora_training_client(base_model="tiny", rank=2 + i, seed=i).result() for i in (0, 1)]
            untrained = client.create_lora_training_client(base_model="tiny", rank=2, seed=0).result()
            base = client.create_sampling_client(base_model="tiny").result()
            assert gap(untrained, base) < 1e-4
            samplers = []
            for number, run in enumerate(runs):
                run.forward_backward(tree_of_data("cross_entropy", seed=number), "cross_entropy").result()
                run.optim_step(ADAM).result()
                samplers.append(run.save_weights_and_get_sampling_client().result())
            for index in (0, 1, 0):
                assert gap(runs[index], samplers[index]) < 1e-4
            assert gap(runs[0], samplers[1]) > 1e-2
            assert gap(untrained, base) < 1e-4
            stand_in.start_anew()
            assert gap(runs[0], samplers[0]) < 1e-4
            assert len(stand_in.adapters) == (train == "lora" and weights is None)
            asked = asked_of(stand_in, "/v1/completions")
            asked = [each for each in asked if "prompt_logprobs" not in each]  # but for what is read back
            assert len(asked) == 3 * 7
            if train == "lora" and weights is None:  # also of the base model: see `ServedModel.blank`
                assert all(each["model"].startswith("treewise-") for each in asked)
            with pytest.raises(tinker.RequestFailedError, match="top_p"):
                gap(runs[0], samplers[0], top_p=0.5)
            client.close("success").result()
        assert not list(tmp_path.glob("server_weights/*"))


def test_what_a_server_cannot_do_is_named():
    for settings, says in (
        ({"sampler_settings": None}, "base_url"),
        ({"sampler_settings": {"base_url": "http://127.0.0.1:1", "weights": "fixed"}}, "weights of their own"),
        ({"sampler_settings": {"base_url": "http://127.0.0.1:1", "folder": "x"}}, "folder"),
    ):
        with pytest.raises(ConfigError, match=says):
            ServedModel(ServeSettings(model="tiny", sampler="vllm", **settings), tiny_model("llama"))
