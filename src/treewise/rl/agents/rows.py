"""What is recorded of episodes, in plain JSON values, and the trajectories of a task's episodes."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from treewise.base import features
from treewise.data.render.messages import Message
from treewise.tree.trajectory import Trajectory


class TurnFacts(TypedDict):
    """A turn that a row trains: where it begins and ends in it."""

    call: str
    role: str
    start: int
    end: int
    finish: str
    fork: NotRequired[str]
    constrained: NotRequired[bool]
    reward: NotRequired[float]


class Streams(TypedDict):
    """A row's values of each token."""

    token_ids: list[int]
    loss_weights: list[int]
    sampler_logprobs: list[float]
    draws: list[int]
    policy_versions: NotRequired[list[int]]
    routed_experts: NotRequired[dict[str, Any]]
    token_rewards: NotRequired[list[float]]


class AgentRow(Streams):
    """A row. The last three are of a file of rows, not of an episode's record."""

    turns: list[TurnFacts]
    group: NotRequired[str | int]
    rollout: NotRequired[str]
    reward: NotRequired[float]


class Talk(TypedDict):
    """A call as messages, for reward functions."""

    call: str
    model: str
    messages: list[Message]
    replies: list[Message]


class EpisodeRecord(TypedDict):
    """What an episode came to. talk, metrics: with reward functions."""

    version: int
    reward: float | None
    agent_reward: float | None
    kind: str | None
    failure: str | None
    rows: list[AgentRow]
    account: dict[str, int]
    reasons: dict[str, int]
    refused: dict[str, int]
    ignored: NotRequired[dict[str, int]]
    calls: list[dict[str, object]]
    talk: NotRequired[list[Talk]]
    metrics: NotRequired[dict[str, list[float]]]


def trajectories_of(key: str, records: Sequence[EpisodeRecord], where: str) -> list[Trajectory]:
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


def _experts_of(row: AgentRow, where: str) -> Any:
    if "routed_experts" not in row:
        return None
    return features.encoded_arrays.decoded(row["routed_experts"], "routed_experts", where)
