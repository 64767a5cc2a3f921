"""Causes of lost sharing, and what they cost, on text."""

import numpy as np
import pytest

from tests.report.rows import POLICY, QUESTION, RECORDS, Named, named_trees
from treewise.report.analysis import lost_sharing
from treewise.report.analysis.lost_sharing import (
    AVOIDABLE,
    OBSERVATION_DIFFERS,
    OTHER_SPEAKER,
    PROMPT_DIFFERS,
    RETOKENISED,
    REWRITTEN,
    ROUTED,
    SAMPLED,
    VOLATILE,
    LostCollector,
    cause_of,
    lost_in_tree,
    speaker_of,
)
from treewise.report.analysis.token_text import TokenText
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def worst(tokenizer, name: str) -> lost_sharing.LostSharing:
    tree = Named(name, RECORDS[name], tokenizer)
    return lost_in_tree(name, tree.forest(), TokenText(tokenizer))[0][0]


def num_tokens(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_clock_in_the_prompt_is_found_with_its_cost(tokenizer) -> None:
    found = worst(tokenizer, "clock")
    assert found.cause == VOLATILE
    assert found.before.endswith("The time is ")
    assert {found.heavy.different, found.light.different} == {"14:05:31", "09:44:02"}
    assert found.light.after.startswith(". You are an agent")
    shown = {side.different: side.location for side in (found.heavy, found.light)}
    assert shown == {"14:05:31": "rows.jsonl:clock-0", "09:44:02": "rows.jsonl:clock-1"}
    # All that follows the clock, up to the sampled answers, is computed twice.
    assert found.num_tokens_to_next == num_tokens(tokenizer, ". ") + num_tokens(tokenizer, POLICY) + num_tokens(
        tokenizer, QUESTION
    )
    assert found.num_lost_tokens == found.num_tokens_to_next


def test_two_samples_are_told_from_what_can_be_mended(tokenizer) -> None:
    assert worst(tokenizer, "samples").cause == SAMPLED
    collector = LostCollector(TokenText(tokenizer))
    tree = Named("samples", RECORDS["samples"], tokenizer)
    assert collector.add("samples", tree.forest()) == 0
    assert collector.result().num_avoidable_tokens == 0


def test_the_same_text_in_other_tokens_is_retokenised(tokenizer) -> None:
    sampled = [token for part in (" Skin", "ny") for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
    again = tokenizer(" Skinny", add_special_tokens=False)["input_ids"]
    assert sampled != again
    body = tokenizer(POLICY, add_special_tokens=False)["input_ids"]
    question = tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    forest = Forest.from_trajectories([Trajectory(question + each + body) for each in (sampled, again)])
    (found,), _ = lost_in_tree("drift", forest, TokenText(tokenizer))
    assert found.cause == RETOKENISED
    assert found.num_lost_tokens == len(body)
    assert "".join((" Skin", "ny")).endswith(found.heavy.different)
    assert found.heavy.different == found.light.different


@pytest.mark.parametrize(
    ("texts", "is_trained", "is_prompt", "expected"),
    [
        (("same", "same"), (True, True), True, RETOKENISED),
        (("a", "b"), (True, True), True, SAMPLED),
        (("2024-05-15 15:00", "2025-11-21 09:13"), (False, False), True, VOLATILE),
        (("9f3c21aa-77", "01bc99e0-42"), (False, False), False, VOLATILE),
        (("Wed, May 15", "Fri, November 21"), (False, False), True, VOLATILE),
        (("cancel", "change"), (False, False), True, PROMPT_DIFFERS),
        (("cancel", "change"), (False, False), False, OBSERVATION_DIFFERS),
        (("", "reasoning"), (False, True), False, REWRITTEN),
        (None, (False, False), True, PROMPT_DIFFERS),
        (None, (False, True), True, REWRITTEN),
    ],
)
def test_causes(texts: tuple[str, str] | None, is_trained: tuple[bool, bool], is_prompt: bool, expected: str) -> None:
    assert cause_of(texts, is_trained, is_prompt) == expected


@pytest.mark.parametrize(
    ("before", "speaker"),
    [
        ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nI want", "user"),
        ("<|im_start|>system\nBe", "system"),
        ("<|start_header_id|>ipython<|end_header_id|>\n\n", "ipython"),
        ("<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "model"),
        ("<s>[INST] Fix", "user"),
        ("<\uff5cUser\uff5c>Hello", "user"),
        ("plain text", None),
    ],
)
def test_the_speaker_is_read_from_the_template(before: str, speaker: str | None) -> None:
    assert speaker_of(before) == speaker


def test_what_a_user_said_otherwise_is_not_avoidable() -> None:
    differ = ("cancel", "change"), (False, False), True
    assert cause_of(*differ, "<|im_start|>user\nPlease ") == OTHER_SPEAKER
    assert cause_of(*differ, "<|im_start|>system\nToday: ") == PROMPT_DIFFERS
    assert OTHER_SPEAKER not in AVOIDABLE


def test_trees_are_compared_with_one_another(tokenizer) -> None:
    collector = LostCollector(TokenText(tokenizer))
    for tree in named_trees(tokenizer):
        collector.add(tree.name, tree.forest())
    report = collector.result()
    # "clock" and the others hold the same policy, behind a clock or not.
    assert report.num_trees_compared == 4
    assert report.num_avoidable_tokens_between >= num_tokens(tokenizer, POLICY) - 1
    assert {each.tree for each in report.forks_between} == {"between trees"}


def test_only_the_costliest_forks_are_kept_and_all_are_counted(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treewise.report.analysis.lost_sharing.MAX_SHOWN_FORKS", 1)
    collector = LostCollector(TokenText(tokenizer))
    trees = named_trees(tokenizer)
    for tree in trees:
        collector.add(tree.name, tree.forest())
    report = collector.result()
    assert len(report.forks) == 1
    assert report.forks[0].cause == VOLATILE
    assert {each.cause for each in report.causes} >= {VOLATILE, REWRITTEN, SAMPLED}


def test_equal_tokens_that_took_other_experts_are_a_cause_of_their_own() -> None:
    routes = np.zeros((2, 60, 1, 1), dtype=int)
    routes[1, 10] = 1  # the eleventh token alone
    rows = [Trajectory(np.arange(60), routed_experts=own, source=f"r:{i}") for i, own in enumerate(routes)]
    [found], _ = lost_in_tree("tree", Forest.from_trajectories(rows), TokenText(None))
    assert (found.cause, found.depth, found.num_lost_tokens) == (ROUTED, 10, 50)
    assert ROUTED not in AVOIDABLE
