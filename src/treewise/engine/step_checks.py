"""What must hold before a forest is trained: no dropout, tokens that the model has, and a probe of each of its states.

A model may change between steps: a hook, another `forward`, a factor of the logits. Outside of the decoder none of
these would be seen by a tree. So every check compares the model's state with those that passed the probe: what modules
it has, their hooks, overrides and modes, the numbers of its configuration, and which parameters are trained.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.engine.probe import probe
from treewise.engine.probed_rows import text_ids
from treewise.errors import ConfigError, UnsupportedModelError, busy_with
from treewise.nn.device import autocast_dtype, to_device, warn_of_slow_precision
from treewise.nn.model import DecoderAndHead, base_model
from treewise.nn.model_checks import refuse_dropout, refuse_lengths, refuse_placeholders, refuse_tokens
from treewise.nn.router_loss import RouterLossRule, check_router_loss
from treewise.tree.forest import Forest

_NUM_KEPT = 8  # states; more only where something is new at every step


def refuse_no_gradients(model: nn.Module) -> None:
    """Raises `ConfigError` where a step would do nothing: gradients are disabled, or no parameter is trained."""
    if not torch.is_grad_enabled():
        raise ConfigError(
            "step computes gradients, which are disabled here (torch.no_grad or inference_mode); for the loss alone "
            "call evaluate."
        )
    if not any(each.requires_grad for each in model.parameters()):
        raise ConfigError(
            "no parameter of the model requires a gradient, so a step would do nothing (PEFT loads adapters so without "
            "is_trainable=True)."
        )


class StepChecks:
    """Checks one model with each forest that it is to train.

    Parameters:
        model: as the engine was given it.
        has_probes: whether the model is probed.
    """

    def __init__(self, model: nn.Module, *, has_probes: bool) -> None:
        self._model, self._has_probes = model, has_probes
        self._passed: list[tuple[_State, bool, bool]] = []  # with images, with gradients
        self.stands_in_for: nn.Module | None = None  # its `forward` calls the engine, so it is no change of the model

    def check(
        self,
        lm: DecoderAndHead,
        impl: str,
        forest: Forest,
        router_rule: RouterLossRule | None,
        *,
        processor: object = None,
        hold: str = "auto",
        offload: bool = False,
        before_probe: Callable[[], object] | None = None,
    ) -> None:
        """Raises what `TreeEngine.check` raises.

        lm: the model, split. impl, hold, offload: of the walks that will run. router_rule: of the losses that steps
        add; None: none. processor: the model's, for a probe with an image of the forest; None: none is probed.
        before_probe: what must hold before ranks probe together, of which one alone would wait for the others.
        """
        kind = lm.device.type
        warn_of_slow_precision(kind, autocast_dtype(kind) or next(lm.model.parameters()).dtype)
        refuse_dropout(self._model)
        refuse_tokens(lm, forest)
        refuse_placeholders(lm, np.where(forest.images.covers(forest.num_tokens), -1, forest.token_ids))
        refuse_lengths(lm.decoder, int(forest.depth.max()) + 1, "the longest path", "Shorten the trajectories")
        has_images, has_gradients = len(forest.images) > 0 and processor is not None, torch.is_grad_enabled()
        if not self._has_probes or self._has_passed(_state_of(lm, self.stands_in_for), has_images, has_gradients):
            return
        if before_probe is not None:
            before_probe()
        try:
            with busy_with("comparing a few tokens with the model's own forward"):
                probe(lm, impl, forest, processor=processor if has_images else None, hold=hold, offload=offload)
            if router_rule is not None and router_rule.aux_coefficient:
                check_router_loss(lm.model, router_rule, to_device(text_ids(forest)[:12], lm.device, torch.long))
        except UnsupportedModelError as error:
            if not self._passed:
                raise
            changes = "; ".join(self._passed[-1][0].changes_to(_state_of(lm, self.stands_in_for), lm))
            raise UnsupportedModelError(f"{error} Since the model was last probed: {changes or 'weights'}.") from error
        # Taken again: with router logits for the first time, transformers adds hooks of its own.
        self._passed = [*self._passed, (_state_of(lm, self.stands_in_for), has_images, has_gradients)][-_NUM_KEPT:]

    def _has_passed(self, state: "_State", has_images: bool, has_gradients: bool) -> bool:
        return any(
            images == has_images
            and gradients >= has_gradients
            and (state.modules, state.outer) == (passed.modules, passed.outer)
            and (not has_gradients or state.is_trained == passed.is_trained)
            for passed, images, gradients in reversed(self._passed)
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
        for (name, module), before, now in zip(lm.model.named_modules(), self.modules, later.modules, strict=True):
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
    *("other backward hooks", "other backward pre-hooks", "another forward"),
)


def _state_of(lm: DecoderAndHead, stands_in_for: nn.Module | None) -> _State:
    # Hooks are numbered by torch, each number once; functions and modules are compared by identity.
    modules = tuple(
        (
            id(each),
            type(each).forward,
            each.training,
            tuple(each._forward_hooks),
            tuple(each._forward_pre_hooks),
            tuple(each._backward_hooks),
            tuple(each._backward_pre_hooks),
            None if each is stands_in_for else vars(each).get("forward"),
        )
        for each in lm.model.modules()
    )
    base: Any = base_model(lm.model)
    outside = {id(each): each for each in (lm.model, base, *base.children(), lm.output) if each is not lm.decoder}
    owners = [(type(each).__name__, each) for each in outside.values()]
    owners += [("config", base.config), ("text config", base.config.get_text_config()), ("config", lm.decoder.config)]
    outer = tuple(
        (f"{owner}.{name}", value)
        for owner, each in owners
        for name, value in vars(each).items()
        # `save_pretrained` makes a text of `dtype`, on the one rank that writes; no module reads it again.
        if type(value) in (int, float, str, bool) and name != "dtype"
    )
    return _State(modules, outer, tuple(each.requires_grad for each in lm.model.parameters()))
