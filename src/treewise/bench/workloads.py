"""The trees that the benchmark measures: shapes of real training, filled with random tokens from fixed seeds.

Tokens do not change what a step costs, so random ones of a recorded shape are as good as text and need no file. Each
workload exists in three sizes: `tiny` for tests, `cpu` for a small model on two cores, `full` for a GPU.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treewise.errors import ConfigError, OutOfMemoryError, bytes_as_text
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SIZES = ("tiny", "cpu", "full")
FIRST_TOKEN = 3  # below are padding and the like in most vocabularies


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories to train on, and the budgets at which treewise cuts them unless others are given.

    processor: of their images. may_be_cut: whether a limit of seconds may take less of it: fewer trajectories.
    num_left_out: trajectories that it did not take.
    """

    name: str
    trajectories: Sequence[Trajectory]
    max_tokens: tuple[int, ...] = ()
    processor: object = None
    may_be_cut: bool = False
    num_left_out: int = 0


class Sized(NamedTuple):
    """A value for each of `SIZES`."""

    tiny: object
    cpu: object
    full: object


@dataclass(frozen=True, slots=True)
class Kind:
    """A generator with its arguments, where they differ one for each size. budgets: where they are part of the kind."""

    build: Callable[..., list[Trajectory]]
    arguments: dict[str, object]
    budgets: Sized | None = None


def make(name: str, size: str, vocabulary: int, seed: int = 0) -> Workload:
    """One workload; the same at every call.

    Raises:
        ConfigError: an unknown name or size.
    """
    for what, given, known in (("workload", name, KINDS), ("size", size, SIZES)):
        if given not in known:
            raise ConfigError(f"{what} {given!r} is unknown; choose one of {', '.join(known)}.")
    kind = KINDS[name]
    arguments = {key: getattr(each, size) if isinstance(each, Sized) else each for key, each in kind.arguments.items()}
    return Workload(name, kind.build(Tokens(vocabulary, seed), **arguments), getattr(kind.budgets, size, ()))


