"""A manifest notices any change of the files that it lists and of itself; what it does not list is not read."""

import json

import pytest

from treewise.errors import CheckpointError
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
