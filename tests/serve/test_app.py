"""The official SDK against a server in this process: training, sampling, checkpoints, clients beside one another."""

import json
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.image_models import FAMILIES, IMAGE_TOKEN, num_rows, png, row_inputs, seeing_model
from tests.serve.servers import KEY, datum, flat_losses, running, tree_of_data
from treewise.errors import DataError
from treewise.serve.settings import ServeSettings
from treewise.serve.wire import read_rows
from treewise.testing.families import tiny_model
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

pytestmark = pytest.mark.xdist_group("test_serve_app")
ADAM = types.AdamParams(learning_rate=3e-2, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=5.0)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with running(tmp_path_factory.mktemp("served"), tiny_model("llama"), max_tokens="24") as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    made = tinker.ServiceClient(base_url=address.url, api_key=KEY)
    yield made
    made.close("success").result()


def new_run(client, seed=0, rank=4):
    return client.create_lora_training_client(base_model="tiny", rank=rank, seed=seed).result()


def step(run, data, loss="cross_entropy", settings=None, adam=ADAM):
    """Log-probs and metrics of a step."""
    computed, stepped = run.forward_backward(data, loss, settings), run.optim_step(adam)
    return computed.result(), stepped.result().metrics


def logprobs_of(output):
    return np.concatenate([each["logprobs"].to_numpy().ravel() for each in output.loss_fn_outputs])


def sampled(run, prompt=(5, 6, 7), **params):
    weights = run.save_weights_and_get_sampling_client().result()
    asked = types.SamplingParams(**{"max_tokens": 6, "seed": 3, **params})
    return weights.sample(types.ModelInput.from_ints(list(prompt)), 3, asked).result()


def test_three_steps_are_those_of_a_plain_peft_loop(client, address, tmp_path):
    """Adapters with the server's first values, rows one by one, torch's AdamW: log-probs and losses at each step."""
    from peft import PeftModel

    run = new_run(client, seed=7)
    path = run.save_weights_external("start").result().path
    urls = client._rest_client().get_external_weights_urls(path).result().urls
    folder = tmp_path / "adapters"
    folder.mkdir()
    for name, url in urls.items():
        status, content = address.ask(url.removeprefix(address.url))
        assert status == 200
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    plain = PeftModel.from_pretrained(tiny_model("llama").eval(), str(folder), is_trainable=True)
    trained = [each for each in plain.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for number, loss in enumerate(("cross_entropy", "importance_sampling", "ppo")):
        data = tree_of_data(loss, seed=number)
        output, metrics = step(run, data, loss)
        total, wanted = 0.0, []
        for each in data:
            own, values = flat_losses(plain, each, loss, {})
            own.backward()
            total, wanted = total + own.item(), [*wanted, values.detach().numpy().ravel()]
        norm = torch.nn.utils.clip_grad_norm_(trained, 5.0)
        optimizer.step()
        optimizer.zero_grad()
        assert np.abs(logprobs_of(output) - np.concatenate(wanted)).max() < 1e-5 * 10**number
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
        assert metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-4)
        assert output.metrics["tree_tokens:sum"] < 0.7 * output.metrics["flat_tokens:sum"]


def test_older_releases_of_the_sdk_are_told_to_send_protobuf(address):
    """Those before 0.25, as axolotl 0.21.0 pins them, send JSON otherwise, and forwards to another path."""
    flags = address.ask("/api/v1/client/config", {})[1]
    assert flags["proto_write_fwdbwd"] is True
    assert flags["fwd_via_fwdbwd"] is True


def test_two_calls_before_a_step_train_as_one(client):
    data = tree_of_data("cross_entropy")
    both, whole = new_run(client, seed=1), new_run(client, seed=1)
    calls = [both.forward_backward(part, "cross_entropy") for part in (data[:4], data[4:])]
    both.optim_step(ADAM).result()
    losses = sum(call.result().metrics["loss:sum"] for call in calls)
    output, _ = step(whole, data)
    assert output.metrics["loss:sum"] == pytest.approx(losses, rel=1e-5)
    after = [logprobs_of(run.forward(data, "cross_entropy").result()) for run in (both, whole)]
    assert np.abs(after[0] - after[1]).max() < 1e-5


