"""The generated trees: the same at every call, and of the ratios that they stand for."""

import numpy as np
import pytest

from treewise.bench import KINDS, make
from treewise.errors import ConfigError
from treewise.tree.forest import Forest


@pytest.mark.parametrize("name", KINDS)
def test_a_workload_is_the_same_at_every_call(name: str) -> None:
    first, second = make(name, "tiny", 64), make(name, "tiny", 64)
    assert [item.token_ids.tolist() for item in first.trajectories] == [
        item.token_ids.tolist() for item in second.trajectories
    ]
    assert all(item.num_trained_tokens for item in first.trajectories)


@pytest.mark.parametrize("size", ["cpu", "full"])
def test_ratios_are_those_of_the_names(size: str) -> None:
    forests = {name: forest_of(name, size) for name in KINDS}
    assert forests["no-sharing"].share_ratio == 1
    assert forests["ratio-6.5"].share_ratio == pytest.approx(6.5, abs=0.05)
    assert forests["164k-83k"].share_ratio == pytest.approx(164 / 83, abs=0.01)
    assert forests["turns-40"].num_trajectories == 40
    assert forests["turns-100"].num_trajectories == 100
    search = forests["search"]
    assert search.leaf_ratio < search.share_ratio  # states on the way to others are contained in them


def test_full_sizes_are_those_of_the_papers() -> None:
    large, tau = forest_of("164k-83k", "full"), forest_of("tau2", "full")
    assert (large.num_flat_tokens, round(large.num_tokens, -3)) == (164_000, 83_000)
    assert 14_000 < tau.path_lengths.max() <= 16_384
    assert 9 < tau.share_ratio < 10.5
    prompt = make("grpo", "full", 1000).trajectories[0]
    assert np.flatnonzero(prompt.loss_weights)[0] == 512


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="workload 'tree' is unknown; choose one of grpo"):
        make("tree", "cpu", 64)
    with pytest.raises(ConfigError, match="size 'huge'"):
        make("grpo", "huge", 64)


def forest_of(name: str, size: str) -> Forest:
    return Forest.from_trajectories(make(name, size, 8192).trajectories)
