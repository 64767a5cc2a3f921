"""The trees that the benchmark measures: shapes of real training, filled with random tokens from fixed seeds.

Tokens do not change what a step costs, so random ones of a recorded shape are as good as text and need no file. Each
workload exists in three sizes: `tiny` for tests, `cpu` for a small model on two cores, `full` for a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from treewise.bench.images import ImageFormat, random_png
from treewise.errors import ConfigError
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

SIZES = ("tiny", "cpu", "full")
FIRST_TOKEN = 3  # below are padding and the like in most vocabularies


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories to train on, and the budgets at which treewise cuts them unless others are given.

    processor: of their images.
    """

    name: str
    trajectories: Sequence[Trajectory]
    max_tokens: tuple[int, ...] = ()
    processor: object = None


class Sized(NamedTuple):
    """A value for each of `SIZES`."""

    tiny: object
    cpu: object
    full: object


@dataclass(frozen=True, slots=True)
class Kind:
    """A generator with its arguments, where they differ one for each size. budgets: where they are part of the kind.
    has_images: whether its trajectories hold images.
    """

    build: Callable[..., list[Trajectory]]
    arguments: dict[str, object]
    budgets: Sized | None = None
    has_images: bool = False


def make(name: str, size: str, vocabulary: int, seed: int = 0, images: ImageFormat | None = None) -> Workload:
    """One workload; the same at every call. images: how the model takes images; None: not at all.

    Raises:
        ConfigError: an unknown name or size, or a workload with images for a model that takes none.
    """
    for what, given, known in (("workload", name, KINDS), ("size", size, SIZES)):
        if given not in known:
            raise ConfigError(f"{what} {given!r} is unknown; choose one of {', '.join(known)}.")
    kind = KINDS[name]
    if kind.has_images and images is None:
        raise ConfigError(f"workload {name!r} holds images; choose a model of the Qwen-VL families, or its shape.")
    own = images if kind.has_images else None
    arguments = {key: getattr(each, size) if isinstance(each, Sized) else each for key, each in kind.arguments.items()}
    items = kind.build(Tokens(vocabulary, seed, own), **arguments)
    return Workload(name, items, getattr(kind.budgets, size, ()), None if own is None else own.processor)


class Tokens:
    """Random tokens, images and choices."""

    def __init__(self, vocabulary: int, seed: int, images: ImageFormat | None = None) -> None:
        self.vocabulary, self.rng, self.images = vocabulary, np.random.default_rng(seed), images

    def __call__(self, count: int) -> np.ndarray:
        """[count] int64; without the tokens that mark images."""
        last = self.vocabulary if self.images is None else min(self.vocabulary, self.images.first_special)
        return self.rng.integers(FIRST_TOKEN, last, count)

    def screen(self, width: int, height: int) -> tuple[np.ndarray, bytes]:
        """The placeholders of a new screenshot ([n] int64), and its file."""
        assert self.images is not None
        return self.images.placeholders(width, height), random_png(self.rng, width, height)


def group(tokens: Tokens, num_samples: int, prompt: int, shortest: int, longest: int) -> list[Trajectory]:
    """Samples of one prompt, as GRPO trains on them."""
    shared = tokens(prompt)
    lengths = tokens.rng.integers(shortest, longest + 1, num_samples).tolist()
    return [_trained_end(shared, tokens(length)) for length in lengths]


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
        items.append(_trained_end(context, np.concatenate([thought, text])))
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
    return [_trained_end(paths[0], path[len(paths[0]) :]) for path in paths[1:]]


def nested(tokens: Tokens, lengths: Sequence[int], forks: Sequence[int]) -> list[Trajectory]:
    """Prefixes within prefixes: `forks[i]` branches of `lengths[i + 1]` tokens leave each one of `lengths[i]`."""
    level = [tokens(lengths[0])]
    for length, count in zip(lengths[1:], forks, strict=True):
        level = [np.concatenate([above, tokens(length)]) for above in level for _ in range(count)]
    return [_trained_end(each[: lengths[0]], each[lengths[0] :]) for each in level]


