"""Continuations within the loop's limits, through turns of an environment, and from any earlier token."""

import numpy as np
import pytest
import torch

from tests.rl.online.helpers import TOKENIZER, new_trainer, tiny_policy
from treewise import Trajectory, TreeEngine
from treewise.rl.branching import Branch, RolloutTree
from treewise.rl.online.report import few_recorded
from treewise.rl.online.rollout import Continuation, Limits, OneTurn, start
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.samplers import Completion, SampleRequest, TransformersSampler
from treewise.rl.tasks import Calls, EnvironmentTask, GuessNumber, SumTask, TaskItem

END = TOKENIZER.eos_token_id
LIMITS = Limits(max_new_tokens=6, max_length=100, stop_ids=(END,))


def completed(ids, finish):
    return Completion(np.array(ids, dtype=np.int32), np.full(len(ids), -1, dtype=np.float32), finish)


def single_turn(limits=LIMITS, **branch):
    tree = RolloutTree([1, 2, 3])
    conversation = OneTurn([1, 2, 3], SumTask(), SumTask().item("train", 0), TOKENIZER, 3)
    return Continuation(tree, Branch(**branch), conversation, limits, (0,))


def opened(each):
    """A continuation whose environment has done what is waited for."""
    while each.wait is not None:
        each.wait()
        each.go_on()
    return each


def test_a_stop_and_a_limit_end_a_rollout_and_a_segment_does_not():
    stopped = single_turn()
    stopped.take(completed([5, END], "stop"))
    assert (stopped.node().finish, stopped.num_drawn) == ("stop", 2)
    full = single_turn()
    assert full.request(SampleRequest((0,))).max_new_tokens == 6
    full.take(completed([5] * 6, "length"))
    assert full.node().finish == "length"
    assert full.node().token_ids.tolist() == [5] * 6  # and no end, which was not sampled
    segment = single_turn(max_tokens=4)
    assert segment.request(SampleRequest((0,))).max_new_tokens == 4
    segment.take(completed([5] * 4, "length"))
    assert segment.is_finished
    assert segment.node().finish is None
    at_both = single_turn(max_tokens=6)
    at_both.take(completed([5] * 6, "length"))
    assert at_both.node().finish == "length"
    narrow = single_turn(Limits(max_new_tokens=50, max_length=8))
    assert narrow.request(SampleRequest((0,))).max_new_tokens == 5


@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_k": 3}, {"top_p": 0.4}, {"top_k": 5, "top_p": 0.6}, {"temperature": 0.6, "top_k": 3}],
    ids=str,
)
def test_log_probs_of_a_node_are_those_before_top_k_and_top_p(cuts):
    """The rule of `samplers.protocol`: what the engine computes at the same temperature."""
    model = tiny_policy(initializer_range=0.3)
    asked = {"temperature": 1.0, "want_entropy": True, "num_top": 4, **cuts}
    request = SampleRequest((1, 2, 3), 1, 6, seed=1, **asked)
    ((completion,),) = TransformersSampler(model).sample([request])
    each = single_turn()
    each.take(completion)
    node, ids = each.node(), [1, 2, 3, *completion.token_ids.tolist()]
    assert node.token_ids.tolist() == ids[3:]
    engine = TreeEngine(model, temperature=request.temperature)
    (scored,) = engine.scored([Trajectory(ids)], all_tokens=True)
    np.testing.assert_allclose(node.logprobs, scored.old_logprobs[3:], atol=1e-5)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, 2:-1] / request.temperature
    table = torch.log_softmax(logits, -1)
    np.testing.assert_allclose(node.entropies, torch.special.entr(table.exp()).sum(-1), atol=1e-4)
    is_left = node.top_logprobs > -np.inf
    np.testing.assert_allclose(
        node.top_logprobs[is_left],
        table.gather(1, torch.tensor(node.top_ids, dtype=torch.long)).numpy()[is_left],
        atol=1e-5,
    )
    if request.top_k:
        assert all(token in top[left] for token, top, left in zip(node.token_ids, node.top_ids, is_left, strict=True))
        mass = np.where(is_left, np.exp(node.top_logprobs), 0).sum(1)
        assert (mass < 0.99).all()  # under the distribution that was drawn from it would be 1


class Own:
    """A task of turns that is not an `EnvironmentTask`."""

    name, max_turns, text_tool = "own", 3, "guess"

    def num_items(self, split):
        return None

    def item(self, split, index):
        return TaskItem(f"own/{index}", ({"role": "user", "content": "Go."},), {"seed": index})

    def environment(self):
        return GuessNumber(high=4)


@pytest.fixture(params=["EnvironmentTask", "own"])
def episode(request):
    factory = Own().environment
    task = Own() if request.param == "own" else EnvironmentTask(factory, text_tool="guess", max_turns=3)
    return start(task, [task.item("train", 0)], ChatTokens(TOKENIZER, "chatml"), Calls())[0]


