"""Losses of rows that share prefixes, each row with a loss, targets and coefficients of its own, as one objective.

Each is a sum over a row's targets. With p the log-prob of a target under the model, q the one that is given
(`logprobs`), A the advantage, r = exp(p - q), and r' = r within [clip_low_threshold, clip_high_threshold]:

    cross_entropy           -w p
    importance_sampling     -r A
    ppo                     -min(r A, r' A)
    cispo                   -sg(r') A p
    dro                     -(A p - beta/2 (p - q)^2)
    gspo                    ppo with r = sg(s) p / sg(p), s the geometric mean of r over `sequence_ratio_mask`

Targets may be any tokens, several of one position, and the same token may be in many rows with other coefficients;
where coefficients belong to trajectories and targets are their own tokens, the objectives by name do (`registry.py`).

Letters: T tokens of a row's input, K targets of a token, F targets of all rows, U distinct (token, target) pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treewise.base.shapes import Float
from treewise.errors import DataError, check_choice
from treewise.objectives.protocol import Streams, Terms, Values
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.prefix_merge import concatenated_ranges

_RATIO = ("logprobs", "advantages")
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
INPUTS: Mapping[str, tuple[str, ...]] = {  # what each loss reads beside its settings
    "cross_entropy": (),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), _RATIO),
    "gspo": (*_RATIO, "sequence_ratio_mask"),
}
SETTINGS: Mapping[str, Mapping[str, float]] = {  # numbers, or arrays as the inputs, with their defaults
    "cross_entropy": {"weights": 1.0},
    **dict.fromkeys(("ppo", "cispo", "gspo"), _CLIPS),
    "dro": {"beta": 0.05},
}


@dataclass(frozen=True, slots=True, eq=False)
class LossRow:
    """One of them. token_ids: int32 [T + 1], its input and one token more, to predict which the last one is there.
    targets: int64 [T, K], -1 where there is none. inputs: float64 [T, K] each, what its loss reads. shape: of the given
    targets. images: what their placeholders among the tokens stand for. routed_experts: as in `Trajectory`.
    """

    token_ids: np.ndarray
    targets: np.ndarray
    loss: str
    inputs: dict[str, np.ndarray]
    shape: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    routed_experts: np.ndarray | None = None


def make_row(
    input_ids: np.ndarray, given: Mapping[str, np.ndarray], loss: str, settings: Mapping[str, float]
) -> LossRow:
    """Checks a row. input_ids: [T]. given: targets, inputs and settings of the loss, [T] or [T, K] each. settings: of
    the loss, as numbers.

    Raises:
        DataError: an unknown loss or setting, an input that is missing, unknown, of another shape or not finite.
    """
    check_choice("loss_fn", loss, INPUTS, DataError)
    defaults, needed = SETTINGS.get(loss, {}), ("target_tokens", *INPUTS[loss])
    for name in settings:
        check_choice(f"a setting of {loss}", name, defaults, DataError)
    lacking, unknown = set(needed) - set(given), set(given) - {*needed, *defaults}
    if names := lacking or unknown:
        what, takes = "lacks" if lacking else "has", ", ".join((*needed, *defaults))
        raise DataError(f"the datum {what} loss_fn_inputs {', '.join(sorted(names))}; {loss} takes {takes}.")
    targets, inputs = given["target_tokens"], dict[str, np.ndarray]()
    if targets.shape[:1] != input_ids.shape or targets.ndim not in (1, 2) or not targets.size:
        raise DataError(f"target_tokens has shape {targets.shape} for {len(input_ids)} input tokens.")
    if targets.dtype.kind != "i":
        raise DataError(f"target_tokens holds {targets.dtype}; send token ids as int64.")
    wide = targets.reshape(len(targets), -1).astype(np.int64)
    parts: dict[str, float | np.ndarray] = {**defaults, **settings, **given}
    for name, value in parts.items():
        values = np.full(targets.shape, value) if np.ndim(value) == 0 else np.asarray(value)
        if values.shape != targets.shape:
            raise DataError(f"{name} has shape {values.shape}, target_tokens {targets.shape}.")
        if not np.isfinite(values).all():
            raise DataError(f"{name} holds numbers that are not finite.")
        inputs[name] = values.reshape(wide.shape).astype(np.float64)
    del inputs["target_tokens"]
    last = int(wide[-1].max())
    ids = np.append(input_ids, last if last >= 0 else int(input_ids[-1])).astype(np.int32)
    return LossRow(ids, wide, loss, inputs, targets.shape)


class RowsLoss:
    """An objective: the sum of the losses of rows, in the order of a forest's trajectories.

    logprobs, losses: float64 [F], by row, once a step or an evaluation ran. num_new: tree tokens that each row is the
    first to hold. replay: metrics of recorded experts, where rows have any.
    """

    outputs = ("log_probs",)

    def __init__(self, rows: Sequence[LossRow]) -> None:
        self.rows = list(rows)
        self._kinds = sorted({row.loss for row in self.rows})
        sizes = [row.targets.size for row in self.rows]
        self.bounds = np.concatenate([[0], np.cumsum(sizes)])
        self._row = np.repeat(np.arange(len(self.rows)), sizes)
        self._kind = np.repeat([self._kinds.index(row.loss) for row in self.rows], sizes)
        self._inputs = {
            name: np.concatenate([row.inputs.get(name, np.zeros(row.targets.shape)).ravel() for row in self.rows])
            for name in sorted({name for row in self.rows for name in row.inputs})
        }
        self.logprobs, self.losses = np.zeros(self.bounds[-1]), np.zeros(self.bounds[-1])
        self.num_new = np.zeros(len(self.rows), dtype=np.int64)
        self.replay: dict[str, float] = {}
        self._first = self._order = self._start = self._count = np.zeros(0, dtype=np.int64)

    def is_separable(self, forest: Forest) -> bool:
        """Not with a ratio of whole sequences."""
        return "gspo" not in self._kinds

    def denominator(self, forest: Forest) -> float:
        """1: losses are sums."""
        return 1.0

    def terms(self, forest: Forest) -> Terms:
        """The distinct pairs of a token and a target; each is scored once, however many rows have it."""
        targets = np.concatenate([row.targets.ravel() for row in self.rows])
        positions = np.concatenate(
            [np.repeat(path[1:], row.targets.shape[1]) for path, row in zip(forest.paths, self.rows, strict=True)]
        ).astype(np.int64)
        self._first = np.full(forest.num_tokens, len(self.rows), dtype=np.int64)
        for index, path in reversed(list(enumerate(forest.paths))):
            self._first[path] = index
        self.count_new(np.ones(forest.num_tokens, dtype=bool))
        flat = np.flatnonzero(targets >= 0)
        width = int(targets.max(initial=0)) + 1
        pairs, pair = np.unique(positions[flat] * width + targets[flat], return_inverse=True)
        if not len(pairs):  # a step needs a term; no target is this one
            pairs = positions[:1] * width
        self._order = flat[np.argsort(pair, kind="stable")]
        self._count = np.bincount(pair, minlength=len(pairs))
        self._start = np.cumsum(self._count) - self._count
        return Terms(pairs // width, {"pair": np.arange(len(pairs))}, pairs % width, weight=1.0)

    def count_new(self, is_new: np.ndarray) -> None:
        """is_new: [T] bool, the tree tokens that no earlier call of the step had."""
        self.num_new = np.bincount(self._first[is_new], minlength=len(self.rows))[: len(self.rows)]

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        """[P] the losses of each pair, summed over the targets that are this pair."""
        logprobs_P = values["log_probs"]
        pair = streams["pair"].cpu().numpy()
        flat = self._order[concatenated_ranges(self._start[pair], self._count[pair])]
        owner = torch.from_numpy(np.repeat(np.arange(len(pair)), self._count[pair])).to(logprobs_P.device)
        logprobs_F = logprobs_P[owner]
        inputs = {name: torch.from_numpy(stream[flat]).to(logprobs_F) for name, stream in self._inputs.items()}
        losses_F = torch.zeros_like(logprobs_F)
        for index, kind in enumerate(self._kinds):
            is_own = torch.from_numpy(self._kind[flat] == index).to(logprobs_F.device)
            own = {name: stream[is_own] for name, stream in inputs.items()}
            row = torch.from_numpy(self._row[flat]).to(logprobs_F.device)[is_own]
            losses_F = losses_F.index_put((is_own,), FORMULAS[kind](logprobs_F[is_own], own, row))
        self.logprobs[flat] = logprobs_F.detach().cpu().numpy()
        self.losses[flat] = losses_F.detach().cpu().numpy()
        return torch.zeros_like(logprobs_P).index_add(0, owner, losses_F)

    def sampler_gap(self, index: int) -> float | None:
        """Mean of `exp(|p - q|)` over the targets of a row that have an advantage (1: no gap); None: there are none."""
        row = self.rows[index]
        if INPUTS[row.loss][:2] != _RATIO:
            return None
        is_trained = ((row.targets >= 0) & (row.inputs["advantages"] != 0)).ravel()
        own = self.logprobs[self.bounds[index] : self.bounds[index + 1]][is_trained]
        with np.errstate(over="ignore"):
            gaps = np.exp(np.abs(own - row.inputs["logprobs"].ravel()[is_trained]))
        return float(gaps.mean()) if len(gaps) else None

    def token_metrics(self, values: Values, streams: Streams) -> dict[str, Float[Tensor, " P"]]:
        """No metrics: answers hold log-probs and losses of each row."""
        return {}


# -- formulas: [n] log-probs, [n] inputs by name and [n] row numbers to [n] losses -------------------------------------

_Formula = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]


def _clipped(ratios: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.minimum(torch.maximum(ratios, inputs["clip_low_threshold"]), inputs["clip_high_threshold"])


def _surrogate(ratios: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return -torch.minimum(ratios * inputs["advantages"], _clipped(ratios, inputs) * inputs["advantages"])


def _gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], row: Tensor) -> Tensor:
    mask = (inputs["sequence_ratio_mask"] != 0).to(logprobs)
    sums, counts = (
        torch.zeros(int(row.max()) + 1 if len(row) else 0, dtype=logprobs.dtype, device=logprobs.device).index_add(
            0, row, values
        )
        for values in (mask * (logprobs.detach() - inputs["logprobs"]), mask)
    )
    mean = sums / counts.clamp(min=1)
    return _surrogate(torch.exp(mean[row] + logprobs - logprobs.detach()), inputs)


FORMULAS: Mapping[str, _Formula] = {
    "cross_entropy": lambda p, given, _: -given["weights"] * p,
    "importance_sampling": lambda p, given, _: -torch.exp(p - given["logprobs"]) * given["advantages"],
    "ppo": lambda p, given, _: _surrogate(torch.exp(p - given["logprobs"]), given),
    "cispo": lambda p, given, _: -_clipped(torch.exp(p - given["logprobs"]), given).detach() * p * given["advantages"],
    "dro": lambda p, given, _: -(p * given["advantages"] - given["beta"] / 2 * (p - given["logprobs"]) ** 2),
    "gspo": _gspo,
}
