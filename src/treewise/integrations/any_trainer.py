"""`share_prefixes`: chooses the integration, TRL's or verl's, by its argument."""

from torch import nn

from treewise.errors import ConfigError
from treewise.integrations import trl
from treewise.integrations.trl import Sharing
from treewise.integrations.verl_engine import EngineSharing, share_engine


def share_prefixes(
    model: object, max_tokens: int | str | None = None, *, attention: str = "auto", min_ratio: float = 1.1
) -> Sharing | EngineSharing:
    """Makes a trainer of TRL, or an engine of verl, compute the shared prefixes of each batch once.

    Losses and gradients stay the same. Of TRL give a trainer's model, or its reference model, once for each trainer; of
    a PEFT model, passes with and without the adapter are shared. Of verl give an engine or a worker that is
    initialized. What is returned has `counts` and `remove()`.

    Parameters:
        model: a transformers causal language model, with PEFT, DDP, `torch.compile` and accelerate around it or not; or
            verl's `FSDPEngineWithLMHead`, or a `TrainingWorker` with one.
        max_tokens: tokens that hold activations at a time, as in `TreeEngine`: None for one micro-batch, `auto` to
            measure. verl cuts its micro-batches itself.
        attention: as in `TreeEngine`.
        min_ratio: batches with fewer tokens than this (padding included) for each tree token are left to the model's
            own forward, unless they would exceed `max_tokens`.

    Raises:
        UnsupportedModelError: the model cannot follow a tree (docs/models.md), learns a prompt, or has a head that is
            not TRL's fused one.
        ConfigError: TRL is not installed or older than 1.16, an invalid setting, a setting of verl that trees cannot
            follow, not a model, or one that no trainer was built with yet.
    """
    inner = getattr(model, "engine", model)
    if isinstance(model, nn.Module) or not any(each.__module__.startswith("verl.") for each in type(inner).__mro__):
        return trl.share_prefixes(model, max_tokens, attention=attention, min_ratio=min_ratio)  # type: ignore[arg-type]
    if max_tokens is not None:
        raise ConfigError(
            f"max_tokens={max_tokens} belongs to trainers of TRL; verl cuts micro-batches itself: set "
            "ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu."
        )
    return share_engine(model, attention=attention, min_ratio=min_ratio)
