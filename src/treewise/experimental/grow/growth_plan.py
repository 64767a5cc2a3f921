"""Which tensors a grown checkpoint has, and of which tensor of the small one each is made."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedConfig

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.experimental.grow.checkpoint import GrownTensor, SmallCheckpoint
from treewise.experimental.grow.configuration import (
    Growth,
    grown_configuration,
    layer_sources,
    refuse_configuration,
)
from treewise.experimental.grow.widening import LAYER, Role, TensorRole, Widening, role_of, widened

POST_NORM = "post_feedforward_layernorm"  # a layer that has it normalises the results of its branches, not their inputs
BRANCH_NORMS = ("post_attention_layernorm", POST_NORM)


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """Configurations, layers and factors of one growth."""

    config: PreTrainedConfig
    grown_config: PreTrainedConfig
    layer_sources: list[int]
    depth: str
    widening: Widening

    @property
    def identities(self) -> set[int]:
        """Indices of the layers that begin as the identity."""
        sources = self.layer_sources
        return {n for n in range(1, len(sources)) if self.depth == "zero" and sources[n] == sources[n - 1]}

    def roles(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorRole]:
        """The role of every tensor of the small model, by name.

        Raises:
            UnsupportedModelError: a tensor that no rule covers, or a tied head behind a norm without weights.
            ConfigError: a tensor whose size is not that of the configuration.
        """
        expected, grown = shapes_of(self.config), shapes_of(self.grown_config)
        roles = {name: role_of(name, shape, self.config, grown.get(name)) for name, shape in shapes.items()}
        if self.widening.final_norm_scale != 1 and all(each.role is not Role.FINAL_NORM for each in roles.values()):
            raise UnsupportedModelError(
                f"{self.config.model_type} has a tied head (tie_word_embeddings) and no weights in its last norm that "
                "could divide what the head sums over copies; its width cannot grow."
            )
        for name, shape in shapes.items():
            if shape != expected.get(name, shape):
                raise ConfigError(
                    f"{name} is {list(shape)} in the checkpoint, and {list(expected[name])} by config.json, which does "
                    "not fit the weights."
                )
        return roles

    def tensors(self, small: SmallCheckpoint) -> list[GrownTensor]:
        """All tensors of the grown checkpoint; each is made when it is written.

        Raises:
            UnsupportedModelError, ConfigError: as of `roles`.
        """
        roles = self.roles(small.shapes)
        # Where a norm follows each branch, its gain silences it: the gradient of a norm at a result of zero is huge.
        is_post_norm = any(POST_NORM in name for name in roles)
        found = []
        for name, role in roles.items():
            shape, dtype = small.kinds[name]
            for grown_name, layer in self.names(name):
                value = self._silence(role, layer, is_post_norm=is_post_norm)
                make = partial(self._made, small.read, name, role, layer, value)
                found.append(GrownTensor(grown_name, dtype, self.widening.grown_shape(role, shape), make))
        return sorted(found, key=lambda each: int(match["layer"]) if (match := LAYER.fullmatch(each.name)) else -1)

    def names(self, name: str) -> Iterator[tuple[str, int]]:
        """Names that a tensor gets in the grown model, with the index of the layer (-1 outside of the layers)."""
        match = LAYER.fullmatch(name)
        if match is None:
            yield name, -1
            return
        for layer, source in enumerate(self.layer_sources):
            if source == int(match["layer"]):
                yield f"{match['head']}{layer}{match['tail']}", layer

    def _silence(self, role: TensorRole, layer: int, *, is_post_norm: bool) -> float | None:
        """What a tensor of an identity layer is filled with so that its branch adds nothing to the residual stream."""
        if layer not in self.identities:
            return None
        if is_post_norm:
            return -self.widening.norm_offset if role.module in BRANCH_NORMS else None
        return 0.0 if role.adds_to_residual else None

    def _made(
        self, read: Callable[[str], torch.Tensor], name: str, role: TensorRole, layer: int, value: float | None
    ) -> torch.Tensor:
        made = widened(name, read(name), role, self.widening, is_silent=layer in self.identities)
        return made if value is None else made.fill_(value)


def shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors, without memory for any."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, torch.Tensor] = model.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def plan_of(config: PreTrainedConfig, growth: Growth) -> GrowthPlan:
    """What a growth makes, without reading any weights. Same errors as `grow`."""
    refuse_configuration(config, growth)
    depth = "stack" if growth.operator == "stack" else "zero"
    sources = layer_sources(config.num_hidden_layers, growth.num_layers or config.num_hidden_layers, depth)
    grown = grown_configuration(config, growth, sources)
    scales_embedding = config.model_type.startswith("gemma")  # by the square root of the hidden size
    embedding_scale = (config.hidden_size / grown.hidden_size) ** 0.5 if scales_embedding else 1.0
    widening = Widening(
        width=growth.width,
        embedding_scale=embedding_scale,
        final_norm_scale=1 / (growth.width * embedding_scale) if config.tie_word_embeddings else 1.0,
        norm_offset=1.0 if scales_embedding else 0.0,
        noise=growth.noise,
        seed=growth.seed,
    )
    plan = GrowthPlan(config, grown, sources, depth, widening)
    if getattr(config, "do_layer_norm_before", True) is False and plan.identities:
        raise UnsupportedModelError(
            f"{config.model_type} with do_layer_norm_before=False has no identity layer; use operator='stack'."
        )
    return plan
