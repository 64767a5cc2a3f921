"""Checkpoints: of all weights, of samplers that are kept or replaced, and of those whose time is over. What is saved is
read back by transformers, PEFT and a server of completions; damage is an error, and no save.
"""

import json
import logging
import re
import shutil
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rl.samplers.stand_in import StandIn, running
from tests.serve.servers import FACTS, RATE, Served, call, same
from tests.trainer.test_saved_model import changed_json, changed_weights
from treewise.errors import DataError
from treewise.serve import store
from treewise.serve.journal import REFUSED, QueuedRequest
from treewise.serve.store import CheckpointName, NoCheckpointError
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_store")


def step(served, name, seq, seed):
    served.ask(name, seq, "forward_backward", call(seed))
    assert "error" not in served.ask(name, seq + 1, "optim_step", RATE)


def test_all_weights_are_saved_and_go_on_with_their_optimizer(tmp_path):
    """From a checkpoint and from a snapshot: the step after it is that of the run itself; without the optimizer not."""
    served = Served(tmp_path, train="full")
    facts = {"shape": {**FACTS["shape"], "rank": 0}}
    served.run("a:train:0", **facts)
    for number in range(3):
        step(served, "a:train:0", 1 + 2 * number, number)
    assert "error" not in served.ask("a:train:0", 7, "save_weights", {"path": "one"})
    path = "tinker://a:train:0/weights/one"
    for name, optimizer in (("b:train:0", True), ("c:train:0", False)):
        assert "error" not in served.run(name, path=path, optimizer=optimizer, **facts)
        assert same(served.values(name), served.values("a:train:0"))
    served.worker.held.save("a:train:0", served.worker.held.of("a:train:0"))
    served = served.died()
    for name, seq in (("a:train:0", 8), ("b:train:0", 1), ("c:train:0", 1)):
        step(served, name, seq, 9)
    after = [served.values(name) for name in ("a:train:0", "b:train:0", "c:train:0")]
    assert same(after[0], after[1])
    assert not same(after[0], after[2])


def test_samplers_without_a_name_are_kept_in_their_number(tmp_path):
    """The newest of them; one with a name, and one in flight, which is replaced, stay."""
    served = Served(tmp_path, keep_samplers=2)
    served.run("a:train:0")
    named = {"path": "named", "sampling_session_seq_id": 9}
    assert served.ask("a:train:0", 1, "save_weights_for_sampler", named)["path"].endswith("/sampler_weights/named")
    for seq, kind in enumerate((None, "inflight", None, None, "inflight"), start=2):
        asked = {"kind": kind, "sampling_session_seq_id": seq}
        assert (
            served.ask("a:train:0", seq, "save_weights_for_sampler", asked)["sampling_session_id"] == f"a:sample:{seq}"
        )
    names = sorted(place.name for place in served.store.places("a:train:0"))
    assert names == ["inflight", "named", "unnamed-00000004", "unnamed-00000005"]


def test_a_sampler_in_flight_takes_the_newest_weights(tmp_path):
    """Also one whose weights before are in memory."""
    served, place = Served(tmp_path), CheckpointName("a:train:0", "sampler_weights", "inflight")
    served.run("a:train:0")
    found = []
    for seq in (1, 4):
        step(served, "a:train:0", seq, seq)
        served.ask("a:train:0", seq + 2, "save_weights_for_sampler", {"kind": "inflight", "sampling_session_seq_id": 0})
        found.append([each.detach() for each in served.store.weights_of(place).parameters.values()])
        assert same(found[-1], served.values("a:train:0"))
    assert not same(*found)
    assert served.journal.get("sampler", "a:sample:0")["model_path"] == str(place)


def test_what_expired_is_removed(tmp_path):
    """And is saved again under its name by the request after it, whose life is its own."""
    served = Served(tmp_path)
    served.run("a:train:0")
    for seq, (name, life) in enumerate((("short", 0), ("long", 3600), ("kept", None)), start=1):
        assert "path" in served.ask("a:train:0", seq, "save_weights", {"path": name, "ttl_seconds": life})
    assert [place.name for place in served.store.places()] == ["long", "kept"]
    served.store.forget()
    assert sorted(path.name for path in tmp_path.glob("runs/*/weights/*")) == ["kept", "long"]
    assert "path" in served.ask("a:train:0", 4, "save_weights", {"path": "short"})
    served = served.died()
    served.store.forget()
    assert sorted(place.name for place in served.store.places()) == ["kept", "long", "short"]


