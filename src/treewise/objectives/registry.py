"""Policy gradients by the names of the papers, and every objective by its name in a configuration."""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from treewise.errors import ConfigError, check_setting_types, did_you_mean
from treewise.objectives.distillation import Distillation
from treewise.objectives.policy_gradient import PolicyGradient
from treewise.objectives.preference import DPO, IPO, KTO
from treewise.objectives.protocol import Objective
from treewise.objectives.sft import SFT


def REINFORCE(*, normalization: str = "rollout_sum", **options: Any) -> PolicyGradient:
    """`-A log p`, summed over each rollout's tokens and averaged over rollouts (Williams, 1992). With advantages of
    `leave_one_out` it is RLOO (arXiv 2402.14740).
    """
    return PolicyGradient(surrogate="reinforce", normalization=normalization, usual_advantages="rloo", **options)


def PPO(*, clip_low: float | None = 0.2, clip_high: float | None = None, **options: Any) -> PolicyGradient:
    """The clipped surrogate, averaged over the step's tokens (arXiv 1707.06347, eq. 7). `clip_high` is `clip_low` where
    not given. Advantages come from a critic (see `examples/objectives/ppo_critic.py`).
    """
    return PolicyGradient(clip_low=clip_low, clip_high=clip_low if clip_high is None else clip_high, **options)


def GRPO(
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = None,
    normalization: str = "rollout_mean",
    **options: Any,
) -> PolicyGradient:
    """PPO's surrogate, averaged over each rollout's tokens, then over rollouts (DeepSeekMath, arXiv 2402.03300, eq. 3);
    TRL's `loss_type="grpo"`. The paper adds `beta=0.04` (k3); here, as in TRL, beta is 0 until given. Advantages:
    `group_normalized`.
    """
    high = clip_low if clip_high is None else clip_high
    return PolicyGradient(
        clip_low=clip_low, clip_high=high, normalization=normalization, usual_advantages="grpo", **options
    )


def DrGRPO(
    *, max_length: float, clip_low: float | None = 0.2, clip_high: float | None = None, **options: Any
) -> PolicyGradient:
    """GRPO without its length bias: each rollout's sum is divided by one `max_length` (the most tokens that a rollout
    may generate), then averaged over rollouts (arXiv 2503.20783, section 3.2; TRL's `loss_type="dr_grpo"`). Advantages:
    `mean_centered`.
    """
    high = clip_low if clip_high is None else clip_high
    return PolicyGradient(
        clip_low=clip_low,
        clip_high=high,
        normalization="rollout_sum",
        constant=max_length,
        usual_advantages="dr_grpo",
        **options,
    )


def DAPO(*, clip_low: float | None = 0.2, clip_high: float | None = 0.28, **options: Any) -> PolicyGradient:
    """PPO's surrogate with a higher upper bound, averaged over all tokens of the step (arXiv 2503.14476, eq. 8; TRL's
    `loss_type="dapo"`). Filtering and shaping of rewards, which the paper adds, are the user's.
    """
    return PolicyGradient(
        clip_low=clip_low, clip_high=clip_high, normalization="token_mean", usual_advantages="grpo", **options
    )


def GSPO(
    *,
    clip_low: float | None = 3e-4,
    clip_high: float | None = 4e-4,
    normalization: str = "rollout_mean",
    **options: Any,
) -> PolicyGradient:
    """One ratio for a rollout, `exp(mean of log p - old)`, clipped as a whole (arXiv 2507.18071, eq. 5 to 7, bounds of
    its section 5.1; TRL's `importance_sampling_level="sequence"`). Not separable.
    """
    return PolicyGradient(
        ratio_level="sequence",
        clip_low=clip_low,
        clip_high=clip_high,
        normalization=normalization,
        usual_advantages="grpo",
        **options,
    )


