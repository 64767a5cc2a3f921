"""Depth: from which layer each new layer comes, and which of them start as the identity.

`zero`: each layer is followed by copies of itself whose results are multiplied by zero, so the function is kept and the
copies learn from the first step on. `stack`: the whole stack again (StackBERT, Gong et al., 2019), which keeps no
function.
"""

from treewise.errors import ConfigError

DEPTHS = ("zero", "stack")


def layer_sources(num_layers: int, num_grown: int, depth: str) -> list[int]:
    """For each of `num_grown` layers the index of the small model's layer that it is copied from.

    Raises:
        ConfigError: an unknown way of growing in depth.
    """
    if depth not in DEPTHS:
        raise ConfigError(f"depth is {depth!r}; choose one of {', '.join(DEPTHS)}.")
    if depth == "stack":
        return [layer % num_layers for layer in range(num_grown)]
    return [layer * num_layers // num_grown for layer in range(num_grown)]


def identity_layers(sources: list[int], depth: str) -> set[int]:
    """Indices of the new layers that must pass the residual stream on unchanged."""
    if depth == "stack":
        return set()
    return {layer for layer in range(1, len(sources)) if sources[layer] == sources[layer - 1]}
