"""Peak memory of loading records with images and of reading their trees: must not grow with the number of images.

    python benchmarks/bench_image_memory.py --records 1000 10000

Each record is a row of token ids with a screenshot of its own (320 x 200 pixels, 192 kB decoded, a PNG file on disk).
Every count runs in a process of its own: data is loaded, then each tree is built and its image decoded once, as a step
does. Prints a JSON line for each: peak and growth of the resident memory in MiB over that of the imports, and seconds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from screenshots import random_png

from treewise.bench.measure import peak_bytes

WIDTH, HEIGHT, IMAGE_TOKEN, DISTINCT = 320, 200, 60, 10
MIB = 2**20


class Processor:
    """Four placeholders for every image."""

    image_token_id = IMAGE_TOKEN
    image_processor = None

    class tokenizer:
        chat_template, added_tokens_decoder, special_tokens_map = "", {}, {}
        decode = staticmethod(lambda ids: "<image>")
        get_vocab = staticmethod(lambda: {"<image>": IMAGE_TOKEN})

    def __call__(self, **_):
        return {"input_ids": [[IMAGE_TOKEN] * 4]}


def write(folder: Path, num_records: int) -> Path:
    """Records of distinct images: the bytes of a few pictures, each made another file by bytes behind its end."""
    rng = np.random.default_rng(0)
    pictures = [random_png(rng, WIDTH, HEIGHT) for _ in range(DISTINCT)]
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as stream:
        for index in range(num_records):
            name = f"{index}.png"
            (folder / name).write_bytes(pictures[index % DISTINCT] + index.to_bytes(4, "big"))
            row = {"token_ids": [5, *[IMAGE_TOKEN] * 4, 6, 7], "images": [name], "group": f"g{index}"}
            stream.write(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


def measure(path: Path) -> dict[str, float]:
    from treewise.data import load_trees
    from treewise.nn.vision import opened

    before, started = _resident(), time.perf_counter()
    trees = load_trees(path, Processor(), num_workers=0, read_only=True)
    loaded = _resident()
    for tree in trees:
        for image in tree.forest().images.sources:
            opened(image)
    return {
        "records": len(trees),
        "before_mib": before / MIB,
        "loaded_mib": (loaded - before) / MIB,
        "read_mib": (_resident() - before) / MIB,
        "seconds": time.perf_counter() - started,
    }


def _resident() -> int:
    """Peak of the resident memory of this process so far."""
    import torch

    peak = peak_bytes(torch.device("cpu"))
    assert peak is not None
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure)))
        return
    for count in args.records:
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder), count)
            subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()
