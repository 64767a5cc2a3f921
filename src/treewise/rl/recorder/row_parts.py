"""A row from the parts of its path: what was written for the policy to see, and what it sampled, draw by draw; and
which sampled tokens rows hold and train.

For trees of rollouts (`branching.rollout_tree`) and for the calls of agents (`agents.recording`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from treewise.base import features


class RowPart(NamedTuple):
    """n tokens that follow one another.

    Parameters:
        token_ids: [n] int32.
        loss_weights: [n].
        sampler_logprobs: [n], 0 where not sampled.
        draws: [n], the number of the draw that made each token; -1 where none did.
        policy_versions: [n], -1 where not sampled; None where nobody counts them.
        routed_experts: [tokens, L, k] int16, of the row from its first token on, as the forward recorded them that
            sampled these tokens; it may go beyond the part.
    """

    token_ids: np.ndarray
    loss_weights: np.ndarray
    sampler_logprobs: np.ndarray
    draws: np.ndarray
    policy_versions: np.ndarray | None = None
    routed_experts: np.ndarray | None = None


class RowStreams(TypedDict):
    """A row's streams, by the names that `Trajectory` has for them. policy_versions: where a part has any.
    routed_experts: of each token, what the forward recorded that was first given it.
    """

    token_ids: np.ndarray
    loss_weights: np.ndarray
    sampler_logprobs: np.ndarray
    draws: np.ndarray
    policy_versions: NotRequired[np.ndarray]
    routed_experts: NotRequired[np.ndarray]


def written_part(token_ids: np.ndarray) -> RowPart:
    """Tokens that nobody sampled."""
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return RowPart(token_ids, zeros, zeros, np.full(len(token_ids), -1))


def row_streams(parts: Sequence[RowPart]) -> RowStreams:
    """The streams of a path of parts. Raises `DataError` where experts were recorded in several shapes."""
    row: RowStreams = {
        "token_ids": np.concatenate([part.token_ids for part in parts]),
        "loss_weights": np.concatenate([part.loss_weights for part in parts]),
        "sampler_logprobs": np.concatenate([part.sampler_logprobs for part in parts]),
        "draws": np.concatenate([part.draws for part in parts]),
    }
    if any(part.policy_versions is not None for part in parts):
        row["policy_versions"] = np.concatenate(
            [
                np.full(len(part.token_ids), -1) if part.policy_versions is None else part.policy_versions
                for part in parts
            ]
        )
    experts, end = None, 0
    for part in parts:
        end += len(part.token_ids)
        if part.routed_experts is not None:
            experts = features.routes.filled(experts, part.routed_experts[:end], len(row["token_ids"]))
    if experts is not None:
        row["routed_experts"] = experts
    return row


class HeldTokens(NamedTuple):
    """Of a draw: [size] bool, of each of its tokens, whether a row holds it and whether one trains it."""

    held: np.ndarray
    trained: np.ndarray


def held_tokens(
    sizes: Mapping[int, int], draws_and_weights: Iterable[tuple[np.ndarray, np.ndarray]]
) -> dict[int, HeldTokens]:
    """What became of the tokens of each draw.

    Parameters:
        sizes: tokens of each draw, by its number. In a row they follow one another, from the first on.
        draws_and_weights: of each row, [n] each.
    """
    found = {draw: HeldTokens(np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)) for draw, size in sizes.items()}
    for draws, weights in draws_and_weights:
        starts: list[int] = np.flatnonzero(np.append(True, draws[1:] != draws[:-1])).tolist()
        for start, end in zip(starts, [*starts[1:], len(draws)], strict=True):
            draw = int(draws[start])
            if draw >= 0:
                own = found[draw]
                own.held[: end - start] = True
                own.trained[: end - start] |= weights[start:end] > 0
    return found
