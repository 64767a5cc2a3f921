"""Groups of an agent's episodes: what the loop is given is what the sampler saw, whatever fails or is killed."""

import json
import os
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dates import TEMPLATE
from tests.rl.agents.helpers import TOKENIZER, Speaker
from tests.rl.online.helpers import tiny_policy
from treewise import Forest, TreeEngine
from treewise.base.own_files import sealed, unsealed
from treewise.errors import ConfigError, DataError, SamplerError, TaskError
from treewise.nn.whole_gradients import gradient_error, gradients_of
from treewise.objectives.registry import objective_named
from treewise.rl.agents.collecting import AgentCollector
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.online.collector import GroupRequest, Moment
from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.samplers import TransformersSampler
from treewise.rl.success_book import BookSettings, SuccessBook
from treewise.rl.tasks.agent_task import AgentTask
from treewise.rl.update import own_update

PLAIN = Path(__file__).parent / "plain_agents.py"
TASK = AgentTask([{"question": f"{number}+2?"} for number in range(4)], held_out=0.5)
pytestmark = pytest.mark.xdist_group("test_agents_running")


@contextmanager
def collector_of(agent, *, online=None, task=TASK, ends=None, **changes):
    agent = agent if ":" in agent or " " in agent else f"{PLAIN}:{agent}"
    settings = OnlineSettings(
        **{"max_new_tokens": 64, "chat_template": "chatml", "gather_seconds": 0.0, **(online or {})}
    )
    given = {"episodes": 3, "episode_seconds": 600.0, **changes}
    model = tiny_policy(max_position_embeddings=4096)
    model.generation_config.eos_token_id = ends or model.generation_config.eos_token_id
    collector = AgentCollector(agent, TOKENIZER, model, task, settings, AgentSettings(**given))
    try:
        yield collector
    finally:
        collector.close()


def test_turns_end_with_every_end_of_the_model():
    with collector_of("drawn", ends=[7, TOKENIZER.eos_token_id]) as collector:
        assert collector.chat.end_ids == (TOKENIZER.eos_token_id, 7)


def test_a_date_that_prompts_hold_is_a_fact_of_the_run():
    with collector_of("drawn", online={"chat_template": TEMPLATE, "template_date": "2026-11-27"}) as collector:
        assert collector.facts()["template_date"] == "2026-11-27"
        ids = collector.prompt_ids(TASK.item("train", 0))
        assert "Today is 27 November 2026." in TOKENIZER.decode(ids)
    with collector_of("drawn") as collector:
        assert "template_date" not in collector.facts()


def moment(sampler, journal=None, **changes):
    state = LoopState(SuccessBook(BookSettings()))
    given = {"where": "iteration 3", "state": state, "journal": Journal(journal), "sampler": sampler, "version": 2}
    return Moment(**{**given, **changes})


def requests(count=2, **changes):
    items = [TASK.item("train", index) for index in range(count)]
    return [
        GroupRequest(**{"number": n, "item": item, "key": item.key, "budget": 100, "seed": (7, 3, n), **changes})
        for n, item in enumerate(items)
    ]


def spans_of(groups, num_episodes=3):
    """Every sampled token has one weight, in the row where it was sampled, with its log-prob and version."""
    spans = Counter()
    for group in groups:
        draws = {}
        for row in group.rows:
            assert row.group == group.request.key
            weights = row.loss_weights > 0
            assert (row.policy_versions[weights] == 2).all()
            edges = np.flatnonzero(np.diff(np.concatenate([[0], weights, [0]])))
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                assert len(set(row.draws[start:end])) == 1
                draw = int(row.draws[start])
                assert draws.setdefault(draw, row.rollout) == row.rollout, "a draw of two episodes"
                ids = tuple(row.token_ids.tolist())
                spans[ids[:start], ids[start:end], row.sampler_logprobs[start:end].tobytes()] += 1
        assert group.num_sampled == sum(group.lengths)
        assert len(group.rewards) == len(group.lengths) == num_episodes
        in_rows = sum(int((row.loss_weights > 0).sum()) for row in group.rows)
        assert group.num_sampled == in_rows + group.num_failed + group.num_unfinished
    return spans


def test_groups_are_the_episodes_of_a_task():
    speaker = Speaker()
    with collector_of("right") as collector:
        found = collector.collect(requests(), moment(speaker))
    assert [group.request.number for group in found.groups] == [0, 1]
    spans = spans_of(found.groups)
    assert spans == Counter((prefix, ids, logprobs.tobytes()) for prefix, ids, logprobs in speaker.seen)
    for group in found.groups:
        assert sorted({row.rollout for row in group.rows}) == [0, 1, 2]
        assert all(row.reward == group.rewards[row.rollout] for row in group.rows)
        assert group.trials == 3
        assert group.success == np.mean([reward >= 0.5 for reward in group.rewards])
        assert group.counts["agent_calls"] == 3
        assert TOKENIZER.decode(group.prompt_ids).endswith("assistant\n")
    assert found.tally.num_rollouts == 6
    assert found.seconds["sampling"] > 0
    assert not found.warnings


