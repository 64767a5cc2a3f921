"""Headers that claim what a file does not hold, indices that lead elsewhere, and a bit that flipped."""

import json
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file

from treewise.base.own_files import sealed
from treewise.base.weight_files import (
    CHECKSUMS,
    INDEX,
    MANIFEST,
    check_saved,
    header_of,
    identity,
    shapes_of,
    shard_names,
    write_checksums,
)
from treewise.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    for name in ("model.safetensors", "more/adapter_model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(())}, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_shapes_are_read_from_the_header(folder):
    assert shapes_of(folder / "model.safetensors") == {"a": (2, 3), "b": ()}


@pytest.mark.parametrize("size", [10**3, 10**10, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_an_error(size, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    for read in (header_of, shapes_of):
        with pytest.raises(ConfigError, match=rf"model\.safetensors: not a whole .*claims a header of {size:,} bytes"):
            read(file)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": {}}', b'{"a": {"shape": [-1]}}', b'{"a": {"shape": [true]}}', b"[" * 100_000, b"\xff"],
)
def test_a_header_of_something_else_is_an_error(header, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a whole safetensors file \(its header: "):
        shapes_of(file)


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "a\\b", 3, None])
def test_an_index_leads_to_files_of_its_folder_alone(name, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: (names .* no file of its folder|damaged)"):
        shard_names(tmp_path)


def test_the_files_of_an_index(tmp_path):
    assert shard_names(tmp_path) == []
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}))
    assert shard_names(tmp_path) == ["1.safetensors", "2.safetensors"]
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ConfigError, match=r"damaged .* save the model again"):
        shard_names(tmp_path)


@pytest.mark.parametrize("listing", [CHECKSUMS, MANIFEST])
def test_a_flipped_bit_is_found(folder, listing):
    check_saved(folder)  # nothing says what was saved
    files = ["model.safetensors", "more/adapter_model.safetensors"]
    if listing == CHECKSUMS:
        write_checksums(folder)
    else:
        listed = {name: identity(folder / name) for name in [*files, "config.json"]}
        (folder / MANIFEST).write_text(sealed({"format": 3, "files": listed}, indent=1))
    check_saved(folder)
    (folder / "config.json").write_text("{ }")  # the user's own
    check_saved(folder)
    for name in files:
        content = (folder / name).read_bytes()
        for at in (9, len(content) // 2, len(content) - 1):
            (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(ConfigError, match=rf"{name}: not what was saved \(damaged or changed\); .* {listing}"):
                check_saved(folder)
        (folder / name).write_bytes(content[:-1])
        with pytest.raises(ConfigError, match="not what was saved"):
            check_saved(folder)
        (folder / name).unlink()
        with pytest.raises(ConfigError, match=rf"{name}: missing, and {listing} lists it"):
            check_saved(folder)
        (folder / name).write_bytes(content)
    text = (folder / listing).read_text()
    (folder / listing).write_text(text.replace('"sha256": "', '"sha256": "0', 1))
    with pytest.raises(ConfigError, match=rf"{listing}: damaged \(its checksum differs\)"):
        check_saved(folder)