def test_a_forward_changes_nothing_and_custom_losses_run_at_the_client(client):
    data = tree_of_data("cross_entropy")
    run, same = new_run(client, seed=2), new_run(client, seed=2)
    run.forward(data, "cross_entropy").result()

    def squares(data, logprobs):
        return sum((each**2).sum() for each in logprobs), {}

    before = logprobs_of(run.forward_backward_custom(data, squares).result())
    run.optim_step(ADAM).result()
    weights = [
        datum(each.model_input.to_ints() + each.loss_fn_inputs["target_tokens"].data[-1:], weights=-2 * own)
        for each, own in zip(data, np.split(before, np.cumsum([d.model_input.length for d in data])[:-1]), strict=True)
    ]
    step(same, weights)
    found, wanted = (logprobs_of(each.forward(data, "cross_entropy").result()) for each in (run, same))
    assert np.abs(found - wanted).max() < 1e-5


def test_sampling_gives_what_training_computes(client):
    """Log-probs of samples and of prompts are those of a forward with the same weights; seeds repeat."""
    run = new_run(client, seed=3)
    step(run, tree_of_data("cross_entropy"))
    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    params = types.SamplingParams(max_tokens=6, seed=11, temperature=1.0)
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    first, again = (sampler.sample(prompt, 4, params, **options).result() for _ in range(2))
    assert [each.tokens for each in first.sequences] == [each.tokens for each in again.sequences]
    assert len({tuple(each.tokens) for each in first.sequences}) > 1
    rows = [datum([5, 6, 7, 8, *each.tokens]) for each in first.sequences]
    forward = run.forward(rows, "cross_entropy").result()
    for sequence, row in zip(first.sequences, forward.loss_fn_outputs, strict=True):
        wanted = row["logprobs"].to_numpy()
        assert np.abs(np.array(sequence.logprobs) - wanted[3:]).max() < 1e-4
        assert np.abs(np.array(first.prompt_logprobs[1:], dtype=float) - wanted[:3]).max() < 1e-4
    assert first.prompt_logprobs[0] is None
    assert all(len(each) == 3 for each in first.topk_prompt_logprobs[1:])
    last = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=1).result()
    assert [each is None for each in last.prompt_logprobs] == [True, True, True, False]
    targets = types.TensorData.from_numpy(np.array([[6, 1], [7, 2], [8, -1]]))
    asked = sampler.sample(prompt, 1, params, target_prompt_logprobs=targets, prompt_alt_tokens_k=2).result()
    found = asked.target_prompt_logprobs.to_numpy()
    assert np.abs(found[:, 0] - np.array(first.prompt_logprobs[1:])).max() < 1e-5
    assert found[2, 1] == 0
    assert asked.prompt_alt_tokens.tokens.to_numpy().shape == (3, 2)


@pytest.mark.parametrize("num_runs", [0, 1])
def test_the_base_model_scores_prompts_before_anything_is_trained(num_runs, tmp_path):
    """With the server's own budget, which is measured at the first step, and with adapters of a run or without."""
    with running(tmp_path, tiny_model("llama"), max_tokens="auto") as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
        for number in range(num_runs):
            new_run(client, number)
        base, prompt = client.create_sampling_client(base_model="tiny").result(), types.ModelInput.from_ints([5, 6, 7])
        found = base.sample(prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True).result()
        row = new_run(client, 7).forward([datum([5, 6, 7])], "cross_entropy").result().loss_fn_outputs[0]
        assert np.abs(row["logprobs"].to_numpy() - np.array(found.prompt_logprobs[1:])).max() < 1e-4
        client.close("success").result()


def test_stops_and_limits_of_sampling(client):
    run = new_run(client)
    free = sampled(run, max_tokens=8).sequences[0].tokens
    stopped = sampled(run, max_tokens=8, stop=[free[2]]).sequences[0]
    assert stopped.tokens == free[: free.index(free[2]) + 1]
    assert stopped.stop_reason == "stop"
    greedy = sampled(run, temperature=0.0)
    assert len({tuple(each.tokens) for each in greedy.sequences}) == 1
    only = sampled(run, top_k=1)
    assert [each.tokens for each in only.sequences] == [each.tokens for each in greedy.sequences]
    base = client.create_sampling_client(base_model="tiny").result()  # a new run's adapters change nothing
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    (drawn,) = base.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params).result().sequences
    assert drawn.tokens == greedy.sequences[0].tokens


