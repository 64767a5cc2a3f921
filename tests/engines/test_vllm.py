"""Online runs of a tiny model on real vLLM servers, on a CPU: `make engines`.

Weights are handed over after each update, so the log-probs that the server recorded are those of the model in training;
two servers; LoRA merged and as an adapter; branching on what the server returns; parameters in shards; treewise serve.
"""

import json
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from tests.engines.runs import HEADS, MOST_GAP, SECONDS, assert_the_same, gaps, policy, run, sampled_ids, sampler_on
from tests.rl.agents.plain_agents import __file__ as PLAIN
from tests.rl.online.helpers import TOKENIZER, arguments, digest, settings, tiny_policy
from tests.rl.samplers.stand_in import largest_gap
from tests.trainer.forked_ranks import free_port, join
from tests.trainer.helpers import in_child
from tests.trainer.test_saved_model import changed_json, changed_weights
from treewise.cli.main import main
from treewise.errors import CheckpointError
from treewise.rl.agents.collecting import AgentCollector
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.online import OnlineTrainer
from treewise.rl.online.records import rollouts_file
from treewise.rl.samplers import SampleRequest, ServerSampler
from treewise.rl.tasks.agent_task import AgentTask

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")]

REQUEST = SampleRequest((11, 23, 5, 40), 4, 12, temperature=0.7, seed=3)


def test_log_probs_are_those_of_teacher_forcing_and_entropies_exact_with_the_whole_vocabulary(servers):
    model = policy()
    sampler = sampler_on(servers[0], num_entropy_top=model.config.vocab_size)
    sampler.update(model)
    request = SampleRequest(**{**{name: getattr(REQUEST, name) for name in REQUEST.__slots__}, "want_entropy": True})
    completions, again = sampler.sample([request])[0], sampler.sample([request])[0]
    sampler.close()
    assert largest_gap(model, request, completions) < MOST_GAP
    for each, other in zip(completions, again, strict=True):
        assert each.token_ids.tolist() == other.token_ids.tolist()
        ids = torch.tensor([[*request.prefix_ids, *each.token_ids.tolist()]])
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1] / request.temperature
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        np.testing.assert_allclose(each.entropies, entropies.numpy(), atol=1e-5)


def test_a_run_hands_its_weights_over_after_each_update(undisturbed):
    trainer, _ = undisturbed
    assert digest(trainer.model) != digest(policy())
    assert len(gaps(trainer)) == 3
    assert max(gaps(trainer)) < MOST_GAP


def test_two_servers_sample_what_one_does(servers, undisturbed, tmp_path):
    whole, num_calls = undisturbed
    before = [each.num_answered() for each in servers]
    trainer = run(tmp_path / "run", *servers)
    assert_the_same(trainer, whole)
    assert max(gaps(trainer)) < MOST_GAP
    answered = [each.num_answered() - old for each, old in zip(servers, before, strict=True)]
    assert sum(answered) == num_calls
    assert min(answered) > num_calls / 4  # of two trees an iteration each has one


@pytest.mark.parametrize("mode", ["reload", "adapter"])
def test_lora_is_handed_over_merged_and_as_an_adapter(mode, servers, tmp_path):
    model = policy(target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], r=4, lora_alpha=8)
    before = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    trainer = run(tmp_path / "run", *servers, model=model, weights=mode)
    assert len(gaps(trainer)) == 3
    assert max(gaps(trainer)) < MOST_GAP
    assert all(torch.equal(each, dict(model.named_parameters())[name]) for name, each in before.items())


@pytest.mark.parametrize("kind", ["whole", "merged", "adapter"])
def test_what_a_run_saves_is_read_by_vllm(kind, servers, tmp_path, caplog):
    """The folder itself, or its adapter merged; then the server has again what it had."""
    model = policy()
    if kind != "whole":
        layers = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        model.name_or_path = str(servers[0].model)
        model = get_peft_model(model, LoraConfig(target_modules=layers, r=4, lora_alpha=8, init_lora_weights=False))
    with caplog.at_level(logging.INFO, "treewise"):
        trainer = run(
            tmp_path / "run",
            servers[0],
            model=model,
            iterations=1,
            weights="adapter" if kind == "adapter" else "reload",
        )
    line = [each for each in caplog.messages if each.startswith(f"{trainer.folder}: read back")][-1]
    found = re.search(r"; by the server at \S+, by (\S+) at most \(rounding: (\S+)\)", line)
    assert found, line
    assert float(found[1]) < MOST_GAP
    assert float(found[2]) < 1e-3  # of float32, as the server says it computes


