"""Token rows with images: where each stands, and what is wrong with bad ones."""

import base64
import io
import json
import os
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.damage import damages
from tests.image_models import IMAGE_TOKEN, png, tiny_processor
from treewise.data import load_trees
from treewise.data.images import decoded, reading
from treewise.errors import ConfigError, DataError

FOUR = [IMAGE_TOKEN] * 4  # what LLaVA's processor makes of any picture


@pytest.fixture(scope="module")
def llava():
    return tiny_processor("llava")


def row(*images, ids=(5, *FOUR, 6, 7), **more):
    return {"token_ids": list(ids), "images": list(images), **more}


def test_an_image_of_the_cache_that_was_damaged_is_written_again(tmp_path, llava, caplog):
    def load():
        [item] = load_trees([row({"bytes": png(1)})], llava, cache_dir=tmp_path, num_workers=0)[0].trajectories
        return item

    load()
    [kept] = (tmp_path / "images").iterdir()
    for _ in damages(kept, num_flips=20, num_cuts=3):
        if kept.is_dir():
            with pytest.raises(DataError, match=r"cannot be written .Is a directory.; name another cache_dir"):
                load()
            continue
        caplog.clear()
        assert load().images[0].read() == png(1)
        assert caplog.messages == [f"{kept}: damaged: the image is written again"]
        load()
        assert len(caplog.messages) == 1


def test_paths_bytes_and_addresses_of_data_are_one_image(tmp_path, write, llava):
    (tmp_path / "shot.png").write_bytes(png(1))
    text = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    records = [row(each, group="g") for each in ("shot.png", {"path": "shot.png"}, text, {"url": text})]
    records.append(row("shot.png", "shot.png", ids=(5, *FOUR, *FOUR, 6), group="g"))
    (tree,) = load_trees(write(*records), llava)
    spans = [item.images for item in tree.trajectories]
    assert [(each.start, each.end) for each in spans[4]] == [(1, 5), (5, 9)]
    assert {each.digest for images in spans for each in images} == {spans[0][0].digest}
    assert all(each.read() == png(1) for images in spans for each in images)
    assert all(isinstance(each.source, str) for images in spans for each in images)  # files, read when needed
    assert tree.forest().num_tokens == 7 + 5


def test_columns_of_parquet_and_lists_of_pil(tmp_path, llava):
    records = [row({"bytes": png(seed), "path": None}) for seed in (1, 2)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    trees = load_trees(tmp_path / "rows.parquet", llava, num_workers=0)
    assert [tree.trajectories[0].images[0].read() for tree in trees] == [png(1), png(2)]
    (tree,) = load_trees([row(decoded(png(1), "test"))], llava)
    pixels = np.asarray(decoded(tree.trajectories[0].images[0].read(), "test"))
    assert np.array_equal(pixels, np.asarray(decoded(png(1), "test")))


def test_images_count_in_fingerprints_and_prompt_groups(write, tmp_path, llava):
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(png(seed))
    names = ["1.png", "2.png"]
    both = [load_trees(write(row(name, loss_weights=[0] * 6 + [1])), llava, read_only=True) for name in names]
    assert both[0].fingerprint != both[1].fingerprint
    assert len(load_trees(write(*(row(name, loss_weights=[0] * 6 + [1]) for name in names)), llava)) == 2


def test_a_processor_with_rows_of_tiles(tmp_path, llava):
    """Idefics3 writes other tokens between the tiles of one image."""
    processor = tiny_processor("idefics3")
    ids = [5, *processor(text=["<image>"], images=[decoded(png(1), "t")])["input_ids"][0], 6]
    (tree,) = load_trees([row({"bytes": png(1)}, ids=ids)], processor)
    (span,) = tree.trajectories[0].images
    assert (ids[span.start], ids[span.end - 1]) == (IMAGE_TOKEN, IMAGE_TOKEN)
    assert IMAGE_TOKEN not in ids[: span.start] + ids[span.end :]
    assert (tree.trajectories[0].loss_weights[span.start : span.end] == 0).all()


def bomb() -> bytes:
    """The head of a PNG of 30,000 x 30,000 pixels."""
    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    chunks = [b"IHDR" + head, b"IDAT"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks
    )


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (["none.png"], r"images\[0\]: .*none.png cannot be read \(No such file"),
        (["~nobody-here/a.png"], r"images\[0\]: .*~nobody-here/a.png cannot be read \(No such file"),
        ([{"bytes": png(1)[:-40]}], r"images\[0\]: the image cannot be decoded"),
        ([{"bytes": b"%PDF-1.4"}], "8 bytes that are not an image of a known type"),
        ([{"bytes": bomb()}], "more than 100,000,000"),
        (["https://example.com/a.png"], "is a network address, which is not read"),
        (["data:image/png;base64,%%%"], "a data address that cannot be read"),
        ([7], "an image is a path, bytes"),
        ([], r"4 image tokens \(60\) for 0 images"),
        ([{"bytes": png(1)}] * 2, r"images\[1\]: the image has 4 tokens, but 0 image tokens \(60\) are left"),
    ],
)
def test_bad_images_are_errors_with_their_record(write, llava, images, message):
    if not any(isinstance(each, dict) for each in images):  # bytes are no JSON
        with pytest.raises(DataError, match=f"data.jsonl:1: .*{message}"):
            load_trees(write(row(*images)), llava)
    with pytest.raises(DataError, match=f"records:0: .*{message}"):
        load_trees([row(*images)], llava)