def test_the_same_requests_give_the_same_groups():
    def rows():
        with collector_of("right") as collector:
            found = collector.collect(requests(), moment(Speaker()))
        return [(row.token_ids.tolist(), row.sampler_logprobs.tolist()) for each in found.groups for row in each.rows]

    assert rows() == rows()


def test_an_episode_that_fails_is_set_aside_and_its_tokens_are_counted():
    agent = f"{PLAIN}:half"
    with collector_of(agent, episodes=4) as collector:
        found = collector.collect(requests(1), moment(Speaker()))
        (group,) = found.groups
    num_failed = group.rewards.count(None)
    assert 0 < num_failed < 4
    assert group.num_failed == sum(n for n, r in zip(group.lengths, group.rewards, strict=True) if r is None) > 0
    assert {row.rollout for row in group.rows} == {n for n, reward in enumerate(group.rewards) if reward is not None}
    assert (found.tally.num_rollouts, found.tally.num_failed) == (4, num_failed)
    assert "ValueError: odd" in found.tally.first
    assert found.warnings[0] == f"{num_failed} of 4 episodes have no reward and are set aside: {num_failed} raised."


def test_a_reward_that_is_none_costs_its_episode_alone(tmp_path):
    """Also where a journal holds one, of a time when it was taken: its episode runs again."""
    task = AgentTask([{"reward": "1e39 if __import__('random').random() < 0.5 else 1.0"}] * 2, held_out=0.5)
    path = tmp_path / "journal.jsonl"
    with collector_of("giving", task=task, episodes=6) as collector:
        asked = [replace(requests(1)[0], item=task.item("train", 0))]
        found = collector.collect(asked, moment(Speaker(), path))
        (group,) = found.groups
        assert set(group.rewards) == {None, 1.0}
        assert found.tally.num_failed == group.rewards.count(None)
        assert found.tally.first.endswith("it returned 1e+39, beyond float32 (3.4e38)")
        entries = [unsealed(line) for line in path.read_bytes().splitlines()]
        for entry in entries:
            record = entry["answers"][0]
            record.update({"reward": 1e39, "failure": None, "kind": None} if record["reward"] is None else {})
        path.write_text("".join(sealed({k: v for k, v in each.items() if k != "checksum"}) + "\n" for each in entries))
        again = Speaker()
        (same,) = collector.collect(asked, moment(again, path)).groups
    assert same.rewards == group.rewards
    assert len(again.seen) == group.rewards.count(None)


def test_a_run_may_end_with_the_first_failure():
    with (
        collector_of("raising", online={"on_reward_error": "raise"}) as collector,
        pytest.raises(TaskError, match="ValueError: no idea"),
    ):
        collector.collect(requests(), moment(Speaker()))


def test_held_out_tasks_are_run_once_each():
    with collector_of("right", online={"eval_temperature": 0.0}) as collector:
        items = [TASK.item("held_out", index) for index in range(2)]
        held_out, tally = collector.evaluate(items, moment(Speaker(["Four.", "Five!!"])), 9)
    assert [each.key for each in held_out] == ["tasks/row 2", "tasks/row 3"]
    assert sorted(each.reward for each in held_out) == [5.0, 6.0]
    assert all("+2?" in each.prompt and each.num_tokens for each in held_out)
    assert tally.num_rollouts == 2


def judged(prompts, completions, question, calls, agent_reward, log_metric, **_):
    assert [each[0]["content"] for each in prompts] == question
    assert all(own[-1]["replies"][-1] == done[0] for own, done in zip(calls, completions, strict=True))
    assert agent_reward == [None] * len(prompts)
    log_metric("length", 3.0)
    return [None if len(done[0]["content"]) == 5 else float(len(done[0]["content"])) for done in completions]


def test_reward_functions_see_the_calls(tmp_path):
    task = AgentTask(TASK.rows, [judged], held_out=0.5)
    path = tmp_path / "journal.jsonl"
    for num_seen in (4, 0):
        speaker = Speaker(["Three", "3.", "Four.", "Yes"])
        with collector_of("nothing", task=task, episodes=2) as collector:
            found = collector.collect(requests(), moment(speaker, path))
        assert len(speaker.seen) == num_seen
        rewards = [reward for group in found.groups for reward in group.rewards]
        assert sorted(each for each in rewards if each is not None) == [2.0, 3.0]
        assert (found.tally.num_rollouts, found.tally.num_failed) == (4, 2)
        assert found.tally.metrics["length"] == [3.0]
        assert "None (not applicable)" in found.tally.first


