"""What data sets and trees of the largest sizes cost the host: a data set beyond memory, long contexts, wide trees.

    python benchmarks/bench_scale.py [--flat_tokens 1000000000] [--folder FOLDER]

Data set: token rows in Parquet shards of 16 million flat tokens, in trees of 16 trajectories of about 8,192 tokens that
share 4,096; loaded by `load_trees` in a process of its own, then trained for `--steps` steps of one tree on a tiny
model. Anonymous memory (what the system cannot give back by writing or dropping pages) and all resident pages are
sampled 20 times a second from /proc, so Linux only. Disk beyond the data: one Arrow file in the cache's folder.

Trees: seconds to merge trajectories, to plan, and to lay out all micro-batches, of one tree: NumPy alone, no model.
bench_balance.py has the seconds of placing 10,000 trees on 1,024 ranks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import save

from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VOCABULARY = 4096
TRAJECTORIES, SHARED, OWN = 16, 4096, 4096  # of each tree
SHARD_TREES = 128


def write_shards(folder: Path, flat_tokens: int) -> int:
    """Token rows of at least so many flat tokens; returns their number."""
    rng = np.random.default_rng(0)
    num_trees = -(-flat_tokens // (TRAJECTORIES * (SHARED + OWN)))
    for first in range(0, num_trees, SHARD_TREES):
        trees = range(first, min(first + SHARD_TREES, num_trees))
        ids, groups = [], []
        for tree in trees:
            shared = rng.integers(0, VOCABULARY, SHARED, dtype=np.int32)
            own = rng.integers(0, VOCABULARY, (TRAJECTORIES, OWN), dtype=np.int32)
            ids.append(np.concatenate([np.broadcast_to(shared, (TRAJECTORIES, SHARED)), own], 1))
            groups += [f"tree {tree}"] * TRAJECTORIES
        values = np.concatenate(ids)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), SHARED + OWN)
        table = pa.table({"token_ids": column.cast(pa.list_(pa.int32())), "group": groups})
        pq.write_table(table, folder / f"{first:08d}.parquet", compression="zstd")
    return num_trees * TRAJECTORIES * (SHARED + OWN)


# -- a data set in a process of its own -------------------------------------------------------------------------------


class Memory:
    """The largest resident sizes of this process, in bytes: anonymous pages, and all."""

    def __init__(self) -> None:
        self.anonymous = self.resident = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
            sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "VmRSS:")}
            self.anonymous = max(self.anonymous, sizes["RssAnon:"])
            self.resident = max(self.resident, sizes["VmRSS:"])
            time.sleep(0.05)

    def facts(self, when: str) -> dict[str, float]:
        """The largest sizes so far, in GiB."""
        return {
            f"anonymous_gib_{when}": round(self.anonymous / 2**30, 2),
            f"resident_gib_{when}": round(self.resident / 2**30, 2),
        }


def child(folder: Path, steps: int) -> None:
    """Loads and trains; prints what it cost as JSON."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import treewise as tw
    from treewise.data import load_trees

    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=SHARED + OWN,
    )
    model = AutoModelForCausalLM.from_config(config)
    memory = Memory()
    time.sleep(0.2)
    facts: dict[str, float] = memory.facts("imports")
    began = time.perf_counter()
    trees = load_trees(str(folder / "data"), cache_dir=folder / "cache")
    facts |= {"seconds_loading": round(time.perf_counter() - began, 1), **memory.facts("loading")}
    facts["trees"] = len(trees)
    began = time.perf_counter()
    arguments = tw.TreeTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=1,
        max_tokens=8192,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    tw.TreeTrainer(model, arguments, train_dataset=trees).train()
    facts |= {"seconds_training": round(time.perf_counter() - began, 1), **memory.facts("training")}
    print(json.dumps(facts))


def data_set(flat_tokens: int, steps: int, folder: str | None) -> dict[str, Any]:
    """A data set of so many flat tokens."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        data = Path(name) / "data"
        data.mkdir()
        num_tokens = write_shards(data, flat_tokens)
        size = sum(path.stat().st_size for path in data.iterdir())
        command = [sys.executable, __file__, "--child", name, "--steps", str(steps)]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        facts = json.loads(out.splitlines()[-1])
        rate = round(num_tokens / facts["seconds_loading"])
        return (
            {"what": "data set", "flat_tokens": num_tokens, "parquet_gib": round(size / 2**30, 2)}
            | facts
            | {"flat_tokens_per_second_loading": rate}
        )


# -- trees ------------------------------------------------------------------------------------------------------------


def drawn_tree(num_leaves: int, path_tokens: int, rng: np.random.Generator) -> list[Trajectory]:
    """Trajectories that fork from an earlier one at a random position, as calls of an agent do."""
    rows = [rng.integers(0, VOCABULARY, path_tokens, dtype=np.int32)]
    for _ in range(num_leaves - 1):
        row = rows[int(rng.integers(max(0, len(rows) - 8), len(rows)))].copy()
        fork = int(path_tokens * (1 - rng.random() ** 2))
        row[fork:] = rng.integers(0, VOCABULARY, path_tokens - fork, dtype=np.int32)
        rows.append(row)
    return [Trajectory(row) for row in rows]


def tree_times(num_leaves: int, path_tokens: int, budget: int) -> dict[str, Any]:
    """Seconds of the host for one tree."""
    trajectories = drawn_tree(num_leaves, path_tokens, np.random.default_rng(0))
    marks = [time.perf_counter()]
    forest = Forest.from_trajectories(trajectories)
    marks.append(time.perf_counter())
    made = plan(forest, budget)
    marks.append(time.perf_counter())
    for micro_batch in range(len(made.micro_batches)):
        lay_out(made, micro_batch)
    marks.append(time.perf_counter())
    merging, planning, layout = np.diff(marks).round(3).tolist()
    return {
        "what": "tree",
        "trajectories": num_leaves,
        "path_tokens": path_tokens,
        "budget": budget,
        "flat_tokens": forest.num_flat_tokens,
        "tree_tokens": forest.num_tokens,
        "micro_batches": len(made.micro_batches),
        "seconds_merging": merging,
        "seconds_planning": planning,
        "seconds_layout": layout,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flat_tokens", type=int, default=1_000_000_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", help="where the data set is written, by default the system's temporary folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(Path(args.child), args.steps)
        return
    if args.folder is not None:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    rows = []
    for leaves, path_tokens, budget in ((1, 100_000, 4096), (64, 100_000, 16_384), (1024, 100_000, 65_536)):
        rows.append(tree_times(leaves, path_tokens, budget))
        print(rows[-1], flush=True)
    rows.append(data_set(args.flat_tokens, args.steps, args.folder))
    print(rows[-1])
    print("written to", save("scale", rows))


if __name__ == "__main__":
    main()