@pytest.mark.parametrize("damage", ["scale", "weight"])
def test_vllm_that_computes_something_else_is_an_error(damage, servers, tmp_path, monkeypatch):
    """Changed behind the back of transformers, which read it before."""
    read_saved = ServerSampler.read_saved

    def read(self, folder, saved, rows):
        if damage == "scale":
            changed_json(folder, "adapter_config.json", lora_alpha=16)
        else:
            changed_weights(folder, lambda tensors: tensors["model.norm.weight"].mul_(1.05))
        return read_saved(self, folder, saved, rows)

    monkeypatch.setattr(ServerSampler, "read_saved", read)
    model = policy()
    if damage == "scale":
        model.name_or_path = str(servers[0].model)
        settings = {"target_modules": ["q_proj", "up_proj"], "r": 4, "lora_alpha": 8, "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(**settings))
    weights = "adapter" if damage == "scale" else "reload"
    with pytest.raises(CheckpointError, match=r"run: as the server at \S+ reads it, log-probs differ by"):
        run(tmp_path / "run", servers[0], model=model, iterations=1, weights=weights)


@pytest.mark.parametrize(
    ("branching", "more"),
    [("entropy", {"definition": "shannon"}), ("lcr", {"threshold": 0.1})],
)
def test_branching_on_what_the_server_returns(branching, more, servers, tmp_path):
    settings = {"variations": 4, "per_round": 2, "roots": 2, **more}
    trainer = run(tmp_path / "run", servers[0], branching=branching, branching_settings=settings, num_candidates=8)
    logs = [each for each in trainer.log_history if "logprob_gap" in each]
    assert all(each["share_ratio"] > 1 for each in logs)
    if branching == "entropy":
        assert max(gaps(trainer)) < MOST_GAP
    else:  # first tokens that lcr drew have the log-prob of that draw; all others that of the model
        assert num_apart(policy(), rollouts_file(trainer.folder, 1)) == logs[0]["candidate_tokens"] > 0


def num_apart(model, rows):
    """Sampled tokens whose recorded log-prob is not the model's, each place of the tree once."""
    places = set()
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        ids, start = row["token_ids"], row["loss_weights"].index(1.0)
        with torch.no_grad():
            logprobs = torch.log_softmax(model.eval()(input_ids=torch.tensor([ids])).logits[0], -1)
        for at in range(start, len(ids)):
            if abs(float(logprobs[at - 1, ids[at]]) - row["sampler_logprobs"][at]) > MOST_GAP:
                places.add(tuple(ids[: at + 1]))
    return len(places)


def test_a_policy_in_shards_on_two_processes_hands_its_weights_over(servers, undisturbed, tmp_path):
    port = free_port()

    def work(rank):
        join(rank, port)
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = run(tmp_path / "run", *servers, arguments_={"sharded": True}, iterations=3)
        assert isinstance(next(trainer.model.parameters()).data, DTensor)
        (tmp_path / f"gaps-{rank}").write_text(json.dumps(gaps(trainer)))

    children = [in_child(lambda rank=rank: work(rank), 600) for rank in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    rows = [rollouts_file(folder, 1).read_text().splitlines() for folder in (undisturbed[0].folder, tmp_path / "run")]
    one, two = ([json.loads(line)["token_ids"] for line in lines] for lines in rows)
    assert one == two
    for rank in range(2):
        found = json.loads((tmp_path / f"gaps-{rank}").read_text())
        assert len(found) == 3
        assert max(found) < MOST_GAP


def test_doctor_says_what_a_server_is(servers, tmp_path, capsys):
    sampler = sampler_on(servers[0])
    sampler.update(policy())
    sampler.close()
    assert main(["doctor", "--sampler", servers[0].url, "--model", str(servers[0].model)]) == 0
    said = capsys.readouterr().out
    for words in ("vLLM 0.", "processed", "same seed", "up to 256 tokens", "logprob_gap 1.000000", "reload or adapter"):
        assert words in said
    torch.manual_seed(1)
    other = tiny_policy(seed=1, **HEADS)
    other.save_pretrained(tmp_path / "other")
    TOKENIZER.save_pretrained(tmp_path / "other")
    assert main(["doctor", "--sampler", servers[0].url, "--model", str(tmp_path / "other")]) == 1
    assert "FAILED weights" in capsys.readouterr().out


def test_a_run_from_the_command(servers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    urls = json.dumps([each.url for each in servers])
    flags = [
        *("--tasks", "sum", "--model", str(servers[0].model), "--output", "out", "--use_cpu", "true"),
        *("--chat_template", "chatml", "--iterations", "2", "--trees_per_iteration", "2", "--max_new_tokens", "6"),
        *("--tokens_per_iteration", "32", "--eval_items", "1", "--max_tokens", "64", "--report_to", "none"),
        *("--sampler", "vllm", "--sampler_settings.base_url", urls),
    ]
    code = main(["rl", *flags])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "iteration 2/2" in said.out
    assert not (tmp_path / "out" / "server_weights").exists()
    state = json.loads((Path("out") / "trainer_state.json").read_text())
    assert max(each["logprob_gap"] - 1 for each in state["log_history"] if "logprob_gap" in each) < MOST_GAP


@pytest.mark.parametrize("agent", ["rewriting", "right"])
def test_an_agent_is_sampled_on_servers_by_token_ids(agent, servers, tmp_path):
    """An agent of one call, and one that rewrites its history, calls side by side and forks: each token is trained
    once, as it was sampled, with the log-prob of the weights that were handed over; two servers sample what one does.
    """
    trainer = agent_run(agent, servers, tmp_path / "two")
    logs = [each for each in trainer.log_history if "logprob_gap" in each]
    assert len(logs) == 2
    assert max(gaps(trainer)) < MOST_GAP
    for each in logs:
        assert each["sampled_tokens"] == each["recorded_tokens"] == each["trained_tokens"] > 0
        assert each["failed_rollouts"] == 0
        assert each["agent_calls"] == each["num_rollouts"] * (16 if agent == "rewriting" else 1)
    assert digest(trainer.model) != digest(policy())
    if agent == "rewriting":
        assert logs[-1]["agent_forks"] >= 3 * logs[-1]["num_rollouts"]
    one = agent_run(agent, servers[:1], tmp_path / "one")
    assert sorted(sampled_ids(one)) == sorted(sampled_ids(trainer))


def agent_run(agent, servers, folder):
    """Two iterations of `plain_agents.py`, on servers."""
    model = policy()
    rows = AgentTask([{"question": f"{number}+2?"} for number in range(6)], held_out=0.2)
    online = settings(branching="none", branching_settings={}, max_new_tokens=6, max_length=250, gather_seconds=0.0)
    own = AgentSettings(episodes=2, episode_seconds=SECONDS)
    collector = AgentCollector(f"{PLAIN}:{agent}", TOKENIZER, model, rows, online, own)
    given = {"sampler": sampler_on(*servers), "collector": collector}
    trainer = OnlineTrainer(model, rows, TOKENIZER, online, arguments(folder, max_tokens=None), **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize("weights", ["reload", "adapter"])  # whole weights first: see `ServedModel.blank`
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the SDK's sockets
def test_clients_of_treewise_serve_sample_from_their_own_weights(weights, servers, tmp_path):
    """Two runs in turns, with adapters on layers and head, and the base model; log-probs are those of a forward."""
    tinker = pytest.importorskip("tinker")
    from tests.serve import servers as own
    from tests.serve.test_weights import ADAM, gap

    settings = {"base_url": servers[0].url, "weights": weights}
    with own.running(tmp_path, tiny_policy(**HEADS), sampler="vllm", sampler_settings=settings) as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=own.KEY)
        runs = [client.create_lora_training_client(base_model="tiny", rank=4 + i, seed=i).result() for i in range(3)]
        samplers = [client.create_sampling_client(base_model="tiny").result()]
        for number, each in enumerate(runs[1:]):
            each.forward_backward(own.tree_of_data("cross_entropy", seed=number), "cross_entropy").result()
            each.optim_step(ADAM).result()
            samplers.append(each.save_weights_and_get_sampling_client().result())
        for index in (0, 1, 2, 1, 0):
            assert gap(runs[index], samplers[index]) < 1e-4
        assert gap(runs[1], samplers[2]) > 1e-2
        client.close("success").result()
    del client, runs, samplers, each
    own.collect_sockets()
    if weights == "adapter":  # its head would act on what later tests ask for (docs/serve.md)
        servers[0].kill()
        servers[0].start()
        servers[0].wait()