def test_rewards_of_calls_are_at_their_last_tokens():
    with collector_of("right") as collector:
        (group,) = collector.collect(requests(1), moment(Speaker(["Three.", "4."]))).groups
    for row in group.rows:
        (end,) = ends_of(row)
        assert row.token_rewards[end - 1] == 0.25
        assert row.token_rewards.sum() == 0.25


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.representatives("rewriting-3-0-token_mean", "hostile-5-2-rollout_mean")
@pytest.mark.parametrize("normalization", ["token_mean", "rollout_mean"])
@pytest.mark.parametrize(("agent", "num_episodes", "num_failed"), [("rewriting", 3, 0), ("hostile", 5, 2)])
def test_training_on_an_agents_calls_is_a_plain_loop_over_them(agent, num_episodes, num_failed, normalization):
    """An agent that rewrites its history in every way, and one that also lies about its key and dies: each call's
    prompt and reply as the sampler saw them, with the advantage of its episode; whole and at a budget."""
    model = tiny_policy(max_position_embeddings=4096)
    seen, sampler = [], TransformersSampler(model)

    class Watched:
        def sample(self, requests):
            found = sampler.sample(requests)
            seen.extend(
                (request.prefix_ids, tuple(each.token_ids.tolist()), each.logprobs.tobytes())
                for request, (each,) in zip(requests, found, strict=True)
            )
            return found

    with collector_of(agent, online={"max_new_tokens": 9}, episodes=num_episodes) as collector:
        (group,) = collector.collect(requests(1), moment(Watched())).groups
    spans = spans_of([group], num_episodes)
    others = Counter(seen) - spans
    assert spans + others == Counter(seen)
    assert group.rewards.count(None) == num_failed
    num_others = sum(len(ids) * count for (_, ids, _), count in others.items())
    assert num_others == group.num_failed + group.counts["context_tokens"]
    assert others.total() == (3 if agent == "rewriting" else num_failed * 18)  # of the judge, or of those that died
    assert group.counts["agent_calls"] == num_episodes * (16 if agent == "rewriting" else 18)
    assert group.counts["agent_forks"] >= num_episodes * (3 if agent == "rewriting" else 9)
    rewards = np.array([np.nan if reward is None else reward for reward in group.rewards])
    lengths = [length for length, reward in zip(group.lengths, group.rewards, strict=True) if reward is not None]
    advantages = (rewards - np.nanmean(rewards)) / (np.nanstd(rewards, ddof=1) + 1e-4)
    rollout_of = {tuple(row.token_ids.tolist()[:end]): row.rollout for row in group.rows for end in ends_of(row)}
    is_by_rollout = normalization == "rollout_mean"
    weights = [length * len(lengths) if is_by_rollout else sum(lengths) for length in group.lengths]
    model.zero_grad()
    for prefix, ids, _ in spans.elements():
        logits = model(torch.tensor([[*prefix, *ids]])).logits[0, len(prefix) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        rollout = rollout_of[prefix + ids]
        (-logprobs.sum() * advantages[rollout] / weights[rollout]).backward()
    expected = gradients_of(model)
    objective = objective_named("grpo", weighting="per_rollout", normalization=normalization)
    for budget in (None, 64):
        engine = TreeEngine(model, max_tokens=budget)
        (rows,) = own_update([group.rows], objective, engine).trees
        model.zero_grad()
        engine.step(Forest.from_trajectories(rows), objective)
        assert gradient_error(gradients_of(model), expected) < 1e-5


def ends_of(row):
    weights = row.loss_weights > 0
    return np.flatnonzero(np.diff(np.concatenate([weights, [0]]).astype(int)) < 0) + 1


# -- journal ----------------------------------------------------------------------------------------------------------


def shown(found):
    names = ("rewards", "lengths", "num_sampled", "num_failed", "counts", "prompt_ids", "success", "trials")
    rows = [
        [(r.token_ids.tolist(), r.sampler_logprobs.tolist(), r.draws.tolist(), r.rollout, r.reward) for r in each.rows]
        for each in found.groups
    ]
    return [[getattr(each, name) for name in names] for each in found.groups], rows


def test_what_had_ended_is_not_run_again(tmp_path):
    """The journal is cut after some episodes, as a kill leaves it."""
    path = tmp_path / "journal.jsonl"
    with collector_of("half", episodes=4) as collector:
        first = Speaker()
        whole = shown(collector.collect(requests(), moment(first, path)))
        again = Speaker()
        assert shown(collector.collect(requests(), moment(again, path))) == whole
        assert not again.seen
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) == 8
        path.write_bytes(b"".join(lines[:5]) + lines[5][:40])
        rest = Speaker()
        found = shown(collector.collect(requests(), moment(rest, path)))
        assert len(rest.seen) == 3
        assert found == whole
        assert len(path.read_bytes().splitlines()) == 8