def test_a_checkpoint_that_was_saved_before_a_kill_is_not_saved_twice(tmp_path, monkeypatch):
    """The request runs again, because its answer was not written; its life begins then."""
    served = Served(tmp_path)
    served.run("a:train:0")
    with monkeypatch.context() as patch:
        patch.setattr(served.journal, "answer", lambda *_: None)
        served.send("a:train:0", 1, "save_weights", {"path": "one", "ttl_seconds": 100})
        served.work()
    (before,) = served.store.places().values()
    served = served.died()
    monkeypatch.setattr(served.store, "save", lambda *_: pytest.fail("saved again"))
    served.work()
    ((place, after),) = served.store.places().items()
    assert (str(place), after["time"]) == ("tinker://a:train:0/weights/one", before["time"])
    assert after["expires"] >= before["expires"]
    assert b"weights/one" in served.journal.find("a:train:0:1").answer
    assert torch.is_tensor(served.values("a:train:0")[0])


def test_checkpoints_are_their_keys_alone(tmp_path):
    """Another key's is answered as one that is not there."""
    served, place = Served(tmp_path), CheckpointName("a:train:0", "weights", "one")
    served.run("a:train:0")
    served.ask("a:train:0", 1, "save_weights", {"path": "one"})
    key = served.journal.key_of("a:train:0")
    assert served.store.facts(place, key) == served.store.facts(place)
    for asking, each in (("other", place), (key, CheckpointName("a:train:0", "weights", "none"))):
        with pytest.raises(NoCheckpointError, match=f"^{each}: no such checkpoint.$"):
            served.store.facts(each, asking)


def copied(served, folder):
    """What a kill leaves, at another place."""
    shutil.copytree(served.folder, folder)
    return folder


def test_a_run_that_the_journal_lost_is_named(tmp_path, caplog):
    """Its folder and its checkpoints stay as they are, and others go on."""
    served = Served(tmp_path / "served")
    for name in ("a:train:0", "b:train:0"):
        served.run(name)
        served.ask(name, 1, "save_weights", {"path": "one"})
    for table, column in (("facts", "id"), ("requests", "owner")):
        served.journal._all(f"DELETE FROM {table} WHERE {column} LIKE 'a%'")
    before = sorted(tmp_path.rglob("*.safetensors"))
    served = served.died()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"{tmp_path}/served/runs/a.train.0: the journal has no such run")
    assert "weights/one/checkpoint-1" in line
    assert sorted(tmp_path.rglob("*.safetensors")) == before
    assert "path" in served.ask("b:train:0", 2, "save_weights", {"path": "two"})


def test_a_run_of_which_the_journal_lost_the_end_does_not_go_on(tmp_path, caplog):
    """It would train on from older weights; the newest stay on the disk, and so do its checkpoints."""
    served = Served(tmp_path / "served")
    served.run("a:train:0")
    served.run("b:train:0")
    served.ask("a:train:0", 1, "save_weights", {"path": "one"})
    earlier = copied(served, tmp_path / "earlier")
    step(served, "a:train:0", 2, 1)
    served.worker.held.save("a:train:0", served.worker.held.of("a:train:0"))
    served.journal.close()
    for path in (tmp_path / "served").glob("journal*"):
        path.unlink()
    for path in earlier.glob("journal*"):
        shutil.copy(path, tmp_path / "served")
    served = Served(tmp_path / "served")
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "a:train:0 cannot go on" in line
    assert "checkpoint-3 has its weights after request 3, and the journal lost what came after request 1." in line
    with pytest.raises(DataError, match="cannot go on"):
        served.send("a:train:0", 4, "optim_step", RATE)
    served.worker.refuse(QueuedRequest("a:train:0:4", "a:train:0", 4, "optim_step"), "refused by the door, too", 400)
    served = served.died()
    assert "a:train:0" in served.store.lost
    assert (tmp_path / "served/runs/a.train.0/snapshots/checkpoint-3").is_dir()
    load = {"path": "tinker://a:train:0/weights/one", "optimizer": True}
    assert "path" in served.ask("b:train:0", 1, "load_weights", load)


def test_a_run_whose_checkpoint_is_newer_than_the_journal_does_not_go_on(tmp_path, caplog):
    """A log that was cut: no snapshot was made since, but a client's checkpoint."""
    served = Served(tmp_path)
    served.run("a:train:0")
    step(served, "a:train:0", 1, 1)
    served.ask("a:train:0", 3, "save_weights", {"path": "one"})
    served.journal._all("DELETE FROM requests WHERE seq > 1")
    served = served.died()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "weights/one has its weights after request 3, and the journal lost what came after request 1." in line
    assert "a:train:0" in served.store.lost


