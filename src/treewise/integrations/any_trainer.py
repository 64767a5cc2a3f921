"""`share_prefixes`: for a model, or for an engine of verl."""

from typing import Literal

from torch import nn

from treewise.errors import ConfigError
from treewise.integrations.sharing import Sharing, share_model
from treewise.integrations.verl_engine import EngineSharing, share_engine


def share_prefixes(
    model: object,
    max_tokens: int | str | None = None,
    *,
    attention: str = "auto",
    min_ratio: float = 1.1,
    window: Literal["auto"] | None = "auto",
) -> Sharing | EngineSharing:
    """Makes a model compute the shared prefixes of each batch once, in whatever loop it is trained.

    Losses and gradients stay the same. Of a trainer give its model, once for each: `share_prefixes(trainer.model)`. Of
    a PEFT model, passes with and without the adapter are shared. Of verl give an engine or a worker that is
    initialized. What is returned has `counts`, `verify(batch)`, `paused()`, `window()` and `remove()`; printed, it says
    where rows become trees and what was left to the model's own forward, and why.

    The model is reached where it calls its decoder, which needs no trainer that is known; under TRL 1.16 and later at
    its fused head, besides. Under a loop of accelerate that accumulates gradients, the calls of one step share, too.
    Where FSDP2 shards the model all processes call this, afterwards, and then compute each call as trees, or none does.

    Parameters:
        model: a transformers causal language model, with PEFT, DDP, `torch.compile` and accelerate around it or not; or
            verl's `FSDPEngineWithLMHead`, or a `TrainingWorker` with one.
        max_tokens: tokens that hold activations at a time, as in `TreeEngine`: None for one micro-batch, `auto` to
            measure, but not of a sharded model. verl cuts its micro-batches itself.
        attention: as in `TreeEngine`.
        min_ratio: batches with fewer tokens than this (padding included) for each tree token are left to the model's
            own forward, unless they would exceed `max_tokens`.
        window: `auto`: calls between two optimizer steps share where accelerate's loop says which these are; None: each
            call by itself.

    Raises:
        UnsupportedModelError: the model cannot follow a tree (docs/models.md), learns a prompt, has no head, or is
            wrapped or sharded in a way that trees cannot follow.
        ConfigError: an invalid setting, a setting of verl that trees cannot follow, or not a model.
    """
    inner = getattr(model, "engine", model)
    if isinstance(model, nn.Module) or not any(each.__module__.startswith("verl.") for each in type(inner).__mro__):
        return share_model(model, max_tokens, attention=attention, min_ratio=min_ratio, window=window)  # type: ignore[arg-type]
    if max_tokens is not None:
        raise ConfigError(
            f"max_tokens={max_tokens} belongs to other trainers; verl cuts micro-batches itself: set "
            "ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu."
        )
    return share_engine(model, attention=attention, min_ratio=min_ratio)
