"""Every door ends a turn where `generate` does: with each of the ends that a model was published with."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.rl.online.helpers import EvenBytes, arguments, settings, tiny_policy
from tests.rl.samplers.stand_in import StandIn, running
from tests.rl.tasks.test_episode import byte_tokenizer
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template
from treewise.models.load_model import load_generation_config
from treewise.rl.agents.record import loaded
from treewise.rl.agents.record_settings import RecordSettings
from treewise.rl.online import OnlineTrainer
from treewise.rl.online.records import EVALUATIONS, rollouts_file
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.recorder.ends import end_ids
from treewise.rl.samplers import SampleRequest, TransformersSampler
from treewise.rl.samplers.server_answers import question

PUBLISHED = {  # tokens that end turns, the tokenizer's end of text first
    "GLM-4.5": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "GPT-OSS": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "Llama 3.1": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "Qwen3": ("<|im_end|>", "<|endoftext|>"),
}


def tokenizer_with(ends):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(ends)})
    tokenizer.eos_token = ends[0]
    return tokenizer


def says(token, ends, tokenizer):
    """A policy that always says one token, as published with some ends."""
    model = tiny_policy()
    model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                parameter.zero_()  # so every hidden row is of ones
            if name.endswith(("embed_tokens.weight", "norm.weight")):
                parameter.fill_(1.0)
        model.lm_head.weight[token] = 1.0
    model.generation_config.eos_token_id = ends
    return model


@pytest.mark.parametrize("family", PUBLISHED)
def test_runs_on_tasks_and_their_evaluations_end_where_generate_does(family, tmp_path):
    tokenizer = tokenizer_with(PUBLISHED[family])
    ids = tokenizer.convert_tokens_to_ids(list(PUBLISHED[family]))
    for token in ids[1:]:
        model = says(token, ids, tokenizer)
        prompt = torch.tensor([tokenizer("Hi")["input_ids"]])
        assert model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist() == [token]
        given = settings(iterations=1, branching="none", branching_settings={"roots": 2}, eval_every=1)
        trainer = OnlineTrainer(model, EvenBytes(), tokenizer, given, arguments(tmp_path / str(token)))
        trainer.train()
        rows = [json.loads(line) for line in rollouts_file(tmp_path / str(token), 1).read_text().splitlines()]
        assert [sum(row["loss_weights"]) for row in rows] == [1.0] * len(rows)
        assert {row["token_ids"][-1] for row in rows} == {token}
        (evaluated, *_) = (tmp_path / str(token) / EVALUATIONS).iterdir()
        held_out = [json.loads(line) for line in evaluated.read_text().splitlines()]
        assert {each["completion"] for each in held_out} == {tokenizer.decode([token])}


@pytest.mark.parametrize("sampler", ["transformers", "openai"])
def test_record_ends_turns_by_what_the_folder_says(sampler, tmp_path):
    tokenizer = tokenizer_with(PUBLISHED["GLM-4.5"])
    ids = tokenizer.convert_tokens_to_ids(list(PUBLISHED["GLM-4.5"]))
    model = says(ids[1], ids, tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with running(StandIn(model=model)) as server:
        more = {} if sampler == "transformers" else {"sampler_settings": {"base_url": f"{server.url}/v1"}}
        folder, rows = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
        tokenizer, found, _, config = loaded(RecordSettings(model=folder, output=rows, sampler=sampler, **more))
    stop_ids = ChatTokens(tokenizer, "chatml", generation_config=config).end_ids
    assert set(ids) <= set(stop_ids)
    request = SampleRequest((5, 6), max_new_tokens=8, temperature=0.0, stop_ids=stop_ids)
    if sampler == "transformers":
        [[completion]] = found.sample([request])
        assert completion.token_ids.tolist() == [ids[1]]
    else:
        assert set(ids) <= set(question(request, 0, "m", 0)["stop_token_ids"])
    found.close()


def test_serve_ends_where_generate_does():
    pytest.importorskip("tinker")
    from treewise.serve.settings import ServeSettings
    from treewise.serve.weights import ServedModel

    tokenizer = tokenizer_with(PUBLISHED["Llama 3.1"])
    ids = tokenizer.convert_tokens_to_ids(list(PUBLISHED["Llama 3.1"]))
    served = ServedModel(ServeSettings(model="tiny", folder="unused"), says(ids[2], ids, tokenizer), tokenizer)
    assert set(ids) == set(served.stop_ids)
    own = ServedModel(ServeSettings(model="tiny", folder="unused"), says(ids[2], ids, tokenizer))
    assert own.stop_ids == tuple(ids)


def test_one_end_none_and_those_of_a_template():
    tokenizer = tokenizer_with(["<|endoftext|>"])
    chatml, plain = Template(Encoder(tokenizer), "chatml", {}), Template(Encoder(tokenizer), None, {})
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert end_ids(chatml, None) == (end, eos)
    assert end_ids(chatml, SimpleNamespace(eos_token_id=7)) == (end, eos, 7)
    assert end_ids(plain, SimpleNamespace(eos_token_id=[7, eos])) == (eos, 7)
    assert end_ids(None, SimpleNamespace(eos_token_id=None)) == ()


def test_a_folder_without_a_generation_config_has_the_end_of_its_configuration(tmp_path):
    model = tiny_policy()
    model.config.save_pretrained(tmp_path)
    assert load_generation_config(str(tmp_path)).eos_token_id == model.config.eos_token_id


def test_a_policy_speaks_on_behind_an_end_that_nobody_names():
    tokenizer = tokenizer_with(PUBLISHED["Qwen3"])
    ids = tokenizer.convert_tokens_to_ids(list(PUBLISHED["Qwen3"]))
    sampler = TransformersSampler(says(ids[1], ids, tokenizer))
    request = SampleRequest((5, 6), max_new_tokens=4, temperature=0.0, stop_ids=(ids[0],))
    assert (
        sampler.sample([request])[0][0].token_ids.tolist() == [ids[1]] * 4
    )  # what `record` did with `<|im_end|>` alone
