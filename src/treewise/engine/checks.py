"""What must hold before a forest is trained: tokens that the model has, and a model that passed the probe as it is.

A model may change between steps: a hook, another `forward`, a dropout, a factor of the logits. Outside of the decoder
none of these would be seen by a tree. So every check compares the model's state with those that passed: what modules
it has, their hooks, overrides, modes and dropouts, the numbers of its configuration, and which parameters are trained.
A new state is searched for what trees refuse (`nn.model_checks`), and probed (`engine.probe`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.base.progress import busy_with
from treewise.engine.probe import check_router_losses, probe
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn import model_checks
from treewise.nn.decoder import DecoderAndHead, all_modules, all_parameters
from treewise.nn.device import random_state_kept, warn_of_slow_precision
from treewise.nn.platform.tensors import autocast_dtype
from treewise.nn.recomputation import is_reentrant
from treewise.nn.wrapped import base_model, named_modules
from treewise.tree.forest import Forest

_NUM_KEPT = 8  # states; more only where something is new at every step


def refuse_no_gradients(model: nn.Module) -> None:
    """Raises `ConfigError` where a step would do nothing: gradients are disabled, or no parameter is trained."""
    if not torch.is_grad_enabled():
        raise ConfigError(
            "step computes gradients, which are disabled here (torch.no_grad or inference_mode); for the loss alone "
            "call evaluate."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "no parameter of the model requires a gradient, so a step would do nothing (PEFT loads adapters so without "
            "is_trainable=True)."
        )


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What the tokens of a forest must keep to. num_tokens: with an embedding and a logit. num_positions: of a table;
    None: any number. longest: tokens of a path, else likewise. has_placeholders: whether some tokens stand for images,
    videos or sounds."""

    num_tokens: int
    num_positions: int | None
    longest: int | None
    has_placeholders: bool

    def check(self, lm: DecoderAndHead, forest: Forest) -> None:
        """Raises what `refuse_tokens`, `refuse_positions`, `refuse_lengths` and `refuse_placeholders` raise."""
        length = int(forest.depth.max()) + 1
        if int(forest.token_ids.max()) >= self.num_tokens:
            model_checks.refuse_tokens(lm, forest)
        if self.has_placeholders:
            model_checks.refuse_placeholders(
                lm, np.where(forest.images.covers(forest.num_tokens), -1, forest.token_ids)
            )
        if self.num_positions is not None and length > self.num_positions:
            model_checks.refuse_positions(lm, forest)
        if self.longest is not None and length > self.longest:
            model_checks.refuse_lengths(lm.decoder, length, "the longest path", "Shorten the trajectories")