class Tokens:
    """Random tokens and choices."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.rng = vocabulary, np.random.default_rng(seed)

    def __call__(self, count: int) -> np.ndarray:
        """[count] int64, random token ids."""
        return self.rng.integers(FIRST_TOKEN, self.vocabulary, count)


def group(tokens: Tokens, num_samples: int, prompt: int, shortest: int, longest: int) -> list[Trajectory]:
    """Samples of one prompt, as GRPO trains on them."""
    shared = tokens(prompt)
    lengths = tokens.rng.integers(shortest, longest + 1, num_samples).tolist()
    return [trained_end(shared, tokens(length)) for length in lengths]


def caterpillar(
    tokens: Tokens,
    num_turns: int,
    system: int,
    think: int,
    answer: int,
    feedback: int,
    thinks: float = 1.0,
) -> list[Trajectory]:
    """An agent whose thinking is dropped from later context: one trajectory a turn, which trains thinking and answer.

    A long spine of answers and feedback, and at each turn a branch with the thinking of that turn. thinks: the
    probability that a turn has thinking; a turn without is contained in the next one.
    """
    context, items = tokens(system), []
    for _ in range(num_turns):
        text = tokens(answer)
        thought = tokens(think if tokens.rng.random() < thinks else 0)
        items.append(trained_end(context, np.concatenate([thought, text])))
        context = np.concatenate([context, text, tokens(feedback)])
    return items


def search(tokens: Tokens, prompt: int, num_states: int, state: int, max_depth: int) -> list[Trajectory]:
    """A depth-first search: every state that it visits is a trajectory, so most are contained in another."""
    paths, depth, above = [tokens(prompt)], [0], [-1]
    at = 0
    for _ in range(num_states):
        while depth[at] >= max_depth or (at > 0 and tokens.rng.random() < 0.35):
            at = above[at]  # a dead end: back up
        paths.append(np.concatenate([paths[at], tokens(state)]))
        depth.append(depth[at] + 1)
        above.append(at)
        at = len(paths) - 1
    return [trained_end(paths[0], path[len(paths[0]) :]) for path in paths[1:]]


def nested(tokens: Tokens, lengths: Sequence[int], forks: Sequence[int]) -> list[Trajectory]:
    """Prefixes within prefixes: `forks[i]` branches of `lengths[i + 1]` tokens leave each one of `lengths[i]`."""
    level = [tokens(lengths[0])]
    for length, count in zip(lengths[1:], forks, strict=True):
        level = [np.concatenate([above, tokens(length)]) for above in level for _ in range(count)]
    return [trained_end(each[: lengths[0]], each[lengths[0] :]) for each in level]


def alone(tokens: Tokens, num_samples: int, shortest: int, longest: int) -> list[Trajectory]:
    """Samples that share nothing."""
    lengths = tokens.rng.integers(shortest, longest + 1, num_samples).tolist()
    return [Trajectory(tokens(length)) for length in lengths]


def trained_end(context: np.ndarray, trained: np.ndarray) -> Trajectory:
    """Tokens of context, and trained ones after them."""
    weights = np.repeat([0.0, 1.0], [len(context), len(trained)])
    return Trajectory(np.concatenate([context, trained]), weights)


def _kind(build: Callable[..., list[Trajectory]], budgets: Sized | None = None, /, **arguments: object) -> Kind:
    return Kind(build, arguments, budgets)


_TURNS = {"think": Sized(3, 18, 200), "answer": Sized(2, 6, 80), "feedback": Sized(2, 3, 120)}
_SHORT_TURNS = {"think": Sized(3, 6, 100), "answer": Sized(2, 1, 40), "feedback": Sized(2, 1, 40)}
_TAU_TURNS = {"think": Sized(3, 15, 300), "answer": Sized(2, 8, 160), "feedback": Sized(2, 17, 340), "thinks": 0.7}
_GROUP = {"shortest": Sized(4, 64, 512), "longest": Sized(8, 128, 1024)}
_ALONE = {"shortest": Sized(8, 128, 512), "longest": Sized(16, 512, 4096)}
_SEARCH = {"state": Sized(3, 8, 60), "max_depth": Sized(5, 24, 40)}
_RATIO = Sized((40, 12, 3), (324, 97, 24), (5000, 1500, 370))
_PAIR = Sized((29, 22), (289, 223), (11_571, 8_929))

# What each stands for: benchmarks/reports/method.md.
KINDS: dict[str, Kind] = {
    "grpo": _kind(group, num_samples=8, prompt=Sized(24, 512, 512), **_GROUP),
    "turns-40": _kind(caterpillar, num_turns=Sized(6, 40, 40), system=Sized(8, 80, 1000), **_TURNS),
    "turns-100": _kind(caterpillar, num_turns=Sized(9, 100, 100), system=Sized(8, 48, 1000), **_SHORT_TURNS),
    "search": _kind(search, prompt=Sized(10, 120, 1000), num_states=Sized(12, 48, 160), **_SEARCH),
    "no-sharing": _kind(alone, num_samples=Sized(3, 8, 16), **_ALONE),
    "ratio-6.5": _kind(nested, lengths=_RATIO, forks=(4, 4)),
    "164k-83k": _kind(nested, Sized((40,), (410,), (16_384,)), lengths=_PAIR, forks=(8,)),
    "tau2": _kind(
        caterpillar,
        Sized((24,), (256,), (4_096, 16_384)),
        num_turns=Sized(4, 20, 20),
        system=Sized(20, 240, 4_800),
        **_TAU_TURNS,
    ),
}


# -- the model --------------------------------------------------------------------------------------------------------

Fields = dict[str, Any]  # of a configuration


def text_shape(hidden: int, inner: int, layers: int, heads: int, key_heads: int, head_size: int, tokens: int) -> Fields:
    """The fields of a decoder."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": tokens}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_size}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, is_tied: bool = True) -> tuple[str, Fields]:
    return "qwen3", {**text_shape(hidden, inner, layers, heads, 8, 128, 151_936), "tie_word_embeddings": is_tied}


