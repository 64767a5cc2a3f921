"""A per-token stream is declared once: in `Trajectory`. All that handles streams follows."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treewise
from treewise.errors import ConfigError, DataError
from treewise.tree.forest import Forest
from treewise.tree.trajectory import STREAMS, Trajectory, update_with_content

LINE = '    surprise: Stream = Stream(is_scalar_allowed=True, other_names=("astonishment",))\n'
USE = """
import hashlib, json, sys
import numpy as np
import treewise as tw
from treewise.data import load_trees
from treewise.errors import DataError
from treewise.tree.trajectory import update_with_content

def load(name, *records):
    open(name, "w").write("".join(json.dumps(record) + "\\n" for record in records))
    return load_trees(name)

row = {"token_ids": [1, 2, 3], "group": "g", "surprise": [0, 2, 3]}
other = {"token_ids": [1, 2, 4], "group": "g", "surprise": 5}
dataset = load("rows.jsonl", row, other)
forest = dataset[0].forest()  # parsed, stored in a table and merged
assert forest.flat_stream("surprise").tolist() == [0, 2, 3, 5, 5, 5]
changed = load("changed.jsonl", row, {**other, "surprise": 6})
assert dataset.fingerprint != changed.fingerprint  # hashed
digests = [hashlib.sha256(), hashlib.sha256()]
for digest, data in zip(digests, (dataset, changed)):
    update_with_content(digest, data[0].trajectories)
assert digests[0].digest() != digests[1].digest()
nodes = [{"parent": None, "token_ids": [1, 2], "surprise": 1}, {"parent": 0, "token_ids": [3], "surprise": [4]}]
assert load("nodes.jsonl", {"nodes": nodes})[0].forest().flat_stream("surprise").tolist() == [1, 1, 4]
large = tw.Forest.from_nodes([-1], [[1, 2]], surprise=[[1, 2]])
assert tw.Forest.concatenate([large, large]).flat_stream("surprise").tolist() == [1, 2, 1, 2]
for bad, message in (
    ({"token_ids": [1, 2], "surprise": [1]}, "1 surprise for 2 tokens"),
    ({"token_ids": [1, 2], "astonishment": [1, 1]}, "write it as surprise"),
):
    try:
        load("bad.jsonl", bad)
    except DataError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
"""


@pytest.mark.slow
def test_a_stream_is_one_line(tmp_path):
    package = Path(treewise.__file__).parent
    shutil.copytree(package, tmp_path / "treewise", ignore=shutil.ignore_patterns("__pycache__", "static"))
    declarations = tmp_path / "treewise" / "tree" / "trajectory.py"
    before, mark, after = declarations.read_text().partition("    teacher_ids: Stream")
    declarations.write_text(before + LINE + mark + after)
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def digest_of(*trajectories):
    digest = hashlib.sha256()
    update_with_content(digest, trajectories)
    return digest.hexdigest()


CHANGES = {
    "token_ids": [1, 2, 9],
    "loss_weights": [0, 1, 0.5],
    "advantages": 0.5,
    "old_logprobs": [0, -1, -2.5],
    "ref_logprobs": [0, -1, -2.5],
    "sampler_logprobs": [0, -1, -2.5],
    "teacher_ids": [[1], [2], [4]],
    "teacher_logprobs": [[0], [-1], [-2.5]],
    "group": "h",
    "rollout": "s",
    "reward": 0.5,
    "rollout_weight": 3.0,
    "draws": [-1, 3, 4],
    "policy_versions": [-1, 2, 2],
    "routed_experts": [[[0, 1]], [[1, 2]], [[0, 2]]],
    "token_rewards": [0, 0, 2],
}
BASE = {
    "token_ids": [1, 2, 3],
    "loss_weights": [0, 1, 1],
    "advantages": 1,
    "old_logprobs": [0, -1, -2],
    "ref_logprobs": [0, -1, -3],
    "sampler_logprobs": [0, -1, -4],
    "teacher_ids": [[1], [2], [3]],
    "teacher_logprobs": [[0], [-1], [-2]],
    "group": "g",
    "rollout": "r",
    "reward": 1.0,
    "rollout_weight": 2.0,
    "draws": [-1, 3, 3],
    "policy_versions": [-1, 2, 1],
    "routed_experts": [[[0, 1]], [[1, 2]], [[0, 3]]],
    "token_rewards": [0, 0, 1],
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_content_depends_on_every_stream_and_label(name):
    first = Trajectory(**BASE)
    assert digest_of(first, Trajectory(**BASE)) == digest_of(first, Trajectory(**BASE))
    assert digest_of(first, Trajectory(**BASE)) != digest_of(first, Trajectory(**{**BASE, name: CHANGES[name]}))


def test_the_content_depends_on_the_names_of_streams():
    swapped = {**BASE, "old_logprobs": BASE["ref_logprobs"], "ref_logprobs": BASE["old_logprobs"]}
    assert digest_of(Trajectory(**BASE)) != digest_of(Trajectory(**swapped))


def test_the_content_does_not_depend_on_where_it_came_from():
    moved = {**BASE, "source": "b.jsonl:1", "rollout": "b.jsonl:1", "group": "other"}
    assert digest_of(Trajectory(**BASE)) == digest_of(Trajectory(**moved))


def test_streams_are_read_from_the_declarations():
    item = Trajectory(**BASE)
    assert list(STREAMS) == list(item.streams)
    assert set(STREAMS) < set(BASE)
    assert {name: stream.dtype for name, stream in STREAMS.items()} == {
        name: values.dtype.type for name, values in item.streams.items()
    }
    assert Trajectory([1, 2]).streams.keys() == {"loss_weights"}


def test_a_weight_is_summed_in_float64():
    weights = np.full(3, 0.1, dtype=np.float32)
    weights[0] = 0
    assert Trajectory([1, 2, 3], weights).weight == 2 * float(np.float32(0.1))


@pytest.mark.parametrize("name", ["teacher_ids", "logprobs"])
def test_nodes_take_streams_with_one_value_per_token(name):
    with pytest.raises(ConfigError, match=f"t.jsonl:1: '{name}' is not a stream of nodes; known: loss_weights, "):
        Forest.from_nodes([-1], [[1, 2]], **{name: [[1, 2]]}, source="t.jsonl:1")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([-1, 0.5, 1], r"draws\[1\] is 0.5; every value must be a whole number below 16,777,216"),
        ([-1, 2**24, 1], r"draws\[1\] is 1.67772e\+07; every value must be a whole number"),
        ([-1, 2**70, 1], r"draws\[1\] is 1.18059e\+21; every value must be a whole number"),
        ([-1, 10**400, 1], r"draws\[1\] is inf; every value must be finite"),
        ([-1, None, 1], "draws must be numbers, found NoneType at position 1"),
    ],
)
def test_numbers_of_draws_are_whole(values, words):
    with pytest.raises(DataError, match=words):
        Trajectory([1, 2, 3], draws=values)
