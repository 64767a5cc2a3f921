"""Learned growth: a linear map from all small weights to all large ones, a few numbers for each weight that it makes.

It begins as a copy of units and layers (no layer begins as the identity, which no map of whole layers can give), and
leaves norms, which are repeated, and what keeps its size alone.

Mango (arXiv 2310.10699, Fig. 4): one ring of small tensors over matrices (B), outputs (O), layers (L) and inputs (I).
The paper cuts every matrix into squares of the hidden size. Grouped key heads and inner sizes that are no multiple of
it do not fit in squares, so here matrices of one shape class form a B axis of their own, and the maps of hidden units,
of each other size and of layers are shared by all classes.

To fit it, the large weights are made anew at each step, trained on trees, and their gradients are carried on into it.
The small model is frozen.

Letters: B matrices of a shape class, L layers, O outputs, I inputs, E experts, R rank; 1 small, 2 large.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from treewise.engine import TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.experimental.grow.configuration import Growth
from treewise.experimental.grow.growth_plan import GrowthPlan
from treewise.experimental.grow.widening import LAYER, Role, repeat_blocks, role_of, widened
from treewise.objectives import SFT

HIDDEN = "hidden"
MAP_NOISE = 1e-2  # of the maps, in their largest number: copies must part


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices or biases of one kind in all layers: [L, O, I], or [L, O] for biases; experts are matrices, too.

    Attributes:
        tail: name without the layer, such as `.self_attn.q_proj.weight`.
        weights: [L1, E, O1, I1] (E is 1 outside of experts; I1 is 1 for biases).
        output, input: name of the axis of units.
        grown: [O2, I2].
        blocks: sizes of the parts of a fused projection, which lie side by side on its outputs.
        is_bias, has_experts: what to take away again at the end.
    """

    tail: str
    weights: torch.Tensor
    output: str
    input: str
    grown: tuple[int, int]
    blocks: tuple[int, ...]
    is_bias: bool
    has_experts: bool


def stacks_of(
    model: PreTrainedModel, grown_shapes: dict[str, tuple[int, ...]], config: PreTrainedConfig
) -> list[Stack]:
    """All matrices and biases inside of the layers of a model, stacked by kind.

    Raises:
        UnsupportedModelError: layers that differ in their shapes.
    """
    kinds: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    head = ""
    for name, tensor in model.state_dict().items():
        match = LAYER.fullmatch(name)
        if match is not None and not is_copied(name, tensor, grown_shapes, config):
            kinds[match["tail"]].append((int(match["layer"]), tensor))
            head = match["head"]
    num_layers = int(config.num_hidden_layers)
    result = []
    for tail, found in kinds.items():
        if len(found) != num_layers:
            raise UnsupportedModelError(f"{tail} is in {len(found)} of {num_layers} layers; operators need equal ones.")
        weights = torch.stack([tensor for _, tensor in sorted(found, key=lambda each: each[0])])
        grown = grown_shapes[f"{head}0{tail}"]
        has_experts, is_bias = weights.dim() == 4, weights.dim() == 2
        name = f"layers.0{tail}" + (".weight" if has_experts else "")
        role = role_of(name, tuple(weights.shape[2:] if has_experts else weights.shape[1:]), config)
        if is_bias:
            weights, grown = weights[:, :, None], (*grown, 1)
        if not has_experts:
            weights = weights[:, None]
        small_out, small_in = weights.shape[2:]
        parts = f" in {len(role.blocks)}" if len(role.blocks) > 1 else ""
        output = HIDDEN if role.adds_to_residual else f"{small_out}-{grown[-2]}{parts}"
        inputs = "" if is_bias else f"{small_in}-{grown[-1]}" if role.adds_to_residual else HIDDEN
        sizes = grown[-2], grown[-1]
        result.append(Stack(tail, weights, output, inputs, sizes, role.blocks, is_bias, has_experts))
    return result


def is_copied(
    name: str, tensor: torch.Tensor, grown_shapes: dict[str, tuple[int, ...]], config: PreTrainedConfig
) -> bool:
    """Norms, and what keeps its shape: no operator changes these."""
    if tensor.dim() == 3:
        return False
    role = role_of(name, tuple(tensor.shape), config, grown_shapes.get(name)).role
    return role is not Role.LINEAR and not (role is Role.VECTOR and name.endswith(".bias") and "norm" not in name)


