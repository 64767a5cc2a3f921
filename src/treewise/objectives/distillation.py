"""Distillation from the top-k candidates of a teacher.

Letters: F flat tokens, k candidates of a token, Q trained flat tokens, P terms (one per candidate of each of these).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treewise.base.shapes import Float
from treewise.errors import DataError, check_choice
from treewise.objectives.protocol import Streams, Terms, Values
from treewise.objectives.sft import check_settings, denominator, normalized_weights
from treewise.tree.forest import Forest

TAILS = ("ignore", "bucket", "renormalize")
DIVERGENCES = ("forward_kl", "cross_entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """Forward KL, or cross-entropy, from a teacher's top-k candidates to the model, per trained token.

    Needs `teacher_ids` and `teacher_logprobs`. With q the teacher's probabilities of the k candidates S of a position
    and p the model's (of the full vocabulary), the loss of a token depends on `tail`, the treatment of the rest:

    * `ignore`: `sum over S of q (log q - log p)`. The rest of the teacher's mass has no term. It is a part of the full
      forward KL; without the rest it may be negative, and it pulls p to q/(sum of q) on S.
    * `bucket`: the rest is one more candidate, with `1 - sum q` and `1 - sum p`. The exact forward KL of the two
      distributions after merging all other tokens: not negative, a lower bound of the full one, 0 at q.
    * `renormalize`: both are divided by their mass on S first. Independent of the mass outside S.

    `cross_entropy` leaves out the `q log q`, which changes the loss by a constant and no gradient. Source: Hinton et
    al. (arXiv 1503.02531); top-k as in Peng et al. (arXiv 2410.16215). The model's temperature is the engine's.

    weighting, normalization, constant: as in `PolicyGradient`.

    Raises:
        ConfigError: an unknown name, or a constant that does not belong there.
    """

    divergence: str = "forward_kl"
    tail: str = "bucket"
    weighting: str = "per_trajectory"
    normalization: str = "token_mean"
    constant: float | None = None

    def __post_init__(self) -> None:
        for name, choices in (("tail", TAILS), ("divergence", DIVERGENCES)):
            check_choice(name, getattr(self, name), choices)
        check_settings(self.weighting, self.normalization, self.constant)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs",)

    def is_separable(self, forest: Forest) -> bool:
        return True

    def denominator(self, forest: Forest) -> float:
        return denominator(forest, self.weighting, self.normalization, self.constant)

    def terms(self, forest: Forest) -> Terms:
        weights_F, plain_F = normalized_weights(forest, self.weighting, self.normalization)
        ids_Fk, logprobs_Fk = (forest.flat_stream(name) for name in ("teacher_ids", "teacher_logprobs"))
        trained = np.flatnonzero(weights_F)
        trained = trained[np.argsort(forest.path_index[trained], kind="stable")]
        is_used = np.isfinite(logprobs_Fk[trained])
        if not is_used.any(axis=1).all():
            flat_index = int(trained[np.argmin(is_used.any(axis=1))])
            index = int(np.searchsorted(forest.path_offsets, flat_index, side="right")) - 1
            raise DataError(
                f"{forest.source_of(index)}: token {flat_index - forest.path_offsets[index]} is trained, but its "
                "teacher has no candidate for it; give some, or set its loss weight to 0."
            )
        token, candidate = np.nonzero(is_used)
        flat = trained[token]
        streams = {
            "weights": weights_F[flat],
            "plain_weights": plain_F[flat],
            "teacher_logprobs": logprobs_Fk[flat, candidate],
            "token": token,
        }
        return Terms(forest.path_index[flat], streams, ids_Fk[flat, candidate], weight=float(plain_F.sum()))

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        """[P] weighted losses of the Q tokens, each summed over its candidates, then zeros.

        The size is P, because reading Q from the device would block the host.
        """
        token = streams["token"]
        token = torch.cat([token.new_zeros(1), (token[1:] != token[:-1]).to(token.dtype)]).cumsum(0)  # 0, 1, 2, ...
        teacher, student = streams["teacher_logprobs"], values["log_probs"]
        mass, student_mass = (_sum(token, torch.exp(logprobs)) for logprobs in (teacher, student))
        if self.tail == "renormalize":
            teacher = teacher - torch.log(mass)[token]
            student = student - torch.log(student_mass)[token]
        probabilities = torch.exp(teacher)
        losses = _sum(token, -probabilities * student)
        if self.divergence == "forward_kl":
            losses = losses + _sum(token, probabilities * teacher)
        if self.tail == "bucket":
            # The term of all other tokens. A student's rest below machine epsilon counts as epsilon.
            rest = (1 - mass).clamp(min=0)
            losses = losses - rest * torch.log((1 - student_mass).clamp(min=torch.finfo(mass.dtype).eps))
            if self.divergence != "cross_entropy":
                losses = losses + torch.xlogy(rest, rest)
        return torch.zeros_like(losses).scatter(0, token, streams["weights"]) * losses

    def token_metrics(self, values: Values, streams: Streams) -> Values:
        """Means over trained tokens: teacher_mass and student_mass, the probability that falls on the candidates."""
        weights = streams["plain_weights"]
        return {
            "teacher_mass": weights * torch.exp(streams["teacher_logprobs"]),
            "student_mass": weights * torch.exp(values["log_probs"]),
        }


def _sum(token: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[P] the sum over the candidates of each token, then zeros."""
    return torch.zeros_like(values).index_add(0, token, values)