def test_images_are_regular_files_of_a_limited_size(write, llava, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "large.png").write_bytes(png(1))
    encoded = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    for image, message in (
        ("pipe.png", r"pipe.png is not a regular file\.$"),
        ("/dev/zero", "/dev/zero leads to /dev/zero, which holds no data; not read"),
        ("large.png", f"large.png: an image of {len(png(1)):,} bytes is larger than 20 .max_image_bytes"),
        (encoded, f"an image of {len(png(1)):,} bytes is larger than 20"),
    ):
        with pytest.raises(DataError, match=f"data.jsonl:1: .*{message}") as error:
            load_trees(write(row(image)), llava, options={"max_image_bytes": 20})
        assert str(error.value).count("data.jsonl:1") == 1


def test_what_an_image_is_refused_for_is_said_once(monkeypatch):
    """A DataError is a ValueError, which stood once more within "the image cannot be decoded (...)"."""
    frames = io.BytesIO()
    Image.new("RGB", (4, 4)).save(frames, "GIF", save_all=True, append_images=[Image.new("RGB", (4, 4), "red")])
    with pytest.raises(DataError, match=r"^here: an animation of 2 frames; videos are not supported\.$"):
        decoded(frames.getvalue(), "here")
    monkeypatch.setattr(reading, "MAX_PIXELS", 8)
    with pytest.raises(DataError, match=r"^here: 4 x 4 pixels are more than 8; shrink the image\.$"):
        decoded(frames.getvalue(), "here")


def test_images_lie_below_the_folder_of_the_data(write, llava, tmp_path):
    (tmp_path / "data" / "shots").mkdir(parents=True)
    outside, inside = tmp_path / "outside.png", tmp_path / "data" / "shots" / "1.png"
    for path in (outside, inside):
        path.write_bytes(png(1))
    (tmp_path / "data" / "link.png").symlink_to(outside)
    (tmp_path / "data" / "good.png").symlink_to(inside)
    for image in ("../outside.png", str(outside), f"file://{outside}", "link.png", "shots/../../outside.png"):
        path = write(row(image), name="data/data.jsonl")
        with pytest.raises(DataError, match=r"data.jsonl:1: .*outside of the data's folder .*image_folder"):
            load_trees(path, llava)
        for folder in (str(tmp_path), "/"):
            (tree,) = load_trees(path, llava, options={"image_folder": folder})
            assert tree.trajectories[0].images[0].read() == png(1)
    for image in ("shots/1.png", str(inside), "good.png"):
        (tree,) = load_trees(write(row(image), name="data/data.jsonl"), llava)
        assert tree.trajectories[0].images[0].read() == png(1)


