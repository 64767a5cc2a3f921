"""Policy gradients by the names of the papers, and every objective by its name in a configuration.

A name is a class: `PolicyGradient` with other defaults. What a paper determines is a field without `init`, so that
giving it is an error that type checkers see, too.
"""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from treewise.base.given_settings import check_setting_types
from treewise.errors import ConfigError, did_you_mean
from treewise.objectives.distillation import Distillation
from treewise.objectives.policy_gradient import PolicyGradient
from treewise.objectives.preference import DPO, IPO, KTO
from treewise.objectives.sft import SFT


@dataclass(frozen=True, slots=True, kw_only=True)
class REINFORCE(PolicyGradient):
    """`-A log p`, summed over each rollout's tokens and averaged over rollouts (Williams, 1992). With advantages of
    `leave_one_out` it is RLOO (arXiv 2402.14740).
    """

    surrogate: str = field(default="reinforce", init=False, repr=False)
    normalization: str = "rollout_sum"
    usual_advantages: str | None = "rloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clipped(PolicyGradient):
    """The clipped surrogate; `clip_high` is `clip_low` where not given."""

    clip_high: float | None = None

    def __post_init__(self) -> None:
        if self.clip_high is None:
            object.__setattr__(self, "clip_high", self.clip_low)
        PolicyGradient.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(_Clipped):
    """The clipped surrogate, averaged over the step's tokens (arXiv 1707.06347, eq. 7). `clip_high` is `clip_low` where
    not given. Advantages come from a critic (see `examples/objectives/ppo_critic.py`).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(_Clipped):
    """PPO's surrogate, averaged over each rollout's tokens, then over rollouts (DeepSeekMath, arXiv 2402.03300, eq. 3);
    TRL's `loss_type="grpo"`. The paper adds `beta=0.04` (k3); here, as in TRL, beta is 0 until given. Advantages:
    `group_normalized`.
    """

    normalization: str = "rollout_mean"
    usual_advantages: str | None = "grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(_Clipped):
    """GRPO without its length bias: each rollout's sum is divided by one `max_length` (the most tokens that a rollout
    may generate), then averaged over rollouts (arXiv 2503.20783, section 3.2; TRL's `loss_type="dr_grpo"`). Advantages:
    `mean_centered`.
    """

    max_length: float
    normalization: str = field(default="rollout_sum", init=False, repr=False)
    constant: float | None = field(default=None, init=False, repr=False)
    usual_advantages: str | None = "dr_grpo"

    def __post_init__(self) -> None:
        object.__setattr__(self, "constant", self.max_length)
        _Clipped.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO(PolicyGradient):
    """PPO's surrogate with a higher upper bound, averaged over all tokens of the step (arXiv 2503.14476, eq. 8; TRL's
    `loss_type="dapo"`). Filtering and shaping of rewards, which the paper adds, are the user's.
    """

    clip_high: float | None = 0.28
    normalization: str = field(default="token_mean", init=False, repr=False)
    usual_advantages: str | None = "grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(PolicyGradient):
    """One ratio for a rollout, `exp(mean of log p - old)`, clipped as a whole (arXiv 2507.18071, eq. 5 to 7, bounds of
    its section 5.1; TRL's `importance_sampling_level="sequence"`). Not separable.
    """

    ratio_level: str = field(default="sequence", init=False, repr=False)
    clip_low: float | None = 3e-4
    clip_high: float | None = 4e-4
    normalization: str = "rollout_mean"
    usual_advantages: str | None = "grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(PolicyGradient):
    """`-sg(min(r, max_ratio)) A log p`, averaged over all tokens of the step: a large ratio weighs less, and no token
    loses its gradient (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, without its lower bound; TRL's `loss_type="cispo"`,
    where `max_ratio` is called `epsilon_high`, and 5 is recommended after ScaleRL, arXiv 2510.13786).
    """

    surrogate: str = field(default="cispo", init=False, repr=False)
    max_ratio: float | None = 5.0
    clip_low: float | None = field(default=None, init=False, repr=False)
    clip_high: float | None = field(default=None, init=False, repr=False)
    usual_advantages: str | None = "grpo"


Named = SFT | PolicyGradient | Distillation | DPO | KTO
OBJECTIVES: Mapping[str, type[Named]] = {
    "sft": SFT,
    "reinforce": REINFORCE,
    "ppo": PPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "policy_gradient": PolicyGradient,
    "distillation": Distillation,
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
}
PREFERENCES = ("dpo", "ipo", "kto")


def refuse_uncalled(objective: object) -> None:
    """Raises `ConfigError` for an objective that was not called (`tw.GRPO`), or is given by its name alone."""
    named = OBJECTIVES.get(objective.lower()) if isinstance(objective, str) else None
    if found := named or next((each for each in OBJECTIVES.values() if objective is each), None):
        given = repr(objective) if named else f"{found.__name__} without brackets"
        raise ConfigError(f"the objective is {given}; call it, with its settings inside: tw.{found.__name__}().")


class MissingSettingError(ConfigError):
    """An objective lacks settings that it cannot do without; `settings` are their names."""

    def __init__(self, objective: str, settings: Sequence[str]) -> None:
        super().__init__(f"objective {objective!r} needs {', '.join(settings)}.")
        self.settings = tuple(settings)


def objective_named(name: str, **settings: Any) -> Named:
    """The objective of a configuration: `objective_named("grpo", beta=0.04)`.

    Raises:
        ConfigError: an unknown name or setting, a missing one (`MissingSettingError`), one that the name determines, or
            an invalid value.
    """
    make = OBJECTIVES.get(name)
    if make is None:
        hint = did_you_mean(name, OBJECTIVES)
        raise ConfigError(f"unknown objective {name!r}.{hint} Known: {', '.join(OBJECTIVES)}.")
    known = setting_types(name)
    for setting in settings:
        if setting in determined(make):
            raise ConfigError(f"objective {name!r} determines {setting}; leave it out, or use 'policy_gradient'.")
    check_setting_types(f"objective {name!r}", settings, known)
    required = [each.name for each in fields(make) if each.init and each.default is MISSING]
    if missing := [setting for setting in required if setting not in settings]:
        raise MissingSettingError(name, missing)
    return make(**settings)


def setting_types(name: str) -> dict[str, Any]:
    """The type of each setting of an objective (`OBJECTIVES`), from its annotations: `{"beta": float, ...}`. The usual
    advantages are none: in place of them a configuration has `advantages`.
    """
    make = OBJECTIVES[name]
    hints = typing.get_type_hints(make)
    return {each.name: hints[each.name] for each in fields(make) if each.init and each.name != "usual_advantages"}


def determined(make: type[Named]) -> list[str]:
    """The settings that a name determines (`surrogate` of `cispo`); `policy_gradient` leaves all of them open."""
    return [each.name for each in fields(make) if not each.init]