def CISPO(*, max_ratio: float = 5.0, **options: Any) -> PolicyGradient:
    """`-sg(min(r, max_ratio)) A log p`, averaged over all tokens of the step: a large ratio weighs less, and no token
    loses its gradient (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, without its lower bound; TRL's `loss_type="cispo"`,
    where `max_ratio` is called `epsilon_high`, and 5 is recommended after ScaleRL, arXiv 2510.13786).
    """
    return PolicyGradient(
        surrogate="cispo", max_ratio=max_ratio, clip_low=None, clip_high=None, usual_advantages="grpo", **options
    )


OBJECTIVES: Mapping[str, Callable[..., Objective]] = {
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


def checked_objective(objective: Any) -> Any:
    """The objective, `SFT()` for None.

    Raises:
        ConfigError: one that was not called (`tw.GRPO`), or is given by its name alone, or is no function either.
    """
    is_name = isinstance(objective, str) and objective.lower() in OBJECTIVES
    found = OBJECTIVES[objective.lower()] if is_name else objective
    if is_name or any(found is each for each in OBJECTIVES.values()):
        name = getattr(found, "__name__", "GRPO")
        given = repr(objective) if is_name else f"{name} without brackets"
        raise ConfigError(f"the objective is {given}; call it, with its settings inside: tw.{name}().")
    if objective is None:
        return SFT()
    if isinstance(objective, type) or not (isinstance(objective, Objective) or callable(objective)):
        raise ConfigError(f"objective is {described(objective)}; give tw.SFT(), another objective, or a function.")
    return objective


def described(value: object) -> str:
    """A value in a message: a tensor by its shape, a class by its name, else its type."""
    if isinstance(value, torch.Tensor):
        return f"one of shape {list(value.shape)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


# Settings of `PolicyGradient` that a name determines; `policy_gradient` leaves all of them open.
DETERMINED: Mapping[str, tuple[str, ...]] = {
    "reinforce": ("surrogate",),
    "dr_grpo": ("normalization", "constant"),
    "dapo": ("normalization",),
    "gspo": ("ratio_level",),
    "cispo": ("surrogate", "clip_low", "clip_high"),
}


class MissingSettingError(ConfigError):
    """An objective lacks settings that it cannot do without; `settings` are their names."""

    def __init__(self, objective: str, settings: Sequence[str]) -> None:
        super().__init__(f"objective {objective!r} needs {', '.join(settings)}.")
        self.settings = tuple(settings)


def objective_named(name: str, **settings: Any) -> Objective:
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
        if setting in DETERMINED.get(name, ()):
            raise ConfigError(f"objective {name!r} determines {setting}; leave it out, or use 'policy_gradient'.")
    check_setting_types(f"objective {name!r}", settings, known)
    missing = [setting for setting in _required_settings(make) if setting not in settings]
    if missing:
        raise MissingSettingError(name, missing)
    return make(**settings)


def setting_types(name: str) -> dict[str, Any]:
    """The type of each setting of an objective (`OBJECTIVES`), from its annotations: `{"beta": float, ...}`.

    A new field of `PolicyGradient` is a setting of all names that take its settings.
    """
    make = OBJECTIVES[name]
    hints = typing.get_type_hints(make)
    parameters = inspect.signature(make).parameters.values()
    own = {each.name: hints[each.name] for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    own.pop("usual_advantages", None)
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        own = policy_gradient_types() | own
    return {setting: kind for setting, kind in own.items() if setting not in DETERMINED.get(name, ())}


def policy_gradient_types() -> dict[str, Any]:
    """The type of each field of `PolicyGradient` but its usual advantages, in place of which a configuration has
    `advantages`.
    """
    hints = typing.get_type_hints(PolicyGradient)
    return {field.name: hints[field.name] for field in fields(PolicyGradient) if field.name != "usual_advantages"}


def _required_settings(make: Callable[..., Objective]) -> list[str]:
    empty, variable = inspect.Parameter.empty, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(make).parameters.values()
    return [each.name for each in parameters if each.default is empty and each.kind is not variable]
