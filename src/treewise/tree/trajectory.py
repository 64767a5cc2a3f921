"""A trajectory: one root-to-leaf token sequence with its per-token streams, validated at construction.

A trajectory is what a flat trainer would train on, and all that users bring. Streams have one value per token and
align with `token_ids`; the value at position 0 of a stream about predictions (weights, log-probs) has no meaning,
because nothing predicts a first token.

`STREAMS` is the one list of them, read from the declarations in `Trajectory`. Parsing, checks, storage, content hashes,
quarantined records and forests all follow it, so a new stream is one line.
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike

from treewise.base import features
from treewise.errors import DataError, num
from treewise.tree import checks
from treewise.tree.images import ImageSpan, check_spans


@dataclass(frozen=True, slots=True)
class Stream:
    """A per-token stream of a `Trajectory`: takes anything like an array, and is an array or None.

    Parameters:
        dtype: of the values.
        is_scalar_allowed: one number may stand for all tokens of a trajectory or node.
        is_logprob: natural logarithms of probabilities of the tokens; in data files null where a token is not trained.
        is_integer: whole numbers, which float32 holds up to 2^24.
        has_candidates: k values for each token ([n, k]) instead of one ([n]).
        is_routes: k experts for each token in each of L layers ([n, L, k]), see `treewise.tree.routes`.
        fill: value of a missing candidate, where trajectories with fewer are put beside those with more.
        other_names: names of the same thing in other libraries, which are errors in data files.
    """

    dtype: Any = np.float32
    is_scalar_allowed: bool = False
    is_logprob: bool = False
    is_integer: bool = False
    has_candidates: bool = False
    is_routes: bool = False
    fill: float = 0.0
    other_names: tuple[str, ...] = ()
    name: str = field(default="", init=False)

    def checked(self, values: ArrayLike, length: int, location: str) -> np.ndarray:
        """[length], [length, k] or [length, L, k] values of `dtype`. Raises `DataError`."""
        if self.is_routes:
            experts: np.ndarray = features.routes.checked_experts(values, self.name, length, location)
            return experts
        if self.has_candidates:
            found: np.ndarray = features.teachers.checked_candidates(values, self.name, length, self.dtype, location)
            return found
        numbers = checks.numbers(values, self.name, length, location, is_scalar_allowed=self.is_scalar_allowed)
        if self.is_integer:
            checks.whole_numbers(numbers, self.name, location)
        return numbers

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    @overload
    def __get__(self, instance: None, owner: type) -> None: ...

    @overload
    def __get__(self, instance: object, owner: type) -> np.ndarray | None: ...

    def __get__(self, instance: object, owner: type) -> np.ndarray | None:
        return None  # the default of the field; without `__set__` at run time an instance's own value comes first

    if TYPE_CHECKING:

        def __set__(self, instance: object, value: ArrayLike | None) -> None: ...


class _LossWeights(Stream):
    """The stream that every trajectory has."""

    @overload
    def __get__(self, instance: None, owner: type) -> None: ...

    @overload
    def __get__(self, instance: object, owner: type) -> np.ndarray: ...

    def __get__(self, instance: object, owner: type) -> np.ndarray | None:
        return None


class _TokenIds:
    """The sequence itself: takes anything like an array, and is an array."""

    def __get__(self, instance: object, owner: type) -> np.ndarray:
        raise AttributeError("token_ids")  # no default: the argument is required

    if TYPE_CHECKING:

        def __set__(self, instance: object, value: ArrayLike) -> None: ...


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One token sequence and what is trained on it.

    Every stream has one value per token (teacher streams: one row, routes: one table). `token_ids` and `teacher_ids`
    become int32, `routed_experts` int16, every other stream float32.

    Parameters:
        token_ids: non-negative integers, at least two.
        loss_weights: non-negative; 1 for every token but the first where not given. Zero means context.
        advantages: one per token, or one number for all tokens.
        old_logprobs: log-probs of the tokens under the policy before the update (natural logarithm).
        ref_logprobs: log-probs of the tokens under a reference policy.
        group: trajectories of one group are compared with one another (the samples of one prompt).
        reward: one number for the whole trajectory.
        rollout: trajectories cut from one rollout (compaction, sub-agents) share this id.
        source: where it came from, for error messages (`rollouts.jsonl:17`).
        sampler_logprobs: log-probs of the tokens as the engine that sampled them reported them, after the temperature
            and before top-k and top-p. They differ from `old_logprobs` by that engine's own rounding and kernels, and
            by the updates since.
        teacher_ids: [n, k], candidates of a teacher for each position; row `t` is about token `t`, like log-probs.
        teacher_logprobs: [n, k], the teacher's log-probs of these candidates; `-inf` marks an unused entry.
        draws: which draw of the sampler made each token, as integers; negative where none did (a prompt). Rollouts of
            one group that hold the same number at a token had it drawn once, for all of them; so a value of a tree's
            part is a mean over draws. Where not given, every rollout was drawn on its own. Taken by credit on trees.
        policy_versions: how many iterations the policy that sampled each token had been trained for, as integers;
            negative where none did. No loss reads them: `sampler_logprobs` are what that policy gave.
        routed_experts: [n, L, k], the k experts that the sampler's mixture chose for each token in each of its L layers
            with a router. All layers may be given, where those without one hold -1. A token whose experts were not
            recorded holds -1, too. Row `t` is of the forward that token `t` was an input of. The last token had none
            while it was sampled, so n - 1 rows will do. Replayed when it is trained (`treewise.nn.routing`).
        token_rewards: rewards of parts of the trajectory, beside `reward`: each at a token of its part, as a call or a
            turn; 0 elsewhere. Taken by `advantages="turns"`.
        rollout_weight: the loss weight of the whole rollout, all its trajectories together. Needed only where the
            trajectories of one rollout are spread over several forests; `treewise.advantages` fills it.
        images: the images that it shows, each with the tokens that stand for it, in order. Without `loss_weights` these
            tokens have weight 0.

    Raises:
        DataError: an empty or non-integer sequence, a negative id, no trained token at all, or images that overlap. A
            stream of another length, or with a value that is not finite. A negative weight, or one on the first token.
            Teacher streams that do not fit one another, or experts that no router can have chosen.
    """

    token_ids: _TokenIds = _TokenIds()
    loss_weights: _LossWeights = _LossWeights(
        other_names=("loss_mask", "mask", "sampled", "sampled_mask", "labels"),
    )
    advantages: Stream = Stream(is_scalar_allowed=True, other_names=("advantage",))
    old_logprobs: Stream = Stream(is_logprob=True, other_names=("old_log_probs",))
    ref_logprobs: Stream = Stream(is_logprob=True, other_names=("ref_log_prob",))
    group: Hashable = None
    reward: float | None = None
    rollout: Hashable = None
    source: str = ""
    sampler_logprobs: Stream = Stream(
        is_logprob=True, other_names=("logprobs", "inference_logprobs", "rollout_log_probs")
    )
    teacher_ids: Stream = Stream(np.int32, has_candidates=True)
    teacher_logprobs: Stream = Stream(has_candidates=True, fill=-np.inf)
    rollout_weight: float | None = None
    images: tuple[ImageSpan, ...] = ()
    draws: Stream = Stream(is_integer=True)
    policy_versions: Stream = Stream(is_integer=True)
    routed_experts: Stream = Stream(
        np.int16, is_routes=True, other_names=("rollout_routed_experts", "rollout_expert_indices", "expert_indices")
    )
    token_rewards: Stream = Stream()

    def __repr__(self) -> str:
        labels = {"group": self.group, "reward": self.reward, "rollout": self.rollout, "source": self.source or None}
        streams = [name for name in self.streams if name != "loss_weights"]
        parts = [f"{len(self.token_ids)} tokens", f"{int((self.loss_weights > 0).sum())} trained", *streams]
        parts += [f"{name}={value!r}" for name, value in labels.items() if value is not None]
        parts += [num(len(self.images), "image")] if self.images else []
        return f"Trajectory({', '.join(parts)})"

    def __post_init__(self) -> None:
        location = self.source or "trajectory"
        values = vars(self)
        ids = values["token_ids"] = checks.checked_ids(self.token_ids, location)
        if len(ids) == 1:
            raise DataError(f"{location}: one token only, so no token is predicted; a trajectory needs at least two.")
        if self.images:
            values["images"] = check_spans(self.images, len(ids), location)
        if values["loss_weights"] is None:
            weights = values["loss_weights"] = np.concatenate([[0], np.ones(len(ids) - 1)])
            for image in self.images:
                weights[image.start : image.end] = 0
        for name, stream in STREAMS.items():
            if values[name] is not None:
                values[name] = stream.checked(values[name], len(ids), location)
        checks.loss_weights(self.loss_weights, location)
        if not self.loss_weights.any():
            raise DataError(
                f"{location}: no trained token (all {len(ids)} loss weights are 0); drop it or weight its answers."
            )
        if self.teacher_ids is not None or self.teacher_logprobs is not None:
            features.teachers.check_teacher(self.teacher_ids, self.teacher_logprobs, location)
        for name in ("reward", "rollout_weight"):
            if values[name] is not None:
                values[name] = checks.finite_number(values[name], name, location)
        if self.rollout_weight is not None and self.rollout_weight <= 0:
            raise DataError(f"{location}: rollout_weight is {self.rollout_weight:g}; it must be positive.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def streams(self) -> dict[str, np.ndarray]:
        """The streams that it has, by name, in the order of `STREAMS`."""
        values = vars(self)
        return {name: values[name] for name in STREAMS if values[name] is not None}

    @property
    def num_trained_tokens(self) -> int:
        """Tokens whose loss weight is not zero."""
        return int(np.count_nonzero(self.loss_weights))

    @property
    def weight(self) -> float:
        """The sum of its loss weights, in float64."""
        return float(self.loss_weights.astype(np.float64).sum())


STREAMS: dict[str, Stream] = {name: value for name, value in vars(Trajectory).items() if isinstance(value, Stream)}


def number_rollouts(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """[N] int64, the index of each trajectory's rollout, in order of first appearance.

    Trajectories that share `rollout` within one `group` are one rollout; one without a rollout id is its own.
    """
    seen: dict[object, int] = {}
    keys = [(index,) if item.rollout is None else (item.group, item.rollout) for index, item in enumerate(trajectories)]
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def update_with_content(digest: Any, trajectories: Sequence[Trajectory]) -> None:
    """Feeds a `hashlib` object with all that training depends on: token ids, every stream, labels, and the order.

    Groups and rollouts count as a partition of the trajectories, not by their names, which may be file names.
    """
    groups: dict[object, int] = {}
    for item, rollout in zip(trajectories, number_rollouts(trajectories).tolist(), strict=True):
        streams = {"token_ids": item.token_ids, **item.streams}
        group = groups.setdefault(item.group, len(groups))
        shapes = {name: [str(array.dtype), *array.shape] for name, array in streams.items()}
        labels = [shapes, group, rollout, item.reward, item.rollout_weight]
        labels += [[image.start, image.end, image.digest] for image in item.images]
        digest.update(json.dumps(labels).encode())
        for array in streams.values():
            digest.update(np.ascontiguousarray(array).data)