def test_checkpoints_are_loaded_with_and_without_the_optimizer(client):
    run, data = new_run(client, seed=4), tree_of_data("cross_entropy")
    step(run, data)
    path = run.save_state("after-one", user_metadata={"a": "b"}).result().path
    with pytest.raises(tinker.RequestFailedError, match="there already"):
        run.save_state("after-one").result()
    whole = client.create_training_client_from_state_with_optimizer(path).result()
    fresh = client.create_training_client_from_state(path).result()
    after = []
    for each in (run, whole, fresh):
        step(each, data)
        after.append(logprobs_of(each.forward(data, "cross_entropy").result()))
    assert np.array_equal(after[0], after[1])
    assert np.abs(after[0] - after[2]).max() > 1e-3
    rest = client._rest_client()
    (listed,) = rest.list_checkpoints(run.model_id).result().checkpoints
    assert (listed.tinker_path, listed.checkpoint_type, listed.user_metadata) == (path, "training", {"a": "b"})
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("tiny", 4, True)
    named = run.save_weights_for_sampler("final").result().path
    sampler = client.create_sampling_client(model_path=named).result()
    drawn = sampler.sample(
        types.ModelInput.from_ints([5, 6, 7]), 3, types.SamplingParams(max_tokens=6, seed=3)
    ).result()
    assert [each.tokens for each in drawn.sequences] == [each.tokens for each in sampled(run).sequences]
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.APIStatusError, match="no such checkpoint"):
        client.create_training_client_from_state(path).result()


def test_a_clients_faults_are_its_own(client, address):
    """A wrong datum, a NaN, a loss that is unknown: named, and neither this run's weights nor another's change."""
    data = tree_of_data("cross_entropy")
    run, other = new_run(client, seed=5), new_run(client, seed=6)
    step(run, data)
    step(other, data)
    before = [logprobs_of(each.forward(data, "cross_entropy").result()) for each in (run, other)]
    outside = datum([1, 2, 64], weights=[1, 1])
    with pytest.raises(tinker.RequestFailedError, match=r"data\[1\]: target_tokens: token id 64"):
        run.forward_backward([data[0], outside], "cross_entropy").result()
    run.optim_step(ADAM).result()  # no gradients: nothing changes
    huge = datum([1, 2, 3], logprobs=[-4000, -4000], advantages=[1e30, 1e30])
    with pytest.raises(tinker.RequestFailedError, match="not a number"):
        run.forward_backward([huge], "importance_sampling").result()
    run.optim_step(ADAM).result()  # nor does this
    with pytest.raises(tinker.RequestFailedError, match="not published"):
        run.forward_backward(data, "stable_reinforce").result()
    after = [logprobs_of(each.forward(data, "cross_entropy").result()) for each in (run, other)]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_what_has_no_token_is_refused(client):
    """No chunk, chunks without tokens: of a prompt, and of a datum."""
    base, run = client.create_sampling_client(base_model="tiny").result(), new_run(client)
    for count in (0, 1, 2):
        empty = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[])] * count)
        row = types.Datum(model_input=empty, loss_fn_inputs={"target_tokens": []})
        with pytest.raises(tinker.RequestFailedError, match="prompt: no token given") as said:
            base.sample(empty, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True).result()
        assert said.value.category == types.RequestErrorCategory.User
        with pytest.raises(tinker.RequestFailedError, match=r"data\[0\]: model_input: no token given"):
            run.forward([row], "cross_entropy").result()


