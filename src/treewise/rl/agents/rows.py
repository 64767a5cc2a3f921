"""Trajectories of the episodes of a task, from the records that their agents left."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treewise.base import features
from treewise.tree.trajectory import Trajectory


def trajectories_of(key: str, records: Sequence[Mapping[str, Any]], where: str) -> list[Trajectory]:
    """The rows of the episodes that have a reward, the draws of each numbered behind those of the one before."""
    rows, first_draw = [], 0
    for number, record in enumerate(records):
        highest = -1
        for row in record["rows"] if record["reward"] is not None else ():
            draws = np.array(row["draws"])
            highest = max(highest, int(draws.max()))
            weights = np.array(row["loss_weights"], dtype=np.float32)
            rows.append(
                Trajectory(
                    row["token_ids"],
                    weights,
                    sampler_logprobs=row["sampler_logprobs"],
                    draws=np.where(draws >= 0, draws + first_draw, -1),
                    policy_versions=row.get("policy_versions"),
                    token_rewards=row.get("token_rewards"),
                    routed_experts=_experts_of(row, where),
                    group=key,
                    reward=record["reward"],
                    rollout=number,
                    source=f"{where}, {key}",
                )
            )
        first_draw += highest + 1
    return rows


def _experts_of(row: Mapping[str, Any], where: str) -> Any:
    if "routed_experts" not in row:
        return None
    return features.encoded_arrays.decoded(row["routed_experts"], "routed_experts", where)