def test_a_linked_data_file_finds_the_images_beside_both_its_names(write, llava, tmp_path):
    """The Hub's cache keeps a snapshot's files as links to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(png(1))
    (tmp_path / "snapshot" / "1.png").symlink_to(tmp_path / "blobs" / "1")
    (tmp_path / "snapshot" / "2.png").write_bytes(png(2))
    write(row("1.png"), row("2.png"), name="blobs/data")
    (tmp_path / "snapshot" / "data.jsonl").symlink_to(tmp_path / "blobs" / "data")
    trees = load_trees(tmp_path / "snapshot" / "data.jsonl", llava)
    assert [tree.trajectories[0].images[0].read() for tree in trees] == [png(1), png(2)]


@pytest.mark.parametrize("path", ["/proc/self/environ", "/sys/kernel/notes", "/dev/zero", "/dev/../proc/version"])
def test_files_of_the_system_are_never_read(path, write, llava):
    for data, options in ((write(row(path)), {"image_folder": "/"}), ([row(path)], {})):
        with pytest.raises(DataError, match="which holds no data; not read"):
            load_trees(data, llava, options=options)


def test_a_saved_data_set_names_images_of_its_folder_alone(llava, tmp_path):
    import datasets

    datasets.disable_progress_bars()
    (tmp_path / "outside.png").write_bytes(png(1))
    for image in ("outside.png", "saved/1.png"):
        rows = datasets.Dataset.from_list([row(str(tmp_path / image))])
        rows.save_to_disk(str(tmp_path / "saved"))
        (tmp_path / "saved" / "1.png").write_bytes(png(1))
        if image == "outside.png":
            with pytest.raises(DataError, match="outside of the data's folder"):
                load_trees(str(tmp_path / "saved"), llava)
        else:
            (tree,) = load_trees(str(tmp_path / "saved"), llava)
            assert tree.trajectories[0].images[0].read() == png(1)
        (tree,) = load_trees(rows, llava) if image == "outside.png" else (tree,)  # the caller's own object


def test_declared_nodes_hold_images_among_their_tokens(llava):
    nodes = [
        {"id": 0, "token_ids": [5, *FOUR, 6], "images": [{"bytes": png(1)}]},
        {"id": 1, "parent": 0, "token_ids": [7, 8]},
        {"id": 2, "parent": 0, "token_ids": [7, *FOUR, 9], "images": [{"bytes": png(2)}]},
        {"id": 3, "parent": 0, "token_ids": [7, *FOUR, 9], "images": [{"bytes": png(3)}]},
    ]
    forest = load_trees([{"nodes": nodes}], llava)[0].forest()
    assert [each.read() for each in forest.images.sources] == [png(1), png(2), png(3)]
    first, second = ({"bytes": png(seed)} for seed in (1, 2))
    rows = [row(first, ids=[5, *FOUR, 6, 7, 8]), row(first, second, ids=[5, *FOUR, 6, 7, *FOUR, 9])]
    for found, record in zip(forest.trajectories, rows, strict=False):
        (flat,) = load_trees([record], llava)[0].trajectories
        assert found.token_ids.tolist() == flat.token_ids.tolist()
        assert found.loss_weights.tolist() == flat.loss_weights.tolist()
        assert [(each.start, each.end, each.digest) for each in found.images] == [
            (each.start, each.end, each.digest) for each in flat.images
        ]
    with pytest.raises(DataError, match=r"nodes\[1\]: 4 image tokens"):
        load_trees([{"nodes": [nodes[0], {"id": 1, "parent": 0, "token_ids": FOUR, "images": []}]}], llava)


def test_images_need_a_processor_and_other_records_refuse_them(write, llava):
    with pytest.raises(DataError, match=r"data.jsonl:1: the record holds images, which need the model's processor"):
        load_trees(write(row("shot.png")))
    with pytest.raises(DataError, match="images must be a list"):
        load_trees(write({"token_ids": [5, 6], "images": "shot.png"}), llava)
    with pytest.raises(ConfigError, match="defines no image token"):
        load_trees([row({"bytes": png(1)})], _NoToken())


class _NoToken:
    image_processor = tokenizer = None


def test_rows_keep_their_images_in_the_table(write, tmp_path, llava):
    (tmp_path / "a.png").write_bytes(png(1))
    path = write(row("a.png"), {"token_ids": [5, 6]})
    first, second = load_trees(path, llava), load_trees(path, llava)
    assert first.fingerprint == second.fingerprint
    assert [len(tree.trajectories[0].images) for tree in second] == [1, 0]
    assert json.loads(first._table.column("images")[0].as_py())[0][:2] == [1, 5]
