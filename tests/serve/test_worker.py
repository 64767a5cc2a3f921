"""Order, queue and turns: many clients at once, more of them than models fit in memory, and a queue that is full."""

import threading

import numpy as np
import pytest
import tinker
from tinker import types

from tests.serve.servers import KEY, running, tree_of_data
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_worker")
ADAM = types.AdamParams(learning_rate=2e-2)


def train(address, number, seen):
    """Two steps, a sample after each; every third client also sends what is wrong. What it ends with."""
    client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
    run = client.create_lora_training_client(base_model="tiny", rank=2 + number % 2, seed=number).result()
    tokens = []
    for step in range(2):
        data = tree_of_data("cross_entropy", seed=10 * number + step)
        run.forward_backward(data, "cross_entropy").result()
        if number % 3 == 0:
            with pytest.raises(tinker.RequestFailedError):
                run.forward_backward(data, "ppo").result()
        run.optim_step(ADAM).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, seed=step, temperature=0.0, stop=[])
        drawn = sampler.sample(types.ModelInput.from_ints([number, 1, 2]), 2, params).result()
        tokens.append([each.tokens for each in drawn.sequences])
    output = run.forward(tree_of_data("cross_entropy"), "cross_entropy").result()
    seen[number] = tokens, np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs])
    client.close("success").result()


@pytest.mark.slow
def test_clients_at_once_end_as_each_alone(tmp_path):
    """Four runs, of which two are in memory at a time: bit for bit what they are one after the other."""
    alone, together = {}, {}
    with running(tmp_path / "alone", tiny_model("llama")) as address:
        for number in range(4):
            train(address, number, alone)
    with running(tmp_path / "together", tiny_model("llama"), max_models=2) as address:
        threads = [threading.Thread(target=train, args=(address, number, together)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert set(together) == set(alone)
    for number, (tokens, logprobs) in alone.items():
        assert together[number][0] == tokens
        assert np.array_equal(together[number][1], logprobs)


def test_a_full_queue_is_an_answer_and_what_it_waits_for_is_taken(tmp_path):
    with running(tmp_path, tiny_model("llama"), max_queue=3, max_request_mb=1) as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
        run = client.create_lora_training_client(base_model="tiny", rank=2, seed=0).result()

        def send(seq):
            asked = {"adam_params": {"learning_rate": 0.1}, "model_id": run.model_id, "seq_id": seq}
            return address.ask("/api/v1/optim_step", asked)

        assert [send(seq)[0] for seq in (4, 3, 2, 5)] == [200, 200, 200, 429]
        assert "max_queue" in send(5)[1]["error"]
        assert send(1)[0] == 200  # lets the others go
        future = {"request_id": f"{run.model_id}:4"}
        assert address.ask("/api/v1/retrieve_future", future)[1]["metrics"]["step:max"] == 4
        assert send(5)[0] == 200
        status, content = address.ask("/api/v1/optim_step", b"x" * (1 << 20) + b"y")
        assert (status, "max_request_mb" in content["error"]) == (413, True)
        assert address.ask("/api/v1/optim_step", {}, **{"Content-Encoding": "zstd"})[0] == 415
        client.close("success").result()