def tile(small: int, large: int, blocks: tuple[int, ...] = ()) -> torch.Tensor:
    """[large, small]: each large unit is a copy of one small one; each of `blocks` is repeated as a whole."""
    return repeat_blocks(torch.eye(small), blocks or (small,), large // small)


def noisy(values: torch.Tensor, generator: torch.Generator) -> nn.Parameter:
    """A map with a little noise."""
    return nn.Parameter(values + MAP_NOISE * values.abs().max() * torch.randn(values.shape, generator=generator))


class Mango(nn.Module):
    """Small weights to large weights by a tensor ring over matrices, outputs, layers and inputs; rank 1 begins exactly
    as a copy, but for the noise.

    Parameters:
        model: the small model (float32), frozen.
        grown: the large one, of which the shapes count.
        plan: the small layer of each large one, where the maps begin, and the factors of norms and embeddings.
        rank: of the ring.
        seed: of the noise.
    """

    def __init__(
        self, model: PreTrainedModel, grown: PreTrainedModel, plan: GrowthPlan, rank: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        self.rank = rank
        shapes = {name: tuple(tensor.shape) for name, tensor in grown.state_dict().items()}
        self.generator = torch.Generator().manual_seed(seed)
        self.stacks = stacks_of(model, shapes, plan.config)
        self.layers_prefix = next(match["head"] for name in shapes if (match := LAYER.fullmatch(name)))
        self._copied = self._copies(model, shapes, plan)
        self.outputs, self.inputs, self.matrices = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        starts: dict[str, torch.Tensor] = {}  # the map that copies, [large, small], of every axis of units
        for stack in self.stacks:
            starts[stack.output] = tile(stack.weights.shape[2], stack.grown[0], stack.blocks)
            if not stack.is_bias:
                starts[stack.input] = tile(stack.weights.shape[3], stack.grown[1])
        for axis, start in starts.items():
            self.outputs[axis] = self._core(start)
            self.inputs[axis] = self._core(start * start.shape[1] / start.shape[0])  # sums over copies stay
        self.layers = self._core(torch.eye(int(plan.config.num_hidden_layers))[torch.tensor(plan.layer_sources)])
        self.classes: dict[str, list[int]] = defaultdict(list)
        for index, stack in enumerate(self.stacks):
            experts = stack.weights.shape[1]
            self.classes[f"{stack.output} from {stack.input} {experts}"].append(index)
        for name, members in self.classes.items():
            self.matrices[name] = self._core(torch.eye(len(members)))
        self._class_of = {index: name for name, members in self.classes.items() for index in members}

    def forward(self) -> dict[str, torch.Tensor]:
        """Every tensor of the large model by name, with a graph where it is made by maps."""
        tensors = dict(self._copied)
        for index, stack in enumerate(self.stacks):
            grown = self.grown_stack(index)
            if not stack.has_experts:
                grown = grown[:, 0]
            if stack.is_bias:
                grown = grown[..., 0]
            for layer, weights in enumerate(grown):
                tensors[f"{self.layers_prefix}{layer}{stack.tail}"] = weights
        return tensors

    def _copies(
        self, model: PreTrainedModel, shapes: dict[str, tuple[int, ...]], plan: GrowthPlan
    ) -> dict[str, torch.Tensor]:
        """Embeddings, head, routers and norms as `copy` makes them."""
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 3 or not is_copied(name, tensor, shapes, plan.config):
                continue
            role = role_of(name, tuple(tensor.shape), plan.config, shapes.get(name))
            wide = widened(name, tensor, role, plan.widening)
            copies |= {grown: wide for grown, _ in plan.names(name)}
        return copies

    def _core(self, start: torch.Tensor) -> nn.Parameter:
        """[R, large, small, R]: the map at rank (0, 0), a little noise elsewhere, so that every rank has a gradient."""
        core = torch.zeros(self.rank, *start.shape, self.rank)
        core[0, :, :, 0] = start
        return noisy(core, self.generator)

    def grown_stack(self, index: int) -> torch.Tensor:
        """The grown weights of one stack of experts in all layers, [L2, E, O2, I2]."""
        stack, name = self.stacks[index], self._class_of[index]
        members = self.classes[name]
        weights = torch.stack([self.stacks[member].weights for member in members])  # [B1, L1, E, O1, I1]
        row = self.matrices[name][:, members.index(index)]  # [R, B1, R], of one large matrix
        ring = torch.einsum("abr,bleoi->arleoi", row, weights)
        ring = torch.einsum("rpos,arleoi->aslepi", self.outputs[stack.output], ring)
        ring = torch.einsum("sklt,aslepi->atkepi", self.layers, ring)
        if stack.is_bias:  # no inputs: the ring closes on itself
            return torch.einsum("aakepi->kepi", ring)
        return torch.einsum("tqia,atkepi->kepq", self.inputs[stack.input], ring)


# -- fitting ----------------------------------------------------------------------------------------------------------


def trained_operator(
    model: PreTrainedModel, plan: GrowthPlan, growth: Growth
) -> tuple[PreTrainedModel, list[float], str]:
    """Fits an operator: the large model with its weights, the loss at each step, and a hash over tokens and weights of
    the trees.

    model: the small one, float32.

    Raises:
        ConfigError: a token beyond the model's vocabulary.
    """
    from transformers import AutoModelForCausalLM

    forests, count = growth.forests, growth.trees_per_step
    highest = max(int(forest.token_ids.max()) for forest in forests)
    if highest >= model.config.vocab_size:
        raise ConfigError(f"the data holds token {highest}, but vocab_size is {model.config.vocab_size}.")
    grown = AutoModelForCausalLM.from_config(plan.grown_config, dtype=torch.float32)
    operator = Mango(model, grown, plan, growth.rank, growth.seed)
    optimizer = torch.optim.Adam(operator.parameters(), lr=growth.learning_rate)
    engine, parameters = TreeEngine(grown, max_tokens=growth.max_tokens), dict(grown.named_parameters())
    losses, digest = [], hashlib.sha256()
    for step in range(growth.steps):
        tensors = _make_weights(operator, grown)
        trees = [forests[index % len(forests)] for index in range(step * count, (step + 1) * count)]
        losses.append(float(engine.step(trees, SFT()).loss))
        made = [key for key, each in parameters.items() if tensors[key].requires_grad and each.grad is not None]
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward([tensors[key] for key in made], [parameters[key].grad for key in made])
        optimizer.step()
    _make_weights(operator, grown)
    for forest in forests:
        for values in (forest.token_ids, forest.parent, forest.token_weights()):
            digest.update(values.tobytes())
    return grown.to(plan.grown_config.dtype or torch.float32), losses, digest.hexdigest()


def _make_weights(operator: Mango, grown: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Puts the weights that the operator makes into the large model; returns them with their graph."""
    tensors = operator()
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            parameter.copy_(tensors[name])
            parameter.grad = None
    return tensors