def test_observations_are_recorded_with_weight_0_and_turns_end_after_them(episode):
    tree = RolloutTree(episode.token_ids)
    wrong = [*TOKENIZER.encode("none", add_special_tokens=False), END]
    each = opened(Continuation(tree, Branch(), episode.branch(len(episode.token_ids)), Limits(99, 999, (END,)), (0,)))
    for _ in range(3):
        assert not each.is_finished
        assert list(each.request(SampleRequest((0,))).prefix_ids) == each.conversation.token_ids
        each.take(completed(wrong, "stop"))
        opened(each)
    node = each.node()
    assert (node.finish, len(node.turn_ends), node.num_sampled) == ("max_turns", 3, 3 * len(wrong))
    first = slice(len(wrong), int(node.turn_ends[0]))
    assert not node.is_sampled[first].any()
    assert "not a number" in TOKENIZER.decode(node.token_ids[first].tolist())


def test_an_observation_beyond_max_length_is_left_out_and_ends_the_rollout(episode):
    tree = RolloutTree(episode.token_ids)
    wrong = [*TOKENIZER.encode("none", add_special_tokens=False), END]
    limits = Limits(99, len(episode.token_ids) + len(wrong) + 3, (END,))
    each = opened(Continuation(tree, Branch(), episode.branch(len(episode.token_ids)), limits, (0,)))
    each.take(completed(wrong, "stop"))
    opened(each)
    node = each.node()
    assert (node.finish, node.token_ids.tolist(), node.turn_ends.tolist()) == ("length", wrong, [len(wrong)])
    index = tree.add(node)
    copy = each.conversation.branch(len(tree.prefix_ids(index, 2)))
    again = opened(Continuation(tree, Branch(index, 2), copy, limits, (0,)))
    again.take(completed(wrong, "stop"))
    assert opened(again).node().finish == "length"
    assert len(tree.prefix_ids(index, 2)) + len(again.node()) <= limits.max_length


def test_a_branch_within_a_turn_continues_the_turn(episode):
    tree = RolloutTree(episode.token_ids)
    wrong = [*TOKENIZER.encode("none", add_special_tokens=False), END]
    limits = Limits(99, 999, (END,))
    whole = opened(Continuation(tree, Branch(), episode.branch(len(episode.token_ids)), limits, (0,)))
    for _ in range(3):
        whole.take(completed(wrong, "stop"))
        opened(whole)
    index = tree.add(whole.node())
    for position in (2, int(whole.node().turn_ends[0]), int(whole.node().turn_ends[0]) + 2):
        kept = tree.prefix_ids(index, position).tolist()
        copy = whole.conversation.branch(len(kept))
        assert copy.token_ids == kept
        again = opened(Continuation(tree, Branch(index, position), copy, limits, (0,)))
        while not again.is_finished:
            again.take(completed(wrong, "stop"))
            opened(again)
        assert again.node().turn_ends[-1] == len(again.node())
        assert copy.episode.num_turns == 3


@pytest.mark.parametrize("branching", ["turns", "segments", "random"])
def test_an_environment_trains(branching, tmp_path):
    own = {"turns": {"roots": 1}, "segments": {"segment_tokens": 3, "width": 4, "first": 2}, "random": {}}
    task = EnvironmentTask(lambda: GuessNumber(high=4), text_tool="guess", max_turns=2, name="guess")
    trainer = new_trainer(
        tmp_path / "run",
        task,
        iterations=1,
        eval_every=1,
        tokens_per_iteration=96,
        max_new_tokens=8 if branching == "segments" else 16,
        branching=branching,
        branching_settings=own[branching],
    )
    logs = trainer.train()
    assert logs["sampled_tokens"] == logs["recorded_tokens"] + logs["unfinished_tokens"] >= 96
    assert logs["unfinished_tokens"] == 0
    assert logs["logprob_gap"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("longest", [40, 90])
def test_segments_finish_what_they_began(longest, tmp_path):
    """Of a policy whose rollouts seldom stop: 100 tokens for each tree, whose width would take several times that."""
    own = {"segment_tokens": 8, "width": 16, "first": 8}
    trainer = new_trainer(
        tmp_path / "run",
        iterations=1,
        eval_every=0,
        tokens_per_iteration=200,
        max_new_tokens=longest,
        branching="segments",
        branching_settings=own,
    )
    logs = trainer.train()
    assert logs["sampled_tokens"] == logs["recorded_tokens"] >= 200
    assert logs["sampled_tokens"] < 200 + 2 * longest  # a rollout of each tree may pass its budget


def test_a_run_warns_where_less_than_half_is_recorded():
    few = {"sampled": 1208, "candidate": 0, "recorded": 40, "unfinished": 1160, "failed": 8}
    assert "40 of 1,208 generated tokens are recorded (8 of rollouts without a reward, 1,160" in few_recorded(few)
    assert few_recorded({**few, "sampled": 80}) is None