def test_a_loss_stands_in_for_stable_reinforce_where_the_server_is_told_so(client, tmp_path):
    """As `rl_loop` sends it: samples with stability info, sequences named in the data."""
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=4, seed=2)
    refused = new_run(client).save_weights_and_get_sampling_client(record_stability_info=True).result()
    with pytest.raises(tinker.BadRequestError, match="--stable_reinforce"):
        refused.sample(prompt, 1, params).result()
    with running(tmp_path, tiny_model("llama"), stable_reinforce="importance_sampling") as other:
        own = tinker.ServiceClient(base_url=other.url, api_key=KEY)
        runs = [new_run(own, seed=1), new_run(own, seed=1)]
        sampler = runs[0].save_weights_and_get_sampling_client(record_stability_info=True).result()
        (drawn,) = sampler.sample(prompt, 1, params).result().sequences
        size = len(drawn.tokens)
        data = datum([5, 6, 7, *drawn.tokens], logprobs=[0, 0, *drawn.logprobs], advantages=[0, 0, *[1.0] * size])
        spans = [
            types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, offset=offset, length=3) for offset in (0, 1)
        ]
        spans[1] = types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, offset=1, length=2)
        named = data.with_provenance(
            model_input=[spans[0], types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, length=size - 1)],
            loss_fn_inputs=[spans[1], types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, length=size)],
        )
        found = [
            runs[0].forward_backward([named], "stable_reinforce"),
            runs[1].forward_backward([data], "importance_sampling"),
        ]
        assert found[0].result().metrics["loss:sum"] == found[1].result().metrics["loss:sum"] != 0
        with pytest.raises(tinker.RequestFailedError, match="kl_coeff"):
            runs[0].forward_backward([named], "stable_reinforce", {"kl_coeff": 0.1}).result()
        own.close("success").result()


def test_fields_that_the_server_does_not_know_are_refused(address):
    """A newer SDK's: neither a sampling parameter nor a field of a call is left out in silence."""
    asked = {"prompt": {"chunks": []}, "sampling_params": {"min_p": 0.1}, "base_model": "tiny"}
    assert "min_p" in address.ask("/api/v1/asample", asked)[1]["error"]
    load = {"session_id": "s", "model_seq_id": 0, "path": "tinker://a:train:0/weights/b", "optimizer": False}
    for more in ({"weights_access_token": "x"}, {"optimizer_config": {"type": "dimuon"}}):
        assert next(iter(more)).split("_")[0] in address.ask("/api/v1/load_weights", load | more)[1]["error"]
    with pytest.raises(DataError, match="newer"):
        read_rows(b"\xfa\x01\x01x", SimpleNamespace(vocabulary=64, settings=ServeSettings(model="tiny")))


