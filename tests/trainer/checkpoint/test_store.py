"""A manifest notices any change of the files that it lists and of itself; what it does not list is not read."""

import errno
import json
import os

import pytest

from treewise.errors import CheckpointError, ConfigError
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.store import MANIFEST, is_verified, listed_files, read_manifest


@pytest.fixture
def checkpoint(tmp_path):
    folder = store.new_folder(tmp_path, 7)
    (folder / "config.json").write_text("{}")
    (folder / "weights").mkdir()
    (folder / "weights" / "a.json").write_text("[1]")
    return store.publish(folder, {"step": 7, "max_tokens": None, "costs": [1.5, 1e-300], "seed": 3})


def test_a_manifest_comes_back_as_it_was_written(checkpoint):
    manifest = read_manifest(checkpoint)
    assert (manifest["step"], manifest["costs"]) == (7, [1.5, 1e-300])
    assert list(manifest["files"]) == ["config.json", "weights/a.json"]


def test_every_flipped_bit_of_a_manifest_is_an_error(checkpoint):
    path = checkpoint / MANIFEST
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 5):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read_manifest(checkpoint)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'{"format": 3}', b"[" * 100_000, b"\xff\x00", b'{"format": 2}']
)
def test_what_is_no_manifest_is_an_error(checkpoint, content):
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_manifest(checkpoint)


def test_a_folder_of_something_else_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a checkpoint \(no treewise.json\); name a folder checkpoint-N"):
        read_manifest(tmp_path)


def test_files_that_a_manifest_does_not_list_are_not_read(checkpoint):
    (checkpoint / "model_zero.safetensors").write_bytes(b"zeros")
    (checkpoint / "weights" / "b.json").write_text("[2]")
    read_manifest(checkpoint)
    with listed_files(checkpoint) as folder:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
        assert names == ["config.json", "weights/a.json"]
        assert json.loads((folder / "weights" / "a.json").read_text()) == [1]
    assert not folder.exists()


def test_a_checkpoint_that_changed_after_it_was_verified_is_verified_again(checkpoint):
    assert is_verified(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    assert not is_verified(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    assert is_verified(checkpoint)
    (checkpoint / MANIFEST).unlink()
    assert not is_verified(checkpoint)


def test_damaged_checkpoints_do_not_count_when_old_ones_are_removed(tmp_path):
    def save(step):
        folder = store.new_folder(tmp_path, step)
        (folder / "a.json").write_text("{}")
        store.publish(folder, {"step": step})
        store.prune(tmp_path, 2, None)
        return [store.step_of(path) for path in store.checkpoints(tmp_path)]

    assert (save(1), save(2)) == ([1], [1, 2])
    (tmp_path / "checkpoint-2" / "a.json").write_text("[]")
    assert save(3) == [1, 2, 3]
    assert save(4) == [3, 4]


# -- what stands in the way -------------------------------------------------------------------------------------------


def placed(path, kind, elsewhere):
    """Puts a file, a folder or a link of some kind into a place."""
    if kind == "file":
        path.write_text("x")
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    else:
        targets = {"link": elsewhere, "link to nothing": elsewhere / "nothing", "link to itself": path}
        path.symlink_to(targets[kind])


@pytest.fixture
def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "kept").write_text("x")
    yield folder
    assert (folder / "kept").read_text() == "x"


LINKS = ("link", "link to nothing", "link to itself")


@pytest.mark.parametrize("kind", ["file", *LINKS])
@pytest.mark.parametrize("name", ["checkpoint-7", ".checkpoint-7.saving", ".checkpoint-7.replaced", ".model.saving"])
def test_what_stands_in_place_of_a_folder_is_named_before_a_run_and_survived_within(name, kind, tmp_path, elsewhere):
    run = tmp_path / "run"
    run.mkdir()
    placed(run / name, kind, elsewhere)
    if (name, kind) == ("checkpoint-7", "link"):  # to another disk, say
        store.check_places(run)
    else:
        with pytest.raises(ConfigError, match=rf"run/{name} is a (link|file), and a run writes"):
            store.check_places(run)
    folder = store.new_folder(run, 7)
    (folder / "config.json").write_text("{}")
    checkpoint = store.publish(folder, {})
    read_manifest(checkpoint)
    store.recover(run)
    with store.moved_into(run, 1, "last") as aside:
        (aside / "model.json").write_text("{}")
    assert {path.name for path in run.iterdir()} == {"checkpoint-7", "model.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "log.jsonl", "resolved_config.yaml"])
def test_a_folder_in_place_of_a_file_is_named(name, tmp_path, elsewhere):
    run = tmp_path / "run"
    placed(run / name, "folder", elsewhere)
    with pytest.raises(ConfigError, match=rf"run/{name} is a folder, and a run writes a file of this name"):
        store.check_places(run)
    (run / "a.json").mkdir()
    with (
        pytest.raises(CheckpointError, match=r"run: the model could not be saved: .*run/a\.json stands in its way"),
        store.moved_into(run, 1, "last") as aside,
    ):
        (aside / "a.json").write_text("{}")
    store.check_places(tmp_path / "absent")


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", ["trainer_state.json", "log.jsonl"])
def test_the_state_and_log_of_a_run_are_written_through_no_link(name, kind, tmp_path, elsewhere):
    placed(tmp_path / name, kind, elsewhere)
    with pytest.raises(ConfigError, match=rf"{name} is a link, and a run writes into its own folder alone"):
        store.check_places(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_place_of_a_file_is_named(tmp_path):
    """Who opens it would wait for a reader, for ever."""
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(ConfigError, match=r"log\.jsonl is no plain file, and a run writes a file of this name"):
        store.check_places(tmp_path)


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_in_a_checkpoint_is_no_file_of_it(kind, checkpoint, elsewhere):
    (checkpoint / "config.json").unlink()
    placed(checkpoint / "config.json", kind, elsewhere)
    with pytest.raises(CheckpointError, match=r"names 'config\.json', which is not a file of the checkpoint"):
        read_manifest(checkpoint)


def test_only_a_full_disk_needs_room(tmp_path):
    for number, is_full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EISDIR, False), (errno.EIO, False)):
        with pytest.raises(CheckpointError) as caught, store.moved_into(tmp_path, 1, "last"):
            raise OSError(number, os.strerror(number))
        assert store.is_for_room(caught.value) == is_full
