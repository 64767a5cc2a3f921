"""The trees that the benchmark measures: shapes of real training, filled with random tokens from fixed seeds.

Tokens do not change what a step costs, so random ones of a recorded shape are as good as text and need no file. Each
workload exists in three sizes: `tiny` for tests, `cpu` for a small model on two cores, `full` for a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treewise.bench.images import ImageFormat, random_png
from treewise.errors import ConfigError
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

SIZES = ("tiny", "cpu", "full")
FIRST_TOKEN = 3  # below are padding and the like in most vocabularies

Build = Callable[..., list[Trajectory]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories to train on, and the budgets at which treewise cuts them unless others are given.

    processor: of their images.
    """

    name: str
    trajectories: Sequence[Trajectory]
    max_tokens: tuple[int, ...] = ()
    processor: Any = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A generator with its arguments in each size. budgets: those of each size, where they are part of the kind.
    has_images: whether its trajectories hold images.
    """

    summary: str
    build: Build
    sizes: dict[str, dict[str, Any]]
    budgets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    has_images: bool = False


def make(name: str, size: str, vocabulary: int, seed: int = 0, images: ImageFormat | None = None) -> Workload:
    """One workload; the same at every call. images: how the model takes images; None: not at all.

    Raises:
        ConfigError: an unknown name or size, or a workload with images for a model that takes none.
    """
    if name not in KINDS:
        raise ConfigError(f"workload {name!r} is unknown; choose one of {', '.join(KINDS)}.")
    if size not in SIZES:
        raise ConfigError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}.")
    kind = KINDS[name]
    if kind.has_images and images is None:
        raise ConfigError(f"workload {name!r} holds images; choose a model of the Qwen-VL families, or its shape.")
    items = kind.build(Tokens(vocabulary, seed, images if kind.has_images else None), **kind.sizes[size])
    return Workload(name, items, kind.budgets.get(size, ()), images.processor if images and kind.has_images else None)


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
    num_samples: int = 1,
    thinks: float = 1.0,
) -> list[Trajectory]:
    """Agents whose thinking is dropped from later context: one trajectory a turn, which trains thinking and answer.

    A long spine of answers and feedback, and at each turn a branch with the thinking of that turn. thinks: the
    probability that a turn has thinking; a turn without is contained in the next one.
    """
    prompt, items = tokens(system), []
    for _ in range(num_samples):
        context = prompt
        for _ in range(num_turns):
            text = tokens(answer)
            thought = tokens(think if tokens.rng.random() < thinks else 0)
            items.append(_trained_end(context, np.concatenate([thought, text])))
            context = np.concatenate([context, text, tokens(feedback)])
    return items


def search(tokens: Tokens, prompt: int, num_states: int, state: int, max_depth: int) -> list[Trajectory]:
    """A depth-first search: every state that it visits is a trajectory, so most are contained in another."""
    paths = [tokens(prompt)]
    depth = [0]
    items: list[Trajectory] = []
    at = 0
    above = [-1]
    for _ in range(num_states):
        while depth[at] >= max_depth or (at > 0 and tokens.rng.random() < 0.35):
            at = above[at]  # a dead end: back up
        paths.append(np.concatenate([paths[at], tokens(state)]))
        depth.append(depth[at] + 1)
        above.append(at)
        at = len(paths) - 1
        items.append(_trained_end(paths[0], paths[at][len(paths[0]) :]))
    return items


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
    width: int,
    height: int,
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
            turns[-1] = _Turn(turns[-1].note, *turns[-1].screen, tokens(action))
        while len(turns) < num_turns:
            turns.append(_Turn(tokens(note), *tokens.screen(width, height), tokens(action)))
        items += [_call(prompt, turns[: last + 1], window, dropped) for last in range(first, num_turns)]
        tries.append(turns)
    return items


@dataclass(frozen=True, slots=True)
class _Turn:
    """Tokens of a turn's text, placeholders of its screenshot, the screenshot's file, tokens of the action."""

    note: np.ndarray
    placeholders: np.ndarray
    shot: bytes
    action: np.ndarray

    @property
    def screen(self) -> tuple[np.ndarray, bytes]:
        return self.placeholders, self.shot


def _call(prompt: np.ndarray, turns: Sequence[_Turn], window: int, dropped: np.ndarray) -> Trajectory:
    """The last of some turns, with what it saw."""
    parts, spans, length = [prompt], [], len(prompt)
    for index, turn in enumerate(turns):
        is_seen = index >= len(turns) - window
        own = [turn.note, turn.placeholders if is_seen else dropped]
        length += len(turn.note)
        if is_seen:
            spans.append(ImageSpan(turn.shot, length, length + len(turn.placeholders)))
        own += [turn.action] if index < len(turns) - 1 else []
        parts += own
        length += sum(map(len, own[1:]))
    context, answer = np.concatenate(parts), turns[-1].action
    return replace(_trained_end(context, answer), images=tuple(spans))


def _trained_end(context: np.ndarray, trained: np.ndarray) -> Trajectory:
    weights = np.repeat([0.0, 1.0], [len(context), len(trained)])
    return Trajectory(np.concatenate([context, trained]), weights)


def _sizes(tiny: dict[str, Any], cpu: dict[str, Any], full: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    return {"tiny": tiny, "cpu": cpu, "full": cpu if full is None else full}


_SCREENS = {"num_tries": 4, "num_turns": 7, "window": 3}
_STRIPPED = {"think": 3, "answer": 2, "feedback": 2}

KINDS: dict[str, Kind] = {
    "grpo": Kind(
        "8 samples of a prompt of 512 tokens",
        group,
        _sizes(
            {"num_samples": 8, "prompt": 24, "shortest": 4, "longest": 8},
            {"num_samples": 8, "prompt": 512, "shortest": 64, "longest": 128},
            {"num_samples": 8, "prompt": 512, "shortest": 512, "longest": 1024},
        ),
    ),
    "turns-40": Kind(
        "an agent of 40 turns whose thinking is dropped from later context",
        caterpillar,
        _sizes(
            {"num_turns": 6, "system": 8, **_STRIPPED},
            {"num_turns": 40, "system": 80, "think": 18, "answer": 6, "feedback": 3},
            {"num_turns": 40, "system": 1000, "think": 200, "answer": 80, "feedback": 120},
        ),
    ),
    "turns-100": Kind(
        "the same over 100 turns",
        caterpillar,
        _sizes(
            {"num_turns": 9, "system": 8, **_STRIPPED},
            {"num_turns": 100, "system": 48, "think": 6, "answer": 1, "feedback": 1},
            {"num_turns": 100, "system": 1000, "think": 100, "answer": 40, "feedback": 40},
        ),
    ),
    "search": Kind(
        "a deep depth-first search, of which every state is a trajectory",
        search,
        _sizes(
            {"prompt": 10, "num_states": 12, "state": 3, "max_depth": 5},
            {"prompt": 120, "num_states": 48, "state": 8, "max_depth": 24},
            {"prompt": 1000, "num_states": 160, "state": 60, "max_depth": 40},
        ),
    ),
    "no-sharing": Kind(
        "samples that share nothing, which must cost no more than flat",
        alone,
        _sizes(
            {"num_samples": 3, "shortest": 8, "longest": 16},
            {"num_samples": 8, "shortest": 128, "longest": 512},
            {"num_samples": 16, "shortest": 512, "longest": 4096},
        ),
    ),
    "ratio-6.5": Kind(
        "prefixes within prefixes at a share ratio of 6.5, as Tree Training (arXiv 2511.00413) reports it",
        nested,
        _sizes(
            {"lengths": (40, 12, 3), "forks": (4, 4)},
            {"lengths": (324, 97, 24), "forks": (4, 4)},
            {"lengths": (5000, 1500, 370), "forks": (4, 4)},
        ),
    ),
    "164k-83k": Kind(
        "164k flat and 83k tree tokens at a budget (arXiv 2511.00413); smaller in the same proportions on a CPU",
        nested,
        _sizes(
            {"lengths": (29, 22), "forks": (8,)},
            {"lengths": (289, 223), "forks": (8,)},
            {"lengths": (11_571, 8_929), "forks": (8,)},
        ),
        {"tiny": (40,), "cpu": (410,), "full": (16_384,)},
    ),
    "tau2": Kind(
        "an agent behind a system prompt of 4.8k tokens, thinking dropped, 16k of context (as in arXiv 2602.00482)",
        caterpillar,
        _sizes(
            {"num_turns": 4, "system": 20, "think": 3, "answer": 2, "feedback": 2, "thinks": 0.7},
            {"num_turns": 20, "system": 240, "think": 15, "answer": 8, "feedback": 17, "thinks": 0.7},
            {"num_turns": 20, "system": 4_800, "think": 300, "answer": 160, "feedback": 340, "thinks": 0.7},
        ),
        {"tiny": (24,), "cpu": (256,), "full": (4_096, 16_384)},
    ),
    "screenshots": Kind(
        "an agent in a browser with the last three screenshots in its context, and tries that begin on the way",
        browser,
        _sizes(
            {**_SCREENS, "num_turns": 4, "system": 6, "note": 3, "action": 4, "width": 56, "height": 56},
            {**_SCREENS, "system": 64, "note": 12, "action": 32, "width": 252, "height": 168},
            {**_SCREENS, "num_tries": 8, "system": 800, "note": 40, "action": 200, "width": 1288, "height": 728},
        ),
        has_images=True,
    ),
}
