"""One sequence of passes for ranks whose every pass is a collective operation (NumPy only).

training_passes, turns_of       the common turns of forwards and backwards, and what a rank runs at each
"""

from treewise.distributed.lockstep.merged_sequence import RankTurn, align, common_sequence
from treewise.distributed.lockstep.turns import Passes, forward_passes, training_passes, turns_of

__all__ = ["Passes", "RankTurn", "align", "common_sequence", "forward_passes", "training_passes", "turns_of"]
