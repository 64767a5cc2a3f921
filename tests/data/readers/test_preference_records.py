"""Pairs of preferred and rejected completions, and labelled ones."""

import pytest

from treewise.data import load_trees
from treewise.errors import DataError

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def test_pairs_share_their_prompt_and_have_a_group_each(tokenizer):
    records = [{"prompt": "2+2=", "chosen": "4", "rejected": wrong} for wrong in ("5", "6")]
    trees = load_trees(records, tokenizer)
    (tree,) = trees
    assert trees.report.num_preferences == 2
    assert [item.reward for item in tree.trajectories] == [1, 0, 1, 0]
    groups = [item.group for item in tree.trajectories]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert len({item.rollout for item in tree.trajectories}) == 4
    assert tree.forest().num_tokens < tree.forest().num_flat_tokens / 2


def ids(record, tokenizer):
    (tree,) = load_trees([record], tokenizer, options={"chat_template": "chatml"})
    return [(item.token_ids.tolist(), item.loss_weights.tolist()) for item in tree.trajectories]


def test_pairs_of_whole_conversations_share_what_they_begin_with(tokenizer):
    wrong = {"role": "assistant", "content": "5"}
    pair = {"chosen": CHAT, "rejected": [CHAT[0], wrong]}
    plain = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [wrong]}
    repeated = {"prompt": "2+2?", "chosen": CHAT, "rejected": [CHAT[0], wrong]}
    assert ids(pair, tokenizer) == ids(plain, tokenizer) == ids(repeated, tokenizer)
    system = {"role": "system", "content": "Count."}
    whole = {"chosen": [system, *CHAT], "rejected": [system, CHAT[0], wrong]}
    for prompt in ("2+2?", CHAT[:1], [system, CHAT[0]]):
        assert ids({**whole, "prompt": prompt}, tokenizer) == ids(whole, tokenizer)


def test_rewards_of_preferred_completions_are_counted_as_unused(tokenizer):
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    for record in (pair, {"prompt": "2+2=", "completion": "4", "label": True}):
        trees = load_trees([{**record, "reward": 3.0, "rollout": "a"}], tokenizer)
        assert trees.report.unused_keys == {"reward": 1, "rollout": 1}


BAD = {
    "no prompt": ({"chosen": "a", "rejected": "b"}, "add `prompt`"),
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "do not differ"),
    "label": ({"prompt": "a", "completion": "b", "label": "good"}, "must be true"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_an_error(name, tokenizer):
    record, words = BAD[name]
    with pytest.raises(DataError, match=words):
        load_trees([record], tokenizer)
