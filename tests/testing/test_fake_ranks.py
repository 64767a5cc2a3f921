"""64 ranks in one process: their operations end, what was derived is what is entered, and a deadlock is found."""

from unittest import mock

import numpy as np
import pytest

from tests.needs import MESHES
from treewise.distributed.lockstep import guest
from treewise.distributed.placement import CostModel
from treewise.testing.collectives import deadlock
from treewise.testing.fake_ranks import PlacedStep, derived, representatives, save_model, walk
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

NUM_RANKS, MAX_TOKENS = 64, 48
COSTS = CostModel.from_flops(flops_per_token=1e6, flops_per_pair=1e3)
FORMS = {
    "copies": {},
    "shards": {"sharded": True},
    "copies of shards": {"sharded": True, "shard_config": {"dp_replicate_size": 8}},
    "kept whole": {"sharded": True, "shard_config": {"reshard_after_forward": False}},
    "context": {"context_size": 4, "sharded": True},
    "tensor": {"tp_size": 4, "sharded": True},
    "experts": {"ep_size": 8, "sharded": True},
    "tensor and experts": {"tp_size": 2, "ep_size": 8, "sharded": True},
}
ON_MESH = {"tensor", "experts", "tensor and experts"}
QUICK = ("shards", "experts")


def random_trees(num_trees):
    """Of many answers to a prompt: small steps are placed by real plans, which takes longer than all that is tested."""
    rng = np.random.default_rng(0)
    trees = []
    for _ in range(num_trees):
        prompt = rng.integers(3, 16, int(rng.integers(4, 40)))
        answers = [rng.integers(3, 16, int(rng.integers(2, 12))) for _ in range(rng.integers(24, 40))]
        trees.append(Forest.from_trajectories([Trajectory(np.concatenate([prompt, each])) for each in answers]))
    return trees


def placed(settings, num_trees):
    return PlacedStep.place(random_trees(num_trees), settings, num_ranks=NUM_RANKS, max_tokens=MAX_TOKENS, costs=COSTS)


def entered(collectives):
    return [(each.kind, each.group, each.number) for each in collectives]


def marked(names):
    return [pytest.param(each, marks=[MESHES] if each in ON_MESH else []) for each in names]


@pytest.mark.slow  # a process for each rank that is walked, of half a second
@pytest.mark.representatives(*QUICK)
@pytest.mark.parametrize("name", marked(FORMS))
def test_no_rank_waits_forever(name, tmp_path) -> None:
    settings = FORMS[name]
    step = placed(settings, 1 if name in QUICK else NUM_RANKS)  # one tree: some ranks have nothing
    assert (None in step.plans) == (name in QUICK)
    chosen = representatives(step)
    others = [rank for rank in range(NUM_RANKS) if rank not in chosen][:: NUM_RANKS // 2]
    walked = walk(step, save_model(tmp_path, settings), [*chosen, *others])
    all_ranks = derived(step, {rank: walked[rank] for rank in chosen})
    for rank in others:
        assert entered(all_ranks[rank]) == entered(walked[rank].collectives)
    assert deadlock(all_ranks) is None


@pytest.mark.slow
def test_a_rank_that_does_not_merge_its_passes_is_found(tmp_path) -> None:
    settings = FORMS["shards"]
    step = placed(settings, 1)
    astray = next(rank for rank, own in enumerate(step.turns) if own[0][1] is None)  # others have a pass here
    turns_of = guest.turns_of
    own_alone = mock.patch.object(guest, "turns_of", lambda own, all_passes: turns_of(own, [own]))
    folder = save_model(tmp_path, settings)
    all_ranks = derived(step, walk(step, folder, representatives(step)))
    assert deadlock(all_ranks) is None
    all_ranks[astray] = walk(step, folder, [astray], around=lambda rank: own_alone)[astray].collectives
    found = deadlock(all_ranks)
    assert found is not None
    assert f"ank {astray}" in found


def test_a_part_has_the_passes_of_its_plan() -> None:
    step = placed({"sharded": True}, 1)
    turns = {len(own) for own in step.turns}
    assert len(turns) == 1
    for made, own in zip(step.plans, step.turns, strict=True):
        assert sorted(number for _, number in own if number is not None) == list(
            range(len(made.schedule) if made else 0)
        )
