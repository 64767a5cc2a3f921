"""One sequence of passes for ranks whose every pass is a collective operation (NumPy only).

training_passes, turns_of       the common turns of forwards and backwards, and what a rank runs at each
"""

from treewise.distributed.lockstep.common_sequence import Slot, merged, slots_of
from treewise.distributed.lockstep.turns import Passes, equal_schedules, training_passes, turns_of, visiting_passes

__all__ = [
    "Passes",
    "Slot",
    "equal_schedules",
    "merged",
    "slots_of",
    "training_passes",
    "turns_of",
    "visiting_passes",
]
