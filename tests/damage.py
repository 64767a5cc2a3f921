"""What may happen to a file between two runs: bits flip, its end is lost, it is empty, another thing has its name. And
while it is written: the disk is full.
"""

import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NUM_FLIPS, NUM_CUTS = 60, 10
OTHERS = (b"", b"null", b"[]", b'"text"', b"3", b"{}", b"[[[", b"\xff\xfe\x00", b"[" * 5000)


@contextmanager
def no_room(num_bytes: int) -> Iterator[None]:
    """No file of this process gets longer than so many bytes: what is written beyond them fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def damages(path: Path, seed: int = 0, num_flips: int = NUM_FLIPS, num_cuts: int = NUM_CUTS) -> Iterator[str]:
    """Damages a file in one way after another, and says how; in the end it is as it was."""
    sound, draw = path.read_bytes(), random.Random(seed)
    try:
        for _ in range(num_flips):
            bit = draw.randrange(8 * len(sound))
            changed = bytearray(sound)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            yield f"bit {bit % 8} of byte {bit // 8} ({sound[max(0, bit // 8 - 20) : bit // 8 + 20]!r})"
        for _ in range(num_cuts):
            end = draw.randrange(len(sound))
            path.write_bytes(sound[:end])
            yield f"cut at {end} of {len(sound)}"
        for other in OTHERS:
            path.write_bytes(other)
            yield f"holds {other[:10]!r}"
        path.unlink()
        path.mkdir()
        yield "a folder"
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sound)


def retyped(value: object) -> Iterator[object]:
    """JSON values with one part replaced by a value of another type."""
    for other in (None, 3, "text", [], {}):
        if type(other) is not type(value):
            yield other
    if isinstance(value, dict):
        for key, item in value.items():
            yield {name: each for name, each in value.items() if name != key}
            for changed in retyped(item):
                yield {**value, key: changed}
    elif isinstance(value, list) and value:
        for changed in retyped(value[0]):
            yield [changed, *value[1:]]


def retypings(path: Path, limit: int = 200, seed: int = 0) -> Iterator[str]:
    """Replaces parts of a JSON file by values of other types; in the end it is as it was."""
    sound = path.read_text(encoding="utf-8")
    found = list(retyped(json.loads(sound)))
    random.Random(seed).shuffle(found)
    try:
        for value in found[:limit]:
            path.write_text(json.dumps(value), encoding="utf-8")
            yield json.dumps(value)[:200]
    finally:
        path.write_text(sound, encoding="utf-8")
