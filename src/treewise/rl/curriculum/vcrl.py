"""`vcrl`: groups of low variance are left out and replaced by items that had a high one (VCRL, 2509.19803).

With k successes of G rollouts the variance is estimated as `k (G - k) / (G (G - 1))`; its largest value is
`G / (4 (G - 1))` for even G and `(G + 1) / (4 G)` for odd G; their quotient p is compared with a threshold. Items above
it enter a bank of bounded size with a priority, a moving average of p. The replacements are sampled anew by the present
policy, and count as generated tokens; where the bank is empty the iteration is smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treewise.rl.branching.protocol import require
from treewise.rl.curriculum.protocol import Chosen, Memory, Outcome, View


@dataclass(frozen=True, slots=True, kw_only=True)
class VcrlSettings:
    """threshold: of the normalised variance, 0..1. momentum: of a priority's earlier value. bank_size: items kept;
    those of the lowest priority go first. refills: times that missing groups are replaced from the bank in an
    iteration.
    """

    threshold: float = 0.3
    momentum: float = 0.5
    bank_size: int = 1024
    refills: int = 1

    def __post_init__(self) -> None:
        require(0 < self.threshold <= 1, f"threshold={self.threshold} must lie in 0..1, above 0.")
        require(0 <= self.momentum < 1, f"momentum={self.momentum} must lie in 0..1, below 1.")
        require(self.bank_size >= 1, f"bank_size={self.bank_size} must be at least 1.")
        require(self.refills >= 0, f"refills={self.refills} must not be negative.")


def normalised_variance(num_successes: int, num_rollouts: int) -> float:
    """The unbiased variance of a group's outcomes over its largest value, 0..1; 0 for fewer than 2 rollouts."""
    k, g = num_successes, num_rollouts
    if g < 2:
        return 0.0
    largest = g / (4 * (g - 1)) if g % 2 == 0 else (g + 1) / (4 * g)
    return k * (g - k) / (g * (g - 1)) / largest


def is_varied(outcome: Outcome, settings: VcrlSettings) -> bool:
    """Whether a group's variance reaches the threshold."""
    return normalised_variance(outcome.num_successes, len(outcome.rewards)) >= settings.threshold


def from_bank(view: View, count: int, _settings: VcrlSettings) -> Chosen:
    """The items of the highest priority in the bank; fewer where it holds fewer."""
    bank = view.memory.get("bank", {})
    ranked = sorted((-priority, int(index)) for index, priority in bank.items() if int(index) not in view.taken)
    return Chosen([index for _, index in ranked[:count]], view.position)


def bank_after(memory: Memory, outcomes: Sequence[Outcome], _num_kept: int, settings: VcrlSettings) -> dict[str, Any]:
    """The bank with the items of an iteration: new priorities above the threshold, others leave."""
    bank = dict(memory.get("bank", {}))
    for each in outcomes:
        before = bank.pop(str(each.index), None)
        if is_varied(each, settings):
            score = normalised_variance(each.num_successes, len(each.rewards))
            keep = settings.momentum
            bank[str(each.index)] = score if before is None else keep * before + (1 - keep) * score
    kept = sorted(bank, key=lambda index: (-bank[index], int(index)))[: settings.bank_size]
    return {"bank": {index: bank[index] for index in sorted(kept, key=int)}}
