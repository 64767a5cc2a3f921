"""Checkpoints: of all weights, of samplers that are kept or replaced, and of those whose time is over."""

import json
import shutil

import pytest
import torch

from tests.serve.servers import FACTS, RATE, Served, call, same
from treewise.errors import DataError
from treewise.serve.journal import REFUSED, QueuedRequest
from treewise.serve.store import CheckpointName, NoCheckpointError

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