def test_another_agent_is_another_question(tmp_path):
    path = tmp_path / "journal.jsonl"
    for agent, num_seen in (("right", 6), ("not_asynchronous", 6)):
        speaker = Speaker()
        with collector_of(agent) as collector:
            collector.collect(requests(), moment(speaker, path))
        assert len(speaker.seen) == num_seen


def test_failures_can_be_forgotten(tmp_path):
    """As the loop does where too many episodes fail."""
    path = tmp_path / "journal.jsonl"
    with collector_of("raising") as collector:
        now = moment(Speaker(), path)
        collector.collect(requests(), now)
        now.journal.forget_from_mark()
        assert not path.read_bytes()


# -- ends -------------------------------------------------------------------------------------------------------------


class StoppedInTestError(Exception):
    pass


def test_whoever_watches_may_end_the_collecting():
    def progress(num_tokens):
        raise StoppedInTestError

    with collector_of("hanging") as collector:
        with pytest.raises(StoppedInTestError):
            collector.collect(requests(), moment(Speaker(), progress=progress))
        assert not collector.episodes.all_open


def test_a_sampler_that_fails_ends_the_run():
    with collector_of("right") as collector, pytest.raises(SamplerError, match="out of memory"):
        collector.collect(requests(), moment(Speaker([RuntimeError("out of memory")] * 6)))


def test_two_may_collect_at_once():
    """As with `max_staleness`: each with a sampler and a version of its own."""
    from concurrent.futures import ThreadPoolExecutor

    speakers = [Speaker(), Speaker()]
    with collector_of("right") as collector, ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(collector.collect, requests(), moment(each)) for each in speakers]
        for speaker, future in zip(speakers, futures, strict=True):
            spans = spans_of(future.result().groups)
            assert spans == Counter((prefix, ids, logprobs.tobytes()) for prefix, ids, logprobs in speaker.seen)


@pytest.mark.parametrize(
    ("online", "words"),
    [
        ({"branching": "random"}, "branching is given with an agent"),
        ({"num_candidates": 4}, "num_candidates"),
        ({"max_length": 100_000}, "beyond the 4,096 positions"),
    ],
)
def test_settings_without_a_meaning_are_refused(online, words):
    with pytest.raises(ConfigError, match=words), collector_of("right", online=online):
        pass


def test_a_budget_decides_how_many_episodes():
    settings = AgentSettings(episodes=None)
    assert settings.num_episodes(1000, None) == 8
    assert settings.num_episodes(1000, 99.0) == 10
    assert settings.num_episodes(10, 99.0) == 2
    assert AgentSettings().num_episodes(10, 99.0) == 8


def test_tasks_are_rows_as_they_stand():
    task = AgentTask([{"a": n, "prompt": "x"} for n in range(10)], name="t")
    assert task.num_items("train") == 9
    assert task.item("held_out", 0).extra == {"a": 9, "prompt": "x"}
    assert json.loads(task.item("train", 10).prompt) == {"a": 1, "prompt": "x"}
    with pytest.raises(DataError, match="no row of 1"):
        AgentTask([{}], held_out=0.9)


def test_a_command_is_an_agent_too():
    with collector_of(f"{sys.executable} {PLAIN}") as collector:
        found = collector.collect(requests(1), moment(Speaker()))
    assert found.groups[0].rewards == [0.5] * 3
    assert "OPENAI_API_KEY" not in os.environ


# -- progress ---------------------------------------------------------------------------------------------------------


def test_progress_counts_episodes(tmp_path):
    """What is recalled counts, too; each completion is told, so that whoever watches may end the collecting."""
    path, told = tmp_path / "journal.jsonl", []
    with collector_of("right") as collector:
        assert collector.expected_size(2, 100, LoopState(SuccessBook(BookSettings()))) == (6, "episode")
        for _ in range(2):
            collector.collect(requests(), moment(Speaker(), path, progress=told.append))
    assert [sum(told[:-6]), told[-6:]] == [6, [1] * 6]
    assert told.count(0) == 6
    with collector_of("right", episodes=None) as collector:
        assert collector.expected_size(2, 100, LoopState(SuccessBook(BookSettings()))) == (16, "episode")


def test_held_out_episodes_that_fail_are_named(caplog):
    with collector_of("raising") as collector:
        collector.evaluate([TASK.item("held_out", 0)], moment(Speaker(), where="evaluation"), 9)
    assert "evaluation: 1 of 1 episodes have no reward and are set aside: 1 raised." in caplog.text
    assert "ValueError: no idea" in caplog.text