def test_images_are_trained_on_where_the_model_takes_them(tmp_path):
    """A picture that two rows see, one that another sees: log-probs are those of the model's own forward."""
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    first, second = png(1), png(2, 30, 20)

    def chunk(data, more=0):
        return types.ImageChunk(data=data, format="png", expected_tokens=num_rows(model, images, data) + more)

    rows = [([3, 4], first, [5, 6]), ([3, 4], first, [7]), ([3, 4], second, [5, 6])]
    data, wanted = [], []
    for before, picture, after in rows:
        size = num_rows(model, images, picture)
        ids = [*before, *[IMAGE_TOKEN] * size, *after]
        item = Trajectory(ids, images=(ImageSpan(picture, len(before), len(before) + size),))
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, **row_inputs(model, images, item)).logits[0]
        wanted.append(torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].detach())
        text = [types.EncodedTextChunk(tokens=part) for part in (before, after[:-1])]
        chunks = [text[0], chunk(picture), *([text[1]] if after[:-1] else [])]
        data.append(types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": ids[1:]}))
    with running(tmp_path, model, SimpleNamespace(image_processor=images, tokenizer=None)) as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
        run = client.create_lora_training_client(base_model="tiny", rank=2, seed=0).result()
        output = run.forward_backward(data, "cross_entropy").result()
        assert np.abs(logprobs_of(output) - torch.cat(wanted).numpy()).max() < 1e-5
        assert output.metrics["tree_tokens:sum"] < output.metrics["flat_tokens:sum"]
        assert run.optim_step(ADAM).result().metrics["grad_norm:mean"] > 0
        broken = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[3]), chunk(first, more=1)])
        inputs = {"target_tokens": [1] * broken.length}
        with pytest.raises(tinker.RequestFailedError, match="placeholder"):
            run.forward_backward([types.Datum(model_input=broken, loss_fn_inputs=inputs)], "cross_entropy").result()
        sampler = run.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[3]), chunk(first)])
        asked = types.SamplingParams(max_tokens=4, seed=3, stop=[IMAGE_TOKEN])
        drawn = sampler.sample(prompt, 3, asked, include_prompt_logprobs=True).result()
        for each in drawn.sequences:
            text = types.EncodedTextChunk(tokens=each.tokens[:-1])
            chunks = [*prompt.chunks, *[text] * bool(text.tokens)]
            ids = [*[IMAGE_TOKEN] * prompt.chunks[1].length, *each.tokens]
            row = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": ids})
            (own,) = run.forward([row], "cross_entropy").result().loss_fn_outputs
            found = np.array([*drawn.prompt_logprobs[1:], *each.logprobs], dtype=float)
            assert np.abs(own["logprobs"].to_numpy() - found).max() < 1e-4
        with pytest.raises(tinker.RequestFailedError, match="images of a prompt"):
            sampler.sample(broken, 1, types.SamplingParams(max_tokens=1)).result()
        client.close("success").result()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server that takes small requests alone, its client, and log-probs after a step that nothing disturbed."""
    with running(tmp_path_factory.mktemp("small"), tiny_model("llama"), max_request_mb=1) as found:
        made = tinker.ServiceClient(base_url=found.url, api_key=KEY)
        run, data = new_run(made, seed=1), tree_of_data("cross_entropy")
        step(run, data)
        yield found, made, logprobs_of(run.forward(data, "cross_entropy").result())
        made.close("success").result()


LARGE = datum([1] * 200_000, weights=np.ones(199_999))
REFUSED = {  # what a client asks, and what it hears
    "not a number": (lambda run: run.optim_step(types.AdamParams(learning_rate=float("nan"))), "nor NaN"),
    "infinite": (lambda run: run.optim_step(types.AdamParams(eps=float("inf"))), "eps: Input should be a valid number"),
    "too large a rate": (lambda run: run.optim_step(types.AdamParams(learning_rate=1e38)), "0 to 1e"),
    "optimizer": (lambda run: run.optim_step(types.DimuonParams(learning_rate=1e-3)), "not implemented"),
    "loss": (lambda run: run.forward_backward(tree_of_data("ppo"), "none"), "loss_fn='none' is unknown"),
    "setting": (lambda run: run.forward(tree_of_data("ppo"), "ppo", {"beta": 1.0}), "a setting of ppo"),
    "large datum": (lambda run: run.forward_backward([LARGE], "cross_entropy"), "max_request_mb"),
    "large last part": (lambda run: run.forward([datum([1, 2]), LARGE], "cross_entropy"), "max_request_mb"),
    "large first part": (lambda run: run.forward([LARGE, datum([1, 2])], "cross_entropy"), "max_request_mb"),
    "large metadata": (lambda run: run.save_state("a", user_metadata={"a": "x" * 2_000_000}), "max_request_mb"),
    "large name": (lambda run: run.save_weights_for_sampler("x" * 2_000_000), "max_request_mb"),
    "name": (lambda run: run.save_state("../a"), "plain names alone"),
    "life": (lambda run: run.save_weights_external("a", ttl_seconds=-1), "ttl_seconds"),
    "recipients": (lambda run: run.save_weights_external("a", age_encryption_recipients=["age1"]), "not encrypted"),
    "account": (lambda run: run._load_state_impl("tinker://a:train:0/weights/b", True, "key"), "no other accounts"),
    "checkpoint": (lambda run: run._load_state_impl("tinker://a:train:0/weights/b", True, None), "no such checkpoint"),
    "path": (lambda run: run._load_state_impl("b", False, None), "no path of a checkpoint"),
    "by the SDK": (lambda run: run.save_state("a", ttl_seconds="soon"), "valid integer"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_run_goes_on_at_once_after_a_refusal(kind, small):
    """Whatever is refused and wherever, its number is used: the next request has its turn, and does what it would."""
    _, made, wanted = small
    ask, says = REFUSED[kind]
    run, data = new_run(made, seed=1), tree_of_data("cross_entropy")
    with pytest.raises((tinker.TinkerError, ValueError), match=says):
        ask(run).result(60)
    call = run.forward_backward(data, "cross_entropy")
    refused, stepped = ask(run), run.optim_step(ADAM)
    call.result(60)
    with pytest.raises((tinker.TinkerError, ValueError), match=says):
        refused.result(60)
    assert stepped.result(60).metrics["step:max"] == 1
    assert np.array_equal(logprobs_of(run.forward(data, "cross_entropy").result(60)), wanted)


def test_a_refused_request_is_refused_again(small):
    """With the same words, also where it is right the second time; a refusal by status is no future's."""
    address, made, _ = small
    run = new_run(made)
    asked = {"model_id": run.model_id, "seq_id": 1, "adam_params": {"learning_rate": None}}
    first = address.ask("/api/v1/optim_step", asked)
    assert (first[0], "learning_rate" in first[1]["error"]) == (400, True)
    for again in (asked, {**asked, "adam_params": {}}):
        assert address.ask("/api/v1/optim_step", again) == first
    body = b'{"model_id": "%s", "seq_id": 2, "path": "' % run.model_id.encode()  # cut, and not JSON
    for path in ("save_weights", "save_weights", "load_weights"):
        assert address.ask(f"/api/v1/{path}", body)[0] == 400
    assert address.ask("/api/v1/retrieve_future", {"request_id": f"{run.model_id}:1"})[1]["error"] == first[1]["error"]
    assert address.ask("/api/v1/save_weights", {"model_id": run.model_id, "seq_id": 3, "path": "a"})[0] == 200
    assert "path" in address.ask("/api/v1/retrieve_future", {"request_id": f"{run.model_id}:3"})[1]