def limits_of(lm: DecoderAndHead) -> TokenLimits:
    """The limits of a model as it is now."""
    config: Any = lm.base.config
    table, longest = model_checks.position_table(lm.decoder), model_checks.length_limit(lm.decoder)
    return TokenLimits(
        num_tokens=min(lm.num_embeddings, lm.num_logits),
        num_positions=None if table is None else table[0],
        longest=None if longest is None else longest[0],
        has_placeholders=config.get_text_config() is not config,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """What a model is beside its weights: of each module, of those outside of the decoder, of configurations; and which
    parameters are trained."""

    modules: tuple[tuple[Any, ...], ...]
    outer: tuple[tuple[str, Any], ...]
    is_trained: tuple[bool, ...]

    def changes_to(self, later: "_State", lm: DecoderAndHead) -> Iterator[str]:
        """Sentences' parts that name what differs."""
        if len(self.modules) != len(later.modules):
            yield f"it has {len(later.modules)} modules, where it had {len(self.modules)}"
            return
        for (name, module), before, now in zip(named_modules(lm.model), self.modules, later.modules, strict=True):
            label = f"{name} ({type(module).__name__})" if name else type(module).__name__
            for what, old, new in zip(_FACTS, before, now, strict=True):
                if old != new:
                    yield f"{label} has {what}"
        was, is_now = dict(self.outer), dict(later.outer)
        for name in sorted(was.keys() | is_now.keys()):
            if was.get(name) != is_now.get(name):
                yield f"{name} is {is_now.get(name)!r}, was {was.get(name)!r}"
        if self.is_trained != later.is_trained:
            yield f"{sum(later.is_trained)} parameters are trained, where {sum(self.is_trained)} were"


_FACTS = (
    *("been replaced", "another class", "another mode", "other forward hooks", "other forward pre-hooks"),
    *("other backward hooks", "other backward pre-hooks", "another forward", "another dropout"),
    "another kind of checkpoint",
)


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """A state that passed. with_images, with_gradients: what was probed. limits: of its tokens."""

    state: _State
    with_images: bool
    with_gradients: bool
    limits: TokenLimits


class StepChecks:
    """Checks one model with each forest that it is to train.

    Parameters:
        model: as the engine was given it.
        has_probes: whether the model is probed.

    compares_gradients: whether probes compare gradients, too, where they are enabled. around_probe: a context for them.
    """

    def __init__(self, model: nn.Module, *, has_probes: bool) -> None:
        self._model, self._has_probes = model, has_probes
        self._passed: list[_Passed] = []
        self.stand_ins: set[nn.Module] = set()  # whose `forward` calls the engine, so it is no change of the model
        self.compares_gradients = True
        self.around_probe: Callable[[], AbstractContextManager[None]] = nullcontext

    def check(
        self,
        lm: DecoderAndHead,
        impl: str,
        forest: Forest,
        router_rule: Any,
        *,
        processor: object = None,
        hold: str = "auto",
        offload: bool = False,
        before_probe: Callable[[], object] | None = None,
    ) -> list[nn.Parameter]:
        """The model's parameters. Raises what `TreeEngine.check` raises.

        lm: the model, split. impl, hold, offload: of the walks that will run. router_rule: of the losses that steps
        add; None: none. processor: the model's, for a probe with an image of the forest; None: none is probed.
        before_probe: what must hold before ranks probe together, of which one alone would wait for the others.
        """
        model_checks.refuse_kept_weights(self._model)
        modules = all_modules(lm.model)
        parameters = all_parameters(modules)
        state = _state_of(lm, modules, parameters, self.stand_ins)
        has_gradients = self.compares_gradients and torch.is_grad_enabled()
        has_images = forest.has_images and processor is not None
        passed = self._passed_as(state, has_images=has_images, has_gradients=has_gradients)
        limits = self._limits(lm) if passed is None else passed.limits
        limits.check(lm, forest)
        if passed is not None:
            return parameters
        if self._has_probes:
            if before_probe is not None:
                before_probe()
            try:
                with (
                    busy_with("comparing a few tokens with the model's own forward"),
                    random_state_kept(lm.device),
                    torch.set_grad_enabled(has_gradients),
                    self.around_probe(),
                ):
                    probe(lm, impl, forest, processor=processor if has_images else None, hold=hold, offload=offload)
                    check_router_losses(lm, router_rule, forest)
            except UnsupportedModelError as error:
                if not self._passed:
                    raise
                now = _state_of(lm, modules, parameters, self.stand_ins)
                changes = "; ".join(self._passed[-1].state.changes_to(now, lm))
                since = f"Since the model was last probed: {changes or 'weights'}."
                raise UnsupportedModelError(f"{error} {since}") from error
            # Taken again: with router logits for the first time, transformers adds hooks of its own.
            state = _state_of(lm, modules, parameters, self.stand_ins)
        self._passed = [*self._passed, _Passed(state, has_images, has_gradients, limits)][-_NUM_KEPT:]
        return parameters

    def _passed_as(self, state: _State, *, has_images: bool, has_gradients: bool) -> _Passed | None:
        """An earlier check that holds for a state, too."""
        for earlier in reversed(self._passed):
            is_same = (earlier.state.modules, earlier.state.outer) == (state.modules, state.outer)
            is_trained_same = not has_gradients or state.is_trained == earlier.state.is_trained
            is_probed_so = earlier.with_images == has_images and earlier.with_gradients >= has_gradients
            if is_same and is_trained_same and is_probed_so:
                return earlier
        return None

    def passed(self, lm: DecoderAndHead, forest: Forest) -> bool:
        """Whether a check of a forest of text would not probe: the model as it is has passed; its tokens are checked.

        Raises:
            DataError: a token id beyond the vocabulary.
        """
        modules = all_modules(lm.model)
        state = _state_of(lm, modules, all_parameters(modules), self.stand_ins)
        has_gradients = self.compares_gradients and torch.is_grad_enabled()
        passed = self._passed_as(state, has_images=False, has_gradients=has_gradients)
        (self._limits(lm) if passed is None else passed.limits).check(lm, forest)
        return passed is not None

    def forget(self) -> None:
        """The next check probes."""
        self._passed.clear()

    def _limits(self, lm: DecoderAndHead) -> TokenLimits:
        """What the tokens of a forest must keep to with the model as it is now. Raises where trees refuse it."""
        base_model(self._model)  # adapters
        kind = lm.device.type
        warn_of_slow_precision(kind, autocast_dtype(kind) or next(lm.model.parameters()).dtype)
        model_checks.refuse_dropout(self._model)
        if torch.is_grad_enabled():
            model_checks.refuse_lost_gradients(self._model)
        return limits_of(lm)


def _state_of(
    lm: DecoderAndHead, all_of_model: list[nn.Module], parameters: list[nn.Parameter], stand_ins: set[nn.Module]
) -> _State:
    # Hooks are numbered by torch, each number once; functions and modules are compared by identity.
    modules = tuple(
        (
            id(module),
            type(module).forward,
            module.training,
            tuple(module._forward_hooks),
            tuple(module._forward_pre_hooks),
            tuple(module._backward_hooks),
            tuple(module._backward_pre_hooks),
            None if module in stand_ins else vars(module).get("forward"),
            [
                value
                for name, value in vars(module).items()
                if type(value) is float and (name == "p" or "dropout" in name or name.endswith(model_checks.NOISE))
            ],
            is_reentrant(module),
        )
        for module in all_of_model
    )
    base: Any = lm.base
    outside = {id(part): part for part in (lm.model, base, *base.children(), lm.output) if part is not lm.decoder}
    owners = [(type(part).__name__, part) for part in outside.values()]
    owners += [("config", base.config), ("text config", base.config.get_text_config()), ("config", lm.decoder.config)]
    outer = tuple(
        (f"{owner}.{name}", value)
        for owner, part in owners
        for name, value in vars(part).items()
        # `save_pretrained` makes a text of `dtype`, on the one rank that writes; no module reads it again.
        if type(value) in (int, float, str, bool) and name != "dtype"
    )
    return _State(modules, outer, tuple(parameter.requires_grad for parameter in parameters))
