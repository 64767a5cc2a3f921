"""Advantages from rewards: groups, trees and turns, in NumPy alone.

Each function takes trajectories with `reward`, `group` and `rollout`, and gives new trajectories with `advantages`
(and `rollout_weight`), with a report of what could not be compared. What is counted is the *rollout*: trajectories that
share `rollout` within one `group` are rows of one rollout, with one reward; a trajectory without a rollout id is its
own. So baselines, deviations and counts do not depend on how a rollout was cut into rows.
"""

from treewise.advantages.group import (
    group_normalized,
    leave_one_out,
    mean_centered,
    per_turn,
    spread_over_turns,
    turns_of,
)
from treewise.advantages.rollout_table import AdvantageReport, Credited, with_rollout_weights
from treewise.advantages.tree_rules import (
    inter_intra,
    node_value,
    segment_values,
    sibling_relative,
    tree_path_mean,
    treerl,
    value_steps,
)

__all__ = [
    "AdvantageReport",
    "Credited",
    "group_normalized",
    "inter_intra",
    "leave_one_out",
    "mean_centered",
    "node_value",
    "per_turn",
    "segment_values",
    "sibling_relative",
    "spread_over_turns",
    "tree_path_mean",
    "treerl",
    "turns_of",
    "value_steps",
    "with_rollout_weights",
]
