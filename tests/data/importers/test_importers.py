"""Each foreign format, from a sample made by hand in it: which tokens, which of them sampled, whose rollout."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treewise.data import RenderOptions, load_trees
from treewise.data.importers import FORMATS, detect_format, import_rollouts
from treewise.data.importers.common import Context
from treewise.data.importers.traces import read_verifiers
from treewise.data.io.files import Placed
from treewise.errors import ConfigError, DataError

SAMPLES = Path(__file__).parent / "samples"


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}


def rows_of(name, **options):
    rows = import_rollouts(SAMPLES / name, **options)
    return list(rows), rows.report


def trained(row):
    return [token for token, weight in zip(row["token_ids"], row["loss_weights"], strict=True) if weight]


def labels(rows):
    return [(row.get("group"), row.get("rollout"), row.get("reward")) for row in rows]


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_sample_shows_its_format(path):
    name = detect_format(json.loads(path.read_text().splitlines()[0]))
    assert name in FORMATS
    assert path.stem.replace("_rl", "-rl").startswith(name)


def test_verifiers_traces_train_a_shared_message_on_its_first_branch():
    rows, report = rows_of("verifiers.jsonl")
    assert [row["token_ids"] for row in rows] == [
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [1, 2, 3, 4, 5, 6, 7, 11, 12],
        [1, 2, 3, 4, 5, 13],
    ]
    assert [trained(row) for row in rows] == [[6, 7, 9, 10], [12], [13]]
    assert [row["sampler_logprobs"][-1] for row in rows] == [-0.4, -0.5, -0.6]
    assert labels(rows) == [("g1", "t1", 1.1), ("g1", "t1", 1.1), ("g1", "t2", 0.1)]
    assert report.left_out[0][1].startswith("the trace did not complete (ProviderError")


@st.composite
def message_graphs(draw):
    """Nodes of a trace: any tree of messages, each with tokens that no other has."""
    nodes = []
    for number in range(draw(st.integers(1, 9))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        sampled = parent is not None and draw(st.booleans())
        length = draw(st.integers(1, 3))
        ids = list(range(10 * number, 10 * number + length))
        mask = [sampled and position >= length - draw(st.integers(1, length)) for position in range(length)]
        mask[-1] = sampled
        logprobs = [-float(token) for token, is_sampled in zip(ids, mask, strict=True) if is_sampled]
        role = "assistant" if sampled else "user"
        nodes.append({"parent": parent, "message": {"role": role, "content": "x"}, "sampled": sampled, "mask": mask})
        nodes[-1] |= {"token_ids": ids, "logprobs": logprobs}
    return nodes


@given(message_graphs())
def test_every_sampled_token_of_a_graph_is_trained_once_in_its_context(nodes):
    trace = {"id": "t", "task": {}, "agent": {}, "nodes": nodes, "rewards": {}, "ok": True}
    context = Context()
    rows = list(read_verifiers([Placed("a:1", trace)], context))
    sampled = [token for node in nodes for token, mask in zip(node["token_ids"], node["mask"], strict=True) if mask]
    assert sorted(token for row in rows for token in trained(row)) == sampled
    paths = []
    for number in range(len(nodes)):
        path, above = [], number
        while above is not None:
            path = nodes[above]["token_ids"] + path
            above = nodes[above]["parent"]
        paths.append(path)
    leaves = set(range(len(nodes))) - {node["parent"] for node in nodes}
    assert {tuple(row["token_ids"]) for row in rows} <= {tuple(paths[leaf]) for leaf in leaves}
    assert bool(context.left_out) == (len(rows) < len(leaves))
    for row in rows:
        pairs = zip(row["token_ids"], row["loss_weights"], row["sampler_logprobs"], strict=True)
        assert all(logprob == -token for token, weight, logprob in pairs if weight)


def test_a_trace_that_is_written_twice_is_trained_once(write, tmp_path):
    lines = [json.loads(line) for line in (SAMPLES / "verifiers.jsonl").read_text().splitlines()]
    once, report = rows_of("verifiers.jsonl")
    write(*lines, *lines, name="traces.jsonl")
    write(*lines, name="more.jsonl")
    rows = import_rollouts([tmp_path / "traces.jsonl", tmp_path / "more.jsonl"])
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in once]
    twice = [why for _, why in rows.report.left_out if "logged twice" in why]
    assert len(twice) == 2 * report.num_rollouts
    dataset = load_trees([tmp_path / "traces.jsonl", tmp_path / "more.jsonl"], num_workers=0)
    assert sum(len(tree.trajectories) for tree in dataset) == len(once)


def test_one_of_several_rewards_is_chosen_by_name():
    rows, _ = rows_of("verifiers.jsonl", reward_field="correct")
    assert [row["reward"] for row in rows] == [1, 1, 0]
    with pytest.raises(DataError, match="no reward 'speed' among correct, style"):
        rows_of("verifiers.jsonl", reward_field="speed")


def test_verifiers_traces_without_tokens_become_calls(write, tokenizer):
    line = json.loads((SAMPLES / "verifiers.jsonl").read_text().splitlines()[0])
    for node in line["traces"][0]["nodes"]:
        del node["token_ids"], node["mask"], node["logprobs"]
    [row] = import_rollouts(path := write(line))
    assert [(call["ctx"], call["out"]) for call in row["calls"]] == [([0, 1], 2), ([0, 1, 2, 3], 4), ([0, 1, 2, 5], 6)]
    assert len(load_trees(write(row, name="b.jsonl"), tokenizer)[0].trajectories) == 3
    with pytest.raises(DataError, match="text without token ids"):
        list(import_rollouts(path, strict=True))


def test_verifiers_results():
    rows, report = rows_of("verifiers_results.jsonl")
    assert trained(rows[0]) == [4, 5]
    assert rows[0]["sampler_logprobs"] == [0, 0, 0, -0.1, -0.2]
    assert [message["content"] for message in rows[1]["messages"]] == ["2+2?", "5"]
    assert [(row["group"], row["reward"]) for row in rows] == [(7, 1), (7, 0)]
    assert report.num_text_rows == 1


def test_prime_rl_exports_carry_advantages():
    rows, _ = rows_of("prime_rl.jsonl")
    assert [trained(row) for row in rows] == [[3, 4], [5]]
    assert rows[1]["loss_weights"] == [0, 0, 0.5]
    assert rows[0]["advantages"] == [0, 0, 0.5, 0.5]
    assert "old_logprobs" not in rows[0]


def test_slime_samples_share_their_rollout():
    rows, report = rows_of("slime.jsonl")
    assert [trained(row) for row in rows] == [[3, 5], [6], [8, 9]]
    assert labels(rows) == [(0, 0, 1), (0, 9, 0), (0, 9, 0)]
    assert rows[0]["sampler_logprobs"] == [0, 0, -0.1, 0, -0.3]
    assert [reason for _, reason in report.left_out] == ["remove_sample is set"]
    assert (report.num_rollouts, report.num_groups) == (2, 1)


def test_a_torch_file_of_plain_values_is_read_and_one_with_objects_never(tmp_path):
    samples = [json.loads(line) for line in (SAMPLES / "slime.jsonl").read_text().splitlines()]
    path = tmp_path / "data_3.pt"
    for sample in samples:
        sample["rollout_log_probs"] = torch.tensor(sample["rollout_log_probs"], dtype=torch.float64)
    torch.save({"rollout_id": 3, "samples": samples}, path)
    strip = [{key: value for key, value in row.items() if key != "source"} for row in import_rollouts(path)]
    assert strip == [{key: value for key, value in row.items() if key != "source"} for row in rows_of("slime.jsonl")[0]]
    torch.save({"rollout_id": 3, "samples": [{"tokens": np.arange(3)}]}, path)
    with pytest.raises(DataError, match=r"data_3\.pt: holds more than tensors.*any code"):
        list(import_rollouts(path))
    path.write_bytes(b"no torch file")
    with pytest.raises(DataError, match=r"data_3\.pt"):
        list(import_rollouts(path))
    with pytest.raises(DataError, match="pickles"):
        import_rollouts(tmp_path / "batch.pkl")


def test_verl_tensors_lose_their_padding(tmp_path):
    [row], _ = rows_of("verl_tensors.jsonl")
    assert row["token_ids"] == [1, 2, 3, 4, 5]
    assert trained(row) == [3, 5]
    assert row["old_logprobs"] == [0, 0, -0.11, 0, -0.31]
    assert (row["reward"], row["group"]) == (1, "u1")
    one = json.loads((SAMPLES / "verl_tensors.jsonl").read_text())
    batch = {name: [value, value] if name == "uid" else torch.tensor([value, value]) for name, value in one.items()}
    torch.save(batch, path := tmp_path / "batch.pt")
    both = list(import_rollouts(path))
    assert [each["token_ids"] for each in both] == [row["token_ids"]] * 2
    assert np.allclose(both[1]["sampler_logprobs"], row["sampler_logprobs"])


def test_verls_text_dump_has_a_warning():
    rows, report = rows_of("verl_generations.jsonl")
    assert [(row["prompt"], row["completion"], row["reward"]) for row in rows] == [
        ("user\nQ\nassistant\n", "four", 1),
        ("user\nQ\nassistant\n", "five", 0),
    ]
    assert "without special tokens" in next(iter(report.warnings))
    assert rows_of("verl_generations.jsonl", reward_field="acc")[0][1]["reward"] == 0


def test_areal_text_needs_a_tokenizer_and_is_checked_by_length(write):
    with pytest.raises(DataError, match="--tokenizer"):
        rows_of("areal.jsonl")
    lines = [json.loads(line) for line in (SAMPLES / "areal.jsonl").read_text().splitlines()]
    rows = list(areal_rows(write(*lines)))
    assert ["".join(map(chr, trained(row))) for row in rows] == ["cf", "gh"]
    assert [(row["group"], row["reward"]) for row in rows] == [(5, 1), (5, 0)]
    lines[1]["seqlen"] = 5
    found = areal_rows(write(*lines))
    list(found)
    assert "another number of tokens" in next(iter(found.report.warnings))


def areal_rows(path):
    found = import_rollouts(path)
    found.context.tokenizer = Letters()
    found._reader.tokenizer = None
    return found


def test_areal_tensors(tmp_path):
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
        "logprobs": torch.tensor([[0, 0, -0.25, -0.5], [0, 0, -1, 0]]),
        "versions": torch.tensor([[-1, -1, 2, 2], [-1, -1, 2, -1]]),
        "rewards": torch.tensor([1.0, 0.0]),
    }
    torch.save([batch], path := tmp_path / "rollout.pt")
    rows = list(import_rollouts(path))
    assert [row["token_ids"] for row in rows] == [[1, 2, 3, 4], [1, 2, 5]]
    assert [trained(row) for row in rows] == [[3, 4], [5]]
    assert [row["sampler_logprobs"] for row in rows] == [[0, 0, -0.25, -0.5], [0, 0, -1]]
    assert [row["reward"] for row in rows] == [1, 0]


def test_art_groups_train_choices_alone(write, tokenizer):
    rows, report = rows_of("art.jsonl")
    weights = [message.get("weight") for message in rows[0]["messages"] if message["role"] == "assistant"]
    assert weights == [0, None, None]
    assert len({row["group"] for row in rows}) == 1
    assert [row["rollout"].rpartition(" ")[2] for row in rows] == [
        "trajectories[0]",
        "trajectories[0]",
        "trajectories[1]",
    ]
    assert report.num_text_rows == 3
    [tree] = load_trees(write(*rows), tokenizer, options=RenderOptions(chat_template="chatml"))
    assert len(tree.trajectories) == 4  # two calls, the other history's, and the second trajectory's


def test_art_parquet_holds_nested_values_as_text(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = {"tool_calls": None, "tool_call_id": None}
    call = json.dumps([{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}])
    row = {
        "group_index": 0,
        "reward": 1.0,
        "metrics": json.dumps({"steps": 1}),
        "tools": json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}]),
        "additional_histories": None,
        "messages": [
            {**message, "role": "user", "content": "Q", "trainable": False},
            {**message, "role": "assistant", "content": "Before.", "trainable": False},
            {**message, "role": "assistant", "content": None, "tool_calls": call, "trainable": True},
        ],
    }
    pq.write_table(pa.Table.from_pylist([row]), path := tmp_path / "0001.parquet")
    [found] = import_rollouts(path)
    assert found["messages"][1]["weight"] == 0
    assert found["messages"][2]["tool_calls"][0]["function"]["name"] == "add"
    assert found["tools"][0]["function"]["name"] == "add"


def test_trl_samples_by_line_and_in_columns(tmp_path):
    rows, _ = rows_of("trl.jsonl")
    assert [trained(row) for row in rows] == [[3, 5], [6]]
    assert [row["sampler_logprobs"] for row in rows] == [[0, 0, -0.1, -0.2, -0.3], [0, 0, -0.4]]
    assert rows[1]["advantages"] == -0.5
    torch.save(
        {
            "prompt_ids": [[1, 2], [1, 2]],
            "completion_ids": [[3, 4], [5]],
            "logprobs": [[-1.0, -2.0], [-3.0]],
            "rewards": torch.tensor([1.0, 0.5]),
        },
        path := tmp_path / "columns.pt",
    )
    rows = list(import_rollouts(path))
    assert [row["token_ids"] for row in rows] == [[1, 2, 3, 4], [1, 2, 5]]
    assert [row["reward"] for row in rows] == [1, 0.5]


def test_trls_logged_completions_are_text(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    shared = {"step": 1, "prompt": "Q"}
    rows = [
        {**shared, "completion": "a", "right": 1.0, "advantage": 1.0},
        {**shared, "completion": "b", "right": 0.0, "advantage": -1.0},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path := tmp_path / "completions_00001.parquet")
    found = import_rollouts(path, reward_field="right")
    assert [(row["completion"], row["reward"], row["advantages"]) for row in found] == [("a", 1, 1), ("b", 0, -1)]
    assert found.report.num_text_rows == 2


def test_calls_of_a_log_form_runs_by_their_messages(write, tokenizer):
    rows, report = rows_of("openai.jsonl")
    assert [(call["ctx"], call["out"]) for call in rows[0]["calls"]] == [([0], 1), ([0, 1, 2], 3), ([0, 1, 4], 5)]
    assert [row["reward"] for row in rows] == [1, 0]
    assert rows[0]["group"] == rows[1]["group"]
    assert rows[0]["rollout"] != rows[1]["rollout"]
    assert report.left_out[0][1] == "a call without a reply ('rate limit')"
    [tree] = load_trees(write(*rows), tokenizer)
    assert len(tree.trajectories) == 4
    assert len({item.rollout for item in tree.trajectories}) == 2


def test_calls_that_continue_equal_conversations_are_shared_out_and_said(write):
    user = [{"role": "user", "content": "Q"}]
    reply = {"choices": [{"message": {"role": "assistant", "content": "same"}}]}
    further = {"messages": [*user, {"role": "assistant", "content": "same"}, {"role": "user", "content": "go"}]}
    first = {"request": {"messages": user}, "response": reply}
    rows = import_rollouts(write(first, first, *[{"request": further, "response": reply}] * 2))
    assert [len(row["calls"]) for row in rows] == [2, 2]
    assert "name runs with a rollout id" in next(iter(rows.report.warnings))


def test_a_log_of_requests_alone_trains_the_replies_that_later_requests_show(write):
    def turn(role, content):
        return {"role": role, "content": content}

    start = [turn("user", "example"), turn("assistant", "given"), turn("user", "Q")]
    first = [*start, turn("assistant", "A"), turn("user", "go")]
    requests = [start, first, [*first, turn("assistant", "B"), turn("user", "on")]]
    requests.append([*start, turn("assistant", "A"), turn("user", "other way")])  # the same reply, continued elsewhere
    requests.append(requests[2])  # a retry
    rows = import_rollouts(write(*[{"request": {"model": "m", "messages": each}} for each in requests]))
    [row] = rows
    contents = [message["content"] for message in row["messages"]]
    calls = [([contents[i] for i in call["ctx"]], contents[call["out"]]) for call in row["calls"]]
    assert calls == [(["example", "given", "Q"], "A"), (["example", "given", "Q", "A", "go"], "B")]
    assert [reason for _, reason in rows.report.left_out] == ["a request whose reply no later request shows"] * 2
    bare = import_rollouts(write(*[{"model": "m", "messages": each} for each in requests]), "openai")
    assert [each["calls"] for each in bare] == [row["calls"]]
    again = [{"request": {"messages": each}} for each in (start, start, first, first)]
    rows = import_rollouts(write(*again))
    assert [len(each["calls"]) for each in rows] == [1, 1]
    assert "name runs with a rollout id" in next(iter(rows.report.warnings))


def test_a_log_with_token_ids_is_not_tokenised_again():
    rows, report = rows_of("openai_tokens.jsonl")
    assert [trained(row) for row in rows] == [[4, 5], [7], [8]]
    assert [row.get("sampler_logprobs", [0])[-1] for row in rows] == [-0.2, -0.3, 0]
    assert [(row["rollout"], row["reward"]) for row in rows] == [("a", 1), ("a", 1), ("b", 0)]
    assert (report.num_rollouts, report.num_groups, report.num_text_rows) == (2, 1, 0)


def test_ids_win_over_messages_and_the_first_difference_is_told(write, tokenizer):
    line = json.loads((SAMPLES / "openai_tokens.jsonl").read_text().splitlines()[0])
    rows = import_rollouts(path := write(line), tokenizer=tokenizer)
    [row] = rows
    assert row["token_ids"] == [1, 2, 3, 4, 5]
    assert (rows.report.num_compared, rows.report.num_drifted) == (1, 1)
    assert "retokenisation drift at token 1: sampled 2" in rows.report.drifts[0]
    assert "messages" not in row
    assert "messages" in next(iter(import_rollouts(path, keep_messages=True)))
    with pytest.raises(DataError, match="retokenisation drift"):
        list(import_rollouts(path, tokenizer=tokenizer, strict=True))


def test_groups_of_several_dumps_stay_apart(tmp_path):
    for name in ("step_1.jsonl", "step_2.jsonl"):
        shutil.copy(SAMPLES / "slime.jsonl", tmp_path / name)
    rows = list(import_rollouts(tmp_path))
    assert {row["group"] for row in rows} == {"step_1.jsonl: 0", "step_2.jsonl: 0"}


def test_what_cannot_be_imported_is_refused_with_a_way_out(write):
    for records, message in (
        ([{"token_ids": [1, 2]}], "treewise's own forms"),
        ([{"a": 1}], r"data\.jsonl:1: a record with the keys a .*--from"),
        ([], r"data\.jsonl: no record"),
        ([{"tokens": [1, 2], "response_length": 5, "reward": 1}], "response_length 5 does not fit 2"),
        ([{"tokens": [1, 2], "response_length": 1, "reward": {"a": 1}}], r"rewards \(a\); name one with --reward"),
        ([{"tokens": [1, 2], "response_length": 1, "reward": 1, "loss_mask": [0]}], "nothing to train on"),
        ([{"trajectories": []}], r"nothing to train on in 1 file\."),
        ([{"tokens": [1, "x"], "response_length": 1, "reward": 1}], "integers"),
        ([{"tokens": [1, 2], "response_length": 1, "reward": 1, "rollout_log_probs": [1, 2]}], "2 rollout_log_probs"),
        ([{"request": {"messages": []}, "response": {"choices": [{"delta": {}}]}}], "streamed chunks"),
        ([{"input_ids": [[1], [2]], "loss_mask": [[1]], "versions": [[0], [0]]}], "1 loss_mask for 2 input_ids"),
        ([{"prompt_ids": [1], "completion_ids": [2], "logprobs": [[0, 1]], "logprob_token_ids": [[2]]}], "in length"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            list(import_rollouts(write(*records)))
    with pytest.raises(DataError, match="shape of a verifiers dump"):
        list(import_rollouts(write({"trajectory": [{"tokens": [1]}], "reward": 1}), "verifiers"))
    with pytest.raises(ConfigError, match="Did you mean 'slime'"):
        import_rollouts(write({}), "slim")
