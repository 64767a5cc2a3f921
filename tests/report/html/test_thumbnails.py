"""Thumbnails of a page: small, each once, bounded together, and absent where an image cannot be read any more."""

import base64
import io

import pytest
from PIL import Image

from treewise.report.html import thumbnails
from treewise.report.html.thumbnails import ABSENT, Thumbnails
from treewise.testing.images import png
from treewise.tree.images import ImageSpan


def test_each_image_has_one_small_copy():
    page = Thumbnails()
    spans = [ImageSpan(png(seed, 600, 300), 0, 4) for seed in (1, 2, 1)]
    assert [page.index(each) for each in spans] == [0, 1, 0]
    head, _, data = page.addresses[0].partition(",")
    small = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (head, small.format, small.size) == ("data:image/jpeg;base64", "JPEG", (240, 120))


def test_what_has_no_room_or_cannot_be_read_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path):
    page, path = Thumbnails(), tmp_path / "a.png"
    path.write_bytes(png(3))
    gone = ImageSpan(path, 0, 4)
    path.unlink()
    assert page.index(gone) == ABSENT
    assert page.index(ImageSpan(png(1), 0, 4)) == 0
    monkeypatch.setattr(thumbnails, "MAX_CHARS", page.num_chars)
    assert page.index(ImageSpan(png(2), 0, 4)) == ABSENT
    assert len(page.addresses) == 1
