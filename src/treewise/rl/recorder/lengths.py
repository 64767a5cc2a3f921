"""How long a row may become: a prompt and what follows it, of every driver."""

from typing import Any

from treewise.errors import ConfigError
from treewise.nn.model_checks import length_limit, num_positions


def longest_row(model: Any, max_length: int | None = None) -> int | None:
    """Tokens of a prompt and its rollout at most: as many as positions, training and `max_length` allow; None: any.

    Raises:
        ConfigError: `max_length` is beyond the model's positions.
    """
    positions = num_positions(model.config)
    if max_length is not None and positions is not None and max_length > positions:
        raise ConfigError(
            f"max_length={max_length} is beyond the {positions:,} positions of the model (max_position_embeddings)."
        )
    followed = length_limit(model)
    limits = [max_length, positions, None if followed is None else followed[0]]
    return min((limit for limit in limits if limit is not None), default=None)
