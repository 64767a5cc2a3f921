"""Records the shapes of trees (no token, no text): what the benchmarks of placements and plans read.

python benchmarks/tree_shapes.py DATA.jsonl.gz ... --tokenizer FOLDER
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import DATA

from treewise.data import RenderOptions, load_trees
from treewise.errors import DataError
from treewise.tree.declared import chain_nodes
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import Segments

SHAPES = DATA / "tree_shapes.json.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokenizer", required=True)
    args = parser.parse_args()
    shapes = [shape for file in args.files for shape in shapes_of(file, args.tokenizer)]
    # A fixed time stamp, so that equal shapes are equal files.
    SHAPES.write_bytes(gzip.compress(json.dumps(shapes).encode(), 9, mtime=0))
    print(f"{len(shapes)} shapes written to {SHAPES}")


def shapes_of(file: Path, tokenizer: str) -> list[dict[str, Any]]:
    """Segments of every tree of a file: whole conversations, or logged calls where that is what it holds."""
    try:
        trees = load_trees(file, tokenizer, options=RenderOptions(thinking="keep", chat_template="chatml"))
    except DataError:
        trees = load_trees(file, tokenizer, options=RenderOptions(chat_template="chatml"))
    shapes = []
    for tree in trees:
        segments = tree.forest().segments
        length = np.diff(segments.start, append=segments.num_tokens)
        shapes.append(
            {
                "source": file.name.split(".")[0],
                "parent": segments.parent.tolist(),
                "length": length.tolist(),
                "ends": segments.end_segment.tolist(),
            }
        )
    return shapes


def recorded() -> list[tuple[str, Forest]]:
    """Source and forest of every recorded shape. All tokens are 0, and there are no trajectories with streams."""
    shapes = json.loads(gzip.decompress(SHAPES.read_bytes()))
    return [(shape["source"], forest_of(_segments(shape))) for shape in shapes]


def forest_of(segments: Segments) -> Forest:
    """A forest that has a shape and nothing else."""
    return Forest(segments, np.zeros(segments.num_tokens, dtype=np.int32), None, {})


def _segments(shape: dict[str, Any]) -> Segments:
    length = np.array(shape["length"])
    return chain_nodes(np.array(shape["parent"]), length, np.array(shape["ends"]), np.cumsum(length) - length)


if __name__ == "__main__":
    main()