def test_a_request_seen_again_is_the_same_request(client, address):
    run, data = new_run(client, seed=8), tree_of_data("cross_entropy")
    step(run, data)
    before = logprobs_of(run.forward(data, "cross_entropy").result())
    asked = {"adam_params": {"learning_rate": 0.5}, "model_id": run.model_id, "seq_id": 2, "type": "optim_step"}
    status, again = address.ask("/api/v1/optim_step", asked)
    assert (status, again["request_id"]) == (200, f"{run.model_id}:2")
    first = address.ask("/api/v1/retrieve_future", {"request_id": again["request_id"]})
    assert first == address.ask("/api/v1/retrieve_future", {"request_id": again["request_id"]})
    assert np.array_equal(logprobs_of(run.forward(data, "cross_entropy").result()), before)
    status, said = address.ask("/api/v1/save_weights", {"model_id": run.model_id, "seq_id": 2})
    assert (status, "was optim_step" in said["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/v1/forward_backward", b"\xff\xff", 400),
        ("/api/v1/forward_backward", b"", 404),
        ("/api/v1/optim_step", b"{", 400),
        ("/api/v1/optim_step", [1], 400),
        ("/api/v1/optim_step", {"adam_params": {}, "model_id": "m", "seq_id": 1}, 404),
        ("/api/v1/create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "tiny"}, 400),
        ("/api/v1/create_model", {"model_seq_id": 0, "base_model": "tiny"}, 400),
        ("/api/v1/optim_step", {"adam_params": {}, "seq_id": 1}, 400),
        ("/api/v1/create_custom_loss", {}, 404),
        ("/api/v1/retrieve_future", {"request_id": "x:1"}, 410),
        ("/api/v1/weights_info", {"tinker_path": "tinker://../../etc/passwd"}, 400),
        ("/api/v1/weights_info", {"tinker_path": "tinker://a:train:0/weights/.."}, 400),
        ("/api/v1/create_sampling_session", {"session_id": "none", "sampling_session_seq_id": 0}, 404),
        ("/api/v1/asample", {"prompt": {"chunks": []}, "sampling_params": {}, "base_model": "tiny"}, 400),
        ("/api/v1/asample", {"prompt": {"chunks": []}, "sampling_params": {}, "num_samples": 10**9}, 400),
        ("/api/v1/session_heartbeat", {"session_id": [1]}, 400),
        ("/api/v1/get_info", {"model_id": [1]}, 400),
        ("/api/v1/weights_info", {"tinker_path": 5}, 400),
        ("/api/v1/cancel_future", {"request_id": {}}, 400),
        ("/api/v1/copy_weights", {}, 404),
    ],
)
def test_malformed_requests_are_answers_not_failures(address, path, body, status):
    found, content = address.ask(path, body)
    assert (found, bool(content["error"])) == (status, True)
    assert address.ask("/api/v1/healthz") == (200, {"status": "ok"})