def test_a_run_whose_snapshot_is_missing_is_named_and_its_requests_answered(tmp_path, caplog):
    served = Served(tmp_path)
    served.run("a:train:0")
    step(served, "a:train:0", 1, 1)
    served.worker.held.save("a:train:0", served.worker.held.of("a:train:0"))
    served.send("a:train:0", 3, "save_weights", {"path": "one"})
    shutil.rmtree(tmp_path / "runs/a.train.0/snapshots")
    served = served.died()
    assert "snapshots/checkpoint-2, are missing" in caplog.text
    served.work()
    _, media, content = served.journal.find("a:train:0:3")
    assert (media, "are missing" in json.loads(content)["error"]) == (REFUSED, True)


# -- what is saved is what was trained --------------------------------------------------------------------------------

RUN, ADAPTER = "a:train:0", "adapter_model.safetensors"


def served(folder, kind, **settings):
    """A server of a model in a folder, and a run on it after two steps. kind: `lora`, or of `full` tied or not."""
    base = folder / "base"
    tiny_model("llama", tie_word_embeddings=kind == "tied").save_pretrained(base)
    found = Served(folder / "served", model=str(base), train="lora" if kind == "lora" else "full", **settings)
    shape = FACTS["shape"] | ({"unembed": False} if kind == "lora" else {"rank": 0})
    found.run(RUN, shape=shape)
    for number in range(2):
        step(found, RUN, 1 + 2 * number, number)
    return found


def one_tensor(folder, name):
    changed_weights(folder, lambda tensors: tensors[sorted(tensors)[-1]].mul_(1.5), name)


DAMAGES = {
    "an adapter": ("lora", partial(one_tensor, name=ADAPTER), r"lora_B\.\S+ differs most, by"),
    "its scale": (
        "lora",
        partial(changed_json, name="adapter_config.json", lora_alpha=64),
        "Every parameter is the same, so a setting of its configuration is another one",
    ),
    "its base": (
        "lora",
        lambda folder: changed_weights(
            folder.parents[5] / "base", lambda tensors: tensors["model.norm.weight"].mul_(1.5), "model.safetensors"
        ),
        r"model\.norm\.weight differs most",
    ),
    "a weight": ("full", partial(one_tensor, name="model.safetensors"), r"model\.norm\.weight differs most"),
    "a tied head": (
        "tied",
        partial(changed_json, name="config.json", tie_word_embeddings=False),
        "lm_head.weight is not in it",
    ),
}


def damaging(monkeypatch, damage):
    """Every save is damaged after it was written."""
    write = store.Store._write_weights

    def damaged(self, aside, shape):
        write(self, aside, shape)
        damage(aside)

    monkeypatch.setattr(store.Store, "_write_weights", damaged)


def lines_of(caplog):
    return [each for each in caplog.messages if "read back" in each]


@pytest.mark.parametrize(
    ("name", "request_kind"),
    [
        *((name, "save_weights") for name in DAMAGES),
        *(("an adapter", each) for each in ("save_weights_for_sampler", "save_weights_external")),
    ],
)
def test_damage_is_named_and_nothing_is_saved(name, request_kind, tmp_path, monkeypatch):
    kind, damage, message = DAMAGES[name]
    own = served(tmp_path, kind)
    with monkeypatch.context() as patch:
        damaging(patch, damage)
        error = own.ask(RUN, 5, request_kind, {"path": "one"})["error"]
    assert re.search(rf"tinker://a:train:0/\w+/one: .*{message}.* --verify_saves false", error), error
    assert not own.store.places(RUN)
    assert not list(own.folder.rglob("*.saving"))


@pytest.mark.parametrize("kind", ["lora", "full", "tied"])
def test_what_is_right_is_saved_between_two_calls_of_a_window(kind, tmp_path, caplog):
    """Saving and reading back changes no weight, and no gradient: the step after it is that of a run without."""
    own, plain = (served(tmp_path / each, kind, verify_saves=each == "own") for each in ("own", "plain"))
    with caplog.at_level(logging.INFO, "treewise"):
        for each in (own, plain):
            each.ask(RUN, 5, "forward_backward", call(5))
            assert "error" not in each.ask(RUN, 6, "save_weights", {"path": "one"})
            step(each, RUN, 7, 6)
    assert same(own.values(RUN), plain.values(RUN))
    [line] = lines_of(caplog)
    by = "transformers and PEFT" if kind == "lora" else "transformers"
    assert line.startswith(f"tinker://a:train:0/weights/one: read back by {by}, log-probs of 126 tokens differ by")