def _mixture(text: Fields, inner: int, experts: int, chosen: int) -> tuple[str, Fields]:
    """Qwen3-MoE: of every layer's experts some are chosen for a token."""
    sizes = {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": chosen}
    return "qwen3_moe", {**text, **sizes, "norm_topk_prob": True}


def _hybrid(text: Fields, head_size: int, num_linear: int, times: int) -> tuple[str, Fields]:
    """Qwen3.5 of text: some gated delta nets before each layer of attention."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    sizes = {"linear_key_head_dim": head_size, "linear_value_head_dim": head_size}
    kinds = (["linear_attention"] * num_linear + ["full_attention"]) * times
    return "qwen3_5_text", {**text, **heads, **sizes, "layer_types": kinds}


_TINY: Fields = {**text_shape(32, 96, 2, 2, 2, 16, 64), "tie_word_embeddings": True}
_SMALL: Fields = {**text_shape(384, 1152, 8, 6, 2, 64, 8_192), "tie_word_embeddings": True}
# Names to the model type and the fields of its configuration: Qwen3's from its published config.json files.
SHAPES: dict[str, tuple[str, Fields]] = {
    "qwen3-tiny": ("qwen3", _TINY),
    "hybrid-tiny": _hybrid(_TINY, 8, 1, 1),
    "qwen3-17m": ("qwen3", _SMALL),
    "hybrid-18m": _hybrid(_SMALL, 32, 3, 2),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, is_tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, is_tied=False),
    "mixture-tiny": _mixture(_TINY, 24, 8, 2),
    "qwen3-30b-a3b": _mixture(text_shape(2048, 6144, 48, 32, 4, 128, 151_936), 768, 128, 8),
}
CUT_TO_FIT = {"qwen3-30b-a3b": 0.6}  # of such a shape as many layers as take this part of the free memory


def random_model(name: str, dtype: "torch.dtype", device: "torch.device") -> "PreTrainedModel":
    """A model of a shape with random weights, in training mode; the same at every call. Of a shape in `CUT_TO_FIT` as
    many layers as fit; a line on stderr names them.

    Raises:
        ConfigError: an unknown shape.
        OutOfMemoryError: weights and gradients that do not fit in the free memory.
    """
    import torch
    from transformers import AutoConfig

    from treewise.nn.model_flops import auto_class
    from treewise.nn.platform.memory import free_bytes

    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is unknown; choose one of {', '.join(SHAPES)}.")
    kind, fields = SHAPES[name]
    if "text_config" not in fields:
        fields = {**fields, "max_position_embeddings": 262_144, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **fields)
    model_class = auto_class(config)

    def num_parameters(num_layers: int) -> int:
        config.num_hidden_layers = num_layers
        with torch.device("meta"):
            shapes: PreTrainedModel = model_class.from_config(config)
            return sum(parameter.numel() for parameter in shapes.parameters())

    num_layers, free, bytes_each = config.num_hidden_layers, free_bytes(device), 2 * dtype.itemsize  # and its gradient
    if name in CUT_TO_FIT:
        one, two = num_parameters(1), num_parameters(2)
        room = CUT_TO_FIT[name] * free / bytes_each - one
        fitting = min(num_layers, max(1, 1 + int(room // (two - one))))
        sys.stderr.write(f"{name}: {fitting} of {num_layers} layers fit into {bytes_as_text(free)}\n")
        num_layers = fitting
    needed = bytes_each * num_parameters(num_layers)
    if needed > free:
        raise OutOfMemoryError(
            f"weights and gradients take {bytes_as_text(needed)}, of which {bytes_as_text(free)} are free."
        )
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = model_class.from_config(config, dtype=dtype)
    model.train()
    return model
