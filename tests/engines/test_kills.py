"""Runs on real vLLM servers that are killed while rollouts are sampled, at calls that a seed draws: the trainer, the
server, both, one of two servers; in turns with training, and ahead of it.
"""

import json
import random

import pytest

from tests.engines.runs import MOST_GAP, assert_the_same, at_calls, gaps, policy, run, run_until_killed
from tests.rl.online.test_ahead_on_servers import versions_of
from treewise.rl.online.journal import journals

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")]

SEED = 29


def restart(server):
    """It begins with other weights than it was given last."""

    def happen():
        server.kill()
        server.start()

    return happen


def test_a_trainer_that_is_killed_again_and_again_goes_on(servers, undisturbed, tmp_path):
    (whole, num_calls), draw = undisturbed, random.Random(SEED)
    kills = [run_until_killed(tmp_path / "run", servers[0], call=draw.randint(2, num_calls // 3)) for _ in range(3)]
    assert kills[0]
    with at_calls({}) as calls:
        trainer = run(tmp_path / "run", servers[0], resume=True)
    assert len(calls) < num_calls  # the others are in checkpoints and journals
    assert_the_same(trainer, whole)


def test_a_server_that_is_killed_twice_and_comes_back(servers, undisturbed, tmp_path):
    """The run waits, and hands the weights over again."""
    (whole, num_calls), draw = undisturbed, random.Random(SEED)
    first, second = sorted(draw.sample(range(2, num_calls), 2))
    with at_calls({first: restart(servers[0]), second: restart(servers[0])}) as calls:
        trainer = run(tmp_path / "run", servers[0])
    assert len(calls) > num_calls  # what was under way is asked for again
    assert_the_same(trainer, whole)
    assert max(gaps(trainer)) < MOST_GAP


def test_both_are_killed(servers, undisturbed, tmp_path):
    (whole, num_calls), draw = undisturbed, random.Random(SEED)
    call = draw.randint(num_calls // 2, num_calls - 1)
    assert run_until_killed(tmp_path / "run", servers[0], call=call, kills=servers[:1])
    restart(servers[0])()
    trainer = run(tmp_path / "run", servers[0], resume=True)  # waits for it
    assert_the_same(trainer, whole)
    assert max(gaps(trainer)) < MOST_GAP


def test_one_of_two_servers_dies_and_comes_back(servers, undisturbed, tmp_path):
    (whole, num_calls), draw = undisturbed, random.Random(SEED)
    before = servers[0].num_answered()
    with at_calls({draw.randint(2, num_calls // 4): restart(servers[1])}, servers[1]):
        trainer = run(tmp_path / "run", *servers)
    assert_the_same(trainer, whole)
    assert max(gaps(trainer)) < MOST_GAP
    assert servers[0].num_answered() > before  # the one that lived
    assert servers[1].num_answered() > 0  # since it came back


# -- ahead ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ahead(servers, tmp_path_factory):
    with at_calls({}) as calls:
        trainer = run(tmp_path_factory.mktemp("ahead") / "run", servers[0], iterations=4, max_staleness=1)
    return trainer, len(calls)


def test_a_run_samples_ahead_and_is_killed_as_is_its_server(servers, ahead, tmp_path):
    (whole, num_calls), draw = ahead, random.Random(SEED)
    assert versions_of(whole, policy) == [{0}, {0}, {1}, {2}]
    changes = {"iterations": 4, "max_staleness": 1}
    assert run_until_killed(tmp_path / "run", servers[0], call=draw.randint(2, num_calls // 2), **changes)
    call = draw.randint(2, num_calls // 4)
    with at_calls({call: restart(servers[0])}) as calls:
        trainer = run(tmp_path / "run", servers[0], resume=True, **changes)
    assert len(calls) > call
    assert_the_same(trainer, whole)


def test_a_run_that_is_two_ahead_is_killed(servers, ahead, tmp_path):
    """Which version samples depends on time; it is recorded, bounded, and what the journal holds is kept."""
    draw, changes = random.Random(SEED), {"iterations": 5, "max_staleness": 2}
    call = draw.randint(ahead[1] // 2, ahead[1] - 1)
    assert run_until_killed(tmp_path / "run", servers[0], call=call, **changes)
    lines = [json.loads(line) for path in journals(tmp_path / "run") for line in path.read_text().splitlines()]
    named = [each for line in lines for each in zip(line["names"], line["answers"], strict=True)]
    kept = [answer["token_ids"] for name, answer in named if name.startswith("sample")]
    with at_calls({}) as calls:
        trainer = run(tmp_path / "run", servers[0], resume=True, **changes)
    assert kept
    assert len(calls) > 0
    for iteration, versions in enumerate(versions_of(trainer, policy)):
        assert versions <= set(range(iteration - 2, iteration + 1))