def test_of_samplers_the_first_of_each_shape_is_read_back(tmp_path, caplog):
    """They are saved at each step, and a large model is not read at each."""
    own = served(tmp_path, "lora")
    own.run("b:train:0", shape=FACTS["shape"] | {"rank": 3, "unembed": False})
    with caplog.at_level(logging.INFO, "treewise"):
        for name, first in ((RUN, 5), ("b:train:0", 1)):
            for seq in (first, first + 1):
                asked = {"path": f"at-{seq}"}
                assert "error" not in own.ask(name, seq, "save_weights_for_sampler", asked)
    assert [each.partition(": read")[0].rpartition("/")[2] for each in lines_of(caplog)] == ["at-5", "at-1"]


@pytest.mark.parametrize("way", ["adapter", "reload"])
def test_a_server_reads_it_too_and_has_again_what_it_had(way, tmp_path, caplog):
    """A merged save as well. One that computes something else with it is an error that names the server."""
    settings = {"base_url": "http://127.0.0.1:1", "weights": way}
    with running(StandIn()) as server:
        settings["base_url"] = server.url
        own = served(tmp_path, "lora", sampler="vllm", sampler_settings=settings)
        server.first = server.model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        with own.model.using(own.worker.held.of(RUN).weights):
            own.model.sampler_of(own.worker.held.of(RUN).weights)
        held = own.model._sampler._held
        for seq in (5, 6):
            step(own, RUN, 2 * seq - 5, seq)
        before = {name: each.clone() for name, each in server.model.state_dict().items()}, dict(server.adapters)
        with caplog.at_level(logging.INFO, "treewise"):
            assert "error" not in own.ask(RUN, 9, "save_weights", {"path": "one"})
        assert re.search(rf"; by the server at {server.url}, by \S+e-0[678] at most", lines_of(caplog)[-1])
        assert own.model._sampler._held == held
        assert all(torch.equal(each, before[0][name]) for name, each in server.model.state_dict().items())
        assert server.adapters == before[1]

        def otherwise(answer):
            for each in answer["choices"][0].get("prompt_logprobs", [None])[1:]:
                for found in each.values():
                    found["logprob"] -= 1e-3
            return answer

        server.edit = otherwise
        error = own.ask(RUN, 10, "save_weights", {"path": "two"})["error"]
        assert f"as the server at {server.url} reads it, log-probs differ by 1.0e-03 at most" in error
        server.edit, server.missing = (lambda answer: answer), {"/collective_rpc", "/v1/load_lora_adapter"}
        with caplog.at_level(logging.INFO, "treewise"):
            assert "error" not in own.ask(RUN, 11, "save_weights", {"path": "three"})
        assert f"; not by the server at {server.url}, because" in lines_of(caplog)[-1]
        own.model.close()


def test_a_server_may_compute_in_a_finer_dtype_than_the_model(tmp_path, caplog):
    """The stand-in says float32, as a vLLM may that serves weights in bfloat16."""
    tiny_model("llama", tie_word_embeddings=True, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    with running(StandIn(model=AutoModelForCausalLM.from_pretrained(tmp_path / "base"))) as server:
        more = {"sampler": "vllm", "sampler_settings": {"base_url": server.url}}
        own = Served(tmp_path / "served", model=str(tmp_path / "base"), train="full", dtype="bfloat16", **more)
        own.run(RUN, shape=FACTS["shape"] | {"rank": 0})
        for number in range(2):
            step(own, RUN, 1 + 2 * number, number)
        with caplog.at_level(logging.INFO, "treewise"):
            assert "error" not in own.ask(RUN, 5, "save_weights", {"path": "one"})
        assert "; by the server at" in lines_of(caplog)[-1]
        own.model.close()


def test_an_adapter_that_cannot_be_merged_is_saved_and_said_to_be_unread(tmp_path, caplog):
    """On a head that shares its weights with the embedding."""
    with running(StandIn()) as server:
        tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
        more = {"sampler": "vllm", "sampler_settings": {"base_url": server.url, "weights": "reload"}}
        own = Served(tmp_path / "served", model=str(tmp_path / "base"), **more)
        own.run(RUN)
        step(own, RUN, 1, 0)
        with caplog.at_level(logging.INFO, "treewise"):
            assert "error" not in own.ask(RUN, 3, "save_weights", {"path": "one"})
        assert "cannot be merged" in lines_of(caplog)[-1]
        own.model.close()
