"""Settings drawn together, trained as trees and as each trajectory alone, and compared: `make crossings`.

    python -m tests.crossings --minutes 10 --seed 1

Faults hide where features meet. Every two values of two settings that may stand together meet within 2,000 draws; then
chance alone draws. A training run takes two optimizer steps, by `engine.step`, a loss on `engine.logprobs` or on TRL's
fused head, or `TreeTrainer`. Beside it each trajectory goes through the model's own forward alone, in its own dtype and
in float64, with losses written from their formulas. What is allowed is 8 times (bfloat16: 3 times) the distance of flat
training in its own dtype from float64, tensor by tensor. An online run is held against a plain loop on the rollouts
that it recorded, with credit by comparing prefixes, and each recorded log-prob against the distribution of its draw.

`--settings replay=exact,by_tokens` draws among these values of a setting.

Counted are draws that are equal, refused (by an error of ours), impossible (transformers, PEFT or torch refuse them
without treewise, or flat training is itself wrong), and wrong: printed, and shrunk to the fewest settings that leave
them wrong. `make test` judges the same 10 draws each time, `make test-all` 40.
"""

from tests.crossings import online, sides, space
from tests.crossings.drawing import Crossings, Outcome


def training(seed: int = 0) -> Crossings:
    """The crossings of training runs; the seed chooses families."""
    return Crossings(space.settings_of(seed), space.RULES, sides.check, space.RARITY)


def online_loop() -> Crossings:
    """The crossings of runs that sample their rollouts."""
    return Crossings(online.SETTINGS, online.RULES, online.check)


def judged(**changes: object) -> Outcome:
    """What is found of a training run with some settings, and defaults."""
    space = training()
    draw = {**space.defaults, "seed": 1, **changes}
    assert space.allows(draw)
    return space.judge(draw)
