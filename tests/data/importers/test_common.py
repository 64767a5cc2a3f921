"""What a row of a dump lacks: a null is never a number, in no format; the row is left out and counted."""

import copy
import json
import math
from pathlib import Path

import pytest

from treewise.data import load_trees
from treewise.data.importers import import_rollouts
from treewise.errors import DataError

SAMPLES = Path(__file__).parent / "samples"
# Rows of token ids, each with the place of a sampled token's value in every list of values, and what it is called.
ROWS = {
    "trl": {"prompt_ids": [1, 5], "completion_ids": [6, 2], "logprobs": [-1.5, -0.5], "rewards": 1.0},
    "trl of a trainer": {
        **{"prompt_ids": [1, 5], "completion_ids": [6, 2], "old_per_token_logps": [-1.5, -0.5], "advantages": [0.5, 1]},
        "ref_per_token_logps": [-1.5, -0.5],
    },
    "verl": {
        **{"prompts": [1, 5], "responses": [6, 2], "attention_mask": [1, 1, 1, 1], "response_mask": [1, 1]},
        **{"rollout_log_probs": [-1.5, -0.5], "old_log_probs": [-1.5, -0.5], "ref_log_prob": [-1.5, -0.5]},
        "advantages": [0.5, 1],
    },
    "areal": {
        **{"input_ids": [1, 5, 6, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1.5, -0.5]},
        **{"prox_logp": [0, 0, -1.5, -0.5], "versions": [0, 0, 0, 0], "rewards": 1.0},
    },
    "slime": {"tokens": [1, 5, 6, 2], "response_length": 2, "reward": 1.0, "rollout_log_probs": [-1.5, -0.5]},
    "prime-rl": {
        **{"token_ids": [1, 5, 6, 2], "loss_mask": [0, 0, 1, 1], "inference_logprobs": [0, 0, -1.5, -0.5]},
        "advantages": [0, 0, 0.5, 1],
    },
    "verifiers": {
        **{"example_id": 1, "prompt": [], "completion": [], "reward": 1.0, "is_completed": True},
        "trajectory": [
            {"tokens": {"prompt_ids": [1, 5], "completion_ids": [6, 2], "completion_logprobs": [-1.5, -0.5]}}
        ],
    },
    "openai": {
        "request": {"messages": [{"role": "user", "content": "Q"}]},
        "response": {
            "prompt_token_ids": [1, 5],
            "choices": [
                {
                    **{"message": {"role": "assistant", "content": "A"}, "token_ids": [6, 2]},
                    "logprobs": {"content": [{"token": "a", "logprob": -1.5}, {"token": "b", "logprob": -0.5}]},
                }
            ],
        },
    },
}
TRACE = {
    **{"id": "t", "task": {}, "agent": {}, "rewards": {"right": {"score": 1.0, "weight": 1.0}}, "ok": True},
    "nodes": [
        {"parent": None, "sampled": False, "token_ids": [1, 5], "mask": [0, 0], "logprobs": []},
        {"parent": 0, "sampled": True, "token_ids": [6], "mask": [1], "logprobs": [-1.5]},
        {"parent": 1, "sampled": True, "token_ids": [2], "mask": [1], "logprobs": [-0.5]},
    ],
}
NOT_NUMBERS = (None, math.nan, math.inf, -math.inf)
VALUES = {  # of sampled tokens
    **{"trl": ["logprobs"], "trl of a trainer": ["old_per_token_logps", "ref_per_token_logps", "advantages"]},
    "verl": ["rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages"],
    **{"areal": ["logprobs", "prox_logp"], "slime": ["rollout_log_probs"]},
    "prime-rl": ["inference_logprobs", "advantages"],
    **{"verifiers": ["completion_logprobs"], "openai": ["logprob"]},
}
EACH = [(form, name) for form, names in VALUES.items() for name in names]