def alone(tokens: Tokens, num_samples: int, shortest: int, longest: int) -> list[Trajectory]:
    """Samples that share nothing."""
    lengths = tokens.rng.integers(shortest, longest + 1, num_samples).tolist()
    return [Trajectory(tokens(length)) for length in lengths]


def browser(
    tokens: Tokens,
    num_tries: int,
    num_turns: int,
    window: int,
    system: int,
    note: int,
    action: int,
    screen: tuple[int, int],
) -> list[Trajectory]:
    """An agent in a browser: each call sees the last `window` screenshots, and trains the action that it answers with.

    Older screenshots become a note of a few tokens, so that the context forks at the first one that is dropped. Each
    further try goes on from a turn of an earlier one, whose page, history and screenshots it shares.
    """
    prompt, dropped, items = tokens(system), tokens(2), []
    tries: list[list[_Turn]] = []
    for index in range(num_tries):
        first = 0 if index == 0 else int(tokens.rng.integers(0, num_turns - 1))
        turns = list(tries[int(tokens.rng.integers(0, index))][: first + 1]) if index else []
        if turns:  # the same page, another action
            turns[-1] = turns[-1]._replace(action=tokens(action))
        while len(turns) < num_turns:
            turns.append(_Turn(tokens(note), *tokens.screen(*screen), tokens(action)))
        items += [_call(prompt, turns[: last + 1], window, dropped) for last in range(first, num_turns)]
        tries.append(turns)
    return items


class _Turn(NamedTuple):
    """Tokens of a turn's text, placeholders of its screenshot, the screenshot's file, tokens of the action."""

    note: np.ndarray
    placeholders: np.ndarray
    shot: bytes
    action: np.ndarray


def _call(prompt: np.ndarray, turns: Sequence[_Turn], window: int, dropped: np.ndarray) -> Trajectory:
    """The last of some turns, with what it saw."""
    parts, spans = [prompt], []
    for index, turn in enumerate(turns):
        parts.append(turn.note)
        if index >= len(turns) - window:
            start = sum(map(len, parts))
            spans.append(ImageSpan(turn.shot, start, start + len(turn.placeholders)))
            parts.append(turn.placeholders)
        else:
            parts.append(dropped)
        parts.append(turn.action)
    return replace(_trained_end(np.concatenate(parts[:-1]), parts[-1]), images=tuple(spans))


def _trained_end(context: np.ndarray, trained: np.ndarray) -> Trajectory:
    weights = np.repeat([0.0, 1.0], [len(context), len(trained)])
    return Trajectory(np.concatenate([context, trained]), weights)


def _kind(build: Callable[..., list[Trajectory]], budgets: Sized | None = None, /, **arguments: object) -> Kind:
    return Kind(build, arguments, budgets, has_images=build is browser)


_TURNS = {"think": Sized(3, 18, 200), "answer": Sized(2, 6, 80), "feedback": Sized(2, 3, 120)}
_SHORT_TURNS = {"think": Sized(3, 6, 100), "answer": Sized(2, 1, 40), "feedback": Sized(2, 1, 40)}
_TAU_TURNS = {"think": Sized(3, 15, 300), "answer": Sized(2, 8, 160), "feedback": Sized(2, 17, 340), "thinks": 0.7}
_SCREENS = {"window": 3, "note": Sized(3, 12, 40), "screen": Sized((56, 56), (252, 168), (1288, 728))}
_GROUP = {"shortest": Sized(4, 64, 512), "longest": Sized(8, 128, 1024)}
_ALONE = {"shortest": Sized(8, 128, 512), "longest": Sized(16, 512, 4096)}
_SEARCH = {"state": Sized(3, 8, 60), "max_depth": Sized(5, 24, 40)}
_RATIO = Sized((40, 12, 3), (324, 97, 24), (5000, 1500, 370))
_PAIR = Sized((29, 22), (289, 223), (11_571, 8_929))

# What each stands for: docs/benchmarks.md.
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
    "screenshots": _kind(
        browser,
        num_tries=Sized(4, 4, 8),
        num_turns=Sized(4, 7, 7),
        system=Sized(6, 64, 800),
        action=Sized(4, 32, 200),
        **_SCREENS,
    ),
}