def test_sparse_tensors_are_checked_before_they_are_laid_out(client):
    """Indices beyond the shape (which torch would write to), and shapes that no memory holds."""
    base = client.create_sampling_client(base_model="tiny").result()
    run, prompt = new_run(client), types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=1)

    def sparse(width, column):
        shape = {"shape": [2, width], "sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [column]}
        return types.TensorData(data=[9], dtype="int64", **shape)

    found = base.sample(prompt, 1, params, target_prompt_logprobs=sparse(3, 2)).result().target_prompt_logprobs
    assert np.argwhere(found.to_numpy()).tolist() == [[0, 2]]
    for width, column, says in ((3, 10**9, "col_indices"), (10**12, 0, "cells")):
        with pytest.raises(tinker.RequestFailedError, match=says):
            base.sample(prompt, 1, params, target_prompt_logprobs=sparse(width, column)).result()
        wrong = types.Datum(
            model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": sparse(width, column)}
        )
        with pytest.raises(tinker.RequestFailedError, match=says):
            run.forward_backward([wrong], "cross_entropy").result()


def test_numbers_out_of_range_are_named(client, address):
    run = new_run(client)
    session = run.model_id.split(":")[0]
    for path, body in (
        ("optim_step", {"adam_params": {}, "model_id": run.model_id, "seq_id": 2**63}),
        ("create_model", {"session_id": session, "model_seq_id": -5, "base_model": "tiny", "lora_config": {"rank": 2}}),
    ):
        assert address.ask(f"/api/v1/{path}", body)[0] == 400
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds"):
        run.save_state("long", ttl_seconds=10**18).result()
    run.save_state("kept").result()
    kept = f"/api/v1/training_runs/{run.model_id}/checkpoints/weights/kept/ttl"
    assert address.ask(kept, {"ttl_seconds": 1e300}, method="PUT")[0] == 400
    assert address.ask("/api/v1/checkpoints")[0] == 200


def test_clients_that_leave_in_the_middle_leave_the_others_as_they_are(client, address, caplog):
    """One while it sends, one whose call runs, one with gradients that wait for a step: bit for bit as without them."""
    host, port = address.url.removeprefix("http://").split(":")
    data = tree_of_data("cross_entropy")
    other, twin = new_run(client, seed=11), new_run(client, seed=11)
    for _ in range(2):
        step(twin, data)
    step(other, data)
    gone = tinker.ServiceClient(base_url=address.url, api_key=KEY)
    rogue = new_run(gone, seed=12)
    asked = types.ForwardBackwardInput(data=tree_of_data("ppo"), loss_fn="ppo")
    request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id=rogue.model_id, seq_id=1)
    body = forward_backward_request_to_proto(request).SerializeToString()
    lines = (
        "POST /api/v1/forward_backward HTTP/1.1",
        "Host: 127.0.0.1",
        f"X-API-Key: {KEY}",
        f"Content-Length: {len(body)}",
    )
    head = "\r\n".join((*lines, "", "")).encode()
    with socket.create_connection((host, int(port))) as half:
        half.sendall(head + body[: len(body) // 2])
    with socket.create_connection((host, int(port))) as whole:
        whole.sendall(head + body)
        assert whole.recv(12) == b"HTTP/1.1 200"
    gone.close("failure").result()
    step(other, data)
    after = [logprobs_of(each.forward(data, "cross_entropy").result()) for each in (other, twin)]
    assert np.array_equal(*after)
    assert address.ask("/api/v1/retrieve_future", {"request_id": f"{rogue.model_id}:1"})[0] == 200
    assert not caplog.records