def lists_named(value, name):
    """Every list of values in a record that bears a name, as its owner and the last place in it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == name and isinstance(item, list):
                yield item, -1
            elif key == name and isinstance(item, float):
                yield value, key
            else:
                yield from lists_named(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from lists_named(item, name)


def changed(form, name, value, count=1):
    record = copy.deepcopy(ROWS[form])
    for owner, place in list(lists_named(record, name))[-count:]:
        owner[place] = value
        if count > 1 and isinstance(owner, list):
            owner[place - 1] = value
    return record


@pytest.mark.parametrize("form", ROWS)
def test_whole_rows_are_imported_with_their_values(form, write):
    rows = import_rollouts(write(ROWS[form]))
    [row] = rows
    assert row["token_ids"] == [1, 5, 6, 2]
    streams = [row[name] for name in ("sampler_logprobs", "old_logprobs", "ref_logprobs") if name in row]
    assert streams
    assert all(each == [0, 0, -1.5, -0.5] for each in streams)
    assert not rows.report.left_out


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize(("form", "name"), EACH)
def test_a_null_of_a_sampled_token_leaves_its_row_out(form, name, value, write):
    path = write(changed(form, name, value), ROWS[form])
    rows = import_rollouts(path)
    kept = list(rows)
    assert [row["source"].rpartition("data.jsonl:")[2][0] for row in kept] == ["2"]
    [(location, reason)] = rows.report.left_out
    assert location.startswith(f"{path}:1")
    assert location.endswith("token 3")
    assert reason.startswith("a sampled token without its ")
    if form == "prime-rl":  # whose rows look like treewise's own, and are an error of the reader of these
        return
    dataset = load_trees(path, num_workers=0)
    assert len(dataset.report.dropped) == 1
    assert sum(len(tree.trajectories) for tree in dataset) == 1


@pytest.mark.parametrize(("form", "name"), EACH)
def test_values_that_are_all_null_are_not_there(form, name, write):
    rows = import_rollouts(write(changed(form, name, None, count=2)))
    [row] = rows
    whole = next(iter(import_rollouts(write(ROWS[form]))))
    [missing] = set(whole) - set(row)
    assert {key: value for key, value in whole.items() if key != missing} == row
    assert rows.report.warnings == {f"rows whose {missing} are all null are read as rows without them": 1}


@pytest.mark.parametrize(
    ("form", "name", "place"),
    [
        ("verl", "response_mask", -1),
        ("verl", "attention_mask", 2),
        ("areal", "loss_mask", -1),
        ("prime-rl", "loss_mask", 2),
    ],
)
def test_a_mask_with_a_null_leaves_its_row_out(form, name, place, write):
    record = copy.deepcopy(ROWS[form])
    record[name][place] = None
    rows = import_rollouts(write(record, ROWS[form]))
    assert len(list(rows)) == 1
    [(location, reason)] = rows.report.left_out
    assert f"data.jsonl:1: {name}[" in location
    assert reason == f"a token without its {name} (null, or not finite)"


@pytest.mark.parametrize(("form", "name"), [each for each in EACH if each != ("openai", "logprob")])
@pytest.mark.parametrize("values", [[-1.0], [-1.0] * 7])
def test_lists_of_another_length_are_errors(form, name, values, write):
    record = copy.deepcopy(ROWS[form])
    holder = record["trajectory"][0]["tokens"] if form == "verifiers" else record
    holder[name] = values
    with pytest.raises(DataError, match=rf"data.jsonl:1.*{len(values)} {name} for . tokens"):
        list(import_rollouts(write(record)))


def test_a_message_without_logprobs_beside_others_leaves_its_branch_out(write):
    trace = copy.deepcopy(TRACE)
    [row] = import_rollouts(write(trace))
    assert row["sampler_logprobs"] == [0, 0, -1.5, -0.5]
    for without in ([], None):
        trace["nodes"][2]["logprobs"] = without
        rows = import_rollouts(write(trace, {**TRACE, "id": "u"}))
        assert [row["rollout"] for row in rows] == ["u"]
        assert rows.report.left_out[0][1] == "a sampled token without its sampler_logprobs"
    for node in trace["nodes"]:
        node["logprobs"] = []
    [row] = import_rollouts(write(trace))
    assert "sampler_logprobs" not in row


def test_rewards_that_are_null_are_none(write):
    scores = {"right": {"score": 1.0, "weight": 1.0}, "short": {"score": None, "weight": 0.5}}
    unknown = ({**TRACE, "id": "a", "rewards": scores}, {**TRACE, "id": "b", "rewards": {"right": None}})
    rows = import_rollouts(write(*unknown, TRACE))
    assert [row.get("reward") for row in rows] == [None, None, 1.0]
    assert rows.report.num_without_reward == 2
    assert rows.report.warnings == {"traces of which a reward is null: the sum is not known, so they have none": 2}
    for form, name in (("trl", "rewards"), ("areal", "rewards"), ("slime", "reward")):
        found = import_rollouts(write(*[ROWS[form] | {name: value} for value in (None, math.nan, 0.0)]), form)
        assert [row.get("reward") for row in found] == [None, None, 0.0]
        with pytest.raises(DataError, match="a reward must be one finite number, found inf"):
            list(import_rollouts(write(ROWS[form] | {name: math.inf})))
    verl = {**ROWS["verl"], "token_level_scores": [0.0, None]}
    rows = import_rollouts(write(verl, {**verl, "token_level_scores": [0.0, 1.0]}))
    assert [row["reward"] for row in rows] == [1.0]
    assert rows.report.left_out[0][1] == "a token without its token_level_scores (null, or not finite)"


BAD = {
    "trl": {**ROWS["trl"], "logprobs": [-1.0]},
    "verl": {**ROWS["verl"], "responses": [6, "x"]},
    "areal": {**ROWS["areal"], "rewards": math.inf},
    "slime": {**ROWS["slime"], "response_length": 9},
    "verifiers": {**ROWS["verifiers"], "trajectory": [{"tokens": [1]}]},
    "openai": {"request": {"messages": []}, "response": {"choices": [{"delta": {}}]}},
    "openai's reward": {**ROWS["openai"], "reward": "high"},
    "no JSON": '{"prompt_ids": [1, 5], "completion_ids"',
}


@pytest.mark.parametrize("form", BAD)
def test_bad_records_of_dumps_are_errors_or_quarantined(form, write, tmp_path):
    good = ROWS.get(form, ROWS["trl" if form == "no JSON" else "openai"])
    path = write(good, BAD[form], good)
    with pytest.raises(DataError, match=r"data\.jsonl"):
        load_trees(path, num_workers=0)
    out = tmp_path / "q.jsonl"
    dataset = load_trees(path, num_workers=0, on_bad_record="quarantine", quarantine_path=out)
    assert sum(len(tree.trajectories) for tree in dataset) == 2
    [(location, reason)] = dataset.report.dropped
    [line] = map(json.loads, out.read_text().splitlines())
    assert (location, reason) == (line["location"], line["reason"]) == (f"{path}:2", reason)
    assert line["record"] == BAD[form] if form == "no JSON" else json.loads(line["record"]) == BAD[form]


@pytest.mark.parametrize("status", ["aborted", "failed", "pending"])
def test_samples_that_failed_are_left_out_and_truncated_ones_are_trained(status, write):
    lines = [{**ROWS["slime"], "status": each} for each in (status, "truncated", "completed")]
    rows = import_rollouts(write(*lines))
    assert [row["token_ids"] for row in rows] == [[1, 5, 6, 2]] * 2
    assert [reason for _, reason in rows.report.left_out] == [f"a sample that ended with '{status}'"]
    columns = {"prompt_ids": [[1, 5]] * 2, "completion_ids": [[6], [7]], "finish_reason": ["abort", "length"]}
    rows = import_rollouts(write(columns))
    assert [row["token_ids"] for row in rows] == [[1, 5, 7]]
    assert rows.report.left_out[0][1] == "a sample that ended with 'abort'"


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_what_is_imported_is_json_and_loads(path, write, tokenizer):
    if path.stem == "areal":
        pytest.skip("text of one letter per token")
    rows = list(import_rollouts(path))
    assert rows
    written = write(*[json.loads(json.dumps(row, allow_nan=False)) for row in rows], name="rows.jsonl")
    options = {"chat_template": "chatml"}
    dataset = load_trees(written, tokenizer, options=options, num_workers=0)
    assert not dataset.report.dropped
    assert sum(len(tree.trajectories) for tree in dataset) >= len(rows)
